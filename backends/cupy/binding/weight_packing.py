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
from ....ops.block_layouts import BLOCK_LAYOUTS
from .small_type_planes import (
    make_iq1_s_index_and_scale_bit_plane,
    make_iq2_xs_index_low_byte_plane,
    make_iq2_xs_sign_and_index_bit_plane,
    make_iq2_xxs_index_plane,
    make_iq2_xxs_sign_and_scale_plane,
    make_iq3_xxs_sign_and_scale_plane,
    make_octet_index_low_byte_plane,
    make_one_bit_plane,
    make_q2_0_complement_code_plane,
    make_quad_index_low_byte_plane,
    make_tq1_0_registers_0_to_4_plane,
    make_tq1_0_registers_5_to_7_plane,
    place_column_bits_in_plane,
)

U8 = npt.NDArray[np.uint8]
BlockArray = npt.NDArray[Any]
UNIT_ROWS = 32
PACKING_CHUNK_BYTES = 1 << 18
"""Bytes that one task packs: its temporary arrays stay in the CPU cache."""
PACKING_THREADS = os.cpu_count() or 1
"""Threads that pack the chunks of a weight."""
NIBBLE_MASK = np.uint8(15)


@dataclass(frozen=True, slots=True)
class PackedPlaneLayout:
    """How the blocks of a quantised dtype are packed into planes: one function for each plane.

    A plane has one kind of data of all blocks, such as the codes or their high bits. A function takes an array of `n`
    blocks, which are records of `BLOCK_LAYOUTS`. It returns uint8 [n, parts, bytes]. A super-block of 256 columns has
    several parts.
    """

    planes: tuple[Callable[[BlockArray], U8], ...]


# ------------------------------------------------------------------------------------------------ low bits


def _copy_code_bytes(blocks: BlockArray) -> U8:
    """Make the plane of codes (field `qs`) without a change of their order, in parts of 16 bytes.

    If the codes are nibbles, a part has 32 columns: the low nibbles are the first 16 columns.
    """
    return np.ascontiguousarray(blocks["qs"]).view(np.uint8).reshape(len(blocks), -1, 16)


def _flip_nibble_signs(blocks: BlockArray) -> U8:
    return _copy_code_bytes(blocks) ^ np.uint8(0x88)


def _regroup_nibbles_into_32_columns(blocks: BlockArray) -> U8:
    """Make the plane of 4-bit codes that a file groups by 16 columns: two groups become 32 columns in 16 bytes.

    In both groupings the low nibbles are the first half of the columns. The result has the layout of
    `_copy_code_bytes`.
    """
    q = np.ascontiguousarray(blocks["qs"]).reshape(len(blocks), -1, 2, 8)  # block of 32, half, byte
    out = np.empty((*q.shape[:2], 2, 8), np.uint8)
    np.bitwise_or(q[:, :, 0] & NIBBLE_MASK, q[:, :, 1] << 4, out=out[:, :, 0])
    np.bitwise_or(q[:, :, 0] >> 4, q[:, :, 1] & ~NIBBLE_MASK, out=out[:, :, 1])
    return out.reshape(len(blocks), -1, 16)


