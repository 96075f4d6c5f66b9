"""The result entries of an op on some entries of its operands, derived from the op's declaration.

The verifier of plans calls this module for every node of a device. The inputs are the node of the user's graph, the
device's node with its smaller operands, and the entries of these operands. Nothing is taken from the planner.

Example: The user multiplies a weight of 6 rows by 3 vectors of 8. A device with the rows 2 and 3 of the weight
computes the columns 2 and 3 of the product. A device with the columns 0 to 3 of both operands computes all of the
product as a partial sum of 4 of 8 terms.

>>> def held(*runs: tuple[int, int]) -> Axes:
...     return tuple(((run,), ()) for run in runs)
>>> user = Side((), (Spec((6, 8)), Spec((3, 8))), (Spec((3, 6)),))
>>> rows = Side((), (Spec((2, 8)), Spec((3, 8))), (Spec((3, 2)),))
>>> restricted("mul_mat", user, rows, (held((2, 2), (0, 8)), held((0, 3), (0, 8)))).axes
(((((0, 3),), ()), (((2, 2),), ())),)
>>> columns = Side((), (Spec((6, 4)), Spec((3, 4))), (Spec((3, 6)),))
>>> restricted("mul_mat", user, columns, (held((0, 6), (0, 4)), held((0, 3), (0, 4)))).owed.box
(((0, 4),),)
>>> restricted("mul_mat", user, columns, (held((0, 6), (0, 4)), held((0, 3), (4, 4))))
'operands hold different entries of k: [0:4] and [4:8]'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, TypeAlias

from ...graph.attrs import Attr, Attrs
from ...graph.node import Node
from ...graph.spec import Spec
from ...ops import REGISTRY
from ...ops.declaration.axis_links import AxisLink
from ...ops.declaration.op import Op
from ...ops.declaration.signature import Dimension, DimensionRole, LeadingAxes, Signature, SignatureMismatch
from .indices import (
    Digits,
    Index,
    agreed,
    common,
    entries,
    factored,
    index_of,
    is_whole,
    joined,
    length,
    multiplied,
    outer,
    repeats,
    taken,
    whole,
    within,
)
from .summands import Owed, terms

Part: TypeAlias = tuple[Index, Digits]
"""The local entries of an axis, and the digits on which the value does not depend."""
Axes: TypeAlias = tuple[Part, ...]
"""The local entries of all axes of a value."""
Items: TypeAlias = tuple[tuple[str, Attr], ...]
LOCAL_ATTRS = frozenset({"shape", "start", "stop"})
"""Attributes that state a size. If the op declares `localise`, they may differ between a node and its local version."""

PART_ATTRS = frozenset({"first", "total"})
"""Attributes that state the local rows of a lookup table (`ops.movement.sharded_tables`)."""


class Unfit(Exception):  # noqa: N818  (an internal signal; it becomes the text of a fault)
    """The device's node is not the user's node on some of its entries."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two nodes that are compared: its attributes and the specs of its operands and results."""

    attrs: Items
    src: tuple[Spec | None, ...]
    results: tuple[Spec, ...]

    @property
    def settled(self) -> Attrs:
        return dict(self.attrs)


def side(node: Node) -> Side:
    return Side(tuple(node.attrs.items()), tuple(None if s is None else s.spec for s in node.src), node.specs)


@dataclass(frozen=True, slots=True)
class Rows:
    """The local rows of a lookup table.

    The operand `table_operand` has `row_count` rows in the user's graph. The operand `index_operand` names the rows.
    """

    table: str
    numbers: str
    own: Index
    size: int


@dataclass(frozen=True, slots=True)
class Made:
    """The result of a device's node: the entries of each result, the partial sum, and the local rows of a lookup table.

    `table_rows` is None if all rows are local. `is_empty_sum` is set if the contraction has no terms.
    """

    axes: tuple[Axes, ...]
    owed: Owed
    rows: Rows | None = None
    is_empty: bool = False


