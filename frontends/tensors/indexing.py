"""Indexing of tensors: rows of a table, gather, scatter, and NumPy indexing by several index tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ... import ops
from ...graph import DType, Value
from ...ops.declaration.shape_rules import integers_attribute
from ..errors import ModelError
from .arithmetic import add, compare, mul, where
from .shapes import expand, move_axis, permute, reshape, select_rows, slice_range, take_at_constant_indices
from .tensor import (
    Operand,
    Tensor,
    as_tensor,
    cast,
    constant_tensor,
    number_as_tensor,
    reshape_value,
    skip_reshapes,
)


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of `weight` [rows, width] at indices of any shape: [*ids.shape, width]."""
    rows = select_rows(weight, reshape(ids, (prod(ids.shape),)))
    return reshape(rows, (*ids.shape, weight.shape[1]))


def normalise_negative_indices(ids: Tensor, n: int) -> Tensor:
    """Add `n` to the negative ones of the indices `ids`, which count from the end of an axis of `n` entries."""
    if ids.constant is not None:
        known = np.asarray(ids.constant, np.int64)
        return constant_tensor(np.where(known < 0, known + n, known))
    if ids.is_non_negative:
        return ids
    return where(compare("lt", ids, 0), add(ids, n), ids)


def index_select(x: Tensor, axis: int, ids: Tensor) -> Tensor:
    """Return the entries of one axis of `x` at the positions `ids`, which may depend on data; the axis stays."""
    at, n = x.normalise_axis(axis), x.shape[x.normalise_axis(axis)]
    if ids.constant is not None:
        return take_at_constant_indices(x, at, np.asarray(ids.constant).reshape(-1))
    front = move_axis(x, at, 0)
    rows = select_rows(reshape(front, (n, prod(front.shape[1:]))), normalise_negative_indices(reshape(ids, (-1,)), n))
    return move_axis(reshape(rows, (prod(ids.shape), *front.shape[1:])), 0, at)


def gather(x: Tensor, axis: int, ids: Tensor) -> Tensor:
    """Return the entries of one axis at `ids`, as `torch.gather`: ``out[i][j] = x[ids[i][j]][j]`` for axis 0."""
    at = x.normalise_axis(axis)
    if not x.rank:
        return reshape(x, ids.shape)
    for other in range(x.rank):
        if other != at:
            x = slice_range(x, other, 0, ids.shape[other])
    last, places = move_axis(x, at, -1), move_axis(ids, at, -1)
    if last.exceeds_max_rank:
        last, places = (reshape(p, (-1, p.shape[-1])) for p in (last, places))
    shape = move_axis(ids, at, -1).shape
    out = as_tensor(ops.gather(last.value, normalise_negative_indices(places, x.shape[at]).value), None, x.is_bool)
    return move_axis(reshape(out, shape), -1, at)


def scatter(x: Tensor, axis: int, ids: Tensor, src: Operand, reduce: str = "set") -> Tensor:
    """Return `x` with the entries of `src` written along one axis at the indices `ids`, as `torch.scatter`.

    For axis 0: ``out[ids[i][j]][j] = src[i][j]``. If `reduce` is not ``set``, it tells how the old and the new entry
    are combined.
    """
    at = x.normalise_axis(axis)
    entries = expand(number_as_tensor(src, x), ids.shape) if not isinstance(src, Tensor) else src
    for other in range(x.rank):
        entries = slice_range(entries, other, 0, ids.shape[other])
    if any(ids.shape[a] != x.shape[a] for a in range(x.rank) if a != at):
        return _scatter_by_flat_indices(x, at, ids, entries, reduce)
    entries = entries if x.is_bool and entries.is_bool else cast(entries, x.dtype)
    into, places, new = (move_axis(p, at, -1) for p in (x, normalise_negative_indices(ids, x.shape[at]), entries))
    shape = into.shape
    if into.exceeds_max_rank:
        into, places, new = (reshape(p, (-1, p.shape[-1])) for p in (into, places, new))
    out = as_tensor(ops.scatter(into.value, places.value, new.value, reduce=reduce), None, x.is_bool)
    return move_axis(reshape(out, shape), -1, at)


