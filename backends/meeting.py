"""Collectives through host memory, by the `Comm` with which the program was compiled.

All backends of this machine use them, and backends with devices that have no transport of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from ..graph.attrs import Attrs
from ..ops.collectives import as_index_ranges, as_integer, own_index_ranges
from .calls import Binding, Call, Calls, copy, one_result, plain

Index = tuple[slice, ...]
Pairs = list[tuple[Index, Index]]


def all_reduce(call: Call) -> Calls:
    scratch = call.take(*call.out.shape)
    return [partial(call.comm.all_reduce, call.operand(0), call.out, scratch, _sequence(call))]


def all_gather(call: Call) -> Calls:
    return [partial(call.comm.all_gather, call.operand(0), call.out, gathered(call.attrs), _sequence(call))]


def reduce_scatter(call: Call) -> Calls:
    return [partial(call.comm.reduce_scatter, call.operand(0), call.out, scattered(call.attrs), _sequence(call))]


def all_to_all(call: Call) -> Calls:
    return [partial(call.comm.all_gather, call.operand(0), call.out, exchanged(call.attrs), _sequence(call))]


def gathered(attrs: Attrs) -> list[Pairs]:
    """Return, for each device, pairs (index into the result, index into the source of the device)."""
    axis = as_integer(attrs["axis"])
    return [
        [(_at({axis: (offset, n)}), _at({axis: (start, n)})) for start, offset, n in _placed(runs)]
        for runs in as_index_ranges(attrs["runs"])
    ]


def scattered(attrs: Attrs) -> Pairs:
    """Return pairs (index into the result, index into the source of any device)."""
    axis = as_integer(attrs["axis"])
    return [
        (_at({axis: (start, n)}), _at({axis: (offset, n)})) for start, offset, n in _placed(own_index_ranges(attrs))
    ]


def exchanged(attrs: Attrs) -> list[Pairs]:
    """Return, for each device, pairs (index into the own new shard, index into the old shard of the device)."""
    return [list(_exchange(attrs, theirs)) for theirs in as_index_ranges(attrs["old_runs"])]


def _exchange(attrs: Attrs, theirs: tuple[tuple[int, int], ...]) -> Iterator[tuple[Index, Index]]:
    """Yield pairs (index into the own new shard, index into the other shard) for the old ranges `theirs`."""
    old, new = as_integer(attrs["old_axis"]), as_integer(attrs["axis"])
    for start, offset, n in _placed(own_index_ranges(attrs)):
        for their_start, their_offset, their_n in _placed(theirs):
            if old != new:
                yield (
                    _at({old: (their_offset, their_n), new: (start, n)}),
                    _at({old: (their_start, their_n), new: (offset, n)}),
                )
            else:
                low, high = max(offset, their_offset), min(offset + n, their_offset + their_n)
                if low < high:
                    mine, other = start + low - offset, their_start + low - their_offset
                    yield _at({new: (mine, high - low)}), _at({new: (other, high - low)})


def _placed(runs: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """Yield the index ranges of a shard as (start in the shard, start in the whole axis, length)."""
    start = 0
    for offset, n in runs:
        yield start, offset, n
        start += n


def _at(ranges: Mapping[int, tuple[int, int]]) -> Index:
    """Return the index that selects (start, length) along some axes and everything along the others."""
    index = [slice(None)] * (max(ranges) + 1)
    for axis, (start, n) in ranges.items():
        index[axis] = slice(start, start + n)
    return tuple(index)


def send(call: Call) -> Calls:
    to = as_integer(call.attrs["to"])
    return [*copy(call), partial(call.comm.send, call.out, to, _sequence(call))]


def receive(call: Call) -> Calls:
    return [partial(call.comm.receive, call.out, as_integer(call.attrs["source"]), _sequence(call))]


def _sequence(call: Call) -> int:
    return as_integer(call.attrs["sequence"])


KERNELS: Mapping[str, Binding] = {
    "all_reduce": Binding(all_reduce, one_result),
    "all_gather": plain(all_gather),
    "reduce_scatter": plain(reduce_scatter),
    "all_to_all": plain(all_to_all),
    "send": plain(send),
    "receive": plain(receive),
}
