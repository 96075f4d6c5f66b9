"""AMX tiles: eight registers of 16 rows of 64 bytes, and products of bfloat16 that are summed in float32.

``add_tile_products(c, x, w)`` multiplies 16 rows of 32 activations in tile x by 32 columns of 16 weight rows in tile w,
and adds the results to tile c, 16 rows of 16 float32. Tile w holds pairs: its row k has the columns 2k and 2k + 1 of
every weight row.

>>> import numpy as np
>>> x, w = np.arange(64.0).reshape(2, 32), np.arange(96.0).reshape(3, 32)  # 2 rows of activations, 3 of a weight
>>> pairs = w.reshape(3, 16, 2).transpose(1, 0, 2)
>>> bool(np.all(np.einsum("ikp,knp->in", x.reshape(2, 16, 2), pairs) == x @ w.T))
True

Operations take the address of `TILE_MEMORY_BYTES` of memory of the thread. `configure_tiles` writes the register shapes
there. Processors without tiles keep the tiles there (`kernels.amx`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from .vectors import ADDRESS, NOTHING, Intrinsic, intrinsic

TILE_ROWS, TILE_ROW_BYTES = 16, 64
"""Rows of a tile, and bytes of a row."""
TILE_BYTES, REGISTER_COUNT = TILE_ROWS * TILE_ROW_BYTES, 8
TILE_MEMORY_BYTES = REGISTER_COUNT * TILE_BYTES + 64

_i8, _i64 = map(ir.IntType, (8, 64))
_CHAR = _i8.as_pointer()
PALETTE = [1, *[0] * 15, *[TILE_ROW_BYTES, 0] * REGISTER_COUNT, *[0] * 16, *[TILE_ROWS] * REGISTER_COUNT, *[0] * 8]
"""The shapes of all registers, as ``ldtilecfg`` reads them."""


def _call(b: Any, name: str, *values: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [v.type for v in values])
    b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), values)


@intrinsic(NOTHING, ADDRESS)
def configure_tiles(b, memory):
    """Give all registers 16 rows of 64 bytes."""
    palette = ir.Constant(ir.VectorType(_i8, len(PALETTE)), PALETTE)
    to = b.add(memory, ir.Constant(_i64, REGISTER_COUNT * TILE_BYTES))
    b.store(palette, b.inttoptr(to, palette.type.as_pointer()), align=1)
    _call(b, "llvm.x86.ldtilecfg", b.inttoptr(to, _CHAR))


@intrinsic(NOTHING, ADDRESS)
def release_tiles(b, memory):
    """Let the system forget the registers."""
    _call(b, "llvm.x86.tilerelease")


@cache
def clear_tile(tile: int) -> Intrinsic:
    """Make ``(memory)``: fill a tile with zeros."""
    return intrinsic(NOTHING, ADDRESS)(lambda b, memory: _call(b, "llvm.x86.tilezero", ir.Constant(_i8, tile)))


def _make_tile_move(name: str, tile: int) -> Intrinsic:
    @intrinsic(NOTHING, *[ADDRESS] * 3)
    def move_tile(b, memory, p, step):
        _call(b, name, ir.Constant(_i8, tile), b.inttoptr(p, _CHAR), step)

    return move_tile


@cache
def load_tile(tile: int) -> Intrinsic:
    """Make ``(memory, p, step)``: load rows that are `step` bytes apart."""
    return _make_tile_move("llvm.x86.tileloadd64", tile)


@cache
def load_tile_streaming(tile: int) -> Intrinsic:
    """Make ``(memory, p, step)``: load rows as `load_tile` does, without keeping them in the first cache."""
    return _make_tile_move("llvm.x86.tileloaddt164", tile)


@cache
def store_tile(tile: int) -> Intrinsic:
    """Make ``(memory, p, step)``: store rows that are `step` bytes apart."""
    return _make_tile_move("llvm.x86.tilestored64", tile)


@cache
def add_tile_products(c: int, x: int, w: int) -> Intrinsic:
    """Make ``(memory)``: add the products of tiles x and w to tile c."""
    tiles = [ir.Constant(_i8, tile) for tile in (c, x, w)]
    return intrinsic(NOTHING, ADDRESS)(lambda b, memory: _call(b, "llvm.x86.tdpbf16ps", *tiles))
