"""Windows that slide over the last axes: what convolutions multiply and poolings reduce."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

import numpy as np

from ..graph.attrs import Attr, Attrs
from ..graph.spec import Spec
from .declaring.links import Link, same
from .declaring.op import Array, Specs, op
from .declaring.samples import grid
from .declaring.signature import Mismatch
from .views import ints_of, spec_of


def counts_of(shape: tuple[int, ...], attrs: Mapping[str, Attr]) -> tuple[int, ...]:
    """How many windows there are along each axis.  Raises `Mismatch`."""
    size, stride, dilation, left, right = (ints_of(attrs, k) for k in ("size", "stride", "dilation", "left", "right"))
    if not size or len({len(size), len(stride), len(dilation), len(left), len(right)}) != 1:
        raise Mismatch("size, stride, dilation, left and right need an entry for each axis that windows slide over")
    if len(shape) != 2 + len(size):
        raise Mismatch(f"x has {len(shape)} axes; it needs 2 and the {len(size)} that windows slide over")
    if min((*size, *stride, *dilation)) < 1 or min((*left, *right)) < 0:
        raise Mismatch("size, stride and dilation must be at least 1, left and right at least 0")
    spans = [d * (k - 1) + 1 for k, d in zip(size, dilation, strict=True)]
    padded = [n + a + b for n, a, b in zip(shape[2:], left, right, strict=True)]
    if any(n < span for n, span in zip(padded, spans, strict=True)):
        raise Mismatch(f"windows span {spans} entries, but with its padding x has {padded}")
    return tuple((n - span) // s + 1 for n, span, s in zip(padded, spans, stride, strict=True))


def _windowed(specs: Specs, attrs: Attrs) -> Spec:
    spec = spec_of(specs)
    counts = counts_of(spec.shape, attrs)
    return Spec((spec.shape[0], prod(counts), spec.shape[1], prod(ints_of(attrs, "size"))), spec.dtype)


def _window_links(specs: Specs, attrs: Attrs) -> tuple[Link, ...]:
    """Images and channels go their own ways; what windows slide over must be whole."""
    return same({0: 0, 1: 2})


@op(
    "x[...]: number -> [...]",
    infer=_windowed,
    links=_window_links,
    linear=lambda attrs: () if attrs["value"] else ("x",),
    flops=lambda **_: 0,
    samples=(
        *grid(
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
    must=False,
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
    """Windows of `x` [images, channels, axes ...] as [images, windows, channels, entries of a window], each row-major.

    `value` pads the axes, `left` and `right` entries of it.  A product with weights is a convolution, a maximum over
    the last axis a pooling.  ggml: ``IM2COL``, ``IM2COL_3D``.
    """
    setting = {"size": size, "stride": stride, "dilation": dilation, "left": left, "right": right}
    counts = counts_of(x.shape, setting)
    pads = ((0, 0), (0, 0), *zip(left, right, strict=True))
    padded = np.pad(x, pads, constant_values=np.asarray(value).astype(x.dtype)) if any(left + right) else x
    spans = [(stride[i], dilation[i], s * (counts[i] - 1) + 1) for i, s in enumerate(stride)]
    taps = []
    for tap in product(*map(range, size)):
        cut = [slice(t * d, t * d + span, s) for t, (s, d, span) in zip(tap, spans, strict=True)]
        taps.append(padded[(slice(None), slice(None), *cut)].reshape(*x.shape[:2], prod(counts)))
    return np.stack(taps, axis=-1).transpose(0, 2, 1, 3)
