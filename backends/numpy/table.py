"""All kernels of the backend by op."""

from __future__ import annotations

from collections.abc import Mapping

from . import attention, elementwise, matmul, moves, norms, recurrent, rotary
from .kernel import Kernel, kernels

KERNELS: Mapping[str, Kernel] = kernels(
    elementwise.KERNELS,
    norms.KERNELS,
    matmul.KERNELS,
    moves.KERNELS,
    attention.KERNELS,
    rotary.KERNELS,
    recurrent.KERNELS,
)
