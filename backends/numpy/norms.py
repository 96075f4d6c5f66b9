"""NumPy kernels of norms over the last axis, and of softmax."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from ...graph.node import Node
from ...ops.reduction.norms import alibi_slopes
from ..base import Array
from ..host.bindings import Binding, Calls, HostInstruction
from .elementwise import as_tiling_broadcast_views


def _bind_square_sums(call: HostInstruction) -> tuple[Array, Calls]:
    x = call.operand(0)
    square, total = call.take_scratch(*x.shape), call.take_scratch(*x.shape[:-1], 1)
    return total, [
        partial(np.multiply, x, x, out=square),
        partial(np.add.reduce, square, axis=-1, keepdims=True, out=total),
    ]


def bind_rms_norm(call: HostInstruction) -> Calls:
    x = call.operand(0)
    total, calls = _bind_square_sums(call)
    return [
        *calls,
        partial(np.multiply, total, np.float32(1 / max(1, x.shape[-1])), out=total),
        partial(np.add, total, np.float32(call.number_attribute("eps")), out=total),
        partial(np.sqrt, total, out=total),
        partial(np.divide, x, total, out=call.out),
    ]


def bind_norm(call: HostInstruction) -> Calls:
    x, share = call.operand(0), np.float32(1 / max(1, call.out.shape[-1]))
    centred, total = call.take_scratch(*x.shape), call.take_scratch(*x.shape[:-1], 1)
    spread = call.take_scratch(*x.shape[:-1], 1)
    return [
        partial(np.add.reduce, x, axis=-1, keepdims=True, out=total),
        partial(np.multiply, total, share, out=total),
        partial(np.subtract, x, total, out=centred),
        partial(np.einsum, "...c,...c->...", centred, centred, out=spread[..., 0]),
        partial(np.multiply, spread, share, out=spread),
        partial(np.add, spread, np.float32(call.number_attribute("eps")), out=spread),
        partial(np.sqrt, spread, out=spread),
        partial(np.divide, centred, spread, out=call.out),
    ]


def bind_l2_norm(call: HostInstruction) -> Calls:
    eps = np.float32(call.number_attribute("eps"))
    total, calls = _bind_square_sums(call)
    root = partial(np.sqrt, total, out=total)
    guard = (
        [root, partial(np.maximum, total, eps, out=total)]
        if call.attrs["clamp"]
        else [
            partial(np.add, total, eps, out=total),
            root,
        ]
    )
    return [*calls, *guard, partial(np.divide, call.operand(0), total, out=call.out)]


def make_softmax_calls(scores: Array, top: Array, total: Array, sinks: Array | None) -> Calls:
    """Make the calls for an in-place softmax over the last axis; a row of only -inf becomes zeros.

    For such a row, the lowest finite number replaces the maximum.

    Args:
        scores: The scores, which become the result.
        top: Scratch of one element per row.
        total: Scratch of one element per row.
        sinks: Attention sinks, or None.
    """
    lowest = np.float32(np.finfo(np.float32).min)
    calls: Calls = [
        partial(np.maximum.reduce, scores, axis=-1, keepdims=True, out=top, initial=lowest),
        *([] if sinks is None else [partial(np.maximum, top, sinks, out=top)]),
        partial(np.subtract, scores, top, out=scores),
        partial(np.exp, scores, out=scores),
        partial(np.add.reduce, scores, axis=-1, keepdims=True, out=total),
    ]
    if sinks is not None:
        calls += [
            partial(np.subtract, sinks, top, out=top),
            partial(np.exp, top, out=top),
            partial(np.add, total, top, out=total),
        ]
    tiny = np.float32(np.finfo(np.float32).tiny)
    return [*calls, partial(np.maximum, total, tiny, out=total), partial(np.divide, scores, total, out=scores)]


def bind_softmax(call: HostInstruction) -> Calls:
    x, mask, sinks, out = call.operand(0), call.optional_operand(1), call.optional_operand(2), call.out
    rows = (*x.shape[:-1], 1)
    top, total = call.take_scratch(*rows), call.take_scratch(*rows)
    calls: Calls = [partial(np.multiply, x, np.float32(call.number_attribute("scale")), out=out)]
    if mask is not None:
        heads = x.shape[-3]
        slopes = alibi_slopes(heads, call.number_attribute("max_bias")).astype(np.float32)
        mask_view, target = as_tiling_broadcast_views(mask[..., None, :, :], out)
        for part, slope in split_heads_by_slope(target, slopes):
            term = call.take_scratch(*mask_view.shape[:-3], 1, *mask_view.shape[-2:])
            calls += [partial(np.multiply, mask_view, slope, out=term), partial(np.add, part, term, out=part)]
    column = None if sinks is None else sinks[:, None, None]
    return [*calls, *make_softmax_calls(out, top, total, column)]


def split_heads_by_slope(scores: Array, slopes: Array) -> list[tuple[Array, np.float32]]:
    """Split ``scores[..., heads, t, s]`` by ALiBi slope: return (view of the heads with a slope, slope) pairs."""
    if (slopes == slopes[:1]).all():
        return [(scores, slopes[0])] if len(slopes) else []
    return [(scores[..., h : h + 1, :, :], slope) for h, slope in enumerate(slopes)]


def _count_rms_norm_scratch(node: Node) -> int:
    spec = node.specs[0]
    return spec.size + spec.size // max(1, spec.shape[-1])


def _count_norm_scratch(node: Node) -> int:
    spec = node.specs[0]
    return spec.size + 2 * (spec.size // max(1, spec.shape[-1]))


def _count_softmax_scratch(node: Node) -> int:
    spec = node.specs[0]
    rows = spec.size // max(1, spec.shape[-1])
    mask = (
        node.src[1].spec.size * (spec.shape[-3] if node.attrs["max_bias"] else 1)
        if len(node.inputs) > 1 and node.src[1] is not None
        else 0
    )
    return 2 * rows + mask


KERNELS: Mapping[str, Binding] = {
    "rms_norm": Binding(bind_rms_norm, _count_rms_norm_scratch),
    "norm": Binding(bind_norm, _count_norm_scratch),
    "l2_norm": Binding(bind_l2_norm, _count_rms_norm_scratch),
    "softmax": Binding(bind_softmax, _count_softmax_scratch),
}
