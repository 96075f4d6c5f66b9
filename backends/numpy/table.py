"""All kernels of the backend by op: our own, and the reference itself for ops that are rarely hot."""

from __future__ import annotations

from collections.abc import Mapping

from ...ops import REGISTRY
from .. import meeting
from ..calls import Binding, through_reference
from ..table import merged
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

KERNELS: Mapping[str, Binding] = {name: OWN.get(name) or through_reference(op) for name, op in REGISTRY.items()}
