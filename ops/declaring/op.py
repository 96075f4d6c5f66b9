"""An op, declared once: the reference function is the meaning, the signature gives shapes, sharding and cost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar, overload

import numpy.typing as npt

from ...graph.attrs import Attr, Attrs, quote_word
from ...graph.errors import GraphError
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...graph.spec import Spec, check_spec
from ...graph.validation import did_you_mean, format_value, validate_constructor
from .attributes import settled
from .calling import call_signature, call_text
from .links import Link
from .samples import Range
from .signature import Mismatch, Signature, Sizes, default_attrs, parse_signature

Array: TypeAlias = npt.NDArray[Any]
T = TypeVar("T")
R = TypeVar("R", Value, tuple[Value, Value])
Specs: TypeAlias = tuple[Spec | None, ...]
Inplace: TypeAlias = "tuple[tuple[int, str], ...] | Callable[[Attrs], tuple[tuple[int, str], ...]]"
Overwrites: TypeAlias = "tuple[str, int] | Callable[[Attrs], tuple[str, int] | None] | None"
Linear: TypeAlias = "tuple[str, ...] | Callable[[Attrs], tuple[str, ...]]"
Form: TypeAlias = "str | Callable[[Mapping[str, Attr]], str]"
Localise: TypeAlias = Callable[[Attrs, tuple[int, ...], Callable[[int, int], int]], Mapping[str, Attr]]
Traffic: TypeAlias = Callable[[Sequence[Spec | None], Sequence[Spec], Attrs], int]
Infer: TypeAlias = Callable[[Specs, Attrs], Spec]


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

    `signed_zeros` promises that a zero result has the sign of IEEE 754, and that subnormal numbers are not flushed.
    It is False for an op with sums or products of several terms.

    `kernels` are those that an op of another package brings with it: by backend where its binding is found.
    """

    name: str
    reference: Callable[..., Any]
    signatures: Mapping[str, Signature]
    form: Form
    defaults: Attrs
    required: tuple[str, ...]
    kinds: Mapping[str, str]
    linear: Linear
    zeros: tuple[str, ...]
    inplace: Inplace
    overwrites: Overwrites
    where: Mapping[str, Callable[..., int]]
    needs: Callable[..., str | None] | None
    infer_shape: Infer | None
    links: Callable[[Specs, Attrs], tuple[Link, ...]] | None
    flop_count: Callable[..., float] | None
    traffic: Traffic | None
    share: Callable[[Node], float]
    ranges: Mapping[str, Range]
    samples: tuple[str, ...]
    errors: tuple[tuple[str, str], ...]
    as_view: Callable[..., Array] | None
    whole: Callable[[Attrs], tuple[str, ...]] | None
    localise: Localise | None
    compare: str
    infinite: tuple[str, ...]
    sequential: str
    signed_zeros: bool
    must: bool
    kernels: Mapping[str, str]
    operand_names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        longest = max(self.signatures.values(), key=lambda s: len(s.operands))
        object.__setattr__(self, "operand_names", tuple(o.name for o in longest.operands))
        # Inference depends on specs and attributes alone, and a model asks the same question for every layer.
        object.__setattr__(self, "_infer", lru_cache(maxsize=4096)(self._infer_uncached))
        # What `help` and editors show of an op is its own, not that of this class.
        signature = call_signature(longest, self.least, self.kinds, self.defaults)
        object.__setattr__(self, "__signature__", signature)
        object.__setattr__(self, "__doc__", f"{self.name}{call_text(signature)}\n\n{self.documentation}")

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    @property
    def documentation(self) -> str:
        """What the op computes, in its author's words."""
        return inspect.getdoc(self.reference) or ""

    @property
    def least(self) -> int:
        """So many operands every form of the op has."""
        return min(len(s.operands) for s in self.signatures.values())

    def signature_for(self, attrs: Mapping[str, Attr]) -> Signature:
        """The signature in force, which `form` may choose by attributes.  Raises `Mismatch`."""
        if callable(self.form):
            return self.signatures[self.form(attrs)]
        key = str(attrs.get(self.form, self.defaults.get(self.form))) if self.form else ""
        if key not in self.signatures:
            raise Mismatch(f"{self.form} is {key!r}; one of {', '.join(self.signatures)}")
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
        made = self.node(src, attrs, name).results
        return made[0] if len(made) == 1 else made  # type: ignore[return-value]  # R is what the reference returns

    def node(self, src: list[Value | None], attrs: Attrs, name: str, *, is_settled: bool = False) -> Node:
        """A new node on operands, from which it drops those left out at the end; `is_settled` says that the attributes
        are what `settle` gave.  Raises `GraphError` if they do not fit."""
        while src and src[-1] is None:
            src.pop()
        try:
            attrs = attrs if is_settled else self.settle(attrs)
            specs = self.infer([None if v is None else v.spec for v in src], attrs)
        except Mismatch as why:
            operands = ", ".join("_" if v is None else repr(v) for v in src)
            raise GraphError(f"{self.name}({operands}): {why}") from None
        return Node(self.name, tuple(src), attrs, specs, name)

    def settle(self, attrs: Attrs) -> Attrs:
        """Attributes with defaults filled in, in declared order.  Raises `Mismatch`."""
        if attrs.keys() != self.kinds.keys():
            if unknown := attrs.keys() - self.kinds.keys():
                known = ", ".join((*self.required, *self.defaults)) or "none"
                hint = did_you_mean(min(unknown), self.defaults) or f"; attributes: {known}"
                raise Mismatch(f"no operand or attribute {', '.join(map(quote_word, sorted(unknown)))}{hint}")
            if missing := [k for k in self.required if k not in attrs]:
                raise Mismatch(f"attribute {missing[0]} is missing")
        if not attrs:
            return self.defaults
        return MappingProxyType(
            {k: settled(k, kind, attrs[k]) if k in attrs else self.defaults[k] for k, kind in self.kinds.items()}
        )

    def infer(self, specs: Sequence[Spec | None], attrs: Attrs) -> tuple[Spec, ...]:
        """Specs of the results.  Raises `Mismatch` with the reason."""
        return self._infer(tuple(specs), tuple(attrs.items()))  # type: ignore[attr-defined]  # set in __post_init__ of a frozen class

    def _infer_uncached(self, specs: Specs, items: tuple[tuple[str, Attr], ...]) -> tuple[Spec, ...]:
        attrs = dict(items)
        signature = self.signature_for(attrs)
        if len(specs) > len(signature.operands):
            raise Mismatch(f"takes {len(signature.operands)} operands, got {len(specs)}")
        specs = _padded(specs, len(signature.operands))
        sizes = self.sizes(specs, attrs)
        if self.needs and (why := self.needs(**{**attrs, **sizes.named})):
            raise Mismatch(why)
        results = (self.infer_shape(specs, attrs),) if self.infer_shape else signature.result_specs(specs, sizes)
        for spec in results:
            if why := check_spec(spec):
                raise Mismatch(f"the result would be illegal: {why}")
        return results

    # --------------------------------------------------------------------------------------- what passes ask

    @property
    def is_view(self) -> bool:
        """Whether the result is its operand under other strides.  `as_view` makes it from a strided array without
        touching an element, or raises ValueError where strides cannot say it."""
        return self.as_view is not None

    def sizes(self, specs: Sequence[Spec | None], attrs: Attrs) -> Sizes:
        """Sizes of all dimensions, derived ones and integer attributes included.  Raises `Mismatch`."""
        chosen = self.signature_for(attrs)
        bound = chosen.bind(_padded(specs, len(chosen.operands)))
        named = default_attrs(attrs, bound.named)
        for name, rule in self.where.items():
            named[name] = rule(**named)
        return Sizes(named, bound.leading)

    def inplace_in(self, attrs: Attrs) -> tuple[tuple[int, str], ...]:
        """Pairs of a result and the operand whose memory it may take, under these attributes."""
        return self.inplace(attrs) if callable(self.inplace) else self.inplace

    def overwrites_in(self, attrs: Attrs) -> tuple[str, int] | None:
        """(operand, axis) if only those entries of an operand's memory change which another one numbers."""
        return self.overwrites(attrs) if callable(self.overwrites) else self.overwrites

    def linear_in(self, attrs: Attrs) -> tuple[str, ...]:
        """Operands through which a partial sum may pass, under these attributes."""
        return self.linear(attrs) if callable(self.linear) else self.linear

    def zeros_in(self, attrs: Attrs) -> tuple[str, ...]:
        """Operands whose zeros give zeros, under these attributes."""
        return (*self.linear_in(attrs), *self.zeros)

    def keeps(self, specs: Sequence[Spec | None], result: Spec, attrs: Attrs, operand: int, count: int) -> bool:
        """Whether the first `count` axes of an operand are those of the result, index by index."""
        source = specs[operand]
        if self.links is not None or source is None or (self.whole and self.whole(attrs)):
            return False
        signature, sizes = self.signature_for(attrs), self.sizes(specs, attrs)
        return signature.keeps(signature.operands[operand], source.shape, result.shape, sizes, count)

    def flops(self, node: Node) -> int:
        """Floating-point operations of one run of `node`."""
        if self.is_view:
            return 0
        if self.flop_count is None:
            return node.specs[0].size
        sizes = self.sizes([None if s is None else s.spec for s in node.src], node.attrs)
        return round(self.share(node) * sizes.batch * self.flop_count(**sizes.named, batch=sizes.batch))

    def nbytes(self, node: Node) -> int:
        """Bytes read and written by one run of `node`: each operand and each result once, unless declared."""
        if self.is_view:
            return 0
        if self.traffic is not None:
            return self.traffic([None if s is None else s.spec for s in node.src], node.specs, node.attrs)
        return round(self.share(node) * (sum(v.spec.nbytes for v in node.inputs) + sum(s.nbytes for s in node.specs)))

    def run(self, arrays: Sequence[Array | None], attrs: Attrs) -> tuple[Array, ...]:
        """The reference on float64 (or integer) arrays."""
        out = self.reference(*_padded(arrays, len(self.operand_names)), **attrs)
        return out if isinstance(out, tuple) else (out,)


