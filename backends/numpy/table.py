"""All kernels of the backend by op: our own, and the reference itself for ops that are rarely hot."""

from __future__ import annotations

from collections.abc import Mapping

from ...ops import REGISTRY
from . import attention, collective, elementwise, matmul, moves, norms, recurrent, reductions, rotary
from .kernel import Kernel, kernels, through_reference

OWN: Mapping[str, Kernel] = kernels(
    elementwise.KERNELS,
    norms.KERNELS,
    reductions.KERNELS,
    matmul.KERNELS,
    moves.KERNELS,
    attention.KERNELS,
    rotary.KERNELS,
    recurrent.KERNELS,
    collective.KERNELS,
)

KERNELS: Mapping[str, Kernel] = {name: OWN.get(name) or through_reference(op) for name, op in REGISTRY.items()}
