"""Shape functions of tensors: reshape, permute, expand, slice, concatenate, pad and repeat.

A tensor with more than `MAX_RANK` axes has a flat graph value. Its consecutive axes are merged before an op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np

from ... import ops
from ...graph import Value
from ...graph.spec import MAX_RANK
from ..errors import ModelError
from .tensor import (
    Operand,
    Tensor,
    as_tensor,
    cast,
    constant_tensor,
    limit_shape_to_max_rank,
    number_as_tensor,
    promote_dtypes,
    reshape_value,
)


def _reshape_value(x: Tensor, shape: Sequence[int]) -> Value:
    """Return the graph value of `x` in another shape. The shape has at most `MAX_RANK` axes."""
    return reshape_value(x.value, tuple(shape))


def _with_value(x: Tensor, value: Value, shape: Sequence[int]) -> Tensor:
    return as_tensor(value, shape, x.is_bool)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the same elements with another shape; one entry of `shape` may be -1."""
    size, known = prod(x.shape), prod(n for n in shape if n != -1)
    whole = tuple((size // known if known else 0) if n == -1 else n for n in shape)
    if prod(whole) != size:
        raise ModelError(f"shape {list(shape)} does not hold the {size} elements of a tensor of {list(x.shape)}")
    known_array = None if x.constant is None else x.constant.reshape(whole)
    value = reshape_value(x.value, limit_shape_to_max_rank(whole))
    return Tensor(value, whole, x.is_bool, known_array, x.is_non_negative)


def permute(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Permute the axes of `x`: axis i of the result is axis ``axes[i]`` of `x`.

    A permutation of a permutation becomes one permutation.
    """
    order = [x.normalise_axis(a) for a in axes]
    shape = tuple(x.shape[a] for a in order)
    if order == list(range(x.rank)):
        return x
    if not x.exceeds_max_rank:
        return Tensor(permute_value(x.value, order), shape, x.is_bool, is_non_negative=x.is_non_negative)
    # Axes that stay consecutive are merged; axes of one entry are dropped.
    real = [a for a in order if x.shape[a] != 1]
    ahead = dict(zip(sorted(real)[1:], sorted(real), strict=False))
    runs: list[list[int]] = []
    for a in real:
        if runs and ahead.get(a) == runs[-1][-1]:
            runs[-1].append(a)
        else:
            runs.append([a])
    if len(runs) > MAX_RANK:  # the axes are moved one after the other
        for place, axis in enumerate(order):
            at = place + [a for a in range(x.rank) if a not in order[:place]].index(axis)
            sizes = [prod(x.shape[i:j]) for i, j in ((0, place), (place, at), (at, at + 1), (at + 1, x.rank))]
            new_shape = (*x.shape[:place], x.shape[at], *x.shape[place:at], *x.shape[at + 1 :])
            x = _with_value(x, permute_value(_reshape_value(x, sizes), (0, 2, 1, 3)), new_shape)
        return x
    source = sorted(runs)
    value = _reshape_value(x, [prod(x.shape[a] for a in run) for run in source])
    return _with_value(x, permute_value(value, [source.index(run) for run in runs]), shape)


def permute_value(value: Value, order: Sequence[int]) -> Value:
    """Permute the axes of a graph value; consecutive permutations become one, and an identity adds no node."""
    axes = list(order)
    while value.node.op in ("permute", "transpose"):
        (source,) = value.node.inputs
        rank = len(source.shape)
        inner_axes = value.node.attrs.get("axes")
        inner = inner_axes if isinstance(inner_axes, tuple) else (*range(rank - 2), rank - 1, rank - 2)
        axes, value = [int(np.asarray(inner[a])) for a in axes], source
    return value if axes == list(range(len(axes))) else ops.permute(value, axes=tuple(axes))


def transpose(x: Tensor, first: int, second: int) -> Tensor:
    """Return `x` with the axes `first` and `second` exchanged."""
    if x.rank == 0:
        return x
    axes = list(range(x.rank))
    i, j = x.normalise_axis(first), x.normalise_axis(second)
    axes[i], axes[j] = j, i
    return permute(x, axes)


def move_axis(x: Tensor, axis: int, position: int) -> Tensor:
    """Return `x` with one axis moved to the position `position`."""
    axes = [a for a in range(x.rank) if a != x.normalise_axis(axis)]
    axes.insert(x.normalise_axis(position), x.normalise_axis(axis))
    return permute(x, axes)


def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Broadcast `x` to `shape`: repeat the one entry of axes of size 1; a size of -1 keeps the size of the axis.

    Raises:
        ModelError: The shapes do not broadcast, or too many separate axes would repeat.
    """
    extra = len(shape) - x.rank
    whole = tuple(x.shape[i - extra] if n == -1 else n for i, n in enumerate(shape))
    if whole == x.shape:
        return x
    own = (1,) * extra + x.shape
    if extra < 0 or any(n not in (1, m) for n, m in zip(own, whole, strict=True)):
        raise ModelError(f"a tensor of {list(x.shape)} cannot be expanded to {list(shape)}")
    if len(whole) <= MAX_RANK:
        return Tensor(ops.broadcast(x.value, shape=whole), whole, x.is_bool, is_non_negative=x.is_non_negative)
    groups: list[tuple[int, int]] = []  # merged consecutive axes: sizes before and after
    for n, m in zip(own, whole, strict=True):
        if (groups and (n == m) == (groups[-1][0] == groups[-1][1])) or m == 1:
            before, after = groups.pop() if groups else (1, 1)
            groups.append((before * n, after * m))
        else:
            groups.append((n, m))
    if len(groups) > MAX_RANK:
        raise ModelError(f"expanding {list(x.shape)} to {list(whole)} repeats too many axes apart from each other")
    narrow = _reshape_value(x, [before for before, _ in groups])
    return _with_value(x, ops.broadcast(narrow, shape=tuple(after for _, after in groups)), whole)


def squeeze(x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """Remove the axes of size 1: all of them, or only the given `axes`."""
    chosen = range(x.rank) if axes is None else {x.normalise_axis(a) for a in axes}
    return reshape(x, [n for i, n in enumerate(x.shape) if n != 1 or i not in chosen])


def unsqueeze(x: Tensor, axis: int) -> Tensor:
    """Insert a new axis of size 1 at the position `axis`."""
    at = axis % (x.rank + 1)
    return reshape(x, (*x.shape[:at], 1, *x.shape[at:]))


def apply_along_axis(x: Tensor, axis: int, change: Callable[[Value, int], Value]) -> Tensor:
    """Apply a function of graph values to one axis of a tensor.

    A tensor with too many axes for a graph value is passed with three axes: all before, the axis, and all after it.

    Args:
        x: The tensor.
        axis: The axis.
        change: Takes a graph value and the index of the axis in it, and returns the new value.
    """
    at = x.normalise_axis(axis)
    if not x.exceeds_max_rank:
        return as_tensor(change(x.value, at), None, x.is_bool)
    before, after = prod(x.shape[:at]), prod(x.shape[at + 1 :])
    value = change(_reshape_value(x, (before, x.shape[at], after)), 1)
    return _with_value(x, value, (*x.shape[:at], value.shape[1], *x.shape[at + 1 :]))


def slice_range(x: Tensor, axis: int, start: int, stop: int) -> Tensor:
    """Return the entries from `start` to `stop` (exclusive) of one axis."""
    if (start, stop) == (0, x.shape[x.normalise_axis(axis)]):
        return x
    part = apply_along_axis(x, axis, lambda value, at: ops.slice_(value, axis=at, start=start, stop=stop))
    return replace(part, is_non_negative=x.is_non_negative)


def slice_(x: Tensor, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Tensor:
    """Return a slice of one axis with the semantics of Python.

    Bounds may be negative or missing; a step may be negative.
    """
    n = x.shape[x.normalise_axis(axis)]
    if step < 0:
        return take_at_constant_indices(x, axis, np.arange(n)[slice(start, stop, step)])
    first, last, _ = slice(start, stop).indices(n)
    count = max(0, -(-(last - first) // step))
    if step == 1 or count <= 1:
        return slice_range(x, axis, first, first + (count if count <= 1 else last - first))
    at = x.normalise_axis(axis)
    own = min(first, max(0, first + count * step - n))  # the place of the entry in each part of `step` entries
    lacking = max(0, first - own + count * step - n)
    longer = pad(x, [(0, lacking if i == at else 0) for i in range(x.rank)]) if lacking else x
    run = slice_range(longer, at, first - own, first - own + count * step)
    parts = reshape(run, (prod(x.shape[:at]), count, step, prod(x.shape[at + 1 :])))
    return reshape(slice_range(parts, 2, own, own + 1), (*x.shape[:at], count, *x.shape[at + 1 :]))


def take_at_constant_indices(x: Tensor, axis: int, indices: np.ndarray) -> Tensor:
    """Return the entries of one axis of `x` at the positions `indices`, which are known at export; the axis stays.

    Indices in at most four runs of consecutive numbers become slices, which are cheaper than a gather. Other indices
    become one row gather.
    """
    at, n = x.normalise_axis(axis), x.shape[x.normalise_axis(axis)]
    ids = np.asarray(indices, np.int64)
    ids = np.where(ids < 0, ids + n, ids)
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    if len(ids) and len(breaks) < 4:
        return cat([slice_range(x, at, int(run[0]), int(run[-1]) + 1) for run in np.split(ids, breaks)], at)
    front = move_axis(x, at, 0)
    rows = reshape(front, (n, prod(front.shape[1:])))
    return move_axis(reshape(select_rows(rows, constant_tensor(ids)), (len(ids), *front.shape[1:])), 0, at)


def select_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of the matrix `table` at the indices `ids`, in the dtype of the matrix.

    Known indices that repeat one run of consecutive numbers, such as positions of each sequence, become a slice.
    """
    if ids.constant is not None and (run := _find_repeated_run(np.asarray(ids.constant), table.shape[0])) is not None:
        part = slice_range(table, 0, int(run[0]), int(run[-1]) + 1)
        repeated = expand(unsqueeze(part, 0), (ids.shape[0] // len(run), *part.shape))
        return reshape(repeated, (ids.shape[0], table.shape[1]))
    if not table.is_integer:
        return cast(as_tensor(ops.get_rows(table.value, ids.value), None, table.is_bool), table.dtype, table.is_bool)
    numbers = ops.broadcast(reshape_value(ids.value, (1, *ids.shape)), shape=(table.shape[1], *ids.shape))
    return as_tensor(ops.transpose(ops.gather(ops.transpose(table.value), numbers)))


def _find_repeated_run(ids: np.ndarray, count: int) -> np.ndarray | None:
    """Find the run of consecutive indices below `count` that `ids` [n] repeats, or return None."""
    if not ids.size or ids.min() < 0 or ids.max() >= count:
        return None
    length = int(ids[-1]) - int(ids[0]) + 1
    if length < 1 or len(ids) % length:
        return None
    run = ids[:length]
    return run if np.array_equal(ids, np.tile(np.arange(ids[0], ids[0] + length), len(ids) // length)) else None


def cat(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Concatenate tensors along an existing axis, after promotion to a common dtype."""
    some = [p for p in parts if p.shape != (0,)] or list(parts[:1])  # PyTorch skips tensors of shape (0,)
    first, *others = promote_dtypes(*some)
    at = first.normalise_axis(axis)
    for other in others:
        if not first.exceeds_max_rank:
            first = as_tensor(ops.concat(first.value, other.value, axis=at), None, first.is_bool)
            continue
        before, after = prod(first.shape[:at]), prod(first.shape[at + 1 :])
        a, b = (_reshape_value(p, (before, p.shape[at], after)) for p in (first, other))
        whole = (*first.shape[:at], first.shape[at] + other.shape[at], *first.shape[at + 1 :])
        first = _with_value(first, ops.concat(a, b, axis=1), whole)
    return first


def stack(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join tensors of one shape along a new axis."""
    return cat([unsqueeze(p, axis % (p.rank + 1)) for p in parts], axis % (parts[0].rank + 1))


def split(x: Tensor, sizes: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """Split one axis into parts of the given sizes.

    An integer is the size of every part; the last part may be smaller.
    """
    n = x.shape[x.normalise_axis(axis)]
    ends = np.cumsum([min(sizes, n - i) for i in range(0, n, sizes)] if isinstance(sizes, int) else sizes)
    return tuple(slice_range(x, axis, int(a), int(b)) for a, b in zip([0, *ends], ends, strict=False))


def unbind(x: Tensor, axis: int = 0) -> tuple[Tensor, ...]:
    """Return the entries of one axis as separate tensors without this axis."""
    return tuple(squeeze(part, [axis]) for part in split(x, 1, axis))


def select(x: Tensor, axis: int, index: int) -> Tensor:
    """Return the entry at `index` of one axis, without this axis."""
    at = x.normalise_axis(axis)
    i = index % x.shape[at]
    return squeeze(slice_range(x, at, i, i + 1), [at])


def flip(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Reverse the order of the entries along each of `axes`."""
    for axis in axes:
        x = take_at_constant_indices(x, axis, np.arange(x.shape[x.normalise_axis(axis)])[::-1])
    return x


def roll(x: Tensor, shifts: Sequence[int], axes: Sequence[int] = ()) -> Tensor:
    """Shift the entries along axes cyclically; without axes, shift the flattened tensor."""
    if not axes:
        return reshape(roll(reshape(x, [-1]), shifts, [0]), x.shape)
    for shift, axis in zip(shifts, axes, strict=True):
        at = x.normalise_axis(axis)
        n = x.shape[at]
        if n and shift % n:
            first = n - shift % n
            x = cat([slice_range(x, at, first, n), slice_range(x, at, 0, first)], at)
    return x


def repeat(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Tile `x`: repeat it ``counts[i]`` times along axis i."""
    own = reshape(x, (1,) * (len(counts) - x.rank) + x.shape)
    for axis, count in enumerate(counts):
        if count != 1:
            before, n, after = prod(own.shape[:axis]), own.shape[axis], prod(own.shape[axis + 1 :])
            tiles = expand(reshape(own, (before, 1, n * after)), (before, count, n * after))
            own = reshape(tiles, (*own.shape[:axis], count * n, *own.shape[axis + 1 :]))
    return own


def pad(x: Tensor, pads: Sequence[tuple[int, int]], value: Operand = 0) -> Tensor:
    """Add entries of `value` before and after each axis of `x`; negative numbers in `pads` remove entries."""
    for axis, (a, b) in enumerate(pads):
        if a < 0 or b < 0:
            x = slice_range(x, axis, max(0, -a), x.shape[axis] - max(0, -b))
    grown = [(max(0, a), max(0, b)) for a, b in pads]
    if not any(a or b for a, b in grown):
        return x
    out = x
    for axis, (a, b) in enumerate(grown):
        if a or b:
            out = apply_along_axis(out, axis, partial(_pad_zeros, before=a, after=b))
    if isinstance(value, Tensor) or value != 0:
        inside = np.pad(np.ones(x.shape, bool), grown)
        around = cast(number_as_tensor(value, x), x.dtype)
        out = as_tensor(ops.where(constant_tensor(inside).value, out.value, around.value), out.shape, x.is_bool)
    return out


def _pad_zeros(value: Value, axis: int, before: int, after: int) -> Value:
    left, right = [0] * len(value.shape), [0] * len(value.shape)
    left[axis], right[axis] = before, after
    return ops.pad(value, left=tuple(left), right=tuple(right))


def pad_with_own_entries(x: Tensor, pads: Sequence[tuple[int, int]], mode: str) -> Tensor:
    """Pad `x` with its own entries, as `numpy.pad` does for the modes edge, reflect, symmetric and wrap."""
    for axis, (a, b) in enumerate(pads):
        if a or b:
            own = np.pad(np.arange(x.shape[axis]), (max(0, a), max(0, b)), mode=mode)  # type: ignore[call-overload]
            x = take_at_constant_indices(x, axis, own[max(0, -a) : len(own) - max(0, -b)])
    return x
