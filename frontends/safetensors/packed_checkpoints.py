"""Weights that a folder has in two tensors: blocks of eight-bit floats (FP8) or four-bit floats (MXFP4), and scales.

FP8 weights, as DeepSeek and Qwen publish them, become float32. MXFP4 weights, as in gpt-oss, keep their bits.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from ...graph.dtypes import DType
from ...ops.block_layouts import HALF_OF_E4M3
from ...ops.quantisation import dequantise
from ..gguf import Tensor
from ..gguf.mapped_file import format_name_for_message
from .derived_tensor import derive_tensor
from .json_files import JsonObject

STORED_DTYPES = {"fp8": {"F8_E4M3": DType.I8}, "mxfp4": {"U8": DType.I8}}
"""By ``quant_method`` of ``config.json``: further dtypes of safetensors that the folder may have, read as bytes."""
SCALE_SUFFIX, BLOCKS_SUFFIX, SCALES_SUFFIX = "_scale_inv", "_blocks", "_scales"
MXFP4_BYTES = DType.MXFP4.block_bytes - 1
"""Bytes of the codes of an MXFP4 block; a scale of one byte precedes them in GGUF."""


def _make_e4m3_table() -> npt.NDArray[np.float32]:
    """Return the value of each E4M3 byte as float32 [256]. Bytes 127 and 255 are NaN."""
    magnitudes = 2 * HALF_OF_E4M3[:128]
    magnitudes[127] = np.nan
    return np.concatenate([magnitudes, -magnitudes])


E4M3_VALUES = _make_e4m3_table()


def read_quantisation_method(config: JsonObject) -> str:
    """Return ``quant_method`` of ``config.json``, or an empty text for unquantised weights.

    Raises:
        ModelError: The method is not supported, or FP8 weights have no blocks.
    """
    quantisation = config.get_object_or_empty("quantization_config")
    if not quantisation.pairs:
        return ""
    method = quantisation.get_text("quant_method", "")
    if method not in STORED_DTYPES:
        raise config.make_error(
            f"quant_method {method[:40]!r} is not supported; need {', '.join(STORED_DTYPES)}, or the original weights"
        )
    if method == "fp8":
        _read_block_shape(config)
    return method


def _read_block_shape(config: JsonObject) -> tuple[int, int]:
    shape = config.get_object_or_empty("quantization_config").get_list_or_empty("weight_block_size")
    if len(shape) != 2 or any(type(n) is not int or not 0 < n < 1 << 31 for n in shape):
        raise config.make_error(f"weight_block_size is {shape!r:.60}; fp8 needs two positive integers")
    rows, columns = shape
    assert isinstance(rows, int)
    assert isinstance(columns, int)
    return rows, columns


def join_blocks_and_scales(config: JsonObject, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join each packed weight with the tensor of its scales to one tensor, which is computed when it is read.

    FP8 weights become float32, and MXFP4 weights become blocks of GGUF. Other tensors stay.

    Args:
        config: The contents of ``config.json``.
        stored: The tensors of the folder by name.

    Raises:
        ModelError: Blocks have no scales, or scales of another shape.
    """
    method = read_quantisation_method(config)
    joined = dict(stored)
    for name, tensor in stored.items():
        if method == "fp8" and name.endswith(SCALE_SUFFIX):
            weight = name.removesuffix(SCALE_SUFFIX)
            joined[weight] = _dequantise_fp8(config, _require_byte_tensor_of_scales(tensor, stored, weight), tensor)
            del joined[name]
        elif method == "mxfp4" and name.endswith(SCALES_SUFFIX):
            weight = name.removesuffix(SCALES_SUFFIX)
            joined[weight] = _join_mxfp4(
                _require_byte_tensor_of_scales(tensor, stored, weight + BLOCKS_SUFFIX), tensor, weight
            )
            del joined[name], joined[weight + BLOCKS_SUFFIX]
    for name, tensor in joined.items():
        if tensor.dtype is DType.I8:
            raise tensor.file.make_error(f"tensor {format_name_for_message(name)} has no scales")
    return joined


def _require_byte_tensor_of_scales(scales: Tensor, stored: dict[str, Tensor], name: str) -> Tensor:
    """Return the tensor of packed bytes that `scales` scale; raise `ModelError` if `name` is no such tensor."""
    blocks = stored.get(name)
    if blocks is None or blocks.dtype is not DType.I8:
        raise scales.file.make_error(
            f"tensor {format_name_for_message(scales.name)} is there, but {format_name_for_message(name)} has no bytes"
        )
    return blocks


def _dequantise_fp8(config: JsonObject, weight: Tensor, scales: Tensor) -> Tensor:
    """Return an FP8 weight as a float32 tensor: each block of rows and columns has its own scale."""
    block_rows, block_columns = _read_block_shape(config)
    *leading, rows, columns = weight.shape if len(weight.shape) > 1 else (1, *weight.shape)
    if scales.shape != (*leading, -(-rows // block_rows), -(-columns // block_columns)):
        raise _make_shape_error(weight, scales)
    return derive_tensor(
        weight,
        weight.name,
        shape=weight.shape,
        dtype=DType.F32,
        change=f"float32 of fp8 blocks {block_rows}x{block_columns} with scales of {scales.cache_identity}",
        compute=partial(_compute_fp8_values, scales, block_rows, block_columns),
    )


def _compute_fp8_values(scales: Tensor, block_rows: int, block_columns: int, elements: np.ndarray) -> np.ndarray:
    values = E4M3_VALUES[elements.view(np.uint8)]
    rows, columns = values.shape[-2:]
    factors = np.repeat(dequantise(scales.stored_elements, scales.dtype), block_columns, axis=-1)[..., :columns]
    for first in range(0, rows, block_rows):
        values[..., first : first + block_rows, :] *= factors[..., first // block_rows, None, :]
    return values


def _join_mxfp4(blocks: Tensor, scales: Tensor, name: str) -> Tensor:
    """Return an MXFP4 weight with the blocks of GGUF: scale, then codes i and i + 16 in one byte."""
    *rows, groups, size = blocks.shape
    if scales.dtype is not DType.I8 or scales.shape != (*rows, groups) or size != MXFP4_BYTES:
        raise _make_shape_error(blocks, scales)
    return derive_tensor(
        blocks,
        name,
        shape=(*rows, groups * DType.MXFP4.block),
        dtype=DType.MXFP4,
        change=f"mxfp4 with scales of {scales.cache_identity}",
        compute=partial(_compute_mxfp4_blocks, scales),
    )


def _compute_mxfp4_blocks(scales: Tensor, elements: np.ndarray) -> np.ndarray:
    packed = elements.view(np.uint8)  # neighbours share a byte, the first one is low
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * MXFP4_BYTES)
    out = np.empty((*packed.shape[:-1], DType.MXFP4.block_bytes), np.uint8)
    out[..., 0] = scales.stored_elements.view(np.uint8)
    out[..., 1:] = codes[..., :MXFP4_BYTES] | codes[..., MXFP4_BYTES:] << 4
    return out.reshape(*packed.shape[:-2], -1)


def _make_shape_error(blocks: Tensor, scales: Tensor) -> Exception:
    return scales.file.make_error(
        f"tensor {format_name_for_message(scales.name)} has the shape {list(scales.shape)}, which does not fit blocks "
        f"of shape {list(blocks.shape)}"
    )
