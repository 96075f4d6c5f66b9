"""The kernel table of the NumPy backend by op; ops without a kernel run their reference function."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from ...ops import REGISTRY
from ..capabilities import SourceLocation
from ..host import collectives
from ..host.bindings import Binding, make_float32_reference_binding
from ..kernel_sources import locate_source
from ..kernel_tables import find_op_package_binding, merge_disjoint_tables
from . import attention, elementwise, gated_delta_net, gather_scatter, matmul, norms, reductions, rope

BUILTIN_KERNELS: Mapping[str, Binding] = merge_disjoint_tables(
    elementwise.KERNELS,
    norms.KERNELS,
    reductions.KERNELS,
    matmul.KERNELS,
    gather_scatter.KERNELS,
    attention.KERNELS,
    rope.KERNELS,
    gated_delta_net.KERNELS,
    collectives.KERNELS,
)


@cache
def find_binding(op: str) -> Binding:
    """Return the NumPy kernel of an op: from this package, from the package of the op, or else its reference."""
    return (
        BUILTIN_KERNELS.get(op) or find_op_package_binding(op, "numpy") or make_float32_reference_binding(REGISTRY[op])
    )


def locate_op_source(op: str) -> SourceLocation:
    """Return the source location of the Python function that computes an op in the NumPy backend."""
    own = BUILTIN_KERNELS.get(op) or find_op_package_binding(op, "numpy")
    return locate_source(own.bind if own else REGISTRY[op].reference)
