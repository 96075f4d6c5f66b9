"""All kernels of the backend by op: our own, and the reference itself for ops that are rarely hot."""

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
    """How an op is computed: by a kernel of ours, one that the op brings with it, or its reference."""
    return OWN.get(op) or brought(op, "numpy") or through_reference(REGISTRY[op])


def source(op: str) -> Source:
    """Where what computes an op is written."""
    own = OWN.get(op) or brought(op, "numpy")
    return source_of(own.bind if own else REGISTRY[op].reference)
