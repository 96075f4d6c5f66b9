"""Strided views: every value is a base value with an offset and strides, in elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

import numpy as np

from ...backends.base import contiguous_strides
from ...graph.attrs import Attr
from ...graph.graph import Graph
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...graph.rewrite import rewrite_graph
from ...ops import REGISTRY, cont, op_of


@dataclass(frozen=True, slots=True)
class StridedView:
    """A strided view of the memory of the value `base`.

    Offset and strides count elements, not bytes.
    """

    base: Value
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """Whether the elements of the view are consecutive in memory, in row-major order."""
        return _has_dense_strides(self.shape, self.strides)

    @property
    def is_reshape_of_base(self) -> bool:
        """Whether the view has all elements of `base` in memory order; only its shape may differ."""
        return self.offset == 0 and self.is_dense and math.prod(self.shape) == self.base.spec.size


@lru_cache(maxsize=1 << 14)  # equal for all layers and devices
def _has_dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether an array is dense: row-major without gaps. Strides of axes of size 1 do not count."""
    if 0 in shape:
        return True
    return all(n == 1 or s == d for n, s, d in zip(shape, strides, contiguous_strides(shape), strict=True))


def make_dense_view(value: Value) -> StridedView:
    """Return the trivial view of a value that owns its memory: offset 0 and row-major strides."""
    return StridedView(value, 0, value.shape, contiguous_strides(value.shape))


def compute_strides_of_view_node(node: Node, source_view: StridedView) -> StridedView | None:
    """Compute the offset, shape and strides of a view node, such as a transpose, from the view of its operand.

    Returns:
        The view of the same base; None if strides cannot describe it, such as the reshape of a permuted array.
    """
    seen = _compute_strided_view_geometry(node.op, tuple(node.attrs.items()), source_view.shape, source_view.strides)
    return None if seen is None else StridedView(source_view.base, source_view.offset + seen[0], *seen[1:])


@lru_cache(maxsize=1 << 14)
def _compute_strided_view_geometry(
    op: str, attrs: tuple[tuple[str, Attr], ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Return the offset, the shape and the strides of a view op's result, in elements.

    Returns None if strides cannot describe the result, so that NumPy would copy the elements.

    Args:
        op: The name of the view op.
        attrs: The attributes of the node.
        shape: The shape of the operand.
        strides: The strides of the operand, in elements.
    """
    as_view = REGISTRY[op].as_view
    assert as_view is not None
    # One byte an element, so that NumPy's strides and addresses are counts of elements; nothing is read.
    origin = np.empty(1, np.uint8)
    dummy = np.lib.stride_tricks.as_strided(origin, shape, strides)
    try:
        view = as_view(dummy, **dict(attrs))
    except ValueError:
        return None
    shift = view.__array_interface__["data"][0] - dummy.__array_interface__["data"][0] if view.size else 0
    return shift, view.shape, view.strides


def insert_dense_copies(
    graph: Graph, reads_strided: Callable[[Node, int], bool]
) -> tuple[Graph, Mapping[Value, StridedView]]:
    """Insert a dense copy (a `cont` node) before each operand with strides that its reader cannot handle.

    The reader is a kernel, or a reshape of an array that is not dense. One copy serves all readers.

    Args:
        graph: The graph.
        reads_strided: Returns whether the kernel of a node accepts any strides for the operand at a position.

    Returns:
        The graph with copies, and each of its values as a view of the value that owns the memory.
    """
    views: dict[Value, StridedView] = {}
    copies: dict[Value, Value] = {}

    def dense(value: Value) -> Value:
        if value not in copies:
            copies[value] = cont(value, name=f"{value.node.name or value.node.op}.cont")
            views[copies[value]] = make_dense_view(copies[value])
        return copies[value]

    def dense_in(node: Node, operands: Collection[int]) -> Node:
        return node.with_src(
            tuple([dense(s) if s is not None and i in operands else s for i, s in enumerate(node.src)])
        )

    def rule(node: Node) -> tuple[Value, ...] | None:
        if not node.is_leaf and op_of(node).is_view:
            view, became = compute_strides_of_view_node(node, views[node.inputs[0]]), node
            if view is None:
                became = dense_in(node, [0])
                view = compute_strides_of_view_node(became, views[became.inputs[0]])
                assert view is not None
            views[became.results[0]] = view
        else:
            strided = [i for i, s in enumerate(node.src) if s is not None and not views[s].is_dense]
            copied = [i for i in strided if not reads_strided(node, i)]
            became = dense_in(node, copied) if copied else node
            views.update((v, make_dense_view(v)) for v in became.results)
        return None if became is node else became.results

    return rewrite_graph(graph, rule), views