def _annotated(kind: Any) -> str:
    """An annotation as text, whether its module keeps annotations as text or not."""
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _padded(items: Sequence[T | None], count: int) -> tuple[T | None, ...]:
    """`items` with None for the operands left out at the end."""
    return tuple(items) + (None,) * (count - len(items))


class _Declare:
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
        kinds = {keyword: _annotated(function.__annotations__[keyword]) for keyword in (*required, *defaults)}
        view = self.parts.pop("view")
        as_view = reference if view is True else view or None
        return Op(
            name=name,
            reference=reference,
            defaults=defaults,
            required=required,
            kinds=kinds,
            as_view=as_view,
            **self.parts,
        )


def op(
    signature: str | Mapping[str, str],
    *,
    form: Form = "",
    linear: Linear = (),
    zeros: tuple[str, ...] = (),
    inplace: str | Inplace = (),
    overwrites: Overwrites = None,
    where: Mapping[str, Callable[..., int]] = MappingProxyType({}),
    needs: Callable[..., str | None] | None = None,
    infer: Infer | None = None,
    links: Callable[[Specs, Attrs], tuple[Link, ...]] | None = None,
    flops: Callable[..., float] | None = None,
    traffic: Traffic | None = None,
    share: Callable[[Node], float] = lambda node: 1.0,
    ranges: Mapping[str, Range] = MappingProxyType({}),
    samples: tuple[str, ...] = (),
    errors: tuple[tuple[str, str], ...] = (),
    view: bool | Callable[..., Array] = False,
    whole: Callable[[Attrs], tuple[str, ...]] | None = None,
    localise: Localise | None = None,
    compare: str = "close",
    infinite: tuple[str, ...] = (),
    sequential: str = "",
    signed_zeros: bool = True,
    must: bool = True,
    kernels: Mapping[str, str] = MappingProxyType({}),
) -> _Declare:
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
    return _Declare(
        signatures=MappingProxyType({k: parse_signature(v) for k, v in texts.items()}),
        form=form,
        linear=linear,
        zeros=zeros,
        inplace=((0, inplace),) if isinstance(inplace, str) else inplace,
        overwrites=overwrites,
        where=where,
        needs=needs,
        infer_shape=infer,
        links=links,
        flop_count=flops,
        traffic=traffic,
        share=share,
        ranges=ranges,
        samples=samples,
        errors=errors,
        view=view,
        whole=whole,
        localise=localise,
        compare=compare,
        infinite=infinite,
        sequential=sequential,
        signed_zeros=signed_zeros,
        must=must,
        kernels=MappingProxyType(dict(kernels)),
    )
