"""Which factor each node is computed by, and the state of every value that follows from it (see `states`).

A node is computed in one of these ways; the first that applies says in which states it reads and makes values.  `f` is
a chosen factor by which an operand is cut already, or by which a weight or state that it reads may be cut:

    the node is                     because                             wanted of operands         made
    on one device                   it is pinned there                  all Local                  Local
    cut by f, entry by entry        f is one index of every result      Cut(f) if they have f,     Cut(f)
                                                                        else Replicate
    cut by f, term by term          f is summed over                    the same                   Partial
    cut by f, row by row            f is what `ids` look up             Cut(f) of the table,       Routed(f, ids),
                                                                        Replicate of ids, owed     Partial if it
                                                                        of what is added to it     adds others
    passing a sum on                it is linear in operands whose      Partial or Routed of       the same
                                    sum is owed, and needs no more      these, else Replicate
    cut by r, entry by entry        a sum that it reads is dealt by     Cut(r) if they have r,     Cut(r)
                                    rows r, an index of every result    else Replicate
    on all devices alike            none of these                       all Replicate              Replicate

A factor that stands for two indices of a node (both rows of ``W Wᵀ``) cannot cut it: a device would have a block on
the diagonal only.  What is not in the state that is wanted is converted: a feed-forward layer, cut by its width, has to
convert its sum alone.

>>> from ... import ops
>>> from ...graph.node import input, weight
>>> x = input("x", (3, 4))
>>> wide = ops.silu(ops.mul_mat(weight("up", (8, 4)), x))
>>> graph = Graph({"y": ops.mul_mat(weight("down", (4, 8)), wide)})
>>> factors = Factors(graph)
>>> width = factors.of(wide) & factors.of(graph.weights[0])
>>> layout = assign(graph, factors, width)
>>> for value, state in layout.made.items():
...     print(f"{value.node.op:8}{state!r}")
weight  Cut(factor=8)
weight  Cut(factor=8)
input   Replicate()
mul_mat Cut(factor=8)
silu    Cut(factor=8)
mul_mat Partial()
>>> [(c.before, c.after) for c in layout.conversions]
[(Partial(), Replicate())]
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...ops import op_of
from ..layout import PARTIAL, REPLICATE, Local
from .axes import Factor, repeated
from .factors import Factors, Uses
from .pins import NO_PINS, Pins
from .states import Cut, Routed, State, way


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
        return self.before is REPLICATE


@dataclass(slots=True)
class Assignment:
    """The state of every value, and of every node by what it is computed.

    `made[v]` is the state in which a value is produced; `by[n]` is the cut of a node, Replicate if every device does
    all of it, the kind of sum if it passes one on, Local if one device does it; `wants[n]` are the states in which the
    node reads its operands; `dealt[n]` are the numbers by which a node finds its rows of a table that is cut; `held`
    are weights and states of which it was given where they lie; `whole` are weights that stay whole though they have a
    chosen factor.  In one that module `again` made, all but `fresh` nodes are as in `base`.
    """

    chosen: frozenset[Factor]
    made: dict[Value, State] = field(default_factory=dict)
    by: dict[Node, State] = field(default_factory=dict)
    wants: dict[Node, tuple[State, ...]] = field(default_factory=dict)
    dealt: dict[Node, Value] = field(default_factory=dict)
    held: set[Value] = field(default_factory=set)
    conversions: list[Conversion] = field(default_factory=list)
    whole: frozenset[Value] = frozenset()
    base: Assignment | None = None
    fresh: tuple[Node, ...] = ()


def operands(node: Node) -> list[tuple[str, Value]]:
    """The operands that are there, by name."""
    return [(n, s) for n, s in zip(op_of(node).operand_names, node.src, strict=False) if s is not None]


def lookup(node: Node) -> tuple[str, Value, Sequence[str]]:
    """The operand of a node that is looked up, the numbers by which, and what it is linear in together with that."""
    declared = op_of(node)
    looked_up = declared.signature_for(node.attrs).indexed_dimension
    assert looked_up is not None
    table, dim = looked_up
    joint = next(j for j in (k.split("+") for k in declared.linear_operands(node.attrs)) if table.name in j)
    return table.name, dict(operands(node))[dim.index], joint


def assign(
    graph: Graph,
    factors: Factors,
    chosen: frozenset[Factor],
    pins: Pins = NO_PINS,
    shown: Iterable[Value] = (),
    rows: Factor | None = None,
    early: Container[Value] = frozenset(),
) -> Assignment:
    """Lay `graph` out over the `chosen` factors.  Always succeeds: what does not fit is converted.

    A weight that some node needs whole stays whole on every device (nodes that can still take a slice of it).  Values
    that are `shown` to others end whole on every device.  Sums that no node passes on are dealt by `rows`; no node
    passes on the sum of an `early` value.
    """
    users = graph.users()
    return settled(lambda whole: Pass(graph, factors, chosen, users, whole, pins, rows, early).run(shown))


def settled(laid: Callable[[frozenset[Value]], Assignment]) -> Assignment:
    """What `laid` gives once it is told of all weights that stay whole."""
    whole = frozenset[Value]()
    while True:
        assignment = laid(whole)
        cut = (c.value for c in assignment.conversions if isinstance(c.before, Cut))
        gathered = frozenset(value for value in cut if value.node.op == "weight")
        if not gathered:
            return assignment
        whole |= gathered


class Pass:
    """One walk over the graph, sources first."""

    def __init__(
        self,
        graph: Graph,
        factors: Factors,
        chosen: frozenset[Factor],
        users: Mapping[Value, list[Node]],
        whole: frozenset[Value],
        pins: Pins = NO_PINS,
        rows: Factor | None = None,
        early: Container[Value] = frozenset(),
    ) -> None:
        self.graph, self.factors, self.users, self.whole, self.pins = graph, factors, users, whole, pins
        self.rows, self.early = rows, early
        self.out = Assignment(chosen if rows is None else chosen | {rows}, whole=whole)
        self.converted: set[tuple[Value, State]] = set()
        self.stored: set[Value] = set()  # weights, states and views of them: where a cut saves memory and reading
        self.ends = {*graph.outputs.values(), *graph.updates.values()}

    def run(self, shown: Iterable[Value] = ()) -> Assignment:
        for node in self.graph.nodes:
            self._visit(node)
        self._end(shown)
        return self.out

    def _visit(self, node: Node) -> None:
        if node.is_leaf:
            self._leaf(node)
        else:
            self._node(node)

    def _end(self, shown: Iterable[Value] = ()) -> None:
        """What outputs and updates still need."""
        for value in self.graph.outputs.values():
            if self.out.made[value].is_owed:
                self._convert(value, REPLICATE, None)
        for value in shown:
            self._convert(value, REPLICATE, None)
        for state, new in self.graph.updates.items():
            self._convert(new, self.out.made[state], None)

    def _leaf(self, node: Node) -> None:
        value = node.results[0]
        if (lies := self.pins.leaves.get(value)) is not None:
            self.out.made[value] = lies
            self.out.held.add(value)
            if lies is REPLICATE:
                self.stored.add(value)
            return
        cuts: list[Factor] = []
        if node.op in ("weight", "state"):
            self.stored.add(value)
            cuts = self._cuts(value)
        is_cut = cuts and value not in self.whole and cuts[0] not in repeated(self.factors.axes(value))
        self.out.made[value] = Cut(cuts[0]) if is_cut else REPLICATE

    def _cuts(self, value: Value) -> list[Factor]:
        """Chosen factors of a value, the largest first: of a weight or state one at most."""
        if self.factors.of(value).isdisjoint(self.out.chosen):
            return []
        ordered = (f for axis in self.factors.axes(value) for s in axis for f in s if f in self.out.chosen)
        return sorted(dict.fromkeys(ordered), key=lambda f: -f.size)

    def _node(self, node: Node) -> None:
        by: State
        wants: tuple[State, ...]
        results: tuple[State, ...]
        if (pin := self.pins.nodes.get(node)) is not None:
            by = Local((pin.device,))
            wants, results = (by,) * len(node.inputs), (by,) * len(node.specs)
        elif (cut := self._factor_for(node)) is None:
            wants, by = self._wants_whole(node)
            if by is REPLICATE and self.rows is not None and self._deals(node, self.rows):
                by = Cut(self.rows)
                wants = tuple(by if self.rows in self.factors.of(s) else REPLICATE for s in node.inputs)
            results = tuple(by for _ in node.results)
        elif cut is self.factors.uses(node).looked_up:
            wants, summed = self._dealt(node, cut)
            by, results = Cut(cut), (summed,)
        else:
            by = Cut(cut)
            wants = tuple(by if cut in self.factors.of(s) else REPLICATE for s in node.inputs)
            results = tuple(by if cut in self.factors.of(v) else PARTIAL for v in node.results)
        self.out.by[node], self.out.wants[node] = by, wants
        for source, want in zip(node.inputs, wants, strict=True):
            self._convert(source, want, node)
        self.out.made.update(zip(node.results, results, strict=True))
        if op_of(node).is_view and node.inputs[0] in self.stored and not isinstance(by, Local):
            self.stored.add(node.results[0])

    def _factor_for(self, node: Node) -> Factor | None:
        """The chosen factor by which `node` is worth cutting: it is already cut so, or reads a weight or state so."""
        candidates: dict[Factor, None] = {}  # in order, so that a tie is broken alike in every plan
        for source in node.inputs:
            made = self.out.made[source]
            if isinstance(made, Cut):
                candidates[made.factor] = None
            elif self._is_stored(source):
                candidates |= dict.fromkeys(self._cuts(source))
        if not candidates:
            return None
        uses = self.factors.uses(node)
        legal = [f for f in candidates if f not in uses.coupled and self._is_legal(node, f, uses)]
        return max(legal, key=lambda f: (f is not self.rows, self._weight_of(node, f)), default=None)

    def _deals(self, node: Node, rows: Factor) -> bool:
        """Whether `node` reads a sum that is not whole yet and can be dealt so."""
        uses = self.factors.uses(node)
        if rows in uses.coupled or rows is uses.looked_up or not all(rows in self.factors.of(v) for v in node.results):
            return False
        sums = (s for s in node.inputs if self.out.made[s].is_owed and rows in self.factors.of(s))
        return any(not self._is_converted(s, REPLICATE) for s in sums)

    def _is_legal(self, node: Node, factor: Factor, uses: Uses) -> bool:
        """Every result has the factor, or it is summed over or looked up: then no result has it, and no entry is on two
        devices."""
        has = [factor in self.factors.of(v) for v in node.results]
        if factor is uses.looked_up:
            table, _, joint = lookup(node)
            others = [s for n, s in operands(node) if n != table]
            summed = [s for n, s in operands(node) if n in joint and n != table]
            alone = not any(has) and not any(factor in self.factors.of(s) for s in others)
            return alone and not any(isinstance(self.out.made[s], Cut) for s in summed)
        if any(has) or factor not in uses.contracted or len(has) > 1:
            return all(has)
        axes = [axis for s in node.inputs for axis in self.factors.axes(s)]
        return all(factor in segment for axis in axes if any(factor in s for s in axis) for segment in axis)

    def _weight_of(self, node: Node, factor: Factor) -> int:
        return sum(s.spec.nbytes for s in node.inputs if factor in self.factors.of(s))

    def _dealt(self, node: Node, cut: Factor) -> tuple[tuple[State, ...], State]:
        """Each device looks up what lies in its part of the table, in operands that are there where it does.

        What is added to that is owed too: counted once.
        """
        table, ids, joint = lookup(node)
        self.out.dealt[node] = ids
        routed = Routed(cut, ids)
        wants: list[State] = []
        made: State = routed if self._keeps(node, ids, routed) else PARTIAL
        for name, source in operands(node):
            state = self.out.made[source]
            if name == table:
                wants.append(Cut(cut))
            elif state == routed and self._keeps(node, source, routed):
                wants.append(routed)
            elif name in joint:
                wants.append(state if state.is_owed else PARTIAL)
                made = PARTIAL
            else:
                wants.append(REPLICATE)
        return tuple(wants), made

    @staticmethod
    def _keeps(node: Node, source: Value, routed: Routed) -> bool:
        """Whether `node` makes of what lies where `routed` says something that lies there."""
        specs = [None if s is None else s.spec for s in node.src]
        places = [i for i, s in enumerate(node.src) if s == source]
        count = len(routed.ids.shape)
        return all(op_of(node).keeps_leading_axes(specs, node.specs[0], node.attrs, i, count) for i in places)

    def _wants_whole(self, node: Node) -> tuple[tuple[State, ...], State]:
        """All operands whole; or, where the op is linear and nobody needs the sum yet, partial sums as they are; and
        what the results are then."""
        made, named = self.out.made, operands(node)
        partial = {s for s in node.inputs if made[s].is_owed and not self._is_converted(s, REPLICATE)}
        whole = tuple(REPLICATE for _ in named)
        if not partial or not all(self._passes(user, s) for s in partial for user in self.users[s]):
            return whole, REPLICATE
        if max(v.spec.nbytes for v in node.results) > max(s.spec.nbytes for s in partial):
            return whole, REPLICATE
        if (routed := self._routing(node, partial)) is not None:
            return tuple(routed if s in partial else REPLICATE for _, s in named), routed
        for joint in op_of(node).linear_operands(node.attrs):
            together = joint.split("+")
            if {n for n, s in named if s in partial} <= set(together):
                owed = {s: made[s] if made[s].is_owed else PARTIAL for s in node.inputs}
                return tuple(owed[s] if n in together else REPLICATE for n, s in named), PARTIAL
        return whole, REPLICATE

    def _routing(self, node: Node, partial: set[Value]) -> Routed | None:
        """The state of the results of `node` where all operands in `partial` are routed alike and zeros give zeros."""
        routed, *others = {self.out.made[s] for s in partial}
        if others or not isinstance(routed, Routed) or not all(self._keeps(node, s, routed) for s in partial):
            return None
        names = {n for n, s in operands(node) if s in partial}
        return (
            routed
            if any(names >= set(j.split("+")) for j in op_of(node).zero_preserving_operands(node.attrs))
            else None
        )

    def _passes(self, user: Node, value: Value) -> bool:
        """Whether `user` could take `value` as a partial sum."""
        if user in self.pins.nodes or value in self.early:
            return False
        declared, made = op_of(user), self.out.made[value]
        passing = declared.linear_operands(user.attrs)
        if isinstance(made, Routed) and self._keeps(user, value, made):
            if made.factor is self.factors.uses(user).looked_up and lookup(user)[1] == made.ids:
                return value not in self.ends
            passing = declared.zero_preserving_operands(user.attrs)
        names = {n for joint in passing for n in joint.split("+")}
        places = [n for n, s in operands(user) if s == value]
        others = [s for s in user.inputs if s != value]
        cut_anyway = any(self._is_stored(s) and self._cuts(s) for s in others)
        return value not in self.ends and len(places) == 1 and places[0] in names and not cut_anyway

    def _convert(self, value: Value, wanted: State, node: Node | None) -> None:
        """Note what takes `value` to the state in which `node` reads it; a slice of what is whole by now is free."""
        made = self.out.made[value]
        if not way(made, wanted) or self._is_converted(value, wanted):
            return
        if self._is_converted(value, REPLICATE):
            made = REPLICATE
        for state in way(made, wanted):
            if not self._is_converted(value, state):
                self._note(Conversion(value, made, state, node))
            made = state

    def _is_converted(self, value: Value, state: State) -> bool:
        """Whether it is there in this state by now."""
        return (value, state) in self.converted

    def _is_stored(self, value: Value) -> bool:
        """Whether it is known by now as a weight, a state or a view of one."""
        return value in self.stored

    def _note(self, conversion: Conversion) -> None:
        self.converted.add((conversion.value, conversion.after))
        self.out.conversions.append(conversion)
