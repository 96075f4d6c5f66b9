"""Views become strides: every value is a base value with offset and strides, in elements."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ...backends.base import contiguous_strides
from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...graph.records import dataclass
from ...graph.rewrite import rewrite
from ...ops import cont, op_of


@dataclass(frozen=True, slots=True)
class Strided:
    """Elements of `base` from `offset` on with `strides`, all counted in elements."""

    base: Value
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """Whether elements follow each other in row-major order."""
        if 0 in self.shape:
            return True
        dense = contiguous_strides(self.shape)
        return all(n == 1 or s == d for n, s, d in zip(self.shape, self.strides, dense, strict=True))

    @property
    def covers_base(self) -> bool:
        """Whether it is all of `base`, in order."""
        return self.offset == 0 and self.is_dense and math.prod(self.shape) == self.base.spec.size


def whole(value: Value) -> Strided:
    """A value as a dense view of itself."""
    return Strided(value, 0, value.shape, contiguous_strides(value.shape))


def through_view(node: Node, source: Strided) -> Strided | None:
    """The result of a view node over `source`; None where strides cannot say it (a reshape of a permuted array)."""
    as_view = op_of(node).as_view
    assert as_view is not None
    # One byte an element, so that NumPy's strides and addresses are counts of elements; nothing is read.
    origin = np.empty(1, np.uint8)
    dummy = np.lib.stride_tricks.as_strided(origin, source.shape, source.strides)
    try:
        view = as_view(dummy, **node.attrs)
    except ValueError:
        return None
    shift = view.__array_interface__["data"][0] - dummy.__array_interface__["data"][0] if view.size else 0
    return Strided(source.base, source.offset + shift, view.shape, view.strides)


def resolve(graph: Graph) -> dict[Value, Strided]:
    """Every value as a strided view of the value whose memory it shares.  `graph` is one that `densify` gave."""
    views: dict[Value, Strided] = {}
    for node in graph.nodes:
        if not node.is_leaf and op_of(node).is_view:
            view = through_view(node, views[node.inputs[0]])
            assert view is not None, "densify() inserts a cont before such a view"
            views[Value(node)] = view
        else:
            views.update((v, whole(v)) for v in node.results)
    return views


def densify(graph: Graph, reads_strided: Callable[[Node, int], bool]) -> Graph:
    """Insert a `cont` before each operand that its kernel, or its reshape, cannot read as it lies.

    `reads_strided(node, operand)` says whether a kernel takes any strides there.  One copy serves all readers.
    """
    views: dict[Value, Strided] = {}
    copies: dict[Value, Value] = {}

    def dense(value: Value) -> Value:
        if value not in copies:
            copies[value] = cont(value, name=f"{value.node.name or value.node.op}.cont")
            views[copies[value]] = whole(copies[value])
        return copies[value]

    def rule(node: Node) -> tuple[Value, ...] | None:
        if node.is_leaf:
            views[Value(node)] = whole(Value(node))
            return None
        if op_of(node).is_view:
            source = node.inputs[0]
            view = through_view(node, views[source])
            if view is None:
                node = node.with_src((dense(source),))
                view = through_view(node, views[node.inputs[0]])
                assert view is not None
            views[Value(node)] = view
            return node.results
        src = tuple(
            dense(s) if s is not None and not views[s].is_dense and not reads_strided(node, i) else s
            for i, s in enumerate(node.src)
        )
        node = node if src == node.src else node.with_src(src)
        views.update((v, whole(v)) for v in node.results)
        return node.results

    return rewrite(graph, rule)
