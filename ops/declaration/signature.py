"""Signatures in the manner of einsum: shapes, dtypes and dimension roles of an op in one line.

``"w[/..., n, +k]: weight, x[..., m, +k] -> [..., m, n]: f32"``

A dimension is one of these:

* a name, which has one size in the whole signature;
* a number;
* a product ``(h g)``, outer factor first, as in einops;
* ``1|d``, which is 1 or `d`.

A prefix or suffix gives its role:

* none: parallel; a shard of it gives a shard of the result;
* ``+k``: contracted; sharded operands give a partial sum;
* ``*c``: coupled; an element of the result may need the whole axis, so each device must have it;
* ``e@ids``: indexed by the numbers in operand `ids` (`ops.movement.sharded_tables`). A device with a shard computes the
  entries of its own rows and zeros elsewhere.

Leading axes come first:

* ``...``: any number of axes, parallel and equal in all operands;
* ``~...``: the operand repeats as tiles (index modulo size, as in ggml's ``add``);
* ``/...``: each entry serves several neighbours (index divided by the ratio, as for weights in ggml's ``mul_mat``);
* ``+...``: summed axes, equal in all operands and absent from results.

``?`` after an operand makes it optional. ``:`` names dtypes of an operand. For a result it names a dtype, or the
operand that has the dtype.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache

from ...graph.attrs import Attrs
from ...graph.dtypes import DTYPE_BY_NAME, FLOAT_DTYPES, INTEGER_DTYPES, QUANTISED_DTYPES, STATE_DTYPES, DType
from ...graph.errors import GraphError
from ...graph.lazy_dataclass import dataclass
from ...graph.spec import Spec

DTYPE_CLASSES: Mapping[str, tuple[DType, ...]] = {
    "float": FLOAT_DTYPES,
    "weight": (*FLOAT_DTYPES, *QUANTISED_DTYPES),
    "written": STATE_DTYPES,
    "index": (DType.I32, DType.I64),
    "integer": INTEGER_DTYPES,
    "number": (*FLOAT_DTYPES, *INTEGER_DTYPES),
    "any": tuple(DType),
}
"""The dtypes of each word that a signature may have after ``:``."""


class DimensionRole(Enum):
    """How the planner may shard a dimension of an op: freely, as partial sums, as table rows, or not at all.

    The module docstring explains the roles. The value is the sign of the role in a signature.
    """

    PARALLEL = ""
    CONTRACTED = "+"
    COUPLED = "*"
    INDEXED = "@"


class LeadingAxesBroadcast(Enum):
    """How an operand broadcasts over the leading axes of a signature; the module docstring explains each notation."""

    NONE = ""
    EQUAL = "..."
    TILED = "~..."
    GROUPED = "/..."
    CONTRACTED = "+..."


@dataclass(frozen=True, slots=True)
class Dimension:
    """One axis of an operand or a result, as a signature declares it.

    - `factors`: names or numbers. An axis has one, or several if its size is a product; the outer factor is first.
    - `index`: for an indexed axis, the operand with the row numbers; otherwise empty.
    - `may_be_one`: whether the axis may also have size 1.
    """

    factors: tuple[str, ...]
    role: DimensionRole = DimensionRole.PARALLEL
    may_be_one: bool = False
    index: str = ""


@dataclass(frozen=True, slots=True)
class Operand:
    """The declaration of one operand or result in a signature.

    `dims` are its axes after the leading axes. A result has no name. If `dtypes` of a result is empty, the result has
    the dtype of operand `dtype_of`, or of the first operand if `dtype_of` is empty.
    """

    name: str
    leading: LeadingAxesBroadcast
    dims: tuple[Dimension, ...]
    optional: bool = False
    dtypes: tuple[DType, ...] = ()
    dtype_of: str = ""
    text: str = ""


class SignatureMismatch(Exception):  # noqa: N818  (internal; `Op` raises a GraphError with the operands)
    """Raised if operands or attributes do not fit the signature of an op; the message says why."""


@dataclass(frozen=True, slots=True)
class DimensionSizes:
    """The sizes of the dimensions of a call by name, and the sizes of its leading axes."""

    by_name: Mapping[str, int]
    leading: tuple[int, ...]

    @property
    def batch_size(self) -> int:
        """The product of the sizes of the leading axes."""
        return math.prod(self.leading)


@dataclass(frozen=True, slots=True)
class Signature:
    """The parsed signature of an op: its operands and results, and their text."""

    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    text: str

    @property
    def operand_dims(self) -> tuple[Dimension, ...]:
        """All dimensions of all operands."""
        return tuple(d for o in self.operands for d in o.dims)

    @property
    def indexed_dimension(self) -> tuple[Operand, Dimension] | None:
        """The operand with an indexed dimension, and this dimension, which is its first one; otherwise None."""
        return next(((o, o.dims[0]) for o in self.operands if o.dims and o.dims[0].index), None)

    def keeps_leading_axes(
        self, operand: Operand, shape: Sequence[int], result: Sequence[int], sizes: DimensionSizes, count: int
    ) -> bool:
        """Return whether the first `count` axes of an operand are the first axes of the result, with equal indices.

        Args:
            operand: an operand of this signature.
            shape: shape of the operand.
            result: shape of the result; the signature has one result.
            sizes: sizes of all dimensions.
            count: number of axes.
        """
        mine = self._make_axis_index_keys(operand, shape, sizes)[:count]
        return len(self.results) == 1 and mine == self._make_axis_index_keys(self.results[0], result, sizes)[:count]

    def _make_axis_index_keys(self, operand: Operand, shape: Sequence[int], sizes: DimensionSizes) -> list[object]:
        """Return a key for each axis of an operand or result; axes with equal keys have the same index in the op."""
        ahead = len(shape) - len(operand.dims)
        shift = len(sizes.leading) - ahead
        indices: list[object] = []
        for i, n in enumerate(shape[:ahead]):
            shared = operand.leading is not LeadingAxesBroadcast.CONTRACTED and n == sizes.leading[shift + i]
            indices.append(shift + i if shared else (operand.name, i))
        for dim, n in zip(operand.dims, shape[ahead:], strict=True):
            several = tuple(f for f in dim.factors if (int(f) if f.isdecimal() else sizes.by_name[f]) != 1)
            indices.append((dim.role, several if n != 1 else ()))
        return indices

    def resolve_sizes(self, specs: Sequence[Spec | None]) -> DimensionSizes:
        """Return the size of each dimension, from the specs of the operands.

        Raises:
            SignatureMismatch: an operand has another dtype or shape; the message names it.
        """
        solver = _SizeSolver()
        for operand, spec in zip(self.operands, specs, strict=True):
            if spec is None:
                if not operand.optional:
                    raise SignatureMismatch(f"operand {operand.name} is missing")
                continue
            if spec.dtype not in operand.dtypes:
                allowed = ", ".join(map(str, operand.dtypes))
                raise SignatureMismatch(f"{operand.name} is {spec.dtype}; it must be one of {allowed}")
            solver.set_or_check_sizes_from_shape(operand, spec.shape)
        return solver.solve_sizes()

    def result_specs(self, specs: Sequence[Spec | None], sizes: DimensionSizes) -> tuple[Spec, ...]:
        """Compute the specs of the results from the operand specs.

        Args:
            specs: specs of the operands.
            sizes: sizes of all dimensions that the results have.
        """
        by_name = {o.name: s for o, s in zip(self.operands, specs, strict=True)}
        results = []
        for result in self.results:
            shape = sizes.leading if result.leading is LeadingAxesBroadcast.EQUAL else ()
            source = by_name[result.dtype_of or self.operands[0].name]
            dtype = result.dtypes[0] if result.dtypes else source.dtype if source else DType.F32
            results.append(Spec(shape + tuple(_compute_size(d, sizes.by_name) for d in result.dims), dtype))
        return tuple(results)


def _compute_size(dim: Dimension, named: Mapping[str, int]) -> int:
    return math.prod(int(f) if f.isdecimal() else named[f] for f in dim.factors)


class _SizeSolver:
    """A solver for the sizes of named dimensions: it reads operand shapes and checks that they agree."""

    def __init__(self) -> None:
        self.named: dict[str, int] = {}
        self.source: dict[str, str] = {}
        self.products: list[tuple[Operand, Dimension, int]] = []
        self.leading: list[tuple[Operand, tuple[int, ...]]] = []

    def set_or_check_sizes_from_shape(self, operand: Operand, shape: tuple[int, ...]) -> None:
        """Set or check the sizes of all dimensions that an operand has, from its shape."""
        extra = len(shape) - len(operand.dims)
        if extra < 0 or (extra and operand.leading is LeadingAxesBroadcast.NONE):
            prefix = "at least " if operand.leading is not LeadingAxesBroadcast.NONE else ""
            raise SignatureMismatch(
                f"{operand.name} has rank {len(shape)}; {operand.text} needs {prefix}{len(operand.dims)}"
            )
        if operand.leading is not LeadingAxesBroadcast.NONE:
            self.leading.append((operand, shape[:extra]))
        for dim, size in zip(operand.dims, shape[extra:], strict=True):
            if dim.may_be_one and size == 1:
                continue
            if len(dim.factors) > 1:
                self.products.append((operand, dim, size))
            else:
                self.set_or_check_size(dim.factors[0], size, operand)

    def set_or_check_size(self, name: str, size: int, operand: Operand) -> None:
        """Set the size of dimension `name`; if it is set already, check that it equals `size`."""
        if name.isdecimal():
            if int(name) != size:
                raise SignatureMismatch(f"an axis of {operand.text} is {size}; it must be {name}")
        elif self.named.setdefault(name, size) != size:
            raise SignatureMismatch(f"{name} is {self.named[name]} in {self.source[name]} but {size} in {operand.text}")
        else:
            self.source.setdefault(name, operand.text)

    def solve_sizes(self) -> DimensionSizes:
        """Compute the factors of product axes that are still unknown, and return the sizes of all dimensions."""
        waiting = self.products
        while waiting:
            later = [p for p in waiting if not self._solve_product(*p)]
            if len(later) == len(waiting):
                operand, dim, _ = later[0]
                raise SignatureMismatch(f"cannot tell the factors of ({' '.join(dim.factors)}) in {operand.text} apart")
            waiting = later
        return DimensionSizes(self.named, self._resolve_leading_axes())

    def _solve_product(self, operand: Operand, dim: Dimension, size: int) -> bool:
        """Compute the only unknown factor of a product axis. Return False if several factors are unknown."""
        unknown = [f for f in dim.factors if not f.isdecimal() and f not in self.named]
        if len(unknown) > 1:
            return False
        known = math.prod(int(f) if f.isdecimal() else self.named.get(f, 1) for f in dim.factors)
        product = " x ".join(f"{f}={f if f.isdecimal() else self.named.get(f, '?')}" for f in dim.factors)
        if unknown and known and size % known == 0:
            self.set_or_check_size(unknown[0], size // known, operand)
        elif unknown and known == size == 0:
            self.set_or_check_size(unknown[0], 1, operand)
        elif unknown or known != size:
            raise SignatureMismatch(f"an axis of {operand.text} is {size}, which is no product {product}")
        return True

    def _resolve_leading_axes(self) -> tuple[int, ...]:
        equal = [
            (o, shape)
            for o, shape in self.leading
            if o.leading in (LeadingAxesBroadcast.EQUAL, LeadingAxesBroadcast.CONTRACTED)
        ]
        if not equal:
            return ()
        first, shared = equal[0]
        for operand, shape in equal:
            if shape != shared:
                raise SignatureMismatch(
                    f"leading axes are {list(shared)} in {first.text} but {list(shape)} in {operand.text}"
                )
        for operand, shape in self.leading:
            if operand.leading in (LeadingAxesBroadcast.EQUAL, LeadingAxesBroadcast.CONTRACTED):
                continue
            if len(shape) > len(shared):
                raise SignatureMismatch(
                    f"{operand.name} has more leading axes, {list(shape)}, than {first.name}, {list(shared)}"
                )
            for mine, theirs in zip(reversed(shape), reversed(shared), strict=False):
                if theirs and (mine == 0 or theirs % mine):  # an empty axis needs no entries
                    raise SignatureMismatch(
                        f"leading axes {list(shape)} of {operand.name} do not divide {list(shared)}"
                    )
        return shared


# ------------------------------------------------------------------------------------------------------- parsing

_OPERAND = re.compile(r"\s*(?P<name>\w*)\[(?P<dims>[^\]]*)\](?P<optional>\?)?(?:\s*:\s*(?P<dtypes>[\w|]+))?\s*(?:,|$)")
_DIM = re.compile(
    r"\s*(?:(?P<leading>[~/+]?\.\.\.)"
    r"|(?P<or_one>1\|)?(?P<role>[+*]?)(?:(?P<name>\w+)(?:@(?P<index>\w+))?|\((?P<product>[\w ]+)\)))\s*(?:,|$)"
)


def _split_into_matches(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Split `text` into consecutive matches of `pattern`; raise `GraphError` if some text does not match."""
    found, at = [], 0
    while at < len(text):
        match = pattern.match(text, at)
        if match is None:
            raise GraphError(f"signature: {text[at:]!r} cannot be read; see docs/add-an-op.md")
        found.append(match)
        at = match.end()
    return found


