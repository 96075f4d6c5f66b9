"""A program on memory that tells on it: every value stands between guard zones, and what is not yet written is poison.

Nothing of the backend is replaced: it compiles and runs the same instructions, at other offsets of a larger arena.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from ...backends.base import Backend, BufferSpec, Device, Program, Tensor
from ...graph.dtypes import DType
from ...ops.quantisation import decode_array, encode_array
from ...scheduler import Alone, Lane
from ..trials.layouts import Array

ALIGNMENT = 64
GUARD = 1024
"""Bytes on either side of every value in the arena, and after every weight and state."""
NAN = 0xFF
"""As bytes: NaN in every float type, -1 in every integer type."""
WILD = 0x5A
"""As bytes: 1.5e16 in float32, 203 in float16; a sum that starts from it is wrong."""


def extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and end of what the strides of `tensor` reach."""
    if 0 in tensor.shape:
        return tensor.offset, tensor.offset
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    return tensor.offset, tensor.offset + (last // tensor.dtype.block + 1) * tensor.dtype.block_bytes


def _all_tensors(program: Program) -> Iterator[Tensor]:
    yield from program.inputs.values()
    yield from program.outputs.values()
    for i in program.instructions:
        yield from (t for t in (*i.src, *i.dst, i.scratch) if t is not None)


def spread(program: Program) -> tuple[Program, list[tuple[int, int]]]:
    """`program` with its arena pulled apart, and where its values now lie; all other bytes are guards.

    Values that share bytes, at one time or in turn, stay together.
    """
    (arena,) = (n for n, b in enumerate(program.buffers) if b.kind == "arena")
    extents = sorted(extent(t) for t in _all_tensors(program) if t.buffer == arena)
    merged: list[list[int]] = []
    for start, end in extents:
        if merged and (start < merged[-1][1] or merged[-1][0] == start):
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    moved, regions, top = [], [], GUARD
    for start, end in merged:
        shift = top + start % ALIGNMENT - start
        moved.append((start, shift))
        regions.append((start + shift, end + shift))
        top = -(-(end + shift + GUARD) // ALIGNMENT) * ALIGNMENT

    def move(tensor: Tensor | None) -> Any:
        if tensor is None or tensor.buffer != arena:
            return tensor
        shift = next(s for start, s in reversed(moved) if start <= tensor.offset)
        return replace(tensor, offset=tensor.offset + shift)

    instructions = tuple(
        replace(i, src=tuple(map(move, i.src)), dst=tuple(map(move, i.dst)), scratch=move(i.scratch))
        for i in program.instructions
    )
    buffers = list(program.buffers)
    buffers[arena] = BufferSpec("arena", "", top)
    inputs, outputs = ({k: move(t) for k, t in m.items()} for m in (program.inputs, program.outputs))
    moved_program = Program(tuple(buffers), instructions, MappingProxyType(inputs), MappingProxyType(outputs))
    return moved_program, regions


def to_host(array: Any) -> Array:
    """A copy in host memory of what ``backend.view`` gave."""
    return np.array(array.get() if hasattr(array, "get") else array, order="C")


class Guarded:
    """The program of one device, bound to guarded buffers on its device."""

    def __init__(self, lane: Lane, weights: Mapping[str, Array]) -> None:
        self.backend: Backend = lane.backend
        self.device: Device = lane.device
        self.program, self.regions = spread(lane.program)
        self.arena = next(n for n, b in enumerate(self.program.buffers) if b.kind == "arena")
        self.buffers = [self._made(b, weights) for b in self.program.buffers]
        self._bytes = [self._raw(n) for n in range(len(self.buffers))]
        self._free = np.ones(self.program.buffers[self.arena].nbytes, bool)
        for start, end in self.regions:
            self._free[start:end] = False
        self._kept = {n: to_host(raw) for n, raw in enumerate(self._bytes) if n != self.arena}
        self.replay = self.backend.compile(self.program, self.buffers, self.device, Alone())

    def _made(self, spec: BufferSpec, weights: Mapping[str, Array]) -> Any:
        if spec.kind == "arena":
            return self.backend.alloc(spec.nbytes, self.device)
        buffer = self.backend.alloc(spec.nbytes + GUARD, self.device)
        if spec.kind == "weight":
            assert spec.declared is not None
            self.backend.load(weights[spec.name], spec.declared, buffer)
        return buffer

    def _raw(self, number: int) -> Any:
        """A buffer as bytes, guard zones included."""
        spec = self.program.buffers[number]
        nbytes = spec.nbytes + (0 if spec.kind == "arena" else GUARD)
        return self.backend.view(self.buffers[number], Tensor(number, 0, (nbytes,), (1,), DType.I8))

    # ------------------------------------------------------------------------------------------------- one run

    def poison(self, byte: int) -> None:
        """Fill the whole arena, guards included."""
        self._bytes[self.arena][...] = np.frombuffer(bytes([byte]), np.int8)[0]
        self._byte = byte

    def poison_results(self, byte: int) -> None:
        """Fill what the last instructions write, and nothing they may have left for themselves."""
        pattern = np.frombuffer(bytes([byte]), np.int8)[0]
        for instruction in self.program.instructions:
            for tensor in instruction.dst:
                start, end = extent(tensor)
                if tensor.buffer == self.arena:
                    self._bytes[self.arena][start:end] = pattern

    def bind(self, inputs: Mapping[str, Array]) -> None:
        """Write the leaves; float64 values that the declared dtype can hold, or integers."""
        for name, tensor in self.program.inputs.items():
            view = self.backend.view(self.buffers[tensor.buffer], tensor)
            data = inputs[name]
            view[...] = encode_array(data, tensor.dtype)

    def leaf_bytes(self, raw: Array) -> dict[str, bytes]:
        """What each input leaf holds, of the arena as `arena_bytes` gives it."""
        held = {}
        for name, tensor in self.program.inputs.items():
            start, end = extent(tensor)
            held[name] = raw[start:end].tobytes()
        return held

    def arena_bytes(self) -> Array:
        return to_host(self._bytes[self.arena])

    def strays(self, raw: Array) -> str | None:
        """Where something was written that is no value of the program, in words."""
        wrong = np.flatnonzero((raw.view(np.uint8) != self._byte) & self._free)
        if wrong.size:
            at = int(wrong[0])
            past = min((at - end for _, end in self.regions if end <= at), default=None)
            before = min((start - at for start, _ in self.regions if start > at), default=None)
            near = f"{past} bytes past the end" if past is not None and past < GUARD else f"{before} bytes before"
            return f"{wrong.size} bytes were written outside of all values, the first {near} of one"
        for number, before_bytes in self._kept.items():
            if not np.array_equal(to_host(self._bytes[number]), before_bytes):
                spec = self.program.buffers[number]
                return f"{spec.kind} %{spec.name} or the {GUARD} bytes after it were written"
        return None

    def outputs(self) -> dict[str, Array]:
        """Outputs by name as they lie in memory, copied to the host."""
        return {name: to_host(self.backend.view(self.buffers[t.buffer], t)) for name, t in self.program.outputs.items()}

    def decoded(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs as numbers: float64 or integers."""
        numbers_of = {}
        for name, array in outputs.items():
            dtype = self.program.outputs[name].dtype
            numbers = decode_array(array, dtype)
            numbers_of[name] = numbers if dtype.is_integer else numbers.astype(np.float64)
        return numbers_of
