"""Stored elements as float32 numbers, and back: the quantisation blocks of GGML, f16 and bf16.

A quantised row is a sequence of blocks of fixed size, which `block_layouts` describes. `EXPANDERS` has the function
from records to numbers of each dtype, and `QUANTISERS` the function from numbers to records. Dequantised numbers
equal the numbers of the ``gguf`` package bit for bit: each element has the same float32 operations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..graph.dtypes import DType
from ..graph.errors import GraphError
from .block_layouts import BLOCK_LAYOUTS, F32, FP4_VALUES_TIMES_2, HALF_OF_E4M3, IQ4_NL_CODE_BOOK, U8
from .block_quantisers import QUANTISERS as BLOCK_QUANTISERS
from .super_block_quantisers import SUPER_BLOCK_QUANTISERS

QUANTISERS = {**BLOCK_QUANTISERS, **SUPER_BLOCK_QUANTISERS}
"""By dtype to which numbers can be rounded, a function from float32 [n, elements of a block] to block records [n]."""
ExpandBlocks = Callable[[np.ndarray, F32], None]
"""A function of block records [n] that writes float32 [n, elements of a block]."""

EXPAND_CHUNK_ELEMENTS = 1 << 16
"""Elements of one expansion step; its temporaries fit in the cache for tensors of any size."""


def dequantise(raw: np.ndarray, dtype: DType) -> F32:
    """Return the float32 values of stored elements.

    Args:
        raw: uint8 [..., row bytes], or ``dtype.storage`` [..., n] for dtypes without blocks.
        dtype: dtype of the elements.

    Returns:
        float32 [..., n]: for F32 a read-only or shared view of `raw`, for other dtypes a new array.

    Raises:
        GraphError: a row is no whole number of blocks, or the dtype has no dequantiser.
    """
    bytes_ = _as_byte_rows(raw, dtype)
    if not dtype.is_quantised:
        return _expand_unquantised(bytes_, dtype)
    if dtype not in EXPANDERS:
        return _expand_with_gguf(bytes_, dtype)
    out = np.empty((*raw.shape[:-1], bytes_.shape[-1] // dtype.block_bytes * dtype.block), np.float32)
    blocks = np.ascontiguousarray(bytes_).reshape(-1).view(BLOCK_LAYOUTS[dtype])
    rows, expand = out.reshape(-1, dtype.block), EXPANDERS[dtype]
    step = EXPAND_CHUNK_ELEMENTS // dtype.block
    # A damaged scale may be inf or NaN; as in ggml, results follow IEEE arithmetic.
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(0, len(blocks), step):
            expand(blocks[i : i + step], rows[i : i + step])
    return out


def bf16_to_f32(bits: npt.NDArray[np.uint16]) -> F32:
    """Convert bfloat16 bits to their exact float32 values: uint16 [...] to float32 [...]."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def f32_to_bf16(values: F32) -> npt.NDArray[np.uint16]:
    """Round float32 values to the nearest bfloat16, ties to even, and return its bits: float32 [...] to uint16 [...].

    NaN becomes quiet NaN (``ggml_compute_fp32_to_bf16`` in ggml-impl.h); values beyond the range become infinite.
    """
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits  # wraps only for some NaNs, which are replaced below
    rounded >>= 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def decode_array(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Convert an array from the storage format of `dtype` to numbers.

    Stored arrays are bytes of quantised blocks, uint16 bits of bf16, or plain numbers. An array with another NumPy
    dtype than ``dtype.storage`` contains numbers already and is returned unchanged.
    """
    if array.dtype != dtype.storage:
        return array
    if dtype.is_quantised:
        return dequantise(array, dtype)
    return bf16_to_f32(array) if dtype is DType.BF16 else array


def encode_array(numbers: np.ndarray, dtype: DType) -> np.ndarray:
    """Round numbers to `dtype` and convert them to its storage format: the inverse of `decode_array`.

    Quantised blocks become bytes [..., row bytes]; the modules `block_quantisers` and `super_block_quantisers` explain
    their rounding.

    Raises:
        GraphError: the dtype has no quantiser.
    """
    if dtype.is_quantised:
        if dtype not in QUANTISERS:
            raise GraphError(f"cannot round to {dtype} in a graph; need one of {', '.join(map(str, QUANTISERS))}")
        blocks = np.ascontiguousarray(numbers, np.float32).reshape(-1, dtype.block)
        with np.errstate(all="ignore"):
            row_bytes = numbers.shape[-1] // dtype.block * dtype.block_bytes
            return QUANTISERS[dtype](blocks).view(np.uint8).reshape(*numbers.shape[:-1], row_bytes)
    if dtype is not DType.BF16:
        return numbers.astype(dtype.storage, copy=False)
    return f32_to_bf16(np.atleast_1d(numbers).astype(np.float32)).reshape(numbers.shape)


def _as_byte_rows(raw: np.ndarray, dtype: DType) -> U8:
    """View stored elements of any storage dtype as uint8 rows [..., row bytes]."""
    if raw.ndim == 0 or raw.dtype not in (np.dtype(np.uint8), dtype.storage):
        raise GraphError(f"dequantise({dtype}): got {raw.dtype}{list(raw.shape)}; pass uint8 rows or {dtype.storage}")
    if raw.dtype != np.uint8:
        raw = (raw if raw.strides[-1] == raw.itemsize else np.ascontiguousarray(raw)).view(np.uint8)
    if raw.shape[-1] % dtype.block_bytes:
        raise GraphError(
            f"dequantise({dtype}): rows of {raw.shape[-1]} bytes are no whole number of {dtype.block_bytes}-byte "
            "blocks; pass whole rows"
        )
    return raw


def _expand_unquantised(bytes_: U8, dtype: DType) -> F32:
    """Convert stored bytes of a dtype without blocks, such as bf16, to float32 values."""
    if bytes_.strides[-1] != 1:
        bytes_ = np.ascontiguousarray(bytes_)
    stored = bytes_.view(dtype.storage)
    if dtype is DType.BF16:
        return bf16_to_f32(stored)
    with np.errstate(over="ignore", invalid="ignore"):
        return stored.astype(np.float32, copy=False)


def _expand_with_gguf(bytes_: U8, dtype: DType) -> F32:
    """Dequantise rare dtypes (IQ1 to IQ3, ternary) with the ``gguf`` package, one chunk at a time."""
    import gguf  # its import takes as long as the import of hocket

    stored = np.ascontiguousarray(bytes_).reshape(-1)
    out = np.empty(stored.size // dtype.block_bytes * dtype.block, np.float32)
    step = EXPAND_CHUNK_ELEMENTS // dtype.block
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            for i in range(0, len(out) // dtype.block, step):
                row = stored[None, i * dtype.block_bytes : (i + step) * dtype.block_bytes]
                values = gguf.quants.dequantize(row, gguf.GGMLQuantizationType(dtype.ggml))
                out[i * dtype.block : (i + step) * dtype.block] = values[0]
    except (NotImplementedError, ValueError) as error:
        raise GraphError(f"dequantise({dtype}): no dequantiser for this type; convert the model to another") from error
    return out.reshape(*bytes_.shape[:-1], bytes_.shape[-1] // dtype.block_bytes * dtype.block)


def load_code_book(dtype: DType) -> F32:
    """Load the code book of an IQ1, IQ2 or IQ3 dtype from the ``gguf`` package: [entries, 4 or 8 columns]."""
    import gguf

    known = getattr(gguf.quants, dtype.name)
    known.init_grid()
    return np.asarray(known.grid, np.float32).reshape(known.grid_shape)


def _as_float32_column(values: np.ndarray) -> F32:
    """Convert one number per block, or per part of a block, to float32 with a last axis of size 1, for broadcasting."""
    return values.astype(np.float32)[..., None]


def _unpack_4_bits(qs: U8, width: int) -> U8:
    """Unpack two 4-bit numbers from each byte: [n, m] to [n, m / width, 2, width].

    Each group of `width` bytes gives all its low halves, then all its high halves.
    """
    packed = np.ascontiguousarray(qs).reshape(len(qs), -1, width)
    out = np.empty((len(qs), packed.shape[1], 2, width), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, :, 0])
    np.right_shift(packed, 4, out=out[:, :, 1])
    return out


def _unpack_2_bits(qs: U8) -> U8:
    """Unpack four 2-bit numbers from each byte, lowest bits first: [n, 64] to [n, 2, 4, 32]."""
    packed = np.ascontiguousarray(qs).reshape(len(qs), 2, 1, 32)
    return (packed >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & np.uint8(3)


def _unpack_bit_planes(qh: U8) -> U8:
    """Unpack bit planes: row i of the result is bit i of each of 32 bytes; [n, 32] to [n, 8, 32] of 0 or 1."""
    packed = np.ascontiguousarray(qh)[:, None, :]
    return (packed >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)


def _unpack_fifth_bits_as_16(qh: U8) -> U8:
    """Return the contribution of the fifth bit to 32 codes, 16 or 0: packed bits [n, 4] to [n, 32]."""
    bits = np.unpackbits(np.ascontiguousarray(qh), axis=1, bitorder="little")
    bits <<= 4
    return bits


def _unpack_scales_and_minima(packed: U8) -> tuple[U8, U8]:
    """Unpack the 6-bit scales and minima of Q4_K and Q5_K: [n, 12] to two [n, 8] (``get_scale_min_k4`` of ggml)."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    return scales, minima


def _multiply_scale(q: np.ndarray, scale: F32, out: F32) -> None:
    """Write ``q * scale`` to `out`; `scale` is [n, parts, 1] or [n, 1]."""
    out[...] = q.reshape(out.shape)
    parts = out.reshape(*scale.shape[:-1], -1)
    parts *= scale


def _multiply_scale_subtract_minimum(q: np.ndarray, scale: F32, minimum: F32, out: F32) -> None:
    """Write ``q * scale - minimum`` to `out`. Each operation rounds as in the scalar loops of ggml."""
    _multiply_scale(q, scale, out)
    parts = out.reshape(*minimum.shape[:-1], -1)
    parts -= minimum


def _expand_q4_0(b: np.ndarray, out: F32) -> None:
    _multiply_scale(_unpack_4_bits(b["qs"], 16).view(np.int8) - np.int8(8), _as_float32_column(b["d"]), out)


def _expand_q4_1(b: np.ndarray, out: F32) -> None:
    _multiply_scale(_unpack_4_bits(b["qs"], 16), _as_float32_column(b["d"]), out)
    out += _as_float32_column(b["dmin"])


def _expand_q5_0(b: np.ndarray, out: F32) -> None:
    q = _unpack_4_bits(b["qs"], 16).reshape(-1, 32) | _unpack_fifth_bits_as_16(b["qh"])
    _multiply_scale(q.view(np.int8) - np.int8(16), _as_float32_column(b["d"]), out)


def _expand_q5_1(b: np.ndarray, out: F32) -> None:
    _multiply_scale(
        _unpack_4_bits(b["qs"], 16).reshape(-1, 32) | _unpack_fifth_bits_as_16(b["qh"]), _as_float32_column(b["d"]), out
    )
    out += _as_float32_column(b["dmin"])


def _expand_q8_0(b: np.ndarray, out: F32) -> None:
    _multiply_scale(b["qs"], _as_float32_column(b["d"]), out)


def _expand_q2_k(b: np.ndarray, out: F32) -> None:
    d, dmin = b["d"].astype(np.float32), b["dmin"].astype(np.float32)
    scale, minimum = d[:, None] * (b["scales"] & 15), dmin[:, None] * (b["scales"] >> 4)
    _multiply_scale_subtract_minimum(_unpack_2_bits(b["qs"]), scale[..., None], minimum[..., None], out)


def _expand_q3_k(b: np.ndarray, out: F32) -> None:
    low, high = b["scales"][:, :8], b["scales"][:, 8:]
    low = np.concatenate([low & 15, low >> 4], axis=1)
    high = (high[:, None, :] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    scale = (low | high.reshape(-1, 16) << 4).astype(np.float32) - 32
    q = _unpack_2_bits(b["qs"]).reshape(-1, 8, 32) | (_unpack_bit_planes(b["qh"]) << np.uint8(2))
    _multiply_scale(q.view(np.int8) - np.int8(4), (_as_float32_column(b["d"]) * scale)[..., None], out)


def _expand_q4_k(b: np.ndarray, out: F32) -> None:
    scales, minima = _unpack_scales_and_minima(b["scales"])
    scale, minimum = _as_float32_column(b["d"]) * scales, _as_float32_column(b["dmin"]) * minima
    _multiply_scale_subtract_minimum(_unpack_4_bits(b["qs"], 32), scale[..., None], minimum[..., None], out)


def _expand_q5_k(b: np.ndarray, out: F32) -> None:
    scales, minima = _unpack_scales_and_minima(b["scales"])
    scale, minimum = _as_float32_column(b["d"]) * scales, _as_float32_column(b["dmin"]) * minima
    q = _unpack_4_bits(b["qs"], 32).reshape(-1, 8, 32) | (_unpack_bit_planes(b["qh"]) << np.uint8(4))
    _multiply_scale_subtract_minimum(q, scale[..., None], minimum[..., None], out)


def _expand_q6_k(b: np.ndarray, out: F32) -> None:
    q = _unpack_4_bits(b["qs"], 64).reshape(-1, 2, 4, 32) | (_unpack_2_bits(b["qh"]) << np.uint8(4))
    _multiply_scale(q.view(np.int8) - np.int8(32), (_as_float32_column(b["d"]) * b["scales"])[..., None], out)


def _expand_iq4_nl(b: np.ndarray, out: F32) -> None:
    _multiply_scale(IQ4_NL_CODE_BOOK[_unpack_4_bits(b["qs"], 16)], _as_float32_column(b["d"]), out)


def _expand_iq4_xs(b: np.ndarray, out: F32) -> None:
    low = _unpack_4_bits(b["scales_l"], 1).reshape(-1, 8)
    high = (b["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)
    scale = _as_float32_column(b["d"]) * ((low | high << np.uint16(4)).astype(np.float32) - 32)
    _multiply_scale(IQ4_NL_CODE_BOOK[_unpack_4_bits(b["qs"], 16)], scale[..., None], out)


def _expand_mxfp4(b: np.ndarray, out: F32) -> None:
    # Half of 2^(e - 127); its two smallest values are subnormal (ggml_e8m0_to_fp32_half in ggml-impl.h).
    e = b["e"].astype(np.uint32)
    half = np.where(e < 2, np.uint32(0x00200000) << e, (e - 1) << 23).view(np.float32)
    _multiply_scale(FP4_VALUES_TIMES_2[_unpack_4_bits(b["qs"], 16)], half[:, None], out)


def _expand_nvfp4(b: np.ndarray, out: F32) -> None:
    _multiply_scale(FP4_VALUES_TIMES_2[_unpack_4_bits(b["qs"], 8)], HALF_OF_E4M3[b["scales"]][..., None], out)


def _expand_q1_0(b: np.ndarray, out: F32) -> None:
    """Dequantise Q1_0 blocks to `out`: each element is one sign bit, which means plus or minus the scale."""
    d = _as_float32_column(b["d"])
    out[...] = np.where(np.unpackbits(np.ascontiguousarray(b["qs"]), axis=1, bitorder="little"), d, -d)


def _expand_q2_0(b: np.ndarray, out: F32) -> None:
    """Dequantise Q2_0 blocks to `out`: each element is a 2-bit code, which means -1, 0, 1 or 2 times the scale.

    Four neighbours share a byte.
    """
    q = (b["qs"][..., None] >> np.array([0, 2, 4, 6], np.uint8)) & np.uint8(3)
    _multiply_scale(q.view(np.int8) - np.int8(1), _as_float32_column(b["d"]), out)


EXPANDERS: dict[DType, ExpandBlocks] = {
    DType.Q4_0: _expand_q4_0,
    DType.Q4_1: _expand_q4_1,
    DType.Q5_0: _expand_q5_0,
    DType.Q5_1: _expand_q5_1,
    DType.Q8_0: _expand_q8_0,
    DType.Q2_K: _expand_q2_k,
    DType.Q3_K: _expand_q3_k,
    DType.Q4_K: _expand_q4_k,
    DType.Q5_K: _expand_q5_k,
    DType.Q6_K: _expand_q6_k,
    DType.IQ4_NL: _expand_iq4_nl,
    DType.IQ4_XS: _expand_iq4_xs,
    DType.MXFP4: _expand_mxfp4,
    DType.NVFP4: _expand_nvfp4,
    DType.Q1_0: _expand_q1_0,
    DType.Q2_0: _expand_q2_0,
}
"""The function from block records to numbers by dtype."""
