"""Graphs: all nodes that the outputs and state updates need, in a fixed order, and the text of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import field
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING

from .attrs import Attrs, quote_word
from .errors import GraphError
from .lazy_dataclass import dataclass
from .node import LEAF_OPS, Node, Value, format_node, format_reference
from .validation import (
    MAX_MESSAGE_CHARACTERS,
    TEXT,
    ArgumentKind,
    instance_of,
    mapping_of,
    validate_arguments,
    validate_constructor,
)

if TYPE_CHECKING:
    from ..view import Page

VALUE_KIND = instance_of(Value)
OUTPUTS_KIND = mapping_of(TEXT, VALUE_KIND, "a mapping from names to values")
LEAF_KIND = ArgumentKind(f"one of {', '.join(sorted(LEAF_OPS))}", lambda v: isinstance(v, str) and v in LEAF_OPS)
UPDATES_KIND = mapping_of(VALUE_KIND, VALUE_KIND, "a mapping from states to their new values")


@validate_constructor(GraphError, outputs=OUTPUTS_KIND, updates=UPDATES_KIND)
@dataclass(frozen=True, eq=False)
class Graph:
    """A compute graph: named outputs and state updates, with all nodes that they need.

    `nodes` has each reachable node once, operands before users. The order depends only on the outputs and updates, so
    the same model code gives the same order. Planning verifies the graph (`verify`).

    Args:
        outputs: The values that a run returns, by name.
        updates: The new value of each state that a run changes.

    Raises:
        GraphError: An argument is not a mapping of values.
    """

    outputs: Mapping[str, Value]
    updates: Mapping[Value, Value] = field(default_factory=dict)
    nodes: tuple[Node, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outputs", MappingProxyType(dict(self.outputs)))
        object.__setattr__(self, "updates", MappingProxyType(dict(self.updates)))
        object.__setattr__(self, "nodes", topological_order(self.roots()))

    def roots(self) -> tuple[Value, ...]:
        """Return the roots of the graph: the outputs, then the updated states, then the new values of these states."""
        return (*self.outputs.values(), *self.updates, *self.updates.values())

    @validate_arguments(GraphError, op=LEAF_KIND)
    def leaves(self, op: str) -> tuple[Value, ...]:
        """Return the leaves of one op: ``input``, ``weight``, ``state`` or ``constant``."""
        return tuple(n.results[0] for n in self.nodes if n.op == op)

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The input leaves, which get new arrays in each run."""
        return self.leaves("input")

    @property
    def weights(self) -> tuple[Value, ...]:
        """The weight leaves, which `hocket.load` binds to arrays once."""
        return self.leaves("weight")

    @property
    def states(self) -> tuple[Value, ...]:
        """The state leaves, which keep their content between runs."""
        return self.leaves("state")

    def users(self) -> dict[Value, list[Node]]:
        """Return the users of each value: the nodes that read the value, in graph order."""
        readers: dict[Value, list[Node]] = {v: [] for n in self.nodes for v in n.results}
        for node in self.nodes:
            for source in dict.fromkeys(node.inputs):
                readers[source].append(node)
        return readers

    def digest(self) -> str:
        """Return the digest of the graph. It is the SHA-256 of its structure and of the names of leaves and outputs."""
        import hashlib  # loads OpenSSL, which `import hocket` need not do

        number = {node: i for i, node in enumerate(self.nodes)}

        def ref(value: Value | None) -> tuple[int, int] | None:
            return None if value is None else (number[value.node], value.index)

        sha = hashlib.sha256()
        for node in self.nodes:
            attrs = sorted(node.attrs.items())
            name = node.name if node.is_leaf else ""
            sha.update(repr((node.op, [ref(s) for s in node.src], attrs, node.specs, name)).encode())
        outputs = [(name, ref(v)) for name, v in sorted(self.outputs.items())]
        updates = sorted((str(ref(old)), str(ref(new))) for old, new in self.updates.items())
        sha.update(repr((outputs, updates)).encode())
        return sha.hexdigest()

    @validate_arguments(GraphError, title=TEXT)
    def view(self, *, title: str = "graph") -> Page:
        """Return an HTML page that shows the graph. The graph may be invalid."""
        from ..view import view_graph

        return view_graph(self, title=title)

    def _repr_html_(self) -> str:
        """Return the page of the graph as HTML for a notebook."""
        return self.view()._repr_html_()

    def __str__(self) -> str:
        from ..ops.text import dump

        return dump(self)

    __repr__ = __str__