@lru_cache(maxsize=1 << 15)
def restricted(op: str, user: Side, mine: Side, axes: tuple[Axes | None, ...]) -> Made | str:
    """Return the results of a device's node as entries of the user's results, or why it is not the user's node.

    Args:
        op: Name of the op.
        user: The node of the user's graph.
        mine: The device's node.
        axes: Local entries of each operand; None for a missing operand.
    """
    declared = REGISTRY[op]
    try:
        _same_attrs(declared, user, mine)
        return (_linked if declared.links else _signed)(declared, user, mine, axes)
    except (Unfit, SignatureMismatch) as why:
        pairs = list(zip(user.results, mine.results, strict=True))
        if all(m.size == 0 and len(u.shape) == len(m.shape) for u, m in pairs):  # an empty result is always right
            return Made(tuple(_nothing(u, m) for u, m in pairs), None)
        return str(why)


def _nothing(user: Spec, mine: Spec) -> Axes:
    """Return the entries of a result without elements; its sizes decide them."""
    return tuple((_some(n, m), ()) for n, m in zip(user.shape, mine.shape, strict=True))


def _some(n: int, m: int) -> Index:
    """Return the index of the first `m` entries."""
    return whole(n) if m == n else whole(m)


def _same_attrs(declared: Op[Any], user: Side, mine: Side) -> None:
    """Require equal attributes, except the attributes that may differ for a local version."""
    theirs, local = mine.settled, local_attrs(declared)
    for name, value in user.attrs:
        if name in local or (found := theirs.get(name)) is value:
            continue
        if repr(found) != repr(value):  # as text NaN equals NaN, and 0.0 differs from -0.0
            raise Unfit(f"attribute {name} is {found!r} and not {value!r}")


@cache
def local_attrs(declared: Op[Any]) -> frozenset[str]:
    """Return the names of the attributes that may differ between a node and its local version."""
    sizes = LOCAL_ATTRS if declared.localise is not None else frozenset[str]()
    return sizes | PART_ATTRS if any(s.indexed_dimension for s in declared.signatures.values()) else sizes


# ------------------------------------------------------------------------------------------------------ signatures


@dataclass
class _Names:
    """The local entries of each dimension of a signature, on which all operands agree."""

    named: dict[str, Part] = field(default_factory=dict)
    lead: list[Part] = field(default_factory=list)
    summed: list[Part] = field(default_factory=list)

    def meet(self, name: str, part: Part) -> None:
        """Add an operand's entries of a dimension; all operands must agree."""
        self.named[name] = _met(self.named[name], part, name) if name in self.named else part

    def meet_all(self, kept: list[Part], parts: Sequence[Part]) -> None:
        """Add an operand's entries of its leading axes to `kept`; all operands must agree."""
        for i, part in enumerate(parts):
            if i < len(kept):
                kept[i] = _met(kept[i], part, f"leading axis {i}")
            else:
                kept.append(part)


def _met(one: Part, two: Part, what: str) -> Part:
    """Return the entries on which two operands agree. Raises `RestrictionError` if they differ."""
    index = agreed(*one, *two)
    if index is None:
        raise Unfit(f"operands hold different entries of {what}: {show(one[0])} and {show(two[0])}")
    return index, common(one[1], two[1])


def show(index: Index) -> str:
    """Format an index as text; ranges after the fourth are left out."""
    shown = ", ".join(f"{start}:{start + n}" for start, n in index[:4])
    return f"[{shown}{', …' if len(index) > 4 else ''}]"


