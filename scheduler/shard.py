"""One graph becomes one graph per device: local shapes, sliced leaves, collectives where layouts meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..graph.graph import Graph
from ..graph.node import Node, Value
from ..graph.spec import Spec
from ..ops import concat, fill, op_of, slice_
from ..ops.collective import all_gather, all_reduce, all_to_all, reduce_scatter
from .assign import Assignment, P, R, State, is_owed
from .factors import Factor, Factors
from .layout import PARTIAL, REPLICATE, Layout, Shard, Shares, local_shape, runs_of


@dataclass(frozen=True, eq=False)
class Sharded:
    """A graph for each device, and the layout in which leaves and outputs of the original lie on them."""

    graphs: tuple[Graph, ...]
    leaves: Mapping[str, Layout]
    outputs: Mapping[str, Layout]


def shard(graph: Graph, factors: Factors, assignment: Assignment, shares: Shares) -> Sharded:
    """Emit the graph of every device.  With one device that is the graph itself."""
    layouts = _Layouts(graph, factors, assignment, shares)
    emitters = [_Device(d, layouts) for d in range(len(shares))]
    leaves = {n.name: layouts.of(Value(n), assignment.made[Value(n)]) for n in graph.nodes if n.is_leaf}
    ends = {name: R if is_owed(assignment.made[v]) else assignment.made[v] for name, v in graph.outputs.items()}
    outputs = {name: layouts.of(v, ends[name]) for name, v in graph.outputs.items()}
    return Sharded(tuple(e.emit(graph, ends) for e in emitters), leaves, outputs)


class _Layouts:
    """Layouts of values in the states an assignment gives them; collectives are numbered here, once for all."""

    def __init__(self, graph: Graph, factors: Factors, assignment: Assignment, shares: Shares) -> None:
        self.graph, self.factors, self.assignment, self.shares = graph, factors, assignment, shares
        sent = [c for c in assignment.conversions if not c.is_free]
        self.sequence = {(c.value, c.after): i for i, c in enumerate(sent)}
        self._cut: dict[tuple[Value, Factor], Shard] = {}

    def of(self, value: Value, state: State) -> Layout:
        if not isinstance(state, Factor):
            return PARTIAL if is_owed(state) else REPLICATE
        if (value, state) not in self._cut:  # every device asks, at every use
            self._cut[value, state] = self._shard(value, state)
        return self._cut[value, state]

    def _shard(self, value: Value, state: Factor) -> Shard:
        for axis, segments in enumerate(self.factors.axes(value)):
            if any(state in s for s in segments):
                dealt = self.shares.of(state)
                return Shard(axis, tuple(runs_of(segments, state, low, high) for low, high in dealt))
        raise AssertionError(f"{value!r} does not have the factor {state}")


class _Device:
    """Emits the graph of one device."""

    def __init__(self, device: int, layouts: _Layouts) -> None:
        self.device, self.layouts = device, layouts
        self.local: dict[tuple[Value, State], Value] = {}

    def emit(self, graph: Graph, ends: Mapping[str, State]) -> Graph:
        made = self.layouts.assignment.made
        for node in graph.nodes:
            for value, new in zip(node.results, self._leaf(node) if node.is_leaf else self._node(node), strict=True):
                self.local[value, made[value]] = new
        return Graph(
            {name: self._as(v, ends[name]) for name, v in graph.outputs.items()},
            {self._as(old, made[old]): self._as(new, made[old]) for old, new in graph.updates.items()},
        )

    def _shape(self, value: Value, state: State) -> tuple[int, ...]:
        return local_shape(value.shape, self.layouts.of(value, state), self.device)

    def _leaf(self, node: Node) -> Sequence[Value]:
        value = Value(node)
        shape = self._shape(value, self.layouts.assignment.made[value])
        return Node(node.op, (), node.attrs, (Spec(shape, value.dtype),), node.name).results

    def _node(self, node: Node) -> Sequence[Value]:
        assignment, declared = self.layouts.assignment, op_of(node)
        wants = iter(assignment.wants[node])
        src = [None if s is None else self._as(s, next(wants)) for s in node.src]
        made = [assignment.made[v] for v in node.results]
        attrs = node.attrs
        if isinstance(made[0], Factor) and declared.localise is not None:
            first, want = node.inputs[0], assignment.wants[node][0]
            count = partial(self._count, self.layouts.of(first, want))
            attrs = {**attrs, **declared.localise(attrs, self._shape(node.results[0], made[0]), count)}
        by = assignment.by[node]
        if isinstance(by, Factor) and by is self.layouts.factors.uses(node).looked_up:
            attrs = {**attrs, "first": self.layouts.shares.of(by)[self.device][0], "total": by.size}
        built = declared(*src, name=node.name, **attrs)
        results = (built,) if isinstance(built, Value) else built
        for value, new, state in zip(node.results, results, made, strict=True):
            assert new.shape == self._shape(value, state), f"{node!r} on device {self.device} gave {new!r}"
        return results

    def _count(self, layout: Layout, axis: int, n: int) -> int:
        return layout.count(self.device, n) if isinstance(layout, Shard) and layout.axis == axis else n

    # ---------------------------------------------------------------------------------------------- conversions

    def _as(self, value: Value, state: State) -> Value:
        """`value` on this device in the layout of `state`, converted at its first use."""
        key = (value, state)
        if key not in self.local:
            made = self.layouts.assignment.made[value]
            if made is R or (value, R) in self.local:
                self.local[key] = self._owed_once(value) if state is P else self._sliced(value, state)
            else:
                self.local[key] = self._meeting(value, made, state)
        return self.local[key]

    def _meeting(self, value: Value, made: State, state: State) -> Value:
        """The collective that takes `value` from one layout to another."""
        mine, number, label = self.local[value, made], self.layouts.sequence[value, state], value.node.label
        before, after = self.layouts.of(value, made), self.layouts.of(value, state)
        if is_owed(made) and state is R:
            return all_reduce(mine, sequence=number, name=f"{label}.sum")
        if isinstance(before, Shard) and state is R:
            return all_gather(mine, axis=before.axis, runs=before.runs, sequence=number, name=f"{label}.whole")
        assert isinstance(after, Shard)
        cut = {"axis": after.axis, "runs": after.runs, "rank": self.device, "sequence": number}
        if is_owed(made):
            return reduce_scatter(mine, **cut, name=f"{label}.part")
        assert isinstance(before, Shard)
        return all_to_all(mine, old_axis=before.axis, old_runs=before.runs, **cut, name=f"{label}.recut")

    def _sliced(self, value: Value, state: State) -> Value:
        layout = self.layouts.of(value, state)
        assert isinstance(layout, Shard)
        whole = self.local[value, R]
        pieces = [
            slice_(whole, axis=layout.axis, start=offset, stop=offset + n) for offset, n in layout.runs[self.device]
        ] or [slice_(whole, axis=layout.axis, start=0, stop=0)]
        joined = pieces[0]
        for piece in pieces[1:]:
            joined = concat(joined, piece, axis=layout.axis)
        return joined

    def _owed_once(self, value: Value) -> Value:
        """A whole value as a summand: device 0 brings it, the others nothing."""
        whole = self.local[value, R]
        return whole if self.device == 0 else fill(whole, value=0.0, name=f"{value.node.label}.zero")
