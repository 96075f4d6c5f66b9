"""Kernels of the lightning indexer (DeepSeek V3.2), of hyper-connections (V4), and of causal masks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ....graph.dtypes import DType
from ....ops.declaration.attributes import float_attribute
from ...fusion.operands import BoundInstruction, Operand, require_supported
from ..binding.iteration_axes import MAX_ITERATION_AXES, as_row_starts, build_merged_tiling_iteration_axes
from ..binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ..device.driver import KernelSource
from .elementwise import ELEMENTWISE_THREADS, MAX_ELEMENTS, as_float
from .moves import launch_broadcast_and_convert

MAX_STREAMS_PER_THREAD = 8
"""Maximum number of residual streams that a thread keeps in registers."""
KERNELS = (
    "lightning_indexer",
    "hyper_comb",
    "hyper_pre",
    f"hyper_post<{MAX_STREAMS_PER_THREAD}>",
    "hyper_post<0>",
    "causal_mask",
)
SOURCE = KernelSource("indexer.cu", KERNELS)
SOURCES = (SOURCE,)


def take_index_zero_of_axes(x: Operand, *axes: int) -> Operand:
    """Return a view of `x` without these axes, at index 0 of each of them."""
    gone = {a % len(x.shape) for a in axes}
    remaining = [(n, s) for i, (n, s) in enumerate(zip(x.shape, x.strides, strict=True)) if i not in gone]
    return _with_axes(x, remaining)


def insert_repeated_axis(x: Operand, axis: int) -> Operand:
    """Return a view of `x` with a new axis of stride 0 at position `axis`, along which the operand is repeated."""
    axes = list(zip(x.shape, x.strides, strict=True))
    axes.insert(len(axes) + 1 + axis if axis < 0 else axis, (1, 0))
    return _with_axes(x, axes)


def _with_axes(x: Operand, axes: Sequence[tuple[int, int]]) -> Operand:
    tensor = replace(x.tensor, shape=tuple(n for n, _ in axes), strides=tuple(s for _, s in axes))
    return replace(x, tensor=tensor)


def _bind_lightning_indexer(launches: LaunchBuilder, call: BoundInstruction) -> None:
    q, k, weights, mask = (as_float(launches, call.operand(i)) for i in range(4))
    out = call.out
    keys = out.shape[-1]
    walked = [
        take_index_zero_of_axes(q, -1, -2),
        insert_repeated_axis(take_index_zero_of_axes(k, -1, -2), -1),
        *map(as_row_starts, (weights, mask, out)),
    ]
    axes = build_merged_tiling_iteration_axes(out.shape[:-1], walked)
    count = axes.element_count * keys
    require_supported(count < MAX_ELEMENTS, f"a result of {count} elements is too large for one launch")
    words: list[LaunchWord] = [
        count,
        *q.shape[-2:],
        keys,
        *q.strides[-2:],
        *k.strides[-2:],
        weights.strides[-1],
        mask.strides[-1],
    ]
    words += [
        *axes.axes_struct_fields,
        *(w for i, o in enumerate((q, k, weights, mask, out)) for w in axes.make_address_and_stride_fields(i, o)),
    ]
    launches.add_launch(SOURCE["lightning_indexer"], count_blocks(count, 4), 128, words)


def _bind_hyper_comb(launches: LaunchBuilder, call: BoundInstruction) -> None:
    mixes, scale, base = (as_float(launches, call.operand(i)) for i in range(3))
    axes = build_merged_tiling_iteration_axes(
        mixes.shape[:-1], [as_row_starts(mixes), take_index_zero_of_axes(call.out, -1, -2)]
    )
    turns, eps = int(float_attribute(call.attrs, "n_iter")), float(float_attribute(call.attrs, "eps"))
    words: list[LaunchWord] = [
        axes.element_count,
        call.out.shape[-1],
        turns,
        mixes.strides[-1],
        base.strides[-1],
        scale.strides[-1],
        eps,
    ]
    words += [
        *axes.axes_struct_fields,
        *axes.make_address_and_stride_fields(0, mixes),
        *axes.make_address_and_stride_fields(1, call.out),
        scale,
        base,
    ]
    launches.add_launch(SOURCE["hyper_comb"], count_blocks(axes.element_count, 64), 64, words)


def _bind_hyper_pre(launches: LaunchBuilder, call: BoundInstruction) -> None:
    x, weights, out = as_float(launches, call.operand(0)), as_float(launches, call.operand(1)), call.out
    gated = bool(call.attrs["gated"])
    per_stream = take_index_zero_of_axes(weights, -2) if gated else insert_repeated_axis(as_row_starts(weights), -1)
    axes = build_merged_tiling_iteration_axes(out.shape, [take_index_zero_of_axes(x, -2), per_stream, out])
    require_supported(
        axes.element_count < MAX_ELEMENTS, f"a result of {axes.element_count} elements is too large for one launch"
    )
    words: list[LaunchWord] = [
        axes.element_count,
        x.shape[-2],
        gated,
        x.strides[-2],
        weights.strides[-2 if gated else -1],
    ]
    words += [float(float_attribute(call.attrs, "scale")), *axes.axes_struct_fields]
    words += [w for i, o in enumerate((x, weights, out)) for w in axes.make_address_and_stride_fields(i, o)]
    launches.add_launch(
        SOURCE["hyper_pre"], count_blocks(axes.element_count, ELEMENTWISE_THREADS), ELEMENTWISE_THREADS, words
    )


def _bind_hyper_post(launches: LaunchBuilder, call: BoundInstruction) -> None:
    x, residual, post = (as_float(launches, call.operand(i)) for i in range(3))
    comb, out = call.optional_operand(3), call.out
    comb = None if comb is None else as_float(launches, comb)
    streams, register_streams = residual.shape[-2], MAX_STREAMS_PER_THREAD
    if streams > MAX_STREAMS_PER_THREAD:
        register_streams, copy = 0, launches.allocate_scratch(residual.shape)
        launch_broadcast_and_convert(launches, residual, copy)
        residual = copy
    walked = [x, take_index_zero_of_axes(residual, -2), insert_repeated_axis(as_row_starts(post), -1)]
    walked += (
        [take_index_zero_of_axes(out, -2)]
        if comb is None
        else [insert_repeated_axis(take_index_zero_of_axes(comb, -1, -2), -1), take_index_zero_of_axes(out, -2)]
    )
    axes = build_merged_tiling_iteration_axes(x.shape, walked)
    require_supported(axes.element_count < MAX_ELEMENTS, f"{axes.element_count} elements are too many for one launch")
    words: list[LaunchWord] = [axes.element_count, streams, residual.strides[-2], post.strides[-1]]
    words += [*((0, 0) if comb is None else comb.strides[-2:]), out.strides[-2], *axes.axes_struct_fields]
    words += [w for i, o in enumerate((x, residual, post)) for w in axes.make_address_and_stride_fields(i, o)]
    words += [0] * (1 + MAX_ITERATION_AXES) if comb is None else axes.make_address_and_stride_fields(3, comb)
    words += axes.make_address_and_stride_fields(len(walked) - 1, out)
    launches.add_launch(
        SOURCE[f"hyper_post<{register_streams}>"],
        count_blocks(axes.element_count, ELEMENTWISE_THREADS),
        ELEMENTWISE_THREADS,
        words,
    )


def _bind_causal_mask(launches: LaunchBuilder, call: BoundInstruction) -> None:
    positions, out = call.operand(0), call.out
    require_supported(positions.dtype is DType.I32, f"positions of type {positions.dtype} are missing")
    axes, count = build_merged_tiling_iteration_axes(positions.shape, [positions]), math.prod(out.shape)
    require_supported(count < MAX_ELEMENTS, f"a result of {count} elements is too large for one launch")
    words: list[LaunchWord] = [
        count,
        out.shape[-1],
        int(float_attribute(call.attrs, "window")),
        *axes.axes_struct_fields,
        *axes.make_address_and_stride_fields(0, positions),
        out,
    ]
    launches.add_launch(SOURCE["causal_mask"], count_blocks(count, ELEMENTWISE_THREADS), ELEMENTWISE_THREADS, words)


BINDINGS: Mapping[str, OpBinder] = {
    "lightning_indexer": _bind_lightning_indexer,
    "dsv4_hc_comb": _bind_hyper_comb,
    "dsv4_hc_pre": _bind_hyper_pre,
    "dsv4_hc_post": _bind_hyper_post,
    "causal_mask": _bind_causal_mask,
}
