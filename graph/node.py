"""Values and nodes: static single assignment, several results a node, everything frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from types import EllipsisType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from .array_checks import as_number_array
from .attrs import NO_ATTRS, Attrs, format_attribute, quote_node_name, quote_word
from .dtypes import DTYPE_BY_NAME, DType, DTypeLike
from .errors import GraphError
from .lazy_dataclass import dataclass
from .spec import Spec, make_spec
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
@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation: its op's name, the values it reads, its attributes, the specs of its results.

    An optional operand that was left out is None in `src`; `results` are the values that it makes, in order.  Equality
    is identity.  `name` is free text for people and may be empty; for leaves it is the key under which the value is
    bound.
    """

    op: str
    src: tuple[Value | None, ...]
    attrs: Attrs
    specs: tuple[Spec, ...]
    name: str = ""
    results: tuple[Value, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not (  # what ops build is seen at once, as there is much of it
            type(self.op) is type(self.name) is str
            and type(self.attrs) is MappingProxyType
            and type(self.src) is tuple
            and type(self.specs) is tuple
            and OPERANDS.issuperset(map(type, self.src))
            and RESULTS.issuperset(map(type, self.specs))
        ):
            for part, kind in NODE_ARGUMENT_KINDS.items():
                require(GraphError, "Node", part, getattr(self, part), kind)
        _set_results(self, tuple([_new_result(self, i) for i in range(len(self.specs))]))

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The sources that are present."""
        for source in self.src:
            if source is None:
                return tuple([s for s in self.src if s is not None])
        return self.src  # type: ignore[return-value]  # none is None, as the loop saw

    @property
    def is_leaf(self) -> bool:
        """Whether it is an input, a weight, a state or a constant."""
        return self.op in LEAF_OPS

    @property
    def label(self) -> str:
        """How messages call this node, after ``%``: its name, else its op, in quotes unless plain."""
        return quote_node_name(self.name or self.op)

    def with_src(self, src: tuple[Value | None, ...]) -> Node:
        """The same operation on other values."""
        return Node(self.op, src, self.attrs, self.specs, self.name)

    def __copy__(self) -> Node:
        return self.with_src(self.src)

    def __repr__(self) -> str:
        return format_node(self)


@validate_constructor(GraphError)
@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Result `index` of `node`, of which there is one: ``Value(node, index) is node.results[index]``.  Values are equal
    if they are the same, so they serve as keys of mappings; what they hold is compared by `hocket.ops.compare`."""

    node: Node
    index: int = 0

    def __new__(cls, node: object = None, index: object = 0) -> Value:
        if isinstance(node, Node) and isinstance(index, int) and 0 <= index < len(node.results):
            return node.results[index]
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.node, Node):
            raise GraphError(f"Value: node is {format_value(self.node)}; it must be a Node, as hocket.input(...).node")
        if not isinstance(self.index, int):
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
        """Shape and dtype.  Raises `GraphError` if the node has no such result, as do `shape` and `dtype`."""
        try:
            return self.node.specs[self.index]
        except IndexError:
            label, op = (text[:MAX_MESSAGE_CHARACTERS] for text in (self.node.label, quote_word(self.node.op)))
            count = len(self.node.specs)
            raise GraphError(f"%{label}#{format_value(self.index)}: {op} has {count} results") from None

    @property
    def shape(self) -> tuple[int, ...]:
        """In NumPy's order."""
        return self.spec.shape

    @property
    def dtype(self) -> DType:
        """The type that the graph declares; a backend may keep another."""
        return self.spec.dtype

    @property
    def label(self) -> str:
        """How messages call this value: ``%name``, with ``#1`` for the second of several results."""
        return f"%{self.node.label}" + (f"#{self.index}" if len(self.node.specs) > 1 else "")

    def __repr__(self) -> str:
        return f"{self.label}: {self.spec}"

    # Operators build nodes; shapes broadcast and indices count as in NumPy.  `ops.operators` says by which ops.

    __array_ufunc__ = None  # NumPy leaves ``array + value`` to the value, which refuses it in words

    def __add__(self, other: Value | float) -> Value:
        return _load_operators().combined("+", self, other)

    def __radd__(self, other: float) -> Value:
        return _load_operators().combined("+", other, self)

    def __sub__(self, other: Value | float) -> Value:
        return _load_operators().combined("-", self, other)

    def __rsub__(self, other: float) -> Value:
        return _load_operators().combined("-", other, self)

    def __mul__(self, other: Value | float) -> Value:
        return _load_operators().combined("*", self, other)

    def __rmul__(self, other: float) -> Value:
        return _load_operators().combined("*", other, self)

    def __truediv__(self, other: Value | float) -> Value:
        return _load_operators().combined("/", self, other)

    def __rtruediv__(self, other: float) -> Value:
        return _load_operators().combined("/", other, self)

    def __pow__(self, exponent: float) -> Value:
        return _load_operators().power(self, exponent)

    def __matmul__(self, other: Value) -> Value:
        return _load_operators().product(self, other)

    def __rmatmul__(self, other: object) -> Value:
        return _load_operators().product(other, self)

    def __neg__(self) -> Value:
        return _load_operators().combined("*", self, -1.0)

    def __getitem__(self, index: Index) -> Value:
        return _load_operators().part(self, index)

    @property
    def T(self) -> Value:  # noqa: N802  (NumPy's name)
        """A matrix with its axes exchanged."""
        if len(self.shape) != 2:
            raise GraphError(f"{self!r} has rank {len(self.shape)}, not 2; use ops.transpose or ops.permute")
        if self.dtype.is_quantised:
            raise GraphError(f"{self!r}: rows of blocks have no transpose; for x @ w.T write ops.mul_mat(w, x)")
        return _load_operators().transposed(self)

    # What only numbers can answer is refused: a graph has none before it runs.

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

    if not TYPE_CHECKING:  # with it, checkers would let any name pass

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)
            raise AttributeError(_load_operators().absent(self, name))


