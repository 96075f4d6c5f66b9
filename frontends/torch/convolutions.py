"""Converters of ATen's convolutions, pooling and interpolations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tensors import convolutions
from ..tensors.tensor import Tensor
from .op_calls import OpConverter


def as_ints_per_axis(x: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Return one integer for each of `count` axes; a single integer is repeated."""
    values = (x,) if isinstance(x, int) else tuple(x)
    return values * count if len(values) == 1 else values


def as_symmetric_pads(pads: Sequence[int]) -> list[tuple[int, int]]:
    """Return each pad as a pair (before, after) of equal numbers."""
    return [(p, p) for p in pads]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    n = weight.rank - 2
    steps, wide = as_ints_per_axis(stride, n), as_ints_per_axis(dilation, n)
    pads = as_symmetric_pads(as_ints_per_axis(padding, n))
    if transposed:
        more = as_ints_per_axis(output_padding, n)
        return convolutions.transposed_convolution(x, weight, bias, steps, pads, wide, groups, more)
    return convolutions.convolution(x, weight, bias, steps, pads, wide, groups)


def make_max_pool_converter(axis_count: int, with_indices: bool = False) -> OpConverter:
    """Make the converter of a max pooling over the last `axis_count` axes.

    With `with_indices` the ATen op also returns indices, which only training needs; the converter returns None for
    them.
    """

    def row(
        x: Tensor, size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Any:
        size = as_ints_per_axis(size, axis_count)
        rest = (
            as_ints_per_axis(stride, axis_count) if stride else size,
            as_symmetric_pads(as_ints_per_axis(padding, axis_count)),
            as_ints_per_axis(dilation, axis_count),
            ceil_mode,
        )
        best = convolutions.max_pool(x, size, *rest)
        return (best, None) if with_indices else best  # indices are for training

    return row


def make_average_pool_converter(axis_count: int) -> OpConverter:
    """Make the converter of an average pooling over the last `axis_count` axes."""

    def row(
        x: Tensor,
        size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        size = as_ints_per_axis(size, axis_count)
        steps, pads = (
            as_ints_per_axis(stride, axis_count) if stride else size,
            as_symmetric_pads(as_ints_per_axis(padding, axis_count)),
        )
        return convolutions.average_pool(x, size, steps, pads, ceil_mode, count_include_pad, divisor_override)

    return row


def make_adaptive_average_pool_converter(axis_count: int) -> OpConverter:
    """Make the converter of an average pooling to given sizes of the last `axis_count` axes; None keeps a size."""

    def row(x: Tensor, sizes: Any) -> Tensor:
        output_sizes = [w or m for w, m in zip(as_ints_per_axis(sizes, axis_count), x.shape[-axis_count:], strict=True)]
        return convolutions.adaptive_average_pool(x, output_sizes)

    return row


def make_nearest_upsample_converter(mode: str) -> OpConverter:
    """Make the converter of a nearest-neighbour upsampling; `mode` is ``nearest`` or ``nearest-exact``.

    Its overloads take (size, list of scales), or (size) and then one scale for each axis.
    """

    def row(x: Tensor, size: Any, *scales: Any, **more: Any) -> Tensor:
        factors = scales[0] if len(scales) == 1 and isinstance(scales[0], list | tuple) else scales
        known = None if not factors or None in factors else [float(f) for f in factors]
        return convolutions.interpolate(x, size, known, mode)

    return row


def make_linear_or_cubic_upsample_converter(mode: str) -> OpConverter:
    """Make the converter of an upsampling by linear or cubic interpolation, with the argument ``align_corners``.

    `mode` is ``linear`` or ``cubic``.
    """

    def row(x: Tensor, size: Any, align_corners: bool, *scales: Any) -> Tensor:
        factors = scales[0] if len(scales) == 1 and isinstance(scales[0], list | tuple) else scales
        known = None if not factors or None in factors else [float(f) for f in factors]
        return convolutions.interpolate(x, size, known, mode, align_corners)

    return row
