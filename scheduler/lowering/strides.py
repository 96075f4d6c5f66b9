"""Views become strides: every value is a base value with offset and strides, in elements."""

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
class Strided:
    """Elements of `base` from `offset` on with `strides`, all counted in elements."""

    base: Value
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """Whether elements follow each other in row-major order."""
        return _is_dense(self.shape, self.strides)

    @property
    def covers_base(self) -> bool:
        """Whether it is all of `base`, in order."""
        return self.offset == 0 and self.is_dense and math.prod(self.shape) == self.base.spec.size


@lru_cache(maxsize=1 << 14)  # every layer and device asks
def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in shape:
        return True
    return all(n == 1 or s == d for n, s, d in zip(shape, strides, contiguous_strides(shape), strict=True))


def whole(value: Value) -> Strided:
    """A value as a dense view of itself."""
    return Strided(value, 0, value.shape, contiguous_strides(value.shape))


def through_view(node: Node, source: Strided) -> Strided | None:
    """The result of a view node over `source`; None where strides cannot say it (a reshape of a permuted array)."""
    seen = _through(node.op, tuple(node.attrs.items()), source.shape, source.strides)
    return None if seen is None else Strided(source.base, source.offset + seen[0], *seen[1:])


@lru_cache(maxsize=1 << 14)
def _through(
    op: str, attrs: tuple[tuple[str, Attr], ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """How far a view begins behind its source, its shape and its strides."""
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


def densify(graph: Graph, reads_strided: Callable[[Node, int], bool]) -> tuple[Graph, Mapping[Value, Strided]]:
    """Insert a `cont` before each operand that its kernel, or its reshape, cannot read as it lies; and every value of
    that graph as a strided view of the value whose memory it shares.

    `reads_strided(node, operand)` says whether a kernel takes any strides there.  One copy serves all readers.
    """
    views: dict[Value, Strided] = {}
    copies: dict[Value, Value] = {}

    def dense(value: Value) -> Value:
        if value not in copies:
            copies[value] = cont(value, name=f"{value.node.name or value.node.op}.cont")
            views[copies[value]] = whole(copies[value])
        return copies[value]

    def dense_in(node: Node, operands: Collection[int]) -> Node:
        return node.with_src(
            tuple([dense(s) if s is not None and i in operands else s for i, s in enumerate(node.src)])
        )

    def rule(node: Node) -> tuple[Value, ...] | None:
        if not node.is_leaf and op_of(node).is_view:
            view, became = through_view(node, views[node.inputs[0]]), node
            if view is None:
                became = dense_in(node, [0])
                view = through_view(became, views[became.inputs[0]])
                assert view is not None
            views[became.results[0]] = view
        else:
            strided = [i for i, s in enumerate(node.src) if s is not None and not views[s].is_dense]
            copied = [i for i in strided if not reads_strided(node, i)]
            became = dense_in(node, copied) if copied else node
            views.update((v, whole(v)) for v in became.results)
        return None if became is node else became.results

    return rewrite_graph(graph, rule), views