def _scatter_by_flat_indices(x: Tensor, at: int, ids: Tensor, entries: Tensor, reduce: str) -> Tensor:
    """Scatter along axis `at` of `x` by a scatter into the flattened `x`.

    This serves index tensors that are smaller than `x` on other axes.

    Args:
        x: The tensor.
        at: The axis.
        ids: The indices of the entries on this axis.
        entries: The entries to write.
        reduce: ``set``, or how to combine the old and the new entry.
    """
    steps = [prod(x.shape[a + 1 :]) for a in range(x.rank)]
    place = mul(normalise_negative_indices(ids, x.shape[at]), steps[at])
    for axis, step in enumerate(steps):
        if axis != at:
            shape = [ids.shape[axis] if a == axis else 1 for a in range(x.rank)]
            place = add(place, constant_tensor(np.arange(ids.shape[axis], dtype=np.int64).reshape(shape) * step))
    flat = scatter(reshape(x, (-1,)), 0, reshape(place, (-1,)), reshape(entries, (-1,)), reduce)
    return reshape(flat, x.shape)


def _flatten_index_tensors(x: Tensor, indices: Sequence[Tensor | None]) -> tuple[list[int], Tensor, bool]:
    """Combine the index tensors of ``x[indices]`` into one tensor of flat indices into all indexed axes.

    Returns:
        The indexed axes, the flat indices into these axes, and whether the axes are consecutive.

    Raises:
        ModelError: An index tensor is boolean, so that the shape of the result depends on data.
    """
    axes = [a for a, ids in enumerate(indices) if ids is not None]
    lists = [ids for ids in indices if ids is not None]
    if any(ids.is_bool for ids in lists):
        raise ModelError("indexing by truth values gives a shape that depends on data; use where")
    shape = np.broadcast_shapes(*(ids.shape for ids in lists))
    place: Tensor | None = None
    for axis, ids in zip(axes, lists, strict=True):
        own = normalise_negative_indices(ids, x.shape[axis])
        if own.constant is not None:  # keeps the indices constant
            own = constant_tensor(np.broadcast_to(np.asarray(own.constant, np.int64), shape))
        own = cast(own, DType.I64)
        if place is None:
            place = own
        elif place.constant is not None and own.constant is not None:
            place = constant_tensor(
                np.asarray(place.constant, np.int64) * x.shape[axis] + np.asarray(own.constant, np.int64)
            )
        else:
            place = add(mul(place, x.shape[axis]), own)
    assert place is not None
    return axes, expand(place, shape), axes == list(range(axes[0], axes[-1] + 1))


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Return ``x[indices]`` with the semantics of NumPy; None selects a whole axis."""
    if len([i for i in indices if i is not None]) == 1:
        ((axis, ids),) = [(a, i) for a, i in enumerate(indices) if i is not None]
        if not ids.is_bool:
            out = index_select(x, axis, reshape(ids, (prod(ids.shape),)))
            return reshape(out, (*x.shape[:axis], *ids.shape, *x.shape[axis + 1 :]))
    axes, place, neighbours = _flatten_index_tensors(x, indices)
    rest = [a for a in range(x.rank) if a not in axes]
    front = permute(x, [*axes, *rest])
    rows = reshape(front, (prod(x.shape[a] for a in axes), prod(x.shape[a] for a in rest)))
    chosen = select_rows(rows, reshape(place, (prod(place.shape),)))
    out = reshape(chosen, (*place.shape, *(x.shape[a] for a in rest)))
    if not neighbours or axes[0] == 0:
        return out
    ahead, new = axes[0], len(place.shape)
    order = [*range(new, new + ahead), *range(new), *range(new + ahead, out.rank)]
    return permute(out, order)


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Return `x` with `values` written to ``x[indices]``, or added there if `accumulate` is set.

    Raises:
        ModelError: The shape of `values` depends on the content of a boolean mask.
    """
    if indices[0] is not None and indices[0].is_bool and len(indices) == 1:
        mask = reshape(indices[0], indices[0].shape + (1,) * (x.rank - indices[0].rank))
        if prod(values.shape) != 1 and values.rank > x.rank - indices[0].rank:
            raise ModelError("as many values as there are truths depend on data; use where")
        new = cast(expand(values, x.shape), x.dtype, x.is_bool)
        return where(mask, add(x, new) if accumulate else new, x)
    axes, place, neighbours = _flatten_index_tensors(x, indices)
    rest = [a for a in range(x.rank) if a not in axes]
    order = [*axes, *rest]
    front = permute(x, order)
    count, width = prod(x.shape[a] for a in axes), prod(x.shape[a] for a in rest)
    tail = tuple(x.shape[a] for a in rest)
    if neighbours and axes[0] and values.rank > len(tail):
        ahead, many = axes[0], len(place.shape)
        whole = expand(values, (*tail[:ahead], *place.shape, *tail[ahead:]))
        values = permute(whole, [*range(ahead, ahead + many), *range(ahead), *range(ahead + many, whole.rank)])
    new = reshape(expand(values, (*place.shape, *tail)), (prod(place.shape), width))
    new = new if x.is_bool else cast(new, x.dtype)
    rows, ids = reshape(front, (count, width)), reshape(place, (prod(place.shape),))
    if accumulate or x.is_integer:
        lists = expand(reshape(ids, (1, ids.shape[0])), (width, ids.shape[0]))
        put = scatter(permute(rows, (1, 0)), 1, lists, permute(new, (1, 0)), "add" if accumulate else "set")
        updated = permute(put, (1, 0))
    else:
        updated = as_tensor(ops.set_rows(rows.value, new.value, ids.value), None, x.is_bool)
    back = [order.index(a) for a in range(x.rank)]
    return permute(reshape(updated, front.shape), back)


