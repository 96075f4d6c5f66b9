"""The value trace: for each value of a device's graph the user's value, the entries, and the partial sum.

All devices are followed together, sources first. A node must be a node of the user's graph on its operands' entries,
or a conversion that keeps the value. A value may have several facts: a slice of the graph may also be a shard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, product
from typing import TypeAlias

import numpy as np

from ...graph.attrs import attribute_key
from ...graph.graph import Graph, topological_order
from ...graph.node import Node, Value
from ...ops import REGISTRY
from ...ops.collectives import COLLECTIVES, as_index_ranges, as_integer
from .held import CONVERSIONS, Held, but, converted
from .indices import Digits, Index, agreed, entries, index_of, is_whole, joined, length, whole
from .passing import passed
from .readers import Readers
from .restrict import Axes, Made, Side, at_positions, restricted, show, side
from .summands import EMPTY, Owed, miscounted

Key: TypeAlias = tuple[object, ...]
MOST = 64
"""Maximum operand combinations for one node, per value of the user's graph. A fault after this limit says so."""


class Meaning:
    """The numbered values of the user's graph. Values that are computed alike, and copies, share a number."""

    def __init__(self, graph: Graph) -> None:
        self.values: list[Value] = []
        self.digits: list[tuple[Digits, ...]] = []
        self.number: dict[Value, int] = {}
        self.users: dict[Key, Readers] = {}
        self._sources: dict[Key, list[tuple[int | None, ...]]] = {}
        self.leaves: dict[tuple[str, str], Node] = {}
        self._known: dict[Key, tuple[int, ...]] = {}
        for node in graph.nodes:
            if node.is_leaf:
                self.leaves[node.op, node.name] = node
            numbers = self._numbers(node)
            self.number.update(zip(node.results, numbers, strict=True))

    def _numbers(self, node: Node) -> tuple[int, ...]:
        if node.op == "cont":
            return (self.number[node.inputs[0]],)
        sources = tuple(None if s is None else self.number[s] for s in node.src)
        key = (node.op, attribute_key(node.attrs), sources, node.specs, node.name if node.is_leaf else "")
        if key not in self._known:
            numbers = tuple(range(len(self.values), len(self.values) + len(node.specs)))
            self._known[key] = numbers
            self.values += node.results
            if node.is_leaf:
                self.digits.append(((),) * len(node.specs[0].shape))
            else:
                here = side(node)
                self.digits += self._digits(node.op, here, sources)
                if (node.op, sources) not in self.users:
                    self.users[node.op, sources] = Readers(node.op)
                    for place in enumerate(sources):
                        self._sources.setdefault((node.op, place), []).append(sources)
                self.users[node.op, sources].add(here, numbers)
        return self._known[key]

    def sources(self, op: str, choices: Sequence[Collection[int | None]]) -> Iterator[tuple[int | None, ...]]:
        """Yield the operand numbers of nodes with the op `op` that have operand i in ``choices[i]``.

        Only the readers of the operand with the fewest readers are compared.
        """
        if not choices and (op, ()) in self.users:
            yield ()
        none: list[tuple[int | None, ...]] = []
        found = [[self._sources.get((op, (i, n)), none) for n in numbers] for i, numbers in enumerate(choices)]
        fewest = min(found, key=lambda lists: sum(map(len, lists)), default=[])
        for sources in chain.from_iterable(fewest):
            if len(sources) == len(choices) and all(n in c for n, c in zip(sources, choices, strict=True)):
                yield sources

    def _digits(self, op: str, here: Side, sources: Sequence[int | None]) -> list[tuple[Digits, ...]]:
        """Return for each axis of each result the digits on which the result does not depend."""
        axes = tuple(
            None if s is None or number is None else self.with_digits(number, tuple(map(whole, s.shape)))
            for s, number in zip(here.src, sources, strict=True)
        )
        made = restricted(op, here, here, axes)
        if isinstance(made, Made):
            return [tuple(digits for _, digits in result) for result in made.axes]
        return [((),) * len(r.shape) for r in here.results]

    def with_digits(self, number: int, indices: tuple[Index, ...]) -> Axes:
        return tuple(zip(indices, self.digits[number], strict=True))

    def holds(self, held: Held, value: Value, indices: Sequence[Index]) -> bool:
        """Return whether a fact says: these entries of `value`, no partial sum."""
        number = self.number[value]
        return held.number == number and held.owed is None and self.alike(number, held.axes, indices)

    def alike(self, number: int, one: Sequence[Index], two: Sequence[Index]) -> bool:
        """Return whether two lists of entries are equal up to the digits of a value."""
        digits = self.digits[number]
        return all(agreed(a, d, b, d) is not None for a, b, d in zip(one, two, digits, strict=True))


