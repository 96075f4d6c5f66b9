"""More cases of an op, grown from the samples in its declaration.

An `OpCall` has the operand specs and the attributes of one call, by name. Each sample is a legal call. Each change of
one property gives another call if the op accepts it. The properties are a dimension, the leading axes, a dtype, an
attribute and an optional operand. The algorithm knows no op by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias
from zlib import crc32

import numpy as np

from ...graph.attrs import Attr
from ...graph.dtypes import DType
from ...graph.errors import GraphError
from ...graph.parse import parse_case
from ...graph.spec import Spec, check_spec
from ...graph.validation import describe_exception, format_value
from ...ops import Op
from ...ops.declaration.signature import DimensionRole, DimensionSizes, LeadingAxesBroadcast, Operand, SignatureMismatch
from .case import Case, make_case

OpCall: TypeAlias = Mapping[str, "Spec | Attr"]
"""Operand specs and attributes of one call of an op, by name."""

DIMENSION_SIZES = (1, 2, 3, 5, 8, 17, 31, 64, 67, 130, 256, 513, 1031, 4099)
"""Sizes of a named dimension: one, primes, powers of two and their neighbours."""
LEADING_AXES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (4,), (2, 3), (1, 7), (6, 1), (2, 1, 3))
"""Leading axes of grown calls."""
ELEMENTWISE: tuple[tuple[int, ...], ...] = (
    *((), (1,), (2,), (7,), (31,), (64,), (129,), (1031,), (5, 1), (1, 130), (17, 67), (257, 33), (4, 256)),
    *((2, 3, 5), (1, 1, 7), (3, 1, 64), (2, 3, 4, 5), (1, 5, 1, 9), (2, 3, 2, 3, 4), (4, 6, 8)),
)
"""Leading axes of grown calls of elementwise ops, which have no other axes."""
ROWS = 4099
"""A prime row count above every tile and thread block, so that a fault may affect one row only."""
MAX_ELEMENTS = 1 << 18
"""Maximum elements of an operand or a result."""
LONG_AXIS = MAX_ELEMENTS
"""Entries of the longest axis, as in test-backend-ops of ggml: a row of it needs several passes of any thread block."""
FEW_ELEMENTS = 1 << 13
"""Maximum elements of an operand for which every layout and metamorphic check is tested.