_set_node, _set_index = (vars(Value)[name].__set__ for name in ("node", "index"))
_set_results = vars(Node)["results"].__set__


def _new_result(node: Node, index: int) -> Value:
    """A result of a node that is being made: nothing is checked, since passes make millions."""
    value: Value = object.__new__(Value)
    _set_node(value, node)
    _set_index(value, index)
    return value


OPERANDS, RESULTS = frozenset({Value, type(None)}), frozenset({Spec})
NODE_ARGUMENT_KINDS: Mapping[str, ArgumentKind] = MappingProxyType(
    {
        "op": TEXT,
        "src": tuple_of(instance_of(Value) | NONE, "a tuple of values, or None where one is left out"),
        "attrs": instance_of(Mapping),
        "specs": tuple_of(instance_of(Spec), "a tuple of specs"),
        "name": TEXT,
    }
)


def _load_operators() -> ModuleType:
    """Graphs know no ops; operators are looked up when the first of them is used."""
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
    """A value that is given at each run, under `name`.

    `shape` is in NumPy's order, rank 0 to 5; `dtype` may be NumPy's, too (``np.float32``, ``"int32"``).  Raises
    `GraphError`.

    >>> hocket.input("ids", (3,), "i32")
    %ids: i32[3]
    """
    return _leaf("input", name, make_spec(shape, dtype))


@validate_arguments(GraphError)
def weight(name: str, shape: Sequence[int], dtype: DTypeLike = DType.F32) -> Value:
    """A value that is given once, by `hocket.load`, under `name`.

    `shape` is in NumPy's order, rank 0 to 5, a matrix ``[rows, columns]`` as a GGUF file has it; `dtype` may be a
    quantised one (``"q4_K"``), whose rows are whole blocks.  Raises `GraphError`.
    """
    return _leaf("weight", name, make_spec(shape, dtype))


@validate_arguments(GraphError)
def state(name: str, shape: Sequence[int], dtype: DTypeLike = DType.F32) -> Value:
    """A value that is kept from run to run and begins as zeros: a KV cache, the state of a convolution or delta net.

    What a run makes of it is an update of the graph: ``hocket.Graph(outputs, updates={state: new})``.  `shape` and
    `dtype` as for `hocket.input`.  Raises `GraphError`.
    """
    return _leaf("state", name, make_spec(shape, dtype))


@validate_arguments(GraphError)
def constant(name: str, data: npt.ArrayLike) -> Value:
    """A small array that is part of the graph itself.  float64 becomes f32; integers stay as they are.

    Raises `GraphError` for what is no array of floats or signed integers.
    """
    what = f"constant %{quote_node_name(name) if isinstance(name, str) else format_value(name):.60}"
    given = as_number_array(what, data, GraphError)
    array = np.ascontiguousarray(given)
    if array.dtype.name == "float64":
        array = array.astype(np.float32)
    text = {"float32": "f32", "float16": "f16"}.get(array.dtype.name, array.dtype.name.replace("int", "i"))
    if text not in DTYPE_BY_NAME:
        raise GraphError(f"{what} has NumPy dtype {array.dtype}; use a float or a signed integer type")
    # NumPy's ascontiguousarray makes scalars one-dimensional; the graph keeps rank 0.
    spec = make_spec(given.shape, text)
    return _leaf("constant", name, spec, MappingProxyType({"data": array.astype(spec.dtype.storage).tobytes()}))


def constant_array(node: Node) -> npt.NDArray[np.generic]:
    """The array of a constant node, read-only."""
    data = node.attrs["data"]
    assert isinstance(data, bytes), "verify() ran before"
    spec = node.specs[0]
    return np.frombuffer(data, spec.dtype.storage).reshape(spec.shape)


def format_node(node: Node, called: Mapping[Node, str] | None = None, attrs: Attrs | None = None) -> str:
    """The line of one node; without `called`, names are the nodes' own labels; `attrs` are those shown, not all."""
    shown = node.attrs if attrs is None else attrs
    args = [format_reference(s, called) for s in node.src] + [
        f"{quote_word(k)}={format_attribute(v)}" for k, v in shown.items()
    ]
    call = f"{quote_word(node.op)}({', '.join(args)})"
    return f"{_format_node_name(node, called)} = {call} : {', '.join(map(str, node.specs))}"


def format_reference(value: Value | None, called: Mapping[Node, str] | None = None) -> str:
    """A value as a line refers to it; ``_`` for an operand that was left out."""
    if value is None:
        return "_"
    return _format_node_name(value.node, called) + (f"#{value.index}" if len(value.node.specs) > 1 else "")


def _format_node_name(node: Node, called: Mapping[Node, str] | None) -> str:
    """A node as others refer to it; the number of an unnamed node stays bare, a name of digits is quoted."""
    if called is None:
        return f"%{node.label}"
    return f"%{quote_node_name(called[node])}" if node.name else f"%{called[node]}"