def _signed(declared: Op[Any], user: Side, mine: Side, axes: tuple[Axes | None, ...]) -> Made:
    """Infer the results of an op with a signature.

    1. Split the operands' entries into the dimensions of the signature; all operands must agree on each dimension.
    2. Require that coupled dimensions are whole.
    3. Combine the dimensions to the entries of the results, which must have the shapes of the device's results.
    4. Return the contracted dimensions as a partial sum.
    """
    attrs = user.settled
    sizes, local = (
        declared.resolve_sizes(user.src, attrs).by_name,
        declared.resolve_sizes(mine.src, mine.settled).by_name,
    )
    signature = declared.signature_for(attrs)
    kept_whole = declared.unsharded_dimensions(attrs) if declared.unsharded_dimensions else ()
    names, roles = _Names(), dict[str, DimensionRole]()
    for operand, spec, part in zip(signature.operands, user.src, axes, strict=False):
        if spec is None or part is None:
            continue
        ahead = len(spec.shape) - len(operand.dims)
        if operand.leading is LeadingAxes.EQUAL:
            names.meet_all(names.lead, part[:ahead])
        elif operand.leading is LeadingAxes.CONTRACTED:
            names.meet_all(names.summed, part[:ahead])
        for dim, n, own in zip(operand.dims, spec.shape[ahead:], part[ahead:], strict=True):
            if not (dim.may_be_one and n == 1):
                _split(dim, own, sizes, local, names)
                coupled = dim.role is DimensionRole.COUPLED or bool(set(dim.factors) & set(kept_whole))
                for name in dim.factors:
                    roles[name] = DimensionRole.COUPLED if coupled else roles.get(name, dim.role)
    _check_repeats(user, signature.operands, axes, names.lead)
    for name, role in roles.items():
        if role is DimensionRole.COUPLED and not name.isdecimal():
            index, digits = names.named[name]
            if not is_whole(index, digits, sizes[name]):
                raise Unfit(f"{name} must be whole, and only {show(index)} of {sizes[name]} is there")
            names.named[name] = (whole(sizes[name]), ())
    results = tuple(
        (*(names.lead if r.leading is LeadingAxes.EQUAL else ()), *(_product(d, names, sizes, local) for d in r.dims))
        for r in signature.results
    )
    _check_shapes(mine, results)
    rows = _rows(signature, user, mine, names)
    contracted = [(names.named[n][0], sizes[n]) for n, role in roles.items() if role is DimensionRole.CONTRACTED]
    summed = [s.shape for s, o in zip(user.src, signature.operands, strict=False) if s is not None]
    contracted += [(i, n) for (i, _), n in zip(names.summed, summed[0] if summed else (), strict=False)]
    if any(n == 0 for _, n in contracted):
        return Made(results, None, rows, is_empty=True)
    return Made(results, terms(tuple(i for i, _ in contracted), tuple(n for _, n in contracted)), rows)


def _rows(signature: Signature, user: Side, mine: Side, names: _Names) -> Rows | None:
    """Return the local rows of a lookup table; None if all rows are local.

    The entries of the table must be the rows that the device's attributes state.
    """
    if signature.indexed_dimension is None:
        return None
    table, dim = signature.indexed_dimension
    (name,) = dim.factors
    at = signature.operands.index(table)
    spec = user.src[at]
    assert spec is not None
    size, (index, digits) = spec.shape[len(spec.shape) - len(table.dims)], names.named[name]
    said, theirs = (tuple(s.settled[k] for k in ("first", "total")) for s in (mine, user))
    if said == theirs and is_whole(index, digits, size):
        return None
    first, total = said
    assert isinstance(first, int)
    if theirs != (0, 0) or total != size:
        raise Unfit(
            f"rows of {table.name} are looked up as {first} of {total!r}, and in the graph as {theirs[0]!r} of {size}"
        )
    own = joined([((first, length(index)),)]) if index else ()
    if agreed(index, digits, own, ()) is None:
        raise Unfit(f"rows {show(index)} of {table.name} are looked up as {show(own)}")
    return None if own == whole(size) else Rows(table.name, dim.index, own, size)


