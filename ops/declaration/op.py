"""The record of an op and the decorator that declares it.

The reference function defines the result. The signature gives shapes, dtypes, sharding and cost.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar, overload

from ...graph.attrs import Attr, Attrs, quote_word
from ...graph.errors import GraphError, format_count
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...graph.spec import Spec, check_spec
from ...graph.validation import did_you_mean, format_value, validate_constructor
from .attributes import normalise_attribute
from .axis_links import AxisLink
from .call_signature import build_call_signature, format_untyped_signature, read_attributes, returns_scalar
from .interpreter import ArrangeOperands, ScalarLanguageDeclaration
from .numpy_functions import Array as Array
from .old_keywords import accept_old_keywords
from .samples import LegalRange
from .scalar import Scalar
from .signature import DimensionSizes, Signature, SignatureMismatch, merge_dimensions_and_attributes, parse_signature

T = TypeVar("T")
R = TypeVar("R", Value, tuple[Value, Value])
OperandSpecs: TypeAlias = tuple[Spec | None, ...]
Inplace: TypeAlias = "tuple[tuple[int, str], ...] | Callable[[Attrs], tuple[tuple[int, str], ...]]"
Overwrites: TypeAlias = "tuple[str, int] | Callable[[Attrs], tuple[str, int] | None] | None"
Linear: TypeAlias = "tuple[str, ...] | Callable[[Attrs], tuple[str, ...]]"
SignatureKey: TypeAlias = "str | Callable[[Mapping[str, Attr]], str]"
LocaliseAttributes: TypeAlias = Callable[[Attrs, tuple[int, ...], Callable[[int, int], int]], Mapping[str, Attr]]
Traffic: TypeAlias = Callable[[Sequence[Spec | None], Sequence[Spec], Attrs], int]
InferSpec: TypeAlias = Callable[[OperandSpecs, Attrs], Spec]


@validate_constructor(GraphError)
@dataclass(frozen=True, eq=False, repr=False)
class Op(Generic[R]):
    """An op: a computation with a signature and a float64 reference function. A call builds a graph node.

    `expression` is the declaration in the scalar language, from which the reference follows; None for other ops.

    Fields for the planner:

    * `linear`: operands in which the op is linear, one at a time; ``"a+b"`` means in both together. A partial sum may
      pass only through these.
    * `zeros`: further operands in which zeros give zeros, index by index of the axes shared with the result. A value
      that is zero on all devices except one may pass through these.
    * `inplace`: pairs (result index, operand) in which the result may overwrite the memory of the operand.
    * `overwrites`: the entries of that memory that change, as (operand with their numbers, axis); None means all.
    * `check`: a function of attributes and sizes that returns a problem beyond the signature, or None.

    `linear`, `inplace` and `overwrites` may be functions of the attributes.

    Fields for the conformance kit:

    * `compare`: ``close`` (within rounding), ``exact``, or ``set`` (rows of numbers in any order).
    * `infinite`: operands that may have infinities; ``"-mask"`` means negative ones only.
    * `sequential`: the dimension along which the op processes tokens in order; two runs in turn equal one run.
    * `signed_zeros`: whether a zero result has the sign of IEEE 754 and no subnormal number is flushed to zero. False
      for an op with sums or products of several terms.
    * `nan_for_infinity`: operands in which an infinity may act as NaN. Its product may have 0 as a factor, because a
      backend writes the other factor as a sum of 16-bit terms, or because float32 rounds it to 0.
    * `is_required`: whether each backend must support the op.

    `kernels` has the kernel bindings of an op of another package, by backend.
    """

    name: str
    reference: Callable[..., Any]
    expression: ScalarLanguageDeclaration | None
    signatures: Mapping[str, Signature]
    signature_key: SignatureKey
    defaults: Attrs
    required_attributes: tuple[str, ...]
    attribute_types: Mapping[str, str]
    linear: Linear
    zeros: tuple[str, ...]
    inplace: Inplace
    overwrites: Overwrites
    derived_sizes: Mapping[str, Callable[..., int]]
    check: Callable[..., str | None] | None
    infer_spec: InferSpec | None
    links: Callable[[OperandSpecs, Attrs], tuple[AxisLink, ...]] | None
    flop_count: Callable[..., float] | None
    traffic: Traffic | None
    active_fraction: Callable[[Node], float]
    ranges: Mapping[str, LegalRange]
    samples: tuple[str, ...]
    errors: tuple[tuple[str, str], ...]
    as_view: Callable[..., Array] | None
    unsharded_dimensions: Callable[[Attrs], tuple[str, ...]] | None
    localise: LocaliseAttributes | None
    compare: str
    infinite: tuple[str, ...]
    sequential: str
    signed_zeros: bool
    nan_for_infinity: tuple[str, ...]
    is_required: bool
    kernels: Mapping[str, str]
    operand_names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        longest = max(self.signatures.values(), key=lambda s: len(s.operands))
        object.__setattr__(self, "operand_names", tuple(o.name for o in longest.operands))
        # Results depend on specs and attributes only, and these are equal in all layers of a model.
        object.__setattr__(self, "_infer", lru_cache(maxsize=4096)(self._infer_uncached))
        # `help` and editors show the signature of the op, not the one of this class.
        signature = build_call_signature(longest, self.min_operand_count, self.attribute_types, self.defaults)
        object.__setattr__(self, "__signature__", signature)
        object.__setattr__(self, "__doc__", f"{self.name}{format_untyped_signature(signature)}\n\n{self.documentation}")

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    @property
    def documentation(self) -> str:
        """The docstring of the reference function, which is the documentation of the op."""
        return inspect.getdoc(self.reference) or ""

    @property
    def min_operand_count(self) -> int:
        """The number of operands that all signatures of the op have."""
        return min(len(s.operands) for s in self.signatures.values())

    def signature_for(self, attrs: Mapping[str, Attr]) -> Signature:
        """Return the signature that applies to a call with these attributes.

        Raises:
            SignatureMismatch: an attribute names no signature.
        """
        if callable(self.signature_key):
            return self.signatures[self.signature_key(attrs)]
        key = str(attrs.get(self.signature_key, self.defaults.get(self.signature_key))) if self.signature_key else ""
        if key not in self.signatures:
            raise SignatureMismatch(f"{self.signature_key} is {key!r}; one of {', '.join(self.signatures)}")
        return self.signatures[key]

    # --------------------------------------------------------------------------------------------- building

    def __call__(self, *values: Value | None, name: str = "", **attrs: Any) -> R:
        """Build a node on `values`; operands may also come by name.

        Raises:
            GraphError: operands or attributes do not fit.
        """
        src = list(values)
        for operand in self.operand_names[len(src) :]:
            src.append(attrs.pop(operand, None))
        if strange := [v for v in src if v is not None and not isinstance(v, Value)]:
            raise GraphError(
                f"{self.name}: operand {format_value(strange[0])} is no graph value; make a leaf with constant()"
            )
        if not isinstance(name, str):
            raise GraphError(f"{self.name}: name is {format_value(name)}; need text")
        results = self.build_node(src, attrs, name).results
        return results[0] if len(results) == 1 else results  # type: ignore[return-value]  # R follows from the reference

    def build_node(self, src: list[Value | None], attrs: Attrs, name: str, *, is_normalised: bool = False) -> Node:
        """Build a new node of this op on operands.

        Args:
            src: operands, None for an absent one. Absent operands at the end are removed from the list in place.
            attrs: attributes by name.
            name: name of the node, or the empty text.
            is_normalised: whether `attrs` come from `normalise_attributes`.

        Raises:
            GraphError: operands or attributes do not fit.
        """
        while src and src[-1] is None:
            src.pop()
        try:
            attrs = attrs if is_normalised else self.normalise_attributes(attrs)
            specs = self.infer_results([None if v is None else v.spec for v in src], attrs)
        except SignatureMismatch as why:
            operands = ", ".join("_" if v is None else repr(v) for v in src)
            raise GraphError(f"{self.name}({operands}): {why}") from None
        return Node(self.name, tuple(src), attrs, specs, name)

    def normalise_attributes(self, attrs: Attrs) -> Attrs:
        """Check the attributes, and return them with defaults added, in declared order.

        Raises:
            SignatureMismatch: an attribute is unknown, is missing or has another type.
        """
        if attrs.keys() != self.attribute_types.keys():
            if unknown := attrs.keys() - self.attribute_types.keys():
                known = ", ".join((*self.required_attributes, *self.defaults)) or "none"
                hint = did_you_mean(min(unknown), self.defaults) or f"; attributes: {known}"
                raise SignatureMismatch(f"no operand or attribute {', '.join(map(quote_word, sorted(unknown)))}{hint}")
            if missing := [k for k in self.required_attributes if k not in attrs]:
                raise SignatureMismatch(f"attribute {missing[0]} is missing")
        if not attrs:
            return self.defaults
        return MappingProxyType(
            {
                k: normalise_attribute(k, kind, attrs[k]) if k in attrs else self.defaults[k]
                for k, kind in self.attribute_types.items()
            }
        )

    def infer_results(self, specs: Sequence[Spec | None], attrs: Attrs) -> tuple[Spec, ...]:
        """Infer the specs of the results from operand specs and attributes.

        Raises:
            SignatureMismatch: operands and attributes do not fit.
        """
        return self._infer(tuple(specs), tuple(attrs.items()))  # type: ignore[attr-defined]  # set in __post_init__ of a frozen class

    def _infer_uncached(self, specs: OperandSpecs, items: tuple[tuple[str, Attr], ...]) -> tuple[Spec, ...]:
        attrs = dict(items)
        signature = self.signature_for(attrs)
        if len(specs) > len(signature.operands):
            raise SignatureMismatch(f"takes {format_count(len(signature.operands), 'operand')}, got {len(specs)}")
        specs = _pad_operands(specs, len(signature.operands))
        sizes = self.resolve_sizes(specs, attrs)
        if self.check and (why := self.check(**{**attrs, **sizes.by_name})):
            raise SignatureMismatch(why)
        if self.expression is not None:
            self.expression.require_whole_rows(signature, attrs)
        results = (self.infer_spec(specs, attrs),) if self.infer_spec else signature.result_specs(specs, sizes)
        for spec in results:
            if why := check_spec(spec):
                raise SignatureMismatch(f"the result would be illegal: {why}")
        if self.expression is not None:
            self.expression.require_result_shape(signature, [spec is not None for spec in specs], attrs)
        return results

    # --------------------------------------------------------------------------------------- queries of passes

    @property
    def is_view(self) -> bool:
        """Whether the result is a strided view of the operand.

        `as_view` builds it from a strided array and moves no element. It raises ValueError if strides cannot express
        the result.
        """
        return self.as_view is not None

    def resolve_sizes(self, specs: Sequence[Spec | None], attrs: Attrs) -> DimensionSizes:
        """Return the size of each dimension by name, including derived sizes and integer attributes.

        Raises:
            SignatureMismatch: operands do not fit the signature.
        """
        chosen = self.signature_for(attrs)
        bound = chosen.resolve_sizes(_pad_operands(specs, len(chosen.operands)))
        named = merge_dimensions_and_attributes(attrs, bound.by_name)
        for name, rule in self.derived_sizes.items():
            named[name] = rule(**named)
        return DimensionSizes(named, bound.leading)

    def inplace_pairs(self, attrs: Attrs) -> tuple[tuple[int, str], ...]:
        """Return pairs (result index, operand name): this result may overwrite the memory of this operand."""
        return self.inplace(attrs) if callable(self.inplace) else self.inplace

    def overwritten_entries(self, attrs: Attrs) -> tuple[str, int] | None:
        """Return which entries of the operand change when a result is written over it; None if all change.

        Returns:
            The name of the operand that has the numbers of these entries, and the axis along which they are counted.
        """
        return self.overwrites(attrs) if callable(self.overwrites) else self.overwrites

    def linear_operands(self, attrs: Attrs) -> tuple[str, ...]:
        """Return the names of the operands in which the op is linear. ``"a+b"`` means in both together."""
        return self.linear(attrs) if callable(self.linear) else self.linear

    def zero_preserving_operands(self, attrs: Attrs) -> tuple[str, ...]:
        """Return the names of the operands in which zeros give zeros, at the same indices of the result."""
        return (*self.linear_operands(attrs), *self.zeros)

    def keeps_leading_axes(
        self, specs: Sequence[Spec | None], result: Spec, attrs: Attrs, operand: int, count: int
    ) -> bool:
        """Return whether the first `count` axes of an operand are the first axes of the result, with equal indices.

        `operand` is the index of the operand.
        """
        source = specs[operand]
        if self.links is not None or source is None or (self.unsharded_dimensions and self.unsharded_dimensions(attrs)):
            return False
        signature, sizes = self.signature_for(attrs), self.resolve_sizes(specs, attrs)
        return signature.keeps_leading_axes(signature.operands[operand], source.shape, result.shape, sizes, count)

    def count_flops(self, node: Node) -> int:
        """Return the number of floating-point operations of one run of `node`."""
        if self.is_view or self.flop_count is None:
            return 0 if self.is_view else node.specs[0].size
        sizes = self.resolve_sizes([None if s is None else s.spec for s in node.src], node.attrs)
        return round(
            self.active_fraction(node) * sizes.batch_size * self.flop_count(**sizes.by_name, batch=sizes.batch_size)
        )

    def count_bytes(self, node: Node) -> int:
        """Return the bytes that one run of `node` reads and writes.

        Without a declared `traffic` these are the bytes of each operand and each result.
        """
        if self.is_view:
            return 0
        moved = (
            sum(v.spec.nbytes for v in node.inputs) + sum(s.nbytes for s in node.specs)
            if self.traffic is None
            else self.traffic([None if s is None else s.spec for s in node.src], node.specs, node.attrs)
        )
        return round(self.active_fraction(node) * moved)

    def run_reference(self, arrays: Sequence[Array | None], attrs: Attrs) -> tuple[Array, ...]:
        """Run the reference on float64 or integer arrays, and return its results; None stands for an absent operand."""
        out = self.reference(*_pad_operands(arrays, len(self.operand_names)), **attrs)
        return out if isinstance(out, tuple) else (out,)


def _pad_operands(items: Sequence[T | None], count: int) -> tuple[T | None, ...]:
    """Return `items` with None appended up to `count` entries; None stands for an absent operand."""
    return tuple(items) + (None,) * (count - len(items))


class _OpDecorator:
    """A decorator that turns a float64 reference function into an `Op`; `op(...)` returns it.

    Its overloads tell type checkers the result count: a reference that returns two arrays gives an op with two values.
    """

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    @overload
    def __call__(self, reference: Callable[..., tuple[Array, Array]]) -> Op[tuple[Value, Value]]: ...
    @overload
    def __call__(self, reference: Callable[..., Array | Scalar]) -> Op[Value]: ...
    def __call__(self, reference: Callable[..., Any]) -> Op[Any]:
        function = inspect.unwrap(reference)
        types, defaults = read_attributes(function)
        arrange, element, view = (self.parts.pop(name) for name in ("arrange", "element", "view"))
        declared = ScalarLanguageDeclaration(function, types, arrange) if returns_scalar(function) else element
        return Op(
            name=reference.__name__.rstrip("_"),
            reference=declared.make_float64_reference() if declared and not element else reference,
            expression=declared,
            defaults=MappingProxyType(defaults),
            required_attributes=tuple(name for name in types if name not in defaults),
            attribute_types=types,
            as_view=reference if view is True else view or None,
            **self.parts,
        )


@accept_old_keywords
def op(
    signature: str | Mapping[str, str],
    *,
    signature_key: SignatureKey = "",
    linear: Linear = (),
    zeros: tuple[str, ...] = (),
    inplace: str | Inplace = (),
    overwrites: Overwrites = None,
    derived_sizes: Mapping[str, Callable[..., int]] = MappingProxyType({}),
    check: Callable[..., str | None] | None = None,
    infer: InferSpec | None = None,
    links: Callable[[OperandSpecs, Attrs], tuple[AxisLink, ...]] | None = None,
    flops: Callable[..., float] | None = None,
    traffic: Traffic | None = None,
    active_fraction: Callable[[Node], float] = lambda node: 1.0,
    ranges: Mapping[str, LegalRange] = MappingProxyType({}),
    samples: tuple[str, ...] = (),
    errors: tuple[tuple[str, str], ...] = (),
    view: bool | Callable[..., Array] = False,
    unsharded_dimensions: Callable[[Attrs], tuple[str, ...]] | None = None,
    localise: LocaliseAttributes | None = None,
    compare: str = "close",
    infinite: tuple[str, ...] = (),
    sequential: str = "",
    signed_zeros: bool = True,
    nan_for_infinity: tuple[str, ...] = (),
    is_required: bool = True,
    kernels: Mapping[str, str] = MappingProxyType({}),
    arrange: ArrangeOperands | None = None,
    element: ScalarLanguageDeclaration | None = None,
) -> _OpDecorator:
    """Return a decorator that declares an op: it makes the op of its function.

    The function is the float64 reference, or an expression of `ops.declaration.scalar` if it is annotated to return a
    `Scalar`. Keyword-only parameters are the attributes of the op. The fields of `Op` explain the arguments that are
    not listed here.

    Args:
        signature: text in the notation of `ops.declaration.signature`, or such texts by key. Operands that only some
            signatures have come last.
        signature_key: the attribute with the key of the signature, or a function of the attributes that returns it.
        derived_sizes: functions of known sizes and attributes that compute further dimensions.
        infer: function of operand specs and attributes that returns the spec of the result, where names cannot.
        links: function of operand specs and attributes that returns axis links, where names cannot.
        flops: function of the sizes by name that returns the operations for one index of the leading axes.
        traffic: function of operand specs, result specs and attributes that returns the bytes of one run.
        active_fraction: function of a node that returns the fraction of operations and bytes that an operand, such as
            a mask, leaves necessary.
        ranges: legal values by operand.
        samples: cases such as ``"x=f32[2,3], eps=1e-06"``.
        errors: pairs of a case and a part of its message.
        view: True if the reference moves no element, or a function that moves none and replaces the reference.
        unsharded_dimensions: function of the attributes that returns dimensions that may not be sharded.
        localise: function that returns the attributes of one shard. Its arguments are the attributes, the shape of the
            local result, and ``count(axis, n)``: how many of the first n entries of an axis the device has.
        kernels: for an op of another package, its bindings by backend (``numpy``, ``cpu``, ``cuda``), each as
            ``"package.module:name"``.
        arrange: function of operands and attributes that returns the operands of the expression, where these differ.
        element: declaration of an element of the result from placed operands, in addition to the function.
    """
    texts = {"": signature} if isinstance(signature, str) else dict(signature)
    return _OpDecorator(
        signatures=MappingProxyType({k: parse_signature(v) for k, v in texts.items()}),
        signature_key=signature_key,
        linear=linear,
        zeros=zeros,
        inplace=((0, inplace),) if isinstance(inplace, str) else inplace,
        overwrites=overwrites,
        derived_sizes=derived_sizes,
        check=check,
        infer_spec=infer,
        links=links,
        flop_count=flops,
        traffic=traffic,
        active_fraction=active_fraction,
        ranges=ranges,
        samples=samples,
        errors=errors,
        view=view,
        unsharded_dimensions=unsharded_dimensions,
        localise=localise,
        compare=compare,
        infinite=infinite,
        sequential=sequential,
        signed_zeros=signed_zeros,
        nan_for_infinity=nan_for_infinity,
        is_required=is_required,
        kernels=MappingProxyType(dict(kernels)),
        arrange=arrange,
        element=element,
    )
