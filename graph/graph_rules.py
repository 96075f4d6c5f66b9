"""The rules of valid graphs: each rule is a function that yields an error message for each violation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from .attrs import quote_node_name, quote_word
from .dtypes import DType
from .errors import GraphError, format_count
from .graph import Graph
from .node import LEAF_OPS, Node
from .spec import check_spec
from .validation import CALLABLE, MAX_MESSAGE_CHARACTERS, indefinite_article, instance_of, list_of, validate_arguments

GraphRule = Callable[[Graph], Iterator[str]]


def leaves_have_distinct_names(graph: Graph) -> Iterator[str]:
    """Check that inputs, weights, states and constants have distinct names, because names bind arrays to leaves."""
    leaf_counts = Counter([n.name for n in graph.nodes if n.op in LEAF_OPS])
    for name, leaf_count in leaf_counts.items():
        if not name:
            yield f"{leaf_count} leaves have no name; give each its own"
        elif leaf_count > 1:
            yield f"%{quote_node_name(name)} names {leaf_count} different leaves; rename all but one"


def leaves_have_one_result_no_operands(graph: Graph) -> Iterator[str]:
    """Check that each leaf reads nothing: it has no operands and exactly one result."""
    for node in graph.nodes:
        if node.op in LEAF_OPS and (node.src or len(node.specs) != 1):
            yield f"{node!r}: a leaf has no operands and one result"


def specs_have_legal_shapes(graph: Graph) -> Iterator[str]:
    """Check that all specs are legal: rank at most 5, sizes not negative, and quantised rows of complete blocks."""
    for node in graph.nodes:
        for spec in node.specs:
            if problem := check_spec(spec):
                yield f"%{node.label}: {problem}"


def references_exist(graph: Graph) -> Iterator[str]:
    """Check that each value refers to an existing result of its node."""
    values = [v for n in graph.nodes for v in n.inputs] + list(graph.roots())
    for value in values:
        if not 0 <= value.index < len(value.node.specs):
            yield (
                f"%{value.node.label}#{value.index}: {quote_word(value.node.op)} has "
                f"{format_count(len(value.node.specs), 'result')}"
            )


def updates_match_states(graph: Graph) -> Iterator[str]:
    """Check that only states are updated, and that each new value has the shape and dtype of its state."""
    for old, new in graph.updates.items():
        if old.node.op != "state":
            kind = f"{indefinite_article(old.node.op)} {quote_word(old.node.op)}"
            yield f"update of {old!r}: it is {kind}; only a state can be updated"
        elif old.spec != new.spec:
            yield f"update of {old!r} with {new!r}: shape and dtype must stay the same"


def constants_hold_their_bytes(graph: Graph) -> Iterator[str]:
    """Check that the data of each constant have the size of its spec, and a dtype that NumPy has."""
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


def operands_precede_users_and_results_exist(graph: Graph) -> Iterator[str]:
    """Check that operands come before their users, and that outputs and updates are results of nodes of the graph."""
    before: set[Node] = set()
    for node in graph.nodes:
        for source in node.inputs:
            if source.node not in before:
                label, operand = (part.label[:MAX_MESSAGE_CHARACTERS] for part in (node, source))
                yield f"%{label} reads {operand}, which no earlier node computes"
        before.add(node)
    for value in graph.roots():
        if value.node not in before:
            yield f"{value.label:.{MAX_MESSAGE_CHARACTERS}} is returned, but no node of the graph computes it"


def graph_has_output_or_update(graph: Graph) -> Iterator[str]:
    """Check that a graph has at least one output or update."""
    if not graph.outputs and not graph.updates:
        yield "the graph has neither outputs nor updates, so there is nothing to compute"


GRAPH_RULES: tuple[GraphRule, ...] = (
    operands_precede_users_and_results_exist,
    references_exist,
    graph_has_output_or_update,
    leaves_have_distinct_names,
    leaves_have_one_result_no_operands,
    specs_have_legal_shapes,
    updates_match_states,
    constants_hold_their_bytes,
)
REFERENCES = (operands_precede_users_and_results_exist, references_exist)


@validate_arguments(GraphError, graph=instance_of(Graph), rules=list_of(CALLABLE, "a sequence of functions"))
def list_rule_violations(graph: Graph, rules: Sequence[GraphRule] = GRAPH_RULES) -> list[str]:
    """Return an error message for each violation of a rule by `graph`, in the order of `rules`."""
    messages: list[str] = []
    for rule in rules:
        messages += rule(graph)
        if messages and rule in REFERENCES:  # the other rules need valid references
            break
    return messages


@validate_arguments(GraphError, graph=instance_of(Graph))
def verify(graph: Graph, rules: Sequence[GraphRule] = GRAPH_RULES) -> None:
    """Verify that `graph` follows all rules; raise `GraphError` with the first violation and the count of others."""
    if messages := list_rule_violations(graph, rules):
        raise GraphError(messages[0] + (f" (and {len(messages) - 1} more)" if len(messages) > 1 else ""))
