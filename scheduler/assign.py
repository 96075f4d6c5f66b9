"""Which factor each node is computed by, and the layout of every value that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ..graph.graph import Graph
from ..graph.node import Node, Value
from ..ops import op_of
from .factors import Factor, Factors
from .layout import Local
from .pins import Pins


class Whole(Enum):
    """How a value lies that is not cut."""

    REPLICATED = "R"
    PARTIAL = "P"


State = Factor | Whole | Local
R, P = Whole.REPLICATED, Whole.PARTIAL
NO_PINS = Pins()


@dataclass(frozen=True, slots=True)
class Conversion:
    """Before `node` (None: for the graph's own ends) `value` goes from one layout to another."""

    value: Value
    before: State
    after: State
    node: Node | None

    @property
    def is_free(self) -> bool:
        """Whether nothing is sent: each device takes its slice, or one keeps the value and the others nothing."""
        return self.before is R


@dataclass(slots=True)
class Assignment:
    """`made[v]` is the layout a value is produced in; `by[n]` the factor a node is cut by, R if every device does all
    of it, P if it passes a partial sum on, Local if one device does it; `wants[n]` the layout in which the node reads
    each operand."""

    chosen: frozenset[Factor]
    made: dict[Value, State] = field(default_factory=dict)
    by: dict[Node, State] = field(default_factory=dict)
    wants: dict[Node, tuple[State, ...]] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)


def assign(graph: Graph, factors: Factors, chosen: frozenset[Factor], pins: Pins = NO_PINS) -> Assignment:
    """Lay `graph` out over the `chosen` factors.  Always succeeds: what does not fit is converted.

    A weight that some node needs whole stays whole on every device (nodes that can still take a slice of it).
    """
    users = graph.users()
    whole: set[Value] = set()
    while True:
        found = _Pass(graph, factors, chosen, users, whole, pins).run()
        gathered = {c.value for c in found.conversions if c.value.node.op == "weight" and isinstance(c.before, Factor)}
        if not gathered:
            return found
        whole |= gathered


