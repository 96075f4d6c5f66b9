"""Planes of packed weights of one to three bits: the types IQ1, IQ2 and IQ3, TQ1_0, Q1_0 and Q2_0.

Functions take an array of `n` quantised blocks and return uint8 [n, parts, bytes], as in `weight_packing`.
``kernels/products/packed.cuh`` and ``code_books.cuh`` describe the positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
BlockArray = npt.NDArray[Any]
QUAD_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""The order of the indices of 8 groups of 4 columns: lane t of four threads reads groups t and 4 + t."""
SCALE_BIT_GROUPS = np.array([0, 2, 1, 3])
"""The group of 8 columns that has bit i of the scale of its block in place of its eighth sign."""
TRITS_PER_BYTE, TRIT_MULTIPLE = 5, 243
"""Ternary digits of a byte of TQ1_0, and the number of their combinations."""


def _make_tables_of_placed_column_bits() -> npt.NDArray[np.uint32]:
    """Make four lookup tables for `place_column_bits_in_plane`, one for each byte of the 32 bits to reorder.

    Each table maps the value of the byte to its 8 bits at their new places in a 32-bit number.
    """
    tables = np.zeros((4, 256), np.uint32)
    for i in range(32):
        half, t, c = i // 16, i // 4 % 4, i % 4
        tables[i // 8] |= (np.arange(256, dtype=np.uint32) >> i % 8 & 1) << (8 * c + 2 * t + half)
    return tables


COLUMN_BIT_TABLES = _make_tables_of_placed_column_bits()


def place_column_bits_in_plane(bits: U8) -> npt.NDArray[np.uint32]:
    """Reorder one bit for each of 32 columns to the order of a plane: bytes [..., 4] to 32-bit numbers [...].

    In the bytes, bit i belongs to column i. In the plane, column ``16 * half + 4 * t + c`` has bit ``2 * t + half`` of
    byte c.
    """
    t = COLUMN_BIT_TABLES
    return t[0][bits[..., 0]] | t[1][bits[..., 1]] | t[2][bits[..., 2]] | t[3][bits[..., 3]]


def _split_words_into_plane_bytes(words: npt.NDArray[np.uint32]) -> U8:
    """View 32-bit words [n, blocks of 32 columns] as bytes [n, blocks, 4], the form in which planes are stored."""
    return np.ascontiguousarray(words)[..., None].view(np.uint8)


def make_one_bit_plane(blocks: BlockArray) -> U8:
    """Make a plane (byte array of one kind of data of all blocks) with one bit for each column.

    The bits are the signs in field `signs`, or the codes in field `qs` of Q1_0.
    """
    field = "signs" if "signs" in (blocks.dtype.names or ()) else "qs"
    return _split_words_into_plane_bytes(
        place_column_bits_in_plane(np.ascontiguousarray(blocks[field]).reshape(len(blocks), -1, 4))
    )


def _unpack_signs_and_scale_bits(words: npt.NDArray[np.uint32]) -> U8:
    """Unpack words with four groups of 7 signs and a 4-bit scale into bytes: 7 signs and one bit of the scale each.

    The shapes are uint32 [...] and uint8 [..., 4].
    """
    signs = words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & np.uint32(127)
    tops = (words >> np.uint32(28))[..., None] >> np.argsort(SCALE_BIT_GROUPS).astype(np.uint32) & np.uint32(1)
    return (signs | tops << np.uint32(7)).astype(np.uint8)


def make_iq2_xxs_index_plane(blocks: BlockArray) -> U8:
    """Make the plane of IQ2_XXS indices: 4 bytes for each block of 32 columns."""
    return np.ascontiguousarray(blocks["qs"][:, 0::2])[..., None].view(np.uint8)


def make_iq2_xxs_sign_and_scale_plane(blocks: BlockArray) -> U8:
    """Make the plane of IQ2_XXS signs and scale bits: 4 bytes for each block of 32 columns."""
    return _split_words_into_plane_bytes(
        place_column_bits_in_plane(_unpack_signs_and_scale_bits(blocks["qs"][:, 1::2]))
    )


def make_iq3_xxs_sign_and_scale_plane(blocks: BlockArray) -> U8:
    """Make the plane of IQ3_XXS signs and scale bits: 4 bytes for each block of 32 columns."""
    return _split_words_into_plane_bytes(place_column_bits_in_plane(_unpack_signs_and_scale_bits(blocks["signs"])))


def make_iq2_xs_index_low_byte_plane(blocks: BlockArray) -> U8:
    """Make the plane of the low bytes of IQ2_XS indices: 4 bytes for each block of 32 columns."""
    return blocks["qs"].astype(np.uint8).reshape(len(blocks), -1, 4)


def make_iq2_xs_sign_and_index_bit_plane(blocks: BlockArray) -> U8:
    """Make the plane of IQ2_XS signs: 4 bytes for each block of 32 columns, with one index bit in each byte.

    A group of 8 columns has 7 stored signs. The ninth bit of its code book index takes the eighth place.
    """
    high = blocks["qs"] >> np.uint16(8)
    signs = (high >> np.uint16(1) | (high & np.uint16(1)) << np.uint16(7)).astype(np.uint8)
    return _split_words_into_plane_bytes(place_column_bits_in_plane(signs.reshape(len(blocks), -1, 4)))


def make_octet_index_low_byte_plane(blocks: BlockArray) -> U8:
    """Make a plane of the low bytes of code book indices, for types with one index for 8 columns.

    A block of 32 columns has 4 bytes.
    """
    return np.ascontiguousarray(blocks["qs"]).reshape(len(blocks), -1, 4)


def make_quad_index_low_byte_plane(blocks: BlockArray) -> U8:
    """Make a plane of the low bytes of code book indices, for types with one index for 4 columns.

    A block of 32 columns has 8 bytes.
    """
    return np.ascontiguousarray(blocks["qs"].reshape(len(blocks), -1, 8)[..., QUAD_ORDER])


def make_iq1_s_index_and_scale_bit_plane(blocks: BlockArray) -> U8:
    """Make the IQ1_S plane of high index bits, scales and shift signs: 2 bytes for each block of 32 columns.

    A block has four code book indices, and each gets 4 bits: its three high bits and one further bit. The further
    bits are the three bits of the scale and, last, the sign of the shift.
    """
    fields, out = blocks["qh"].astype(np.uint16), np.zeros(blocks["qh"].shape, np.uint16)
    for i in range(4):
        out |= (fields >> np.uint16(3 * i) & np.uint16(7)) << np.uint16(4 * i)
        out |= (fields >> np.uint16(12 + i) & np.uint16(1)) << np.uint16(4 * i + 3)
    return out.view(np.uint8).reshape(len(blocks), 1, -1)


def make_q2_0_complement_code_plane(blocks: BlockArray) -> U8:
    """Make the plane of Q2_0 codes: 8 bytes for each block of 32 columns, with each 2-bit code stored as 1 - code.

    In the file, four neighbours share a byte. 4 x 4 transposes of 2-bit codes reorder them.
    """
    q = np.ascontiguousarray(blocks["qs"]).reshape(len(blocks), 2, 2, 2, 2)  # block, half, t / 2, t % 2
    x = np.ascontiguousarray(q.transpose(0, 1, 3, 4, 2)).reshape(-1).view(np.uint32)
    for by, mask in ((12, 0x0000F0F0), (6, 0x00CC00CC)):
        t = (x ^ x >> np.uint32(by)) & np.uint32(mask)
        x = x ^ t ^ t << np.uint32(by)
    return (x ^ np.uint32(0x55555555)).view(np.uint8).reshape(len(blocks), 2, 8)


# ---------------------------------------------------------------------------------------------------- base 3


def _decode_tq1_0_trits(blocks: BlockArray) -> U8:
    """Decode the ternary digits (trits) of TQ1_0 blocks to numbers from 0 to 2, in the order of the kernels.

    The result has the shape [n, block of 32 columns, register, byte of a register]. Register ``2 * t + half`` has the
    columns from ``16 * half + 4 * t`` on.
    """
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    qs, n = blocks["qs"], len(blocks)
    digits = [
        (part[:, None, :] * powers[:count]).reshape(n, -1)
        for part, count in ((qs[:, :32], 5), (qs[:, 32:], 5), (blocks["qh"], 4))
    ]
    trits = (np.concatenate(digits, axis=1).astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8)
    return np.ascontiguousarray(trits.reshape(n, 8, 2, 4, 4).swapaxes(2, 3)).reshape(n, 8, 8, 4)


def _encode_five_trits_per_byte(trits: U8) -> U8:
    """Encode five ternary digits (trits) [..., 5] in one byte [...].

    The byte is the number with these digits times 256 / 243, rounded up, as in GGML's TQ1_0.
    """
    number = trits.astype(np.uint16) @ np.array([81, 27, 9, 3, 1], np.uint16)
    return ((number * np.uint32(256) + np.uint32(TRIT_MULTIPLE - 1)) // np.uint32(TRIT_MULTIPLE)).astype(np.uint8)


def make_tq1_0_registers_0_to_4_plane(blocks: BlockArray) -> U8:
    """Make the first TQ1_0 plane: 4 bytes for each block of 32 columns, with five ternary digits (trits) in a byte.

    A kernel holds a block in 8 registers of 4 columns. This plane has registers 0 to 4.
    """
    return _encode_five_trits_per_byte(_decode_tq1_0_trits(blocks)[:, :, :TRITS_PER_BYTE].swapaxes(2, 3))


def make_tq1_0_registers_5_to_7_plane(blocks: BlockArray) -> U8:
    """Make the second TQ1_0 plane, with the ternary digits of registers 5 to 7 of each block of 32 columns.

    For each block there are two bytes of five digits, then 2 bits for each of the remaining two columns.
    """
    rest = _decode_tq1_0_trits(blocks)[:, :, TRITS_PER_BYTE:].reshape(len(blocks), 8, 6, 2)  # in pairs of columns
    pairs = _encode_five_trits_per_byte(rest[:, :, :5].swapaxes(2, 3)).reshape(len(blocks), 16)
    last = rest[:, :, 5, 0] | rest[:, :, 5, 1] << np.uint8(2)
    return np.concatenate([pairs, last[:, 0::2] | last[:, 1::2] << np.uint8(4)], axis=1)[:, None]
