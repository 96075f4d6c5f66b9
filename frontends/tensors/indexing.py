"""Entries by number: rows, gathered and scattered entries, indexing by several lists at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ... import ops
from ...graph import DType
from ..errors import ModelError
from .arithmetic import add, compare, mul, where
from .shapes import cut, expand, moved, permute, reshape, rows_of, take
from .tensor import Operand, Tensor, cast, lifted, literal, tensor


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows of `weight` by numbers of any shape."""
    rows = rows_of(weight, reshape(ids, (prod(ids.shape),)))
    return reshape(rows, (*ids.shape, weight.shape[1]))


def counted(ids: Tensor, n: int) -> Tensor:
    """Numbers of `n` entries, negative ones counted from the end."""
    if ids.known is not None:
        known = np.asarray(ids.known, np.int64)
        return literal(np.where(known < 0, known + n, known))
    return where(compare("lt", ids, 0), add(ids, n), ids)


def index_select(x: Tensor, axis: int, ids: Tensor) -> Tensor:
    """Entries of an axis by a list of numbers."""
    at, n = x.axis(axis), x.shape[x.axis(axis)]
    if ids.known is not None:
        return take(x, at, np.asarray(ids.known).reshape(-1))
    front = moved(x, at, 0)
    rows = rows_of(reshape(front, (n, prod(front.shape[1:]))), counted(reshape(ids, (-1,)), n))
    return moved(reshape(rows, (prod(ids.shape), *front.shape[1:])), 0, at)


def gather(x: Tensor, axis: int, ids: Tensor) -> Tensor:
    """Entry ``ids[..., i, ...]`` of an axis, at the same place along the others."""
    at = x.axis(axis)
    if not x.rank:
        return reshape(x, ids.shape)
    for other in range(x.rank):
        if other != at:
            x = cut(x, other, 0, ids.shape[other])
    last, places = moved(x, at, -1), moved(ids, at, -1)
    if last.is_wide:
        last, places = (reshape(p, (-1, p.shape[-1])) for p in (last, places))
    shape = moved(ids, at, -1).shape
    out = tensor(ops.gather(last.value, counted(places, x.shape[at]).value), None, x.truth)
    return moved(reshape(out, shape), -1, at)


def scatter(x: Tensor, axis: int, ids: Tensor, src: Operand, reduce: str = "set") -> Tensor:
    """`x` with entries of an axis, at the same place along the others, replaced or combined by `reduce`."""
    at = x.axis(axis)
    entries = expand(lifted(src, x), ids.shape) if not isinstance(src, Tensor) else src
    for other in range(x.rank):
        entries = cut(entries, other, 0, ids.shape[other])
    if any(ids.shape[a] != x.shape[a] for a in range(x.rank) if a != at):
        return _scattered_flat(x, at, ids, entries, reduce)
    entries = entries if x.truth and entries.truth else cast(entries, x.dtype)
    into, places, new = (moved(p, at, -1) for p in (x, counted(ids, x.shape[at]), entries))
    shape = into.shape
    if into.is_wide:
        into, places, new = (reshape(p, (-1, p.shape[-1])) for p in (into, places, new))
    out = tensor(ops.scatter(into.value, places.value, new.value, reduce=reduce), None, x.truth)
    return moved(reshape(out, shape), -1, at)


def _scattered_flat(x: Tensor, at: int, ids: Tensor, entries: Tensor, reduce: str) -> Tensor:
    """Where only some places along the other axes are written: by the numbers of entries in memory."""
    steps = [prod(x.shape[a + 1 :]) for a in range(x.rank)]
    place = mul(counted(ids, x.shape[at]), steps[at])
    for axis, step in enumerate(steps):
        if axis != at:
            shape = [ids.shape[axis] if a == axis else 1 for a in range(x.rank)]
            place = add(place, literal(np.arange(ids.shape[axis], dtype=np.int64).reshape(shape) * step))
    flat = scatter(reshape(x, (-1,)), 0, reshape(place, (-1,)), reshape(entries, (-1,)), reduce)
    return reshape(flat, x.shape)


