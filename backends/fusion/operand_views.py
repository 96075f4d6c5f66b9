"""Views of operands over the shape of a group, and placed values, which have elements only in a box of the shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .operands import NoKernelError, Operand, compute_broadcast_strides, require_supported

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""The first and the end index along each axis."""


@dataclass(frozen=True)
class PlacementInShape:
    """Where a value lies in a larger shape, such as one operand of a concatenation in the result.

    Attributes:
        shape: the larger shape, over which the reader of the value is evaluated.
        start: the index at which the value begins.
        box: the part of the shape in which the value is read.
    """

    shape: Shape
    start: Shape
    box: Box

    def compute_operand_placement_at(self, start: Shape, shape: Shape) -> PlacementInShape:
        """Compute the placement of an operand of `shape` that lies at index `start` of the placed value."""
        starts = tuple(a + b for a, b in zip(self.start, start, strict=True))
        bounds = zip(self.box, starts, shape, strict=True)
        box = tuple((max(low, first), min(high, first + n)) for (low, high), first, n in bounds)
        require_supported(all(low < high for low, high in box), "an operand has no elements")
        return PlacementInShape(self.shape, starts, box)

    def slice_box_of_operand(self, operand: Operand, strides: Sequence[int]) -> Operand:
        """Return the part of an operand that lies in the box; `strides` are its strides along the axes of the shape."""
        first = sum((low - at) * step for (low, _), at, step in zip(self.box, self.start, strides, strict=True))
        sizes = tuple(high - low for low, high in self.box)
        tensor = replace(operand.tensor, offset=operand.tensor.offset + 4 * first, shape=sizes, strides=(*strides,))
        return replace(operand, address=operand.address + 4 * first, tensor=tensor)


@dataclass(frozen=True)
class RepetitionToShape:
    """The way in which the shape of a group repeats a value that is smaller, or permutes its axes.

    Attributes:
        reads: for each read the shape and the strides with which a dense value is read, and the shape to which the
            reader repeats it. The first read is of the value itself, the last by an instruction over the whole group.
    """

    reads: tuple[tuple[Shape, Shape, Shape], ...]

    def repeat_operand(self, operand: Operand, own_shape: Shape, shape: Shape) -> Operand:
        """Return a view of `shape` of an operand of the instruction that computes the value.

        Args:
            operand: The operand.
            own_shape: The shape of the value.
            shape: The shape of the group.

        Raises:
            NoKernelError: no strides describe this view.
        """
        for read_shape, read_strides, reader_shape in self.reads:
            order = sort_axes_by_stride(read_shape, read_strides)
            view = reshape_repeated_operand(operand, own_shape, tuple(read_shape[axis] for axis in order))
            strides = tuple(view.strides[order.index(axis)] for axis in range(len(order)))
            operand, own_shape = with_shape_and_strides(view, read_shape, strides), reader_shape
        return reshape_repeated_operand(operand, own_shape, shape)


def sort_axes_by_stride(shape: Shape, strides: Sequence[int]) -> list[int]:
    """Return the axes in the order of memory, the largest stride first. Axes of size 1 come first."""
    return sorted(range(len(shape)), key=lambda axis: (shape[axis] != 1, -strides[axis]))


def is_permutation_of_dense(operand: Operand) -> bool:
    """Return whether an operand is a dense array with permuted axes."""
    order, dense = sort_axes_by_stride(operand.shape, operand.strides), 1
    for axis in reversed(order):
        if operand.shape[axis] != 1 and operand.strides[axis] != dense:
            return False
        dense *= operand.shape[axis]
    return True


def place_whole(shape: Shape) -> PlacementInShape:
    """Return the placement of a value that fills the whole shape and is read everywhere."""
    return PlacementInShape(shape, (0,) * len(shape), tuple((0, n) for n in shape))


def reshape_box(own_shape: Shape, box: Box, shape: Shape) -> Box:
    """Convert a box (an index range on each axis) of `own_shape` to the same elements as a box of `shape`.

    Raises `NoKernelError` if these elements are no box there.
    """
    reshaped: list[tuple[int, int]] = []
    axes = [(n, *bounds) for n, bounds in zip(own_shape, box, strict=True) if n != 1]
    for size in reversed(shape):
        n, low, high = axes.pop() if axes and size != 1 else (1, 0, 1)
        while n < size and axes and (low, high) == (0, n):  # all of the inner axis: it merges with the next one
            m, first, end = axes.pop()
            n, low, high = m * n, first * n, end * n
        if n > size and n % size == 0 and low % size == high % size == 0:
            axes.append((n // size, low // size, high // size))
            n, low, high = size, 0, size
        require_supported(n == size, "a part of a value is read in another shape")
        reshaped.append((low, high))
    return tuple(reversed(reshaped))


def extend_box_view_to_shape(operand: Operand, box: Box, shape: Shape) -> Operand:
    """Return a view with the whole shape of an operand that has memory only for the elements of a box.

    No reader may touch other elements. The address is the address of the box's first element.
    """
    return replace(operand, tensor=replace(operand.tensor, shape=shape))


def is_box_of_whole_shape(box: Box, shape: Shape) -> bool:
    """Return whether a box includes the whole shape."""
    return all(bounds == (0, n) for bounds, n in zip(box, shape, strict=True))


def reshape_repeated_operand(operand: Operand, own_shape: Shape, shape: Shape) -> Operand:
    """Broadcast an operand to `own_shape`, then view the result with the shape `shape` of equal size.

    Raises:
        NoKernelError: no strides describe this view.
    """
    is_repeated_whole = len(operand.shape) <= len(own_shape) and all(
        n in (1, m) for n, m in zip(reversed(operand.shape), reversed(own_shape), strict=False)
    )
    require_supported(is_repeated_whole, "an operand is repeated as tiles")
    strides = find_strides_of_reshape(own_shape, compute_broadcast_strides(operand, own_shape), shape)
    if strides is None:
        raise NoKernelError("an operand has no view with the shape of the group")
    return with_shape_and_strides(operand, shape, strides)


def with_shape_and_strides(operand: Operand, shape: Shape, strides: Shape) -> Operand:
    """Return a view of the operand's memory with another shape and other strides."""
    if (shape, strides) == (operand.shape, operand.strides):
        return operand
    return replace(operand, tensor=replace(operand.tensor, shape=shape, strides=strides))


def find_strides_of_reshape(own_shape: Shape, own_strides: Sequence[int], shape: Shape) -> Shape | None:
    """Find the strides of a strided array after a reshape without a copy; None if the reshape needs a copy.

    Axes of size 1 have stride 0.
    """
    axes: list[tuple[int, int]] = []
    for size, stride in zip(own_shape, own_strides, strict=True):
        if size != 1 and axes and axes[-1][1] == size * stride:
            axes[-1] = axes[-1][0] * size, stride
        elif size != 1:
            axes.append((size, stride))
    strides: list[int] = []
    left, step = axes.pop() if axes else (1, 0)
    for size in reversed(shape):
        if size == 1:
            strides.append(0)
            continue
        if left == 1 and axes:
            left, step = axes.pop()
        if left % size:
            return None
        strides.append(step)
        left, step = left // size, step * size
    return tuple(reversed(strides))
