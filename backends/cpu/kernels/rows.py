"""Elementwise kernels over rows. Operands have any strides; the last axis is dense, or one number per row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import MappingProxyType

from ....graph.dtypes import DType
from ....ops.declaration.attributes import float_attribute
from ...base import contiguous_strides
from ...operands import Bound, Operand, float_bits
from ..compiler import Kernel, Part, kernel, part
from ..pieces import pieces_of
from ..simd.shorts import store_some_bf16, store_some_half
from ..simd.vectors import (
    LANES,
    load,
    load_apart,
    load_some,
    mul_int,
    numbers_from,
    splat,
    splat_from,
    splat_int,
    store,
    store_some,
    where_nonzero,
    word,
)
from ..steps import Binding, Share, Steps
from ..words import Words, words
from .functions import BINARY, COMPARISONS, GATED, UNARY, affine, clamp, clamp_from_0, clamp_to_0, leaky
from .packing import share

HEAD = 4
"""Words of a walk before its operands: elements of a row, and three counts of rows, outer first."""
OPERAND = 5
"""Words of an operand: address, bytes from row to row along three axes, bytes from element to element."""
ELEMENTS = slice(HEAD + OPERAND - 1, None, OPERAND)
"""The words of a walk that hold the bytes from element to element of each operand."""


def row_words(operands: str, more: str = "") -> Words:
    """Make the words of a kernel over rows: `walk` (`make_row_walk`) and `more`.

    The kernel reads ``ARGS.columns(a)`` and ``ARGS.rows(a)``. For an operand x it reads ``ARGS.x(a, i)``, the address
    of row i, and ``ARGS.x_step(a)``, the bytes from element to element.
    """
    names = operands.split()
    parts = {"columns": columns, "rows": rows}
    for index, name in enumerate(names):
        parts |= {name: _row(HEAD + OPERAND * index), f"{name}_step": _element(HEAD + OPERAND * index)}
    return words(f"walk[{HEAD + OPERAND * len(names)}] {more}", parts)


@part
def columns(a):
    return word(a, 0)


@part
def rows(a):
    return word(a, 1) * word(a, 2) * word(a, 3)


def _row(at: int) -> Part:
    """Make ``(a, i)``: the address of row `i` of the operand with its words from `at` on."""

    def row(a, i):
        outer, inner = word(a, 2), word(a, 3)
        base = word(a, at)
        if word(a, 1) * outer == 1:
            return base + i * word(a, at + 3)
        rest = i // inner
        return base + rest // outer * word(a, at + 1) + rest % outer * word(a, at + 2) + i % inner * word(a, at + 3)

    return part(row)


def _element(at: int) -> Part:
    """Make ``(a)``: the bytes from element to element of the operand with its words from `at` on."""

    def step(a):
        return word(a, at + OPERAND - 1)

    return part(step)


@part
def lanes(p, c, n, step):
    """Load up to 16 elements of a row from column `c` of `n`; broadcast its one element if `step` is 0."""
    if step == 0:
        return splat_from(p)
    if n - c >= LANES:
        return load(p + 4 * c)
    return load_some(p + 4 * c, n - c)


@part
def put(p, c, n, value):
    """Store up to 16 elements of a row from column `c` of `n`."""
    if n - c >= LANES:
        store(p + 4 * c, value)
    else:
        store_some(p + 4 * c, value, n - c)


@part
def put_half(p, c, n, value):
    store_some_half(p + 2 * c, value, n - c)


@part
def put_bf16(p, c, n, value):
    store_some_bf16(p + 2 * c, value, n - c)


STORES: Mapping[DType, Part] = MappingProxyType({DType.F32: put, DType.F16: put_half, DType.BF16: put_bf16})
"""Functions that store up to 16 elements from column `c` of `n`, rounded to each type."""


UNARY_WORDS = row_words("x y")


@cache
def unary(name: str) -> Kernel:
    """Make the kernel ``y = f(x)`` for one of `UNARY`."""
    function = UNARY[name]

    def body(a, thread, threads):
        n = UNARY_WORDS.columns(a)
        lo, hi = share(UNARY_WORDS.rows(a), thread, threads)
        for i in range(lo, hi):
            x, y = UNARY_WORDS.x(a, i), UNARY_WORDS.y(a, i)
            for c in range(0, n, LANES):
                put(y, c, n, function(lanes(x, c, n, 4)))
        return 0

    return Kernel(f"rows.unary.{name}", body)


@kernel
def collect(a, thread, threads):
    """Copy strided elements to dense rows."""
    n, apart = UNARY_WORDS.columns(a), splat_int(UNARY_WORDS.x_step(a))
    lo, hi = share(UNARY_WORDS.rows(a), thread, threads)
    for i in range(lo, hi):
        x, y = UNARY_WORDS.x(a, i), UNARY_WORDS.y(a, i)
        for c in range(0, n, LANES):
            put(y, c, n, load_apart(x, mul_int(numbers_from(c, n), apart)))
    return 0


BINARY_WORDS = row_words("x z y")


@cache
def binary(name: str) -> Kernel:
    """Make the kernel ``y = f(x, z)`` for one of `BINARY`."""
    function = BINARY[name]

    def body(a, thread, threads):
        n, first, second = BINARY_WORDS.columns(a), BINARY_WORDS.x_step(a), BINARY_WORDS.z_step(a)
        lo, hi = share(BINARY_WORDS.rows(a), thread, threads)
        for i in range(lo, hi):
            x, z, y = BINARY_WORDS.x(a, i), BINARY_WORDS.z(a, i), BINARY_WORDS.y(a, i)
            for c in range(0, n, LANES):
                put(y, c, n, function(lanes(x, c, n, first), lanes(z, c, n, second)))
        return 0

    return Kernel(f"rows.binary.{name}", body)


WITH_NUMBERS = {
    **{"scale": affine, "leaky_relu": leaky},
    **{"clamp": clamp, "clamp_from_0": clamp_from_0, "clamp_to_0": clamp_to_0},
}


NUMBERS_WORDS = row_words("x y", "first:f32 second:f32")


@cache
def with_numbers(name: str) -> Kernel:
    """Make the kernel ``y = f(x, first, second)`` with two numbers, for one of `NUMBER_FUNCTIONS`."""
    function = WITH_NUMBERS[name]

    def body(a, thread, threads):
        n, first, second = NUMBERS_WORDS.columns(a), NUMBERS_WORDS.first(a), NUMBERS_WORDS.second(a)
        lo, hi = share(NUMBERS_WORDS.rows(a), thread, threads)
        for i in range(lo, hi):
            x, y = NUMBERS_WORDS.x(a, i), NUMBERS_WORDS.y(a, i)
            for c in range(0, n, LANES):
                put(y, c, n, function(lanes(x, c, n, 4), first, second))
        return 0

    return Kernel(f"rows.with_numbers.{name}", body)


CHOICE_WORDS = row_words("t x z y")


@kernel
def choose(a, thread, threads):
    """Compute ``t != 0 ? x : z``. Each operand may be one number for the whole row."""
    n, t_step = CHOICE_WORDS.columns(a), CHOICE_WORDS.t_step(a)
    x_step, z_step = CHOICE_WORDS.x_step(a), CHOICE_WORDS.z_step(a)
    lo, hi = share(CHOICE_WORDS.rows(a), thread, threads)
    for i in range(lo, hi):
        t, x, z, y = CHOICE_WORDS.t(a, i), CHOICE_WORDS.x(a, i), CHOICE_WORDS.z(a, i), CHOICE_WORDS.y(a, i)
        for c in range(0, n, LANES):
            chosen = where_nonzero(lanes(t, c, n, t_step), lanes(x, c, n, x_step), lanes(z, c, n, z_step))
            put(y, c, n, chosen)
    return 0


FILL_WORDS = row_words("y", "value:f32")


@kernel
def fill(a, thread, threads):
    """Fill y with one number."""
    n, value = FILL_WORDS.columns(a), splat(FILL_WORDS.value(a))
    lo, hi = share(FILL_WORDS.rows(a), thread, threads)
    for i in range(lo, hi):
        for c in range(0, n, LANES):
            put(FILL_WORDS.y(a, i), c, n, value)
    return 0


LONGEST = 2048
"""Largest length of the rows into which a longer run is cut, so that threads have rows to share."""


def rows_of(
    shape: Sequence[int], operands: Sequence[Operand], *, whole_rows: bool = False, apart: bool = False
) -> list[int] | None:
    """Make the walk (`make_row_args`) through `operands`, broadcast to `shape`; None if it is impossible.

    Axes that all operands can merge become one; `whole_rows` keeps the last one. `apart` allows strided elements.
    """
    if any(n not in (1, m) for o in operands for n, m in zip(reversed(o.shape), reversed(shape), strict=False)):
        return None  # a repeated operand
    strides = [broadcast_strides(o, shape) for o in operands]
    axes = [(n, *steps) for n, *steps in zip(shape, *strides, strict=True) if n != 1]
    last = [(shape[-1] if shape else 1, *(s[-1] if s else 0 for s in strides))] if whole_rows else []
    if whole_rows and axes and shape[-1] != 1:
        axes.pop()
    merged = [*axes[:1]]
    for n, *steps in axes[1:]:
        before = merged[-1]
        if all(was == n * now for was, now in zip(before[1:], steps, strict=True)):
            merged[-1] = (before[0] * n, *steps)
        else:
            merged.append((n, *steps))
    if not whole_rows:
        last = [merged.pop() if merged else (1, *(1 for _ in operands))]
    (n, *steps) = last[0]
    if not apart and any(s not in (0, 1) for s in steps) and n > 1:
        return None
    if not merged and not whole_rows and n > LONGEST:
        piece = max(p for p in range(1, LONGEST + 1) if n % p == 0)
        merged, n = [(n // piece, *(s * piece for s in steps))], piece
    if len(merged) > 3:
        return None
    while len(merged) < 3:
        merged.insert(0, (1, *(0 for _ in operands)))
    walk = [n, *(axis[0] for axis in merged)]
    for k, operand in enumerate(operands):
        step = 4 * steps[k] if n > 1 else 4
        walk += [operand.address, *(4 * axis[k + 1] for axis in merged), step]
    return walk


def broadcast_strides(operand: Operand, shape: Sequence[int]) -> list[int]:
    """Return the strides in elements of `operand` broadcast to `shape`: 0 where it is repeated."""
    missing = len(shape) - len(operand.shape)
    own = [0 if n == 1 else s for n, s in zip(operand.shape, operand.strides, strict=True)]
    return [0] * missing + own


Numbered = tuple[Kernel, Words, Mapping[str, int]]
"""A kernel of this file, its words, and the values of the words behind the walk."""


def add_rows(steps: Steps, of: Numbered, sources: Sequence[Operand], out: Operand) -> bool:
    """Add the step of a kernel, after gathering strided operands; False if it cannot walk the operands."""
    whole = _share(of, sources, out)
    if whole is None:
        dense = [_room(steps, o, k) for k, o in enumerate(sources)]
        if _share(of, dense, out) is None:
            return False
        for source, to in zip(sources, dense, strict=True):
            if to is not source:
                _collect(steps, source, to)
        return add_rows(steps, of, dense, out)
    if (pieces := pieces_of(steps, sources, out)) is not None:
        cut = zip(*(pieces.of(o) for o in (*sources, out)), strict=True)
        parts = [None if None in each else _share(of, each[:-1], each[-1]) for each in cut]
        if all(
            part is not None for part, (first, last) in zip(parts, pairwise(pieces.ends), strict=True) if first < last
        ):
            steps.deal_columns(of[0], parts, out, pieces.bounds)
            return True
    steps.add(of[0], whole.words, reads=sources, writes=[out])
    return True


def _room(steps: Steps, x: Operand, number: int) -> Operand:
    """Return scratch for a dense copy of `x` if its elements are strided and can be gathered; else return `x`."""
    if not x.shape or x.shape[-1] == 1 or x.strides[-1] in (0, 1):
        return x
    nbytes = x.tensor.spec.nbytes
    memory = steps.scratch(f"collected {number} {nbytes}", nbytes)
    tensor = replace(memory.tensor, shape=x.shape, strides=contiguous_strides(x.shape), dtype=x.dtype)
    to = Operand(memory.address, tensor)
    return to if can_copy(x, to) else x


def _gathering(x: Operand, to: Operand) -> list[int] | None:
    """Return the walk of `collect`, or None."""
    if not (x.is_float and to.is_float and to.tensor.spec.size):
        return None
    walk = rows_of(to.shape, [x, to], apart=True)
    if walk is None or walk[-1] != 4:
        walk = rows_of(to.shape, [x, to], whole_rows=True, apart=True)
    return None if walk is None or walk[-1] != 4 else walk


def can_copy(x: Operand, to: Operand) -> bool:
    """Return whether `add_unary` can copy `x` to `to`."""
    return _gathering(x, to) is not None


def _collect(steps: Steps, x: Operand, to: Operand) -> bool:
    """Add the step that copies strided elements; False if there is no walk."""
    walk = _gathering(x, to)
    if walk is None:
        return False
    steps.add(collect, UNARY_WORDS(walk=walk), reads=[x], writes=[to])
    return True


def whole_rows(steps: Steps, x: Operand, y: Operand) -> tuple[list[int], Operand] | None:
    """Return the walk through whole rows of `x` and `y`, and the walked `x`; None if it is impossible.

    If `x` is strided, this adds a step that gathers it.
    """
    for source in (x, _room(steps, x, 0)):
        walk = rows_of(x.shape, [source, y], whole_rows=True) if x.is_float and x.shape else None
        if walk is not None and walk[ELEMENTS][0] == 4:
            if source is not x:
                _collect(steps, x, source)
            return walk, source
    return None


def _share(of: Numbered, sources: Sequence[Operand], out: Operand) -> Share | None:
    """Return the words for a kernel; None if it cannot walk the operands or if they are empty."""
    operands = [*sources, out]
    if not all(o.is_float for o in operands) or not out.tensor.spec.size:
        return None
    walk = rows_of(out.shape, operands) or rows_of(out.shape, operands, whole_rows=True)
    if walk is None or walk[-1] != 4 or (len(sources) == 1 and walk[ELEMENTS][0] != 4):
        return None
    _, args, numbers = of
    return Share(args(walk=walk, **numbers), sources, [out])


def add_unary(steps: Steps, name: str, x: Operand, out: Operand) -> bool:
    """Add one of `UNARY`; False if it cannot walk the operands."""
    of: Numbered = (unary(name), UNARY_WORDS, {})
    if name == "copy" and _share(of, [x], out) is None:
        return _collect(steps, x, out)
    return add_rows(steps, of, [x], out)


def add_binary(steps: Steps, name: str, x: Operand, z: Operand, out: Operand) -> bool:
    """Add one of `BINARY`; False if it cannot walk the operands."""
    return add_rows(steps, (binary(name), BINARY_WORDS, {}), [x, z], out)


def _unary(name: str) -> Binding:
    return lambda steps, call: add_unary(steps, name, call.operand(0), call.out)


def _binary(name: str) -> Binding:
    return lambda steps, call: add_binary(steps, name, call.operand(0), call.operand(1), call.out)


def _add_with_numbers(steps: Steps, call: Bound, name: str, first: float, second: float = 0.0) -> bool:
    of: Numbered = (with_numbers(name), NUMBERS_WORDS, {"first": float_bits(first), "second": float_bits(second)})
    return add_rows(steps, of, [call.operand(0)], call.out)


def _scale(steps: Steps, call: Bound) -> bool:
    return _add_with_numbers(
        steps, call, "scale", float_attribute(call.attrs, "scale"), float_attribute(call.attrs, "bias") or -0.0
    )


def _clamp(steps: Steps, call: Bound) -> bool:
    low, high = float_attribute(call.attrs, "min"), float_attribute(call.attrs, "max")
    name = "clamp_to_0" if _is_zero(high, -1.0) else "clamp_from_0" if _is_zero(low, 1.0) else "clamp"
    return _add_with_numbers(steps, call, name, low, high)


def _is_zero(value: float, sign: float) -> bool:
    return value == 0 and math.copysign(1.0, value) == sign


def _leaky(steps: Steps, call: Bound) -> bool:
    return _add_with_numbers(steps, call, "leaky_relu", float_attribute(call.attrs, "negative_slope"))


def _compare(steps: Steps, call: Bound) -> bool:
    return add_binary(steps, str(call.attrs["kind"]), call.operand(0), call.operand(1), call.out)


def _where(steps: Steps, call: Bound) -> bool:
    return add_rows(steps, (choose, CHOICE_WORDS, {}), [call.operand(i) for i in range(3)], call.out)


def _fill(steps: Steps, call: Bound) -> bool:
    return add_rows(steps, (fill, FILL_WORDS, {"value": call.float("value")}), [], call.out)


BINDINGS = {
    "scale": _scale,
    "clamp": _clamp,
    "fill": _fill,
    "leaky_relu": _leaky,
    "compare": _compare,
    "where": _where,
    **{n: _unary(n) for n in UNARY if n != "copy"},
    **{n: _binary(n) for n in BINARY if n not in GATED and n not in COMPARISONS},
    "cont": _unary("copy"),
}
