"""Sliding windows of images, read in place by offsets that are known when a program is bound.

A convolution is the product of windows and a weight. One kernel expands the windows as it reads them, so that they are
not written to memory. Padding is written around a copy of the image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from .....graph.attrs import Attrs
from .....graph.dtypes import DType
from .....ops.declaration.shape_rules import integers_attribute
from ....base import contiguous_strides
from ....flow import Flow
from ....operands import Bound, Operand, float_bits, need
from ...compiler import kernel
from ...simd.vectors import LANES, load_apart, load_int, load_ints
from ...steps import Chain, Fused, Steps
from ...words import words
from ..packing import share
from ..products import matrices
from ..rows import FILL_WORDS, add_rows, add_unary, can_copy, fill, put

Offsets = npt.NDArray[np.int32]
ARGS = words("x images between count columns windows entries y")


@kernel
def gather(a, thread, threads):
    """Copy ``y[n, i, c] = x[n]`` at byte ``windows[i] + entries[c]``.

    There are `images` images, `between` bytes apart, with `count` windows of `columns` entries.
    """
    count, columns, entries = ARGS.count(a), ARGS.columns(a), ARGS.entries(a)
    lo, hi = share(ARGS.images(a) * count, thread, threads)
    for i in range(lo, hi):
        start = ARGS.x(a) + i // count * ARGS.between(a) + load_int(ARGS.windows(a) + 4 * (i % count))
        to = ARGS.y(a) + i * columns * 4
        for c in range(0, columns, LANES):
            put(to, c, columns, load_apart(start, load_ints(entries + 4 * c)))
    return 0


@dataclass(frozen=True, slots=True)
class Windows:
    """The shape of sliding windows: entries, strides and dilations along each axis, and the padding of the image."""

    size: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    left: Sequence[int]
    right: Sequence[int]
    value: float

    @classmethod
    def of(cls, attrs: Attrs) -> Windows:
        """Return the shape that the attributes of a `windows` op describe."""
        value = attrs["value"]
        assert isinstance(value, int | float)
        size, stride, dilation = (integers_attribute(attrs, name) for name in ("size", "stride", "dilation"))
        return cls(
            size, stride, dilation, integers_attribute(attrs, "left"), integers_attribute(attrs, "right"), float(value)
        )

    def image(self, steps: Steps, x: Operand, y: Operand) -> Operand:
        """Return `x` with its padding. If needed, add steps that make a padded copy.

        A copy is needed for padding, and if `x` overlaps the result `y`.
        """
        if not any((*self.left, *self.right)) and not x.region.overlaps(y.region):
            return x
        shape = (*x.shape[:2], *self.padded(x.shape[2:]))
        nbytes = 4 * math.prod(shape)
        whole, inner = _padded(steps.scratch(f"image {nbytes}", nbytes), x, self)
        is_filled = add_rows(steps, (fill, FILL_WORDS, {"value": float_bits(self.value)}), [], whole)
        is_copied = add_unary(steps, "copy", x, inner)
        assert (is_filled, is_copied) == (True, True), "`_can_read` has checked the walk"
        return whole

    def starts(self, image: Operand) -> Offsets:
        """Compute the byte offset of each window in an image."""
        counts = self.counts(image.shape[2:])
        return _offsets(counts, [step * s for step, s in zip(image.strides[2:], self.stride, strict=True)])

    def entries(self, image: Operand, channels: int) -> Offsets:
        """Compute the byte offset of each entry of a window with `channels` channels."""
        taps = [step * d for step, d in zip(image.strides[2:], self.dilation, strict=True)]
        return _offsets((channels, *self.size), (image.strides[1], *taps))

    def counts(self, axes: Sequence[int]) -> list[int]:
        """Count the windows along each axis of a padded image."""
        steps = zip(axes, self.size, self.stride, self.dilation, strict=True)
        return [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in steps]

    def padded(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Compute the sizes of a padded image."""
        return tuple(n + a + b for n, a, b in zip(axes, self.left, self.right, strict=True))