def _numbered(x: Tensor, indices: Sequence[Tensor | None]) -> tuple[list[int], Tensor, bool]:
    """Which axes lists of numbers index, where in them taken as one, and whether they are neighbours."""
    axes = [a for a, ids in enumerate(indices) if ids is not None]
    lists = [ids for ids in indices if ids is not None]
    if any(ids.truth for ids in lists):
        raise ModelError("indexing by truth values gives a shape that depends on data; use where")
    shape = np.broadcast_shapes(*(ids.shape for ids in lists))
    place: Tensor | None = None
    for axis, ids in zip(axes, lists, strict=True):
        own = counted(ids, x.shape[axis])
        if own.known is not None:  # the numbers of entries are known too
            own = literal(np.broadcast_to(np.asarray(own.known, np.int64), shape))
        own = cast(own, DType.I64)
        if place is None:
            place = own
        elif place.known is not None and own.known is not None:
            place = literal(np.asarray(place.known, np.int64) * x.shape[axis] + np.asarray(own.known, np.int64))
        else:
            place = add(mul(place, x.shape[axis]), own)
    assert place is not None
    return axes, expand(place, shape), axes == list(range(axes[0], axes[-1] + 1))


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """``x[indices]`` as NumPy has it: lists of numbers for some axes, None for those that are taken whole."""
    if len([i for i in indices if i is not None]) == 1:
        ((axis, ids),) = [(a, i) for a, i in enumerate(indices) if i is not None]
        if not ids.truth:
            out = index_select(x, axis, reshape(ids, (prod(ids.shape),)))
            return reshape(out, (*x.shape[:axis], *ids.shape, *x.shape[axis + 1 :]))
    axes, place, neighbours = _numbered(x, indices)
    rest = [a for a in range(x.rank) if a not in axes]
    front = permute(x, [*axes, *rest])
    rows = reshape(front, (prod(x.shape[a] for a in axes), prod(x.shape[a] for a in rest)))
    chosen = rows_of(rows, reshape(place, (prod(place.shape),)))
    out = reshape(chosen, (*place.shape, *(x.shape[a] for a in rest)))
    if not neighbours or axes[0] == 0:
        return out
    ahead, new = axes[0], len(place.shape)
    order = [*range(new, new + ahead), *range(new), *range(new + ahead, out.rank)]
    return permute(out, order)


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """`x` with ``x[indices]`` replaced by `values`, or with these added."""
    if indices[0] is not None and indices[0].truth and len(indices) == 1:
        mask = reshape(indices[0], indices[0].shape + (1,) * (x.rank - indices[0].rank))
        if prod(values.shape) != 1 and values.rank > x.rank - indices[0].rank:
            raise ModelError("as many values as there are truths depend on data; use where")
        new = cast(expand(values, x.shape), x.dtype, x.truth)
        return where(mask, add(x, new) if accumulate else new, x)
    axes, place, neighbours = _numbered(x, indices)
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
    new = new if x.truth else cast(new, x.dtype)
    rows, ids = reshape(front, (count, width)), reshape(place, (prod(place.shape),))
    if accumulate or x.is_integer:
        lists = expand(reshape(ids, (1, ids.shape[0])), (width, ids.shape[0]))
        put = scatter(permute(rows, (1, 0)), 1, lists, permute(new, (1, 0)), "add" if accumulate else "set")
        changed = permute(put, (1, 0))
    else:
        changed = tensor(ops.set_rows(rows.value, new.value, ids.value), None, x.truth)
    back = [order.index(a) for a in range(x.rank)]
    return permute(reshape(changed, front.shape), back)


def set_slice(x: Tensor, src: Tensor, axis: int, start: int | None, stop: int | None, step: int = 1) -> Tensor:
    """`x` with every `step`-th entry of an axis replaced by those of `src`."""
    at = x.axis(axis)
    ids = np.arange(x.shape[at])[slice(start, stop, step)]
    if len(ids) == 0:
        return x
    src = src if x.truth and src.truth else cast(src, x.dtype)
    if step == 1 and not x.is_wide:
        offsets = tuple(int(ids[0]) if a == at else 0 for a in range(x.rank))
        return tensor(
            ops.set_(x.value, expand(src, (*x.shape[:at], len(ids), *x.shape[at + 1 :])).value, offsets=offsets),
            None,
            x.truth,
        )
    put = index_put(moved(x, at, 0), [literal(ids)], moved(src, at, 0))
    return moved(put, 0, at)
