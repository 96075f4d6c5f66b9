"""The execution order of a graph, and the states that are updated in place.

A new state may be written into the memory of the old state if all readers of the old state can run before the writer.
The order then has extra dependences: the writer follows these readers.

Example: ``y = f(s)``, ``s' = g(s)`` is an update of state s. If g runs after f, g may write over s. But with ``y =
f(s, s')``, f reads both states, so it would have to run both before and after g. Then s' gets its own memory, and is
copied into s at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from ...graph.errors import PlanError
from ...graph.graph import Graph, order_updates_directly_after_operands
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...graph.spec import Spec
from ...ops import cont, op_of
from ...ops.collectives import COLLECTIVES, find_collective_sequence_number
from ...ops.registry import find_inplace_operand, find_view_base
from .strides import StridedView


@dataclass(frozen=True, slots=True)
class ExecutionOrderWithInplaceStates:
    """The nodes of a graph in execution order, and the states that are updated in place.

    - `nodes`: all nodes, in execution order.
    - `inplace_states` maps a result that is written into the memory of a state to this state.
    - `overwritten_values` maps each of these results to the value that it overwrites. This is the state, or an earlier
      result in the memory of the state.
    - `copied_states` maps a state to its new value, which is copied into the state at the end of the run.
    """

    nodes: tuple[Node, ...]
    inplace_states: Mapping[Value, Value]
    overwritten_values: Mapping[Value, Value]
    copied_states: Mapping[Value, Value]

    def can_run_in_other_order(self, nodes: Iterable[Node], views: Mapping[Value, StridedView]) -> bool:
        """Return whether the nodes may run in another given order, with the same results and the same in-place updates.

        The other order must meet three conditions:

        - Each node follows the nodes that it reads.
        - No node reads a state after it is overwritten.
        - Collectives run by ascending sequence number.

        Args:
            nodes: All nodes that compute, in the other order.
            views: The strided view of each value.
        """
        place = {node: at for at, node in enumerate(nodes)}
        collective_numbers = [
            number for node in place if (number := find_collective_sequence_number(node.op, node.attrs)) is not None
        ]
        if collective_numbers != sorted(collective_numbers):
            return False
        overwritten = {victim: place[result.node] for result, victim in self.overwritten_values.items()}
        for node, at in place.items():
            for base in (views[source].base for source in node.inputs):
                if place.get(base.node, -1) >= at or overwritten.get(base, at) < at:
                    return False
        return True


def order_nodes_for_inplace_state_updates(
    graph: Graph,
    views: Mapping[Value, StridedView],
    stored_spec_of: Callable[[Value], Spec],
    prefers_overlap: bool = False,
) -> ExecutionOrderWithInplaceStates:
    """Order the nodes for execution, so that as many states as possible are updated in place.

    A node may write its result over a state under two conditions. The stored dtypes are equal, and all other readers of
    the state can run before the node. If this would be a cycle, the new value gets its own memory. It is then copied
    into the state at the end, which is slower. If several nodes of a run change a state, all of them change it in place
    if possible.

    Args:
        graph: The graph with dense copies.
        views: The strided view of each value.
        stored_spec_of: Returns the spec (shape and dtype) in which the backend stores a value.
        prefers_overlap: Whether each collective comes early, so that independent nodes can run at the same time.
    """
    readers: dict[Value, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if not node.is_leaf and not op_of(node).is_view:
            for base in dict.fromkeys(views[s].base for s in node.inputs):
                readers[base].append(node)
    waits = _OrderConstraints(graph)
    lasting = {views[v].base for v in (*graph.outputs.values(), *graph.updates.values())}
    over: dict[Value, Value] = {}
    donated: dict[Value, Value] = {}
    copied: dict[Value, Value] = {}

    def lie_there(line: Sequence[Value]) -> bool:
        """Return whether each value may overwrite the value before it; the first one is a state."""
        for victim, result in pairwise(line):
            before = [n for n in readers[victim] if n is not result.node]
            if (
                result in donated
                or stored_spec_of(result).dtype is not stored_spec_of(line[0]).dtype
                or not can_overwrite(result, victim, views)
                or waits.is_required_before_any(result.node, set(before))
            ):
                return False
            waits.add_predecessors(result.node, before)
        return True

    for state, new in graph.updates.items():
        if new == state:
            continue  # the state stays
        lines = _list_inplace_update_chains(state, new, views, lasting) if views[new].is_reshape_of_base else ()
        line = next(filter(lie_there, lines), None)
        if line is None:
            copied[state] = new
        else:
            donated.update(dict.fromkeys(line[1:], state))
            over.update((result, victim) for victim, result in pairwise(line))
    order = _order_nodes_by_dependences(graph, waits.extra_predecessors, collectives_first=prefers_overlap)
    return ExecutionOrderWithInplaceStates(
        _move_collectives_earlier(order, waits.extra_predecessors) if prefers_overlap else order, donated, over, copied
    )


def _list_inplace_update_chains(
    state: Value, new_state: Value, views: Mapping[Value, StridedView], lasting_values: Container[Value]
) -> Iterator[Sequence[Value]]:
    """Yield chains of values that can be written one over the other into the memory of a state.

    The longest chain comes first. A chain begins with the state and ends with its new value. Each value of a chain is
    an in-place update of the value before it. The last chain has only the state and the new value.

    Args:
        state: The state.
        new_state: The value that replaces it.
        views: The strided view of each value.
        lasting_values: Outputs and new states. They must not be overwritten, so a chain has none of them in the middle.
    """
    last = views[new_state].base
    line = [last]
    while (into := find_inplace_operand(line[-1])) is not None and views[into].is_reshape_of_base:
        base = views[into].base
        line.append(base)
        if base == state and len(line) > 2:
            yield line[::-1]
        if base.node.is_leaf or base in lasting_values:
            break
    yield state, last


def insert_copies_before_state_updates(graph: Graph) -> Graph:
    """Insert copies into a graph, so that state updates cannot change outputs or other new states.

    Three kinds of values are copied:

    - a new state that is a leaf itself, such as another state;
    - an output that is the old value of an updated state;
    - an output that is a quantised leaf, because strides cannot address its elements.

    Afterwards no leaf is read after the last node has run.
    """

    updated = {state.node for state in graph.updates}
    base = {v: find_view_base(v).node for v in (*graph.outputs.values(), *graph.updates.values())}
    copied = {v for v in graph.outputs.values() if base[v] in updated or (base[v].is_leaf and v.dtype.is_quantised)}
    renewed = {k for k, v in graph.updates.items() if base[v].is_leaf and k != v}
    if not copied and not renewed:
        return graph
    outputs = {
        k: cont(v, name=f"{v.node.name or v.node.op}.old") if v in copied else v for k, v in graph.outputs.items()
    }
    updates = {k: cont(v, name=f"{k.node.name}.new") if k in renewed else v for k, v in graph.updates.items()}
    return Graph(outputs, updates)


def can_overwrite(result: Value, overwritten_value: Value, views: Mapping[Value, StridedView]) -> bool:
    """Return whether a kernel may write `result` into the memory of `overwritten_value` while it runs.

    It may if the node does not read `overwritten_value`, or reads it only as an operand that its op declares as
    in-place.
    """
    node, declared = result.node, op_of(result.node)
    allowed = {name for index, name in declared.inplace_pairs(node.attrs) if index == result.index}
    for name, source in zip(declared.operand_names, node.src, strict=False):
        if source is None or views[source].base != overwritten_value:
            continue
        dense = views[source].is_reshape_of_base and source.spec.size == result.spec.size
        is_read_inplace = any(
            v == source for n, v in zip(declared.operand_names, node.src, strict=False) if n in allowed
        )
        if not dense or (name not in allowed and not is_read_inplace):
            return False
        if name not in allowed and not _is_elementwise(node):
            return False
    return True


def _is_elementwise(node: Node) -> bool:
    """Return whether element i of the node's result depends only on element i of its operands of the same shape."""
    return all(not o.dims for o in op_of(node).signature_for(node.attrs).operands)


