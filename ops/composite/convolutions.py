"""Convolutions, transposed convolutions and the sum of windows, as graphs of `windows`, matrix products and views."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ...graph.dtypes import DType
from ...graph.errors import GraphError, format_count
from ...graph.node import Value
from ...graph.validation import validate_arguments
from ..elementwise.binary import add, cast
from ..matrix.matmul import mul_mat
from ..movement.arrange import pad
from ..movement.rows import get_rows
from ..movement.views import broadcast, permute, reshape, slice_, transpose
from .window_settings import ANY_VALUE, AXIS_SIZES, CHANNEL_GROUPS, CROPS, STEPS, WindowSettings, make_shared_constant


@validate_arguments(
    GraphError,
    x=ANY_VALUE,
    w=ANY_VALUE,
    stride=STEPS,
    dilation=STEPS,
    left=AXIS_SIZES,
    right=AXIS_SIZES,
    groups=CHANNEL_GROUPS,
)
def convolution(
    x: Value,
    w: Value,
    *,
    stride: Sequence[int] = (),
    dilation: Sequence[int] = (),
    left: Sequence[int] = (),
    right: Sequence[int] = (),
    groups: int = 1,
) -> Value:
    """Convolve images with a weight: the product of the weight and of the windows of `x`.

    ggml: ``CONV_2D``, ``CONV_3D``, ``CONV_2D_DW``, ``CONV_1D_DW``. A group for each channel makes it depthwise.
    A window of ggml may be longer than the padded axis; then `right` needs the zeros that it lacks.

    Args:
        x: images [n, c, axes ...] of floats.
        w: weight [o, c / groups, window axes ...] of floats. A window axis of size 0 gives zeros.
        stride: distance of windows along each axis; 1 if empty.
        dilation: distance of the entries of a window along each axis; 1 if empty.
        left: zeros before each axis; none if empty.
        right: zeros after each axis; none if empty.
        groups: channel groups, which have no weights in common.

    Returns:
        f32 [n, o, windows along each axis ...].

    Raises:
        GraphError: shapes or settings do not fit.
    """
    name = "convolution"
    _require_equal_axes(name, x, w)
    _require_groups(name, w, x.shape[1], w.shape[1] * groups, w.shape[0], groups)
    settings = WindowSettings.with_defaults(w.shape[2:], stride, dilation, left, right)
    (n, c), o, taps = x.shape[:2], w.shape[0], prod(settings.size)
    if not taps:
        return _fill_result_of_empty_windows(x, o, settings)
    counts = settings.count(name, x.shape)
    if groups == 1 and settings.has_only_window_of(x.shape[2:]):
        rows = mul_mat(reshape(_as_f32(w), shape=(o, c * taps)), reshape(_as_f32(x), shape=(n, c * taps)))
        return reshape(rows, shape=(n, o, *counts))
    by_group = reshape(settings.collect_windows_of(x), shape=(n, prod(counts), groups, c // groups * taps))
    shared = reshape(_as_f32(w), shape=(1, groups, o // groups, c // groups * taps))
    # The windows take the place of the weight of a product, which so has the channels before the windows.
    product = mul_mat(permute(by_group, axes=(0, 2, 1, 3)), broadcast(shared, shape=(n, *shared.shape[1:])))
    return reshape(product, shape=(n, o, *counts))


def _fill_result_of_empty_windows(x: Value, channels: int, settings: WindowSettings) -> Value:
    """Return the result of a convolution with windows that have no entries: zeros."""
    sizes = zip(x.shape[2:], settings.spans, settings.stride, settings.left, settings.right, strict=True)
    counts = [(n + a + b - span) // s + 1 for n, span, s, a, b in sizes]
    if min(counts) < 0:
        raise GraphError(f"convolution: windows of {settings.size} do not fit {x.spec} with its padding")
    return broadcast(make_shared_constant(np.zeros(())), shape=(x.shape[0], channels, *counts))


@validate_arguments(
    GraphError, x=ANY_VALUE, w=ANY_VALUE, stride=STEPS, dilation=STEPS, left=CROPS, right=CROPS, groups=CHANNEL_GROUPS
)
def transposed_convolution(
    x: Value,
    w: Value,
    *,
    stride: Sequence[int] = (),
    dilation: Sequence[int] = (),
    left: Sequence[int] = (),
    right: Sequence[int] = (),
    groups: int = 1,
) -> Value:
    """Add a window to the result for each entry of `x`: the transpose of `convolution`.

    ggml: ``CONV_TRANSPOSE_1D``, ``CONV_TRANSPOSE_2D``.

    Args:
        x: images [n, c, axes ...] of floats.
        w: weight [c, o / groups, window axes ...] of floats. A window axis of size 0 gives zeros.
        stride: distance of windows along each axis; 1 if empty.
        dilation: distance of the entries of a window along each axis; 1 if empty.
        left: entries to remove before each axis; a negative number adds zeros.
        right: entries to remove after each axis; a negative number adds zeros.
        groups: channel groups, which have no weights in common.

    Returns:
        f32 [n, o, axes ...]. An axis of length l has ``(l - 1) * stride + dilation * (size - 1) + 1 - left - right``
        entries.

    Raises:
        GraphError: shapes or settings do not fit.
    """
    name = "transposed_convolution"
    _require_equal_axes(name, x, w)
    _require_groups(name, w, x.shape[1], w.shape[0], w.shape[1] * groups, groups)
    settings = WindowSettings.with_defaults(w.shape[2:], stride, dilation, left, right)
    (n, c), axes, o, taps = x.shape[:2], x.shape[2:], w.shape[1] * groups, prod(settings.size)
    full = [(m - 1) * s + span for m, s, span in zip(axes, settings.stride, settings.spans, strict=True)]
    rest = [m - a - b for m, a, b in zip(full, settings.left, settings.right, strict=True)]
    if min(rest, default=0) < 1:
        raise GraphError(f"{name}: left {settings.left} and right {settings.right} leave no entry of {full}")
    if not taps:
        return broadcast(make_shared_constant(np.zeros(())), shape=(n, o, *rest))
    if set(settings.stride) <= {1}:
        return _convolve_with_reversed_taps(x, w, settings, groups)
    entries = transpose(reshape(x, shape=(n, groups, c // groups, prod(axes))))
    each = transpose(reshape(_as_f32(w), shape=(1, groups, c // groups, o // groups * taps)))
    product = mul_mat(entries, broadcast(each, shape=(n, *each.shape[1:])))
    return _add_overlapping(product, (n, o), axes, rest, settings)


def _convolve_with_reversed_taps(x: Value, w: Value, settings: WindowSettings, groups: int) -> Value:
    """Compute a transposed convolution with strides of 1 as a convolution: its windows read the taps in reverse."""
    (c, share), taps = w.shape[:2], prod(settings.size)
    by_tap = permute(reshape(w, shape=(groups, c // groups, share, taps)), axes=(3, 0, 2, 1))
    rows = get_rows(
        reshape(_as_f32(by_tap), shape=(taps, share * c)), make_shared_constant(np.arange(taps, dtype=np.int32)[::-1])
    )
    swapped = permute(reshape(rows, shape=(taps, groups, share, c // groups)), axes=(1, 2, 3, 0))
    weight = reshape(swapped, shape=(groups * share, c // groups, *settings.size))
    left, right = (
        [span - 1 - removed for span, removed in zip(settings.spans, side, strict=True)]
        for side in (settings.left, settings.right)
    )
    for i, (before, after) in enumerate(zip(left, right, strict=True)):
        n, outer, inner = x.shape[2 + i], x.shape[: 2 + i], x.shape[3 + i :]
        rows = _slice_axis_1_padding_with_zeros(reshape(x, shape=(prod(outer), n, prod(inner))), -before, n + after)
        x = reshape(rows, shape=(*outer, n + before + after, *inner))
    return convolution(x, weight, dilation=settings.dilation, groups=groups)


@validate_arguments(
    GraphError,
    x=ANY_VALUE,
    shape=AXIS_SIZES,
    size=AXIS_SIZES,
    stride=STEPS,
    dilation=STEPS,
    left=AXIS_SIZES,
    right=AXIS_SIZES,
)
def add_windows(
    x: Value,
    *,
    shape: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int] = (),
    dilation: Sequence[int] = (),
    left: Sequence[int] = (),
    right: Sequence[int] = (),
) -> Value:
    """Add windows to images, where they overlap: the transpose of `windows`. ggml: ``COL2IM_1D``.

    Args:
        x: windows as `windows` returns them, [n, windows, c, entries of a window] of floats.
        shape: sizes of the axes of the images.
        size: entries of a window along each axis.
        stride: distance of windows along each axis; 1 if empty.
        dilation: distance of the entries of a window along each axis; 1 if empty.
        left: padding before each axis, which drops the sums in it; none if empty.
        right: padding after each axis, which drops the sums in it; none if empty.

    Returns:
        Images [n, c, shape ...] in the dtype of `x`, with sums in f32.

    Raises:
        GraphError: shapes or settings do not fit.
    """
    settings = WindowSettings.with_defaults(size, stride, dilation, left, right)
    if len(x.shape) != 4:
        raise GraphError(
            f"add_windows: x has {format_count(len(x.shape), 'axis', 'axes')}; it needs images, windows, "
            "channels and entries"
        )
    n, number, c, taps = x.shape
    counts = settings.count("add_windows", (n, c, *shape))
    if (number, taps) != (prod(counts), prod(settings.size)):
        raise GraphError(
            f"add_windows: x is {x.spec}; it needs {prod(counts)} windows of {prod(settings.size)} entries"
        )
    sums = _add_overlapping(permute(_as_f32(x), axes=(0, 2, 3, 1)), (n, c), counts, shape, settings)
    return sums if sums.dtype is x.dtype else cast(sums, dtype=x.dtype)


def _add_overlapping(
    x: Value, outer: tuple[int, int], counts: Sequence[int], shape: Sequence[int], settings: WindowSettings
) -> Value:
    """Add the entries of all windows to images, one axis after the other, from the last one.

    Args:
        x: entries of windows. In row-major order they have the axes of `outer`, of ``settings.size`` and of `counts`.
        outer: number of images and of channels.
        counts: number of windows along each axis.
        shape: sizes of the axes of the result, after the `left` entries of padding.
        settings: settings of the windows.

    Returns:
        The images [*outer, *shape].
    """
    done = 1
    for i in reversed(range(len(counts))):
        before, fewer = prod(outer) * prod(settings.size[:i]), prod(counts[:i])
        taps = reshape(x, shape=(before, settings.size[i], fewer, counts[i], done))
        sums = _add_shifted_taps(taps, settings.stride[i], settings.dilation[i])
        x = _slice_axis_1_padding_with_zeros(sums, settings.left[i], settings.left[i] + shape[i])
        done *= shape[i]
    return reshape(x, shape=(*outer, *shape))


def _add_shifted_taps(x: Value, stride: int, dilation: int) -> Value:
    """Add the taps of windows along one axis: tap k of window t goes to entry ``stride * t + dilation * k``.

    The taps are divided into groups of `stride` neighbours. Group g is shifted by g windows. Pairs of neighbouring
    groups are added, then pairs of these sums, and so on.

    Args:
        x: taps of windows, [before, taps, between, windows, inner].
        stride: distance of windows.
        dilation: distance of taps.

    Returns:
        The sums [before * between, entries, inner]; there may be more entries than the windows reach.
    """
    before, taps, between, count, inner = x.shape
    if dilation > 1:
        apart = reshape(x, shape=(before, taps, 1, between * count * inner))
        x, taps = pad(apart, left=(0, 0, 0, 0), right=(0, 0, dilation - 1, 0)), taps * dilation
    groups, shift = -(-taps // stride), 1
    x = _pad_axis_1_to_size(reshape(x, shape=(before, taps, between * count * inner)), groups * stride)
    x = reshape(x, shape=(before, groups, stride * between, count, inner))
    while groups > 1:
        groups = -(-groups // 2)
        rows = reshape(x, shape=(before, x.shape[1], x.shape[2] * x.shape[3] * inner))
        pairs = reshape(_pad_axis_1_to_size(rows, 2 * groups), shape=(before * groups, 2, *x.shape[2:]))
        first, second = (slice_(pairs, axis=1, start=i, stop=i + 1) for i in range(2))
        sums = add(
            pad(first, left=(0,) * 5, right=(0, 0, 0, shift, 0)), pad(second, left=(0, 0, 0, shift, 0), right=(0,) * 5)
        )
        x, shift = reshape(sums, shape=(before, groups, *sums.shape[2:])), 2 * shift
    by_entry = permute(reshape(x, shape=(before, stride, between, x.shape[3], inner)), axes=(0, 2, 3, 1, 4))
    return reshape(by_entry, shape=(before * between, x.shape[3] * stride, inner))


def _pad_axis_1_to_size(x: Value, size: int) -> Value:
    """Append zeros to axis 1 of x [a, n, b], so that it has `size` entries: [a, size, b]."""
    return x if x.shape[1] == size else pad(x, left=(0, 0, 0), right=(0, size - x.shape[1], 0))


def _slice_axis_1_padding_with_zeros(x: Value, start: int, stop: int) -> Value:
    """Return the entries from `start` to before `stop` of axis 1 of x [a, n, b]; entries outside of it are zero."""
    n = x.shape[1]
    first, last = min(max(start, 0), n), min(max(stop, 0), n)
    inside = x if (first, last) == (0, n) else slice_(x, axis=1, start=first, stop=last)
    before = min(max(-start, 0), stop - start)
    after = stop - start - before - (last - first)
    return pad(inside, left=(0, before, 0), right=(0, after, 0)) if before or after else inside


def _as_f32(x: Value) -> Value:
    return x if x.dtype is DType.F32 else cast(x, dtype=DType.F32)


def _require_equal_axes(op: str, x: Value, w: Value) -> None:
    """Require that images and weights have the same number of axes, at least three.

    Raises:
        GraphError: they do not.
    """
    if len(x.shape) != len(w.shape) or len(x.shape) < 3:
        raise GraphError(f"{op}: x is {x.spec} and w is {w.spec}; both need two axes before those of a window")


def _require_groups(op: str, w: Value, channels: int, needed: int, results: int, groups: int) -> None:
    """Require that channels, weights and groups agree.

    Raises:
        GraphError: they do not.
    """
    if groups < 1 or channels != needed or channels % groups or results % groups:
        raise GraphError(f"{op}: {channels} channels in {groups} groups do not fit weights of {w.spec}")
