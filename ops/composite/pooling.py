"""Pooling: the largest entry, the sum or the mean of each sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import numpy as np

from ...graph.errors import GraphError
from ...graph.node import Value
from ...graph.validation import TEXT, validate_arguments
from ..elementwise.binary import div, scale
from ..movement.views import permute, reshape
from ..reduction.reductions import reduce, sum_rows
from .window_settings import ANY_VALUE, AXIS_SIZES, STEPS, WindowSettings, make_shared_constant

POOLING_KINDS = ("max", "sum", "mean", "inner_mean")
"""The kinds of pooling."""


@validate_arguments(
    GraphError, x=ANY_VALUE, kind=TEXT, size=AXIS_SIZES, stride=STEPS, dilation=STEPS, left=AXIS_SIZES, right=AXIS_SIZES
)
def pool(
    x: Value,
    *,
    kind: str,
    size: Sequence[int],
    stride: Sequence[int] = (),
    dilation: Sequence[int] = (),
    left: Sequence[int] = (),
    right: Sequence[int] = (),
) -> Value:
    """Reduce each window of images to one number. ggml: ``POOL_1D``, ``POOL_2D``.

    The mean of ``POOL_1D`` is `inner_mean`. For a window of padding only, the maximum is -inf, which is the lowest
    float32 in ggml, and `inner_mean` is 0.

    Args:
        x: images [n, c, axes ...] of floats; for ``max`` also of integers.
        kind: ``max``; ``sum``; ``mean``, which counts padding as zeros; or ``inner_mean``, which counts no padding.
        size: entries of a window along each axis.
        stride: distance of windows along each axis; 1 if empty.
        dilation: distance of the entries of a window along each axis; 1 if empty.
        left: padding before each axis; none if empty.
        right: padding after each axis; none if empty.

    Returns:
        [n, c, windows along each axis ...], in the dtype of `x` for ``max``, else f32.

    Raises:
        GraphError: shapes or settings do not fit.
    """
    if kind not in POOLING_KINDS:
        raise GraphError(f"pool: kind is {kind!r:.60}; one of {', '.join(POOLING_KINDS)}")
    settings = WindowSettings.with_defaults(size, stride, dilation, left, right)
    shape = (*x.shape[:2], *settings.count("pool", x.shape))
    if kind == "max":
        lowest = -(2.0 ** (8 * x.dtype.storage.itemsize - 1)) if x.dtype.is_integer else -inf
        by_channel = permute(settings.collect_windows_of(x, lowest), axes=(0, 2, 1, 3))
        return reshape(reduce(by_channel, kind="max"), shape=shape)
    sums = reshape(sum_rows(permute(settings.collect_windows_of(x), axes=(0, 2, 1, 3))), shape=shape)
    if kind == "mean":
        return scale(sums, scale=1 / prod(settings.size))
    if kind == "inner_mean":
        return div(sums, make_shared_constant(np.maximum(settings.sum_each_window(np.ones(x.shape[2:])), 1)))
    return sums
