"""Weights that a folder has in two tensors: blocks of eight-bit floats (FP8) or four-bit floats (MXFP4), and scales.

FP8 weights have one scale for each block, row or matrix. They become bfloat16 if all scales are powers of two, which
is exact, and float32 otherwise. MXFP4 weights, as in gpt-oss, keep their bits.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from ...graph.dtypes import DType
from ...ops.block_layouts import HALF_OF_E4M3
from ...ops.quantisation import dequantise, encode_array
from ..gguf import Tensor
from ..gguf.mapped_file import format_name_for_message
from .derived_tensor import derive_tensor
from .json_files import JsonObject

FP8, MXFP4 = {"F8_E4M3": DType.I8}, {"U8": DType.I8}
STORED_DTYPES = {"fp8": FP8, "compressed-tensors": FP8, "modelopt": FP8, "mxfp4": MXFP4}
"""By ``quant_method`` of ``config.json``: further dtypes of safetensors that the folder may have, read as bytes."""
FP8_SCALE_SUFFIXES = ("_scale_inv", "_scale")
ACTIVATION_SCALE_SUFFIXES = (".input_scale", ".activation_scale")
"""Tensors for activations in FP8, which hocket does not use: its activations are float32."""
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
ORIGINAL_REMEDY = "use the original weights"
EXPANDED_ROWS = 256
"""Rows of an FP8 weight that are dequantised at a time."""
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
        ModelError: The method or its format is not supported.
    """
    quantisation = config.get_object_or_empty("quantization_config")
    if not quantisation.pairs:
        return ""
    method = quantisation.get_text("quant_method", "")
    if method not in STORED_DTYPES:
        raise config.make_error(
            f"quant_method {method[:40]!r} is not supported; need {', '.join(STORED_DTYPES)}", ORIGINAL_REMEDY
        )
    needed = {"compressed-tensors": ("format", "float-quantized"), "modelopt": ("quant_algo", "FP8")}
    key, need = needed.get(method, ("", ""))
    if key and (found := quantisation.get_text(key, "")) != need:
        raise config.make_error(f"{key} of {method} is {found[:40]!r}; need {need!r}", ORIGINAL_REMEDY)
    return method


def _read_block_shape(config: JsonObject) -> tuple[int, int] | None:
    """Return the rows and columns of a block with one scale; None if scales belong to rows or whole matrices."""
    quantisation = config.get_object_or_empty("quantization_config")
    shape = quantisation.get_list_or_empty("weight_block_size")
    for group in quantisation.get_object_or_empty("config_groups").pairs.values():
        weights = JsonObject(config.path, group).get_object_or_empty("weights") if isinstance(group, dict) else config
        shape = shape or weights.get_list_or_empty("block_structure")
    if not shape:
        return None
    rows, columns = shape if len(shape) == 2 else (0, 0)
    if type(rows) is not int or type(columns) is not int or not (0 < rows < 1 << 31 and 0 < columns < 1 << 31):
        raise config.make_error(f"weight_block_size is {shape!r:.60}; fp8 needs two positive integers")
    return rows, columns


