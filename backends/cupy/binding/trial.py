"""Binds instructions at placeholder addresses to test support and to measure scratch, before memory exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ....graph.spec import Spec
from ...base import Tensor, contiguous_strides
from ...operands import Bound, NoKernelError, Operand
from ..device.limits import Limits
from ..table import binding
from .launches import Launches


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """An operand without an address.

    A leaf, or a view of one, also has the declared and the stored spec of the whole buffer, and `is_whole_buffer`.
    Equality is identity: a backend makes each object once.

    Args:
        spec: The spec as stored.
        declared_spec: The declared spec of the buffer.
        stored_spec: The stored spec of the buffer.
        is_whole_buffer: Whether the operand is the whole buffer.
    """

    spec: Spec
    declared: Spec | None = None
    stored: Spec | None = None
    whole: bool = True


def _awkward(shape: Sequence[int]) -> tuple[int, ...]:
    """Return strides with reversed axes and gaps."""
    strides, step = [], 2
    for n in shape:
        strides.append(step)
        step *= max(n, 1) + 1
    return tuple(strides)


@lru_cache(maxsize=4096)
def tried(
    op: str,
    src: tuple[Known | None, ...],
    results: tuple[Spec, ...],
    attrs: tuple[tuple[str, Any], ...],
    limits: Limits,
    strided: int | None,
) -> int:
    """Bind an instruction at placeholder addresses.

    Args:
        op: The name of the op.
        src: The operands.
        results: Specs of the results as stored.
        attrs: The attributes.
        limits: Resource limits of the device.
        strided: The number of an operand that is not contiguous, or `None`.

    Returns:
        The scratch bytes.

    Raises:
        NoKernelError: No kernel supports the instruction.
    """
    bind = binding(op)
    if bind is None:
        raise NoKernelError(f"backends/cupy has no kernel for {op}")

    def operand(number: int, known: Known) -> Operand:
        spec, packed = known.spec, known.spec.dtype.is_quantised
        strides = _awkward(spec.shape) if number == strided and not packed else contiguous_strides(spec.shape)
        offset = spec.dtype.block_bytes if packed and not known.whole else 0
        tensor = Tensor(number, offset, spec.shape, strides, spec.dtype)
        return Operand(((number + 1) << 40) + offset, tensor, known.declared, known.stored)

    launches = Launches(keep=lambda array: 1 << 20, limits=limits)
    there = tuple(None if s is None else operand(n, s) for n, s in enumerate(src))
    made = tuple(operand(len(src) + n, Known(s)) for n, s in enumerate(results))
    bind(launches, Bound(op, there, made, dict(attrs)))
    return launches.taken
