"""Convolution, pooling and interpolation of tensors [images, channels, axes ...].

`size` is the window size of each axis. `pads` has the padding entries before and after each axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor, prod

import numpy as np

from ... import ops
from ..errors import ModelError
from .arithmetic import add, div
from .matmul import reshape_channel_vector
from .reductions import argmax
from .shapes import expand, flip, move_axis, pad, permute, reshape, slice_range
from .tensor import Tensor, as_tensor, cast, constant_tensor

Sizes = Sequence[int]


def _extract_windows(
    x: Tensor, size: Sizes, stride: Sizes, dilation: Sizes, pads: Sequence[tuple[int, int]], value: float = 0.0
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the sliding windows of `x` (im2col), and how many windows each axis has.

    Args:
        x: The images, [images, channels, ...].
        size: Size of a window on each axis.
        stride: Distance of windows on each axis.
        dilation: Distance of the entries of a window on each axis.
        pads: Padding before and after each axis.
        value: The number that fills the padding.

    Returns:
        The windows [images, windows, channels, entries], and the number of windows on each axis.
    """
    counts = tuple(
        (n + a + b - d * (k - 1) - 1) // s + 1
        for n, (a, b), k, s, d in zip(x.shape[2:], pads, size, stride, dilation, strict=True)
    )
    out = ops.windows(
        x.value,
        size=tuple(size),
        stride=tuple(stride),
        dilation=tuple(dilation),
        left=tuple(a for a, _ in pads),
        right=tuple(b for _, b in pads),
        value=value,
    )
    return as_tensor(out, None, x.is_bool), counts


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

    It is a matrix product of the weight and the windows of `x`. `x` may lack the axis n. `pads` counts zeros.

    Raises:
        ModelError: The channels of `x`, the weight and the groups do not agree.
    """
    if x.rank == weight.rank - 1:
        one = convolution(reshape(x, (1, *x.shape)), weight, bias, stride, pads, dilation, groups)
        return reshape(one, one.shape[1:])
    n, c = x.shape[:2]
    o, share, *size = weight.shape
    if share * groups != c or o % groups:
        raise ModelError(f"a convolution of {c} channels by {groups} groups with weights of {list(weight.shape)}")
    parts, counts = _extract_windows(x, size, stride, dilation, pads)
    windows, taps = prod(counts), prod(size)
    shared = reshape(weight, (1, groups, o // groups, share * taps))
    runs = permute(reshape(parts, (n, windows, groups, share * taps)), (0, 2, 1, 3))
    each = expand(shared, (n, *shared.shape[1:]))
    image = reshape(
        as_tensor(ops.mul_mat(runs.value, each.value)), (n, o, *counts)
    )  # the windows are the weight matrix of the product
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
    c, share, *size = weight.shape
    for i, s in enumerate(stride):
        if s > 1:  # insert zeros between entries
            at, count = 2 + i, x.shape[2 + i]
            before, after = x.shape[:at], x.shape[at + 1 :]
            spread = pad(reshape(x, (prod(before), count, 1, prod(after))), [(0, 0), (0, 0), (0, s - 1), (0, 0)])
            x = slice_range(reshape(spread, (*before, count * s, *after)), at, 0, (count - 1) * s + 1)
    flipped = flip(weight, range(2, weight.rank))
    runs = reshape(flipped, (groups, c // groups, share * prod(size)))
    runs = reshape(runs, (groups, c // groups, share, prod(size)))
    swapped = reshape(permute(runs, (0, 2, 1, 3)), (groups * share, c // groups, *size))
    extra = tuple(end_padding) or (0,) * len(size)
    around = [
        (d * (k - 1) - a, d * (k - 1) - b + e) for d, k, (a, b), e in zip(dilation, size, pads, extra, strict=True)
    ]
    whole = pad(x, [(0, 0), (0, 0), *((min(0, a), min(0, b)) for a, b in around)])
    ones = (1,) * len(size)
    return convolution(whole, swapped, bias, ones, [(max(0, a), max(0, b)) for a, b in around], dilation, groups)


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
    returns_indices: bool = False,
) -> Tensor:
    """Return the largest entry of each window.

    Args:
        x: The images, [n, channels, ...] or without the axis n.
        size: Size of a window on each axis.
        stride: Distance of windows on each axis.
        pads: Padding before and after each axis, which is never the largest entry.
        dilation: Distance of the entries of a window on each axis.
        ceil_mode: Whether the last window may pass the end of an axis.
        returns_indices: Return the index of the entry in its window instead of the entry.
    """

    def pool(x: Tensor) -> Tensor:
        longer = _compute_ceil_mode_padding(x, size, stride, pads, dilation) if ceil_mode else [0] * len(size)
        around = [(a, b + e) for (a, b), e in zip(pads, longer, strict=True)]
        lowest = -(2.0 ** (8 * x.dtype.storage.itemsize - 1)) if x.is_integer else -np.inf
        parts, counts = _extract_windows(x, size, stride, dilation, around, lowest)
        rows = permute(parts, (0, 2, 1, 3))
        best = argmax(rows, -1) if returns_indices else as_tensor(ops.reduce(rows.value, kind="max"))
        return reshape(best, (*x.shape[:2], *counts))

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
        around = [(a, b + e) for (a, b), e in zip(pads, longer, strict=True)]
        parts, counts = _extract_windows(x, size, stride, steps, around)
        sums = as_tensor(ops.sum_rows(permute(parts, (0, 2, 1, 3)).value))
        out = reshape(sums, (*x.shape[:2], *counts))
        if divisor:
            return div(out, float(divisor))
        real = np.ones(x.shape[2:], np.float32)
        counted = np.pad(real, pads, constant_values=float(count_padding))
        counted = np.pad(counted, [(0, e) for e in longer])
        spans = tuple(d * (k - 1) + 1 for k, d in zip(size, steps, strict=True))
        views = np.lib.stride_tricks.sliding_window_view(counted, spans)
        picks = (*(slice(None, None, s) for s in stride), *(slice(None, None, d) for d in steps))
        number = views[picks].sum(axis=tuple(range(len(size), 2 * len(size))))
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
    for axis, out in zip(range(x.rank - len(sizes), x.rank), sizes, strict=True):
        n = x.shape[axis]
        matrix = np.zeros((out, n))
        for i in range(out):
            start, stop = i * n // out, -(-(i + 1) * n // out)
            matrix[i, start:stop] = 1 / (stop - start)
        x = multiply_axis_by_matrix(x, axis, matrix)
    return x


def _compute_cubic_weights(t: np.ndarray, a: float = -0.75) -> list[np.ndarray]:
    """Return the weights of the four neighbours of a point in cubic interpolation (Keys, 1981).

    Args:
        t: The distance of the point from the second neighbour.
        a: The coefficient of the cubic kernel.
    """

    def inner_weight(u: np.ndarray) -> np.ndarray:
        return ((a + 2) * u - (a + 3)) * u * u + 1

    def outer_weight(u: np.ndarray) -> np.ndarray:
        return ((a * u - 5 * a) * u + 8 * a) * u - 4 * a

    return [outer_weight(t + 1), inner_weight(t), inner_weight(1 - t), outer_weight(2 - t)]


def build_interpolation_matrix(
    n: int, out: int, mode: str, align_corners: bool = False, scale: float | None = None
) -> np.ndarray:
    """Build the interpolation matrix [out, n], which makes `out` entries from `n` entries.

    Args:
        n: Number of old entries.
        out: Number of new entries.
        mode: ``nearest``, ``nearest-exact``, ``linear`` or ``cubic``.
        align_corners: Whether the first and last entries stay in place.
        scale: Ratio of new to old entries, if it differs from ``out / n``.
    """
    step = (
        (n - 1) / (out - 1)
        if align_corners and out > 1
        else 0.0
        if align_corners
        else (1 / scale if scale else n / out)
    )
    i = np.arange(out, dtype=np.float64)
    matrix = np.zeros((out, n))
    if mode.startswith("nearest"):
        at = (i + 0.5 if mode == "nearest-exact" else i) * step
        matrix[np.arange(out), np.minimum(np.floor(at).astype(int), n - 1)] = 1
        return matrix
    at = i * step if align_corners else (i + 0.5) * step - 0.5
    if mode == "linear" and not align_corners:
        at = np.maximum(at, 0)
    first = np.floor(at).astype(int)
    rest = at - first
    taps = (
        [(0, 1 - rest), (1, rest)]
        if mode == "linear"
        else list(zip((-1, 0, 1, 2), _compute_cubic_weights(rest), strict=True))
    )
    for offset, weight in taps:
        np.add.at(matrix, (np.arange(out), np.clip(first + offset, 0, n - 1)), weight)
    return matrix


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
        if out != n or scale not in (None, 1.0):
            x = multiply_axis_by_matrix(
                cast(x, x.dtype), axis, build_interpolation_matrix(n, out, mode, align_corners, scale)
            )
    return x
