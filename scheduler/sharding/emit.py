"""The SPMD partitioner: write one graph for each device, with local shapes, sliced leaves and collectives.

Input is a graph with a sharding assignment and the shard ranges of its factors. Devices with equal parts share one
graph.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...graph.attrs import Attrs
from ...graph.graph import Graph, assign_names
from ...graph.node import Node, Value
from ...graph.spec import Spec
from ...ops import concat, fill, op_of, slice_
from ...ops.collectives import all_gather, all_reduce, all_to_all, receive, reduce_scatter, send
from ...ops.declaration.op import Op
from ..layout import PARTIAL, REPLICATE, Layout, Local, Shard, local_shape
from .assign import Assignment
from .axes import Factor
from .factors import Factors
from .shares import Shares, runs_of
from .states import Cut, Lying, State, way


@dataclass(frozen=True, eq=False)
class Sharded:
    """A graph for each device, and the layouts of the leaves and outputs of the original graph.

    `source_nodes` maps, for each device, the nodes of its graph to the original nodes.
    """

    graphs: tuple[Graph, ...]
    origins: tuple[Mapping[Node, Node], ...]
    leaves: Mapping[str, Layout]
    outputs: Mapping[str, Layout]


def shard(
    graph: Graph,
    factors: Factors,
    assignment: Assignment,
    shares: Shares,
    *,
    first: int = 0,
    whole: Container[Value] = frozenset(),
) -> Sharded:
    """Emit the graph of every device; with one device it is the graph itself.

    Args:
        graph: The graph to partition.
        factors: The factors of `graph`.
        assignment: The layout of each value, and the conversions.
        shares: The shard ranges of the factors.
        first: The sequence number of the first collective.
        whole: Outputs that end whole on every device.
    """
    layouts = _Layouts(graph, factors, assignment, shares, first)
    ends = {name: REPLICATE if v in whole else _ended(assignment.made[v]) for name, v in graph.outputs.items()}
    outputs = {name: layouts.of(v, ends[name]) for name, v in graph.outputs.items()}
    emitted: dict[Hashable, tuple[Graph, Mapping[Node, Node]]] = {}
    for key in (keys := [_kind(d, assignment, shares) for d in range(len(shares))]):
        if key not in emitted:
            device = _Device(keys.index(key), layouts)
            emitted[key] = device.emit(graph, ends), device.origins
    graphs = tuple(emitted[key][0] for key in keys)
    leaves = {n.name: layouts.of(n.results[0], assignment.made[n.results[0]]) for n in graph.nodes if n.is_leaf}
    leaves.update(_rarely_read(graph, graphs, leaves, assignment.held))
    return Sharded(graphs, tuple(emitted[key][1] for key in keys), leaves, outputs)


def _ended(state: State) -> State:
    """Return the layout of an output: a partial sum is completed."""
    return REPLICATE if state.is_owed else state


def _kind(device: int, assignment: Assignment, shares: Shares) -> Hashable:
    """Return a key that devices share if their graphs are equal.

    Devices with equal keys have equally long ranges of each factor, and no node depends on the device number.
    """
    for c in assignment.conversions:
        if isinstance(c.after, Cut | Local) or isinstance(c.before, Local):
            return device
    if assignment.dealt or any(isinstance(by, Local) for by in assignment.by.values()):
        return device
    if any(isinstance(made, Lying) for made in assignment.made.values()):
        return device
    return device == 0, *(high - low for low, high in (shares.of(f)[device] for f in assignment.chosen))


def _rarely_read(
    graph: Graph, graphs: Sequence[Graph], leaves: Mapping[str, Layout], held: Container[Value]
) -> dict[str, Layout]:
    """Return the layouts of replicated weights and states that some devices do not read, because of pins."""
    read = [{n.name for n in local.nodes if n.is_leaf} for local in graphs]
    homes: dict[str, Layout] = {}
    for node in graph.nodes:
        if node.op in ("weight", "state") and leaves[node.name] is REPLICATE and node.results[0] not in held:
            where = tuple(d for d, names in enumerate(read) if node.name in names)
            if 0 < len(where) < len(graphs):
                homes[node.name] = Local(where)
    return homes


def unused(name: str, taken: Container[str]) -> str:
    """Return `name`, with tildes appended until it is not in `taken`."""
    while name in taken:
        name += "~"
    return name


def with_meetings(graph: Graph, met: Sequence[Value]) -> Graph:
    """Keep the collectives of a device in its graph even if the device does not use their results."""
    there, missing = set(graph.nodes), {}
    for number, value in reversed(list(enumerate(met))):  # the last first, as it may read earlier ones
        if value.node not in there:
            missing[unused(f"met.{number}", graph.outputs)] = value
            stack = [value.node]
            while stack:
                there.add(node := stack.pop())
                stack += [s.node for s in node.inputs if s.node not in there]
    return Graph({**graph.outputs, **missing}, graph.updates) if missing else graph


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """A value in one of its layouts. Each form exists once, so that dictionaries find it by identity."""

    value: Value
    state: State


@dataclass(frozen=True, slots=True)
class _Work:
    """The part of a node that all devices share: op, attributes before localisation, and operand forms."""

    op: Op[Any]
    attrs: Attrs
    reads: tuple[_Form | None, ...]


class _Layouts:
    """The layouts of all values, and the sequence numbers of all collectives and messages."""

    def __init__(self, graph: Graph, factors: Factors, assignment: Assignment, shares: Shares, first: int) -> None:
        self.graph, self.factors, self.assignment, self.shares = graph, factors, assignment, shares
        self.called = assign_names(graph)  # the names in a dump of the user's graph
        self.sequence: dict[tuple[Value, State], int] = {}
        self.letters: dict[Value, dict[int, int]] = {}
        count = first
        for conversion in (c for c in assignment.conversions if not c.is_free):
            value, before, after = conversion.value, conversion.before, conversion.after
            if not isinstance(before, Local):
                self.sequence[value, after] = count
                count += 1
                continue
            letters = self.letters.setdefault(value, {})  # receivers of a local value, each once
            for device in after.devices if isinstance(after, Local) else range(len(shares)):
                if device not in before.devices and device not in letters:
                    letters[device] = count
                    count += 1
        self._cut: dict[tuple[Value, Factor], Shard] = {}
        self._forms: dict[tuple[Value, State], _Form] = {}
        self._shapes: dict[_Form, tuple[tuple[int, ...], ...]] = {}
        self.made = {value: self.form(value, state) for value, state in assignment.made.items()}
        self.work = {node: self._work(node) for node in graph.nodes if not node.is_leaf}

    def form(self, value: Value, state: State) -> _Form:
        """Return the form of `value` in `state` on a device that has it."""
        if isinstance(state, Local):
            state = REPLICATE  # whole on that device
        elif state is PARTIAL and self.assignment.made[value].is_owed:
            state = self.assignment.made[value]
        return self._forms.setdefault((value, state), _Form(value, state))

    def _work(self, node: Node) -> _Work:
        declared, wants = op_of(node), iter(self.assignment.wants[node])
        reads = tuple([None if s is None else self.form(s, next(wants)) for s in node.src])
        return _Work(declared, declared.normalise_attributes(node.attrs), reads)

    def shape(self, form: _Form, device: int) -> tuple[int, ...]:
        """Return the shape of the part that `device` has."""
        if form not in self._shapes:
            layout = self.of(form.value, form.state)
            self._shapes[form] = tuple(local_shape(form.value.shape, layout, d) for d in range(len(self.shares)))
        return self._shapes[form][device]

    def of(self, value: Value, state: State) -> Layout:
        """Return the layout of `value` in factor layout `state`."""
        if isinstance(state, Local):
            return state
        if isinstance(state, Lying):
            return state.layout
        if not isinstance(state, Cut):
            return PARTIAL if state.is_owed else REPLICATE
        if (value, state.factor) not in self._cut:  # cached, as every device asks at every use
            self._cut[value, state.factor] = self._shard(value, state.factor)
        return self._cut[value, state.factor]

    def _shard(self, value: Value, factor: Factor) -> Shard:
        for axis, segments in enumerate(self.factors.axes(value)):
            if any(factor in s for s in segments):
                dealt = self.shares.of(factor)
                return Shard(axis, tuple(runs_of(segments, factor, low, high) for low, high in dealt))
        raise AssertionError(f"{value!r} does not have the factor {factor}")


class _Device:
    """Emits the graph of one device."""

    def __init__(self, device: int, layouts: _Layouts) -> None:
        self.device, self.layouts = device, layouts
        self.local: dict[_Form, Value] = {}
        self.origins: dict[Node, Node] = {}
        self.met: list[Value] = []

    def emit(self, graph: Graph, ends: Mapping[str, State]) -> Graph:
        """Return the graph of the device; `ends` has the layouts of the outputs."""
        layouts, assignment = self.layouts, self.layouts.assignment
        for node in graph.nodes:
            by = assignment.made[node.results[0]] if node.is_leaf else assignment.by[node]
            if self._is_elsewhere(by):
                for source in node.inputs:
                    self._attend(source)
            elif node.is_leaf:
                self._keep(node.results[0], self._leaf(node))
            else:
                for value, new in zip(node.results, self._node(node), strict=True):
                    self._keep(value, new)
        updated = {old: new for old, new in graph.updates.items() if not self._is_elsewhere(assignment.made[old])}
        for old, new in graph.updates.items():
            if old not in updated:
                self._attend(new)
        outputs = {
            name: self._as(layouts.form(v, ends[name]))
            for name, v in graph.outputs.items()
            if not self._is_elsewhere(ends[name])
        }
        updates = {
            self._as(layouts.made[old]): self._as(layouts.form(new, assignment.made[old]))
            for old, new in updated.items()
        }
        for old in graph.states:  # an unread state of an earlier plan stays on the device
            if old in assignment.held and assignment.made[old] is REPLICATE and old not in graph.updates:
                updates[self.local[layouts.made[old]]] = self.local[layouts.made[old]]
        return with_meetings(Graph(outputs, updates), self.met)

    def _is_elsewhere(self, state: State) -> bool:
        return isinstance(state, Local) and self.device not in state.devices

    def _attend(self, source: Value) -> None:
        """Take part in the collective that makes an operand whole for another device."""
        made = self.layouts.assignment.made[source]
        if made.is_owed or isinstance(made, Cut | Lying):
            self._whole(source)

    def _keep(self, value: Value, new: Value) -> None:
        """Store the local part of a value; if only this device has the value, send it to all readers."""
        self.local[self.layouts.made[value]] = new
        made = self.layouts.assignment.made[value]
        if isinstance(made, Local) and self.device == made.devices[0]:
            for to, number in self.layouts.letters.get(value, {}).items():
                self.met.append(send(new, to=to, sequence=number, name=f"{self.layouts.called[value.node]}.to.{to}"))

    def _leaf(self, node: Node) -> Value:
        value = node.results[0]
        shape = self.layouts.shape(self.layouts.made[value], self.device)
        return Node(node.op, (), node.attrs, (Spec(shape, value.dtype),), node.name).results[0]

    def _node(self, node: Node) -> Sequence[Value]:
        layouts, assignment, work = self.layouts, self.layouts.assignment, self.layouts.work[node]
        src = [None if form is None else self._as(form) for form in work.reads]
        results, attrs, by = node.results, work.attrs, assignment.by[node]
        if work.op.localise is not None and isinstance(assignment.made[results[0]], Cut):
            first, want = node.inputs[0], assignment.wants[node][0]
            count = partial(self._count, layouts.of(first, want))
            shape = layouts.shape(layouts.made[results[0]], self.device)
            attrs = {**attrs, **work.op.localise(attrs, shape, count)}
        if isinstance(by, Cut) and by.factor is layouts.factors.uses(node).looked_up:
            low, _ = layouts.shares.of(by.factor)[self.device]
            attrs = {**attrs, "first": low, "total": by.factor.size}
        built = work.op.build_node(src, attrs, layouts.called[node], is_normalised=attrs is work.attrs)
        self.origins[built] = node
        made = built.results
        for value, new in zip(results, made, strict=True):
            assert new.shape == layouts.shape(layouts.made[value], self.device), (
                f"{node!r} on {self.device} gave {new!r}"
            )
        return made

    def _count(self, layout: Layout, axis: int, n: int) -> int:
        return layout.count(self.device, n) if isinstance(layout, Shard) and layout.axis == axis else n

    # ---------------------------------------------------------------------------------------------- conversions

    def _as(self, form: _Form) -> Value:
        """Return a value in a layout, converted at its first use."""
        if (there := self.local.get(form)) is None:
            there = self.local[form] = self._converted(form.value, form.state)
        return there

    def _whole(self, value: Value) -> Value:
        return self._as(self.layouts.form(value, REPLICATE))

    def _converted(self, value: Value, state: State) -> Value:
        """Convert `value` to a layout in which the device does not have it yet."""
        made = self.layouts.assignment.made[value]
        if isinstance(made, Local) and state is REPLICATE:
            return self._received(value, made)
        if len(way(made, state)) > 1:
            self._whole(value)
        if made is REPLICATE or self.layouts.form(value, REPLICATE) in self.local:
            return self._owed_once(value) if state is PARTIAL else self._sliced(value, state)
        new = self._meeting(value, made, state)
        self.met.append(new)
        return new

    def _received(self, value: Value, made: Local) -> Value:
        """Receive a value that only one device has."""
        source, number = made.devices[0], self.layouts.letters[value][self.device]
        name = f"{self.layouts.called[value.node]}.from.{source}"
        new = receive(shape=value.shape, dtype=value.dtype, source=source, sequence=number, name=name)
        self.met.append(new)
        return new

    def _meeting(self, value: Value, made: State, state: State) -> Value:
        """Emit the collective that converts `value` from layout `made` to layout `state`."""
        mine, number, label = (
            self.local[self.layouts.made[value]],
            self.layouts.sequence[value, state],
            self.layouts.called[value.node],
        )
        before, after = self.layouts.of(value, made), self.layouts.of(value, state)
        if made.is_owed and state is REPLICATE:
            return all_reduce(mine, sequence=number, name=f"{label}.sum")
        if isinstance(before, Shard) and state is REPLICATE:
            return all_gather(mine, axis=before.axis, runs=before.runs, sequence=number, name=f"{label}.whole")
        assert isinstance(after, Shard)
        cut = {"axis": after.axis, "runs": after.runs, "rank": self.device, "sequence": number}
        if made.is_owed:
            return reduce_scatter(mine, **cut, name=f"{label}.part")
        assert isinstance(before, Shard)
        return all_to_all(mine, old_axis=before.axis, old_runs=before.runs, **cut, name=f"{label}.recut")

    def _sliced(self, value: Value, state: State) -> Value:
        layout = self.layouts.of(value, state)
        assert isinstance(layout, Shard)
        whole = self._whole(value)
        name = f"{self.layouts.called[value.node]}.share"
        pieces = [
            slice_(whole, axis=layout.axis, start=offset, stop=offset + n, name=name)
            for offset, n in layout.runs[self.device] or [(0, 0)]
        ]
        joined = pieces[0]
        for piece in pieces[1:]:
            joined = concat(joined, piece, axis=layout.axis, name=name)
        return joined

    def _owed_once(self, value: Value) -> Value:
        """Return a whole value as a partial sum: device 0 has the value, all others have zeros."""
        whole = self._whole(value)
        return whole if self.device == 0 else fill(whole, value=0.0, name=f"{self.layouts.called[value.node]}.zero")
