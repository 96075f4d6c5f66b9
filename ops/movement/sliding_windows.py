"""Sliding windows over the last axes, for convolutions and pooling."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

import numpy as np

from ...graph.attrs import Attr, Attrs
from ...graph.errors import format_count
from ...graph.spec import Spec
from ..declaration.axis_links import AxisLink, link_first_operand_axes_to_result
from ..declaration.op import Array, OperandSpecs, op
from ..declaration.samples import expand_template
from ..declaration.shape_rules import first_spec, integers_attribute
from ..declaration.signature import SignatureMismatch


def count_windows(shape: tuple[int, ...], attrs: Mapping[str, Attr]) -> tuple[int, ...]:
    """Return the number of windows along each axis.

    Args:
        shape: shape of x: images, channels, then the axes that windows slide over.
        attrs: attributes of `windows`.

    Raises:
        SignatureMismatch: attributes and shape do not fit.
    """
    size, stride, dilation, left, right = (
        integers_attribute(attrs, k) for k in ("size", "stride", "dilation", "left", "right")
    )
    if not size or len({len(size), len(stride), len(dilation), len(left), len(right)}) != 1:
        raise SignatureMismatch(
            "size, stride, dilation, left and right need an entry for each axis that windows slide over"
        )
    if len(shape) != 2 + len(size):
        raise SignatureMismatch(
            f"x has {format_count(len(shape), 'axis', 'axes')}; it needs 2 and the {len(size)} that windows slide over"
        )
    if min((*size, *stride, *dilation)) < 1 or min((*left, *right)) < 0:
        raise SignatureMismatch("size, stride and dilation must be at least 1, left and right at least 0")
    spans = [d * (k - 1) + 1 for k, d in zip(size, dilation, strict=True)]
    padded = [n + a + b for n, a, b in zip(shape[2:], left, right, strict=True)]
    if any(n < span for n, span in zip(padded, spans, strict=True)):
        raise SignatureMismatch(f"windows span {spans} entries, but with its padding x has {padded}")
    return tuple((n - span) // s + 1 for n, span, s in zip(padded, spans, stride, strict=True))


def _infer_windows(specs: OperandSpecs, attrs: Attrs) -> Spec:
    spec = first_spec(specs)
    counts = count_windows(spec.shape, attrs)
    return Spec((spec.shape[0], prod(counts), spec.shape[1], prod(integers_attribute(attrs, "size"))), spec.dtype)


def _link_images_and_channels(specs: OperandSpecs, attrs: Attrs) -> tuple[AxisLink, ...]:
    """Declare that the planner may shard images and channels of operand and result alike; other axes stay complete."""
    return link_first_operand_axes_to_result({0: 0, 1: 2})


@op(
    "x[...]: number -> [...]",
    infer=_infer_windows,
    links=_link_images_and_channels,
    linear=lambda attrs: () if attrs["value"] else ("x",),
    flops=lambda **_: 0,
    samples=(
        *expand_template(
            "x={x}[2,3,9], size=(3,), stride=({s},), dilation=({d},), left=(1,), right=(0,)",
            x=("f32", "f16", "i32"),
            s=(1, 2),
            d=(1, 2),
        ),
        "x=f32[1,2,5,6], size=(2,3), stride=(2,1), dilation=(1,2), left=(0,1), right=(1,0), value=-1.0",
        "x=f32[1,2,4,3,5], size=(2,2,2), stride=(1,1,2), dilation=(1,1,1), left=(0,0,0), right=(0,0,0)",
    ),
    errors=(
        ("x=f32[2,3,9], size=(3,3), stride=(1,1), dilation=(1,1), left=(0,0), right=(0,0)", "x has 3 axes"),
        ("x=f32[2,3,2], size=(3,), stride=(1,), dilation=(1,), left=(0,), right=(0,)", "windows span"),
        ("x=f32[2,3,4], size=(3,), stride=(0,), dilation=(1,), left=(0,), right=(0,)", "must be at least 1"),
        ("x=f32[2,3,4], size=(3,), stride=(), dilation=(1,), left=(0,), right=(0,)", "an entry for each axis"),
    ),
    compare="exact",
    infinite=("x",),
    is_required=False,
)
def windows(
    x: Array,
    *,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    left: tuple[int, ...],
    right: tuple[int, ...],
    value: float = 0.0,
) -> Array:
    """Collect sliding windows of `x` (im2col), for convolutions and pooling. ggml: ``IM2COL``, ``IM2COL_3D``.

    `x` is [images, channels, axes ...]. The result is [images, windows, channels, entries of a window], with windows
    and their entries in row-major order. Axes are padded with `left` and `right` entries of `value`. A product with
    weights is a convolution; a maximum over the last axis is a max pooling.
    """
    setting = {"size": size, "stride": stride, "dilation": dilation, "left": left, "right": right}
    counts = count_windows(x.shape, setting)
    pads = ((0, 0), (0, 0), *zip(left, right, strict=True))
    padded = np.pad(x, pads, constant_values=np.asarray(value).astype(x.dtype)) if any(left + right) else x
    spans = [(stride[i], dilation[i], s * (counts[i] - 1) + 1) for i, s in enumerate(stride)]
    taps = []
    for tap in product(*map(range, size)):
        window = [slice(t * d, t * d + span, s) for t, (s, d, span) in zip(tap, spans, strict=True)]
        taps.append(padded[(slice(None), slice(None), *window)].reshape(*x.shape[:2], prod(counts)))
    return np.stack(taps, axis=-1).transpose(0, 2, 1, 3)
