"""Rotary embedding: cosines and sines once for all tensors with the same positions, then the rotations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ....ops.matrix.rope import compute_frequencies, position_planes
from ...chains import turned_heads
from ...flow import Flow, apart
from ...operands import Bound, Operand, float_bits, need
from ..compiler import Kernel, Part, kernel, part
from ..pieces import pieces_of
from ..simd.order import evens, first_pairs, last_pairs, odds
from ..simd.vectors import (
    LANES,
    add,
    load_double,
    load_int,
    load_long,
    load_scalar,
    mul,
    splat,
    store_scalar,
    sub,
)
from ..steps import Chain, Fused, Share, Steps
from ..words import words
from .norms import rms_factor, sum_of_squares
from .packing import share as share_of
from .rows import ELEMENTS, add_unary, lanes, put, row_words, rows_of

TURNS = words("positions count run far near further frequency divisors pairs magnitude:f32 cosines sines")


@kernel
def turns(a, thread, threads):
    """Compute cosines and sines [count, pairs] of int32 `positions`.

    Positions are in runs of `run`: `far` and `near` are bytes from run to run and from position to position. Each pair
    has `further` (int64), the bytes to its position; `frequency` (float64); and `divisors` (float32), or 0 for none.
    """
    run, far, near, further = TURNS.run(a), TURNS.far(a), TURNS.near(a), TURNS.further(a)
    frequency, divisors = TURNS.frequency(a), TURNS.divisors(a)
    pairs, magnitude, cosines, sines = TURNS.pairs(a), TURNS.magnitude(a), TURNS.cosines(a), TURNS.sines(a)
    lo, hi = share_of(TURNS.count(a), thread, threads)
    for i in range(lo, hi):
        position = TURNS.positions(a) + i // run * far + i % run * near
        for k in range(pairs):
            speed = load_double(frequency + 8 * k)
            if divisors != 0:
                speed /= load_scalar(divisors + 4 * k)
            angle = load_int(position + load_long(further + 8 * k)) * speed
            at = 4 * (i * pairs + k)
            store_scalar(cosines + at, math.cos(angle) * magnitude)
            store_scalar(sines + at, math.sin(angle) * magnitude)
    return 0


@cache
def turn(neighbours: bool) -> Part:
    """Make ``(x, y, offset, pairs, cosines, sines)``: rotate the pairs of a row from element `offset` on.

    ``y[l] = x[l] cos - x[h] sin, y[h] = x[l] sin + x[h] cos``. y may be x. A pair is adjacent elements (`neighbours`),
    or elements `pairs` apart.
    """

    def body(x, y, offset, pairs, cosines, sines):
        x, y = x + 4 * offset, y + 4 * offset
        for k in range(0, pairs, LANES):
            cos, sin = lanes(cosines, k, pairs, 4), lanes(sines, k, pairs, 4)
            if neighbours:
                first, second = lanes(x, 2 * k, 2 * pairs, 4), lanes(x, 2 * k + LANES, 2 * pairs, 4)
                low, high = evens(first, second), odds(first, second)
            else:
                low, high = lanes(x, k, pairs, 4), lanes(x + 4 * pairs, k, pairs, 4)
            left, right = sub(mul(low, cos), mul(high, sin)), add(mul(low, sin), mul(high, cos))
            if neighbours:
                put(y, 2 * k, 2 * pairs, first_pairs(left, right))
                put(y, 2 * k + LANES, 2 * pairs, last_pairs(left, right))
            else:
                put(y, k, pairs, left)
                put(y + 4 * pairs, k, pairs, right)

    return part(body)


@part
def copy(x, y, n):
    """Copy `n` float32."""
    for c in range(0, n, LANES):
        put(y, c, n, lanes(x, c, n, 4))


TURNED = row_words("x y", "cosines sines pairs offset rows_of_position cut first")


@cache
def rotate(neighbours: bool) -> Kernel:
    """Make the kernel that rotates each row from element `offset` on.

    A head may be cut into `cut` rows; `first` is the number of the first row.
    """
    turned = turn(neighbours)

    def body(a, thread, threads):
        n, cosines, sines = TURNED.columns(a), TURNED.cosines(a), TURNED.sines(a)
        pairs, offset = TURNED.pairs(a), TURNED.offset(a)
        rows, cut, first = TURNED.rows_of_position(a), TURNED.cut(a), TURNED.first(a)
        lo, hi = share_of(TURNED.rows(a), thread, threads)
        for i in range(lo, hi):
            x, y = TURNED.x(a, i), TURNED.y(a, i)
            at = 4 * pairs * ((first + i) // rows * cut + (first + i) % cut)
            if x != y:
                past = offset + 2 * pairs
                copy(x, y, offset)
                copy(x + 4 * past, y + 4 * past, n - past)
            turned(x, y, offset, pairs, cosines + at, sines + at)
        return 0

    return Kernel(f"rotary.rotate.{'neighbours' if neighbours else 'halves'}", body)


SCALED = row_words("x w y", "eps:f32 cosines sines pairs offset rows_of_position first")


@cache
def scaled_and_rotated(neighbours: bool) -> Kernel:
    """Make the kernel ``y = rotate(rms_norm(x) * w)``, with the rotation from element `offset` on.

    `first` is the number of the first row.
    """
    turned = turn(neighbours)

    def body(a, thread, threads):
        n, step, eps = SCALED.columns(a), SCALED.w_step(a), SCALED.eps(a)
        cosines, sines, pairs, offset = SCALED.cosines(a), SCALED.sines(a), SCALED.pairs(a), SCALED.offset(a)
        rows, first = SCALED.rows_of_position(a), SCALED.first(a)
        lo, hi = share_of(SCALED.rows(a), thread, threads)
        for i in range(lo, hi):
            x, w, y = SCALED.x(a, i), SCALED.w(a, i), SCALED.y(a, i)
            f = splat(rms_factor(sum_of_squares(x, n), n, eps))
            for c in range(0, n, LANES):
                put(y, c, n, mul(mul(lanes(x, c, n, 4), f), lanes(w, c, n, step)))
            at = 4 * pairs * ((first + i) // rows)
            turned(y, y, offset, pairs, cosines + at, sines + at)
        return 0

    return Kernel(f"rotary.scaled_and_rotated.{'neighbours' if neighbours else 'halves'}", body)


@dataclass(frozen=True, slots=True)
class Turning:
    """The rotation of a `rope`: its pairs, the first rotated element of a row, its cosines and sines."""

    neighbours: bool
    pairs: int
    offset: int
    cosines: Operand
    sines: Operand


def _rope(steps: Steps, call: Bound) -> bool:
    """Add the rotation of a `rope` or `rope_multi`; False if kernels cannot compute it."""
    x, y = call.operand(0), call.out
    if not x.is_float or _rows(x, y) is None:
        return False
    if not _number(call, "n_dims"):
        return add_unary(steps, "copy", x, y)
    if not is_turned(call):
        return False
    turning = turning_of(steps, call)
    size, pairs, neighbours = y.shape[-1], turning.pairs, turning.neighbours
    if neighbours and turning.offset == 0 and 2 * pairs == size and x.is_dense and y.is_dense:
        size = math.gcd(size, *(steps.columns_of([x]) or ()))  # each cut keeps pairs of neighbours
    cut = y.shape[-1] // size
    pieces = pieces_of(steps, [_in_pieces(x, cut)], _in_pieces(y, cut), whole_rows=True) if size % 2 == 0 else None

    def share(x: Operand, y: Operand, cut: int, first: int) -> Share:
        walk = _rows(x, y)
        assert walk is not None
        words = TURNED(
            walk=walk,
            cosines=turning.cosines.address,
            sines=turning.sines.address,
            pairs=pairs // cut,
            offset=turning.offset,
            rows_of_position=call.out.shape[-2] * cut,
            cut=cut,
            first=first,
        )
        return Share(words, [x, turning.cosines, turning.sines], [y])

    if pieces is None:
        whole = share(x, y, 1, 0)
        steps.add(rotate(neighbours), whole.words, reads=whole.reads, writes=whole.writes)
    else:
        mine = zip(pieces.of(_in_pieces(x, cut)), pieces.of(_in_pieces(y, cut)), pieces.ends, strict=False)
        shares = [share(x, y, cut, first) if x and y else None for x, y, first in mine]
        steps.deal_columns(rotate(neighbours), shares, y, pieces.bounds)
    return True


def _rows(x: Operand, y: Operand) -> list[int] | None:
    """Make the walk of a rotation; None if kernels cannot walk the operands."""
    walk = rows_of(y.shape, [x, y], whole_rows=True)
    return None if walk is None or walk[ELEMENTS] != [4, 4] else walk


def _in_pieces(x: Operand, cut: int) -> Operand:
    """Return a dense operand with each row cut into `cut` rows."""
    if cut == 1:
        return x
    size = x.shape[-1] // cut
    shape = (math.prod(x.shape) // size, size)
    return replace(x, tensor=replace(x.tensor, shape=shape, strides=(size, 1)))


def _number(call: Bound, name: str) -> int:
    """Return an integer attribute."""
    return int(np.asarray(call.attrs[name]))


def is_turned(call: Bound) -> bool:
    """Return whether kernels can read the positions and factors of a `rope` or `rope_multi`."""
    pos, factors, multi = call.operand(1), call.optional(2), call.op == "rope_multi"
    if factors is not None and not (factors.is_float and factors.is_dense):
        return False
    return pos.dtype is DType.I32 and (pos.is_dense or len(pos.shape) <= 2 + multi)


def turning_of(steps: Steps, call: Bound) -> Turning:
    """Make the rotation plan of a `rope` or `rope_multi`. Add a step for cosines and sines unless one exists.

    `is_rope_supported` must hold.
    """
    pos, factors, multi = call.operand(1), call.optional(2), call.op == "rope_multi"
    half, mode = _number(call, "n_dims") // 2, str(call.attrs["mode"])
    pairs = 2 * half if mode == "vision" else half
    kind = tuple((k, v) for k, v in call.attrs.items() if k not in ("mode" if not multi else "", "offset"))
    key = ("turns", pos.tensor, None if factors is None else factors.tensor, kind)
    turned = steps.known(key)
    if turned is None:
        plane, index = position_planes(pairs, _sections(call), mode) if multi else (np.zeros(pairs, np.int64), None)
        turned = _turns(steps, call, compute_frequencies(half, call.attrs, index), plane)
        steps.remember(key, turned, [pos] if factors is None else [pos, factors])
    return Turning(mode == "normal", pairs, _number(call, "offset"), turned[0], turned[1])


def _sections(call: Bound) -> tuple[int, ...]:
    return cast("tuple[int, ...]", call.attrs["sections"])


def _turns(
    steps: Steps, call: Bound, frequencies: tuple[npt.NDArray[Any], float], plane: npt.NDArray[Any]
) -> Sequence[Operand]:
    """Add the step that computes cosines and sines. `plane` is the row of positions of each pair."""
    (inverse, magnitude), pos, factors = frequencies, call.operand(1), call.optional(2)
    *outer, near = pos.strides
    between = 4 * outer.pop() if call.op == "rope_multi" else 0
    run, count = pos.shape[-1], pos.shape[-1] * math.prod(pos.shape[: len(outer)])
    cosines, sines = (steps.memory(4 * count * len(plane)) for _ in range(2))
    further, speeds = steps.constant(between * plane.astype(np.int64)), steps.constant(np.asarray(inverse, np.float64))
    words = TURNS(
        positions=pos.address,
        count=count,
        run=run,
        far=4 * outer[-1] if outer else 0,
        near=4 * near,
        further=further.address,
        frequency=speeds.address,
        divisors=0 if factors is None else factors.address,
        pairs=len(plane),
        magnitude=float_bits(magnitude),
        cosines=cosines.address,
        sines=sines.address,
    )
    reads = [pos] if factors is None else [pos, factors]
    steps.add(turns, words, reads=reads, writes=[cosines, sines])
    return cosines, sines


def _scaled_and_rotated(flow: Flow, number: int) -> Chain:
    """Fuse the norm of each head, its factors and the rotation."""
    chain = turned_heads(flow, number)
    norm, product, rope = map(flow.call, chain)
    x, factors, y = norm.operand(0), product.operand(1), rope.out
    need(rope.op == "rope" and _number(rope, "n_dims") and is_turned(rope), "the rotation has no kernel")
    need(norm.out.shape == product.out.shape == y.shape and x.is_float and factors.is_float, "rows differ")
    need(_scaled(x, factors, y) is not None, "operands have no rows")
    apart(y, [factors], [x])
    return Chain(chain, partial(_add_scaled_and_rotated, norm=norm, product=product, rope=rope))


def _add_scaled_and_rotated(steps: Steps, norm: Bound, product: Bound, rope: Bound) -> None:
    """Add the fused step of norm, factors and rotation."""
    x, factors, y, turning = norm.operand(0), product.operand(1), rope.out, turning_of(steps, rope)

    def share(x: Operand, factors: Operand, y: Operand, first: int) -> Share:
        walk = _scaled(x, factors, y)
        assert walk is not None
        words = SCALED(
            walk=walk,
            eps=norm.float("eps"),
            cosines=turning.cosines.address,
            sines=turning.sines.address,
            pairs=turning.pairs,
            offset=turning.offset,
            rows_of_position=rope.out.shape[-2],
            first=first,
        )
        return Share(words, [x, factors, turning.cosines, turning.sines], [y])

    kernel = scaled_and_rotated(turning.neighbours)
    if (pieces := pieces_of(steps, [x], y, whole_rows=True)) is not None:
        cut = zip(*(pieces.of(o) for o in (x, factors, y)), pieces.ends, strict=False)
        shares = [share(x, w, y, first) if x and w and y else None for x, w, y, first in cut]
        steps.deal_columns(kernel, shares, y, pieces.bounds)
    else:
        whole = share(x, factors, y, 0)
        steps.add(kernel, whole.words, reads=whole.reads, writes=whole.writes)


def _scaled(x: Operand, factors: Operand, y: Operand) -> list[int] | None:
    """Make the walk of a norm and rotation; None if kernels cannot walk the operands."""
    walk = rows_of(y.shape, [x, factors, y], whole_rows=True)
    return None if walk is None or walk[ELEMENTS][::2] != [4, 4] else walk


FUSED: Mapping[str, tuple[Fused, ...]] = {"rms_norm": (_scaled_and_rotated,)}
BINDINGS = {"rope": _rope, "rope_multi": _rope}
