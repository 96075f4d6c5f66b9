"""Rotary embedding: cosines and sines once for all tensors that turn by the same positions, then the rotations."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from ....ops.rotary import frequencies
from ..compiler import Kernel, kernel
from ..steps import Bound, Operand, Steps, float_bits
from .packing import share
from .rows import HEAD, OPERAND, row_address, rows_of
from .simd import float_word, load_double, load_int, load_scalar, store_scalar, word


@kernel
def turns(a, thread, threads):
    """Words: positions (int32), how many, frequencies (float64), pairs, magnitude, cosines and sines of [positions,
    pairs]."""
    positions, frequency, pairs, magnitude = word(a, 0), word(a, 2), word(a, 3), float_word(a, 4)
    cosines, sines = word(a, 5), word(a, 6)
    lo, hi = share(word(a, 1), thread, threads)
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
    """Words: HEAD, source, target, cosines, sines, pairs, offset, heads: rows of one position in a row."""

    def body(a, thread, threads):
        n, at = word(a, 0), HEAD + 2 * OPERAND
        cosines, sines, pairs, offset, heads = (
            word(a, at),
            word(a, at + 1),
            word(a, at + 2),
            word(a, at + 3),
            word(a, at + 4),
        )
        between = 1 if neighbours else pairs
        lo, hi = share(word(a, 1) * word(a, 2) * word(a, 3), thread, threads)
        for i in range(lo, hi):
            x, y = row_address(a, 0, i), row_address(a, 1, i)
            turn = 4 * (i // heads * pairs)
            if x != y:
                for c in range(offset):
                    store_scalar(y + 4 * c, load_scalar(x + 4 * c))
                for c in range(offset + 2 * pairs, n):
                    store_scalar(y + 4 * c, load_scalar(x + 4 * c))
            for k in range(pairs):
                first = 4 * (offset + (2 * k if neighbours else k))
                second = first + 4 * between
                cos, sin = load_scalar(cosines + turn + 4 * k), load_scalar(sines + turn + 4 * k)
                low, high = load_scalar(x + first), load_scalar(x + second)
                store_scalar(y + first, low * cos - high * sin)
                store_scalar(y + second, low * sin + high * cos)
        return 0

    return Kernel(f"rotary.rotate.{'neighbours' if neighbours else 'halves'}", body)


def _rope(steps: Steps, call: Bound) -> bool:
    x, pos, factors, y = call.operand(0), call.operand(1), call.optional(2), call.out
    mode, pairs = call.attrs["mode"], int(np.asarray(call.attrs["n_dims"])) // 2
    if mode not in ("normal", "neox") or factors is not None or not pos.is_dense or not pairs:
        return False
    words = rows_of(y.shape, [x, y], whole_rows=True) if x.is_float else None
    if words is None or words[HEAD + 4] != 4 or words[-1] != 4:
        return False
    cosines, sines = _turns(steps, call, pos, pairs)
    offset = int(np.asarray(call.attrs["offset"]))
    words += [cosines.address, sines.address, pairs, offset, y.shape[-2]]
    steps.add(rotate(mode == "normal"), words, reads=[x, cosines, sines], writes=[y])
    return True


def _turns(steps: Steps, call: Bound, pos: Operand, pairs: int) -> tuple[Operand, Operand]:
    """Cosines and sines, by a step of their own unless an earlier one has made them."""
    kind = tuple((k, v) for k, v in call.attrs.items() if k not in ("mode", "offset"))
    keys = [("cosines", pos.tensor, kind), ("sines", pos.tensor, kind)]
    known = [steps.known(key) for key in keys]
    if known[0] is not None and known[1] is not None:
        return known[0], known[1]
    inverse, magnitude = frequencies(pairs, call.attrs)
    count = math.prod(pos.shape)
    cosines, sines = steps.memory(4 * count * pairs), steps.memory(4 * count * pairs)
    frequency = steps.constant(np.asarray(inverse, np.float64)).address
    words = [pos.address, count, frequency, pairs, float_bits(magnitude), cosines.address, sines.address]
    steps.add(turns, words, reads=[pos], writes=[cosines, sines])
    for key, made in zip(keys, (cosines, sines), strict=True):
        steps.remember(key, made, [pos])
    return cosines, sines


BINDINGS = {"rope": _rope}
