"""A program on guarded memory: guard zones surround each value, and unwritten memory holds poison.

Poison is a byte that makes NaN or an implausible number. The backend is unchanged: it compiles and runs the same
instructions, at other offsets of a larger arena.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from ...backends.base import Backend, BufferSpec, Device, Program, Tensor, contiguous_strides
from ...graph.dtypes import DType
from ...graph.node import view_constant_array
from ...ops.quantisation import decode_array, dequantise, encode_array
from ...scheduler import DevicePlan, SingleDeviceComm
from ..cases.inputs import as_block_bytes
from ..cases.operand_layouts import Array

ALIGNMENT = 64
"""Alignment of values in the arena in bytes, relative to their offset in the original program."""
GUARD_BYTES = 1024
"""Bytes on either side of every value in the arena, and after every weight and state."""
NAN = 0xFF
"""A byte that makes NaN in every float type and -1 in every integer type."""
WILD_BYTE = 0x5A
"""A byte that makes 1.5e16 in float32 and 203 in float16; a sum that starts from it is wrong."""


def compute_byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the byte range of `tensor` in its buffer: the first byte, and the end of the last element."""
    if 0 in tensor.shape:
        return tensor.offset, tensor.offset
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    return tensor.offset, tensor.offset + (last // tensor.dtype.block + 1) * tensor.dtype.block_bytes


def _list_program_tensors(program: Program) -> Iterator[Tensor]:
    """Yield all tensors of a program: inputs, outputs, operands, results and scratch memory."""
    yield from program.inputs.values()
    yield from program.outputs.values()
    for i in program.instructions:
        yield from (t for t in (*i.src, *i.dst, i.scratch) if t is not None)


def add_guard_zones(program: Program) -> tuple[Program, list[tuple[int, int]]]:
    """Insert guard zones (unused bytes) between the values of a program's arena.

    Values that share bytes stay together.

    Returns:
        The changed program, and the byte range of each value. All bytes outside of the ranges are guard zones.
    """
    (arena,) = (n for n, b in enumerate(program.buffers) if b.kind == "arena")
    extents = sorted(compute_byte_range(t) for t in _list_program_tensors(program) if t.buffer == arena)
    merged: list[list[int]] = []
    for start, end in extents:
        if merged and (start < merged[-1][1] or merged[-1][0] == start):
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    moved, regions, top = [], [], GUARD_BYTES
    for start, end in merged:
        shift = top + start % ALIGNMENT - start
        moved.append((start, shift))
        regions.append((start + shift, end + shift))
        top = -(-(end + shift + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT

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


def copy_to_host(array: Any) -> Array:
    """Copy an array of a backend to host memory."""
    return np.array(array.get() if hasattr(array, "get") else array, order="C")


class GuardedProgram:
    """The compiled program of one device, with guard zones between its values to find writes outside of all values."""

    def __init__(self, device_plan: DevicePlan, weights: Mapping[str, Array]) -> None:
        self.backend: Backend = device_plan.backend
        self.device: Device = device_plan.device
        self.program, self.regions = add_guard_zones(device_plan.program)
        self.arena = next(n for n, b in enumerate(self.program.buffers) if b.kind == "arena")
        self._constants = {n.name: view_constant_array(n) for n in device_plan.graph.nodes if n.op == "constant"}
        self.buffers = [self._allocate_guarded_buffer(b, weights) for b in self.program.buffers]
        self._bytes = [self._view_buffer_with_guard_zones(n) for n in range(len(self.buffers))]
        self._free = np.ones(self.program.buffers[self.arena].nbytes, bool)
        for start, end in self.regions:
            self._free[start:end] = False
        self._updated_buffers = {t.buffer for i in self.program.instructions for t in i.dst}
        """States that instructions replace, and the arena."""
        self._loaded_bytes = {n: copy_to_host(raw) for n, raw in enumerate(self._bytes) if n != self.arena}
        self.replay = self.backend.compile(self.program, self.buffers, self.device, SingleDeviceComm())

    def _allocate_guarded_buffer(self, spec: BufferSpec, weights: Mapping[str, Array]) -> Any:
        """Allocate a buffer with a guard zone at its end, and load its weight or constant; the arena has neither."""
        if spec.kind == "arena":
            return self.backend.alloc(spec.nbytes, self.device)
        buffer = self.backend.alloc(spec.nbytes + GUARD_BYTES, self.device)
        loaded = {**weights, **self._constants}
        if spec.name in loaded:
            assert spec.declared_spec is not None
            self.backend.load(loaded[spec.name], spec.declared_spec, buffer)
        return buffer

    def _view_buffer_with_guard_zones(self, number: int) -> Any:
        """Return a view of a whole buffer as int8 bytes, with its guard zones."""
        spec = self.program.buffers[number]
        nbytes = spec.nbytes + (0 if spec.kind == "arena" else GUARD_BYTES)
        return self.backend.view(self.buffers[number], Tensor(number, 0, (nbytes,), (1,), DType.I8))

    # ------------------------------------------------------------------------------------------------- one run

    def poison_arena_and_guard_zones(self, byte: int) -> None:
        """Fill the arena and its guard zones with `byte`."""
        self._bytes[self.arena][...] = np.frombuffer(bytes([byte]), np.int8)[0]
        self._byte = byte

    def poison_results(self, byte: int) -> None:
        """Overwrite the results of all instructions with `byte`, so that a result that no kernel writes is found.

        Scratch memory stays as it is, because a kernel may save data for its next run there.
        """
        pattern = np.frombuffer(bytes([byte]), np.int8)[0]
        for instruction in self.program.instructions:
            for tensor in instruction.dst:
                start, end = compute_byte_range(tensor)
                if tensor.buffer == self.arena:
                    self._bytes[self.arena][start:end] = pattern

    def encode_and_write_inputs(self, inputs: Mapping[str, Array]) -> None:
        """Write the inputs and states to device memory, encoded in their dtypes.

        Args:
            inputs: arrays by name: float64 values of the declared dtype, integers, or quantised blocks of states.
        """
        for name, tensor in self.program.inputs.items():
            view = self.backend.view(self.buffers[tensor.buffer], tensor)
            data = inputs[name]
            view[...] = encode_array(data, tensor.dtype)
        for number, spec in enumerate(self.program.buffers):
            if spec.kind == "state":
                self._write_state(number, inputs[spec.name])

    def _write_state(self, number: int, blocks: Array) -> None:
        """Write the quantised blocks of a state to its buffer: their bytes, or their numbers in the stored dtype."""
        spec = self.program.buffers[number]
        declared, stored = spec.declared_spec, spec.stored_spec
        assert declared is not None
        assert stored is not None
        data = as_block_bytes(blocks, declared)
        if stored.dtype is not declared.dtype:
            data = encode_array(dequantise(data, declared.dtype), stored.dtype)
        tensor = Tensor(number, 0, stored.shape, contiguous_strides(stored.shape), stored.dtype)
        self.backend.view(self.buffers[number], tensor)[...] = data
        self._loaded_bytes[number] = copy_to_host(self._bytes[number])

    def read_program_input_bytes(self, arena_copy: Array) -> dict[str, bytes]:
        """Read the bytes of each input leaf from a copy of the arena."""
        leaves = {}
        for name, tensor in self.program.inputs.items():
            start, end = compute_byte_range(tensor)
            leaves[name] = arena_copy[start:end].tobytes()
        return leaves

    def copy_guarded_arena_to_host(self) -> Array:
        """Copy the arena with its guard zones to host memory."""
        return copy_to_host(self._bytes[self.arena])

    def find_stray_write(self, arena_copy: Array) -> str | None:
        """Find a write outside of all values, and return its description, or None.

        Args:
            arena_copy: a copy of the arena.
        """
        wrong = np.flatnonzero((arena_copy.view(np.uint8) != self._byte) & self._free)
        if wrong.size:
            at = int(wrong[0])
            past = min((at - end for _, end in self.regions if end <= at), default=None)
            before = min((start - at for start, _ in self.regions if start > at), default=None)
            where = (
                f"{past} bytes past the end" if past is not None and past < GUARD_BYTES else f"{before} bytes before"
            )
            return f"{wrong.size} bytes were written outside of all values, the first {where} of one"
        for number, before_bytes in self._loaded_bytes.items():
            spec = self.program.buffers[number]
            first = spec.nbytes if number in self._updated_buffers else 0
            if not np.array_equal(copy_to_host(self._bytes[number])[first:], before_bytes[first:]):
                return f"{spec.kind} %{spec.name} or the {GUARD_BYTES} bytes after it were written"
        return None

    def copy_outputs(self) -> dict[str, Array]:
        """Copy the outputs to host memory, in the storage format of the device."""
        return {
            name: copy_to_host(self.backend.view(self.buffers[t.buffer], t)) for name, t in self.program.outputs.items()
        }

    def decode_outputs(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return outputs in storage format as float64 or integers."""
        numbers_of = {}
        for name, array in outputs.items():
            dtype = self.program.outputs[name].dtype
            numbers = decode_array(array, dtype)
            numbers_of[name] = numbers if dtype.is_integer else numbers.astype(np.float64)
        return numbers_of
