"""The table of all ops, and the rules of graphs that need it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from ..graph.errors import GraphError
from ..graph.graph import Graph
from ..graph.graph_rules import GRAPH_RULES as GRAPH_RULES
from ..graph.graph_rules import GraphRule
from ..graph.graph_rules import verify as verify_rules
from ..graph.node import LEAF_OPS, Node, Value
from ..graph.validation import did_you_mean, instance_of, validate_arguments
from . import collectives
from .declaration.attributes import ATTRIBUTE_TYPES, is_attribute_type
from .declaration.op import Op
from .declaration.signature import SignatureMismatch
from .elementwise import binary, comparisons, gated_units, generators, integers, unary
from .matrix import attention, experts, matmul, rope, sparse_indexer
from .movement import arrange, gather_scatter, rows, sliding_windows, triangular, views
from .recurrent import gated_delta_net, linear_attention
from .reduction import norms, reductions, sorting

R = TypeVar("R", Value, tuple[Value, Value])
_MODULES = (
    *(views, binary, unary, gated_units, norms, reductions, sorting, matmul, rows, arrange, triangular, generators),
    *(comparisons, integers, gather_scatter, sliding_windows),
    *(attention, rope, gated_delta_net, linear_attention, experts, sparse_indexer, collectives),
)

BUILTIN_OPS = {op.name: op for module in _MODULES for op in vars(module).values() if isinstance(op, Op)}
ENTRY_POINT_GROUP = "hocket.ops"
"""The entry-point group in which packages name their ops; an entry's name is the op's."""


class Registry(Mapping[str, Op[Any]]):
    """Every op by name: hocket's own, those that `register` was given, and those that installed packages name.

    Packages are looked at when a name is asked for that is not known, or for all names.
    """

    def __init__(self, own: Mapping[str, Op[Any]]) -> None:
        self._ops = dict(own)
        self._looked = False

    def __getitem__(self, name: str) -> Op[Any]:
        if (known := self._ops.get(name)) is not None:
            return known
        if name not in LEAF_OPS:
            self._import_installed_ops()
        return self._ops[name]

    def __iter__(self) -> Iterator[str]:
        self._import_installed_ops()
        return iter(tuple(self._ops))

    def __len__(self) -> int:
        self._import_installed_ops()
        return len(self._ops)

    def add(self, op: Op[Any]) -> None:
        """Raises `GraphError` if another op has its name."""
        if op.name in LEAF_OPS or self._ops.setdefault(op.name, op) is not op:
            raise GraphError(f"register: there is an op {op.name!r} already; give this one another name")

    def _import_installed_ops(self) -> None:
        """Import what installed packages name, once."""
        if self._looked:
            return
        self._looked = True
        from importlib.metadata import entry_points  # 15 ms that graphs of our own ops need not pay

        for entry in entry_points(group=ENTRY_POINT_GROUP):
            try:
                register(entry.load())
            except (ImportError, AttributeError) as why:
                raise GraphError(f"op {entry.name!r} of {entry.value} does not load: {why}") from None


REGISTRY = Registry(BUILTIN_OPS)


@validate_arguments(GraphError, op=instance_of(Op))
def register(op: Op[R]) -> Op[R]:
    """Make an op of another package known, and return it: from now on it is planned, cut, verified, read, checked by
    the kit and dumped like hocket's own.

    A package that names it in the entry-point group ``hocket.ops`` need not call this.  Raises `GraphError` if its name
    is taken, or an attribute is annotated with a type that graphs do not keep.

    >>> @hocket.register
    ... @hocket.ops.op("x[..., *c] -> [..., c]", samples=("x=f32[3,4]",))
    ... def centre(x):
    ...     return x - x.mean(-1, keepdims=True)
    >>> y = centre(hocket.input("x", (2, 8)))
    """
    if not op.name.isidentifier():
        raise GraphError(f"register: the op's name is {op.name!r:.60}; it must be a plain word, so declare it with def")
    for name, kind in op.attribute_types.items():
        if not is_attribute_type(kind):
            kept = ", ".join(ATTRIBUTE_TYPES)
            raise GraphError(f"{op.name}: attribute {name} is annotated {kind!r}; need {kept} or tuples of one")
    REGISTRY.add(op)
    return op


def op_of(node: Node) -> Op[Any]:
    """The declaration of a node's op; the graph must have been verified."""
    return REGISTRY[node.op]


def find_inplace_operand(result: Value) -> Value | None:
    """The operand whose memory a result may take over; None if its op declares none, or it is left out."""
    node, declared = result.node, op_of(result.node)
    name = dict(declared.inplace_pairs(node.attrs)).get(result.index)
    return None if name is None else dict(zip(declared.operand_names, node.src, strict=False)).get(name)


def find_storage_kind(value: Value) -> str:
    """What a backend is told of a value when it says how it keeps it: the op of a leaf; ``state`` for a state in which
    an op has replaced entries, since it may do so in its memory; else ``value``."""
    node = value.node
    if node.is_leaf:
        return node.op
    while not node.is_leaf:
        declared = op_of(node)
        if declared.is_view:
            value = node.inputs[0]
            node = value.node
            continue
        if declared.overwritten_entries(node.attrs) is None:
            return "value"
        if (before := find_inplace_operand(value)) is None:
            return "value"
        value, node = before, before.node
    return "state" if node.op == "state" else "value"


def ops_are_declared(graph: Graph) -> Iterator[str]:
    """Every node is a leaf or an op of the registry."""
    unknown = {op for op in {n.op for n in graph.nodes} if op not in REGISTRY and op not in LEAF_OPS}
    for node in graph.nodes if unknown else ():
        if node.op in unknown:
            hint = did_you_mean(node.op, REGISTRY) or "; `hocket ops` lists them"
            yield f"%{node.label}: there is no op {node.op!r}{hint}"


def specs_follow_from_operands(graph: Graph) -> Iterator[str]:
    """A node has the attributes of its op, and its specs are those that the op infers."""
    for node in graph.nodes:
        declared = REGISTRY.get(node.op)
        if declared is None:
            continue
        try:
            if missing := declared.normalise_attributes(node.attrs).keys() - node.attrs.keys():
                raise SignatureMismatch(f"attribute {min(missing)} is missing")
            inferred = declared.infer_results([None if s is None else s.spec for s in node.src], node.attrs)
        except (SignatureMismatch, TypeError, KeyError, ValueError) as why:
            yield f"{node!r}: {why}"
        else:
            if inferred != node.specs:
                yield f"{node!r}: operands give {', '.join(map(str, inferred))}"


OP_RULES: tuple[GraphRule, ...] = (*GRAPH_RULES, ops_are_declared, specs_follow_from_operands)


@validate_arguments(GraphError, graph=instance_of(Graph))
def verify(graph: Graph) -> None:
    """Raise `GraphError` unless `graph` obeys every rule, those of its ops included."""
    verify_rules(graph, OP_RULES)
