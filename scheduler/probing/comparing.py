"""Every value of a run against another device: the first that differs, judged by itself.

Errors of an early node reach all later ones, so values of two whole runs cannot be compared one by one.  Here the other
device computes each node alone, from what the first device really had for its sources: what differs is what this node
did.  The graph is taken in portions, so that neither its values nor its weights need to fit into memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...backends.abilities import DeclaresTolerance
from ...backends.base import Array, Backend, Device
from ...graph.errors import PlanError
from ...graph.graph import Graph
from ...graph.node import Node, Value, input
from ...graph.validation import ANY, TEXT, instance_of, mapping_of, validate_arguments
from ...ops import op_of
from ...ops.text import dump
from ..plan import Plan
from ..planner import plan_for_group
from ..running.executor import Executor
from ..running.store import Store
from .observing import observed, taken, values_of

PORTION = 1 << 28
"""Bytes of float64 that the values and weights of a portion take on the other device, unless one node needs more."""
ROUNDED = 8.0
"""A row may be off by this many times the relative error that a backend says its arithmetic has ..."""
EXACT = 1e-4
"""... and by this share of its norm where it says nothing: arithmetic in float32."""
Copies = Mapping[str, list[Array]]
"""Values by name, from each device that has all of it."""
SMALL = 1e-3
"""A row whose norm is a smaller share of that of the average row is judged as if it had this share."""

LONGEST = 300
"""Characters of a node that are printed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a value is off: `error` is the norm of the difference over that of the value, in the worst row of the
    last axis; `index`, `got` and `want` are of the worst entry in all."""

    graph: Graph
    name: str
    node: Node
    error: float
    limit: float
    index: tuple[int, ...]
    got: float
    want: float

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.limit

    @property
    def share(self) -> float:
        """The error as a share of what is allowed."""
        return self.error / self.limit if self.limit else self.error

    @property
    def around(self) -> str:
        """The lines of a dump around the node."""
        return surroundings(self.graph, self.node)

    def __str__(self) -> str:
        at = ",".join(map(str, self.index))
        return (
            f"%{self.name} = {self.node.op}: {self.error:.2g} of its norm off, {self.limit:.2g} allowed; "
            f"at [{at}] {self.got:.9g} instead of {self.want:.9g}"
        )


class Judge:
    """Runs of one plan against another device, node by node."""

    plan: Plan
    store: Store
    weights: Mapping[str, npt.ArrayLike]
    other: tuple[Backend, Device]
    place: Sequence[tuple[str, str]]

    @validate_arguments(PlanError, plan=instance_of(Plan), store=instance_of(Store), weights=instance_of(Mapping))
    def __init__(
        self,
        plan: Plan,
        store: Store,
        weights: Mapping[str, npt.ArrayLike],
        other: tuple[Backend, Device],
        *,
        place: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`weights` gives arrays by name as files hold them, which are asked for when they are needed."""
        self.plan, self.store, self.weights, self.other, self.place = plan, store, weights, other, place
        self.values: Mapping[str, Value] = values_of(plan.graph)
        self._portions = [(names, *self._torn(names)) for names in _portions(plan.graph)]

    @validate_arguments(PlanError, inputs=mapping_of(TEXT, ANY, "a mapping from names of inputs to arrays"))
    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> Iterator[Difference]:
        """Run once; the difference of every computed value, in order, and then those of outputs when nobody looks at
        other values.  States advance when all have been asked for."""
        plain = Executor(self.plan, self.store)
        before = {v.node.name: np.array(self.store.state(v.node.name)) for v in self.plan.graph.states}
        outputs: Copies = {}
        seen: Copies = {}
        agree = True
        for names, graph, torn in self._portions:
            outputs = self._seen(graph, inputs, before)
            seen = taken(outputs)
            want = self._wanted(torn, {**inputs, **{name: copies[0] for name, copies in seen.items()}}, before)
            for name in names:
                yield (found := self._difference(name, seen[name], want[name]))
                agree = agree and not found.is_wrong
        self._restore(before)
        loosest = max((self._limit(self.values[name]) for names, *_ in self._portions for name in names), default=EXACT)
        for name in plain.run(inputs):
            own = next((n for n, v in self.values.items() if v == self.plan.graph.outputs[name]), None)
            if own is not None:
                unseen = replace(self._difference(own, plain.copies(name), outputs[name][0]), limit=loosest)
                if unseen.is_wrong and agree and len(self._portions) == 1:
                    unseen = self._fused(inputs, before, seen, loosest) or unseen
                yield unseen

    def _fused(
        self, inputs: Mapping[str, npt.ArrayLike], before: Mapping[str, Array], seen: Copies, limit: float
    ) -> Difference | None:
        """The first value that is wrong if nobody looks at the others: what kernels do that compute several nodes at
        once, and do not if values in between are wanted."""

        def alone(name: str) -> Difference:
            graph = observed(self.plan.graph, {name: self.values[name]})
            got = taken(self._seen(graph, inputs, before))[name]
            return replace(self._difference(name, got, seen[name][0]), limit=limit)

        ((names, *_),) = self._portions
        low, high = 0, len(names) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if alone(names[middle]).is_wrong else (middle + 1, high)
        found = alone(names[low])
        return found if found.is_wrong else None

    def _seen(self, graph: Graph, inputs: Mapping[str, npt.ArrayLike], before: Mapping[str, Array]) -> Copies:
        """What an observed graph gives out, from the states before the run."""
        self._restore(before)
        run = Executor(plan_for_group(graph, self.plan.group, place=self.place, like=self.plan), self.store)
        return {name: run.copies(name) for name in run.run(inputs)}

    def _restore(self, before: Mapping[str, Array]) -> None:
        for name, array in before.items():
            self.store.state(name)[...] = array

    def _torn(self, names: Sequence[str]) -> tuple[Graph, Graph]:
        """The graph that gives out some values and what they are computed from; and that which computes each of them
        from inputs."""
        graph = self.plan.graph
        known = {value: name for name, value in self.values.items()}
        asked = frozenset(names)
        torn: dict[str, Value] = {}
        became: dict[Value, Value] = {}
        for node in graph.nodes:
            if node.is_leaf:
                became[node.results[0]] = node.results[0]
                continue
            made = node.with_src(tuple(None if s is None else became[s] for s in node.src))
            for old, value in zip(node.results, made.results, strict=True):
                if known[old] in asked:
                    torn[known[old]] = value
                became[old] = value if op_of(node).is_view else input(known[old], old.shape, old.dtype)
        cut = Graph(torn)
        read = {v.node.name for v in cut.inputs}
        values = {name: value for value, name in known.items() if name in asked or name in read}
        return observed(graph, values), cut

    def _wanted(
        self, graph: Graph, inputs: Mapping[str, npt.ArrayLike], states: Mapping[str, Array]
    ) -> dict[str, Array]:
        """What the other device makes of each value of a portion."""
        made = plan_for_group(graph, [self.other])
        store = Store([self.other])
        for value in graph.weights:
            store.bind(value.node.name, self.weights[value.node.name], value.spec)
        run = Executor(made, store)
        for value in graph.states:
            store.state(value.node.name)[...] = states[value.node.name]
        return run.run({v.node.name: inputs[v.node.name] for v in graph.inputs})

    def _difference(self, name: str, copies: Sequence[Array], want: Array) -> Difference:
        """Of the copy that is worst, where each device has one."""
        value, limit = self.values[name], self._limit(self.values[name])
        error, at, got = max(((*_error(copy, want), copy) for copy in copies), key=lambda judged: judged[0])
        return Difference(self.plan.graph, name, value.node, error, limit, at, float(got[at]), float(want[at]))

    def _limit(self, value: Value) -> float:
        """How far a value may be off: integers not at all."""
        if value.dtype.is_integer:
            return 0.0
        backends = {lane.backend for lane in self.plan.lanes} | {self.other[0]}
        rounded = [b.tolerance(value.node) or 0.0 for b in backends if isinstance(b, DeclaresTolerance)]
        return max([EXACT, *(ROUNDED * r for r in rounded)])


