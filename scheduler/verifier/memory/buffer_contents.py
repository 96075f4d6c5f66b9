"""The content of the bytes of a device's buffers, recorded write by write, for the verifier of programs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ....backends.base import ALIGNMENT, Backend, Program, Tensor, contiguous_strides
from ....graph.attrs import Attr
from ....graph.dtypes import DType
from ....graph.node import Node, Value
from ....graph.spec import MAX_SIZE
from ....ops import REGISTRY, op_of
from ....ops.registry import find_graph_role


class BufferContents:
    """Records which value each byte of a device's buffers holds, while the verifier simulates a program.

    - `starts`, `ranges`: for each buffer its disjoint byte ranges in order, as first bytes and as (end byte, value).
    - `overwritten_values`: the values that lost bytes, until a caller clears the list.
    - `arena_end`: the end of the last value so far in the arena, which is buffer 0.
    - `keeps_remainders`: whether the remaining bytes of an overwritten value keep it; else they are unknown content.
    """

    def __init__(self, program: Program, *, keeps_remainders: bool = False) -> None:
        self.program, self.keeps_remainders = program, keeps_remainders
        self.starts: list[list[int]] = [[] for _ in program.buffers]
        self.ranges: list[list[tuple[int, object]]] = [[] for _ in program.buffers]
        self.overwritten_values: list[object] = []
        self.arena_end = 0

    def record_write_and_overwritten_values(self, extent: tuple[int, int, int], value: object) -> None:
        """Record that an instruction writes a value to a byte range, and note the values that lose bytes.

        The values that lose bytes are added to `overwritten_values`.

        Args:
            extent: The buffer number, the first byte and the end byte.
            value: The written value; None for unknown content.
        """
        buffer, start, end = extent
        if start >= end:
            return
        if buffer == 0:
            self.arena_end = max(self.arena_end, end)
        starts, ranges = self.starts[buffer], self.ranges[buffer]
        first = bisect_right(starts, start)
        if first and ranges[first - 1][0] > start:
            first -= 1
        last = bisect_left(starts, end, first)
        new: list[tuple[int, tuple[int, object]]] = [(start, (end, value))]
        self.overwritten_values += [content for _, content in ranges[first:last]]
        if first < last:
            (_, value_before), (end_behind, value_behind) = ranges[first], ranges[last - 1]
            if starts[first] < start:
                new.insert(0, (starts[first], (start, value_before if self.keeps_remainders else None)))
            if end_behind > end:
                new.append((end, (end_behind, value_behind if self.keeps_remainders else None)))
        starts[first:last] = [at for at, _ in new]
        ranges[first:last] = [content for _, content in new]

    def find_content(self, extent: tuple[int, int, int]) -> tuple[int, object]:
        """Find the value that occupies all bytes of a byte range.

        Args:
            extent: The buffer number, the first byte and the end byte.

        Returns:
            The first byte of the value and the value. If the bytes have several values or unknown content, the first
            byte of `extent` and None.
        """
        buffer, start, end = extent
        at = bisect_right(self.starts[buffer], start) - 1
        if at < 0 or self.ranges[buffer][at][0] < end:
            return start, None
        return self.starts[buffer][at], self.ranges[buffer][at][1]

    def check_bounds(self, tensor: Tensor) -> str | None:
        """Return why a tensor is not within its buffer, or None if it is."""
        if not 0 <= tensor.buffer < len(self.program.buffers):
            return f"{tensor} is in no buffer of the program"
        if not _has_strides_in_range(tensor.shape, tensor.strides):
            return f"shape {list(tensor.shape)} with strides {list(tensor.strides)} is not a valid tensor"
        _, start, end = compute_byte_extent(tensor)
        if not 0 <= start <= end <= self.program.buffers[tensor.buffer].nbytes:
            return f"{tensor} is outside its buffer of {self.program.buffers[tensor.buffer].nbytes} bytes"
        return None

    def check_tensor_holds_view(self, tensor: Tensor, view: ViewedValue) -> str | None:
        """Check that the bytes of a tensor hold the expected value; return the reason if they do not, else None.

        Args:
            tensor: The tensor that an instruction reads.
            view: The expected value, as a view of the value that owns the memory.
        """
        if (tensor.shape, tensor.strides) != (view.shape, view.strides) or tensor.dtype is not view.dtype:
            return f"{tensor} is not {view.dtype}{list(view.shape)} with strides {list(view.strides)}"
        if why := self.check_bounds(tensor):
            return why
        extent = compute_byte_extent(tensor)
        if extent[1] == extent[2]:
            return None
        start, content = self.find_content(extent)
        if content != view.base:
            return f"reads {view.base!r} from {tensor}, which holds {format_byte_range_content(content)}"
        if tensor.offset != view.compute_start_byte(start):
            return f"reads other entries of {view.base!r} than its view has: {tensor}"
        return None


class ViewedValue(NamedTuple):
    """A value as a strided view of the memory of the value `base`.

    Offset and strides count elements of the stored dtype. A value that owns its memory is its own base.
    """

    base: Value
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType

    def compute_start_byte(self, base_start_byte: int) -> int:
        """Return the byte of the buffer at which the view starts.

        Args:
            base_start_byte: The byte of the buffer at which the base value starts.
        """
        return base_start_byte + self.offset * self.dtype.block_bytes // self.dtype.block


class ViewCache:
    """A cache of the views of a graph's values; each value is resolved to the value that owns its memory."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.view_by_value: dict[Value, ViewedValue] = {}

    def resolve_view(self, value: Value) -> ViewedValue:
        """Return a value as a strided view of the value that owns its memory.

        A chain of view nodes is followed to its beginning. A value that owns its memory becomes a dense view of itself.
        """
        if (known := self.view_by_value.get(value)) is not None:
            return known
        chain = [value]
        while chain[-1] not in self.view_by_value and not chain[-1].node.is_leaf and op_of(chain[-1].node).is_view:
            chain.append(chain[-1].node.inputs[0])
        base = chain.pop()
        if base not in self.view_by_value:
            self.view_by_value[base] = ViewedValue(
                base, 0, base.shape, contiguous_strides(base.shape), find_stored_dtype(self.backend, base)
            )
        for seen in reversed(chain):
            self.view_by_value[seen] = _compute_view_of_view_node(seen.node, self.view_by_value[seen.node.inputs[0]])
        return self.view_by_value[value]


