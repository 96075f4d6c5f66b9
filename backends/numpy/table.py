"""All kernels of the backend by op; ops without a kernel run their reference."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from ...ops import REGISTRY
from .. import meeting
from ..abilities import Source
from ..calls import Binding, through_reference
from ..sources import source_of
from ..table import brought, merged
from . import attention, elementwise, matmul, moves, norms, recurrent, reductions, rotary

OWN: Mapping[str, Binding] = merged(
    elementwise.KERNELS,
    norms.KERNELS,
    reductions.KERNELS,
    matmul.KERNELS,
    moves.KERNELS,
    attention.KERNELS,
    rotary.KERNELS,
    recurrent.KERNELS,
    meeting.KERNELS,
)


@cache
def kernel(op: str) -> Binding:
    """Return the binding of an op: a kernel of this package, one that the op provides, or its reference."""
    return OWN.get(op) or brought(op, "numpy") or through_reference(REGISTRY[op])


def source(op: str) -> Source:
    """Return the location of the function that computes an op."""
    own = OWN.get(op) or brought(op, "numpy")
    return source_of(own.bind if own else REGISTRY[op].reference)
