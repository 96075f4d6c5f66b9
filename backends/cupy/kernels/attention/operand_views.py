"""Views of the operands of attention: batches, axes of masks, and the fields of the C struct `View`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ....fusion.operands import Operand
from ...binding.iteration_axes import build_merged_tiling_iteration_axes
from ...binding.launch_builder import LaunchWord

AttentionOperands = tuple[Operand, Operand, Operand, Operand | None, Operand]
"""q [n, t, h, d], k [n, s, h, d], v [n, s, h, e], mask [n, t, m, s] and out [n, t, h, e]."""


def add_mask_head_axis(mask: Operand) -> Operand:
    """Return a view of a mask [..., t, s] with a head axis of size 1: [..., t, 1, s]."""
    t = mask.tensor
    shape, strides = (*t.shape[:-1], 1, t.shape[-1]), (*t.strides[:-1], 0, t.strides[-1])
    return replace(mask, tensor=replace(t, shape=shape, strides=strides))


def swap_axes(x: Operand, one: int, other: int) -> Operand:
    shape, strides = list(x.shape), list(x.strides)
    for axes in (shape, strides):
        axes[one], axes[other] = axes[other], axes[one]
    return replace(x, tensor=replace(x.tensor, shape=tuple(shape), strides=tuple(strides)))


def iterate_one_axis_batches(leading: Sequence[int], operands: AttentionOperands) -> Iterator[AttentionOperands]:
    """Yield the operands in batches with at most one leading axis; it is one batch if the leading axes can merge."""
    there = [o for o in operands if o is not None]
    heads = [replace(o, tensor=replace(o.tensor, shape=o.shape[:-3], strides=o.strides[:-3])) for o in there]
    axes = build_merged_tiling_iteration_axes(leading, heads)
    sizes = axes.sizes or (1,)
    for index in np.ndindex(sizes[:-1]):
        variants = iter(
            _slice_batch(o, sizes[-1], s[-1] if s else 0, sum(i * n for i, n in zip(index, s, strict=False)))
            for o, s in zip(there, axes.operand_strides, strict=True)
        )
        q, k, v, mask, out = (None if o is None else next(variants) for o in operands)
        assert q is not None
        assert k is not None
        assert v is not None
        assert out is not None
        yield q, k, v, mask, out


def _slice_batch(x: Operand, count: int, step: int, skipped: int) -> Operand:
    """Return a view of one batch of `x`: `count` entries, `step` elements apart, after `skipped` elements."""
    t, skipped = x.tensor, x.dtype.count_bytes(skipped)
    tensor = replace(t, offset=t.offset + skipped, shape=(count, *t.shape[-3:]), strides=(step, *t.strides[-3:]))
    return replace(x, address=x.address + skipped, tensor=tensor)


def make_view_fields_or_zeros(x: Operand | None) -> list[LaunchWord]:
    """Return the fields of the C struct `View`: address and four strides; zeros for `None`."""
    return [0] * 5 if x is None else [x, *compute_broadcast_strides(x)]


def compute_broadcast_strides(x: Operand) -> list[int]:
    """Return the strides of an operand for broadcasting: its strides, but 0 along axes with one entry."""
    return [0 if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True)]


def is_vector_loadable(x: Operand, columns: int) -> bool:
    """Return whether `columns` adjacent columns of any row can be loaded at once by a vector load."""
    *steps, last = compute_broadcast_strides(x)
    if x.dtype.is_quantised:
        return last == 1
    nbytes = min(16, x.dtype.count_bytes(columns))
    aligned = x.address % nbytes == 0 and all(x.dtype.count_bytes(s) % nbytes == 0 for s in steps)
    return last == 1 and x.shape[-1] % columns == 0 and aligned
