"""An op, declared once: the reference function is the meaning, the signature gives shapes, sharding and cost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache, wraps
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar, cast, overload

import numpy.typing as npt

from ...graph.attrs import Attr, Attrs, quote_word
from ...graph.errors import GraphError
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...graph.spec import Spec, check_spec
from ...graph.validation import did_you_mean, format_value, validate_constructor
from .attributes import normalise_attribute
from .axis_links import AxisLink
from .call_signature import build_call_signature, format_call
from .samples import LegalRange
from .signature import DimensionSizes, Signature, SignatureMismatch, merge_integer_attributes, parse_signature

Array: TypeAlias = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])
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
    """A declared op.  Calling it builds a node; `reference` computes it exactly in float64.

    `linear` lists the operands in which the op is linear, one at a time; ``"a+b"`` means in both together.  A partial
    sum may pass through those, and through nothing else; it is a function where that depends on attributes.  `zeros`
    lists, in the same words, further operands whose zeros give zeros, index by index of the axes they share with the
    result: what is zero on all devices but one may pass through those.  `inplace` pairs a result with the operand whose
    memory it may take.  `overwrites` is what of that memory it then changes: the operand that numbers the entries, and
    the axis along which they lie; everything where nothing is said.  `needs` says in words what an attribute or shape
    must satisfy beyond the signature.

    For the conformance kit: `compare` is ``close`` (within rounding), ``exact`` or ``set`` (rows of numbers in any
    order); `infinite` lists operands that may hold infinities, ``"-mask"`` only negative ones; `sequential` is the
    dimension along which the op goes token by token, so that two runs in turn equal one; `must` is whether every
    backend has to have it.

    `kernels` are those that an op of another package brings with it: by backend where its binding is found.
    """

    name: str
    reference: Callable[..., Any]
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
    is_required: bool
    kernels: Mapping[str, str]
    operand_names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        longest = max(self.signatures.values(), key=lambda s: len(s.operands))
        object.__setattr__(self, "operand_names", tuple(o.name for o in longest.operands))
        # Inference depends on specs and attributes alone, and a model asks the same question for every layer.
        object.__setattr__(self, "_infer", lru_cache(maxsize=4096)(self._infer_uncached))
        # What `help` and editors show of an op is its own, not that of this class.
        signature = build_call_signature(longest, self.min_operand_count, self.attribute_types, self.defaults)
        object.__setattr__(self, "__signature__", signature)
        object.__setattr__(self, "__doc__", f"{self.name}{format_call(signature)}\n\n{self.documentation}")

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    @property
    def documentation(self) -> str:
        """What the op computes, in its author's words."""
        return inspect.getdoc(self.reference) or ""

    @property
    def min_operand_count(self) -> int:
        """So many operands every form of the op has."""
        return min(len(s.operands) for s in self.signatures.values())

    def signature_for(self, attrs: Mapping[str, Attr]) -> Signature:
        """The signature in force, which `form` may choose by attributes.  Raises `Mismatch`."""
        if callable(self.signature_key):
            return self.signatures[self.signature_key(attrs)]
        key = str(attrs.get(self.signature_key, self.defaults.get(self.signature_key))) if self.signature_key else ""
        if key not in self.signatures:
            raise SignatureMismatch(f"{self.signature_key} is {key!r}; one of {', '.join(self.signatures)}")
        return self.signatures[key]

    # --------------------------------------------------------------------------------------------- building

    def __call__(self, *values: Value | None, name: str = "", **attrs: Any) -> R:
        """A new node on `values`; operands may be given by name.  Raises `GraphError` if they do not fit."""
        src = list(values)
        for operand in self.operand_names[len(src) :]:
            src.append(attrs.pop(operand, None))
        if strange := [v for v in src if v is not None and not isinstance(v, Value)]:
            raise GraphError(
                f"{self.name}: operand {format_value(strange[0])} is no graph value; make a leaf with constant()"
            )
        if not isinstance(name, str):
            raise GraphError(f"{self.name}: name is {format_value(name)}; need text")
        made = self.build_node(src, attrs, name).results
        return made[0] if len(made) == 1 else made  # type: ignore[return-value]  # R is what the reference returns

    def build_node(self, src: list[Value | None], attrs: Attrs, name: str, *, is_normalised: bool = False) -> Node:
        """Return a new node on operands, without the absent operands at the end.

        Args:
            src: operands, None for an absent one. The list is shortened in place.
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
        """Attributes with defaults filled in, in declared order.  Raises `Mismatch`."""
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
        """Specs of the results.  Raises `Mismatch` with the reason."""
        return self._infer(tuple(specs), tuple(attrs.items()))  # type: ignore[attr-defined]  # set in __post_init__ of a frozen class

    def _infer_uncached(self, specs: OperandSpecs, items: tuple[tuple[str, Attr], ...]) -> tuple[Spec, ...]:
        attrs = dict(items)
        signature = self.signature_for(attrs)
        if len(specs) > len(signature.operands):
            raise SignatureMismatch(f"takes {len(signature.operands)} operands, got {len(specs)}")
        specs = _pad_operands(specs, len(signature.operands))
        sizes = self.resolve_sizes(specs, attrs)
        if self.check and (why := self.check(**{**attrs, **sizes.by_name})):
            raise SignatureMismatch(why)
        results = (self.infer_spec(specs, attrs),) if self.infer_spec else signature.result_specs(specs, sizes)
        for spec in results:
            if why := check_spec(spec):
                raise SignatureMismatch(f"the result would be illegal: {why}")
        return results

    # --------------------------------------------------------------------------------------- what passes ask

    @property
    def is_view(self) -> bool:
        """Whether the result is its operand under other strides.  `as_view` makes it from a strided array without
        touching an element, or raises ValueError where strides cannot say it."""
        return self.as_view is not None

    def resolve_sizes(self, specs: Sequence[Spec | None], attrs: Attrs) -> DimensionSizes:
        """Sizes of all dimensions, derived ones and integer attributes included.  Raises `Mismatch`."""
        chosen = self.signature_for(attrs)
        bound = chosen.resolve_sizes(_pad_operands(specs, len(chosen.operands)))
        named = merge_integer_attributes(attrs, bound.by_name)
        for name, rule in self.derived_sizes.items():
            named[name] = rule(**named)
        return DimensionSizes(named, bound.leading)

    def inplace_pairs(self, attrs: Attrs) -> tuple[tuple[int, str], ...]:
        """Pairs of a result and the operand whose memory it may take, under these attributes."""
        return self.inplace(attrs) if callable(self.inplace) else self.inplace

    def overwritten_entries(self, attrs: Attrs) -> tuple[str, int] | None:
        """(operand, axis) if only those entries of an operand's memory change which another one numbers."""
        return self.overwrites(attrs) if callable(self.overwrites) else self.overwrites

    def linear_operands(self, attrs: Attrs) -> tuple[str, ...]:
        """Operands through which a partial sum may pass, under these attributes."""
        return self.linear(attrs) if callable(self.linear) else self.linear

    def zero_preserving_operands(self, attrs: Attrs) -> tuple[str, ...]:
        """Operands whose zeros give zeros, under these attributes."""
        return (*self.linear_operands(attrs), *self.zeros)

    def keeps_leading_axes(
        self, specs: Sequence[Spec | None], result: Spec, attrs: Attrs, operand: int, count: int
    ) -> bool:
        """Whether the first `count` axes of an operand are those of the result, index by index."""
        source = specs[operand]
        if self.links is not None or source is None or (self.unsharded_dimensions and self.unsharded_dimensions(attrs)):
            return False
        signature, sizes = self.signature_for(attrs), self.resolve_sizes(specs, attrs)
        return signature.keeps_leading_axes(signature.operands[operand], source.shape, result.shape, sizes, count)

    def count_flops(self, node: Node) -> int:
        """Floating-point operations of one run of `node`."""
        if self.is_view:
            return 0
        if self.flop_count is None:
            return node.specs[0].size
        sizes = self.resolve_sizes([None if s is None else s.spec for s in node.src], node.attrs)
        return round(self.active_fraction(node) * sizes.batch * self.flop_count(**sizes.by_name, batch=sizes.batch))

    def count_bytes(self, node: Node) -> int:
        """Bytes read and written by one run of `node`: each operand and each result once, unless declared."""
        if self.is_view:
            return 0
        if self.traffic is not None:
            return self.traffic([None if s is None else s.spec for s in node.src], node.specs, node.attrs)
        return round(
            self.active_fraction(node) * (sum(v.spec.nbytes for v in node.inputs) + sum(s.nbytes for s in node.specs))
        )

    def run_reference(self, arrays: Sequence[Array | None], attrs: Attrs) -> tuple[Array, ...]:
        """The reference on float64 (or integer) arrays."""
        out = self.reference(*_pad_operands(arrays, len(self.operand_names)), **attrs)
        return out if isinstance(out, tuple) else (out,)


