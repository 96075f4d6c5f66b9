"""Operations on AMX tiles: of the processor, or emulated in memory of the thread (`find_native_or_emulated_amx`).

The emulation rounds as the processor does: after each added product. Difference: it keeps subnormal numbers, which the
processor replaces by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from .....graph.lazy_dataclass import dataclass
from ... import target_cpu
from ...compilation.compiler import Subroutine, subroutine
from ...simd import amx
from ...simd.amx import REGISTER_COUNT, TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS
from ...simd.bf16_pairs import extract_first_of_pairs, extract_second_of_pairs
from ...simd.vectors import Intrinsic, fma, load, load_int, load_ints, splat_int, store, zeros

TileOperation = Subroutine | Intrinsic


@dataclass(frozen=True, slots=True)
class AmxTileOperations:
    """Operations on AMX tile registers, of the processor or emulated.

    The first argument of each operation is `memory`, `amx.TILE_MEMORY_BYTES` bytes of scratch of the thread.

    Attributes:
        configure: Called with ``(memory)`` first.
        release: Called with ``(memory)`` last.
        clear: ``clear[t](memory)`` sets register t to 0.
        load: ``load[t](memory, p, step)`` loads 16 rows that are `step` bytes apart.
        load_streaming: As `load`, for data that need not stay in the first cache.
        store: ``store[t](memory, p, step)`` stores 16 rows.
        multiply: ``multiply(c, x, w)`` returns the operation ``(memory)``: register c += x times w.
    """

    configure: TileOperation
    release: TileOperation
    clear: tuple[TileOperation, ...]
    load: tuple[TileOperation, ...]
    load_streaming: tuple[TileOperation, ...]
    store: tuple[TileOperation, ...]
    multiply: Callable[[int, int, int], TileOperation]


@cache
def select_amx_tile_operations() -> AmxTileOperations:
    """Select the AMX tile operations of this processor, or the emulated ones if it has none."""
    every = range(REGISTER_COUNT)
    if target_cpu.find_native_or_emulated_amx() == target_cpu.AMX:
        clears, loads = tuple(map(amx.make_tile_clear, every)), tuple(map(amx.make_tile_load, every))
        passing, stores = tuple(map(amx.make_streaming_tile_load, every)), tuple(map(amx.make_tile_store, every))
        return AmxTileOperations(
            amx.configure_full_size_tiles,
            amx.release_tiles,
            clears,
            loads,
            passing,
            stores,
            amx.make_add_bf16_tile_product,
        )
    clear, load_rows, store_rows = (
        tuple(map(make, every))
        for make in (_make_emulated_tile_clear, _make_emulated_tile_load, _make_emulated_tile_store)
    )
    return AmxTileOperations(
        skip_tile_configuration,
        skip_tile_configuration,
        clear,
        load_rows,
        load_rows,
        store_rows,
        _make_emulated_bf16_tile_multiply,
    )


@subroutine
def skip_tile_configuration(memory):
    """Do nothing and return 0, as `configure` and `release` of emulated tile registers."""
    return 0


def _make_emulated_tile_clear(tile: int) -> Subroutine:
    """Make the emulated operation that clears a tile register."""
    first = tile * TILE_BYTES

    def clear(memory):
        for row in range(0, TILE_BYTES, TILE_ROW_BYTES):
            store(memory + first + row, zeros())

    return subroutine(clear)


def _make_emulated_tile_load(tile: int) -> Subroutine:
    """Make the emulated operation that loads a tile register."""
    first = tile * TILE_BYTES

    def load_rows(memory, p, step):
        for row in range(TILE_ROWS):
            store(memory + first + row * TILE_ROW_BYTES, load(p + row * step))

    return subroutine(load_rows)


def _make_emulated_tile_store(tile: int) -> Subroutine:
    """Make the emulated operation that stores a tile register."""
    first = tile * TILE_BYTES

    def store_rows(memory, p, step):
        for row in range(TILE_ROWS):
            store(p + row * step, load(memory + first + row * TILE_ROW_BYTES))

    return subroutine(store_rows)


@cache
def _make_emulated_bf16_tile_multiply(c: int, x: int, w: int) -> Subroutine:
    """Make the emulated product of tile registers: c += x times w, in pairs of bfloat16."""
    sums, rows, pairs = c * TILE_BYTES, x * TILE_BYTES, w * TILE_BYTES

    def multiply(memory):
        for row in range(0, TILE_BYTES, TILE_ROW_BYTES):
            total = load(memory + sums + row)
            for k in range(TILE_ROWS):
                value = splat_int(load_int(memory + rows + row + 4 * k))
                weight = load_ints(memory + pairs + k * TILE_ROW_BYTES)
                # sums[row, n] += x[row, 2 k] * w[2 k, n] + x[row, 2 k + 1] * w[2 k + 1, n]
                total = fma(extract_first_of_pairs(value), extract_first_of_pairs(weight), total)
                total = fma(extract_second_of_pairs(value), extract_second_of_pairs(weight), total)
            store(memory + sums + row, total)

    return subroutine(multiply)