def _portions(graph: Graph) -> list[list[str]]:
    """Names of values whose nodes are judged together, views left out, which compute nothing."""
    portions: list[list[str]] = [[]]
    held, room = set[Value](), PORTION
    for name, value in values_of(graph).items():
        if op_of(value.node).is_view or not value.spec.size:
            continue
        needed = {value, *value.node.inputs} - held
        nbytes = sum(8 * v.spec.size for v in needed)
        if nbytes > room and portions[-1]:
            portions.append([])
            held, room = set(), PORTION
            nbytes = sum(8 * v.spec.size for v in {value, *value.node.inputs})
        held |= needed
        room -= nbytes
        portions[-1].append(name)
    return [names for names in portions if names]


def _error(got: Array, want: Array) -> tuple[float, tuple[int, ...]]:
    """The error of the worst row, and where the worst entry is."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    with np.errstate(all="ignore"):
        off = np.abs(got - want)
        same = (got == want) | (np.isnan(got) & np.isnan(want))
    off[same] = 0.0
    off[np.isnan(off)] = np.inf
    index = np.unravel_index(int(off.argmax()), off.shape) if off.ndim else ()
    finite = np.where(np.isfinite(want), want, 0.0)
    rows = np.sqrt((np.atleast_1d(finite) ** 2).sum(-1))
    floor = max(SMALL * float(np.sqrt((rows**2).mean())), float(np.finfo(np.float32).tiny))
    errors = np.sqrt((np.atleast_1d(off) ** 2).sum(-1)) / np.maximum(rows, floor)
    return float(errors.max()), tuple(int(i) for i in index)


def surroundings(graph: Graph, node: Node, reach: int = 2) -> str:
    """The lines of a dump around a node, which is marked: what it is computed from, up to `reach` nodes away, and who
    reads it."""
    near, edge = {node}, {node}
    for _ in range(reach):
        edge = {s.node for n in edge for s in n.inputs}
        near |= edge
    users = graph.users()
    near |= {user for value in node.results for user in users[value]}
    lines = zip(graph.nodes, dump(graph).splitlines(), strict=False)  # outputs and updates follow
    return "\n".join(f"{'>' if n is node else ' '} {line:.{LONGEST}}" for n, line in lines if n in near)
