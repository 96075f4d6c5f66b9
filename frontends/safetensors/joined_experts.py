"""The experts of gpt-oss folders: all experts of a layer are one tensor, in which gate and up projection alternate."""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from ...graph.dtypes import DType
from ...ops.quantisation import dequantise
from ..gguf import Tensor
from .derived_tensor import derive_tensor

EXPERTS_NAME = re.compile(r"model\.layers\.(\d{1,5})\.mlp\.experts\.(gate_up|down)_proj(_bias)?")
PARTS = {"gate_up": (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))), "down": (("down", slice(None)),)}
"""By name in the folder: the name of each projection in GGUF, and its rows."""


def split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the expert tensors of GGUF for a tensor of a gpt-oss folder; empty if it has no experts.

    Args:
        name: Name in the folder.
        tensor: A bias [experts, rows], a float weight [experts, columns, rows], or an MXFP4 weight [experts, rows,
            columns].

    Raises:
        ModelError: The tensor has another number of axes, or rows that are no pairs.
    """
    match = EXPERTS_NAME.fullmatch(name)
    if match is None:
        return {}
    layer, kind, is_bias = int(match[1]), match[2], match[3] is not None
    if len(tensor.shape) != (2 if is_bias else 3) or (kind == "gate_up" and _list_axes(tensor, is_bias)[1] % 2):
        raise tensor.file.make_error(f"tensor {name} has the shape {list(tensor.shape)}; need experts of pairs of rows")
    experts, rows, *columns = _list_axes(tensor, is_bias)
    dtype = DType.F32 if is_bias else tensor.dtype
    return {
        (own := f"blk.{layer}.ffn_{part}_exps.{'bias' if is_bias else 'weight'}"): derive_tensor(
            tensor,
            own,
            shape=(experts, len(range(rows)[chosen]), *columns),
            dtype=dtype,
            change=f"{part} rows as {dtype}",
            compute=partial(_take_rows, tensor.dtype, dtype, chosen, _is_transposed(tensor, is_bias)),
        )
        for part, chosen in PARTS[kind]
    }


def _is_transposed(tensor: Tensor, is_bias: bool) -> bool:
    """Return whether a tensor is stored as [experts, columns, rows], as float weights are."""
    return not is_bias and not tensor.dtype.is_quantised


def _list_axes(tensor: Tensor, is_bias: bool) -> tuple[int, ...]:
    """Return the shape of a tensor in the order (experts, rows, columns); a bias has no columns."""
    if _is_transposed(tensor, is_bias):
        experts, columns, rows = tensor.shape
        return experts, rows, columns
    return tensor.shape


def _take_rows(source: DType, dtype: DType, chosen: slice, is_transposed: bool, elements: np.ndarray) -> np.ndarray:
    if dtype is not source:
        elements = dequantise(elements, source)
    return (elements.swapaxes(1, 2) if is_transposed else elements)[:, chosen]
