"""Declarations of the composite ops for the conformance kit: float64 references, signatures and samples of calls.

A composite op has no node, so its declaration is in no registry. The kit builds the graph of the composite op, and
compares its results with the reference, which uses no op. Shapes of results are the shapes of that graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from ...graph.attrs import Attrs
from ...graph.errors import GraphError
from ...graph.node import Value, input
from ...graph.spec import Spec
from ..declaration.op import Array, InferSpec, Op, OperandSpecs, op
from ..declaration.samples import expand_template
from ..declaration.shape_rules import integers_attribute
from ..declaration.signature import SignatureMismatch
from .convolutions import add_windows, convolution, transposed_convolution
from .interpolation import interpolate
from .pooling import pool

Index: TypeAlias = tuple[slice | int, ...]
_IMAGE_AXES = ("*l", "*h, *l", "*d, *h, *l")
"""Axes that windows slide over, for one to three of them. An entry of a result may need the whole axis."""
_WINDOW_AXES = ("+u", "+t, +u", "+s, +t, +u")
"""Axes of a window; an entry of a convolution is a sum over them."""


def _infer_specs_by_building_graph(build: Callable[..., Value]) -> InferSpec:
    """Return a rule for result specs: the spec of the value that `build` makes on inputs.

    The rule raises `SignatureMismatch` if `build` refuses the call.
    """

    def infer_spec(specs: OperandSpecs, attrs: Attrs) -> Spec:
        leaves = [input(f"operand{i}", s.shape, s.dtype) for i, s in enumerate(specs) if s is not None]
        try:
            return build(*leaves, **attrs).spec
        except GraphError as why:
            raise SignatureMismatch(str(why)) from None

    return infer_spec


def _list_window_entry_indices(
    size: Sequence[int], stride: Sequence[int], dilation: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[Index, Index]]:
    """Yield for each entry (tap) of a window its index in an array of weights, and its slices in padded images.

    The slices have the entry of all windows at once. Both arrays have two axes before the axes of a window.
    """
    for tap in np.ndindex(*size):
        places = zip(tap, stride, dilation, counts, strict=True)
        along_axes = (slice(t * d, t * d + s * (n - 1) + 1, s) for t, s, d, n in places)
        yield (slice(None), slice(None), *tap), (slice(None), slice(None), *along_axes)


def _pad_images(x: Array, left: Sequence[int], right: Sequence[int], value: float = 0.0) -> Array:
    """Pad the axes of images; entries of integers that `value` cannot represent become the smallest integer."""
    smallest = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else value
    return np.pad(x, ((0, 0), (0, 0), *zip(left, right, strict=True)), constant_values=smallest if value else 0)


def _slice_image_axes(images: Array, start: Sequence[int], stop: Sequence[int]) -> Array:
    """Return the entries of images from `start` to before `stop` along each axis."""
    index: Index = (slice(None), slice(None), *map(slice, start, stop))
    return np.asarray(images[index])


def _count_windows(
    axes: Sequence[int], size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Return the number of windows along each axis of padded images."""
    settings = zip(axes, size, stride, dilation, strict=True)
    return tuple((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in settings)


def _fill_in(settings: Sequence[int], default: int, count: int) -> tuple[int, ...]:
    return tuple(settings) or (default,) * count


@op(
    {
        f"{form} {count}": f"x[n, {channels}, {images}], w[{outputs}, +c, {windows}] -> [...]: f32"
        for form, channels, outputs in (("one group", "+c", "o"), ("groups", "(g c)", "(g o)"))
        for count, (images, windows) in enumerate(zip(_IMAGE_AXES, _WINDOW_AXES, strict=True), 1)
    },
    signature_key=lambda attrs: (
        f"{'one group' if attrs.get('groups', 1) == 1 else 'groups'} {len(integers_attribute(attrs, 'stride'))}"
    ),
    infer=_infer_specs_by_building_graph(convolution),
    linear=("x", "w"),
    samples=(
        *expand_template(
            "x={x}[2,4,9], w={w}[3,4,3], stride=(1,), left=(1,), right=(1,)",
            x=("f32", "f16", "bf16"),
            w=("f32", "f16", "bf16"),
        ),
        *expand_template(
            "x=f32[2,3,7,10], w={w}[5,3,3,2], stride=(2,3), dilation=(1,2), left=(2,0), right=(2,0)", w=("f32", "f16")
        ),
        "x=f32[1,2,4,5,3], w=f32[4,2,2,1,3], stride=(1,1,1), left=(0,1,1), right=(0,1,1)",
        "x=f32[1,4,6,5], w=f32[6,2,3,3], stride=(1,1), groups=2",
        "x=f32[1,9,12,7], w=f16[9,1,3,3], stride=(2,2), left=(1,1), right=(1,1), groups=9",
        "x=f32[1,5,33], w=f32[5,1,4], stride=(1,), left=(3,), groups=5",
        "x=f32[2,3,8,8], w=f32[16,3,8,8], stride=(8,8)",
    ),
    signed_zeros=False,
    nan_for_infinity=("w", "x"),
    is_required=False,
)
def convolution_(
    x: Array,
    w: Array,
    *,
    stride: tuple[int, ...],
    dilation: tuple[int, ...] = (),
    left: tuple[int, ...] = (),
    right: tuple[int, ...] = (),
    groups: int = 1,
) -> Array:
    """Compute `convolution` as the sum, over the entries of a window, of products of channels."""
    size, count = w.shape[2:], len(stride)
    dilation = _fill_in(dilation, 1, count)
    padded = _pad_images(x, _fill_in(left, 0, count), _fill_in(right, 0, count))
    counts = _count_windows(padded.shape[2:], size, stride, dilation)
    n, c, o = *x.shape[:2], w.shape[0]
    out = np.zeros((n, groups, o // groups, prod(counts)))
    for tap, places in _list_window_entry_indices(size, stride, dilation, counts):
        entries = padded[places].reshape(n, groups, c // groups, prod(counts))
        out += w[tap].reshape(groups, o // groups, c // groups) @ entries
    return out.reshape(n, o, *counts)


@op(
    {
        str(count): f"x[n, +c, {images}], w[+c, o, {windows}] -> [...]: f32"
        for count, (images, windows) in enumerate(zip(_IMAGE_AXES, _WINDOW_AXES, strict=True), 1)
    },
    signature_key=lambda attrs: str(len(integers_attribute(attrs, "stride"))),
    infer=_infer_specs_by_building_graph(transposed_convolution),
    linear=("x", "w"),
    samples=(
        *expand_template("x={x}[2,3,4], w={w}[3,2,2], stride=(3,)", x=("f32", "f16"), w=("f32", "bf16")),
        "x=f32[1,2,13], w=f32[2,3,37], stride=(1,)",
        "x=f32[1,4,5,3], w=f32[4,3,4,2], stride=(1,1), left=(4,0), right=(1,-2), groups=2",
        "x=f32[2,4,5,3], w=f16[4,3,4,3], stride=(2,3), left=(1,2), right=(0,-2)",
        "x=f32[1,4,3,4], w=f32[4,2,3,2], stride=(2,1), dilation=(2,3), groups=2",
        "x=f32[1,2,3,2,4], w=f32[2,2,2,3,1], stride=(1,2,2)",
    ),
    signed_zeros=False,
    nan_for_infinity=("w", "x"),
    is_required=False,
)
def transposed_convolution_(
    x: Array,
    w: Array,
    *,
    stride: tuple[int, ...],
    dilation: tuple[int, ...] = (),
    left: tuple[int, ...] = (),
    right: tuple[int, ...] = (),
    groups: int = 1,
) -> Array:
    """Compute `transposed_convolution`: add the weights of each entry of a window to their places in the result."""
    size, count = w.shape[2:], len(stride)
    dilation, left, right = _fill_in(dilation, 1, count), _fill_in(left, 0, count), _fill_in(right, 0, count)
    spans = [d * (k - 1) + 1 for k, d in zip(size, dilation, strict=True)]
    if set(stride) <= {1}:  # the graph multiplies the zeros around images, too
        before, after = ([k - 1 + max(-m, 0) for k, m in zip(spans, side, strict=True)] for side in (left, right))
        x = _pad_images(x, before, after)
        left, right = (
            tuple(a + b for a, b in zip(side, zeros, strict=True)) for side, zeros in ((left, before), (right, after))
        )
    n, c, o, counts = *x.shape[:2], w.shape[1], x.shape[2:]
    full = np.zeros((n, groups * o, *((m - 1) * s + k for m, s, k in zip(counts, stride, spans, strict=True))))
    entries = x.reshape(n, groups, c // groups, prod(counts))
    for tap, places in _list_window_entry_indices(size, stride, dilation, counts):
        weights = np.swapaxes(w[tap].reshape(groups, c // groups, o), 1, 2)
        full[places] += (weights @ entries).reshape(n, groups * o, *counts)
    removed = tuple(zip(left, right, strict=True))
    padded = _pad_images(full, [max(-a, 0) for a, _ in removed], [max(-b, 0) for _, b in removed])
    inside = zip(padded.shape[2:], removed, strict=True)
    return _slice_image_axes(padded, [max(a, 0) for a, _ in removed], [m - max(b, 0) for m, (_, b) in inside])


@op(
    "x[n, +windows, c, +entries]: float -> [...]",
    infer=_infer_specs_by_building_graph(add_windows),
    linear=("x",),
    samples=(
        *expand_template("x={x}[2,5,3,4], shape=(8,), size=(4,), stride=(1,)", x=("f32", "f16", "bf16")),
        "x=f32[1,7,2,3], shape=(19,), size=(3,), stride=(3,), left=(1,), right=(1,)",
        "x=f32[2,20,3,6], shape=(9,8), size=(3,2), stride=(2,3), dilation=(2,1), left=(1,0), right=(3,5)",
        "x=f32[1,12,2,8], shape=(3,4,3), size=(2,2,2), stride=(1,1,1)",
    ),
    signed_zeros=False,
    is_required=False,
)
def add_windows_(
    x: Array,
    *,
    shape: tuple[int, ...],
    size: tuple[int, ...],
    stride: tuple[int, ...] = (),
    dilation: tuple[int, ...] = (),
    left: tuple[int, ...] = (),
    right: tuple[int, ...] = (),
) -> Array:
    """Compute `add_windows`: add the entries of all windows to their places in padded images."""
    axes = len(size)
    stride, dilation = _fill_in(stride, 1, axes), _fill_in(dilation, 1, axes)
    left, right = _fill_in(left, 0, axes), _fill_in(right, 0, axes)
    padded = [a + m + b for m, a, b in zip(shape, left, right, strict=True)]
    counts = _count_windows(padded, size, stride, dilation)
    n, c = x.shape[0], x.shape[2]
    by_channel = np.moveaxis(x, 1, -1).reshape(n, c, *size, *counts)
    out = np.zeros((n, c, *padded))
    for tap, places in _list_window_entry_indices(size, stride, dilation, counts):
        out[places] += by_channel[tap]
    return _slice_image_axes(out, left, [a + m for a, m in zip(left, shape, strict=True)])


@op(
    {
        f"{form} {count}": f"x[n, c, {axes}]: {dtypes} -> [...]{result}"
        for form, dtypes, result in (("max", "number", ""), ("sums", "float", ": f32"))
        for count, axes in enumerate(_IMAGE_AXES, 1)
    },
    signature_key=lambda attrs: (
        f"{'max' if attrs['kind'] == 'max' else 'sums'} {len(integers_attribute(attrs, 'size'))}"
    ),
    infer=_infer_specs_by_building_graph(pool),
    samples=(
        *expand_template(
            'x=f32[2,3,7,5], kind="{kind}", size=(3,2), stride=(2,1), dilation=(1,2), left=(3,0), right=(1,2)',
            kind=("max", "sum", "mean", "inner_mean"),
        ),
        *expand_template('x={x}[2,3,9], kind="max", size=(3,), stride=(2,), left=(1,)', x=("f16", "bf16", "i32", "i8")),
        *expand_template('x={x}[1,2,8], kind="inner_mean", size=(3,), stride=(3,), left=(2,)', x=("f16", "f32")),
        'x=f32[1,2,4,5,3], kind="mean", size=(2,2,2)',
    ),
    signed_zeros=False,
    infinite=("x",),
    is_required=False,
)
def pool_(
    x: Array,
    *,
    kind: str,
    size: tuple[int, ...],
    stride: tuple[int, ...] = (),
    dilation: tuple[int, ...] = (),
    left: tuple[int, ...] = (),
    right: tuple[int, ...] = (),
) -> Array:
    """Compute `pool`: collect the entries of all windows, and reduce them."""
    axes = len(size)
    stride, dilation = _fill_in(stride, 1, axes), _fill_in(dilation, 1, axes)
    left, right = _fill_in(left, 0, axes), _fill_in(right, 0, axes)
    padded = _pad_images(x, left, right, -np.inf if kind == "max" else 0.0)
    inside = _pad_images(np.ones((1, 1, *x.shape[2:])), left, right)
    counts = _count_windows(padded.shape[2:], size, stride, dilation)
    places = [at for _, at in _list_window_entry_indices(size, stride, dilation, counts)]
    entries = np.stack([padded[at] for at in places])
    if kind == "max":
        return np.asarray(entries.max(0))
    inner = np.sum([inside[at] for at in places], 0)
    return np.asarray(entries.sum(0) / {"sum": 1, "mean": prod(size), "inner_mean": np.maximum(inner, 1)}[kind])


@op(
    {
        str(count): f"x[{axes}]: f32 -> [...]"
        for count, axes in enumerate(("*l", "*h, *l", "n, *h, *l", "n, c, *h, *l"), 1)
    },
    signature_key=lambda attrs: str(len(integers_attribute(attrs, "shape"))),
    infer=_infer_specs_by_building_graph(interpolate),
    samples=(
        *expand_template(
            'x=f32[2,3,7,4], shape=(2,3,{sizes}), mode="{mode}"',
            sizes=("14,4", "9,13", "1,11", "3,2"),
            mode=("nearest", "linear", "cubic"),
        ),
        *expand_template(
            'x=f32[2,3,7,4], shape=(2,3,9,13), mode="{mode}", align_corners=true', mode=("linear", "cubic")
        ),
        'x=f32[2,3,7,4], shape=(2,3,3,2), mode="linear", antialias=true',
        "x=f32[3,2,4], shape=(5,2,6)",
        'x=f32[7,5], shape=(11,5), mode="cubic"',
        'x=f32[6], shape=(15,), mode="linear"',
    ),
    signed_zeros=False,
    is_required=False,
)
def interpolate_(
    x: Array,
    *,
    shape: tuple[int, ...],
    mode: str = "nearest",
    align_corners: bool = False,
    antialias: bool = False,
) -> Array:
    """Compute `interpolate`: each entry is a sum over one axis, with weights by a kernel of the distance."""
    for axis, new in enumerate(shape):
        old = x.shape[axis]
        if new == old:
            continue
        if mode == "nearest":
            x = x.take([i * old // new for i in range(new)], axis)
            continue
        matrix = np.array(
            [_compute_interpolation_row_weights(old, new, i, mode, align_corners, antialias) for i in range(new)]
        )
        x = np.moveaxis(np.tensordot(matrix, x, (1, axis)), 0, axis)
    return x


def _compute_interpolation_row_weights(
    old: int, new: int, i: int, mode: str, align_corners: bool, antialias: bool
) -> Array:
    """Return the interpolation weights with which the `old` entries of an axis give entry `i` of the `new` ones."""
    step = (old - 1) / max(new - 1, 1) if align_corners else old / new
    at = i * step if align_corners else (i + 0.5) * step - 0.5
    row = np.zeros(old)
    if antialias:
        row = np.maximum(1 - np.abs(np.arange(old) - at) / max(1.0, step), 0)
        return row / row.sum()
    for entry in range(int(np.floor(at)) - 1, int(np.floor(at)) + 3):
        row[min(max(entry, 0), old - 1)] += _compute_interpolation_kernel_weight(abs(at - entry), mode)
    return row


def _compute_interpolation_kernel_weight(distance: float, mode: str) -> float:
    """Return the interpolation weight of an entry at a distance of at most 2: the hat function, or Keys (1981)."""
    if mode == "linear":
        return max(0.0, 1 - distance)
    first = 1.25 * distance**3 - 2.25 * distance**2 + 1
    second = -0.75 * distance**3 + 3.75 * distance**2 - 6 * distance + 3
    return first if distance <= 1 else second if distance < 2 else 0.0


COMPOSITE_DECLARATIONS: Mapping[str, Op[Any]] = MappingProxyType(
    {declared.name: declared for declared in (add_windows_, convolution_, interpolate_, pool_, transposed_convolution_)}
)
"""The declarations of the composite ops by name."""