def _reorder_nibbles_for_codebook_lookup(nibbles: Callable[[BlockArray], U8], blocks: BlockArray) -> U8:
    """Reorder the nibbles of each 32-bit word: the low nibbles of its four bytes first, then the four high nibbles.

    A kernel can then look up the code book values of four adjacent nibbles at once.

    Args:
        nibbles: Returns the nibbles of blocks, in the layout of `_copy_code_bytes`.
        blocks: The quantised blocks.
    """

    def gather_nibbles(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        x = (x | x >> 4) & np.uint32(0x00FF00FF)
        return (x | x >> 8) & np.uint32(0xFFFF)

    words, low = nibbles(blocks).view(np.uint32), np.uint32(0x0F0F0F0F)
    grouped: BlockArray = gather_nibbles(words & low) | gather_nibbles(words >> 4 & low) << 16
    return grouped.view(np.uint8)


def _make_nibble_plane_builder(field: str, width: int) -> Callable[[BlockArray], U8]:
    """Return a function that makes a plane of nibbles, 16 bytes for each 32 columns as in `_copy_code_bytes`.

    Args:
        field: The field with the nibbles. A group of ``2 * width`` columns has `width` bytes: the low nibbles are the
            first `width` columns, the high nibbles the others.
        width: Bytes of a group, a multiple of 32.
    """

    def plane(blocks: BlockArray) -> U8:
        q = np.ascontiguousarray(blocks[field]).reshape(len(blocks), -1, width // 32, 2, 16)
        out = np.empty((*q.shape[:2], 2, width // 32, 16), np.uint8)
        np.bitwise_or(q[..., 0, :] & NIBBLE_MASK, q[..., 1, :] << 4, out=out[:, :, 0])
        np.bitwise_or(q[..., 0, :] >> 4, q[..., 1, :] & ~NIBBLE_MASK, out=out[:, :, 1])
        return out.reshape(len(blocks), -1, 16)

    return plane


def _make_two_bit_plane_builder(field: str, flip: int) -> Callable[[BlockArray], U8]:
    """Return a function that makes a plane of 2-bit codes, with 8 bytes for each 32 columns.

    Args:
        field: The field with the codes: 32 bytes for each 128 columns. 4 x 4 bit transposes reorder the codes.
        flip: Mask that is XORed with each byte.
    """

    def plane(blocks: BlockArray) -> U8:
        q = np.ascontiguousarray(blocks[field]).reshape(len(blocks), 2, 2, 2, 2, 4)  # part, half, word, t % 2, byte
        fields = np.ascontiguousarray(q.transpose(0, 1, 3, 5, 4, 2))  # number 2 (t % 2) + half
        x = fields.reshape(-1).view(np.uint32)
        x = _swap_bits(x, 12, 0x0000F0F0)
        x = _swap_bits(x, 6, 0x00CC00CC)
        x ^= np.uint32(flip * 0x01010101)
        bytes_ = x.view(np.uint8).reshape(len(blocks), 2, 2, 4, 4)  # part, word, byte, block
        return np.ascontiguousarray(bytes_.transpose(0, 1, 4, 2, 3)).reshape(len(blocks), 8, 8)

    return plane


def _swap_bits(x: npt.NDArray[Any], by: int, mask: int) -> npt.NDArray[Any]:
    """Swap bit i with bit ``i + by`` in each number of `x`, for each bit i that `mask` selects.

    Several such swaps transpose a small matrix of bits.
    """
    t = (x ^ x >> x.dtype.type(by)) & x.dtype.type(mask)
    return x ^ t ^ t << x.dtype.type(by)


# ------------------------------------------------------------------------------------------------ high bits


def _make_fifth_bit_plane_builder(flip: bool) -> Callable[[BlockArray], U8]:
    """Return a function that makes a plane of the fifth bits of 5-bit codes, for blocks of 32 columns.

    `place_column_bits_in_plane` describes the places.

    Args:
        flip: Whether all bits are inverted.
    """

    def plane(blocks: BlockArray) -> U8:
        bits = place_column_bits_in_plane(blocks["qh"])
        return (~bits if flip else bits).view(np.uint8).reshape(len(blocks), 1, 4)

    return plane


def _make_super_block_high_bit_plane_builder(flip: bool) -> Callable[[BlockArray], U8]:
    """Return a function that makes a plane of the high bits of codes, for super-blocks of 256 columns.

    The plane has 4 bytes for each block of 32 columns. In field `qh`, bit j of each of the 32 bytes belongs to block j.
    8 x 8 bit transposes reorder the bits.

    Args:
        flip: Whether all bits are inverted.
    """

    def plane(blocks: BlockArray) -> U8:
        q = np.ascontiguousarray(blocks["qh"]).reshape(len(blocks), 2, 4, 4)  # half, t, byte
        x = np.ascontiguousarray(q.transpose(0, 3, 2, 1)).reshape(-1).view(np.uint64)
        x = _swap_bits(x, 28, 0x00000000F0F0F0F0)
        x = _swap_bits(x, 14, 0x0000CCCC0000CCCC)
        x = _swap_bits(x, 7, 0x00AA00AA00AA00AA)
        bytes_ = (~x if flip else x).view(np.uint8).reshape(len(blocks), 4, 8)
        return np.ascontiguousarray(bytes_.transpose(0, 2, 1))

    return plane


# -------------------------------------------------------------------------------------------------- records


def _make_field_copying_plane_builder(*names: str) -> Callable[[BlockArray], U8]:
    """Return a function that copies adjacent fields of each block, such as scales, into a plane, unchanged."""

    def plane(blocks: BlockArray) -> U8:
        fields = blocks.dtype.fields
        assert fields is not None
        end = fields[names[-1]][1] + blocks.dtype[names[-1]].itemsize
        raw = blocks.view(np.uint8).reshape(len(blocks), -1)
        return np.ascontiguousarray(raw[:, fields[names[0]][1] : end])[:, None]

    return plane


def _make_two_byte_field_plane_builder(field: str) -> Callable[[BlockArray], U8]:
    """Return a function that copies a field with two bytes for each 32 columns to a plane; the bytes stay the same.

    A plane is an array of the same field of all blocks.
    """
    return lambda blocks: np.ascontiguousarray(blocks[field]).reshape(len(blocks), -1, 2)


def _make_byte_range_plane_builder(field: str, start: int, end: int) -> Callable[[BlockArray], U8]:
    """Return a function that copies the bytes from `start` to `end` (exclusive) of a field of each block to a plane."""
    return lambda blocks: np.ascontiguousarray(blocks[field][:, None, start:end])


_CODEBOOK_NIBBLES = partial(_reorder_nibbles_for_codebook_lookup, _copy_code_bytes)
PLANE_LAYOUTS: Mapping[DType, PackedPlaneLayout] = MappingProxyType(
    {
        DType.Q4_0: PackedPlaneLayout((_flip_nibble_signs, _make_field_copying_plane_builder("d"))),
        DType.Q4_1: PackedPlaneLayout((_copy_code_bytes, _make_field_copying_plane_builder("d", "dmin"))),
        DType.Q5_0: PackedPlaneLayout(
            (_copy_code_bytes, _make_fifth_bit_plane_builder(flip=True), _make_field_copying_plane_builder("d"))
        ),
        DType.Q5_1: PackedPlaneLayout(
            (
                _copy_code_bytes,
                _make_fifth_bit_plane_builder(flip=False),
                _make_field_copying_plane_builder("d", "dmin"),
            )
        ),
        DType.Q8_0: PackedPlaneLayout((_copy_code_bytes, _make_field_copying_plane_builder("d"))),
        DType.Q2_K: PackedPlaneLayout(
            (
                _make_two_bit_plane_builder("qs", 0),
                _make_field_copying_plane_builder("scales"),
                _make_field_copying_plane_builder("d", "dmin"),
            )
        ),
        DType.Q3_K: PackedPlaneLayout(
            (
                _make_two_bit_plane_builder("qs", 0),
                _make_super_block_high_bit_plane_builder(flip=True),
                _make_byte_range_plane_builder("scales", 0, 8),
                _make_byte_range_plane_builder("scales", 8, 12),
                _make_field_copying_plane_builder("d"),
            )
        ),
        DType.Q4_K: PackedPlaneLayout(
            (_make_nibble_plane_builder("qs", 32), _make_field_copying_plane_builder("d", "dmin", "scales"))
        ),
        DType.Q5_K: PackedPlaneLayout(
            (
                _make_nibble_plane_builder("qs", 32),
                _make_super_block_high_bit_plane_builder(flip=False),
                _make_field_copying_plane_builder("d", "dmin", "scales"),
            )
        ),
        DType.Q6_K: PackedPlaneLayout(
            (
                _make_nibble_plane_builder("qs", 64),
                _make_two_bit_plane_builder("qh", 0xAA),
                _make_field_copying_plane_builder("scales"),
                _make_field_copying_plane_builder("d"),
            )
        ),
        DType.IQ4_NL: PackedPlaneLayout((_CODEBOOK_NIBBLES, _make_field_copying_plane_builder("d"))),
        DType.IQ4_XS: PackedPlaneLayout(
            (_CODEBOOK_NIBBLES, _make_field_copying_plane_builder("d", "scales_h", "scales_l"))
        ),
        DType.MXFP4: PackedPlaneLayout((_CODEBOOK_NIBBLES, _make_field_copying_plane_builder("e"))),
        DType.NVFP4: PackedPlaneLayout(
            (
                partial(_reorder_nibbles_for_codebook_lookup, _regroup_nibbles_into_32_columns),
                _make_two_byte_field_plane_builder("scales"),
            )
        ),
        DType.TQ1_0: PackedPlaneLayout(
            (
                make_tq1_0_registers_0_to_4_plane,
                make_tq1_0_registers_5_to_7_plane,
                _make_field_copying_plane_builder("d"),
            )
        ),
        DType.TQ2_0: PackedPlaneLayout(
            (_make_two_bit_plane_builder("qs", 0x55), _make_field_copying_plane_builder("d"))
        ),
        DType.Q1_0: PackedPlaneLayout((make_one_bit_plane, _make_field_copying_plane_builder("d"))),
        DType.Q2_0: PackedPlaneLayout((make_q2_0_complement_code_plane, _make_field_copying_plane_builder("d"))),
        DType.IQ1_S: PackedPlaneLayout(
            (
                make_octet_index_low_byte_plane,
                make_iq1_s_index_and_scale_bit_plane,
                _make_field_copying_plane_builder("d"),
            )
        ),
        DType.IQ1_M: PackedPlaneLayout(
            (
                make_octet_index_low_byte_plane,
                _make_field_copying_plane_builder("qh"),
                _make_field_copying_plane_builder("scales"),
            )
        ),
        DType.IQ2_XXS: PackedPlaneLayout(
            (make_iq2_xxs_index_plane, make_iq2_xxs_sign_and_scale_plane, _make_field_copying_plane_builder("d"))
        ),
        DType.IQ2_XS: PackedPlaneLayout(
            (
                make_iq2_xs_index_low_byte_plane,
                make_iq2_xs_sign_and_index_bit_plane,
                _make_field_copying_plane_builder("scales"),
                _make_field_copying_plane_builder("d"),
            )
        ),
        DType.IQ2_S: PackedPlaneLayout(
            (
                make_octet_index_low_byte_plane,
                make_one_bit_plane,
                _make_field_copying_plane_builder("qh"),
                _make_field_copying_plane_builder("scales"),
                _make_field_copying_plane_builder("d"),
            )
        ),
        DType.IQ3_XXS: PackedPlaneLayout(
            (make_quad_index_low_byte_plane, make_iq3_xxs_sign_and_scale_plane, _make_field_copying_plane_builder("d"))
        ),
        DType.IQ3_S: PackedPlaneLayout(
            (
                make_quad_index_low_byte_plane,
                make_one_bit_plane,
                _make_field_copying_plane_builder("qh"),
                _make_field_copying_plane_builder("scales"),
                _make_field_copying_plane_builder("d"),
            )
        ),
    }
)


def pad_packed_spec_rows_to_units(spec: Spec) -> Spec:
    """Return the spec of a packed weight: rows are packed in units of 32, so the row count is rounded up to them."""
    *leading, rows, columns = spec.shape
    return Spec((*leading, -(-rows // UNIT_ROWS) * UNIT_ROWS, columns), spec.dtype)


def pack_quantised_weight_for_kernels(data: U8, spec: Spec) -> U8:
    """Pack a quantised weight for the CUDA kernels: reorder the bytes of the file into units of 32 rows and planes.

    Args:
        data: The bytes of the file.
        spec: Shape and dtype of the weight.

    Returns:
        The bytes of the packed weight, with rows padded to complete units.
    """
    *leading, rows, columns = spec.shape
    width = columns // spec.dtype.block * spec.dtype.block_bytes
    units, count = -(-rows // UNIT_ROWS), math.prod(leading)
    out = np.zeros((count, units, UNIT_ROWS * width), np.uint8)
    if not width:
        return out.reshape(-1)
    step = max(1, PACKING_CHUNK_BYTES // (UNIT_ROWS * width))
    parts = [
        (source[first * UNIT_ROWS : (first + step) * UNIT_ROWS], target[first : first + step])
        for source, target in zip(data.reshape(count, rows, width), out, strict=True)
        for first in range(0, units, step)
    ]
    with ThreadPoolExecutor(min(PACKING_THREADS, len(parts)) or 1, "hocket.pack") as pool:
        list(pool.map(lambda part: _pack_rows_into_32_row_units(part[0], spec.dtype, part[1]), parts))
    return out.reshape(-1)


def _pack_rows_into_32_row_units(rows: U8, dtype: DType, out: U8) -> None:
    """Pack rows of a quantised weight into units of 32 rows: uint8 [rows, row bytes] to [units, unit bytes].

    The last unit may have fewer rows. Its remaining bytes stay zero.
    """
    count, start = len(rows), 0
    blocks = np.ascontiguousarray(rows).reshape(-1).view(BLOCK_LAYOUTS[dtype])
    for plane in PLANE_LAYOUTS[dtype].planes:
        plane_bytes = plane(blocks)
        size = plane_bytes.shape[-1]
        item = np.dtype((np.void, size))
        parts = plane_bytes.reshape(count, -1).view(item)
        stop = start + UNIT_ROWS * parts.shape[1] * size
        target = out[:, start:stop].reshape(len(out), parts.shape[1], UNIT_ROWS, size).view(item)[..., 0]
        whole = count // UNIT_ROWS
        target[:whole] = parts[: whole * UNIT_ROWS].reshape(whole, UNIT_ROWS, parts.shape[1]).swapaxes(1, 2)
        if count % UNIT_ROWS:
            target[whole][:, : count % UNIT_ROWS] = parts[whole * UNIT_ROWS :].T
        start = stop
