"""Values and nodes of graphs in static single assignment form; a node may have several results, and both are frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from types import EllipsisType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from .array_checks import as_real_number_array
from .attrs import ATTRS_KIND, NO_ATTRS, Attrs, are_attributes_plain, format_attribute, quote_node_name, quote_word
from .dtypes import DTYPE_BY_NAME, DType, DTypeLike
from .errors import GraphError, format_count
from .lazy_dataclass import dataclass
from .spec import MAX_SIZE, Spec, make_spec
from .validation import (
    MAX_MESSAGE_CHARACTERS,
    NONE,
    TEXT,
    ArgumentKind,
    format_value,
    instance_of,
    require,
    tuple_of,
    validate_arguments,
    validate_constructor,
)

Index: TypeAlias = "int | slice | EllipsisType | Value | tuple[int | slice | EllipsisType | None, ...] | None"
COMPARE_HINT = 'compare with ops.compare(x, y, kind="lt")'
LEAF_OPS = ("input", "weight", "state", "constant")


@validate_constructor(GraphError)
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Node:
    """One op applied to operands. A node is equal only to itself.

    Args:
        op: The name of the op.
        src: The operands, with None for an omitted optional operand.
        attrs: The attributes.
        specs: The specs of the results; `results` has the values in the same order.
        name: Free text for people, which may be empty. A leaf needs a name, because names bind arrays to leaves.
    """

    op: str
    src: tuple[Value | None, ...]
    attrs: Attrs
    specs: tuple[Spec, ...]
    name: str = ""
    results: tuple[Value, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not (  # a fast test first, because ops build many nodes
            type(self.op) is type(self.name) is str
            and type(self.attrs) is MappingProxyType
            and type(self.src) is tuple
            and type(self.specs) is tuple
            and OPERANDS.issuperset(map(type, self.src))
            and RESULTS.issuperset(map(type, self.specs))
            and are_attributes_plain(self.attrs)
        ):
            for part, kind in NODE_ARGUMENT_KINDS.items():
                require(GraphError, "Node", part, getattr(self, part), kind)
        _set_results(self, tuple([_make_result_unchecked(self, i) for i in range(len(self.specs))]))

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The inputs of the op: the operands without omitted optional ones."""
        for operand in self.src:
            if operand is None:
                return tuple([s for s in self.src if s is not None])
        return self.src  # type: ignore[return-value]  # the loop found no None

    @property
    def is_leaf(self) -> bool:
        """Whether the node is a leaf: an input, a weight, a state or a constant."""
        return self.op in LEAF_OPS

    @property
    def label(self) -> str:
        """The label of the node in messages, to be written after ``%``: its name, or its op without a name."""
        return quote_node_name(self.name or self.op)

    def with_src(self, src: tuple[Value | None, ...]) -> Node:
        """Return a copy of the node with the operands `src`."""
        return Node(self.op, src, self.attrs, self.specs, self.name)

    def __copy__(self) -> Node:
        return self.with_src(self.src)

    def __repr__(self) -> str:
        return format_node(self)


