"""Instructions bound at made-up addresses: whether kernels take them, with how much scratch, before memory is dealt."""

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
    """An operand without an address: its spec as it is stored; of a leaf, or a view of one, also what the whole buffer
    is declared as and holds, and whether this is all of it.  Equality is identity: a backend makes each once."""

    spec: Spec
    declared: Spec | None = None
    stored: Spec | None = None
    whole: bool = True


def _awkward(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of an array that lies with its axes the other way round, and with gaps."""
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
    """Bind an instruction at made-up addresses, its results as they are stored; the bytes of scratch that it takes.
    Raises `NoKernelError`."""
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
