"""The kernel table of the NumPy backend by op; ops without a kernel run their reference function."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from ...ops import REGISTRY
from ..capabilities import SourceLocation
from ..host import collectives
from ..host.bindings import Binding, make_float32_reference_binding
from ..kernel_sources import read_source_location_and_text
from ..kernel_tables import find_op_package_binding, merge_disjoint_tables
from . import attention, copies, gated_delta_net, gather_scatter, matmul, reductions, rope
from .expressions import make_expression_binding

BUILTIN_KERNELS: Mapping[str, Binding] = merge_disjoint_tables(
    copies.KERNELS,
    reductions.KERNELS,
    matmul.KERNELS,
    gather_scatter.KERNELS,
    attention.KERNELS,
    rope.KERNELS,
    gated_delta_net.KERNELS,
    collectives.KERNELS,
)


@cache
def find_or_make_binding(op: str) -> Binding:
    """Return the NumPy kernel of an op: from this package or the package of the op, else made from its declaration."""
    if own := BUILTIN_KERNELS.get(op) or find_op_package_binding(op, "numpy"):
        return own
    declared = REGISTRY[op]
    if declared.expression and not declared.expression.place:
        return make_expression_binding(declared.expression)
    return make_float32_reference_binding(declared)


def locate_op_source(op: str) -> SourceLocation:
    """Return the source location of the Python function that computes or declares an op in the NumPy backend."""
    own = BUILTIN_KERNELS.get(op) or find_op_package_binding(op, "numpy")
    return read_source_location_and_text(own.bind if own else REGISTRY[op].reference)