Operands of grown calls have at most four times as many.
"""
MAX_TOKENS = 600
"""Maximum tokens, since a recurrence processes them one by one."""
MAX_GROWN_CALLS = 160
"""Maximum cases of an op beyond its samples."""
MIXED_CALLS = 6
"""Calls per sample in which all dimensions change at once."""
MAX_BASE_SAMPLES = 12
"""Maximum samples of an op from which further calls are grown."""


def grow_cases_from_samples(op: Op) -> tuple[Case, ...]:
    """Return the samples of `op` as cases, then at most `MAX_GROWN_CALLS` distinct cases that are grown from them.

    Raises:
        GraphError: a sample is no legal call of the op.
    """
    bases = [_parse_sample(op, text) for text in op.samples]
    samples = dict.fromkeys(make_case(op, call) for call in bases)
    grown: dict[Case, None] = {}
    for call in _select_evenly_spaced(bases, MAX_BASE_SAMPLES):
        grown.update((make_case(op, p), None) for p in _vary_property_or_all_dimensions(op, call, bases))
    first = next((call for call in bases if not make_case(op, call).has_empty_operand), bases[0]) if bases else {}
    for step in list(_vary_leading_axes_and_broadcasts(op, first)):
        grown.update((make_case(op, p), None) for p in _vary_dtype_of_one_or_all(op, step))
    tall = next((make_case(op, p) for p in map(partial(_enlarge_to_many_rows, op), bases) if p is not None), None)
    long = next((make_case(op, p) for p in map(partial(_enlarge_to_long_axis, op), bases) if p is not None), None)
    chosen = {**samples, **{case: None for case in (tall, long) if case is not None}}
    for case in _order_by_novelty([c for c in grown if c not in chosen]):
        if len(chosen) >= len(samples) + MAX_GROWN_CALLS:
            break
        chosen[case] = None
    return tuple(chosen)


def _parse_sample(op: Op, text: str) -> OpCall:
    """Parse the text of a sample to the operand specs and attributes of its call.

    Raises:
        GraphError: the sample is no legal call of the op.
    """
    try:
        call = parse_case(text)
        make_case(op, call)
        attrs = op.normalise_attributes({k: v for k, v in call.items() if not isinstance(v, Spec)})
        op.infer_results([_spec(call, o.name) for o in op.signature_for(attrs).operands], attrs)
    except Exception as why:  # samples and functions of another package may raise anything
        reason = str(why) if isinstance(why, SignatureMismatch) else describe_exception(why)
        raise GraphError(f"sample {format_value(text)}: {reason}") from None
    return call


def _select_evenly_spaced(items: Sequence[OpCall], limit: int) -> Sequence[OpCall]:
    """Select at most `limit` of the items, evenly spaced."""
    step = max(1.0, len(items) / limit)
    return [items[int(i * step)] for i in range(min(len(items), limit))]


def _order_by_novelty(cases: Sequence[Case]) -> Iterator[Case]:
    """Yield all cases: first each case with a new dtype, attribute or size, then the rest in a fixed shuffled order.

    Empty cases come last in each part, because they hardly test a dtype.
    """
    shuffled = sorted(cases, key=lambda c: (c.has_empty_operand, crc32(c.text_without_seed.encode())))
    seen: set[object] = set()
    later = []
    for case in shuffled:
        traits: set[object] = {(k, s.dtype) for k, s in case.operands} | {(k, repr(v)) for k, v in case.attrs}
        traits |= {(k, axis - len(s.shape), n) for k, s in case.operands for axis, n in enumerate(s.shape)}
        traits |= {(k, len(s.shape)) for k, s in case.operands} | {tuple(k for k, _ in case.operands)}
        if traits <= seen:
            later.append(case)
        else:
            seen |= traits
            yield case
    yield from later


def _vary_property_or_all_dimensions(op: Op, call: OpCall, bases: Sequence[OpCall]) -> Iterator[OpCall]:
    """Yield variants of the sample `call`: one property changed, or all dimensions changed at once.

    `bases` are all sample calls of `op`; they supply values of attributes.
    """
    yield from _vary_one_dimension(op, call)
    yield from _randomise_all_dimensions_at_once(op, call)
    yield from _vary_leading_axes_and_broadcasts(op, call)
    yield from _vary_dtype_of_one_or_all(op, call)
    yield from _vary_attributes(op, call, bases)
    yield from _drop_one_optional_operand(op, call)


def is_legal_call(op: Op, call: OpCall, max_elements: int = MAX_ELEMENTS) -> bool:
    """Return whether `op` accepts the operand specs and attributes of a call, and the call is small enough.

    No operand or result may have more than `max_elements` elements.
    """
    specs = [call.get(name) for name in op.operand_names]
    while specs and specs[-1] is None:
        specs.pop()
    if any(isinstance(s, Spec) and (check_spec(s) or s.size > max_elements) for s in specs):
        return False
    try:
        attrs = op.normalise_attributes({k: v for k, v in call.items() if not isinstance(v, Spec)})
        results = op.infer_results(specs, attrs)  # type: ignore[arg-type]  # None stands for an operand left out
        return all(s.size <= max_elements for s in results) and _has_enough_rows_to_index(op, call, attrs)
    except (SignatureMismatch, GraphError, TypeError, ValueError, KeyError, ZeroDivisionError):
        return False


def _has_enough_rows_to_index(op: Op, call: OpCall, attrs: Mapping[str, Attr]) -> bool:
    """Return whether each table of a call has enough rows for the distinct row numbers in its index operand."""
    signature = op.signature_for(attrs)
    sizes = op.resolve_sizes([_spec(call, o.name) for o in signature.operands], attrs).by_name
    for name, legal_values in op.ranges.items():
        spec = _spec(call, name)
        if isinstance(legal_values.high, str) and spec is not None and spec.size:
            rows = sizes.get(legal_values.high, 0)
            axes = count_axes_with_distinct_ids(op, attrs, name)
            if rows < math.prod(spec.shape[len(spec.shape) - axes :]):
                return False
    return True


def count_axes_with_distinct_ids(op: Op, attrs: Mapping[str, Attr], name: str) -> int:
    """Count the last axes of index operand `name` along which no row number may repeat; 0 if they may repeat.

    These are the named axes of the operand. Each index of a leading axis has its own set of row numbers.
    """
    if name not in op.ranges or not op.ranges[name].distinct:
        return 0
    return next(len(o.dims) for o in op.signature_for(attrs).operands if o.name == name)


def _spec(call: OpCall, name: str) -> Spec | None:
    part = call.get(name)
    return part if isinstance(part, Spec) else None


def resolve_call_sizes(op: Op, call: OpCall) -> tuple[Mapping[str, Attr], DimensionSizes, Sequence[Operand]] | None:
    """Return attributes with defaults, dimension sizes and operand signatures of a call; None for an illegal call."""
    try:
        attrs = op.normalise_attributes({k: v for k, v in call.items() if not isinstance(v, Spec)})
        signature = op.signature_for(attrs)
        return attrs, signature.resolve_sizes([_spec(call, o.name) for o in signature.operands]), signature.operands
    except SignatureMismatch:
        return None


def resize_call(
    op: Op, call: OpCall, new_sizes: Mapping[str, int], leading: tuple[int, ...], broadcast: str = "keep"
) -> OpCall:
    """Return the operand specs and attributes of a call with other dimension sizes and other leading axes.

    Args:
        op: the op of the call.
        call: the call to change.
        new_sizes: new sizes of all dimensions by name.
        leading: new leading axes.
        broadcast: leading axes of operands that broadcast: ``keep`` theirs, ``whole`` (no broadcast), ``none``,
            ``one`` (axes of size 1), ``last`` (the last axis only) or ``part`` (divisors of the sizes).
    """
    known = resolve_call_sizes(op, call)
    assert known is not None
    changed: dict[str, Spec | Attr] = dict(call)
    for operand in known[2]:
        spec = _spec(call, operand.name)
        if spec is None:
            continue
        axes = [
            1 if d.may_be_one and n == 1 else math.prod(int(f) if f.isdecimal() else new_sizes[f] for f in d.factors)
            for d, n in zip(operand.dims, spec.shape[len(spec.shape) - len(operand.dims) :], strict=True)
        ]
        ahead = spec.shape[: len(spec.shape) - len(operand.dims)]
        shape = (*_choose_leading_axes(operand, ahead, known[1].leading, leading, broadcast), *axes)
        changed[operand.name] = Spec(shape, spec.dtype)
    return changed


def _choose_leading_axes(
    operand: Operand, mine: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...], broadcast: str
) -> tuple[int, ...]:
    """Return the new leading axes of one operand; `broadcast` is explained in `resize_call`."""
    if operand.leading is LeadingAxesBroadcast.NONE:
        return ()
    if operand.leading in (LeadingAxesBroadcast.EQUAL, LeadingAxesBroadcast.CONTRACTED):
        return new
    match broadcast:
        case "whole":
            return new
        case "none":
            return ()
        case "one":
            return (1,) * len(new)
        case "last":
            return new[-1:]
        case "part":  # a divisor, so that index modulo size differs from both size 1 and the whole
            return tuple(next((n // f for f in (2, 3, 5) if n % f == 0 and n > f), n) for n in new)
    if old == new:
        return mine
    return mine if all(n % m == 0 for n, m in zip(new[::-1], mine[::-1], strict=False) if m) else ()


def _vary_one_dimension(op: Op, call: OpCall) -> Iterator[OpCall]:
    """Yield variants of a call in which one named dimension has another size."""
    known = resolve_call_sizes(op, call)
    if known is None:
        return
    named, leading, coupled = dict(known[1].by_name), known[1].leading, find_dimensions_avoiding_size_two(known[2])
    for name in named:
        for size in (*DIMENSION_SIZES, 0):
            if (name == op.sequential and size > MAX_TOKENS) or (size == 2 and name in coupled):
                continue
            for unit in _compute_whole_block_unit(known[2], call, name):
                grown = resize_call(op, call, {**named, name: -(-size // unit) * unit}, leading)
                if is_legal_call(op, grown) and _count_elements_of_largest_operand(grown) <= FEW_ELEMENTS * 4:
                    yield grown


def find_dimensions_avoiding_size_two(operands: Sequence[Operand]) -> set[str]:
    """Return the dimensions that must not get size 2 unless a sample has it: the coupled ones.

    In a coupled dimension, each result element depends on all entries. Two numbers minus their mean are equal except
    for the sign. A norm of them then shows the rounding of the mean, which no perturbation of the operands explains.
    """
    return {f for o in operands for d in o.dims if d.role is DimensionRole.COUPLED for f in d.factors}


def _randomise_all_dimensions_at_once(op: Op, call: OpCall) -> Iterator[OpCall]:
    """Yield variants of a call in which all dimensions and the leading axes change at once, to random sizes."""
    known = resolve_call_sizes(op, call)
    if known is None:
        return
    rng, coupled = (
        np.random.default_rng(crc32(repr(sorted(call)).encode())),
        find_dimensions_avoiding_size_two(known[2]),
    )
    for _ in range(MIXED_CALLS):
        named = {}
        for name in known[1].by_name:
            (unit,) = _compute_whole_block_unit(known[2], call, name)
            size = int(rng.choice((1, 3, 5, 7, 8, 13, 33) if name in coupled else (1, 2, 3, 5, 7, 8, 13, 33)))
            named[name] = -(-size // unit) * unit
        leading = LEADING_AXES[rng.integers(len(LEADING_AXES))]
        grown = resize_call(op, call, named, leading)
        if is_legal_call(op, grown) and _count_elements_of_largest_operand(grown) <= FEW_ELEMENTS * 4:
            yield grown


def _compute_whole_block_unit(operands: Sequence[Operand], call: OpCall, name: str) -> tuple[int, ...]:
    """Return the unit in which the size of dimension `name` may change, so that quantisation blocks stay whole.

    Returns:
        A tuple with one unit: the least common multiple of the block sizes along the dimension.
    """
    unit = 1
    for operand in operands:
        spec = _spec(call, operand.name)
        if spec is not None and operand.dims and operand.dims[-1].factors == (name,):
            unit = math.lcm(unit, spec.dtype.block)
    return (unit,)


def _count_elements_of_largest_operand(call: OpCall) -> int:
    """Return the element count of the largest operand of a call."""
    return max((s.size for s in call.values() if isinstance(s, Spec)), default=0)


def _vary_leading_axes_and_broadcasts(op: Op, call: OpCall) -> Iterator[OpCall]:
    """Yield variants of a call with other leading axes, and with other broadcasts of the operands over them."""
    known = resolve_call_sizes(op, call)
    if known is None or all(o.leading is LeadingAxesBroadcast.NONE for o in known[2]):
        return
    elementwise = not any(o.dims for o in known[2])
    repeats = any(o.leading in (LeadingAxesBroadcast.TILED, LeadingAxesBroadcast.GROUPED) for o in known[2])
    for leading in ELEMENTWISE if elementwise else LEADING_AXES:
        for broadcast in ("keep", "whole", "none", "one", "last", "part") if repeats else ("keep",):
            grown = resize_call(op, call, known[1].by_name, leading, broadcast)
            if is_legal_call(op, grown) and _count_elements_of_largest_operand(grown) <= FEW_ELEMENTS * 4:
                yield grown


def _vary_dtype_of_one_or_all(op: Op, call: OpCall) -> Iterator[OpCall]:
    """Yield variants of a call with other dtypes: of one operand, or one dtype for all operands that allow it."""
    known = resolve_call_sizes(op, call)
    if known is None:
        return
    present = [o for o in known[2] if _spec(call, o.name) is not None]
    for operand in present:
        for dtype in operand.dtypes:
            yield from _change_operand_dtypes(op, call, [operand], dtype)
    for dtype in dict.fromkeys(d for o in present for d in o.dtypes):
        group = [o for o in present if dtype in o.dtypes]
        if len(group) > 1:
            yield from _change_operand_dtypes(op, call, group, dtype)


def _change_operand_dtypes(op: Op, call: OpCall, group: Sequence[Operand], dtype: DType) -> Iterator[OpCall]:
    """Yield the call with the operands of `group` in `dtype`, if it is legal.

    Rows grow to whole quantisation blocks of `dtype`.
    """
    changed: dict[str, Spec | Attr] = dict(call)
    for operand in group:
        spec = _spec(call, operand.name)
        assert spec is not None
        changed[operand.name] = Spec(spec.shape, dtype)
    if is_legal_call(op, changed):
        yield changed
        return
    known = resolve_call_sizes(op, call)
    last = group[0].dims[-1].factors if group[0].dims else ()
    if known is None or len(last) != 1 or dtype.block == 1:
        return
    named = {
        **known[1].by_name,
        last[0]: max(dtype.block, -(-known[1].by_name.get(last[0], 1) // dtype.block) * dtype.block),
    }
    wide = resize_call(op, call, named, known[1].leading)
    wide = {**wide, **{o.name: Spec(wide[o.name].shape, dtype) for o in group}}  # type: ignore[union-attr]  # those of a group are present
    if is_legal_call(op, wide):
        yield wide


def _vary_attributes(op: Op, call: OpCall, bases: Sequence[OpCall]) -> Iterator[OpCall]:
    """Yield variants of a call with each attribute at every value that occurs in the samples, and at its default."""
    for name in (*op.required_attributes, *op.defaults):
        values = [b[name] for b in bases if name in b]
        values += [op.defaults[name]] if name in op.defaults else []
        if any(isinstance(v, bool) for v in values):
            values += [True, False]
        for value in dict.fromkeys(values):
            changed = {**call, name: value}
            if is_legal_call(op, changed):
                yield changed


def _drop_one_optional_operand(op: Op, call: OpCall) -> Iterator[OpCall]:
    """Yield variants of a call that lack one optional operand."""
    known = resolve_call_sizes(op, call)
    for operand in known[2] if known else ():
        if operand.optional and operand.name in call:
            changed = {k: v for k, v in call.items() if k != operand.name}
            if is_legal_call(op, changed):
                yield changed


def _enlarge_to_long_axis(op: Op, call: OpCall) -> OpCall | None:
    """Return a variant of a call in which the last axis of the first operand has `LONG_AXIS` entries.

    All other dimensions are 1 or, if that is illegal, unchanged. The result is None if neither is legal, and for
    recurrences, which take minutes for one.
    """
    known = resolve_call_sizes(op, call)
    if known is None or op.sequential or 0 in known[1].leading or 0 in known[1].by_name.values():
        return None
    last = known[2][0].dims[-1].factors[-1:] if known[2] and known[2][0].dims else ()
    sizes = known[1].by_name
    long = {name: LONG_AXIS for name in last if name in sizes}
    leading = () if long else (LONG_AXIS,)
    for rest in (dict.fromkeys(sizes, 1), sizes):
        grown = resize_call(op, call, {**rest, **long}, leading, "whole")
        if is_legal_call(op, grown) and _count_elements_of_largest_operand(grown) >= LONG_AXIS:
            return grown
    return None


def _enlarge_to_many_rows(op: Op, call: OpCall) -> OpCall | None:
    """Return a variant of a call with `ROWS` rows along its leading axes; None if it is illegal or too large."""
    known = resolve_call_sizes(op, call)
    if known is None or 0 in known[1].leading or 0 in known[1].by_name.values():
        return None
    for leading in ((ROWS, 3), (ROWS,), (*known[1].leading[:-1], ROWS)):
        for broadcast in ("whole", "none"):
            grown = resize_call(op, call, known[1].by_name, leading, broadcast)
            if is_legal_call(op, grown) and _count_elements_of_largest_operand(grown) >= ROWS:
                return grown
    return None