@validate_constructor(GraphError)
@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Result `index` of `node`; ``Value(node, index) is node.results[index]``.

    A value is equal only to itself, so that it can be a key of a mapping. `hocket.ops.compare` compares elements.
    """

    node: Node
    index: int = 0

    def __new__(cls, node: object = None, index: object = 0) -> Value:
        if isinstance(node, Node) and type(index) is int and 0 <= index < len(node.results):
            return node.results[index]
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.node, Node):
            raise GraphError(f"Value: node is {format_value(self.node)}; it must be a Node, as hocket.input(...).node")
        if type(self.index) is not int or abs(self.index) > MAX_SIZE:
            raise GraphError(f"Value: index is {format_value(self.index)}; it must be the number of a result")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, int | float | np.generic | np.ndarray):
            raise GraphError(f"{self!r} == {format_value(other)}: a graph has no numbers yet; {COMPARE_HINT}")
        return NotImplemented

    __hash__ = object.__hash__

    def __copy__(self) -> Value:
        return self

    @property
    def spec(self) -> Spec:
        """The shape and the dtype. `spec`, `shape` and `dtype` raise `GraphError` if the node has no such result."""
        try:
            return self.node.specs[self.index]
        except IndexError:
            label, op = (text[:MAX_MESSAGE_CHARACTERS] for text in (self.node.label, quote_word(self.node.op)))
            count = len(self.node.specs)
            raise GraphError(f"%{label}#{format_value(self.index)}: {op} has {format_count(count, 'result')}") from None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape: the sizes of the axes in NumPy order."""
        return self.spec.shape

    @property
    def dtype(self) -> DType:
        """The dtype that the graph declares; a backend may store the value in another dtype."""
        return self.spec.dtype

    @property
    def label(self) -> str:
        """The label of the value in messages: ``%name``, or ``%name#1`` for the second of several results."""
        return f"%{self.node.label}" + (f"#{self.index}" if len(self.node.specs) > 1 else "")

    def __repr__(self) -> str:
        return f"{self.label}: {self.spec}"

    # Operators build nodes by `ops.operators`, with the broadcasting and the indices of NumPy.

    __array_ufunc__ = None  # so that ``array + value`` calls `__radd__`, which raises a message

    def __add__(self, other: Value | float) -> Value:
        return _import_operator_functions().build_elementwise_operator("+", self, other)

    def __radd__(self, other: float) -> Value:
        return _import_operator_functions().build_elementwise_operator("+", other, self)

    def __sub__(self, other: Value | float) -> Value:
        return _import_operator_functions().build_elementwise_operator("-", self, other)

    def __rsub__(self, other: float) -> Value:
        return _import_operator_functions().build_elementwise_operator("-", other, self)

    def __mul__(self, other: Value | float) -> Value:
        return _import_operator_functions().build_elementwise_operator("*", self, other)

    def __rmul__(self, other: float) -> Value:
        return _import_operator_functions().build_elementwise_operator("*", other, self)

    def __truediv__(self, other: Value | float) -> Value:
        return _import_operator_functions().build_elementwise_operator("/", self, other)

    def __rtruediv__(self, other: float) -> Value:
        return _import_operator_functions().build_elementwise_operator("/", other, self)

    def __pow__(self, exponent: float) -> Value:
        return _import_operator_functions().build_square_or_square_root(self, exponent)

    def __matmul__(self, other: Value) -> Value:
        return _import_operator_functions().build_matmul(self, other)

    def __rmatmul__(self, other: object) -> Value:
        return _import_operator_functions().build_matmul(other, self)

    def __neg__(self) -> Value:
        return _import_operator_functions().build_elementwise_operator("*", self, -1.0)

    def __getitem__(self, index: Index) -> Value:
        return _import_operator_functions().build_index(self, index)

    @property
    def T(self) -> Value:  # noqa: N802  (NumPy's name)
        """The transpose of a matrix, with its two axes exchanged."""
        if len(self.shape) != 2:
            raise GraphError(f"{self!r} has rank {len(self.shape)}, not 2; use ops.transpose or ops.permute")
        if self.dtype.is_quantised:
            raise GraphError(f"{self!r}: rows of blocks have no transpose; for x @ w.T write ops.mul_mat(w, x)")
        return _import_operator_functions().build_transpose(self)

    # Methods that need numbers raise `GraphError`, because a graph has no numbers before it runs.

    def __bool__(self) -> NoReturn:
        raise GraphError(f"{self!r} is true or false only when the graph runs; {COMPARE_HINT}, choose with ops.where")

    def __lt__(self, other: object) -> NoReturn:
        raise GraphError(f"{self!r} has no order before the graph runs; {COMPARE_HINT}")

    def __le__(self, other: object) -> NoReturn:
        self.__lt__(other)

    def __gt__(self, other: object) -> NoReturn:
        self.__lt__(other)

    def __ge__(self, other: object) -> NoReturn:
        self.__lt__(other)

    def __float__(self) -> NoReturn:
        raise GraphError(f"{self!r} has no numbers before the graph runs; hocket.run gives those of an output")

    def __int__(self) -> NoReturn:
        self.__float__()

    def __index__(self) -> NoReturn:
        self.__float__()

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NoReturn:
        self.__float__()

    def __iter__(self) -> NoReturn:
        raise GraphError(f"{self!r} is one symbolic value; take parts of it by index, as x[0]")

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)
            raise AttributeError(_import_operator_functions().describe_missing_attribute(self, name))


_set_node, _set_index = (vars(Value)[name].__set__ for name in ("node", "index"))
_set_results = vars(Node)["results"].__set__


def _make_result_unchecked(node: Node, index: int) -> Value:
    """Make result number `index` of a new node without any checks, because passes create millions of values."""
    value: Value = object.__new__(Value)
    _set_node(value, node)
    _set_index(value, index)
    return value


OPERANDS, RESULTS = frozenset({Value, type(None)}), frozenset({Spec})
NODE_ARGUMENT_KINDS: Mapping[str, ArgumentKind] = MappingProxyType(
    {
        "op": TEXT,
        "src": tuple_of(instance_of(Value) | NONE, "a tuple of values, or None where one is left out"),
        "attrs": ATTRS_KIND,
        "specs": tuple_of(instance_of(Spec), "a tuple of specs"),
        "name": TEXT,
    }
)


def _import_operator_functions() -> ModuleType:
    """Import the module with the operator functions at its first use, because graphs may not import ops."""
    from ..ops import operators

    return operators


def _leaf(op: str, name: str, spec: Spec, attrs: Attrs = NO_ATTRS) -> Value:
    if not isinstance(name, str) or not name:
        raise GraphError(
            f"{op} of {spec} has no name, but {format_value(name)}; leaves are bound by name, so give it text"
        )
    return Node(op, (), attrs, (spec,), name).results[0]


