"""Packs quantised weights: it reorders the bytes of a file for the kernels, without a change of size.

Rows form units of 32. A unit consists of planes: the low bits of all codes, their high bits, and the scales of blocks.
A plane is an array [block or super-block][row][bytes]. ``kernels/products/packed.cuh`` describes the position of each
bit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ....graph.spec import Spec
from ....ops.quantisation import BLOCK_LAYOUTS

U8 = npt.NDArray[np.uint8]
Blocks = npt.NDArray[Any]
ROWS = 32
CHUNK = 1 << 18
"""Bytes that one task packs: its temporary arrays stay in the CPU cache."""
PACKERS = os.cpu_count() or 1
"""Threads that pack the chunks of a weight."""
NIBBLE = np.uint8(15)


@dataclass(frozen=True, slots=True)
class Packing:
    """The functions that turn blocks of a quantised dtype into planes.

    Each takes blocks, which are records of `BLOCK_LAYOUTS`, and returns a plane, uint8 [n, parts, bytes]. A block of
    256 columns has several parts.
    """

    planes: tuple[Callable[[Blocks], U8], ...]


# ------------------------------------------------------------------------------------------------ low bits


def _as_is(blocks: Blocks) -> U8:
    """Copy the nibbles of 32 columns in 16 bytes. The low nibbles are the first 16 columns."""
    return np.ascontiguousarray(blocks["qs"]).view(np.uint8).reshape(len(blocks), -1, 16)


def _signed(blocks: Blocks) -> U8:
    return _as_is(blocks) ^ np.uint8(0x88)


def _halves_apart(blocks: Blocks) -> U8:
    """Regroup nibbles of 16 columns in 8 bytes, low nibbles first, into the layout of `_copy_nibbles`."""
    q = np.ascontiguousarray(blocks["qs"]).reshape(len(blocks), -1, 2, 8)  # block of 32, half, byte
    out = np.empty((*q.shape[:2], 2, 8), np.uint8)
    np.bitwise_or(q[:, :, 0] & NIBBLE, q[:, :, 1] << 4, out=out[:, :, 0])
    np.bitwise_or(q[:, :, 0] >> 4, q[:, :, 1] & ~NIBBLE, out=out[:, :, 1])
    return out.reshape(len(blocks), -1, 16)


def _for_books(nibbles: Callable[[Blocks], U8], blocks: Blocks) -> U8:
    """Put the four nibbles of each half of a 32-bit word side by side, for code book lookups."""

    def together(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        x = (x | x >> 4) & np.uint32(0x00FF00FF)
        return (x | x >> 8) & np.uint32(0xFFFF)

    words, low = nibbles(blocks).view(np.uint32), np.uint32(0x0F0F0F0F)
    made: Blocks = together(words & low) | together(words >> 4 & low) << 16
    return made.view(np.uint8)


def _nibbles_of(field: str, width: int) -> Callable[[Blocks], U8]:
    """Make a plane from nibbles of ``2 * width`` columns in `width` bytes, low nibbles first: blocks of 32 columns."""

    def plane(blocks: Blocks) -> U8:
        q = np.ascontiguousarray(blocks[field]).reshape(len(blocks), -1, width // 32, 2, 16)
        out = np.empty((*q.shape[:2], 2, width // 32, 16), np.uint8)
        np.bitwise_or(q[..., 0, :] & NIBBLE, q[..., 1, :] << 4, out=out[:, :, 0])
        np.bitwise_or(q[..., 0, :] >> 4, q[..., 1, :] & ~NIBBLE, out=out[:, :, 1])
        return out.reshape(len(blocks), -1, 16)

    return plane


def _crumbs_of(field: str, flip: int) -> Callable[[Blocks], U8]:
    """Make a plane from 2-bit codes of 128 columns in 32 bytes: 8 bytes per 32 columns, by 4 x 4 transposes."""

    def plane(blocks: Blocks) -> U8:
        q = np.ascontiguousarray(blocks[field]).reshape(len(blocks), 2, 2, 2, 2, 4)  # part, half, word, t % 2, byte
        fields = np.ascontiguousarray(q.transpose(0, 1, 3, 5, 4, 2))  # number 2 (t % 2) + half
        x = fields.reshape(-1).view(np.uint32)
        x = _swapped(x, 12, 0x0000F0F0)
        x = _swapped(x, 6, 0x00CC00CC)
        x ^= np.uint32(flip * 0x01010101)
        bytes_ = x.view(np.uint8).reshape(len(blocks), 2, 2, 4, 4)  # part, word, byte, block
        return np.ascontiguousarray(bytes_.transpose(0, 1, 4, 2, 3)).reshape(len(blocks), 8, 8)

    return plane


def _swapped(x: npt.NDArray[Any], by: int, mask: int) -> npt.NDArray[Any]:
    """Swap the bits of `mask` with the bits `by` positions higher."""
    t = (x ^ x >> x.dtype.type(by)) & x.dtype.type(mask)
    return x ^ t ^ t << x.dtype.type(by)


# ------------------------------------------------------------------------------------------------ high bits


def _bits_of_32(flip: bool) -> Callable[[Blocks], U8]:
    """Make a plane of high bits from blocks of 32 columns, where bit i belongs to column i.

    In the plane, column ``16 * half + 4 * t + c`` has bit ``2 * t + half`` of byte c.
    """
    table = np.zeros((4, 256), np.uint32)
    for i in range(32):
        half, t, c = i // 16, i // 4 % 4, i % 4
        table[i // 8] |= (np.arange(256, dtype=np.uint32) >> i % 8 & 1) << (8 * c + 2 * t + half)

    def plane(blocks: Blocks) -> U8:
        qh = np.ascontiguousarray(blocks["qh"])
        bits = table[0][qh[:, 0]] | table[1][qh[:, 1]] | table[2][qh[:, 2]] | table[3][qh[:, 3]]
        return (~bits if flip else bits).view(np.uint8).reshape(len(blocks), 1, 4)

    return plane


def _bits_of_256(flip: bool) -> Callable[[Blocks], U8]:
    """Make a plane of high bits from 32 bytes where bit j belongs to block j: 4 bytes a block, by 8 x 8 transposes."""

    def plane(blocks: Blocks) -> U8:
        q = np.ascontiguousarray(blocks["qh"]).reshape(len(blocks), 2, 4, 4)  # half, t, byte
        x = np.ascontiguousarray(q.transpose(0, 3, 2, 1)).reshape(-1).view(np.uint64)
        x = _swapped(x, 28, 0x00000000F0F0F0F0)
        x = _swapped(x, 14, 0x0000CCCC0000CCCC)
        x = _swapped(x, 7, 0x00AA00AA00AA00AA)
        bytes_ = (~x if flip else x).view(np.uint8).reshape(len(blocks), 4, 8)
        return np.ascontiguousarray(bytes_.transpose(0, 2, 1))

    return plane


# -------------------------------------------------------------------------------------------------- records


def _fields(*names: str) -> Callable[[Blocks], U8]:
    """Make a plane of adjacent fields, unchanged."""

    def plane(blocks: Blocks) -> U8:
        fields = blocks.dtype.fields
        assert fields is not None
        end = fields[names[-1]][1] + blocks.dtype[names[-1]].itemsize
        raw = blocks.view(np.uint8).reshape(len(blocks), -1)
        return np.ascontiguousarray(raw[:, fields[names[0]][1] : end])[:, None]

    return plane


def _pairs(field: str) -> Callable[[Blocks], U8]:
    """Make a plane with two bytes of a field for each 32 columns."""
    return lambda blocks: np.ascontiguousarray(blocks[field]).reshape(len(blocks), -1, 2)


def _some(field: str, start: int, end: int) -> Callable[[Blocks], U8]:
    """Make a plane of the bytes from `start` to `end` of a field."""
    return lambda blocks: np.ascontiguousarray(blocks[field][:, None, start:end])


_BOOKS = partial(_for_books, _as_is)
PACKINGS: Mapping[DType, Packing] = MappingProxyType(
    {
        DType.Q4_0: Packing((_signed, _fields("d"))),
        DType.Q4_1: Packing((_as_is, _fields("d", "dmin"))),
        DType.Q5_0: Packing((_as_is, _bits_of_32(flip=True), _fields("d"))),
        DType.Q5_1: Packing((_as_is, _bits_of_32(flip=False), _fields("d", "dmin"))),
        DType.Q8_0: Packing((_as_is, _fields("d"))),
        DType.Q2_K: Packing((_crumbs_of("qs", 0), _fields("scales"), _fields("d", "dmin"))),
        DType.Q3_K: Packing(
            (_crumbs_of("qs", 0), _bits_of_256(flip=True), _some("scales", 0, 8), _some("scales", 8, 12), _fields("d"))
        ),
        DType.Q4_K: Packing((_nibbles_of("qs", 32), _fields("d", "dmin", "scales"))),
        DType.Q5_K: Packing((_nibbles_of("qs", 32), _bits_of_256(flip=False), _fields("d", "dmin", "scales"))),
        DType.Q6_K: Packing((_nibbles_of("qs", 64), _crumbs_of("qh", 0xAA), _fields("scales"), _fields("d"))),
        DType.IQ4_NL: Packing((_BOOKS, _fields("d"))),
        DType.IQ4_XS: Packing((_BOOKS, _fields("d", "scales_h", "scales_l"))),
        DType.MXFP4: Packing((_BOOKS, _fields("e"))),
        DType.NVFP4: Packing((partial(_for_books, _halves_apart), _pairs("scales"))),
    }
)


def padded(spec: Spec) -> Spec:
    """Return the spec of a packed weight in memory, with rows padded to complete units."""
    *leading, rows, columns = spec.shape
    return Spec((*leading, -(-rows // ROWS) * ROWS, columns), spec.dtype)


def pack(data: U8, spec: Spec) -> U8:
    """Pack a quantised weight.

    Args:
        data: The bytes of the file.
        spec: Shape and dtype of the weight.

    Returns:
        The bytes of the padded weight in the layout of kernels.
    """
    *leading, rows, columns = spec.shape
    width = columns // spec.dtype.block * spec.dtype.block_bytes
    units, count = -(-rows // ROWS), math.prod(leading)
    out = np.zeros((count, units, ROWS * width), np.uint8)
    if not width:
        return out.reshape(-1)
    step = max(1, CHUNK // (ROWS * width))
    parts = [
        (source[first * ROWS : (first + step) * ROWS], target[first : first + step])
        for source, target in zip(data.reshape(count, rows, width), out, strict=True)
        for first in range(0, units, step)
    ]
    with ThreadPoolExecutor(min(PACKERS, len(parts)) or 1, "hocket.pack") as pool:
        list(pool.map(lambda part: _pack_units(part[0], spec.dtype, part[1]), parts))
    return out.reshape(-1)


def _pack_units(rows: U8, dtype: DType, out: U8) -> None:
    """Pack rows into units: uint8 [rows, row bytes] to [units, bytes]. The last unit may be incomplete."""
    count, start = len(rows), 0
    blocks = np.ascontiguousarray(rows).reshape(-1).view(BLOCK_LAYOUTS[dtype])
    for plane in PACKINGS[dtype].planes:
        made = plane(blocks)
        size = made.shape[-1]
        item = np.dtype((np.void, size))
        parts = made.reshape(count, -1).view(item)
        stop = start + ROWS * parts.shape[1] * size
        target = out[:, start:stop].reshape(len(out), parts.shape[1], ROWS, size).view(item)[..., 0]
        whole = count // ROWS
        target[:whole] = parts[: whole * ROWS].reshape(whole, ROWS, parts.shape[1]).swapaxes(1, 2)
        if count % ROWS:
            target[whole][:, : count % ROWS] = parts[whole * ROWS :].T
        start = stop
