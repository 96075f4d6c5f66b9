"""The rules every graph obeys, one function each; its docstring is the rule, what it yields is the message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from .attrs import MAX_DEPTH, Attr, quote_node_name, quote_word
from .dtypes import DType
from .errors import GraphError
from .graph import Graph
from .node import LEAF_OPS, Node
from .spec import MAX_SIZE, check_spec
from .validation import MAX_MESSAGE_CHARACTERS, indefinite_article, instance_of, validate_arguments

GraphRule = Callable[[Graph], Iterator[str]]


def leaves_have_distinct_names(graph: Graph) -> Iterator[str]:
    """Inputs, weights, states and constants are bound by name, so no two share one."""
    count = Counter([n.name for n in graph.nodes if n.op in LEAF_OPS])
    for name, times in count.items():
        if not name:
            yield f"{times} leaves have no name; give each its own"
        elif times > 1:
            yield f"%{quote_node_name(name)} names {times} different leaves; rename all but one"


def leaves_read_nothing(graph: Graph) -> Iterator[str]:
    """A leaf has no sources and one result."""
    for node in graph.nodes:
        if node.op in LEAF_OPS and (node.src or len(node.specs) != 1):
            yield f"{node!r}: a leaf has no sources and one result"


def specs_are_legal(graph: Graph) -> Iterator[str]:
    """Rank at most 5, no negative size, whole quantisation blocks in each row."""
    for node in graph.nodes:
        for spec in node.specs:
            if why := check_spec(spec):
                yield f"%{node.label}: {why}"


def references_exist(graph: Graph) -> Iterator[str]:
    """A value refers to a result that its node has."""
    values = [v for n in graph.nodes for v in n.inputs] + list(graph.roots())
    for value in values:
        if not 0 <= value.index < len(value.node.specs):
            yield f"%{value.node.label}#{value.index}: {quote_word(value.node.op)} has {len(value.node.specs)} results"


def only_states_are_updated(graph: Graph) -> Iterator[str]:
    """Each update gives a state a new value of the same shape and dtype."""
    for old, new in graph.updates.items():
        if old.node.op != "state":
            kind = f"{indefinite_article(old.node.op)} {quote_word(old.node.op)}"
            yield f"update of {old!r}: it is {kind}; only a state can be updated"
        elif old.spec != new.spec:
            yield f"update of {old!r} with {new!r}: shape and dtype must stay the same"


def constants_hold_their_bytes(graph: Graph) -> Iterator[str]:
    """A constant is of a dtype that NumPy has, and its data fills its shape exactly."""
    for node in graph.nodes:
        if node.op != "constant" or any(map(check_spec, node.specs)):
            continue
        data = node.attrs.get("data")
        got = len(data) if isinstance(data, bytes) else "none"
        for spec in node.specs:
            if spec.dtype.is_quantised or spec.dtype is DType.BF16:
                yield f"%{node.label}: a constant cannot be {spec.dtype}; use f32, f16 or an integer type"
            elif got != spec.nbytes:
                yield f"%{node.label}: {spec} needs {spec.nbytes} bytes of data, got {got}"


def attributes_are_plain(graph: Graph) -> Iterator[str]:
    """An attribute is a number of 64 bits, text, bytes, a DType, None, or a tuple of such: what the dump can write."""
    for node in graph.nodes:
        for name, value in node.attrs.items():
            if not _is_plain_attribute(value):
                yield f"%{node.label}: attribute {quote_word(name)} is of no kind that a graph can keep"


def _is_plain_attribute(value: Attr, depth: int = 0) -> bool:
    if isinstance(value, tuple):
        return depth < MAX_DEPTH and all(_is_plain_attribute(v, depth + 1) for v in value)
    if type(value) is int:
        return abs(value) <= MAX_SIZE
    return value is None or type(value) in (bool, float, str, bytes, DType)


def sources_come_first(graph: Graph) -> Iterator[str]:
    """A node reads results of nodes before it, so that no node reads its own; outputs and updates are their results."""
    before: set[Node] = set()
    for node in graph.nodes:
        for source in node.inputs:
            if source.node not in before:
                label, read = (part.label[:MAX_MESSAGE_CHARACTERS] for part in (node, source))
                yield f"%{label} reads {read}, which is no result of a node before it"
        before.add(node)
    for value in graph.roots():
        if value.node not in before:
            yield f"{value.label:.{MAX_MESSAGE_CHARACTERS}} is returned, and is no result of a node of the graph"


def something_is_computed(graph: Graph) -> Iterator[str]:
    """A graph has an output or an update."""
    if not graph.outputs and not graph.updates:
        yield "the graph has neither outputs nor updates, so there is nothing to compute"


GRAPH_RULES: tuple[GraphRule, ...] = (
    sources_come_first,
    references_exist,
    something_is_computed,
    leaves_have_distinct_names,
    leaves_read_nothing,
    specs_are_legal,
    only_states_are_updated,
    constants_hold_their_bytes,
    attributes_are_plain,
)
REFERENCES = (sources_come_first, references_exist)


def list_problems(graph: Graph, rules: Sequence[GraphRule] = GRAPH_RULES) -> list[str]:
    """Everything that is wrong with `graph`, in the order of `rules`."""
    faults: list[str] = []
    for rule in rules:
        faults += rule(graph)
        if faults and rule in REFERENCES:  # the other rules look at what is referred to
            break
    return faults


@validate_arguments(GraphError, graph=instance_of(Graph))
def verify(graph: Graph, rules: Sequence[GraphRule] = GRAPH_RULES) -> None:
    """Raise `GraphError` with the first problem (and how many more there are)."""
    if faults := list_problems(graph, rules):
        raise GraphError(faults[0] + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""))
