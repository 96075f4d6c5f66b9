"""Rotary embedding: cosines and sines once for all tensors that turn by the same positions, then the rotations."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np

from ....ops.rotary import frequencies
from ...operands import Bound, Operand, float_bits
from ..compiler import Kernel, kernel
from ..steps import Share, Steps
from .packing import share as share_of
from .pieces import pieces_of
from .rows import HEAD, OPERAND, row_address, rows_of
from .simd import float_word, load_double, load_int, load_scalar, store_scalar, word


@kernel
def turns(a, thread, threads):
    """Words: positions (int32), how many, frequencies (float64), pairs, magnitude, cosines and sines of [positions,
    pairs]."""
    positions, frequency, pairs, magnitude = word(a, 0), word(a, 2), word(a, 3), float_word(a, 4)
    cosines, sines = word(a, 5), word(a, 6)
    lo, hi = share_of(word(a, 1), thread, threads)
    for i in range(lo, hi):
        position = load_int(positions + 4 * i)
        for k in range(pairs):
            angle = position * load_double(frequency + 8 * k)
            at = 4 * (i * pairs + k)
            store_scalar(cosines + at, math.cos(angle) * magnitude)
            store_scalar(sines + at, math.sin(angle) * magnitude)
    return 0


@cache
def rotate(neighbours: bool) -> Kernel:
    """Words: HEAD, source, target, cosines, sines, pairs, offset, rows of a position, pieces of a head that are rows,
    number of the first row."""

    def body(a, thread, threads):
        n, at = word(a, 0), HEAD + 2 * OPERAND
        cosines, sines, pairs, offset = word(a, at), word(a, at + 1), word(a, at + 2), word(a, at + 3)
        rows, cut, first = word(a, at + 4), word(a, at + 5), word(a, at + 6)
        between = 1 if neighbours else pairs
        lo, hi = share_of(word(a, 1) * word(a, 2) * word(a, 3), thread, threads)
        for i in range(lo, hi):
            x, y = row_address(a, 0, i), row_address(a, 1, i)
            turn = 4 * pairs * ((first + i) // rows * cut + (first + i) % cut)
            if x != y:
                for c in range(offset):
                    store_scalar(y + 4 * c, load_scalar(x + 4 * c))
                for c in range(offset + 2 * pairs, n):
                    store_scalar(y + 4 * c, load_scalar(x + 4 * c))
            for k in range(pairs):
                left = 4 * (offset + (2 * k if neighbours else k))
                right = left + 4 * between
                cos, sin = load_scalar(cosines + turn + 4 * k), load_scalar(sines + turn + 4 * k)
                low, high = load_scalar(x + left), load_scalar(x + right)
                store_scalar(y + left, low * cos - high * sin)
                store_scalar(y + right, low * sin + high * cos)
        return 0

    return Kernel(f"rotary.rotate.{'neighbours' if neighbours else 'halves'}", body)


def _rope(steps: Steps, call: Bound) -> bool:
    x, pos, factors, y = call.operand(0), call.operand(1), call.optional(2), call.out
    mode, pairs = call.attrs["mode"], int(np.asarray(call.attrs["n_dims"])) // 2
    if mode not in ("normal", "neox") or factors is not None or not pos.is_dense or not pairs:
        return False
    if not x.is_float or _rows(x, y) is None:
        return False
    cosines, sines = _turns(steps, call, pos, pairs)
    offset, neighbours = int(np.asarray(call.attrs["offset"])), mode == "normal"
    size = y.shape[-1]
    if neighbours and offset == 0 and 2 * pairs == size and x.is_dense and y.is_dense:
        size = math.gcd(size, *(steps.columns_of([x]) or ()))  # pairs of neighbours may part
    cut = y.shape[-1] // size
    pieces = pieces_of(steps, [_in_pieces(x, cut)], _in_pieces(y, cut), whole_rows=True) if size % 2 == 0 else None

    def share(x: Operand, y: Operand, cut: int, first: int) -> Share:
        words = _rows(x, y)
        assert words is not None
        words += [cosines.address, sines.address, pairs // cut, offset, call.out.shape[-2] * cut, cut, first]
        return Share(words, [x, cosines, sines], [y])

    if pieces is None:
        whole = share(x, y, 1, 0)
        steps.add(rotate(neighbours), whole.words, reads=whole.reads, writes=whole.writes)
    else:
        mine = zip(pieces.of(_in_pieces(x, cut)), pieces.of(_in_pieces(y, cut)), pieces.ends, strict=False)
        shares = [share(x, y, cut, first) if x and y else None for x, y, first in mine]
        steps.deal_columns(rotate(neighbours), shares, y, pieces.bounds)
    return True


def _rows(x: Operand, y: Operand) -> list[int] | None:
    words = rows_of(y.shape, [x, y], whole_rows=True)
    return None if words is None or words[HEAD + 4] != 4 or words[-1] != 4 else words


def _in_pieces(x: Operand, cut: int) -> Operand:
    """A dense operand with each row as so many rows; as it is, if that is one."""
    if cut == 1:
        return x
    size = x.shape[-1] // cut
    shape = (math.prod(x.shape) // size, size)
    return replace(x, tensor=replace(x.tensor, shape=shape, strides=(size, 1)))


def _turns(steps: Steps, call: Bound, pos: Operand, pairs: int) -> tuple[Operand, Operand]:
    """Cosines and sines, by a step of their own unless an earlier one has made them."""
    kind = tuple((k, v) for k, v in call.attrs.items() if k not in ("mode", "offset"))
    key = ("turns", pos.tensor, kind)
    if (known := steps.known(key)) is not None:
        return known[0], known[1]
    inverse, magnitude = frequencies(pairs, call.attrs)
    count = math.prod(pos.shape)
    cosines, sines = steps.memory(4 * count * pairs), steps.memory(4 * count * pairs)
    frequency = steps.constant(np.asarray(inverse, np.float64)).address
    words = [pos.address, count, frequency, pairs, float_bits(magnitude), cosines.address, sines.address]
    steps.add(turns, words, reads=[pos], writes=[cosines, sines])
    steps.remember(key, (cosines, sines), [pos])
    return cosines, sines


BINDINGS = {"rope": _rope}