def _format_annotation(kind: Any) -> str:
    """An annotation as text, whether its module keeps annotations as text or not."""
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _pad_operands(items: Sequence[T | None], count: int) -> tuple[T | None, ...]:
    """`items` with None for the operands left out at the end."""
    return tuple(items) + (None,) * (count - len(items))


class _OpDecorator:
    """`@op(...)`: typed so that a reference with one array builds one value, and one with two builds two."""

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    @overload
    def __call__(self, reference: Callable[..., tuple[Array, Array]]) -> Op[tuple[Value, Value]]: ...
    @overload
    def __call__(self, reference: Callable[..., Array]) -> Op[Value]: ...
    def __call__(self, reference: Callable[..., Any]) -> Op[Any]:
        function = inspect.unwrap(reference)
        code, given = function.__code__, function.__kwdefaults__ or {}  # its whole signature takes ten times as long
        keywords = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        name = reference.__name__.rstrip("_")
        defaults = MappingProxyType({keyword: given[keyword] for keyword in keywords if keyword in given})
        required = tuple(keyword for keyword in keywords if keyword not in given)
        kinds = {keyword: _format_annotation(function.__annotations__[keyword]) for keyword in (*required, *defaults)}
        view = self.parts.pop("view")
        as_view = reference if view is True else view or None
        return Op(
            name=name,
            reference=reference,
            defaults=defaults,
            required_attributes=required,
            attribute_types=kinds,
            as_view=as_view,
            **self.parts,
        )