def topological_order(roots: Iterable[Value]) -> tuple[Node, ...]:
    """Return all nodes that `roots` need in depth-first order, operands before users.

    Raises:
        GraphError: A node reads its own result, directly or indirectly. This needs a node that was changed after its
            creation.
    """
    order: dict[Node, None] = {}
    entered: set[Node] = set()
    for root in roots:
        stack = [root.node]
        while stack:
            node = stack[-1]
            if node in order:
                stack.pop()
                continue
            waiting = [s.node for s in node.src if s is not None and s.node not in order]
            if not waiting:
                order[node] = None
                stack.pop()
            elif node in entered:  # an operand of the node waits for the node
                raise GraphError(
                    f"%{node.label:.{MAX_MESSAGE_CHARACTERS}} reads its own result; "
                    "build nodes from earlier values only"
                )
            else:
                entered.add(node)
                stack.extend(reversed(waiting))
    return tuple(order)


def order_updates_directly_after_operands(graph: Graph, early_nodes: Container[Node] = ()) -> tuple[Node, ...]:
    """Return all nodes in topological order, where nodes that compute state updates come as early as possible.

    Such a node directly follows its last operand.

    Args:
        graph: The graph.
        early_nodes: Further nodes that directly follow their last operand, such as sends.
    """
    position: dict[Node, tuple[int, int]] = {}
    for at, node in enumerate(topological_order(graph.outputs.values())):
        position[node] = (at, -1)
    for at, node in enumerate(n for n in graph.nodes if n not in position or n in early_nodes):
        position[node] = (max((position[s.node][0] for s in node.inputs if not s.node.is_leaf), default=-1), at)
    return tuple(sorted(graph.nodes, key=position.__getitem__))


def assign_names(graph: Graph) -> dict[Node, str]:
    """Assign a distinct printed name to each node: its name, its name with ``~2`` if that is taken, or a number."""
    names: dict[Node, str] = {}
    taken: set[str] = set()
    repeat_counts: Counter[str] = Counter()
    for node in sorted(
        (n for n in graph.nodes if n.name), key=lambda n: not n.is_leaf
    ):  # leaves first: arrays are bound by their names
        name = node.name
        while name in taken:
            repeat_counts[node.name] += 1
            name = f"{node.name}~{repeat_counts[node.name] + 1}"
        taken.add(name)
        names[node] = name
    numbers = (str(i) for i in count() if str(i) not in taken)
    names.update((node, next(numbers)) for node in graph.nodes if not node.name)
    return names


@validate_arguments(GraphError, graph=instance_of(Graph))
def format_graph(graph: Graph, select_attributes: Callable[[Node], Attrs] | None = None) -> str:
    """Return a graph as text with one node on each line, which `parse` reads.

    Args:
        graph: The graph.
        select_attributes: Returns the attributes of a node to write; by default, all are written.
    """
    names = assign_names(graph)
    lines = [
        format_node(node, names, None if select_attributes is None else select_attributes(node)) for node in graph.nodes
    ]
    lines.append(
        "return " + ", ".join(f"{quote_word(name)}={format_reference(v, names)}" for name, v in graph.outputs.items())
    )
    lines += [
        f"update {format_reference(old, names)} = {format_reference(new, names)}" for old, new in graph.updates.items()
    ]
    return "\n".join(lines) + "\n"
