"""The short convolution before a delta rule: by itself, and with the rows it keeps, SiLU and the norms of its heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, product

from ....graph.dtypes import DType
from ...chains import short_convolution
from ...flow import Flow
from ...operands import Bound, Operand, need
from ..compiler import Kernel, part
from ..simd.vectors import (
    LANES,
    float_word,
    fma,
    fourth_0,
    fourth_1,
    fourth_2,
    fourth_3,
    load,
    load_int,
    load_long,
    mul,
    splat,
    store,
    word,
)
from ..steps import Chain, Fused, Steps
from .norms import FACTORS, kind_of, sum_of_squares
from .packing import NO_ROW, share
from .recurrent import store_past
from .rows import lanes, put, silu

TAPS = 4
TILE = 8
"""Tokens whose heads stay in the first cache from the convolution to the norm."""


@cache
def convolution() -> Kernel:
    """Four taps.  Words: sequences, tokens, channels; x with byte strides of sequence and row; weights [channels, 4];
    the output with its strides."""

    def body(a, thread, threads):
        tokens, channels = word(a, 1), word(a, 2)
        blocks = (channels + LANES - 1) // LANES
        lo, hi = share(word(a, 0) * blocks, thread, threads)
        for unit in range(lo, hi):
            n, c = unit // blocks, unit % blocks * LANES
            x, y = word(a, 3) + n * word(a, 4), word(a, 7) + n * word(a, 8)
            w = word(a, 6) + 16 * c
            w0, w1 = lanes(w, 0, 4 * (channels - c), 4), lanes(w, LANES, 4 * (channels - c), 4)
            w2, w3 = lanes(w, 2 * LANES, 4 * (channels - c), 4), lanes(w, 3 * LANES, 4 * (channels - c), 4)
            k0, k1 = fourth_0(w0, w1, w2, w3), fourth_1(w0, w1, w2, w3)
            k2, k3 = fourth_2(w0, w1, w2, w3), fourth_3(w0, w1, w2, w3)
            step = word(a, 5)
            x0, x1, x2 = lanes(x, c, channels, 4), lanes(x + step, c, channels, 4), lanes(x + 2 * step, c, channels, 4)
            for t in range(tokens):
                x3 = lanes(x + (t + 3) * step, c, channels, 4)
                put(y + t * word(a, 9), c, channels, fma(x0, k0, fma(x1, k1, fma(x2, k2, mul(x3, k3)))))
                x0, x1, x2 = x1, x2, x3
        return 0

    return Kernel("short_convolution.plain", body)


def _convolution(steps: Steps, call: Bound) -> bool:
    x, w, y = call.operand(0), call.operand(1), call.out
    plain = all(o.is_float and o.strides[-1] == 1 for o in (x, y)) and w.is_float and w.is_dense
    if not plain or w.shape[-1] != TAPS or len(x.shape) not in (2, 3):
        return False
    batched = len(x.shape) == 3
    words = [x.shape[0] if batched else 1, y.shape[-2], y.shape[-1]]
    words += [x.address, 4 * x.strides[0] if batched else 0, 4 * x.strides[-2], w.address]
    words += [y.address, 4 * y.strides[0] if batched else 0, 4 * y.strides[-2]]
    steps.add(convolution(), words, reads=[x, w], writes=[y])
    return True


@part
def copied(x, y, n):
    for c in range(0, n, LANES):
        store(y + 4 * c, load(x + 4 * c))


@part
def convolved(x, step, y, pace, first, last, w, old, size):
    """Tokens from `first` to before `last` of 16 channels; `old` are the three rows before, `size` numbers apart."""
    w0, w1, w2, w3 = load(w), load(w + 4 * LANES), load(w + 8 * LANES), load(w + 12 * LANES)
    k0, k1 = fourth_0(w0, w1, w2, w3), fourth_1(w0, w1, w2, w3)
    k2, k3 = fourth_2(w0, w1, w2, w3), fourth_3(w0, w1, w2, w3)
    x0, x1, x2 = load(old), load(old + 4 * size), load(old + 8 * size)
    for t in range(first, last):
        x3 = load(x + t * step)
        store(y + t * pace, silu(fma(x0, k0, fma(x1, k1, fma(x2, k2, mul(x3, k3))))))
        x0, x1, x2 = x1, x2, x3
    store(old, x0)
    store(old + 4 * size, x1)
    store(old + 8 * size, x2)


@part
def row_id(ids, nbytes, i):
    return load_int(ids + 4 * i) if nbytes == 4 else load_long(ids + 8 * i)


@part
def remembered(state, kept, old, ids, nbytes, x, step, channels, size):
    """Of a head: the three rows of the state to where they are kept and to `old`, then those that `ids` names in their
    place."""
    for j in range(3):
        for c in range(0, 4 * size, 4 * LANES):
            row = load(state + 4 * j * channels + c)
            store(old + 4 * j * size + c, row)
            store_past(kept + 4 * j * channels + c, row)
    for j in range(3):
        row = row_id(ids, nbytes, j)
        copied(old + 4 * row * size if row < 3 else x + (row - 3) * step, state + 4 * j * channels, size)


@cache
def heads(norm: str) -> Kernel:
    """Convolution and SiLU head by head, and the norm of those that have one; the rows before are kept, and replaced.

    Words: sequences, tokens, heads, numbers of a head; the state f32[sequences, 3, channels], where to keep it; x with
    byte strides of sequence and row; weights [channels, 4]; the output, written past the normed heads only, with its
    strides; the rows of the next state among those of state and x [sequences, 3], and the bytes of such an id; twice
    which heads are normed, from and to before, and where to; eps; scratch of each thread, 3 rows and TILE heads.
    """
    factor = FACTORS[norm]

    def body(a, thread, threads):
        tokens, count, size = word(a, 1), word(a, 2), word(a, 3)
        channels, step, pace, ids = count * size, word(a, 8), word(a, 12), word(a, 13)
        for i in range(3 * word(a, 0)):
            row = row_id(ids, word(a, 14), i)
            if row < 0 or row >= tokens + 3:
                return NO_ROW | row << 8
        eps, tile = float_word(a, 21), word(a, 22) + thread * (3 * channels + TILE * size) * 4
        lo, hi = share(count, thread, threads)
        for n in range(word(a, 0)):
            x, out = word(a, 6) + n * word(a, 7), word(a, 10) + n * word(a, 11)
            for first in range(0, tokens, TILE):
                last = min(tokens, first + TILE)
                for head in range(lo, hi):
                    at = 4 * head * size
                    old = tile + 4 * TILE * size + (3 * at if tokens > TILE else 0)
                    if first == 0:
                        rows = ids + 3 * n * word(a, 14)
                        state, kept = word(a, 4) + 12 * n * channels + at, word(a, 5) + 12 * n * channels + at
                        remembered(state, kept, old, rows, word(a, 14), x + at, step, channels, size)
                    which = 15 if word(a, 15) <= head and head < word(a, 16) else 18
                    normed = word(a, which) <= head and head < word(a, which + 1)
                    y, between = (tile - 4 * first * size, 4 * size) if normed else (out + at, pace)
                    for c in range(0, 4 * size, 4 * LANES):
                        w = word(a, 9) + 4 * (at + c)
                        convolved(x + at + c, step, y + c, between, first, last, w, old + c, size)
                    if normed:
                        many = word(a, which + 1) - word(a, which)
                        z = word(a, which + 2) + 4 * size * (n * tokens * many + head - word(a, which))
                        for t in range(first, last):
                            source, target = y + t * between, z + 4 * t * many * size
                            f = splat(factor(sum_of_squares(source, size), size, eps))
                            for c in range(0, 4 * size, 4 * LANES):
                                store(target + c, mul(load(source + c), f))
        return 0

    return Kernel(f"short_convolution.heads.{norm}", body)


def _heads(flow: Flow, number: int) -> Chain:
    """A delta-net layer's way from its projection to queries, keys and values, with the state of its convolution."""
    chain = short_convolution(flow, number)
    need(chain.save is not None, "the state is not saved")
    assert chain.save is not None
    join, mix, active, keep, save = (flow.call(n) for n in (number, chain.mix, chain.active, chain.keep, chain.save))
    norms = [flow.call(n) for n in chain.norms]
    state, new, kept, weights, ids = join.operand(0), join.operand(1), save.out, mix.operand(1), keep.operand(1)
    y, size = active.out, norms[0].out.shape[-1]
    need(save.op == "cont" and state.tensor == save.operand(0).tensor == keep.out.tensor, "the state is kept otherwise")
    need(
        int(str(join.attrs["axis"])) % 3 == 1 and len(join.out.shape) == len(y.shape) == 3, "rows are joined otherwise"
    )
    need(state.shape == (y.shape[0], TAPS - 1, y.shape[2]) and weights.shape[-1] == TAPS, "there are other taps")
    need(ids.dtype in (DType.I32, DType.I64), "rows are numbered otherwise")
    floats = [state, new, kept, weights, y, *(n.out for n in norms)]
    need(all(o.is_float for o in floats) and new.strides[-1] == 1, "operands are not rows of float32")
    need(all(o.is_dense for o in (state, kept, weights, y, ids, *(n.out for n in norms))), "operands are not dense")
    need(size % LANES == y.shape[2] % size == kept.address % 64 == 0, "heads are not whole vectors")
    need(all(n.attrs == norms[0].attrs and n.out.shape[-1] == size for n in norms), "norms differ")
    normed = [c for n in norms if (c := _columns(n.operand(0), y)) is not None and c[0] % size == c[1] % size == 0]
    need(len(normed) == 2, "what is normed are not heads")
    others = [flow.call(n) for n in flow.readers_of(chain.active) if n not in chain.norms]
    _need_apart(join, mix, active, keep, save, norms, others, normed)
    kernel, eps = heads(kind_of(norms[0])), norms[0].float("eps")
    sequences, tokens, channels = y.shape

    def bind(steps: Steps) -> None:
        words = [sequences, tokens, channels // size, size, state.address, kept.address]
        words += [new.address, 4 * new.strides[0], 4 * new.strides[1], weights.address]
        words += [y.address, 4 * y.strides[0], 4 * y.strides[1], ids.address, ids.dtype.storage.itemsize]
        for (first, last), norm in zip(normed, norms, strict=True):
            words += [first // size, last // size, norm.out.address]
        scratch = steps.scratch("convolved heads", 4 * steps.threads * (3 * channels + TILE * size))
        words += [eps, scratch.address]
        steps.number = chain.keep
        writes = [y, state, kept, *(n.out for n in norms), scratch]
        steps.add(kernel, words, reads=[state, new, weights, ids], writes=writes, stops=True)

    return Chain([number, chain.mix, chain.active, *chain.norms, chain.keep, chain.save], bind)


def _columns(x: Operand, y: Operand) -> tuple[int, int] | None:
    """From and to before which columns of ``y`` [n, t, c] a view has as [n, t, heads, numbers]; None if it is none."""
    start = (x.address - y.address) // 4
    stop = start + x.shape[-1] * x.shape[-2] if len(x.shape) == 4 else -1
    fits = x.tensor.buffer == y.tensor.buffer and start >= 0 and stop <= y.shape[-1]
    if not fits or stop < 0 or x.shape[:2] != y.shape[:2]:
        return None
    wanted = (*y.strides[:2], x.shape[-1], 1)
    walked = all(n == 1 or s == w for n, s, w in zip(x.shape, x.strides, wanted, strict=True))
    return (start, stop) if walked else None


def _need_apart(
    join: Bound,
    mix: Bound,
    active: Bound,
    keep: Bound,
    save: Bound,
    norms: Sequence[Bound],
    others: Sequence[Bound],
    normed: Sequence[tuple[int, int]],
) -> None:
    """The norms alone read their columns, and nothing is written where something else is read or written."""
    y, new = active.out, join.operand(1)
    for seen in (o for call in others for o in call.src if o is not None and o.region.overlaps(y.region)):
        low, high = _columns(seen, y) or (0, y.shape[-1])
        need(not any(first < high and low < last for first, last in normed), "something else reads what is normed")
    need(normed[0][1] <= normed[1][0], "the norms read the same heads")
    written = [save.out, y, *(n.out for n in norms)]
    in_place = new.address == y.address and new.strides[1:] == y.strides[1:] and new.shape == y.shape
    read = [join.operand(0), mix.operand(1), keep.operand(1)] + ([] if in_place else [new])
    pairs = [*combinations(written, 2), *product(written, read)]
    pairs += [(o, new) for o in written if in_place and o is not y]
    need(not any(a.region.overlaps(b.region) for a, b in pairs), "a result lies where something is still read")


FUSED: Mapping[str, tuple[Fused, ...]] = {"concat": (_heads,)}
BINDINGS = {"ssm_conv": _convolution}