def set_slice(x: Tensor, src: Tensor, axis: int, start: int | None, stop: int | None, step: int = 1) -> Tensor:
    """Return `x` with the slice ``start:stop:step`` of one axis replaced by `src`."""
    at = x.normalise_axis(axis)
    ids = np.arange(x.shape[at])[slice(start, stop, step)]
    if len(ids) == 0:
        return x
    src = src if x.is_bool and src.is_bool else cast(src, x.dtype)
    if step == 1 and not x.exceeds_max_rank:
        part = expand(src, (*x.shape[:at], len(ids), *x.shape[at + 1 :])).value
        whole = part, tuple(int(ids[0]) if a == at else 0 for a in range(x.rank))
        region, offsets = _find_changed_region_of_own_slice(x.value, at, int(ids[0]), part) or whole
        return as_tensor(ops.set_(x.value, region, offsets=offsets), None, x.is_bool)
    put = index_put(move_axis(x, at, 0), [constant_tensor(ids)], move_axis(src, at, 0))
    return move_axis(put, 0, at)


def _find_changed_region_of_own_slice(
    x: Value, axis: int, start: int, part: Value
) -> tuple[Value, tuple[int, ...]] | None:
    """Find the region that differs if `part` is the slice of `x` from `start` on, with a region of it replaced.

    An assignment to ``x[i, a:b]`` replaces a region of the slice ``x[i]``. One op sets the region in `x`.

    Returns:
        The entries of the region, with the rank of `x`, and its offsets in `x`. None if `part` has other entries.
    """
    change = skip_reshapes(part)
    if change.node.op != "set":
        return None
    base, entries = change.node.inputs
    own = skip_reshapes(base)
    is_own = own.node.op == "slice" and own.node.inputs[0] == x and own.shape == part.shape
    if not is_own or (own.node.attrs["axis"], own.node.attrs["start"]) != (axis, start):
        return None
    offsets = integers_attribute(change.node.attrs, "offsets")
    long = [axes for axes in zip(change.shape, entries.shape, offsets, strict=True) if axes[0] != 1]
    if [n for n, _, _ in long] != [n for n in part.shape if n != 1]:
        return None
    axes = iter(long)
    places = [next(axes)[1:] if n != 1 else (1, 0) for n in part.shape]
    starts = tuple(first + (start if a == axis else 0) for a, (_, first) in enumerate(places))
    return reshape_value(entries, tuple(n for n, _ in places)), starts
