"""Convolutions and other sliding windows of images, read in place by offsets that are computed at binding.

A convolution is the product of windows and a weight. One kernel expands the windows as it reads them, so that they are
not written to memory. It reads entries in the padding as zero. Other kernels read a copy of the image with padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

from .....graph.attrs import Attrs
from .....graph.dtypes import DType
from .....ops.declaration.expression import Expression, Step, trace
from .....ops.declaration.scalar import is_inside, where
from .....ops.declaration.shape_rules import integers_attribute
from ....base import contiguous_strides
from ....fusion.dataflow import Dataflow
from ....fusion.expression_groups import ExpressionGroup
from ....fusion.operand_views import Box
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ....fusion.traced_instruction import TracedInstruction
from ...compilation.compiler import kernel
from ...compilation.kernel_args import declare_args
from ...simd.vectors import LANES, gather_lanes, load_int, load_ints
from ...steps.partition import compute_thread_range
from ...steps.step_table import FusedBinding, FusionMatcher, StepTableBuilder
from ..matmul import batched_matmul
from ..vector.elementwise import add_copy_step, add_fill_step, can_copy, store_lanes
from ..vector.group_kernels import add_group_step, add_traced_step, has_group_kernel

Offsets = npt.NDArray[np.int32]
_PADDING = trace(lambda x, value: where(is_inside(x), x, value), (True,), ("value",), ())
"""An element of a padded image."""
MAX_POOLING_TAPS = 16
ARGS = declare_args("x images between count columns windows entries y")


@kernel
def copy_sliding_windows(a, thread, threads):
    """Copy the sliding windows of images to rows, one row for each window.

    ``y[n, i, c]`` is the element of image n at byte ``windows[i] + entries[c]``. There are `images` images, `between`
    bytes apart, with `count` windows of `columns` entries.
    """
    count, columns, entries = ARGS.count(a), ARGS.columns(a), ARGS.entries(a)
    lo, hi = compute_thread_range(ARGS.images(a) * count, thread, threads)
    for i in range(lo, hi):
        start = ARGS.x(a) + i // count * ARGS.between(a) + load_int(ARGS.windows(a) + 4 * (i % count))
        to = ARGS.y(a) + i * columns * 4
        for c in range(0, columns, LANES):
            store_lanes(to, c, columns, gather_lanes(start, load_ints(entries + 4 * c)))
    return 0


@dataclass(frozen=True, slots=True)
class SlidingWindowShape:
    """The shape of sliding windows: entries, strides and dilations along each axis, and the padding of the image."""

    size: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    left_padding: Sequence[int]
    right_padding: Sequence[int]
    padding_value: float

    @classmethod
    def from_attributes(cls, attrs: Attrs) -> SlidingWindowShape:
        """Make the shape that the attributes of a `windows` op describe."""
        value = attrs["value"]
        assert isinstance(value, int | float)
        size, stride, dilation = (integers_attribute(attrs, name) for name in ("size", "stride", "dilation"))
        return cls(
            size, stride, dilation, integers_attribute(attrs, "left"), integers_attribute(attrs, "right"), float(value)
        )

    def make_padded_image(self, steps: StepTableBuilder, x: Operand, y: Operand) -> Operand:
        """Return the image `x` with its padding, as a copy if needed; add the steps that make the copy.

        A copy is needed for padding, and if `x` overlaps the result `y`.
        """
        if not any((*self.left_padding, *self.right_padding)) and not x.region.overlaps(y.region):
            return x
        shape = (*x.shape[:2], *self.compute_padded_sizes(x.shape[2:]))
        nbytes = 4 * math.prod(shape)
        whole, inner = _view_as_padded_image_and_interior(steps.scratch(f"image {nbytes}", nbytes), x, self)
        start = (0, 0, *self.left_padding)
        padding = TracedInstruction(_PADDING, [x], [None], {"value": self.padding_value}, whole, None, [start])
        is_padded = add_traced_step(steps, padding) or (
            add_fill_step(steps, self.padding_value, whole) and add_copy_step(steps, x, inner)
        )
        assert is_padded, "`_can_read_windows_or_padded_copy` has checked the walk"
        return whole

    @property
    def has_zero_padding(self) -> bool:
        """Whether the padding has the number that kernels read outside of the image: a zero without a sign."""
        return self.padding_value == 0 and math.copysign(1, self.padding_value) == 1

    def without_padding(self) -> SlidingWindowShape:
        """Return the windows of an image that has its padding."""
        none = [0] * len(self.size)
        return replace(self, left_padding=none, right_padding=none)

    def compute_window_start_offsets(self, image: Operand) -> Offsets:
        """Compute the byte offset of each window from the start of its image; it is negative in the padding."""
        counts = self.count_windows(self.compute_padded_sizes(image.shape[2:]))
        steps = [step * s for step, s in zip(image.strides[2:], self.stride, strict=True)]
        before = sum(step * n for step, n in zip(image.strides[2:], self.left_padding, strict=True))
        return _compute_grid_offsets(counts, steps) - np.int32(4 * before)

    def compute_window_groups(self, image: Operand) -> tuple[Offsets, int]:
        """Compute the words `groups` of a convolution kernel for each group of 16 windows, and its number of taps.

        A group has a number of `batched_matmul.WINDOW_GROUP_KINDS`, and for each tap the place of its mask. The masks
        follow all groups. The mask of a tap is negative for windows with this tap inside the image. Windows without
        padding have no taps.
        """
        counts = self.count_windows(self.compute_padded_sizes(image.shape[2:]))
        count = math.prod(counts)
        is_real = (np.arange(count + -count % LANES) < count).reshape(-1, LANES)
        is_adjacent = np.diff(self.compute_window_start_offsets(image)).tolist()
        is_adjacent = (np.array([*is_adjacent, 0]).reshape(-1, LANES)[:, :-1] == 4) | ~is_real[:, 1:]
        inside = self._find_taps_inside(image.shape[2:], counts)
        by_window = np.zeros((is_real.size, inside.shape[1]), np.int32)
        by_window[:count] = -inside.astype(np.int32)
        masks = by_window.reshape(-1, LANES, inside.shape[1]).swapaxes(1, 2)
        has_padding = (masks == 0).any((1, 2)) if not inside.all() else np.zeros(len(masks), bool)
        is_adjacent = is_adjacent.all(1) & (is_real[:, -1] | has_padding)
        kinds = (2 * has_padding + ~is_adjacent).astype(np.int32)[:, None]
        if inside.all():
            return kinds, 0
        unique, places = np.unique(masks.reshape(-1, LANES), axis=0, return_inverse=True)
        first = kinds.size * (1 + inside.shape[1])
        places = 4 * (first + LANES * places.reshape(len(kinds), -1))
        return np.concatenate([*np.concatenate([kinds, places], axis=1), *unique]).astype(np.int32), inside.shape[1]

    def _find_taps_inside(self, axes: Sequence[int], counts: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return for each window and each tap whether it lies inside an image with the sizes `axes`: [windows, taps].

        There are `counts` windows along each axis.
        """
        rank = len(axes)
        inside = np.ones((1,) * 2 * rank, bool)
        for axis, (n, taps, number) in enumerate(zip(axes, self.size, counts, strict=True)):
            starts = np.arange(number) * self.stride[axis] - self.left_padding[axis]
            at = starts[:, None] + np.arange(taps) * self.dilation[axis]
            shape = [number if i == axis else taps if i == rank + axis else 1 for i in range(2 * rank)]
            inside = inside & ((at >= 0) & (at < n)).reshape(shape)
        return inside.reshape(math.prod(counts), -1)

    def compute_entry_byte_offsets(self, image: Operand, channels: int) -> Offsets:
        """Compute the byte offset of each entry (channel, row and column) from the first byte of its window."""
        taps = [step * d for step, d in zip(image.strides[2:], self.dilation, strict=True)]
        return _compute_grid_offsets((channels, *self.size), (image.strides[1], *taps))

    def count_windows(self, axes: Sequence[int]) -> list[int]:
        """Count the windows along each axis of a padded image with the sizes `axes`."""
        steps = zip(axes, self.size, self.stride, self.dilation, strict=True)
        return [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in steps]

    def compute_padded_sizes(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Compute the sizes of an image with its padding from the sizes `axes` without padding."""
        return tuple(n + a + b for n, a, b in zip(axes, self.left_padding, self.right_padding, strict=True))


def _compute_grid_offsets(shape: Sequence[int], steps: Sequence[int]) -> Offsets:
    """Compute the byte offset of each grid point, in row-major order, from the grid's shape and element strides.

    The last offset is repeated up to a multiple of the vector length.
    """
    at = np.indices(shape).reshape(len(shape), -1)
    bytes_on = 4 * np.sum([i * step for i, step in zip(at, steps, strict=True)], axis=0)
    return np.pad(bytes_on, (0, -len(bytes_on) % LANES), mode="edge").astype(np.int32)


def _view_as_padded_image_and_interior(
    memory: Operand, x: Operand, windows: SlidingWindowShape
) -> tuple[Operand, Operand]:
    """View scratch memory as a padded image, and the part of this image without the padding; return both."""
    shape = (*x.shape[:2], *windows.compute_padded_sizes(x.shape[2:]))
    tensor = replace(memory.tensor, shape=shape, strides=contiguous_strides(shape), dtype=DType.F32)
    whole = inner = Operand(memory.address, tensor)
    for axis, (n, start) in enumerate(zip(x.shape[2:], windows.left_padding, strict=True), 2):
        inner = inner.slice_axis(axis, start, n)
    return whole, inner


def _can_read_windows_or_padded_copy(x: Operand, windows: SlidingWindowShape) -> bool:
    """Return whether kernels can read the windows of `x`, in place or from a padded copy."""
    if not x.is_float or not x.tensor.spec.size:
        return False
    _, inner = _view_as_padded_image_and_interior(x, x, windows)
    reach = 4 * sum(n * max(s, t) for n, s, t in zip(inner.shape, x.strides, inner.strides, strict=True))
    return can_copy(x, inner) and reach < 2**31


def _bind_copy_of_windows_to_rows(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step that copies sliding windows to rows; return False if kernels cannot read the windows."""
    x, y, windows = call.operand(0), call.out, SlidingWindowShape.from_attributes(call.attrs)
    if not (_can_read_windows_or_padded_copy(x, windows) and y.is_float and y.is_dense):
        return False
    image, windows = windows.make_padded_image(steps, x, y), windows.without_padding()
    starts, entries = windows.compute_window_start_offsets(image), windows.compute_entry_byte_offsets(image, x.shape[1])
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
    steps.add(copy_sliding_windows, words, reads=[image], writes=[y])
    return True


def _fuse_window_copy_and_matmul(flow: Dataflow, number: int) -> FusedBinding:
    """Fuse an op that copies sliding windows, and the matmul of the windows with a weight, into one image convolution.

    The matmul may read only some of the channels.
    """
    reader = flow.require_sole_reader(number, "mul_mat", in_order=False)
    slide, product = flow.bound_instruction(number), flow.bound_instruction(reader)
    w, x, windows = slide.out, slide.operand(0), SlidingWindowShape.from_attributes(slide.attrs)
    require_supported(
        _can_read_windows_or_padded_copy(x, windows)
        and batched_matmul.can_read_and_write_f32_rows(product.operand(1), product.out),
        "operands have no rows",
    )
    require_supported(
        not product.operand(1).region.overlaps(product.out.region),
        "a result lies where something is still read",
    )
    read, entries = product.operand(0), w.shape[3]
    require_supported(
        read.is_float and read.strides[-2:] == (w.strides[1], 1), "the product reads windows with other strides"
    )
    require_supported(
        read.shape[-2] == w.shape[1] and read.shape[-1] % entries == 0, "the product reads parts of windows"
    )
    before = batched_matmul.compute_operand_addresses_per_product(product)[:, 0] - w.address
    require_supported((before % (4 * w.strides[0]) % (4 * entries) == 0).all(), "a product begins within a window")
    require_supported(
        (before % (4 * w.strides[0]) + 4 * read.shape[-1] <= 4 * w.strides[1]).all(), "a product ends within a window"
    )
    return FusedBinding(
        (number, reader),
        partial(_add_image_convolution, slide=slide, product=product),
        batched_matmul.find_batched_panels(product),
    )


def _add_image_convolution(steps: StepTableBuilder, slide: BoundInstruction, product: BoundInstruction) -> None:
    """Add the matmul step of a fused convolution, which reads the windows directly from the image.

    The windows are not written to memory. Each address in them becomes an address in the image.
    """
    x, w, windows = slide.operand(0), slide.out, SlidingWindowShape.from_attributes(slide.attrs)
    table, image = batched_matmul.compute_operand_addresses_per_product(product), x
    if x.region.overlaps(product.out.region) or not windows.has_zero_padding:
        image, windows = windows.make_padded_image(steps, x, product.out), windows.without_padding()
    groups, taps = windows.compute_window_groups(image)
    number, within = np.divmod((table[:, 0] - w.address) // 4, w.strides[0])
    table[:, 0] = image.address + 4 * (number * image.strides[0] + within // w.shape[3] * image.strides[1])
    batched_matmul.add_batched_matmul_step(
        steps,
        batched_matmul.make_batched_matmul_kernel(
            "windows", DType.F32, batched_matmul.expand_image_windows_to_f32_columns
        ),
        product,
        table,
        [image, product.operand(1)],
        windows=steps.constant(windows.compute_window_start_offsets(image)).address,
        entries=steps.constant(
            windows.compute_entry_byte_offsets(image, product.operand(0).shape[-1] // w.shape[3])
        ).address,
        groups=steps.constant(groups).address,
        taps=taps,
    )


def _fuse_max_pooling(flow: Dataflow, number: int) -> FusedBinding:
    """Fuse an op that copies sliding windows, and the maximum of each window, into one max pooling."""
    slide, reader = flow.bound_instruction(number), flow.require_sole_reader(number, "reduce", in_order=False)
    reduction, windows = flow.bound_instruction(reader), SlidingWindowShape.from_attributes(slide.attrs)
    x, w, read, out = slide.operand(0), slide.out, reduction.operand(0), reduction.out
    require_supported(
        reduction.attrs["kind"] == "max" and windows.padding_value == -math.inf and x.is_float and out.is_float,
        "it is no maximum of floats",
    )
    images, count, channels, taps = w.shape
    require_supported(taps <= MAX_POOLING_TAPS and w.size, "a window has too many elements")
    require_supported(
        read.shape == (images, channels, count, taps)
        and read.strides == tuple(w.strides[axis] for axis in (0, 2, 1, 3))
        and read.address == w.address
        and out.is_dense
        and out.size == images * channels * count,
        "the maximum reads windows with other axes",
    )
    group = _make_max_pooling_group((number, reader), x, out, windows)
    require_supported(not x.region.overlaps(out.region), "a result lies where something is still read")
    require_supported(has_group_kernel(group), "no loop over rows reads the image")
    return FusedBinding((number, reader), partial(add_group_step, group=group))


def _make_max_pooling_group(
    numbers: tuple[int, int], x: Operand, out: Operand, windows: SlidingWindowShape
) -> ExpressionGroup:
    """Make the expression of a max pooling: the maximum over shifted, strided views of the image.

    There is one view for each element of a window. It covers the part of the result where the element is in the image.
    """
    shape = (*x.shape[:2], *windows.count_windows(windows.compute_padded_sizes(x.shape[2:])))
    strides = (*x.strides[:2], *(step * s for step, s in zip(x.strides[2:], windows.stride, strict=True)))
    steps, boxes, operands = [Step("constant", (), (-math.inf).hex())], list[Box](), list[Operand]()
    for tap in product(*map(range, windows.size)):
        axes = zip(tap, windows.dilation, windows.left_padding, windows.stride, x.shape[2:], shape[2:], strict=True)
        box, first, largest = [(0, x.shape[0]), (0, x.shape[1])], [0, 0], len(steps) - 1
        for at, apart, left, stride, size, count in axes:
            low, high = max(0, -(-(left - at * apart) // stride)), (size - 1 + left - at * apart) // stride + 1
            box.append((low, min(high, count)))
            first.append(low * stride + at * apart - left)
        if any(low >= high for low, high in box):
            continue
        offset = 4 * sum(i * step for i, step in zip(first, x.strides, strict=True))
        tensor = replace(x.tensor, offset=x.tensor.offset + offset, shape=tuple(e - b for b, e in box), strides=strides)
        boxes.append(tuple(box))
        operands.append(replace(x, address=x.address + offset, tensor=tensor))
        steps += [
            Step("inside", (), len(boxes) - 1),
            Step("operand", (len(steps),), len(operands) - 1),
            Step("where", (len(steps), len(steps) + 1, 0), ""),
            Step("maximum", (largest, len(steps) + 2), ""),
        ]
    result = replace(out, tensor=replace(out.tensor, shape=shape, strides=contiguous_strides(shape)))
    expression = Expression(tuple(steps), listed_results=(len(steps) - 1,))
    return ExpressionGroup(numbers, expression, {}, shape, tuple(operands), (result,), boxes=tuple(boxes))


BINDINGS = {"windows": _bind_copy_of_windows_to_rows}
FUSED: Mapping[str, tuple[FusionMatcher, ...]] = {"windows": (_fuse_window_copy_and_matmul, _fuse_max_pooling)}
