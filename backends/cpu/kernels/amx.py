"""Operations on AMX tiles: of the processor, or emulated in memory of the thread (`processor.tiles`).

The emulation rounds as the processor does: after each added product. Difference: it keeps subnormal numbers, which the
processor replaces by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ....graph.lazy_dataclass import dataclass
from .. import processor
from ..compiler import Part, part
from ..simd import amx
from ..simd.amx import HEIGHT, REGISTERS, TILE, WIDTH
from ..simd.bf16 import first_of_pairs, second_of_pairs
from ..simd.vectors import Intrinsic, fma, load, load_int, load_ints, splat_int, store, zeros

Operation = Part | Intrinsic


@dataclass(frozen=True, slots=True)
class Tiles:
    """Operations on tile registers. The first argument of each is `memory`, `amx.NBYTES` of the thread.

    Attributes:
        configure: Called with ``(memory)`` first.
        release: Called with ``(memory)`` last.
        clear: ``clear[t](memory)`` sets register t to 0.
        load: ``load[t](memory, p, step)`` loads 16 rows that are `step` bytes apart.
        load_streaming: As `load`, for data that need not stay in the first cache.
        store: ``store[t](memory, p, step)`` stores 16 rows.
        multiply: ``multiply(c, x, w)`` returns the operation ``(memory)``: register c += x times w.
    """

    configure: Operation
    release: Operation
    clear: tuple[Operation, ...]
    load: tuple[Operation, ...]
    pass_by: tuple[Operation, ...]
    store: tuple[Operation, ...]
    multiply: Callable[[int, int, int], Operation]


@cache
def tiles() -> Tiles:
    """Return the tile operations of this processor; emulated ones if it has none."""
    every = range(REGISTERS)
    if processor.tiles() == processor.AMX:
        clears, loads = tuple(map(amx.clear, every)), tuple(map(amx.load_tile, every))
        passing, stores = tuple(map(amx.pass_tile_by, every)), tuple(map(amx.store_tile, every))
        return Tiles(amx.configure, amx.release, clears, loads, passing, stores, amx.multiply)
    clear, load_rows, store_rows = (tuple(map(make, every)) for make in (_clear, _load, _store))
    return Tiles(nothing, nothing, clear, load_rows, load_rows, store_rows, _multiply)


@part
def nothing(memory):
    """Do nothing. It replaces `configure` and `release` without tile registers."""
    return 0


def _clear(tile: int) -> Part:
    """Make the emulated operation that clears a tile register."""
    first = tile * TILE

    def clear(memory):
        for row in range(0, TILE, WIDTH):
            store(memory + first + row, zeros())

    return part(clear)


def _load(tile: int) -> Part:
    """Make the emulated operation that loads a tile register."""
    first = tile * TILE

    def load_rows(memory, p, step):
        for row in range(HEIGHT):
            store(memory + first + row * WIDTH, load(p + row * step))

    return part(load_rows)


def _store(tile: int) -> Part:
    """Make the emulated operation that stores a tile register."""
    first = tile * TILE

    def store_rows(memory, p, step):
        for row in range(HEIGHT):
            store(p + row * step, load(memory + first + row * WIDTH))

    return part(store_rows)


@cache
def _multiply(c: int, x: int, w: int) -> Part:
    """Make the emulated product of tile registers: c += x times w, in pairs of bfloat16."""
    sums, rows, pairs = c * TILE, x * TILE, w * TILE

    def multiply(memory):
        for row in range(0, TILE, WIDTH):
            total = load(memory + sums + row)
            for k in range(HEIGHT):
                value, weight = splat_int(load_int(memory + rows + row + 4 * k)), load_ints(memory + pairs + k * WIDTH)
                # sums[row, n] += x[row, 2 k] * w[2 k, n] + x[row, 2 k + 1] * w[2 k + 1, n]
                total = fma(first_of_pairs(value), first_of_pairs(weight), total)
                total = fma(second_of_pairs(value), second_of_pairs(weight), total)
            store(memory + sums + row, total)

    return part(multiply)
