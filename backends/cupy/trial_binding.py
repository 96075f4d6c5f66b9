"""Binds instructions at placeholder addresses to test support and to measure scratch, before memory exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...graph.spec import Spec
from ..base import Tensor, contiguous_strides
from ..fusion.operands import BoundInstruction, NoKernelError, Operand
from .binding.launch_builder import LaunchBuilder
from .device.device_limits import KernelLimits
from .kernel_table import find_op_binder


@dataclass(frozen=True, slots=True, eq=False)
class UnboundOperand:
    """An operand without an address, from which kernels are chosen before memory exists.

    A leaf, or a view of a leaf, also has the specs of its whole buffer. Two operands are equal only if they are the
    same object, so a backend makes each operand once.

    Args:
        spec: The spec of the operand as stored.
        declared_spec: The declared spec of the whole buffer, or `None`.
        stored_spec: The stored spec of the whole buffer, or `None`.
        is_whole_buffer: Whether the operand is the whole buffer.
    """

    spec: Spec
    declared_spec: Spec | None = None
    stored_spec: Spec | None = None
    is_whole_buffer: bool = True


def _make_gapped_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return strides that no contiguous array of this shape has: axes in reversed order, gaps between elements."""
    strides, step = [], 2
    for n in shape:
        strides.append(step)
        step *= max(n, 1) + 1
    return tuple(strides)


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
            _make_gapped_strides(spec.shape)
            if number == strided_operand and not packed
            else contiguous_strides(spec.shape)
        )
        offset = spec.dtype.block_bytes if packed and not known.is_whole_buffer else 0
        tensor = Tensor(number, offset, spec.shape, strides, spec.dtype)
        return Operand(((number + 1) << 40) + offset, tensor, known.declared_spec, known.stored_spec)

    launches = LaunchBuilder(upload_array=lambda array: 1 << 20, limits=limits)
    there = tuple(None if s is None else operand(n, s) for n, s in enumerate(src))
    results_at = tuple(operand(len(src) + n, UnboundOperand(s)) for n, s in enumerate(results))
    bind(launches, BoundInstruction(op, there, results_at, dict(attrs)))
    return launches.scratch_bytes
