"""AMX tile operations: eight tile registers of 16 rows of 64 bytes, and bfloat16 products with float32 sums.

The intrinsic ``make_add_bf16_tile_product(c, x, w)`` multiplies 16 rows of 32 activations in tile x by 32 columns of
16 weight rows in tile w. It adds the products to tile c, 16 rows of 16 float32. Tile w holds pairs: row k of the tile
has the columns 2k and 2k + 1 of every weight row.

>>> import numpy as np
>>> x, w = np.arange(64.0).reshape(2, 32), np.arange(96.0).reshape(3, 32)  # 2 rows of activations, 3 of a weight
>>> pairs = w.reshape(3, 16, 2).transpose(1, 0, 2)
>>> bool(np.all(np.einsum("ikp,knp->in", x.reshape(2, 16, 2), pairs) == x @ w.T))
True

Every operation takes the address of `TILE_MEMORY_BYTES` bytes of memory of the thread. `configure_full_size_tiles`
writes the register shapes to that memory. On processors without AMX, that memory holds the tiles (`kernels.amx`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from .vectors import ADDRESS, NOTHING, Intrinsic, intrinsic

TILE_ROWS, TILE_ROW_BYTES = 16, 64
"""Rows of a tile register, and bytes of a row."""
TILE_BYTES, REGISTER_COUNT = TILE_ROWS * TILE_ROW_BYTES, 8
TILE_MEMORY_BYTES = REGISTER_COUNT * TILE_BYTES + 64

_i8, _i64 = map(ir.IntType, (8, 64))
_CHAR = _i8.as_pointer()
PALETTE = [1, *[0] * 15, *[TILE_ROW_BYTES, 0] * REGISTER_COUNT, *[0] * 16, *[TILE_ROWS] * REGISTER_COUNT, *[0] * 8]
"""The tile configuration that ``ldtilecfg`` reads: the shapes of all tile registers."""


def _call(b: Any, name: str, *values: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [v.type for v in values])
    b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), values)


@intrinsic(NOTHING, ADDRESS)
def configure_full_size_tiles(b, memory):
    """Configure all AMX tile registers as 16 rows of 64 bytes."""
    palette = ir.Constant(ir.VectorType(_i8, len(PALETTE)), PALETTE)
    to = b.add(memory, ir.Constant(_i64, REGISTER_COUNT * TILE_BYTES))
    b.store(palette, b.inttoptr(to, palette.type.as_pointer()), align=1)
    _call(b, "llvm.x86.ldtilecfg", b.inttoptr(to, _CHAR))


@intrinsic(NOTHING, ADDRESS)
def release_tiles(b, memory):
    """Release the AMX tile registers, so that the operating system no longer saves them."""
    _call(b, "llvm.x86.tilerelease")


@cache
def make_tile_clear(tile: int) -> Intrinsic:
    """Make the intrinsic ``(memory)`` that fills tile register `tile` with zeros."""
    return intrinsic(NOTHING, ADDRESS)(lambda b, memory: _call(b, "llvm.x86.tilezero", ir.Constant(_i8, tile)))


def _make_tile_move(instruction: str, tile: int) -> Intrinsic:
    @intrinsic(NOTHING, *[ADDRESS] * 3)
    def move_tile(b, memory, p, step):
        _call(b, instruction, ir.Constant(_i8, tile), b.inttoptr(p, _CHAR), step)

    return move_tile


@cache
def make_tile_load(tile: int) -> Intrinsic:
    """Make the intrinsic ``(memory, p, step)`` that loads 16 rows, `step` bytes apart, into tile register `tile`."""
    return _make_tile_move("llvm.x86.tileloadd64", tile)


@cache
def make_streaming_tile_load(tile: int) -> Intrinsic:
    """Make the intrinsic ``(memory, p, step)`` that loads tile register `tile` without use of the L1 cache.

    The 16 rows are `step` bytes apart.
    """
    return _make_tile_move("llvm.x86.tileloaddt164", tile)


@cache
def make_tile_store(tile: int) -> Intrinsic:
    """Make the intrinsic ``(memory, p, step)`` that stores tile register `tile` as 16 rows, `step` bytes apart."""
    return _make_tile_move("llvm.x86.tilestored64", tile)


@cache
def make_add_bf16_tile_product(sum_tile: int, activation_tile: int, weight_tile: int) -> Intrinsic:
    """Make the intrinsic ``(memory)`` that adds the matrix product of two bfloat16 tiles to a float32 tile.

    The arguments are numbers of tile registers.
    """
    tiles = [ir.Constant(_i8, tile) for tile in (sum_tile, activation_tile, weight_tile)]
    return intrinsic(NOTHING, ADDRESS)(lambda b, memory: _call(b, "llvm.x86.tdpbf16ps", *tiles))