@validate_arguments(GraphError)
def input(name: str, shape: Sequence[int], dtype: DTypeLike = DType.F32) -> Value:
    """Create an input: a leaf that each run binds to an array.

    Args:
        name: The name that binds an array to the leaf.
        shape: The sizes of the axes in NumPy order, rank 0 to 5.
        dtype: A dtype of hocket or NumPy (``np.float32``, ``"int32"``).

    Raises:
        GraphError: The name is empty, the shape is illegal or the dtype is unknown.

    >>> hocket.input("ids", (3,), "i32")
    %ids: i32[3]
    """
    return _leaf("input", name, make_spec(shape, dtype))


@validate_arguments(GraphError)
def weight(name: str, shape: Sequence[int], dtype: DTypeLike = DType.F32) -> Value:
    """Create a weight: a leaf that `hocket.load` binds to an array once.

    Args:
        name: The name that binds an array to the leaf.
        shape: The sizes of the axes in NumPy order, rank 0 to 5; a matrix is ``[rows, columns]``, as in GGUF files.
        dtype: A dtype; rows of a quantised dtype (``"q4_K"``) are complete blocks.

    Raises:
        GraphError: The name is empty, the shape is illegal or the dtype is unknown.
    """
    return _leaf("weight", name, make_spec(shape, dtype))


@validate_arguments(GraphError)
def state(name: str, shape: Sequence[int], dtype: DTypeLike = DType.F32) -> Value:
    """Create a state: a leaf that keeps its content between runs, such as a KV cache, and starts with zeros.

    A state update replaces the content at the end of a run: ``hocket.Graph(outputs, updates={state: new})``.

    Args:
        name: The name of the state.
        shape: The sizes of the axes in NumPy order, rank 0 to 5.
        dtype: A dtype of hocket or NumPy.

    Raises:
        GraphError: The name is empty, the shape is illegal or the dtype is unknown.
    """
    return _leaf("state", name, make_spec(shape, dtype))


@validate_arguments(GraphError)
def constant(name: str, data: npt.ArrayLike) -> Value:
    """Create a constant: a leaf with a small array that is part of the graph.

    float64 numbers become f32; integers keep their dtype.

    Raises:
        GraphError: `data` is not an array of floats or signed integers.
    """
    subject = f"constant %{quote_node_name(name) if isinstance(name, str) else format_value(name):.60}"
    numbers = as_real_number_array(subject, data, GraphError)
    array = np.ascontiguousarray(numbers)
    if array.dtype.name == "float64":
        array = array.astype(np.float32)
    text = {"float32": "f32", "float16": "f16"}.get(array.dtype.name, array.dtype.name.replace("int", "i"))
    if text not in DTYPE_BY_NAME:
        raise GraphError(f"{subject} has NumPy dtype {array.dtype}; use a float or a signed integer type")
    # NumPy's ascontiguousarray makes scalars one-dimensional; the graph keeps rank 0.
    spec = make_spec(numbers.shape, text)
    return _leaf("constant", name, spec, MappingProxyType({"data": array.astype(spec.dtype.storage).tobytes()}))


@validate_arguments(
    GraphError, node=ArgumentKind("a constant node", lambda v: isinstance(v, Node) and v.op == "constant")
)
def view_constant_array(node: Node) -> npt.NDArray[np.generic]:
    """Return a read-only NumPy view of the array in a constant node."""
    data, spec = node.attrs["data"], node.specs[0]
    assert isinstance(data, bytes), "verify() ran before"
    return np.frombuffer(data, spec.dtype.storage).reshape(spec.shape)


def format_node(node: Node, names: Mapping[Node, str] | None = None, attrs: Attrs | None = None) -> str:
    """Return the graph text of one node, which is one line.

    Args:
        node: The node.
        names: The printed name of each node; by default, the labels of the nodes.
        attrs: The attributes to write; by default, all.
    """
    visible = node.attrs if attrs is None else attrs
    args = [format_reference(s, names) for s in node.src] + [
        f"{quote_word(k)}={format_attribute(v)}" for k, v in visible.items()
    ]
    call = f"{quote_word(node.op)}({', '.join(args)})"
    return f"{_format_node_name(node, names)} = {call} : {', '.join(map(str, node.specs))}"


def format_reference(value: Value | None, names: Mapping[Node, str] | None = None) -> str:
    """Return the graph text of a reference to an operand: ``%name`` or ``%name#1``. An omitted operand is ``_``."""
    if value is None:
        return "_"
    return _format_node_name(value.node, names) + (f"#{value.index}" if len(value.node.specs) > 1 else "")


def _format_node_name(node: Node, names: Mapping[Node, str] | None) -> str:
    """Return ``%`` and the printed name of a node for graph text.

    A name of digits is quoted, because plain digits stand for an unnamed node.
    """
    if names is None:
        return f"%{node.label}"
    return f"%{quote_node_name(names[node])}" if node.name else f"%{names[node]}"
