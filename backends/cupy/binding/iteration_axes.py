"""Iteration axes: the common axes of several operands, with a stride for each operand.

Example: x [4, 8] plus y [8], both contiguous. The axes are (4, 8), with strides (8, 1) for x and (0, 1) for y. For two
contiguous operands [4, 8] the two axes merge into one axis (32,) with strides (1,).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...fusion.operands import Operand, require_supported
from .launch_builder import LaunchWord

MAX_ITERATION_AXES = 10
"""Maximum axis count in kernels: twice the five axes of a value, because a tiled operand splits each axis in two."""


@dataclass(frozen=True, slots=True)
class IterationAxes:
    """The loop axes of a kernel over several operands, outermost first; adjacent axes are merged if strides allow it.

    ``sizes`` are the sizes of the axes. ``operand_strides[k]`` are the strides of operand `k`, in elements. A stride
    of 0 means that the operand is repeated along the axis.
    """

    sizes: tuple[int, ...]
    operand_strides: tuple[tuple[int, ...], ...]

    @property
    def element_count(self) -> int:
        size = 1
        for n in self.sizes:
            size *= n
        return size

    @property
    def axes_struct_fields(self) -> list[LaunchWord]:
        """The fields of the C struct `Axes`: the axis count and the size of each axis, padded with 1."""
        return [len(self.sizes), *_pad_fields(self.sizes, 1)]

    def make_address_and_stride_fields(self, k: int, operand: Operand) -> list[LaunchWord]:
        """Return the fields of the C struct `Walk` of operand `k`: its address, then its strides, padded with 0."""
        return [operand, *_pad_fields(self.operand_strides[k], 0)]


def _pad_fields(values: Sequence[int], rest: int) -> list[LaunchWord]:
    return [*values, *([rest] * (MAX_ITERATION_AXES - len(values)))]


def build_merged_tiling_iteration_axes(shape: Sequence[int], operands: Sequence[Operand]) -> IterationAxes:
    """Build the merged iteration axes of `shape` for operands that are broadcast or tiled to `shape`.

    Along a tiled axis, the operand is repeated as a whole: index i of `shape` reads index i modulo the operand's size.

    Raises:
        NoKernelError: Two operands are tiled with different sizes along one axis.
    """
    axes: list[tuple[int, ...]] = []
    for axis, m in enumerate(reversed(shape)):
        own = [_find_size_and_stride_from_end(o, axis) for o in operands]
        tiles = {n for n, _ in own if n not in (1, m)}
        require_supported(len(tiles) <= 1, "operands are tiled in different ways")
        if not tiles:
            axes.insert(0, (m, *(0 if n == 1 else s for n, s in own)))
            continue
        (size,) = tiles
        axes.insert(0, (size, *(0 if n == 1 else s for n, s in own)))
        axes.insert(0, (m // size, *(s * size if n == m else 0 for n, s in own)))
    merged = _merge_axes(axes)
    return IterationAxes(
        tuple(a[0] for a in merged), tuple(tuple(a[k + 1] for a in merged) for k in range(len(operands)))
    )


def _find_size_and_stride_from_end(operand: Operand, axis: int) -> tuple[int, int]:
    """Return the size and the stride of one axis of an operand; `axis` 0 is the last axis, 1 the axis before it."""
    if axis >= len(operand.shape):
        return 1, 0
    return operand.shape[-1 - axis], operand.strides[-1 - axis]


def _merge_axes(axes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    merged: list[tuple[int, ...]] = []
    for n, *steps in axes:
        if n == 1:
            continue
        before = merged[-1] if merged else None
        if before is not None and all(was == n * now for was, now in zip(before[1:], steps, strict=True)):
            merged[-1] = (before[0] * n, *steps)
        else:
            merged.append((n, *steps))
    return merged


def as_row_starts(x: Operand) -> Operand:
    """Return a view [..., rows] of the first element of each row of `x` [..., rows, columns].

    Kernels with a loop of their own over a row need only the row's address.
    """
    return replace(x, tensor=replace(x.tensor, shape=x.shape[:-1], strides=x.strides[:-1]))


def as_row_starts_with_repeat_axis(x: Operand) -> Operand:
    """Return a view [..., rows, 1] of the first element of each row of `x`, with stride 0 along the last axis.

    A kernel that iterates over columns then reads the same row start for all columns.
    """
    return replace(x, tensor=replace(x.tensor, shape=(*x.shape[:-1], 1), strides=(*x.strides[:-1], 0)))


def split_tiled_axes_for_broadcast(
    shape: Sequence[int], operands: Sequence[Operand], tiled_index: int
) -> tuple[tuple[int, ...], list[Operand]]:
    """Split each axis along which an operand is repeated into two axes, so that strides can express the repetition.

    Example: each entry of [2] is repeated three times along an axis of 6. This axis becomes [2, 3], where the operand
    has the strides (1, 0). An axis is split if it is larger in `shape` than in the operand, by an integer factor.

    Args:
        shape: Shape of the iteration.
        operands: Operands with at most as many axes as `shape`.
        tiled_index: Index of the repeated operand in `operands`.

    Returns:
        The new shape, and all operands with split axes.
    """
    ahead = len(shape) - len(operands[tiled_index].shape)
    sizes = (1,) * ahead + operands[tiled_index].shape
    split_axes = [i for i, (n, m) in enumerate(zip(sizes, shape, strict=True)) if n not in (1, m)]
    new: list[int] = []
    for i, m in enumerate(shape):
        new += [sizes[i], m // sizes[i]] if i in split_axes else [m]
    return tuple(new), [
        _split_operand_axes(o, shape, sizes, split_axes, own=k == tiled_index) for k, o in enumerate(operands)
    ]


def _split_operand_axes(
    x: Operand, shape: Sequence[int], sizes: Sequence[int], split_axes: Sequence[int], *, own: bool
) -> Operand:
    ahead = len(shape) - len(x.shape)
    new: list[tuple[int, int]] = []
    for i, (m, s) in enumerate(zip((1,) * ahead + x.shape, (0,) * ahead + x.strides, strict=True)):
        if i not in split_axes:
            new.append((m, s))
        elif own:
            new += [(m, s), (1, 0)]
        else:
            ratio = shape[i] // sizes[i]
            new += [(sizes[i], s * ratio), (ratio, s)] if m != 1 else [(1, 0), (1, 0)]
    strides = tuple(s for _, s in new)
    return replace(x, tensor=replace(x.tensor, shape=tuple(n for n, _ in new), strides=strides))
