"""Collectives through host memory, by the `Comm` with which the program was compiled.

All backends in host memory use these bindings, and backends with devices that have no transport of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from ...graph.attrs import Attrs
from ...ops.collectives import cast_to_index_ranges, narrow_to_integer, own_index_ranges
from .bindings import Binding, Calls, HostInstruction, bind_copy, count_result_elements, make_binding_without_scratch

Index = tuple[slice, ...]
Pairs = list[tuple[Index, Index]]


def bind_all_reduce(call: HostInstruction) -> Calls:
    scratch = call.take_scratch(*call.out.shape)
    return [partial(call.comm.all_reduce, call.operand(0), call.out, scratch, _read_sequence_number(call))]


def bind_all_gather(call: HostInstruction) -> Calls:
    return [
        partial(
            call.comm.all_gather,
            call.operand(0),
            call.out,
            compute_all_gather_slice_pairs(call.attrs),
            _read_sequence_number(call),
        )
    ]


def bind_reduce_scatter(call: HostInstruction) -> Calls:
    return [
        partial(
            call.comm.reduce_scatter,
            call.operand(0),
            call.out,
            compute_reduce_scatter_slice_pairs(call.attrs),
            _read_sequence_number(call),
        )
    ]


def bind_all_to_all(call: HostInstruction) -> Calls:
    return [
        partial(
            call.comm.all_gather,
            call.operand(0),
            call.out,
            compute_all_to_all_slice_pairs(call.attrs),
            _read_sequence_number(call),
        )
    ]


def compute_all_gather_slice_pairs(attrs: Attrs) -> list[Pairs]:
    """Return for each device the slices that an all-gather copies from it.

    A slice is a pair (index into the result, index into the source of that device).
    """
    axis = narrow_to_integer(attrs["axis"])
    return [
        [
            (_make_axis_slices({axis: (offset, n)}), _make_axis_slices({axis: (start, n)}))
            for start, offset, n in _locate_ranges_in_shard_and_axis(runs)
        ]
        for runs in cast_to_index_ranges(attrs["runs"])
    ]


def compute_reduce_scatter_slice_pairs(attrs: Attrs) -> Pairs:
    """Return the slices that a device sums in a reduce-scatter, as pairs (index into the result, index into a source).

    They are the same for each source device.
    """
    axis = narrow_to_integer(attrs["axis"])
    return [
        (_make_axis_slices({axis: (start, n)}), _make_axis_slices({axis: (offset, n)}))
        for start, offset, n in _locate_ranges_in_shard_and_axis(own_index_ranges(attrs))
    ]


def compute_all_to_all_slice_pairs(attrs: Attrs) -> list[Pairs]:
    """Return for each device the slices that an all-to-all copies from it.

    A slice is a pair (index into the new shard of this device, index into the old shard of that device).
    """
    return [list(_list_all_to_all_slice_pairs(attrs, theirs)) for theirs in cast_to_index_ranges(attrs["old_runs"])]


def _list_all_to_all_slice_pairs(attrs: Attrs, theirs: tuple[tuple[int, int], ...]) -> Iterator[tuple[Index, Index]]:
    """Yield the slices that an all-to-all copies from one device to this device.

    A slice is a pair (index into the new shard of this device, index into the old shard of that device).

    Args:
        attrs: The attributes of the all-to-all.
        theirs: The index ranges of the old shard of that device, as (start, length).
    """
    old, new = narrow_to_integer(attrs["old_axis"]), narrow_to_integer(attrs["axis"])
    for start, offset, n in _locate_ranges_in_shard_and_axis(own_index_ranges(attrs)):
        for their_start, their_offset, their_n in _locate_ranges_in_shard_and_axis(theirs):
            if old != new:
                yield (
                    _make_axis_slices({old: (their_offset, their_n), new: (start, n)}),
                    _make_axis_slices({old: (their_start, their_n), new: (offset, n)}),
                )
            else:
                low, high = max(offset, their_offset), min(offset + n, their_offset + their_n)
                if low < high:
                    mine, other = start + low - offset, their_start + low - their_offset
                    yield _make_axis_slices({new: (mine, high - low)}), _make_axis_slices({new: (other, high - low)})


def _locate_ranges_in_shard_and_axis(runs: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """Yield for each index range of a shard its two positions: (start in the shard, start in the whole axis, length).

    Args:
        runs: The index ranges of the whole axis that the shard has, as (start, length).
    """
    start = 0
    for offset, n in runs:
        yield start, offset, n
        start += n


def _make_axis_slices(ranges: Mapping[int, tuple[int, int]]) -> Index:
    """Return an index that selects a range along some axes.

    It selects all entries along the other axes.

    Args:
        ranges: The range (start, length) of each restricted axis, by axis number.
    """
    index = [slice(None)] * (max(ranges) + 1)
    for axis, (start, n) in ranges.items():
        index[axis] = slice(start, start + n)
    return tuple(index)


def bind_send(call: HostInstruction) -> Calls:
    to = narrow_to_integer(call.attrs["to"])
    return [*bind_copy(call), partial(call.comm.send, call.out, to, _read_sequence_number(call))]


def bind_receive(call: HostInstruction) -> Calls:
    return [partial(call.comm.receive, call.out, narrow_to_integer(call.attrs["source"]), _read_sequence_number(call))]


def _read_sequence_number(call: HostInstruction) -> int:
    return narrow_to_integer(call.attrs["sequence"])


KERNELS: Mapping[str, Binding] = {
    "all_reduce": Binding(bind_all_reduce, count_result_elements),
    "all_gather": make_binding_without_scratch(bind_all_gather),
    "reduce_scatter": make_binding_without_scratch(bind_reduce_scatter),
    "all_to_all": make_binding_without_scratch(bind_all_to_all),
    "send": make_binding_without_scratch(bind_send),
    "receive": make_binding_without_scratch(bind_receive),
}
