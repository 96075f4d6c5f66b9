"""Kernels of the lightning indexer (DeepSeek V3.2), of hyper-connections (V4), and of causal masks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ....graph.dtypes import DType
from ....ops.declaration.attributes import float_attribute
from ...operands import Bound, Operand, need
from ..binding.axes import MOST, axes_of, row_heads
from ..binding.launches import Binding, Launches, Word, blocks
from ..device.driver import Source
from .elementwise import MOST_ELEMENTS, THREADS, as_float
from .moves import launch_copy

HELD = 8
"""The most streams that a thread has in registers."""
KERNELS = ("lightning_indexer", "hyper_comb", "hyper_pre", f"hyper_post<{HELD}>", "hyper_post<0>", "causal_mask")
SOURCE = Source("indexer.cu", KERNELS)
SOURCES = (SOURCE,)


def without(x: Operand, *axes: int) -> Operand:
    """Return `x` without some axes, at index 0 of each."""
    gone = {a % len(x.shape) for a in axes}
    kept = [(n, s) for i, (n, s) in enumerate(zip(x.shape, x.strides, strict=True)) if i not in gone]
    return _as(x, kept)


def repeated(x: Operand, axis: int) -> Operand:
    """Return `x` with a new axis along which it is repeated."""
    axes = list(zip(x.shape, x.strides, strict=True))
    axes.insert(len(axes) + 1 + axis if axis < 0 else axis, (1, 0))
    return _as(x, axes)


def _as(x: Operand, axes: Sequence[tuple[int, int]]) -> Operand:
    tensor = replace(x.tensor, shape=tuple(n for n, _ in axes), strides=tuple(s for _, s in axes))
    return replace(x, tensor=tensor)


def _indexer(launches: Launches, call: Bound) -> None:
    q, k, weights, mask = (as_float(launches, call.operand(i)) for i in range(4))
    out = call.out
    keys = out.shape[-1]
    walked = [without(q, -1, -2), repeated(without(k, -1, -2), -1), *map(row_heads, (weights, mask, out))]
    axes = axes_of(out.shape[:-1], walked)
    count = axes.count * keys
    need(count < MOST_ELEMENTS, f"a result of {count} elements is too large for one launch")
    words: list[Word] = [
        count,
        *q.shape[-2:],
        keys,
        *q.strides[-2:],
        *k.strides[-2:],
        weights.strides[-1],
        mask.strides[-1],
    ]
    words += [*axes.words, *(w for i, o in enumerate((q, k, weights, mask, out)) for w in axes.walk(i, o))]
    launches.add(SOURCE["lightning_indexer"], blocks(count, 4), 128, words)


def _comb(launches: Launches, call: Bound) -> None:
    mixes, scale, base = (as_float(launches, call.operand(i)) for i in range(3))
    axes = axes_of(mixes.shape[:-1], [row_heads(mixes), without(call.out, -1, -2)])
    turns, eps = int(float_attribute(call.attrs, "n_iter")), float(float_attribute(call.attrs, "eps"))
    words: list[Word] = [
        axes.count,
        call.out.shape[-1],
        turns,
        mixes.strides[-1],
        base.strides[-1],
        scale.strides[-1],
        eps,
    ]
    words += [*axes.words, *axes.walk(0, mixes), *axes.walk(1, call.out), scale, base]
    launches.add(SOURCE["hyper_comb"], blocks(axes.count, 64), 64, words)


def _pre(launches: Launches, call: Bound) -> None:
    x, weights, out = as_float(launches, call.operand(0)), as_float(launches, call.operand(1)), call.out
    gated = bool(call.attrs["gated"])
    per_stream = without(weights, -2) if gated else repeated(row_heads(weights), -1)
    axes = axes_of(out.shape, [without(x, -2), per_stream, out])
    need(axes.count < MOST_ELEMENTS, f"a result of {axes.count} elements is too large for one launch")
    words: list[Word] = [axes.count, x.shape[-2], gated, x.strides[-2], weights.strides[-2 if gated else -1]]
    words += [float(float_attribute(call.attrs, "scale")), *axes.words]
    words += [w for i, o in enumerate((x, weights, out)) for w in axes.walk(i, o)]
    launches.add(SOURCE["hyper_pre"], blocks(axes.count, THREADS), THREADS, words)


def _post(launches: Launches, call: Bound) -> None:
    x, residual, post = (as_float(launches, call.operand(i)) for i in range(3))
    comb, out = call.optional(3), call.out
    comb = None if comb is None else as_float(launches, comb)
    streams, held = residual.shape[-2], HELD
    if streams > HELD:
        held, kept = 0, launches.scratch(residual.shape)
        launch_copy(launches, residual, kept)
        residual = kept
    walked = [x, without(residual, -2), repeated(row_heads(post), -1)]
    walked += [without(out, -2)] if comb is None else [repeated(without(comb, -1, -2), -1), without(out, -2)]
    axes = axes_of(x.shape, walked)
    need(axes.count < MOST_ELEMENTS, f"{axes.count} elements are too many for one launch")
    words: list[Word] = [axes.count, streams, residual.strides[-2], post.strides[-1]]
    words += [*((0, 0) if comb is None else comb.strides[-2:]), out.strides[-2], *axes.words]
    words += [w for i, o in enumerate((x, residual, post)) for w in axes.walk(i, o)]
    words += [0] * (1 + MOST) if comb is None else axes.walk(3, comb)
    words += axes.walk(len(walked) - 1, out)
    launches.add(SOURCE[f"hyper_post<{held}>"], blocks(axes.count, THREADS), THREADS, words)


def _causal_mask(launches: Launches, call: Bound) -> None:
    positions, out = call.operand(0), call.out
    need(positions.dtype is DType.I32, f"positions of type {positions.dtype} are missing")
    axes, count = axes_of(positions.shape, [positions]), math.prod(out.shape)
    need(count < MOST_ELEMENTS, f"a result of {count} elements is too large for one launch")
    words: list[Word] = [
        count,
        out.shape[-1],
        int(float_attribute(call.attrs, "window")),
        *axes.words,
        *axes.walk(0, positions),
        out,
    ]
    launches.add(SOURCE["causal_mask"], blocks(count, THREADS), THREADS, words)


BINDINGS: Mapping[str, Binding] = {
    "lightning_indexer": _indexer,
    "dsv4_hc_comb": _comb,
    "dsv4_hc_pre": _pre,
    "dsv4_hc_post": _post,
    "causal_mask": _causal_mask,
}
