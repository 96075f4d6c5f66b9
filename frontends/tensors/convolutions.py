"""Convolution, pooling and interpolation of tensors [images, channels, axes ...].

`size` is the window size of each axis. `pads` has the padding entries before and after each axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import floor, prod

import numpy as np

from ... import ops
from ...ops.composite.interpolation import build_interpolation_matrix
from ...ops.composite.window_settings import WindowSettings
from ..errors import ModelError
from .arithmetic import add, div
from .matmul import reshape_channel_vector
from .reductions import mean
from .shapes import move_axis, reshape
from .tensor import Tensor, as_tensor, cast, constant_tensor

Sizes = Sequence[int]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    pads: Sequence[tuple[int, int]],
    dilation: Sizes,
    groups: int = 1,
) -> Tensor:
    """Return the convolution of x [n, c, ...] with weight [o, c / groups, ...] as [n, o, ...].

    `x` may lack the axis n. `pads` counts zeros.

    Raises:
        ModelError: The channels of `x`, the weight and the groups do not agree.
    """
    if x.rank == weight.rank - 1:
        one = convolution(reshape(x, (1, *x.shape)), weight, bias, stride, pads, dilation, groups)
        return reshape(one, one.shape[1:])
    if weight.shape[1] * groups != x.shape[1] or weight.shape[0] % groups:
        raise ModelError(f"a convolution of {x.shape[1]} channels by {groups} groups with weights of {weight.shape}")
    left, right = zip(*pads, strict=True)
    image = as_tensor(
        ops.convolution(x.value, weight.value, stride=stride, dilation=dilation, left=left, right=right, groups=groups)
    )
    return image if bias is None else add(image, reshape_channel_vector(bias, image.rank))


def transposed_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    pads: Sequence[tuple[int, int]],
    dilation: Sizes,
    groups: int = 1,
    end_padding: Sizes = (),
) -> Tensor:
    """Return the transposed convolution of x [n, c, ...] with weight [c, o / groups, ...] as [n, o, ...].

    `end_padding` lengthens the end of each axis of the result. `x` may lack the axis n.
    """
    if x.rank == weight.rank - 1:
        one = transposed_convolution(
            reshape(x, (1, *x.shape)), weight, bias, stride, pads, dilation, groups, end_padding
        )
        return reshape(one, one.shape[1:])
    more = tuple(end_padding) or (0,) * len(pads)
    image = as_tensor(
        ops.transposed_convolution(
            x.value,
            weight.value,
            stride=stride,
            dilation=dilation,
            left=tuple(a for a, _ in pads),
            right=tuple(b - e for (_, b), e in zip(pads, more, strict=True)),
            groups=groups,
        )
    )
    return image if bias is None else add(image, reshape_channel_vector(bias, image.rank))


def _compute_ceil_mode_padding(
    x: Tensor, size: Sizes, stride: Sizes, pads: Sequence[tuple[int, int]], dilation: Sizes
) -> list[int]:
    """Return how many entries to append to each axis so that ceil mode gets its incomplete last window.

    In ceil mode the last window may pass the end of the axis, but has to begin before it.
    """
    longer = []
    for n, k, s, (a, b), d in zip(x.shape[2:], size, stride, pads, dilation, strict=True):
        span = n + a + b - d * (k - 1) - 1
        count = -(-span // s) + 1
        if (count - 1) * s >= n + a:
            count -= 1
        longer.append(max(0, (count - 1) * s - span))
    return longer


def _pool_batch_or_single_image(x: Tensor, pool: Callable[[Tensor], Tensor], rank: int) -> Tensor:
    """Apply `pool`, which needs an axis of images, to a batch of images or to one image without this axis.

    `rank` is the number of pooled axes.
    """
    if x.rank == rank + 1:
        out = pool(reshape(x, (1, *x.shape)))
        return reshape(out, out.shape[1:])
    return pool(x)


def max_pool(
    x: Tensor,
    size: Sizes,
    stride: Sizes,
    pads: Sequence[tuple[int, int]],
    dilation: Sizes,
    ceil_mode: bool = False,
) -> Tensor:
    """Return the largest entry of each window.

    Args:
        x: The images, [n, channels, ...] or without the axis n.
        size: Size of a window on each axis.
        stride: Distance of windows on each axis.
        pads: Padding before and after each axis, which is never the largest entry.
        dilation: Distance of the entries of a window on each axis.
        ceil_mode: Whether the last window may pass the end of an axis.
    """

    def pool(x: Tensor) -> Tensor:
        longer = _compute_ceil_mode_padding(x, size, stride, pads, dilation) if ceil_mode else [0] * len(size)
        return as_tensor(
            ops.pool(
                x.value,
                kind="max",
                size=size,
                stride=stride,
                dilation=dilation,
                left=tuple(a for a, _ in pads),
                right=tuple(b + e for (_, b), e in zip(pads, longer, strict=True)),
            )
        )

    return _pool_batch_or_single_image(x, pool, len(size))


def average_pool(
    x: Tensor,
    size: Sizes,
    stride: Sizes,
    pads: Sequence[tuple[int, int]],
    ceil_mode: bool = False,
    count_padding: bool = True,
    divisor: int | None = None,
    dilation: Sizes = (),
) -> Tensor:
    """Return the mean of the entries of each window.

    Args:
        x: The images, [n, channels, ...] or without the axis n.
        size: Size of a window on each axis.
        stride: Distance of windows on each axis.
        pads: Padding before and after each axis.
        ceil_mode: Whether the last window may pass the end of an axis. The added entries are never counted.
        count_padding: Whether the entries of `pads` are counted.
        divisor: Number to divide by, instead of the number of entries.
        dilation: Distance of the entries of a window on each axis.
    """
    steps = tuple(dilation) or (1,) * len(size)

    def pool(x: Tensor) -> Tensor:
        longer = _compute_ceil_mode_padding(x, size, stride, pads, steps) if ceil_mode else [0] * len(size)
        left, right = tuple(a for a, _ in pads), tuple(b + e for (_, b), e in zip(pads, longer, strict=True))
        settings = WindowSettings.with_defaults(size, stride, steps, left, right)
        out = as_tensor(ops.pool(x.value, kind="sum", **asdict(settings)))
        if divisor:
            return div(out, float(divisor))
        counted = np.pad(np.ones(x.shape[2:]), pads, constant_values=float(count_padding))
        inner = replace(settings, left=(0,) * len(size), right=tuple(longer))
        number = inner.sum_each_window(counted)
        return div(out, constant_tensor(np.maximum(number, 1).astype(np.float32)))

    return _pool_batch_or_single_image(x, pool, len(size))


# -------------------------------------------------------------------------------------------------- interpolation


def multiply_axis_by_matrix(x: Tensor, axis: int, matrix: np.ndarray) -> Tensor:
    """Replace each entry of one axis of `x` by a weighted sum of the entries of this axis.

    `matrix` [new entries, old entries] has the weights.
    """
    last = move_axis(x, axis, -1)
    rows = reshape(last, (prod(last.shape[:-1]), last.shape[-1]))
    out = as_tensor(ops.mul_mat(constant_tensor(np.asarray(matrix, np.float32)).value, rows.value))
    return move_axis(reshape(out, (*last.shape[:-1], matrix.shape[0])), -1, axis)


def adaptive_average_pool(x: Tensor, sizes: Sizes) -> Tensor:
    """Return the means of windows of nearly equal length along the last axes.

    `sizes` has the number of windows on each of these axes.
    """
    axes = range(x.rank - len(sizes), x.rank)
    if whole := [axis for axis, out in zip(axes, sizes, strict=True) if out == 1]:
        x = mean(x, whole, keepdim=True)
    for axis, out in zip(axes, sizes, strict=True):
        n = x.shape[axis]
        if n == out:
            continue
        matrix = np.zeros((out, n))
        for i in range(out):
            start, stop = i * n // out, -(-(i + 1) * n // out)
            matrix[i, start:stop] = 1 / (stop - start)
        x = multiply_axis_by_matrix(x, axis, matrix)
    return x


def interpolate(
    x: Tensor,
    sizes: Sizes | None,
    scales: Sequence[float] | None,
    mode: str,
    align_corners: bool = False,
) -> Tensor:
    """Resize the last axes of `x` by interpolation.

    Args:
        x: The tensor [n, channels, ...].
        sizes: The new sizes of the last axes, or None to use `scales`.
        scales: The factors of the sizes, or None.
        mode: The mode of `build_interpolation_matrix`.
        align_corners: Whether the first and last entries stay in place.
    """
    count = len(sizes if sizes is not None else scales or ())
    for i, axis in enumerate(range(x.rank - count, x.rank)):
        n = x.shape[axis]
        scale = scales[i] if scales else None
        out = sizes[i] if sizes is not None else floor(n * float(scale or 1))
        if mode == "nearest" and out * n and scale in (None, out / n):
            x = as_tensor(ops.interpolate(x.value, shape=(*x.shape[:axis], out, *x.shape[axis + 1 :])))
        elif out != n or scale not in (None, 1.0):
            x = multiply_axis_by_matrix(
                cast(x, x.dtype), axis, build_interpolation_matrix(n, out, mode, align_corners, scale)
            )
    return x
