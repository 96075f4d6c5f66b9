"""The registry of all ops, and the graph rules that need it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from ..graph.errors import GraphError
from ..graph.graph import Graph
from ..graph.graph_rules import GRAPH_RULES as GRAPH_RULES
from ..graph.graph_rules import GraphRule
from ..graph.graph_rules import verify as verify_rules
from ..graph.node import LEAF_OPS, Node, Value
from ..graph.validation import describe_exception, did_you_mean, instance_of, validate_arguments
from . import collectives
from .declaration.attributes import ATTRIBUTE_TYPES, is_attribute_type
from .declaration.op import Op
from .declaration.signature import SignatureMismatch
from .elementwise import activations, binary, comparisons, gated_units, generators, integers, unary
from .matrix import attention, experts, matmul, rope, sparse_indexer
from .movement import arrange, gather_scatter, rows, sliding_windows, triangular, views
from .recurrent import gated_delta_net, linear_attention
from .reduction import norms, reductions, sorting, token_sampling

R = TypeVar("R", Value, tuple[Value, Value])
OP_FAMILIES = (
    *(views, binary, unary, activations, gated_units, norms, reductions, sorting, token_sampling),
    *(matmul, rows, arrange, triangular, generators, comparisons, integers, gather_scatter, sliding_windows),
    *(attention, rope, gated_delta_net, linear_attention, experts, sparse_indexer),
)
"""The modules with the ops that graphs of users have, one for each family. `hocket.ops` has these ops."""
OP_MODULES = (*OP_FAMILIES, collectives)
"""The modules with all ops of hocket."""

BUILTIN_OPS = {op.name: op for module in OP_MODULES for op in vars(module).values() if isinstance(op, Op)}
"""The ops of hocket by name."""
ENTRY_POINT_GROUP = "hocket.ops"
"""The entry-point group of ops of other packages; the name of an entry is the name of its op."""


class Registry(Mapping[str, Op[Any]]):
    """All ops by name: built-in ops, ops from `register`, and ops that installed packages provide.

    Installed packages are searched at the first lookup of an unknown name, and before an iteration.
    """

    def __init__(self, own: Mapping[str, Op[Any]]) -> None:
        self._ops = dict(own)
        self._faults: dict[str, str] = {}
        self._has_imported = False

    def __getitem__(self, name: str) -> Op[Any]:
        """Return an op.

        Raises:
            KeyError: there is no such op.
            GraphError: the op of an installed package cannot be used.
        """
        if (known := self._ops.get(name)) is not None:
            return known
        if name not in LEAF_OPS:
            self._import_installed_ops_once()
        if name in self._faults and name not in self._ops:
            raise GraphError(self._faults[name])
        return self._ops[name]

    @property
    def package_entry_faults(self) -> Mapping[str, str]:
        """The entries of installed packages that give no op, each with the reason as one line."""
        self._import_installed_ops_once()
        return MappingProxyType(self._faults)

    def __iter__(self) -> Iterator[str]:
        self._import_installed_ops_once()
        return iter(tuple(self._ops))

    def __len__(self) -> int:
        self._import_installed_ops_once()
        return len(self._ops)

    def add(self, op: Op[Any]) -> None:
        """Add an op of another package.

        Raises:
            GraphError: another op has its name.
        """
        if op.name in LEAF_OPS or self._ops.setdefault(op.name, op) is not op:
            raise GraphError(f"register: there is an op {op.name!r} already; give this one another name")

    def _import_installed_ops_once(self) -> None:
        """Import the ops that installed packages provide, at the first call; later calls do nothing.

        An op that cannot be imported or registered goes to `faults`, and the other ones are imported.
        """
        if self._has_imported:
            return
        self._has_imported = True
        from importlib.metadata import entry_points  # 15 ms, which graphs of built-in ops do not need

        for entry in entry_points(group=ENTRY_POINT_GROUP):
            try:
                register(entry.load())
            except Exception as why:  # a package may raise anything while it is imported
                self._faults[entry.name] = (
                    f"op {entry.name!r} of {entry.value} does not load: {describe_exception(why)}"
                )


REGISTRY = Registry(BUILTIN_OPS)
"""The registry of all ops."""


@validate_arguments(GraphError, op=instance_of(Op))
def register(op: Op[R]) -> Op[R]:
    """Add an op of another package to the registry, and return the op.

    All parts of hocket then treat the op as a built-in one. A package that names the op in the entry-point group
    ``hocket.ops`` need not call this function.

    Raises:
        GraphError: the name is taken, an attribute has an annotation that graphs do not store, or the expression of
            the op is wrong.

    >>> @hocket.register
    ... @hocket.ops.op("x[..., *c] -> [..., c]", samples=("x=f32[3,4]",))
    ... def centre(x):
    ...     return x - x.mean(-1, keepdims=True)
    >>> y = centre(hocket.input("x", (2, 8)))
    """
    if not op.name.isidentifier():
        raise GraphError(f"register: the op's name is {op.name!r:.60}; it must be a plain word, so declare it with def")
    for name, annotation in op.attribute_types.items():
        if not is_attribute_type(annotation):
            types = ", ".join(ATTRIBUTE_TYPES)
            raise GraphError(f"{op.name}: attribute {name} is annotated {annotation!r}; need {types} or tuples of one")
    _require_expressions_fit_signature(op)
    REGISTRY.add(op)
    return op


def _require_expressions_fit_signature(op: Op[Any]) -> None:
    """Require that each expression of an op fits its signature, unless a required attribute selects the expression.

    Raises:
        GraphError: the declaration is wrong.
    """
    if op.expression is None:
        return
    for form, signature in op.signatures.items():
        attrs = {**op.defaults, **({op.signature_key: form} if isinstance(op.signature_key, str) else {})}
        if op.expression.has_expression_selecting_attributes(attrs):
            try:
                if not op.kernels:
                    op.expression.require_float_dtypes(signature)
                op.expression.require_whole_rows(signature, attrs)
                op.expression.require_result_shape(signature, [True] * len(signature.operands), attrs)
            except SignatureMismatch as why:
                raise GraphError(f"{op.name}: {why}") from None


def op_of(node: Node) -> Op[Any]:
    """Return the op of a node of a verified graph."""
    return REGISTRY[node.op]


def find_inplace_operand(result: Value) -> Value | None:
    """Return the operand that a result may overwrite; None if the op declares none or the operand is absent."""
    node, declared = result.node, op_of(result.node)
    name = dict(declared.inplace_pairs(node.attrs)).get(result.index)
    return None if name is None else dict(zip(declared.operand_names, node.src, strict=False)).get(name)


def find_view_base(value: Value) -> Value:
    """Return the value that has the memory of `value`, through any number of views such as reshapes and transposes."""
    while not value.node.is_leaf and op_of(value.node).is_view:
        value = value.node.inputs[0]
    return value


def find_graph_role(value: Value) -> str:
    """Return the kind of a value in its graph, from which a backend chooses the dtype in which it stores it.

    Returns:
        For a leaf its op: ``input``, ``weight``, ``state`` or ``constant``. For the result of an op that replaced
        entries of a state also ``state``, because both may share memory. For all other values ``value``.
    """
    node = value.node
    if node.is_leaf:
        return node.op
    while not node.is_leaf:
        value = find_view_base(value)
        node = value.node
        if node.is_leaf:
            break
        if op_of(node).overwritten_entries(node.attrs) is None:
            return "value"
        if (before := find_inplace_operand(value)) is None:
            return "value"
        value, node = before, before.node
    return "state" if node.op == "state" else "value"


def ops_are_declared(graph: Graph) -> Iterator[str]:
    """Yield a problem for each node, except leaves, with an op that is not in the registry."""
    unknown = {op for op in {n.op for n in graph.nodes} if op not in REGISTRY and op not in LEAF_OPS}
    for node in graph.nodes if unknown else ():
        if node.op in unknown:
            hint = did_you_mean(node.op, REGISTRY) or "; `hocket ops` lists them"
            yield f"%{node.label}: there is no op {node.op!r}{hint}"


def specs_and_attributes_match_op(graph: Graph) -> Iterator[str]:
    """Yield a problem for each node without an attribute of its op, or with other specs than the op infers."""
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


OP_RULES: tuple[GraphRule, ...] = (*GRAPH_RULES, ops_are_declared, specs_and_attributes_match_op)
"""All rules of graphs and of ops."""


@validate_arguments(GraphError, graph=instance_of(Graph))
def verify(graph: Graph) -> None:
    """Verify that `graph` obeys all rules of graphs and of its ops.

    Raises:
        GraphError: the graph breaks a rule.
    """
    verify_rules(graph, OP_RULES)
