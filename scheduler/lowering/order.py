"""The order of execution, and which new state may be written straight into the memory of the old one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from ...graph.errors import PlanError
from ...graph.graph import Graph, order_with_state_updates
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...graph.spec import Spec
from ...ops import cont, op_of
from ...ops.collectives import COLLECTIVES, find_collective_number
from ...ops.registry import find_inplace_operand
from .strides import Strided


@dataclass(frozen=True, slots=True)
class Schedule:
    """Nodes in order; `donated` maps a result to the state whose memory it is written into, `over` to what lies there
    until then: the state, or a result that was written there before; `copied` maps a state to the value that is copied
    over it at the end."""

    nodes: tuple[Node, ...]
    donated: Mapping[Value, Value]
    over: Mapping[Value, Value]
    copied: Mapping[Value, Value]

    def allows(self, nodes: Iterable[Node], views: Mapping[Value, Strided]) -> bool:
        """Whether these nodes, all that compute, may run in this other order.

        Each node has to follow the nodes that it reads, no node may read a state after its overwriting, and collectives
        have to keep their sequence.
        """
        place = {node: at for at, node in enumerate(nodes)}
        meetings = [number for node in place if (number := find_collective_number(node.op, node.attrs)) is not None]
        if meetings != sorted(meetings):
            return False
        overwritten = {victim: place[result.node] for result, victim in self.over.items()}
        for node, at in place.items():
            for base in (views[source].base for source in node.inputs):
                if place.get(base.node, -1) >= at or overwritten.get(base, at) < at:
                    return False
        return True


def schedule(
    graph: Graph, views: Mapping[Value, Strided], kept: Callable[[Value], Spec], overlaps: bool = False
) -> Schedule:
    """Order `graph` so that as many states as possible are updated in place; where the device `overlaps`, with what
    may run beside a collective straight behind it.

    A node may write a state's memory if that holds the new value as it is `kept`, and every other reader of the old
    one can run before it.  Where that would be a cycle the new value gets memory of its own and is copied at the end:
    slower, never wrong.  A state that is changed several times in a run is so each time in place, if all can.
    """
    readers: dict[Value, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if not node.is_leaf and not op_of(node).is_view:
            for base in dict.fromkeys(views[s].base for s in node.inputs):
                readers[base].append(node)
    waits = _Waits(graph)
    lasting = {views[v].base for v in (*graph.outputs.values(), *graph.updates.values())}
    over: dict[Value, Value] = {}
    donated: dict[Value, Value] = {}
    copied: dict[Value, Value] = {}

    def lie_there(line: Sequence[Value]) -> bool:
        """Whether each of these values may be written where the one before it lies, the first a state."""
        for victim, result in pairwise(line):
            before = [n for n in readers[victim] if n is not result.node]
            if (
                result in donated
                or kept(result).dtype is not kept(line[0]).dtype
                or not may_overwrite(result, victim, views)
                or waits.reaches(result.node, set(before))
            ):
                return False
            waits.add(result.node, before)
        return True

    for state, new in graph.updates.items():
        if new == state:
            continue  # it is there, and stays
        lines = _lines(state, new, views, lasting) if views[new].covers_base else ()
        line = next(filter(lie_there, lines), None)
        if line is None:
            copied[state] = new
        else:
            donated.update(dict.fromkeys(line[1:], state))
            over.update((result, victim) for victim, result in pairwise(line))
    order = _order(graph, waits.later, in_turn=overlaps)
    return Schedule(_meeting_first(order, waits.later) if overlaps else order, donated, over, copied)


def _lines(
    state: Value, new: Value, views: Mapping[Value, Strided], lasting: Container[Value]
) -> Iterator[Sequence[Value]]:
    """A state and what may be written there one after the other, up to the new one: all results on the way to it that
    change it in place, unless they are `lasting`; else the last alone."""
    last = views[new].base
    line = [last]
    while (into := find_inplace_operand(line[-1])) is not None and views[into].covers_base:
        base = views[into].base
        line.append(base)
        if base == state and len(line) > 2:
            yield line[::-1]
        if base.node.is_leaf or base in lasting:
            break
    yield state, last


def settle(graph: Graph) -> Graph:
    """Give each new state that is only another leaf, and each output that is an old state, a copy of its own; also each
    output that is a quantised weight, whose elements have no addresses.

    Afterwards no leaf is read once the last node has run, so updates cannot disturb each other or an output.
    """

    def base(value: Value) -> Node:
        node = value.node
        while not node.is_leaf and op_of(node).is_view:
            node = node.inputs[0].node
        return node

    updated = {state.node for state in graph.updates}
    copied = {v for v in graph.outputs.values() if base(v) in updated or (base(v).is_leaf and v.dtype.is_quantised)}
    renewed = {k for k, v in graph.updates.items() if base(v).is_leaf and k != v}
    if not copied and not renewed:
        return graph
    outputs = {
        k: cont(v, name=f"{v.node.name or v.node.op}.old") if v in copied else v for k, v in graph.outputs.items()
    }
    updates = {k: cont(v, name=f"{k.node.name}.new") if k in renewed else v for k, v in graph.updates.items()}
    return Graph(outputs, updates)


def may_overwrite(result: Value, victim: Value, views: Mapping[Value, Strided]) -> bool:
    """Whether the node of `result` may write it over `victim`: it does not read it, or reads it as its in-place
    operand and nowhere else."""
    node, declared = result.node, op_of(result.node)
    allowed = {name for index, name in declared.inplace_pairs(node.attrs) if index == result.index}
    for name, source in zip(declared.operand_names, node.src, strict=False):
        if source is None or views[source].base != victim:
            continue
        dense = views[source].covers_base and source.spec.size == result.spec.size
        twin = any(v == source for n, v in zip(declared.operand_names, node.src, strict=False) if n in allowed)
        if not dense or (name not in allowed and not twin):
            return False
        if name not in allowed and not _elementwise(node):
            return False
    return True


def _elementwise(node: Node) -> bool:
    """Whether element i of the result needs only element i of operands of the same shape."""
    return all(not o.dims for o in op_of(node).signature_for(node.attrs).operands)


class _Waits:
    """Nodes that must come after others though they read nothing of them; collectives keep their sequence."""

    def __init__(self, graph: Graph) -> None:
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.lowest = len(self.place)
        """Below this place every node waits only for nodes at lower ones."""
        self.later: dict[Node, list[Node]] = defaultdict(list)
        meetings = [(number, n) for n in graph.nodes if (number := find_collective_number(n.op, n.attrs)) is not None]
        for (_, first), (_, second) in pairwise(sorted(meetings, key=lambda m: m[0])):
            self.add(second, [first])

    def add(self, node: Node, before: list[Node]) -> None:
        self.later[node] += before
        if any(self.place[n] > self.place[node] for n in before):
            self.lowest = min(self.lowest, self.place[node])

    def reaches(self, start: Node, targets: set[Node]) -> bool:
        """Whether any of `targets` needs a result of `start`, that is, whether `start` is among what they wait for."""
        stack, seen, floor = list(targets), set(targets), min(self.place[start], self.lowest)
        while stack:
            node = stack.pop()
            if node is start:
                return True
            if self.place[node] < floor:
                continue
            for source in (*(v.node for v in node.inputs), *self.later.get(node, ())):
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return False


def _order(graph: Graph, later: Mapping[Node, list[Node]], *, in_turn: bool = False) -> tuple[Node, ...]:
    """Graph order, but each writer of a state after the readers of its old value, and what only a new state needs
    straight behind the last that it reads: at the end, where the graph has it, all that would still be kept.  What is
    sent goes at once, since somebody waits for it.  With `in_turn` a collective comes before what only the next one
    needs.  Raises `PlanError` where meetings are numbered against what they read."""
    done: dict[Node, None] = {}
    begun: set[Node] = set()
    for root in order_with_state_updates(graph, {node for node in graph.nodes if node.op == "send"}):
        stack = [root]
        while stack:
            node = stack[-1]
            if node in done:
                stack.pop()
                continue
            read, before = [v.node for v in node.inputs], later.get(node, [])
            waiting = [n for n in ((*before, *read) if in_turn else (*read, *before)) if n not in done]
            if waiting:
                begun.add(node)
                if (first := next((n for n in waiting if n in begun), None)) is not None:
                    raise PlanError(
                        f"{first!r} would wait for itself: meetings come in the order of their numbers, and one of a "
                        "lower number reads what comes of one of a higher; number them as they follow from each other"
                    )
                stack.extend(reversed(waiting))
            else:
                done[node] = None
                stack.pop()
    return tuple(done)


def _meeting_first(order: Sequence[Node], later: Mapping[Node, list[Node]]) -> tuple[Node, ...]:
    """Each collective as soon as what it needs is there, and behind it first what needs nothing of it."""
    placed: list[Node] = []
    waiting: dict[Node, None] = {}
    met: Node | None = None

    def sources(node: Node) -> list[Node]:
        return [*(v.node for v in node.inputs), *later.get(node, ())]

    for node in order:
        if node.op in COLLECTIVES:
            needed, stack = set[Node](), sources(node)
            while stack:
                if (source := stack.pop()) in waiting and source not in needed:
                    needed.add(source)
                    stack += sources(source)
            placed += [*(n for n in waiting if n in needed), node, *(n for n in waiting if n not in needed)]
            waiting, met = {}, node
        elif any(source is met or source in waiting for source in sources(node)):
            waiting[node] = None
        else:
            placed.append(node)
    return (*placed, *waiting)
