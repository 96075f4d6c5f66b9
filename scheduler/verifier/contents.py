"""What the bytes of a device's buffers hold, followed write by write: the memory of the verifier of programs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...backends.base import Program, Tensor, contiguous_strides
from ...graph.node import Node, Value
from ...ops import op_of


class Memory:
    """What each range of each buffer holds: per buffer disjoint ranges in order, as starts and (end, value).

    `lost` are the values that lost bytes to others, until somebody asks.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.starts: list[list[int]] = [[] for _ in program.buffers]
        self.ranges: list[list[tuple[int, object]]] = [[] for _ in program.buffers]
        self.lost: list[object] = []

    def write(self, extent: tuple[int, int, int], value: object) -> None:
        buffer, start, end = extent
        if start >= end:
            return
        starts, ranges = self.starts[buffer], self.ranges[buffer]
        first = bisect_right(starts, start)
        if first and ranges[first - 1][0] > start:
            first -= 1
        last = bisect_left(starts, end, first)
        new: list[tuple[int, tuple[int, object]]] = [(start, (end, value))]
        self.lost += [held for _, held in ranges[first:last]]
        if first < last:  # what is left of a value that lost some bytes is no value
            if starts[first] < start:
                new.insert(0, (starts[first], (start, None)))
            if ranges[last - 1][0] > end:
                new.append((end, (ranges[last - 1][0], None)))
        starts[first:last] = [at for at, _ in new]
        ranges[first:last] = [held for _, held in new]

    def holds(self, extent: tuple[int, int, int]) -> tuple[int, object]:
        """Where the range that has all of `extent` begins, and its value; None where no single range has it."""
        buffer, start, end = extent
        at = bisect_right(self.starts[buffer], start) - 1
        if at < 0 or self.ranges[buffer][at][0] < end:
            return start, None
        return self.starts[buffer][at], self.ranges[buffer][at][1]

    def inside(self, tensor: Tensor, what: str) -> Iterator[str]:
        if not 0 <= tensor.buffer < len(self.program.buffers):
            yield f"{what}: {tensor} lies in no buffer"
            return
        _, start, end = extent_of(tensor)
        if not 0 <= start <= end <= self.program.buffers[tensor.buffer].nbytes:
            yield f"{what}: {tensor} lies outside its buffer of {self.program.buffers[tensor.buffer].nbytes} bytes"

    def expect(self, tensor: Tensor, seen: Seen, what: str) -> Iterator[str]:
        """Complaints unless `tensor` is what the graph says: this view of that value, which lies there now."""
        yield from self.inside(tensor, what)
        extent = extent_of(tensor)
        if tensor.shape != seen.shape:
            yield f"{what} is {list(tensor.shape)}, and its value is {list(seen.shape)}"
        if extent[1] == extent[2] or not 0 <= tensor.buffer < len(self.program.buffers):
            return
        start, held = self.holds(extent)
        if held != seen.base:
            yield f"{what}: reads {seen.base!r} from {tensor}, which holds {show(held)}"
        elif not seen.lies_as(tensor, start):
            yield f"{what}: reads other entries of {seen.base!r} than its view has: {tensor}"


@dataclass(frozen=True, slots=True)
class Seen:
    """A value as a view of the value whose memory it shows; offset and strides in elements."""

    base: Value
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def lies_as(self, tensor: Tensor, start: int) -> bool:
        """Whether `tensor` is this view of a base that begins at byte `start`."""
        dtype = tensor.dtype
        at = start + self.offset * dtype.block_bytes // dtype.block
        pairs = zip(self.shape, self.strides, tensor.strides, strict=True)
        return tensor.offset == at and all(n == 1 or mine == theirs for n, mine, theirs in pairs)


class Views:
    """What each value of a graph shows, by the functions with which its views are declared."""

    def __init__(self) -> None:
        self.known: dict[Value, Seen] = {}

    def of(self, value: Value) -> Seen:
        chain = [value]
        while chain[-1] not in self.known and not chain[-1].node.is_leaf and op_of(chain[-1].node).is_view:
            chain.append(chain[-1].node.inputs[0])
        base = chain.pop()
        if base not in self.known:
            self.known[base] = Seen(base, 0, base.shape, contiguous_strides(base.shape))
        for seen in reversed(chain):
            self.known[seen] = _through(seen.node, self.known[seen.node.inputs[0]])
        return self.known[value]


def _through(node: Node, source: Seen) -> Seen:
    """A view node over what its source shows, found on an array of single bytes that is never read."""
    as_view = op_of(node).as_view
    assert as_view is not None
    bytes_of = np.lib.stride_tricks.as_strided(np.empty(1, np.uint8), source.shape, source.strides)
    view = as_view(bytes_of, **node.attrs)
    shift = view.__array_interface__["data"][0] - bytes_of.__array_interface__["data"][0] if view.size else 0
    return Seen(source.base, source.offset + shift, view.shape, view.strides)


def show(held: object) -> str:
    return "something else" if held is None else repr(held)


def extent_of(tensor: Tensor) -> tuple[int, int, int]:
    """(buffer, first byte, end) of everything a tensor's strides can reach."""
    if 0 in tensor.shape:
        return tensor.buffer, tensor.offset, tensor.offset
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    blocks = last // tensor.dtype.block + 1
    return tensor.buffer, tensor.offset, tensor.offset + blocks * tensor.dtype.block_bytes


def meet(one: tuple[int, int, int], two: tuple[int, int, int]) -> bool:
    return one[0] == two[0] and max(one[1], two[1]) < min(one[2], two[2])


def is_dense(tensor: Tensor) -> bool:
    dense = contiguous_strides(tensor.shape)
    return all(n == 1 or s == d for n, s, d in zip(tensor.shape, tensor.strides, dense, strict=True))