Place: TypeAlias = tuple[int, Node]
"""A device number and a node of its graph. Devices may share node objects."""
_Done: TypeAlias = tuple[list[list[Held]], list[set[int]]]
"""The facts of each result of a node, and the sets of devices to which each device with such a node is added."""


class Trace:
    """Follows the graphs of all devices. `find_faults` yields the nodes that are not part of the user's graph.

    Afterwards `facts_by_node` has the facts of each device value. `computing_devices` maps numbers that a node may
    compute to the devices with such a node; a product with a slice of a weight is a part of the whole product.
    `complete_devices` maps a number to the devices that compute all of it.
    """

    def __init__(self, meaning: Meaning, graphs: Sequence[Graph], leaves: Mapping[tuple[int, str], Held]) -> None:
        self.meaning, self.graphs, self.leaves = meaning, graphs, leaves
        self.held: list[dict[Node, list[list[Held]]]] = [{} for _ in graphs]
        self.computed: dict[frozenset[int], set[int]] = {}
        self.complete: dict[int, set[int]] = {}
        self.most = MOST * len(meaning.values)
        self.unfinished = ""
        self._alike: dict[tuple[Held, ...], list[Held]] = {}
        self._sides: dict[Node, tuple[int, Side]] = {}
        self._numbered: dict[tuple[str, Side], tuple[int, Side]] = {}
        self._done: dict[tuple[int, ...], _Done] = {}
        self._numbers: dict[int, dict[int | None, list[Held]]] = {}
        self._counted: dict[tuple[int, ...], Sequence[Owed]] = {}
        self.groups: dict[object, dict[int, Node]] = {}
        self.missing: dict[object, set[Place]] = {}
        for device, graph in enumerate(graphs):
            for node in graph.nodes:
                if node.op in COLLECTIVES and node.op != "receive":
                    self.groups.setdefault(_meeting(device, node), {})[device] = node
                    self.missing.setdefault(_meeting(device, node), set()).add((device, node))

    def of(self, device: int, value: Value) -> list[Held]:
        results = self.held[device].get(value.node)
        return results[value.index] if results else []

    def faults(self) -> Iterator[str]:
        orders = {graph: _in_turn(graph) for graph in set(self.graphs)}
        ahead = [list(reversed(orders[graph])) for graph in self.graphs]
        moved = True
        while moved:
            moved = False
            for device, nodes in enumerate(ahead):  # each device continues until it must wait
                while nodes and self._is_ready(device, nodes[-1]):
                    yield from self._node(device, nodes.pop())
                    moved = True
        if any(ahead):
            yield "devices wait for each other in a circle"

    def _is_ready(self, device: int, node: Node) -> bool:
        """Note that the device has reached `node`. Return whether all other participants have."""
        if node.op not in COLLECTIVES:
            return True
        missing = self.missing.get(_meeting(device, node), set())
        missing.discard((device, node))
        return not missing

    # ------------------------------------------------------------------------------------------------ one device

    def _node(self, device: int, node: Node) -> Iterator[str]:
        """Infer the facts of one node; yield a fault if the user's graph has no such node."""
        if node.is_leaf:
            yield from self._leaf(device, node)
            return
        if node.op == "receive":
            for source, sender in self.groups.get(_meeting(device, node), {}).items():
                if sender.specs != node.specs:
                    yield f"device {device}: {node!r} receives {sender!r}"
                self.held[device][node] = [self.of(source, sender.results[0])]
            return
        if node.op in COLLECTIVES and node.op != "send":
            if members := self.groups.pop(_meeting(device, node), None):  # the last one infers all results
                yield from self._meet(members)
            return
        held = self.held[device]
        known = [[] if s is None else self.of(device, s) for s in node.src]
        if not all(known) and any(s is not None and not k for s, k in zip(node.src, known, strict=True)):
            return  # a source has a fault that was yielded before
        number, mine = self._side(node)
        key = (number, *map(id, filter(None, known)))  # equal nodes on equal facts have equal results
        if (done := self._done.get(key)) is None:
            reasons: list[str] = []
            results, computed, complete = self._meanings(node, mine, known, reasons)
            if not results[0]:
                why = "; ".join(dict.fromkeys(reasons)) or "it has no such node on these values"
                yield f"device {device}: {node!r} is no part of the graph: {why}"
                return
            done = self._done[key] = (
                [self._known(kept) for kept in results],
                [
                    *([self.computed.setdefault(computed, set())] if computed else ()),
                    *(self.complete.setdefault(n, set()) for n in complete),
                ],
            )
        held[node], devices = done
        for those in devices:
            those.add(device)

    def _side(self, node: Node) -> tuple[int, Side]:
        """Return the node as an `OpInstance`, with the number that all equal instances share."""
        if node not in self._sides:
            mine = side(node)
            self._sides[node] = self._numbered.setdefault((node.op, mine), (len(self._numbered), mine))
        return self._sides[node]

    def _meanings(
        self, node: Node, mine: Side, known: Sequence[list[Held]], reasons: list[str]
    ) -> tuple[list[list[Held]], frozenset[int], set[int]]:
        """Infer the facts of each result, the numbers that may be computed (not converted), and the complete numbers.

        If `node` is not a node of the user's graph, there are no facts, and `reasons` says why.
        """
        results: list[list[Held]] = [[] for _ in node.specs]
        computed, complete = set[int](), set[int]()
        for pair in self._pairs(known) if node.op in CONVERSIONS else ():
            self._add(results[0], converted(node, pair))
        for operands in self._readings(node, known):
            is_copy = REGISTRY[node.op].is_view or bool(converted(node, operands))
            for match in self._matches(node.op, mine, operands, reasons):
                if not is_copy:
                    computed.add(match[0].number)
                complete |= {held.number for held in match if self._is_complete(held)}
                for kept, held in zip(results, match, strict=True):
                    self._add(kept, [held])
        return results, frozenset(computed), complete

    @staticmethod
    def _pairs(known: Sequence[list[Held]]) -> Iterator[tuple[Held, ...]]:
        """Yield the operands of a conversion: the first, or the first two if they are parts of one value."""
        if len(known) == 1:
            yield from ((held,) for held in known[0])
        elif len(known) == 2:
            yield from ((a, b) for a, b in product(*known) if a.number == b.number)

    def _readings(self, node: Node, known: Sequence[list[Held]]) -> Iterator[tuple[Held | None, ...]]:
        """Yield operand facts for which the user's graph has such a node."""
        left_out: dict[int | None, list[None]] = {None: [None]}
        choices = [self._by_number(k) if s is not None else left_out for s, k in zip(node.src, known, strict=True)]
        tried = 0
        for sources in self.meaning.sources(node.op, choices):
            for operands in product(*(c[n] for n, c in zip(sources, choices, strict=True))):
                tried += 1
                if tried > self.most:
                    self.unfinished = f"; the search for what %{node.label} is ended after {self.most} combinations"
                    return
                yield operands

    def _is_complete(self, held: Held) -> bool:
        """Return whether a fact is all of a value, not a partial sum."""
        shape, digits = self.meaning.values[held.number].shape, self.meaning.digits[held.number]
        return held.owed is None and all(map(is_whole, held.axes, digits, shape))

    def _known(self, held: list[Held]) -> list[Held]:
        """Return one shared list for equal facts, so that results are inferred once."""
        return self._alike.setdefault(tuple(held), held)

    def _by_number(self, known: list[Held]) -> dict[int | None, list[Held]]:
        """Return the facts of an operand, a list from `_intern_facts`, by value number."""
        if (numbered := self._numbers.get(id(known))) is None:
            numbered = self._numbers[id(known)] = {}
            for held in known:
                numbered.setdefault(held.number, []).append(held)
        return numbered

    @staticmethod
    def _add(kept: list[Held], more: Sequence[Held]) -> None:
        kept += [h for h in more if h not in kept]

    def _leaf(self, device: int, node: Node) -> Iterator[str]:
        held = self.leaves.get((device, node.name))
        if node.op == "constant":
            theirs = self.meaning.leaves.get((node.op, node.name))
            if theirs is None or theirs.attrs != node.attrs or theirs.specs != node.specs:
                yield f"device {device}: constant %{node.label} is not the graph's"
                return
            held = Held(self.meaning.number[theirs.results[0]], tuple(map(whole, node.specs[0].shape)))
        if held is None:
            yield f"device {device}: {node.op} %{node.label} is not bound there"
        elif tuple(map(length, held.axes)) != node.specs[0].shape:
            yield f"device {device}: {node!r}, but it is bound to entries {[show(i) for i in held.axes]}"
        else:
            self.held[device][node] = [self._known([held])]

    def _matches(
        self, op: str, mine: Side, operands: Sequence[Held | None], reasons: list[str]
    ) -> Iterator[list[Held]]:
        """Yield the facts of all results of a device's node if its operands have these facts."""
        meaning = self.meaning
        key = (op, tuple(None if o is None else o.number for o in operands))
        axes = tuple(None if o is None else meaning.with_digits(o.number, o.axes) for o in operands)
        readers = meaning.users.get(key)
        for user, numbers in readers.neighbours(mine, axes) if readers is not None else ():
            if [s.dtype for s in user.results] != [s.dtype for s in mine.results]:
                reasons.append(f"the results have other dtypes than {user.results}")
                continue
            made = restricted(op, user, mine, axes)
            if isinstance(made, str):
                reasons.append(made)
                continue
            try:
                summands = [None if o is None else o.owed for o in operands]
                owed = passed(op, user, summands, made, key[1])
            except ValueError as why:
                reasons.append(str(why))
                continue
            for summand in (EMPTY, owed) if made.is_empty and owed is None else (owed,):
                yield [
                    Held(number, tuple(i for i, _ in result), summand)
                    for number, result in zip(numbers, made.axes, strict=True)
                ]

    # ------------------------------------------------------------------------ all devices of one collective group

    def _meet(self, members: Mapping[int, Node]) -> Iterator[str]:
        one = next(iter(members.values()))
        if len({n.op for n in members.values()}) > 1:
            yield f"not every device comes to {one!r}"
            return
        team = sorted(members)
        nodes = [members[d] for d in team]
        known = [self.of(d, n.inputs[0]) for d, n in zip(team, nodes, strict=True)]
        if not all(known):
            return
        reasons, met = list[str](), False
        after: list[list[Held]] = [[] for _ in nodes]
        for first in known[0]:
            choices = [[first], *(self._by_number(k).get(first.number, []) for k in known[1:])]
            for brought in self._brought(nodes, choices):
                results = self._met(nodes, brought)
                if isinstance(results, str):
                    reasons.append(results)
                    continue
                met = True
                for kept, held in zip(after, results, strict=True):
                    self._add(kept, [held])
                break  # other facts of the other devices give the same results
        for device, node, results_there in zip(team, nodes, after, strict=True):
            self.held[device][node] = [self._known(results_there)]
        if not met:
            yield f"{one!r}: {'; '.join(dict.fromkeys(reasons)) or 'the devices bring different values'}"

    def _brought(self, nodes: Sequence[Node], choices: Sequence[list[Held]]) -> Iterator[tuple[Held, ...]]:
        """Yield combinations of facts, one per device, that fit the first device; any fact if there is no fit."""
        (first,), attrs = choices[0], nodes[0].attrs
        sums = nodes[0].op in ("all_reduce", "reduce_scatter")
        axis = -1 if sums else as_integer(attrs["old_axis" if nodes[0].op == "all_to_all" else "axis"])
        runs = () if sums else as_index_ranges(attrs["old_runs" if nodes[0].op == "all_to_all" else "runs"])
        fitting: list[list[Held]] = []
        for device, held in enumerate(choices):
            wanted = list(first.axes)
            if device < len(runs) and axis < len(wanted):
                wanted[axis] = joined([runs[device]])
            alike = [h for h in held if self.meaning.alike(first.number, wanted, h.axes) and (sums or h.owed is None)]
            fitting.append(alike or held[:1])
        for tried, brought in enumerate(product(*fitting)):
            if tried == self.most:
                self.unfinished = f"; the search for what comes to {nodes[0]!r} ended after {self.most} combinations"
                return
            yield brought

    def _met(self, nodes: Sequence[Node], brought: Sequence[Held]) -> list[Held] | str:
        """Return each device's fact after a collective, or why the collective is wrong."""
        first, attrs = brought[0], nodes[0].attrs
        if nodes[0].op in ("all_reduce", "reduce_scatter"):
            if not all(self.meaning.alike(first.number, first.axes, h.axes) for h in brought):
                return "the devices bring different entries"
            if why := miscounted([h.owed for h in brought], self._counted):
                return why
            whole_axes = first.axes
        else:
            axis = as_integer(attrs["old_axis" if nodes[0].op == "all_to_all" else "axis"])
            runs = as_index_ranges(attrs["old_runs" if nodes[0].op == "all_to_all" else "runs"])
            gathered = self._gathered(brought, axis, runs)
            if isinstance(gathered, str):
                return gathered
            whole_axes = gathered
        if nodes[0].op in ("all_reduce", "all_gather"):
            results = [Held(first.number, whole_axes)] * len(nodes)
        else:
            results = [self._part(first.number, whole_axes, d, n) for d, n in enumerate(nodes)]
        for node, held in zip(nodes, results, strict=True):
            if tuple(map(length, held.axes)) != node.specs[0].shape:
                return f"{node!r} gives entries {[show(i) for i in held.axes]}"
        return results

    @staticmethod
    def _part(number: int, axes: tuple[Index, ...], device: int, node: Node) -> Held:
        axis, own = as_integer(node.attrs["axis"]), as_index_ranges(node.attrs["runs"])[device]
        return Held(number, (*axes[:axis], at_positions(axes[axis], joined([own])), *axes[axis + 1 :]))

    def _gathered(self, brought: Sequence[Held], axis: int, runs: Sequence[Index]) -> tuple[Index, ...] | str:
        """Return the entries of a value from shards of one axis, or why they do not fit."""
        number, axes = brought[0].number, brought[0].axes
        if any(h.owed is not None for h in brought):
            return "it is a sum still owed"
        if len(runs) != len(brought):
            return f"runs are given for {len(runs)} devices"
        for held in brought:
            if not self.meaning.alike(number, (*axes[:axis], (), *axes[axis + 1 :]), but(held.axes, axis)):
                return "the devices bring different entries of another axis"
        for device, (held, own) in enumerate(zip(brought, runs, strict=True)):
            if length(held.axes[axis]) != length(own):
                return f"device {device} brings {length(held.axes[axis])} entries to {length(own)} places"
        index = _scattered(tuple(joined([r]) for r in runs), tuple(h.axes[axis] for h in brought))
        n = self.meaning.values[number].shape[axis]
        if index is None:
            return f"the runs do not put entries of axis {axis} everywhere, or two at one place"
        is_all = is_whole(index, self.meaning.digits[number][axis], n)
        return (*axes[:axis], whole(n) if is_all else index, *axes[axis + 1 :])


def _meeting(device: int, node: Node) -> object:
    """Return the key that all participants share: the sequence number, and for a message also sender and receiver."""
    number = as_integer(node.attrs["sequence"])
    if node.op == "send":
        return device, node.attrs["to"], number
    return (node.attrs["source"], device, number) if node.op == "receive" else number


def _in_turn(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes of a graph, sources first, with collectives by sequence number."""
    meet = sorted((n for n in graph.nodes if n.op in COLLECTIVES), key=lambda n: as_integer(n.attrs["sequence"]))
    return topological_order(map(Value, (*meet, *graph.nodes)))


@lru_cache(maxsize=1024)
def _scattered(places: tuple[Index, ...], brought: tuple[Index, ...]) -> Index | None:
    """Return the entries of an axis from each device's places; None if a place is empty or two devices disagree."""
    size = max((sum(run) for index in places for run in index), default=0)
    whole_axis = np.full(size, -1, np.int64)
    for index, mine in zip(places, brought, strict=True):
        at, new = entries(index), entries(mine)
        before = whole_axis[at]
        if ((before >= 0) & (before != new)).any():
            return None
        whole_axis[at] = new
    return None if (whole_axis < 0).any() else index_of(whole_axis)