def _offsets(shape: Sequence[int], steps: Sequence[int]) -> Offsets:
    """Compute the bytes to each entry of a grid in row-major order. The last entry repeats until vectors are full."""
    at = np.indices(shape).reshape(len(shape), -1)
    bytes_on = 4 * np.sum([i * step for i, step in zip(at, steps, strict=True)], axis=0)
    return np.pad(bytes_on, (0, -len(bytes_on) % LANES), mode="edge").astype(np.int32)


def _padded(memory: Operand, x: Operand, windows: Windows) -> tuple[Operand, Operand]:
    """Return memory as a padded image, and the part of it that holds `x`."""
    shape = (*x.shape[:2], *windows.padded(x.shape[2:]))
    tensor = replace(memory.tensor, shape=shape, strides=contiguous_strides(shape), dtype=DType.F32)
    whole = inner = Operand(memory.address, tensor)
    for axis, (n, start) in enumerate(zip(x.shape[2:], windows.left, strict=True), 2):
        inner = inner.part(axis, start, n)
    return whole, inner


def _can_read(x: Operand, windows: Windows) -> bool:
    """Return whether kernels can read windows of `x`, and copy `x` if needed."""
    if not x.is_float or not x.tensor.spec.size:
        return False
    _, inner = _padded(x, x, windows)
    reach = 4 * sum(n * max(s, t) for n, s, t in zip(inner.shape, x.strides, inner.strides, strict=True))
    return can_copy(x, inner) and reach < 2**31


def _windows(steps: Steps, call: Bound) -> bool:
    """Add the step that copies windows; False if kernels cannot read them."""
    x, y, windows = call.operand(0), call.out, Windows.of(call.attrs)
    if not (_can_read(x, windows) and y.is_float and y.is_dense):
        return False
    image = windows.image(steps, x, y)
    starts, entries = windows.starts(image), windows.entries(image, x.shape[1])
    words = ARGS(
        x=image.address,
        images=x.shape[0],
        between=4 * image.strides[0],
        count=y.shape[1],
        columns=y.shape[2] * y.shape[3],
        windows=steps.constant(starts).address,
        entries=steps.constant(entries).address,
        y=y.address,
    )
    steps.add(gather, words, reads=[image], writes=[y])
    return True


def _convolution(flow: Flow, number: int) -> Chain:
    """Fuse windows and their product. A product may read some of the channels."""
    slide, product = flow.call(number), flow.call(flow.reader(number, "mul_mat"))
    w, x, windows = slide.out, slide.operand(0), Windows.of(slide.attrs)
    need(_can_read(x, windows) and matrices.lie_well(product.operand(1), product.out), "operands have no rows")
    need(not product.operand(1).region.overlaps(product.out.region), "a result lies where something is still read")
    read, entries = product.operand(0), w.shape[3]
    need(read.is_float and read.strides[-2:] == (w.strides[1], 1), "the product reads windows with other strides")
    need(read.shape[-2] == w.shape[1] and read.shape[-1] % entries == 0, "the product reads parts of windows")
    before = matrices.addresses_of(product)[:, 0] - w.address
    need((before % (4 * w.strides[0]) % (4 * entries) == 0).all(), "a product begins within a window")
    need((before % (4 * w.strides[0]) + 4 * read.shape[-1] <= 4 * w.strides[1]).all(), "a product ends within a window")
    return Chain((number, flow.reader(number, "mul_mat")), partial(_add_convolution, slide=slide, product=product))


def _add_convolution(steps: Steps, slide: Bound, product: Bound) -> None:
    """Add the product. Each address in the windows, which are not written, becomes an address in the image."""
    x, w, windows = slide.operand(0), slide.out, Windows.of(slide.attrs)
    image, table = windows.image(steps, x, product.out), matrices.addresses_of(product)
    number, within = np.divmod((table[:, 0] - w.address) // 4, w.strides[0])
    table[:, 0] = image.address + 4 * (number * image.strides[0] + within // w.shape[3] * image.strides[1])
    matrices.add_products(
        steps,
        matrices.product("windows", DType.F32, matrices.expand_windows),
        product,
        table,
        [image, product.operand(1)],
        windows=steps.constant(windows.starts(image)).address,
        entries=steps.constant(windows.entries(image, product.operand(0).shape[-1] // w.shape[3])).address,
    )


BINDINGS = {"windows": _windows}
FUSED: Mapping[str, tuple[Fused, ...]] = {"windows": (_convolution,)}
