"""A graph: what is reachable from its outputs and its state updates, in one fixed order; and its text."""

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
    """Named outputs, and for each state that changes its value after the run.

    `nodes` holds every reachable node once, sources before users; it follows from the outputs alone, so the same
    model code gives the same order.  Raises `GraphError` for what are no values; all else `verify` checks, in every
    plan.
    """

    outputs: Mapping[str, Value]
    updates: Mapping[Value, Value] = field(default_factory=dict)
    nodes: tuple[Node, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outputs", MappingProxyType(dict(self.outputs)))
        object.__setattr__(self, "updates", MappingProxyType(dict(self.updates)))
        object.__setattr__(self, "nodes", topological_order(self.roots()))

    def roots(self) -> tuple[Value, ...]:
        """Outputs, then updated states, then their new values."""
        return (*self.outputs.values(), *self.updates, *self.updates.values())

    @validate_arguments(GraphError, op=LEAF_KIND)
    def leaves(self, op: str) -> tuple[Value, ...]:
        """The leaves of one kind: ``input``, ``weight``, ``state`` or ``constant``."""
        return tuple(n.results[0] for n in self.nodes if n.op == op)

    @property
    def inputs(self) -> tuple[Value, ...]:
        """What each run is given."""
        return self.leaves("input")

    @property
    def weights(self) -> tuple[Value, ...]:
        """What `hocket.load` is given."""
        return self.leaves("weight")

    @property
    def states(self) -> tuple[Value, ...]:
        """What is kept from run to run."""
        return self.leaves("state")

    def users(self) -> dict[Value, list[Node]]:
        """For every value the nodes that read it, in graph order."""
        readers: dict[Value, list[Node]] = {v: [] for n in self.nodes for v in n.results}
        for node in self.nodes:
            for source in dict.fromkeys(node.inputs):
                readers[source].append(node)
        return readers

    def digest(self) -> str:
        """SHA-256 of the structure.  Names count for leaves and outputs only: other names are for people."""
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
        """A page that shows the graph; it need not have been verified."""
        from ..view import view_graph

        return view_graph(self, title=title)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.view()._repr_html_()

    def __str__(self) -> str:
        from ..ops.text import dump

        return dump(self)

    __repr__ = __str__


def topological_order(roots: Iterable[Value]) -> tuple[Node, ...]:
    """Every node reachable from `roots`, each after its sources; depth first, so users stay near their sources.

    Raises `GraphError` for a node that reads its own result, through others too: only a frozen node that was
    changed can.
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
            elif node in entered:  # its sources wait for it
                raise GraphError(
                    f"%{node.label:.{MAX_MESSAGE_CHARACTERS}} reads its own result; "
                    "build nodes from earlier values only"
                )
            else:
                entered.add(node)
                stack.extend(reversed(waiting))
    return tuple(order)


def order_with_state_updates(graph: Graph, sent: Container[Node] = ()) -> tuple[Node, ...]:
    """The nodes in order; what only a new state needs, and what is `sent`, straight behind the last that it reads."""
    place: dict[Node, tuple[int, int]] = {}
    for at, node in enumerate(topological_order(graph.outputs.values())):
        place[node] = (at, -1)
    for at, node in enumerate(n for n in graph.nodes if n not in place or n in sent):
        place[node] = (max((place[s.node][0] for s in node.inputs if not s.node.is_leaf), default=-1), at)
    return tuple(sorted(graph.nodes, key=place.__getitem__))


def assign_names(graph: Graph) -> dict[Node, str]:
    """A distinct printable name for every node: its own, made unique with ``~2``; unnamed nodes are numbered."""
    called: dict[Node, str] = {}
    taken: set[str] = set()
    tried: Counter[str] = Counter()
    for node in sorted((n for n in graph.nodes if n.name), key=lambda n: not n.is_leaf):  # leaves' names are keys
        name = node.name
        while name in taken:
            tried[node.name] += 1
            name = f"{node.name}~{tried[node.name] + 1}"
        taken.add(name)
        called[node] = name
    numbers = (str(i) for i in count() if str(i) not in taken)
    called.update((node, next(numbers)) for node in graph.nodes if not node.name)
    return called


@validate_arguments(GraphError, graph=instance_of(Graph))
def format_graph(graph: Graph, shown: Callable[[Node], Attrs] | None = None) -> str:
    """The whole graph as text; `parse` reads it back.  ``shown(node)`` are the attributes to write, if not all."""
    called = assign_names(graph)
    lines = [format_node(node, called, None if shown is None else shown(node)) for node in graph.nodes]
    lines.append(
        "return " + ", ".join(f"{quote_word(name)}={format_reference(v, called)}" for name, v in graph.outputs.items())
    )
    lines += [
        f"update {format_reference(old, called)} = {format_reference(new, called)}"
        for old, new in graph.updates.items()
    ]
    return "\n".join(lines) + "\n"
