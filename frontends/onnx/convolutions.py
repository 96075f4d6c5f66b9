"""Converters of ONNX's convolutions, pooling and resizing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ... import ops
from ..errors import ModelError
from ..tensors import arithmetic as arith
from ..tensors import convolutions, reductions
from ..tensors.tensor import Tensor, as_tensor, constant_tensor
from .op_calls import as_integers_or_none, require_constant

AxisPads = list[tuple[int, int]]
"""The padding before and after each spatial axis."""


def _compute_pads(
    auto_pad: str, pads: Sequence[int], n: Sequence[int], k: Sequence[int], s: Sequence[int], d: Sequence[int]
) -> AxisPads:
    """Return the padding of each spatial axis, from ``auto_pad`` or from the listed ``pads``.

    Args:
        auto_pad: ``NOTSET``, ``VALID``, ``SAME_UPPER`` or ``SAME_LOWER``.
        pads: The listed pads: first all before, then all after.
        n: Sizes of the axes.
        k: Sizes of the kernel.
        s: Strides.
        d: Dilations.
    """
    if auto_pad in ("NOTSET", "VALID"):
        flat = list(pads) if auto_pad == "NOTSET" and pads else [0] * (2 * len(k))
        return list(zip(flat[: len(k)], flat[len(k) :], strict=True))
    whole = [max(0, (-(-m // t) - 1) * t + e * (w - 1) + 1 - m) for m, w, t, e in zip(n, k, s, d, strict=True)]
    return [(p - p // 2, p // 2) if auto_pad == "SAME_LOWER" else (p // 2, p - p // 2) for p in whole]


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kernel_shape: Sequence[int] = (),
    strides: Sequence[int] = (), pads: Sequence[int] = (), dilations: Sequence[int] = (), group: int = 1,
    auto_pad: str = "NOTSET",
) -> Tensor:  # fmt: skip
    n = weight.rank - 2
    steps, wide = tuple(strides) or (1,) * n, tuple(dilations) or (1,) * n
    around = _compute_pads(auto_pad, pads, x.shape[2:], weight.shape[2:], steps, wide)
    return convolutions.convolution(x, weight, bias, steps, around, wide, group)


def transposed_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kernel_shape: Sequence[int] = (),
    strides: Sequence[int] = (), pads: Sequence[int] = (), dilations: Sequence[int] = (), group: int = 1,
    auto_pad: str = "NOTSET", output_padding: Sequence[int] = (), output_shape: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    n = weight.rank - 2
    steps, wide = tuple(strides) or (1,) * n, tuple(dilations) or (1,) * n
    more = tuple(output_padding) or (0,) * n
    flat = list(pads) or [0] * (2 * n)
    around = list(zip(flat[:n], flat[n:], strict=True))
    if output_shape or auto_pad.startswith("SAME"):
        sizes = list(output_shape)[-n:] or [m * s for m, s in zip(x.shape[2:], steps, strict=True)]
        around = []
        for m, s, d, k, o, e in zip(x.shape[2:], steps, wide, weight.shape[2:], sizes, more, strict=True):
            pad_total = s * (m - 1) + e + (k - 1) * d + 1 - o
            around.append(
                (pad_total - pad_total // 2, pad_total // 2)
                if auto_pad != "SAME_UPPER"
                else (pad_total // 2, pad_total - pad_total // 2)
            )
    return convolutions.transposed_convolution(x, weight, bias, steps, around, wide, group, more)


def column_to_image(
    x: Tensor, image_shape: Tensor, block_shape: Tensor, *, dilations: Sequence[int] = (), pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Convert ``Col2Im``: add blocks [n, c * entries of a block, blocks] to images, where they overlap."""
    shape, size = (tuple(as_integers_or_none(t) or ()) for t in (image_shape, block_shape))
    taps, axes = math.prod(size), len(size)
    if x.rank != 3 or taps < 1 or x.shape[1] % taps:
        raise ModelError(f"blocks of {list(size)} do not divide the rows of {list(x.shape)}")
    n, rows, blocks = x.shape
    by_channel = ops.reshape(x.value, shape=(n, rows // taps, taps, blocks))
    images = ops.add_windows(
        ops.permute(by_channel, axes=(0, 3, 1, 2)),
        shape=shape,
        size=size,
        stride=strides,
        dilation=dilations,
        left=pads[:axes],
        right=pads[axes:],
    )
    return as_tensor(images)


def max_pool(
    x: Tensor, *, kernel_shape: Sequence[int], strides: Sequence[int] = (), pads: Sequence[int] = (),
    dilations: Sequence[int] = (), ceil_mode: int = 0, auto_pad: str = "NOTSET", storage_order: int = 0,
) -> Tensor:  # fmt: skip
    n = len(kernel_shape)
    steps, wide = tuple(strides) or (1,) * n, tuple(dilations) or (1,) * n
    around = _compute_pads(auto_pad, pads, x.shape[2:], kernel_shape, steps, wide)
    return convolutions.max_pool(x, kernel_shape, steps, around, wide, bool(ceil_mode))


def average_pool(
    x: Tensor, *, kernel_shape: Sequence[int], strides: Sequence[int] = (), pads: Sequence[int] = (),
    dilations: Sequence[int] = (), ceil_mode: int = 0, auto_pad: str = "NOTSET", count_include_pad: int = 0,
) -> Tensor:  # fmt: skip
    n = len(kernel_shape)
    steps, wide = tuple(strides) or (1,) * n, tuple(dilations) or (1,) * n
    around = _compute_pads(auto_pad, pads, x.shape[2:], kernel_shape, steps, wide)
    return convolutions.average_pool(
        x, kernel_shape, steps, around, bool(ceil_mode), bool(count_include_pad), dilation=wide
    )


def power_pool(x: Tensor, *, p: int = 2, kernel_shape: Sequence[int], **more: Any) -> Tensor:
    """Convert ``LpPool``: return the p-norm of each window, the p-th root of the sum of ``|x| ** p``."""
    powers = arith.power(arith.absolute(x), p)
    means = average_pool(powers, kernel_shape=kernel_shape, count_include_pad=1, **more)
    sums = arith.scale_and_shift(means, math.prod(kernel_shape))
    return sums if p == 1 else arith.power(sums, 1 / p)


def make_global_pool_converter(kind: str) -> Any:
    """Make the converter of a pooling over all spatial axes, which leaves one entry per channel.

    `kind` is ``mean`` or ``max``.
    """

    def row(x: Tensor) -> Tensor:
        over = list(range(2, x.rank))
        return (
            reductions.mean(x, over, True) if kind == "mean" else reductions.reduce_max_min_or_prod(kind, x, over, True)
        )

    return row


# ------------------------------------------------------------------------------------------------------------ resizing


def _compute_source_positions(old_size: int, new_size: int, scale: float, coordinate_mode: str) -> np.ndarray:
    """Return the position on the old axis from which each new entry is interpolated.

    Args:
        old_size: The old size of the axis.
        new_size: The new size of the axis.
        scale: New size divided by old size, before rounding.
        coordinate_mode: ONNX's ``coordinate_transformation_mode``.
    """
    i = np.arange(new_size, dtype=np.float64)
    if coordinate_mode == "align_corners":
        return i * (old_size - 1) / (old_size * scale - 1) if new_size > 1 else np.zeros(1)
    if coordinate_mode == "asymmetric":
        return i / scale
    if coordinate_mode == "pytorch_half_pixel" and new_size == 1:
        return np.full(1, -0.5)
    shift = 0.0
    if coordinate_mode == "half_pixel_symmetric":
        shift = old_size / 2 * (1 - new_size / (old_size * scale))
    elif coordinate_mode not in ("half_pixel", "pytorch_half_pixel"):
        raise ModelError(
            f"resizing by {coordinate_mode!r}; hocket has half_pixel, align_corners, asymmetric and their kin"
        )
    return shift + (i + 0.5) / scale - 0.5


_ROUNDING_BY_MODE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda p: np.ceil(p - 0.5),
    "round_prefer_ceil": lambda p: np.floor(p + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}
"""Functions that round a position, by ONNX's ``nearest_mode``."""


def _build_resize_matrix(
    positions: np.ndarray,
    old_size: int,
    mode: str,
    rounding_mode: str,
    cubic_coefficient: float,
    excludes_outside: bool,
    kernel_width: float,
) -> np.ndarray:
    """Build the interpolation matrix [new, old] that resizes one axis.

    Args:
        positions: The position of each new entry on the old axis.
        old_size: The old size of the axis.
        mode: ``nearest``, ``linear`` or ``cubic``.
        rounding_mode: The rounding of positions in mode ``nearest``.
        cubic_coefficient: The coefficient of the cubic kernel.
        excludes_outside: Give entries outside the axis the weight 0; otherwise they count as the nearest entry.
        kernel_width: The width of the kernel relative to its usual width; above 1 for antialiasing.
    """
    matrix = np.zeros((len(positions), old_size))
    if mode == "nearest":
        ids = np.clip(_ROUNDING_BY_MODE[rounding_mode](positions), 0, old_size - 1).astype(int)
        matrix[np.arange(len(positions)), ids] = 1
        return matrix
    reach = math.ceil((1 if mode == "linear" else 2) * kernel_width)
    first = np.floor(positions).astype(int)
    for offset in range(1 - reach, reach + 1):
        t = np.abs(first + offset - positions) / kernel_width
        if mode == "linear":
            weight = np.maximum(0, 1 - t)
        else:
            inner, outer = (
                ((cubic_coefficient + 2) * t - (cubic_coefficient + 3)) * t * t + 1,
                ((cubic_coefficient * t - 5 * cubic_coefficient) * t + 8 * cubic_coefficient) * t
                - 4 * cubic_coefficient,
            )
            weight = np.where(t <= 1, inner, np.where(t < 2, outer, 0))
        place = first + offset
        weight = np.where((place < 0) | (place >= old_size), 0, weight) if excludes_outside else weight
        np.add.at(matrix, (np.arange(len(positions)), np.clip(place, 0, old_size - 1)), weight)
    return matrix / matrix.sum(1, keepdims=True)


def resize(
    x: Tensor, roi: Tensor | None = None, scales: Tensor | None = None, sizes: Tensor | None = None, *,
    mode: str = "nearest", coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor", cubic_coeff_a: float = -0.75, exclude_outside: int = 0,
    axes: Sequence[int] | None = None, antialias: int = 0, extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
) -> Tensor:  # fmt: skip
    """Convert ``Resize``: resize axes one after the other, by scales or to sizes.

    To resize an axis, it is multiplied by an interpolation matrix.
    """
    over = [x.normalise_axis(a) for a in (range(x.rank) if axes is None else axes)]
    if sizes is not None and sizes.shape != (0,):
        output_sizes = as_integers_or_none(sizes) or []
        factors = [w / x.shape[a] for w, a in zip(output_sizes, over, strict=True)]
        if keep_aspect_ratio_policy != "stretch":
            factors = [(min if keep_aspect_ratio_policy == "not_larger" else max)(factors)] * len(over)
            output_sizes = [math.floor(f * x.shape[a] + 0.5) for f, a in zip(factors, over, strict=True)]
    else:
        if scales is None:
            raise ModelError("resizing needs scales or sizes")
        factors = [float(f) for f in require_constant(scales)]
        output_sizes = [math.floor(f * x.shape[a]) for f, a in zip(factors, over, strict=True)]
    for axis, out, scale in zip(over, output_sizes, factors, strict=True):
        n = x.shape[axis]
        if out < 1 or out * n > 1 << 26:
            raise ModelError(f"an axis of {n} resized to {out}")
        if out == n and scale == 1.0 and coordinate_transformation_mode != "tf_crop_and_resize":
            continue
        points = _compute_source_positions(n, out, scale, coordinate_transformation_mode)
        wide = max(1.0, 1 / scale) if antialias else 1.0
        matrix = _build_resize_matrix(points, n, mode, nearest_mode, cubic_coeff_a, bool(exclude_outside), wide)
        x = convolutions.multiply_axis_by_matrix(arith.as_float(x), axis, matrix)
    return x


def upsample(x: Tensor, factors: Any = None, *, scales: Any = None, mode: str = "nearest") -> Tensor:
    """Convert ``Upsample``, the older form of ``Resize``: resize all axes by scales."""
    scale_tensor = factors if factors is not None else constant_tensor(np.asarray(scales, np.float32))
    return resize(x, None, scale_tensor, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