def _compute_view_of_view_node(node: Node, source_view: ViewedValue) -> ViewedValue:
    """Compute the view of a view node's result, such as a transpose, from the view of its operand."""
    shift, shape, strides = _compute_view_geometry(
        node.op, tuple(node.attrs.items()), source_view.shape, source_view.strides
    )
    return ViewedValue(source_view.base, source_view.offset + shift, shape, strides, source_view.dtype)


@lru_cache(maxsize=1 << 14)  # every layer and device asks
def _compute_view_geometry(
    op: str, attrs: tuple[tuple[str, Attr], ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the offset, the shape and the strides of a view op's result, all in elements.

    NumPy computes them: the op's declared view is applied to a one-byte-per-element array that is never read.

    Args:
        op: The name of the view op.
        attrs: The attributes of the node.
        shape: The shape of the operand.
        strides: The strides of the operand, in elements.
    """
    as_view = REGISTRY[op].as_view
    assert as_view is not None
    bytes_of = np.lib.stride_tricks.as_strided(np.empty(1, np.uint8), shape, strides)
    view = as_view(bytes_of, **dict(attrs))
    shift = view.__array_interface__["data"][0] - bytes_of.__array_interface__["data"][0] if view.size else 0
    return shift, view.shape, view.strides


def find_stored_dtype(backend: Backend, value: Value) -> DType:
    """Return the dtype in which a backend stores a value. The value must own its memory (no view)."""
    return backend.storage_spec(value.spec, find_graph_role(value)).dtype


def check_scratch_tensor(contents: BufferContents, scratch: Tensor | None, needed_bytes: int) -> str | None:
    """Return why the scratch memory of an instruction is wrong, or None.

    It must be an aligned row of bytes in the arena, with exactly the size that the backend needs.

    Args:
        contents: The buffers of the program.
        scratch: The scratch tensor of the instruction; None without scratch.
        needed_bytes: The scratch bytes that the backend needs for the node.
    """
    if scratch is None:
        return f"needs {needed_bytes} bytes of scratch" if needed_bytes else None
    if len(scratch.shape) != 1 or scratch != Tensor(0, scratch.offset, scratch.shape, (1,), DType.I8):
        return f"its scratch is {scratch}, need a one-dimensional byte tensor in the arena"
    if scratch.shape[0] != needed_bytes or scratch.offset % ALIGNMENT:
        return f"its scratch is {scratch}, need {needed_bytes} bytes at a multiple of {ALIGNMENT}"
    why = contents.check_bounds(scratch)
    return why and f"its scratch: {why}"


def format_byte_range_content(content: object) -> str:
    """Format the content of a byte range for a message: the name of the value, or ``something else`` for None."""
    return "something else" if content is None else repr(content)


def compute_byte_extent(tensor: Tensor) -> tuple[int, int, int]:
    """Return the bytes that a tensor's strides reach, as (buffer number, first byte, end byte)."""
    reach = _compute_reachable_bytes(tensor.shape, tensor.strides, tensor.dtype)
    return tensor.buffer, tensor.offset, tensor.offset + reach


@lru_cache(maxsize=1 << 14)  # every layer and device asks
def _compute_reachable_bytes(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType) -> int:
    """Return the number of bytes from the first byte of a strided tensor to the end of its last element."""
    if 0 in shape:
        return 0
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return (last // dtype.block + 1) * dtype.block_bytes


@lru_cache(maxsize=1 << 14)
def _has_strides_in_range(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether there is one stride for each axis, and sizes and strides are from 0 to ``MAX_SIZE // 16``."""
    return len(shape) == len(strides) and all(0 <= n <= MAX_SIZE // 16 for n in (*shape, *strides))


def has_common_bytes_in_same_buffer(extent: tuple[int, int, int], other_extent: tuple[int, int, int]) -> bool:
    """Return whether two extents (buffer number, first byte, end byte) have at least one byte in common."""
    return extent[0] == other_extent[0] and max(extent[1], other_extent[1]) < min(extent[2], other_extent[2])


def is_dense(tensor: Tensor | ViewedValue) -> bool:
    """Return whether the elements are consecutive in row-major order. Strides of axes of size 1 are ignored."""
    dense = contiguous_strides(tensor.shape)
    if tensor.strides == dense or 0 in tensor.shape:
        return True
    return all(n == 1 or step == d for n, step, d in zip(tensor.shape, tensor.strides, dense, strict=True))
