"""The rules every graph obeys, one function each; its docstring is the rule, what it yields is the message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from .errors import GraphError
from .graph import Graph
from .node import LEAVES
from .spec import problem

Rule = Callable[[Graph], Iterator[str]]


def leaves_have_distinct_names(graph: Graph) -> Iterator[str]:
    """Inputs, weights, states and constants are bound by name, so no two share one."""
    count = Counter(n.name for n in graph.nodes if n.is_leaf)
    for name, times in count.items():
        if not name:
            yield f"{times} leaves have no name; give each its own"
        elif times > 1:
            yield f"%{name} names {times} different leaves; rename all but one"


def leaves_read_nothing(graph: Graph) -> Iterator[str]:
    """A leaf has no sources and one result."""
    for node in graph.nodes:
        if node.op in LEAVES and (node.src or len(node.specs) != 1):
            yield f"{node!r}: a leaf has no sources and one result"


def specs_are_legal(graph: Graph) -> Iterator[str]:
    """Rank at most 5, no negative size, whole quantisation blocks in each row."""
    for node in graph.nodes:
        for spec in node.specs:
            if why := problem(spec):
                yield f"%{node.label}: {why}"


def references_exist(graph: Graph) -> Iterator[str]:
    """A value refers to a result that its node has."""
    values = [v for n in graph.nodes for v in n.inputs] + list(graph.roots())
    for value in values:
        if not 0 <= value.index < len(value.node.specs):
            yield f"%{value.node.label}#{value.index}: {value.node.op} has {len(value.node.specs)} results"


def only_states_are_updated(graph: Graph) -> Iterator[str]:
    """Each update gives a state a new value of the same shape and dtype."""
    for old, new in graph.updates.items():
        if old.node.op != "state":
            yield f"update of {old!r}: it is a {old.node.op}; only a state can be updated"
        elif old.spec != new.spec:
            yield f"update of {old!r} with {new!r}: shape and dtype must stay the same"


def constants_hold_their_bytes(graph: Graph) -> Iterator[str]:
    """The data of a constant fills its shape exactly."""
    for node in graph.nodes:
        if node.op == "constant":
            data = node.attrs.get("data")
            got = len(data) if isinstance(data, bytes) else None
            if got != node.specs[0].nbytes:
                yield f"%{node.label}: {node.specs[0]} needs {node.specs[0].nbytes} bytes of data, got {got}"


def something_is_computed(graph: Graph) -> Iterator[str]:
    """A graph has an output or an update."""
    if not graph.outputs and not graph.updates:
        yield "the graph has neither outputs nor updates, so there is nothing to compute"


RULES: tuple[Rule, ...] = (
    something_is_computed,
    references_exist,
    leaves_have_distinct_names,
    leaves_read_nothing,
    specs_are_legal,
    only_states_are_updated,
    constants_hold_their_bytes,
)


def problems(graph: Graph, rules: Sequence[Rule] = RULES) -> list[str]:
    """Everything that is wrong with `graph`, in the order of `rules`."""
    return [why for rule in rules for why in rule(graph)]


def verify(graph: Graph, rules: Sequence[Rule] = RULES) -> None:
    """Raise `GraphError` with the first problem (and how many more there are)."""
    if found := problems(graph, rules):
        raise GraphError(found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""))