def _split(dim: Dimension, own: Part, sizes: Mapping[str, int], local: Mapping[str, int], names: _Names) -> None:
    """Add an operand's entries of one dimension to the entries of the dimension's factors."""
    index, digits = own
    theirs = tuple(int(f) if f.isdecimal() else sizes[f] for f in dim.factors)
    here = tuple(int(f) if f.isdecimal() else local.get(f, -1) for f in dim.factors)
    parts = factored(index, theirs, here)
    if parts is None:
        raise Unfit(f"{show(index)} is no product ({' '.join(dim.factors)})")
    inner = math.prod(theirs)
    for name, n, part in zip(dim.factors, theirs, parts, strict=True):
        inner = inner // n if n else 0
        if name.isdecimal():
            if part != whole(n):
                raise Unfit(f"{show(part)} of the fixed {name} is there")
        else:
            names.meet(name, (part, within(digits, inner, n) if inner else ()))


def _product(dim: Dimension, names: _Names, sizes: Mapping[str, int], local: Mapping[str, int]) -> Part:
    """Return a result's entries of one dimension. A factor that no operand has is whole."""
    indices, digits, theirs = [], list[tuple[int, int]](), []
    for name in dim.factors:
        n = int(name) if name.isdecimal() else sizes[name]
        theirs.append(n)
        if not name.isdecimal() and name not in names.named and local.get(name) != n:
            raise Unfit(f"{name} is {local.get(name)} and not {n}")
        indices.append(names.named.get(name, (whole(n), ()))[0])
    for at, name in enumerate(dim.factors):
        digits += outer(names.named.get(name, ((), ()))[1], math.prod(theirs[at + 1 :]))
    return multiplied(tuple(indices), tuple(theirs)), tuple(digits)


def _check_repeats(user: Side, operands: Sequence[Any], axes: Sequence[Axes | None], lead: list[Part]) -> None:
    """Require that tiled or grouped operands meet the same entries of the other operands as in the user's graph."""
    shape: tuple[int, ...] = ()
    for operand, spec in zip(operands, user.src, strict=False):
        if spec is not None and operand.leading is LeadingAxes.EQUAL:
            shape = spec.shape[: len(spec.shape) - len(operand.dims)]
    for operand, spec, part in zip(operands, user.src, axes, strict=False):
        if spec is None or part is None or operand.leading not in (LeadingAxes.TILED, LeadingAxes.GROUPED):
            continue
        ahead = len(spec.shape) - len(operand.dims)
        shift = len(shape) - ahead
        for i in range(ahead):
            n, size = spec.shape[i], shape[shift + i]
            if n == size:
                lead[shift + i] = _met(lead[shift + i], part[i], f"leading axis {shift + i}")
            elif not repeats(*part[i], n, lead[shift + i][0], size, operand.leading is LeadingAxes.TILED):
                raise Unfit(f"{operand.name} holds {show(part[i][0])} of {n}, to be repeated over others than its own")
            elif n != 1:
                lead[shift + i] = (lead[shift + i][0], ())


def _check_shapes(mine: Side, results: Sequence[Axes]) -> None:
    """Require that the device's results have the shapes of these entries."""
    for spec, axes in zip(mine.results, results, strict=True):
        if spec.shape != tuple(length(i) for i, _ in axes):
            raise Unfit(f"the result is {list(spec.shape)}, its entries are {[show(i) for i, _ in axes]}")


# ----------------------------------------------------------------------------------------------------------- links


def _linked(declared: Op[Any], user: Side, mine: Side, axes: tuple[Axes | None, ...]) -> Made:
    """Infer the result of an op that links operand axes to result axes."""
    assert declared.links is not None
    links = declared.links(user.src, user.settled)
    starts = {(m.operand, m.source, m.result): m.start for m in declared.links(mine.src, mine.settled)}
    result, shape = user.results[0], mine.results[0].shape
    if len(shape) != len(result.shape):
        raise Unfit(f"the result is {list(shape)}, a share of {result}")
    parts: dict[int, list[tuple[int, bool, Part]]] = {}
    for link in links:
        part, spec = axes[link.operand], user.src[link.operand]
        assert part is not None
        assert spec is not None
        if len(link.source) == len(link.result) == 1:
            start = starts.get((link.operand, link.source, link.result), 0)
            axis = link.result[0]
            n, own = spec.shape[link.source[0]], part[link.source[0]]
            parts.setdefault(axis, []).append((start, *_moved(link, own, n, result.shape[axis], start, shape[axis])))
        else:
            _regrouped(link, part, spec, user, shape, parts)
    _check_unlinked(links, user, axes)
    axes_here = tuple(_collected(parts.get(a), n, shape[a], declared.is_view) for a, n in enumerate(result.shape))
    _check_shapes(mine, [axes_here])
    return Made((axes_here,), None)


