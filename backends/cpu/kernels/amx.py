"""Tiles of AMX as kernels use them: the processor's, or emulated in memory of the thread (`processor.tiles`).

The emulation rounds where the processor does: after each product that is added.  It keeps numbers below the smallest
normal float32, which the processor takes for zero.
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
    """Operations on registers; all take the address of `amx.NBYTES` of the thread first.

    ``configure(memory)`` comes first, ``release(memory)`` last.  ``clear[t](memory)``; ``load[t](memory, p, step)`` and
    ``store[t]``: 16 rows `step` bytes apart; ``pass_by[t]`` loads what need not stay in the first cache;
    ``multiply(c, x, w)`` is an operation ``(memory)``.
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
    """Those of this processor; emulated ones where it has none."""
    every = range(REGISTERS)
    if processor.tiles() == processor.AMX:
        clears, loads = tuple(map(amx.clear, every)), tuple(map(amx.load_tile, every))
        passing, stores = tuple(map(amx.pass_tile_by, every)), tuple(map(amx.store_tile, every))
        return Tiles(amx.configure, amx.release, clears, loads, passing, stores, amx.multiply)
    clear, load_rows, store_rows = (tuple(map(make, every)) for make in (_clear, _load, _store))
    return Tiles(nothing, nothing, clear, load_rows, load_rows, store_rows, _multiply)


@part
def nothing(memory):
    return 0


def _clear(tile: int) -> Part:
    first = tile * TILE

    def clear(memory):
        for row in range(0, TILE, WIDTH):
            store(memory + first + row, zeros())

    return part(clear)


def _load(tile: int) -> Part:
    first = tile * TILE

    def load_rows(memory, p, step):
        for row in range(HEIGHT):
            store(memory + first + row * WIDTH, load(p + row * step))

    return part(load_rows)


def _store(tile: int) -> Part:
    first = tile * TILE

    def store_rows(memory, p, step):
        for row in range(HEIGHT):
            store(p + row * step, load(memory + first + row * WIDTH))

    return part(store_rows)


@cache
def _multiply(c: int, x: int, w: int) -> Part:
    sums, rows, pairs = c * TILE, x * TILE, w * TILE

    def multiply(memory):
        for row in range(0, TILE, WIDTH):
            total = load(memory + sums + row)
            for k in range(HEIGHT):
                value, weight = splat_int(load_int(memory + rows + row + 4 * k)), load_ints(memory + pairs + k * WIDTH)
                total = fma(first_of_pairs(value), first_of_pairs(weight), total)
                total = fma(second_of_pairs(value), second_of_pairs(weight), total)
            store(memory + sums + row, total)

    return part(multiply)