class _OrderConstraints:
    """The order constraints between nodes that their operands do not show, as predecessors of each node.

    - Collectives keep the order of their sequence numbers.
    - A node that overwrites a state in place follows all readers of the old state.
    """

    def __init__(self, graph: Graph) -> None:
        self.node_positions = {node: i for i, node in enumerate(graph.nodes)}
        self.lowest_irregular_position = len(self.node_positions)
        """Below this place every node waits only for nodes at lower ones."""
        self.extra_predecessors: dict[Node, list[Node]] = defaultdict(list)
        collectives = [
            (number, n) for n in graph.nodes if (number := find_collective_sequence_number(n.op, n.attrs)) is not None
        ]
        for (_, first), (_, second) in pairwise(sorted(collectives, key=lambda m: m[0])):
            self.add_predecessors(second, [first])

    def add_predecessors(self, node: Node, predecessors: list[Node]) -> None:
        """Require that `node` runs after all of `predecessors`."""
        self.extra_predecessors[node] += predecessors
        if any(self.node_positions[n] > self.node_positions[node] for n in predecessors):
            self.lowest_irregular_position = min(self.lowest_irregular_position, self.node_positions[node])

    def is_required_before_any(self, start: Node, targets: set[Node]) -> bool:
        """Return whether any node of `targets` must run after `start`, because of operands or extra dependences."""
        stack, seen, floor = (
            list(targets),
            set(targets),
            min(self.node_positions[start], self.lowest_irregular_position),
        )
        while stack:
            node = stack.pop()
            if node is start:
                return True
            if self.node_positions[node] < floor:
                continue
            for source in (*(v.node for v in node.inputs), *self.extra_predecessors.get(node, ())):
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return False