def join_blocks_and_scales_when_read(config: JsonObject, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join each packed weight with the tensor of its scales to one tensor, which is computed when it is read.

    FP8 weights become floats, and MXFP4 weights become blocks of GGUF. Scales of activations are left out.

    Args:
        config: The contents of ``config.json``.
        stored: The tensors of the folder by name.

    Raises:
        ModelError: Blocks have no scales, or scales of another shape, or a weight is there twice.
    """
    method = read_quantisation_method(config)
    joined = {name: tensor for name, tensor in stored.items() if not name.endswith(ACTIVATION_SCALE_SUFFIXES)}
    if method == "mxfp4":
        for name in [name for name in joined if name.endswith(SCALES_SUFFIX)]:
            scales, weight = joined.pop(name), name.removesuffix(SCALES_SUFFIX)
            blocks = _find_packed_tensor_of_scales(scales, stored, weight + BLOCKS_SUFFIX)
            if weight in joined:
                raise _make_duplicate_error(joined[weight], blocks)
            joined[weight] = _join_mxfp4(blocks, scales, weight)
            del joined[weight + BLOCKS_SUFFIX]
    elif method:
        scales_by_weight: dict[str, Tensor] = {}
        for end, name in [(end, name) for end in FP8_SCALE_SUFFIXES for name in joined if name.endswith(end)]:
            scales, weight = joined.pop(name), name.removesuffix(end)
            if weight in scales_by_weight:
                raise _make_duplicate_error(scales, scales_by_weight[weight])
            scales_by_weight[weight] = scales
        dtype = DType.BF16 if all(map(_are_powers_of_two, scales_by_weight.values())) else DType.F32
        for weight, scales in scales_by_weight.items():
            blocks = _find_packed_tensor_of_scales(scales, stored, weight)
            joined[weight] = _dequantise_fp8(config, blocks, scales, dtype)
    for name, tensor in joined.items():
        if tensor.dtype is DType.I8:
            raise tensor.file.make_error(f"tensor {format_name_for_message(name)} has no scales")
    return joined


def _are_powers_of_two(scales: Tensor) -> bool:
    """Return whether all scales are powers of two, so that their products with FP8 weights are exact in bfloat16."""
    factors = dequantise(scales.stored_elements, scales.dtype)
    are_exact = bool(np.all((np.frexp(factors)[0] == 0.5) & (factors > 2.0**-60) & (factors < 2.0**60)))
    scales.release_memory()
    return are_exact


def _find_packed_tensor_of_scales(scales: Tensor, stored: dict[str, Tensor], name: str) -> Tensor:
    """Return the tensor of packed bytes that `scales` scale; raise `ModelError` if `name` is no such tensor."""
    blocks = stored.get(name)
    if blocks is None or blocks.dtype is not DType.I8:
        raise scales.file.make_error(
            f"tensor {format_name_for_message(scales.name)} is there, but {format_name_for_message(name)} has no bytes"
        )
    return blocks


def _dequantise_fp8(config: JsonObject, weight: Tensor, scales: Tensor, dtype: DType) -> Tensor:
    """Return an FP8 weight as a tensor of `dtype`; each block, row or matrix has its own scale."""
    if scales.dtype is DType.I8:
        raise scales.file.make_error(f"tensor {format_name_for_message(scales.name)} has FP8 scales", ORIGINAL_REMEDY)
    *leading, rows, columns = weight.shape if len(weight.shape) > 1 else (1, *weight.shape)
    sizes = [(rows, columns), (1, columns)]  # of a whole matrix and of a row
    if block := _read_block_shape(config):
        sizes.insert(0, block)
    for block_rows, block_columns in sizes:
        counts = (*leading, -(-rows // block_rows), -(-columns // block_columns))
        if tuple(n for n in scales.shape if n > 1) == tuple(n for n in counts if n > 1):
            break
    else:
        raise _make_shape_error(weight, scales)
    return derive_tensor(
        weight,
        weight.name,
        shape=weight.shape,
        dtype=dtype,
        change=f"{dtype} of fp8 blocks {block_rows}x{block_columns} with scales of {scales.cache_identity}",
        compute=partial(_compute_fp8_values, scales, counts, block_rows, block_columns, dtype),
    )


def _compute_fp8_values(
    scales: Tensor,
    counts: tuple[int, ...],
    block_rows: int,
    block_columns: int,
    dtype: DType,
    elements: np.ndarray,
) -> np.ndarray:
    stored = elements.view(np.uint8)
    rows, columns = stored.shape[-2:] if stored.ndim > 1 else (1, *stored.shape)
    out = np.empty(stored.shape, dtype.storage)
    bytes_, results = (array.reshape(*counts[:-2], rows, columns) for array in (stored, out))
    factors = dequantise(scales.stored_elements, scales.dtype).reshape(counts)
    factors = np.repeat(factors, block_columns, axis=-1)[..., :columns]
    for first in range(0, rows, EXPANDED_ROWS):
        part = np.s_[..., first : first + EXPANDED_ROWS, :]
        of_rows = np.arange(rows)[part[1]] // block_rows
        results[part] = encode_array(E4M3_VALUES[bytes_[part]] * factors[..., of_rows, :], dtype)
    return out


def _join_mxfp4(blocks: Tensor, scales: Tensor, name: str) -> Tensor:
    """Join the blocks and scales of an MXFP4 weight to GGUF blocks: the scale, then codes i and i + 16 in one byte."""
    *rows, groups = scales.shape
    if scales.dtype is not DType.I8 or blocks.shape != (*scales.shape, MXFP4_BYTES):
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


def _make_duplicate_error(tensor: Tensor, other: Tensor) -> Exception:
    names = (format_name_for_message(t.name) for t in (tensor, other))
    return tensor.file.make_error("tensors {} and {} state the same weight; need one of them".format(*names))


def _make_shape_error(blocks: Tensor, scales: Tensor) -> Exception:
    return scales.file.make_error(
        f"tensor {format_name_for_message(scales.name)} has the shape {list(scales.shape)}, which does not fit blocks "
        f"of shape {list(blocks.shape)}"
    )
