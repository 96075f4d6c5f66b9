"""Binds instructions at placeholder addresses to test support and to measure scratch, before memory exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...graph.dtypes import CACHE_DTYPES, DType
from ...graph.spec import Spec
from ..base import Tensor, contiguous_strides
from ..fusion.operands import BoundInstruction, NoKernelError, Operand
from .binding.launch_builder import LaunchBuilder
from .binding.weight_packing import PLANE_LAYOUTS, pad_packed_spec_rows_to_units
from .device.device_limits import KernelLimits
from .kernel_table import find_op_binder

HALF_TYPES = (DType.F16, DType.BF16)
LOADED_LEAF_KINDS = ("weight", "constant")
"""Kinds of leaves that `load` fills."""


@dataclass(frozen=True, slots=True, eq=False)
class UnboundOperand:
    """An operand without an address, for choosing kernels before memory exists.

    A leaf, or a view of a leaf, also has the specs of its whole buffer. Two operands are equal only if they are the
    same object, so a backend makes each operand once.

    Args:
        spec: The spec of the operand as stored.
        declared_spec: The declared spec of the whole buffer, or `None`.
        stored_spec: The stored spec of the whole buffer, or `None`.
        is_whole_buffer: Whether the operand is the whole buffer.
        kind: The kind of the buffer, as in `Operand`.
    """

    spec: Spec
    declared_spec: Spec | None = None
    stored_spec: Spec | None = None
    is_whole_buffer: bool = True
    kind: str = ""


def _make_reversed_gapped_strides(shape: Sequence[int], block: int) -> tuple[int, ...]:
    """Return strides that no dense array has, to test whether kernels accept any strides: reversed axes with gaps.

    The elements of rows of quantisation blocks stay adjacent.
    """
    rows, strides, step = shape[:-1] if block > 1 else shape, [], 2 * (shape[-1] if block > 1 else 1)
    for n in rows:
        strides.append(step)
        step *= max(n, 1) + 1
    return (*strides, *([1] if block > 1 else []))


@lru_cache(maxsize=4096)
def compute_scratch_bytes_at_placeholders(
    op: str,
    src: tuple[UnboundOperand | None, ...],
    results: tuple[Spec, ...],
    attrs: tuple[tuple[str, Any], ...],
    limits: KernelLimits,
    strided_operand: int | None,
) -> int:
    """Return the scratch bytes of an instruction, found by binding it to operands at placeholder addresses.

    Args:
        op: The name of the op.
        src: The operands; `None` for an absent operand.
        results: Specs of the results as stored.
        attrs: The attributes.
        limits: Resource limits of the device.
        strided_operand: Index of an operand that gets a layout with gaps, or `None` if all operands are contiguous.

    Returns:
        The scratch bytes.

    Raises:
        NoKernelError: No kernel supports the instruction.
    """
    bind = find_op_binder(op)
    if bind is None:
        raise NoKernelError(f"backends/cupy has no kernel for {op}")

    def operand(number: int, known: UnboundOperand) -> Operand:
        spec, packed = known.spec, known.spec.dtype.is_quantised
        strides = (
            _make_reversed_gapped_strides(spec.shape, spec.dtype.block)
            if number == strided_operand and not (packed and known.kind in LOADED_LEAF_KINDS)
            else contiguous_strides(spec.shape)
        )
        offset = spec.dtype.block_bytes if packed and not known.is_whole_buffer else 0
        tensor = Tensor(number, offset, spec.shape, strides, spec.dtype)
        return Operand(((number + 1) << 40) + offset, tensor, known.declared_spec, known.stored_spec, known.kind)

    launches = LaunchBuilder(upload_array=lambda array: 1 << 20, limits=limits)
    there = tuple(None if s is None else operand(n, s) for n, s in enumerate(src))
    results_at = tuple(operand(len(src) + n, UnboundOperand(s)) for n, s in enumerate(results))
    bind(launches, BoundInstruction(op, there, results_at, dict(attrs)))
    return launches.scratch_bytes


@lru_cache(maxsize=1 << 14)  # a plan repeats the question for every layer and device
def infer_spec_in_device_memory(spec: Spec, kind: str, is_exact: bool) -> Spec:
    """Return the shape and dtype in which the backend stores a value in device memory.

    Packed weights keep their dtype, with rows padded to complete units. Integers, 16-bit weight matrices, and states
    with rows of a cache dtype keep their spec. All other values are stored as float32.

    Args:
        spec: The declared spec of the value.
        kind: ``value``, or the op of a leaf, such as ``weight``.
        is_exact: Whether the backend computes in float32. Then all weights are stored as float32.
    """
    matrix = kind in LOADED_LEAF_KINDS and len(spec.shape) >= 2 and not is_exact
    if matrix and spec.dtype in PLANE_LAYOUTS:
        return pad_packed_spec_rows_to_units(spec)
    if spec.dtype.is_integer or (spec.dtype in HALF_TYPES and matrix):
        return spec
    if kind == "state" and len(spec.shape) == 2 and spec.dtype in CACHE_DTYPES:
        return spec
    return Spec(spec.shape, DType.F32)


@lru_cache(maxsize=1 << 14)
def make_unbound_operand(
    shape: tuple[int, ...], base: Spec, kind: str, is_base: bool, is_exact: bool
) -> UnboundOperand:
    """Make an operand without an address: the whole of a leaf or value with declared spec `base`, or a view of it."""
    stored = infer_spec_in_device_memory(base, kind, is_exact)
    own = kind in ("weight", "state", "constant")
    declared_spec, stored_spec = (base, stored) if own else (None, None)
    return UnboundOperand(Spec(shape, stored.dtype), declared_spec, stored_spec, is_base, kind)