def _order_nodes_by_dependences(
    graph: Graph, extra_predecessors: Mapping[Node, list[Node]], *, collectives_first: bool = False
) -> tuple[Node, ...]:
    """Order the nodes for execution, so that each node follows its operands and its extra predecessors.

    - A node that writes over a state follows the readers of the old state.
    - A node that is needed only for a new state follows directly the last value that it reads, to save memory.
    - A `send` comes as early as possible, because another device waits for it.
    - Nodes that depend on a received message come last.

    Args:
        graph: The graph.
        extra_predecessors: The nodes that must run before a node in addition to its operands, by node.
        collectives_first: Whether a collective precedes nodes that are needed only by the next collective.

    Raises:
        PlanError: The sequence numbers of collectives contradict the dependences between them.
    """
    done: dict[Node, None] = {}
    begun: set[Node] = set()
    for root in _sort_nodes_by_last_received_message(graph):
        stack = [root]
        while stack:
            node = stack[-1]
            if node in done:
                stack.pop()
                continue
            read, before = [v.node for v in node.inputs], extra_predecessors.get(node, [])
            waiting = [n for n in ((*before, *read) if collectives_first else (*read, *before)) if n not in done]
            if waiting:
                begun.add(node)
                if (first := next((n for n in waiting if n in begun), None)) is not None:
                    raise PlanError(
                        f"{first!r} would wait for itself: collectives run in the order of their numbers, "
                        "and one of a lower number reads the result of one of a higher number; "
                        "number them in the order in which they depend on each other"
                    )
                stack.extend(reversed(waiting))
            else:
                done[node] = None
                stack.pop()
    return tuple(done)


def _sort_nodes_by_last_received_message(graph: Graph) -> Sequence[Node]:
    """Sort the nodes by the sequence number of the last `receive` on which each depends, directly or not.

    Nodes that depend on no message come first.
    """
    nodes = order_updates_directly_after_operands(graph, {node for node in graph.nodes if node.op == "send"})
    last_message: dict[Node, int] = {}
    for node in graph.nodes:
        number = find_collective_sequence_number(node.op, node.attrs) if node.op == "receive" else None
        before = max((last_message[source.node] for source in node.inputs), default=-1)
        last_message[node] = before if number is None else number
    return sorted(nodes, key=last_message.__getitem__)


def _move_collectives_earlier(order: Sequence[Node], extra_predecessors: Mapping[Node, list[Node]]) -> tuple[Node, ...]:
    """Move each collective directly after the nodes that it needs, so that independent nodes can run during it.

    A `receive` keeps its position, because all later nodes wait for it.
    """
    placed: list[Node] = []
    waiting: dict[Node, None] = {}
    last_collective: Node | None = None

    def sources(node: Node) -> list[Node]:
        return [*(v.node for v in node.inputs), *extra_predecessors.get(node, ())]

    for node in order:
        if node.op == "receive":
            placed += [*waiting, node]
            waiting, last_collective = {}, None
        elif node.op in COLLECTIVES:
            needed, stack = set[Node](), sources(node)
            while stack:
                if (source := stack.pop()) in waiting and source not in needed:
                    needed.add(source)
                    stack += sources(source)
            placed += [*(n for n in waiting if n in needed), node, *(n for n in waiting if n not in needed)]
            waiting, last_collective = {}, node
        elif any(source is last_collective or source in waiting for source in sources(node)):
            waiting[node] = None
        else:
            placed.append(node)
    return (*placed, *waiting)


_MATMULS = ("mul_mat", "mul_mat_id")


def is_matmul_operand_computed_in_group(
    value: Value, overwritten: Value, group: Sequence[Node], views: Mapping[Value, StridedView]
) -> bool:
    """Return whether a fused kernel computes a matmul operand from `value`, so that `overwritten` may not be reused.

    Each thread block of such a kernel computes the whole operand for itself. So it reads `overwritten` until its end,
    and `value` may not take this memory. The answer is no if the kernel itself computes `overwritten`.

    Args:
        value: The result that would be written over `overwritten`.
        overwritten: The value in the memory.
        group: The nodes of the fused kernel.
        views: The strided view of each value.
    """
    computed = {value}
    for node in () if overwritten.node in group else group:
        if any(views[v].base in computed for v in node.inputs):
            if node.op in _MATMULS:
                return True
            computed.update(node.results)
    return False
