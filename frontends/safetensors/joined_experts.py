"""Experts of folders with one tensor for all experts of a layer, and with one tensor for each expert.

A tensor of all experts holds the gate and the up projection. In gpt-oss their rows alternate, and float weights are
transposed. In Qwen folders the gate rows of an expert precede its up rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from hashlib import sha256

import numpy as np

from ...graph.dtypes import DType
from ...graph.errors import format_count
from ...ops.quantisation import dequantise
from ..gguf import Tensor
from .derived_tensor import derive_tensor

EXPERTS_NAME = re.compile(r"model\.layers\.(\d{1,5})\.mlp\.experts\.(gate_up|down)_proj(_bias)?")
EXPERT_NAME = re.compile(r"model\.layers\.(\d{1,5})\.mlp\.experts\.(\d{1,5})\.(gate|up|down)_proj\.weight")


def split_joined_experts(architecture: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the GGUF tensors, such as gate and up, that a Hugging Face tensor with all experts of a layer holds.

    The result is empty for a tensor of another kind.

    Args:
        architecture: The architecture in GGUF.
        name: The name of the tensor in the Hugging Face folder.
        tensor: A bias [experts, rows] or a weight [experts, rows, columns]. Float weights of gpt-oss are [experts,
            columns, rows].

    Raises:
        ModelError: The tensor has another number of axes, or an odd number of rows for gate and up.
    """
    match = EXPERTS_NAME.fullmatch(name)
    if match is None:
        return {}
    layer, kind, is_bias, is_gpt_oss = int(match[1]), match[2], match[3] is not None, architecture == "gpt-oss"
    if len(tensor.shape) != (2 if is_bias else 3) or (is_bias and not is_gpt_oss):
        raise _make_shape_error(name, tensor)
    is_transposed = is_gpt_oss and not is_bias and not tensor.dtype.is_quantised
    experts, rows, *columns = (tensor.shape[i] for i in ((0, 2, 1) if is_transposed else range(len(tensor.shape))))
    if kind == "gate_up" and rows % 2:
        raise _make_shape_error(name, tensor)
    halves = (slice(0, None, 2), slice(1, None, 2)) if is_gpt_oss else (slice(0, rows // 2), slice(rows // 2, rows))
    parts = zip(("gate", "up"), halves, strict=True) if kind == "gate_up" else (("down", slice(None)),)
    dtype = DType.F32 if is_bias else tensor.dtype
    return {
        (own := f"blk.{layer}.ffn_{part}_exps.{'bias' if is_bias else 'weight'}"): derive_tensor(
            tensor,
            own,
            shape=(experts, len(range(rows)[chosen]), *columns),
            dtype=dtype,
            change=f"{part} rows as {dtype}",
            compute=partial(_take_rows, tensor.dtype, dtype, chosen, is_transposed),
        )
        for part, chosen in parts
    }


def stack_experts(name: str, count: int, expert_by_number: Mapping[int, Tensor]) -> Tensor:
    """Return the matrices of all experts of a layer as one tensor [experts, rows, columns], stacked when it is read.

    Raises:
        ModelError: The experts are not numbered from 0 to ``count - 1``, or they differ in shape or dtype.
    """
    experts = [expert_by_number[number] for number in sorted(expert_by_number)]
    first = experts[0]
    missing = [number for number in range(min(count, len(experts))) if number not in expert_by_number]
    if missing:
        raise first.file.make_error(
            f"{name} has no expert {missing[0]}, but expert {max(expert_by_number)}; need numbers from 0 to {count - 1}"
        )
    if len(experts) != count or any((e.shape, e.dtype) != (first.shape, first.dtype) for e in experts):
        raise first.file.make_error(
            f"{name} has {format_count(len(experts), 'expert')}; need {count} of equal shape and dtype"
        )
    origins = sha256(repr([e.cache_identity for e in experts]).encode()).hexdigest()

    def stack(_: np.ndarray) -> np.ndarray:
        stacked = np.stack([e.stored_elements for e in experts])
        for expert in experts:
            expert.release_memory()
        return stacked

    return derive_tensor(
        first, name, shape=(count, *first.shape), dtype=first.dtype, change=f"stack of {origins}", compute=stack
    )


def _make_shape_error(name: str, tensor: Tensor) -> Exception:
    return tensor.file.make_error(f"tensor {name} has the shape {list(tensor.shape)}; need experts of pairs of rows")


def _take_rows(source: DType, dtype: DType, chosen: slice, is_transposed: bool, elements: np.ndarray) -> np.ndarray:
    if dtype is not source:
        elements = dequantise(elements, source)
    return (elements.swapaxes(1, 2) if is_transposed else elements)[:, chosen]