def _moved(link: AxisLink, own: Part, n: int, size: int, start: int, here: int) -> tuple[bool, Part]:
    """Map the entries of one linked axis.

    Returns:
        True and the entries if the operand axis is a part of the result axis; else False and the entries.
    """
    index, digits = own
    if n < size:
        return True, (joined([tuple((first + link.start, k) for first, k in index)]), ())
    piece = taken(index, start, start + here, link.start)
    if any(first < 0 or first + k > size for first, k in piece):
        raise Unfit(f"entries {show(taken(index, start, start + here))} lie outside {link.start}:{link.start + size}")
    return False, (piece, digits if n == size else ((1, size),) if digits == ((1, n),) else ())


def _regrouped(
    link: AxisLink, part: Axes, spec: Spec, user: Side, shape: tuple[int, ...], collected: dict[int, list[Any]]
) -> None:
    """Map the entries of axes that a reshape combines or splits, and add them to `collected`."""
    sizes = tuple(spec.shape[a] for a in link.source)
    after = tuple(user.results[0].shape[a] for a in link.result)
    flat = multiplied(tuple(part[a][0] for a in link.source), sizes)
    parts = factored(flat, after, tuple(shape[a] for a in link.result))
    if parts is None:
        raise Unfit(f"{show(flat)} is not {list(after)} cut along axes")
    digits: Digits = ()
    for i, a in enumerate(link.source):
        digits += outer(part[a][1], math.prod(sizes[i + 1 :]))
    for i, a in enumerate(link.result):
        collected[a] = [(0, False, (parts[i], within(digits, math.prod(after[i + 1 :]), after[i])))]


def _check_unlinked(links: Sequence[AxisLink], user: Side, axes: Sequence[Axes | None]) -> None:
    """Require that operand axes without a link are whole."""
    linked = {(m.operand, a) for m in links for a in m.source}
    for operand, (spec, part) in enumerate(zip(user.src, axes, strict=True)):
        for a, n in enumerate(spec.shape if spec is not None else ()):
            if (operand, a) not in linked and part is not None and not is_whole(*part[a], n):
                raise Unfit(f"axis {a} must be whole, and only {show(part[a][0])} of {n} is there")


def _collected(parts: Sequence[tuple[int, bool, Part]] | None, n: int, here: int, is_view: bool) -> Part:
    """Return the entries of one result axis from the entries of all its links."""
    if not parts:
        if not is_view and here != n:
            raise Unfit(f"an axis of the result is {here} of {n} long, and must be whole")
        return _some(n, here), ((1, n),) if is_view and n > 1 else ()
    if not any(inside for _, inside, _ in parts):
        met = parts[0][2]
        for _, _, part in parts[1:]:
            met = _met(met, part, "an axis")
        return met
    at, indices = 0, []
    for start, _, (index, _) in sorted(parts, key=lambda p: p[0]):
        if start != at:
            raise Unfit(f"a part begins at {start} and not at {at}")
        at += length(index)
        indices.append(index)
    return joined(indices), ()


def moved(axes: Axes, axis: int, index: Index) -> Axes:
    """Return `axes` with another index on one axis."""
    return (*axes[:axis], (index, axes[axis][1]), *axes[axis + 1 :])


def at_positions(index: Index, positions: Index) -> Index:
    """Return the entries of `index` at these positions."""
    if len(positions) == 1:
        return taken(index, positions[0][0], sum(positions[0]))
    return index_of(entries(index)[entries(positions)])