def _parse_operand(match: re.Match[str], default: tuple[DType, ...]) -> Operand:
    leading = LeadingAxesBroadcast.NONE
    dims: list[Dimension] = []
    for item in _split_into_matches(_DIM, match["dims"].strip()):
        if item["leading"]:
            if dims:
                raise GraphError(f"signature: in {match[0]!r} the ... has to come first")
            leading = LeadingAxesBroadcast(item["leading"])
        else:
            factors = tuple(item["product"].split()) if item["product"] else (item["name"],)
            role = DimensionRole.INDEXED if item["index"] else DimensionRole(item["role"])
            dims.append(Dimension(factors, role, bool(item["or_one"]), item["index"] or ""))
    dtypes: list[DType] = []
    dtype_of = ""
    for word in (match["dtypes"] or "").split("|") if match["dtypes"] else ():
        if word in DTYPE_CLASSES:
            dtypes += DTYPE_CLASSES[word]
        elif word in DTYPE_BY_NAME:
            dtypes.append(DTYPE_BY_NAME[word])
        else:
            dtype_of = word
    known, text = tuple(dict.fromkeys(dtypes)), f"{match['name']}[{match['dims'].strip()}]"
    return Operand(
        match["name"],
        leading,
        tuple(dims),
        bool(match["optional"]),
        known or default,
        dtype_of,
        text,
    )


@cache
def parse_signature(text: str) -> Signature:
    """Parse the text of a signature.

    Raises:
        GraphError: the text is no signature.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise GraphError(f"signature {text!r}: needs -> between operands and results, as x[..., *c] -> [..., c]")
    operands = tuple(_parse_operand(m, FLOAT_DTYPES) for m in _split_into_matches(_OPERAND, left.strip()))
    results = tuple(_parse_operand(m, ()) for m in _split_into_matches(_OPERAND, right.strip()))
    return Signature(operands, results, text)


def merge_dimensions_and_attributes(attrs: Attrs, named: Mapping[str, int]) -> dict[str, int]:
    """Return one mapping of the dimension sizes `named` and the integer attributes, for result shapes that use both."""
    return {**{k: v for k, v in attrs.items() if isinstance(v, int) and not isinstance(v, bool)}, **named}