class _Pass:
    """One walk over the graph, sources first."""

    def __init__(
        self,
        graph: Graph,
        factors: Factors,
        chosen: frozenset[Factor],
        users: Mapping[Value, list[Node]],
        whole: Iterable[Value],
        pins: Pins,
    ) -> None:
        self.graph, self.factors, self.users, self.whole, self.pins = graph, factors, users, set(whole), pins
        self.out = Assignment(chosen)
        self.converted: set[tuple[Value, State]] = set()
        self.stored: set[Value] = set()  # weights, states and views of them: where a cut saves memory and reading
        self.ends = {*graph.outputs.values(), *graph.updates.values()}

    def run(self) -> Assignment:
        for node in self.graph.nodes:
            if node.is_leaf:
                self._leaf(node)
            else:
                self._node(node)
        for value in self.graph.outputs.values():
            if self.out.made[value] is P:
                self._convert(value, R, None)
        for state, new in self.graph.updates.items():
            self._convert(new, self.out.made[state], None)
        return self.out

    def _leaf(self, node: Node) -> None:
        value = Value(node)
        if value in self.pins.leaves:
            self.out.made[value] = self.pins.leaves[value]
            return
        cuts = self._cuts(value)
        self.out.made[value] = cuts[0] if cuts and node.op in ("weight", "state") and value not in self.whole else R
        if node.op in ("weight", "state"):
            self.stored.add(value)

    def _cuts(self, value: Value) -> list[Factor]:
        """Chosen factors of a value; at most one, as long as the choice is consistent."""
        own = self.factors.of(value)
        return sorted((f for f in own & self.out.chosen), key=lambda f: -f.size) if own else []

    def _node(self, node: Node) -> None:
        by: State
        wants: tuple[State, ...]
        results: tuple[State, ...]
        if (pin := self.pins.nodes.get(node)) is not None:
            by = Local((pin.device,))
            wants, results = (by,) * len(node.inputs), (by,) * len(node.specs)
        elif (cut := self._factor_for(node)) is not None:
            by, wants = cut, tuple(cut if cut in self.factors.of(s) else R for s in node.inputs)
            results = tuple(cut if cut in self.factors.of(v) else P for v in node.results)
        else:
            wants = self._wants_whole(node)
            by = P if P in wants else R
            results = tuple(by for _ in node.results)
        self.out.by[node], self.out.wants[node] = by, wants
        for source, want in zip(node.inputs, wants, strict=True):
            self._convert(source, want, node)
        self.out.made.update(zip(node.results, results, strict=True))
        if op_of(node).is_view and node.inputs[0] in self.stored and not isinstance(by, Local):
            self.stored.add(Value(node))

    def _factor_for(self, node: Node) -> Factor | None:
        """The chosen factor by which `node` is worth cutting: it is already cut so, or reads a weight or state so."""
        candidates: set[Factor] = set()
        for source in node.inputs:
            made = self.out.made[source]
            if isinstance(made, Factor):
                candidates.add(made)
            elif source in self.stored:
                candidates.update(self._cuts(source))
        if not candidates:
            return None
        uses = self.factors.uses(node)
        legal = [f for f in candidates - uses.coupled if self._is_legal(node, f, uses.contracted)]
        return max(legal, key=lambda f: self._weight_of(node, f), default=None)

    def _is_legal(self, node: Node, factor: Factor, contracted: frozenset[Factor]) -> bool:
        """Every result has the factor, or it is summed over: then no result has it, and no entry is on two devices."""
        has = [factor in self.factors.of(v) for v in node.results]
        if any(has) or factor not in contracted or len(has) > 1:
            return all(has)
        axes = [axis for s in node.inputs for axis in self.factors.axes(s)]
        return all(factor in segment for axis in axes if any(factor in s for s in axis) for segment in axis)

    def _weight_of(self, node: Node, factor: Factor) -> int:
        return sum(s.spec.nbytes for s in node.inputs if factor in self.factors.of(s))

    def _wants_whole(self, node: Node) -> tuple[State, ...]:
        """All operands whole; or, where the op is linear and nobody needs the sum yet, partial sums as they are."""
        partial = {s for s in node.inputs if self.out.made[s] is P and (s, R) not in self.converted}
        if not partial or not all(self._passes(user, s) for s in partial for user in self.users[s]):
            return tuple(R for _ in node.inputs)
        declared = op_of(node)
        grows = max(v.spec.nbytes for v in node.results) > max(s.spec.nbytes for s in partial)
        for joint in declared.linear_in(node.attrs):
            together = joint.split("+")
            named = [(n, s) for n, s in zip(declared.operand_names, node.src, strict=False) if s is not None]
            if not grows and partial <= {s for n, s in named if n in together}:
                if any(s in partial and n not in together for n, s in named):
                    continue
                return tuple(P if n in together else R for n, _ in named)
        return tuple(R for _ in node.inputs)

    def _passes(self, user: Node, value: Value) -> bool:
        """Whether `user` could take `value` as a partial sum."""
        if user in self.pins.nodes:
            return False
        declared = op_of(user)
        linear = {n for joint in declared.linear_in(user.attrs) for n in joint.split("+")}
        places = [n for n, s in zip(declared.operand_names, user.src, strict=False) if s == value]
        others = [s for s in user.inputs if s != value]
        cut_anyway = any(s in self.stored and self._cuts(s) for s in others)
        return value not in self.ends and len(places) == 1 and places[0] in linear and not cut_anyway

    def _convert(self, value: Value, want: State, node: Node | None) -> None:
        made = self.out.made[value]
        if made == want or (value, want) in self.converted:
            return
        if isinstance(made, Local) and isinstance(want, Local) and set(want.devices) <= set(made.devices):
            return
        if isinstance(made, Local) != isinstance(want, Local) and want is not R:
            self._convert(value, R, node)  # to one device and from one device it goes as a whole
        if made is R or (value, R) in self.converted:
            made = R  # it is whole already: a slice of that is free
        self.converted.add((value, want))
        self.out.conversions.append(Conversion(value, made, want, node))
