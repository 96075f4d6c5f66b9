"""Tiles of AMX: eight registers of 16 rows of 64 bytes, and products of bfloat16 that are added up in float32.

``multiply(c, x, w)`` adds to tile c, 16 rows of 16 float32, the products of 16 rows of 32 activations in tile x with
32 columns of 16 rows of a weight in tile w.  These lie there as pairs: row k is columns 2k and 2k + 1, row by row of
the weight.

>>> import numpy as np
>>> x, w = np.arange(64.0).reshape(2, 32), np.arange(96.0).reshape(3, 32)  # 2 rows of activations, 3 of a weight
>>> pairs = w.reshape(3, 16, 2).transpose(1, 0, 2)
>>> bool(np.all(np.einsum("ikp,knp->in", x.reshape(2, 16, 2), pairs) == x @ w.T))
True

Operations take the address of `NBYTES` of memory of the thread: there `configure` writes what registers hold, and
there processors without tiles keep them (`kernels.amx`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from .vectors import ADDRESS, NOTHING, Intrinsic, intrinsic

HEIGHT, WIDTH = 16, 64
"""Rows of a tile, and bytes of one."""
TILE, REGISTERS = HEIGHT * WIDTH, 8
NBYTES = REGISTERS * TILE + 64

_i8, _i64 = map(ir.IntType, (8, 64))
_CHAR = _i8.as_pointer()
PALETTE = [1, *[0] * 15, *[WIDTH, 0] * REGISTERS, *[0] * 16, *[HEIGHT] * REGISTERS, *[0] * 8]
"""The shape of all registers, as ``ldtilecfg`` reads it."""


def _call(b: Any, name: str, *values: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [v.type for v in values])
    b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), values)


@intrinsic(NOTHING, ADDRESS)
def configure(b, memory):
    """Give all registers 16 rows of 64 bytes."""
    palette = ir.Constant(ir.VectorType(_i8, len(PALETTE)), PALETTE)
    to = b.add(memory, ir.Constant(_i64, REGISTERS * TILE))
    b.store(palette, b.inttoptr(to, palette.type.as_pointer()), align=1)
    _call(b, "llvm.x86.ldtilecfg", b.inttoptr(to, _CHAR))


@intrinsic(NOTHING, ADDRESS)
def release(b, memory):
    """Let the system forget the registers."""
    _call(b, "llvm.x86.tilerelease")


@cache
def clear(tile: int) -> Intrinsic:
    """``(memory)``: zeros."""
    return intrinsic(NOTHING, ADDRESS)(lambda b, memory: _call(b, "llvm.x86.tilezero", ir.Constant(_i8, tile)))


def _moved(name: str, tile: int) -> Intrinsic:
    @intrinsic(NOTHING, *[ADDRESS] * 3)
    def moved(b, memory, p, step):
        _call(b, name, ir.Constant(_i8, tile), b.inttoptr(p, _CHAR), step)

    return moved


@cache
def load_tile(tile: int) -> Intrinsic:
    """``(memory, p, step)``: rows `step` bytes apart."""
    return _moved("llvm.x86.tileloadd64", tile)


@cache
def pass_tile_by(tile: int) -> Intrinsic:
    """As `load_tile`, of rows that the first cache need not keep."""
    return _moved("llvm.x86.tileloaddt164", tile)


@cache
def store_tile(tile: int) -> Intrinsic:
    """``(memory, p, step)``: rows `step` bytes apart."""
    return _moved("llvm.x86.tilestored64", tile)


@cache
def multiply(c: int, x: int, w: int) -> Intrinsic:
    """``(memory)``: add the products of tiles x and w to tile c."""
    tiles = [ir.Constant(_i8, tile) for tile in (c, x, w)]
    return intrinsic(NOTHING, ADDRESS)(lambda b, memory: _call(b, "llvm.x86.tdpbf16ps", *tiles))
