"""Element by element over rows: operands of any strides whose last axis is dense, or one number for the whole row."""

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
"""Words of an operand: address, bytes from row to row along the three axes, bytes from element to element."""
ELEMENTS = slice(HEAD + OPERAND - 1, None, OPERAND)
"""Where a walk has the bytes from element to element of each operand."""


def row_words(operands: str, more: str = "") -> Words:
    """Words of a kernel that goes through rows of operands: `walk`, which `rows_of` makes, and more.

    The kernel reads of the walk how many elements a row has, ``ARGS.columns(a)``, how many rows there are,
    ``ARGS.rows(a)``, and of each operand, here one called x, where row i begins, ``ARGS.x(a, i)``, and the bytes from
    element to element, ``ARGS.x_step(a)``.
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
    """``(a, i)``: where row `i` begins of the operand whose words begin at `at`."""

    def row(a, i):
        outer, inner = word(a, 2), word(a, 3)
        base = word(a, at)
        if word(a, 1) * outer == 1:
            return base + i * word(a, at + 3)
        rest = i // inner
        return base + rest // outer * word(a, at + 1) + rest % outer * word(a, at + 2) + i % inner * word(a, at + 3)

    return part(row)


def _element(at: int) -> Part:
    """``(a)``: the bytes from element to element of the operand whose words begin at `at`."""

    def step(a):
        return word(a, at + OPERAND - 1)

    return part(step)


@part
def lanes(p, c, n, step):
    """16 elements of a row from column `c`, or as many as there are; or its one element."""
    if step == 0:
        return splat_from(p)
    if n - c >= LANES:
        return load(p + 4 * c)
    return load_some(p + 4 * c, n - c)


@part
def put(p, c, n, value):
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
"""How 16 elements of a row of `n` are written from column `c` on, the nearest of each type."""


UNARY_WORDS = row_words("x y")


@cache
def unary(name: str) -> Kernel:
    """A function of each element."""
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
    """Elements that lie apart, as dense rows."""
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
    """A function of two elements."""
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
    """A function of each element and two numbers."""
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
    """``t != 0 ? x : z``, of which any may be one number for the whole row."""
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
    """The same number everywhere."""
    n, value = FILL_WORDS.columns(a), splat(FILL_WORDS.value(a))
    lo, hi = share(FILL_WORDS.rows(a), thread, threads)
    for i in range(lo, hi):
        for c in range(0, n, LANES):
            put(FILL_WORDS.y(a, i), c, n, value)
    return 0


# ----------------------------------------------------------------------------------------------------- binding

LONGEST = 2048
"""Elements of a row that is cut from a longer run, so that threads have rows to share."""


def rows_of(
    shape: Sequence[int], operands: Sequence[Operand], *, whole_rows: bool = False, apart: bool = False
) -> list[int] | None:
    """The walk (`row_words`) through `operands`, broadcast to `shape`, row by row; None if they have no such rows.

    Axes that all operands walk through alike become one; with `whole_rows` the last axis stays as it is.  With `apart`
    elements may lie apart.
    """
    if any(n not in (1, m) for o in operands for n, m in zip(reversed(o.shape), reversed(shape), strict=False)):
        return None  # an operand that is tiled
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
    """Strides in elements as if `operand` had `shape`: 0 where it is repeated."""
    missing = len(shape) - len(operand.shape)
    own = [0 if n == 1 else s for n, s in zip(operand.shape, operand.strides, strict=True)]
    return [0] * missing + own


Numbered = tuple[Kernel, Words, Mapping[str, int]]
"""A kernel of this file, its words, and those besides the walk."""


def add_rows(steps: Steps, of: Numbered, sources: Sequence[Operand], out: Operand) -> bool:
    """Append a kernel of this file; False if the operands have no rows that it can walk.

    What lies apart is collected first.
    """
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
    """Memory for what `x` holds, if its elements lie apart and can be collected; else `x` itself."""
    if not x.shape or x.shape[-1] == 1 or x.strides[-1] in (0, 1):
        return x
    nbytes = x.tensor.spec.nbytes
    memory = steps.scratch(f"collected {number} {nbytes}", nbytes)
    tensor = replace(memory.tensor, shape=x.shape, strides=contiguous_strides(x.shape), dtype=x.dtype)
    to = Operand(memory.address, tensor)
    return to if can_copy(x, to) else x


def _gathering(x: Operand, to: Operand) -> list[int] | None:
    """The walk of `collect`, if there is one."""
    if not (x.is_float and to.is_float and to.tensor.spec.size):
        return None
    walk = rows_of(to.shape, [x, to], apart=True)
    if walk is None or walk[-1] != 4:
        walk = rows_of(to.shape, [x, to], whole_rows=True, apart=True)
    return None if walk is None or walk[-1] != 4 else walk


def can_copy(x: Operand, to: Operand) -> bool:
    """Whether `add_unary` copies this there."""
    return _gathering(x, to) is not None


def _collect(steps: Steps, x: Operand, to: Operand) -> bool:
    """Append the step that copies what lies apart; False if it has no rows even so."""
    walk = _gathering(x, to)
    if walk is None:
        return False
    steps.add(collect, UNARY_WORDS(walk=walk), reads=[x], writes=[to])
    return True


def whole_rows(steps: Steps, x: Operand, y: Operand) -> tuple[list[int], Operand] | None:
    """The walk through whole rows of `x` and `y`, broadcast to `x`, and what is walked in the place of `x`.

    Where elements of `x` lie apart a step collects them.  None, and no step, if there is no such walk.
    """
    for source in (x, _room(steps, x, 0)):
        walk = rows_of(x.shape, [source, y], whole_rows=True) if x.is_float and x.shape else None
        if walk is not None and walk[ELEMENTS][0] == 4:
            if source is not x:
                _collect(steps, x, source)
            return walk, source
    return None


def _share(of: Numbered, sources: Sequence[Operand], out: Operand) -> Share | None:
    """The words for such a kernel; None if there are none, or nothing to do."""
    operands = [*sources, out]
    if not all(o.is_float for o in operands) or not out.tensor.spec.size:
        return None
    walk = rows_of(out.shape, operands) or rows_of(out.shape, operands, whole_rows=True)
    if walk is None or walk[-1] != 4 or (len(sources) == 1 and walk[ELEMENTS][0] != 4):
        return None
    _, args, numbers = of
    return Share(args(walk=walk, **numbers), sources, [out])


def add_unary(steps: Steps, name: str, x: Operand, out: Operand) -> bool:
    """One of UNARY; False if the operands have no rows that it can walk."""
    of: Numbered = (unary(name), UNARY_WORDS, {})
    if name == "copy" and _share(of, [x], out) is None:
        return _collect(steps, x, out)
    return add_rows(steps, of, [x], out)


def add_binary(steps: Steps, name: str, x: Operand, z: Operand, out: Operand) -> bool:
    """One of BINARY; False if the operands have no rows that it can walk."""
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