OLD_KEYWORDS: Mapping[str, str] = MappingProxyType(
    {
        "form": "signature_key",
        "needs": "check",
        "where": "derived_sizes",
        "share": "active_fraction",
        "whole": "unsharded_dimensions",
        "must": "is_required",
    }
)
"""Keywords of `op` under their names before 0.2, which packages may use until 0.3."""


def _accept_old_keywords(function: F) -> F:
    """Return `function` with `OLD_KEYWORDS` renamed before the call."""

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **{OLD_KEYWORDS.get(name, name): value for name, value in keywords.items()})

    return cast(F, call)


@_accept_old_keywords
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
    is_required: bool = True,
    kernels: Mapping[str, str] = MappingProxyType({}),
) -> _OpDecorator:
    """Declare an op above its float64 reference; keyword-only parameters of the reference are its attributes.

    `signature` may be a mapping from values of the attribute `form`, or from what a function `form` of the attributes
    gives; operands that only some signatures have come last.  `where` computes further dimensions from known ones;
    `infer` and `links` replace the signature's result shape and sharding where names cannot say them (views).
    `flops` takes the dimensions by name, for one leading index of `batch`; `traffic` takes operand and result specs and
    attributes; `share` is what remains of both where an operand says that the rest is not needed.  `ranges` are the
    legal values of operands; `view` marks a view, whose reference moves no element (or is replaced by a function that
    does not).  `whole` names dimensions that may not be cut under these attributes; `localise` gives the attributes of
    one shard from its result shape and ``count(axis, n)``, how many of the first n entries of an operand's axis the
    device holds.  `samples` are cases ``"x=f32[2,3], eps=1e-06"``,
    `errors` pairs of a case and a part of the message it must give.  `kernels`, for ops outside of hocket, names by
    backend (``numpy``, ``cpu``, ``cuda``) the binding that it is to use, as ``"package.module:name"``.
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
        is_required=is_required,
        kernels=MappingProxyType(dict(kernels)),
    )
