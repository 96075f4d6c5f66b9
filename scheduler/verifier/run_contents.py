"""The contents of memory before each instruction, if the instructions of a program run one by one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from ...backends.base import Instruction, Program, Tensor
from ...backends.capabilities import ProgramFusion
from ...graph.dtypes import DType
from .memory.buffer_contents import BufferContents, compute_byte_extent

Content = tuple[tuple[int, int, object], ...]
"""The contents of a byte range: first byte, end byte and content of each part."""


class UnfusedRunContents:
    """The reference for checks of fusion: the content of each operand if the instructions run one by one.

    `readers` has for each result the instructions that read it. A result that is read after the run has no entry.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.reads: list[list[Content | None]] = []
        self.readers: dict[tuple[int, int], set[int]] = {}
        self.retained: set[tuple[int, int]] = set()
        contents = self._make_start()
        for number, instruction in enumerate(program.instructions):
            self.reads.append([None if t is None else _read_content(contents, t) for t in instruction.src])
            for content in self.reads[-1]:
                self._note_readers(content, number)
            _record_scratch(contents, instruction)
            for index, tensor in enumerate(instruction.dst):
                contents.record_write_and_overwritten_values(compute_byte_extent(tensor), (number, index))
                self.readers.setdefault((number, index), set())
        self.final = self._read_final_contents(contents)
        for content in self.final.values():
            self.retained |= {value for _, _, value in content if isinstance(value, tuple)}

    def _make_start(self) -> BufferContents:
        return BufferContents(self.program, keeps_remainders=True)

    def _note_readers(self, content: Content | None, number: int) -> None:
        for _, _, value in content or ():
            if isinstance(value, tuple):
                self.readers[value].add(number)

    def _read_final_contents(self, contents: BufferContents) -> dict[str, Content]:
        """Return by name the contents of outputs, saved states, weights and states at the end of a run."""
        program = self.program
        tensors = {f"output {name}": tensor for name, tensor in program.outputs.items()}
        for at, back in program.undo:
            tensors |= {f"save {at}.{index}": t for index, t in enumerate(back.src) if t is not None}
        for number, buffer in enumerate(program.buffers[1:], 1):
            tensors[f"buffer {number}"] = Tensor(number, 0, (buffer.nbytes,), (1,), DType.I8)
        return {name: _read_content(contents, tensor) for name, tensor in tensors.items()}

    def is_result_read_outside_group(self, number: int, members: Sequence[int]) -> bool:
        """Return whether anything outside of a fused group needs a result, so that the fused kernel must write it.

        The reader may be an instruction that is not in `members`, or the caller after the run.
        """
        values = [(number, index) for index in range(len(self.program.instructions[number].dst))]
        return any(value in self.retained or not self.readers[value] <= {*members} for value in values)

    def find_fused_run_differences(self, fusion: ProgramFusion) -> Iterator[str]:
        """Yield each operand and each final buffer that holds other values with fusion than without."""
        contents = self._make_start()
        for group in fusion.order:
            members = {*group}
            for number in group:
                for index, tensor in enumerate(self.program.instructions[number].src):
                    expected = self.reads[number][index]
                    if tensor is None or expected is None:
                        continue
                    inside = [part for part in expected if isinstance(part[2], tuple) and part[2][0] in members]
                    if _remove_byte_ranges(_read_content(contents, tensor), inside) != _remove_byte_ranges(
                        expected, inside
                    ):
                        yield f"operands: operand {index} of instruction {number} has another content in the fused run"
            for number in group:
                if len(group) == 1:
                    _record_scratch(contents, self.program.instructions[number])
                if len(group) == 1 or self.is_result_read_outside_group(number, group):
                    for index, tensor in enumerate(self.program.instructions[number].dst):
                        contents.record_write_and_overwritten_values(compute_byte_extent(tensor), (number, index))
        for name, content in self._read_final_contents(contents).items():
            if content != self.final[name]:
                yield f"operands: {name} has another content after the fused run"


def _read_content(contents: BufferContents, tensor: Tensor) -> Content:
    """Return which result each byte range of a tensor holds; bytes that no instruction has written are left out."""
    buffer, start, end = compute_byte_extent(tensor)
    if start == end:
        return ()
    starts, ranges = contents.starts[buffer], contents.ranges[buffer]
    first, stop = max(bisect_right(starts, start) - 1, 0), bisect_left(starts, end)
    parts = [(starts[at], *ranges[at]) for at in range(first, stop)]
    return tuple((max(low, start), min(high, end), value) for low, high, value in parts if high > start)


def _record_scratch(contents: BufferContents, instruction: Instruction) -> None:
    if instruction.scratch is not None:
        contents.record_write_and_overwritten_values(compute_byte_extent(instruction.scratch), None)


def _remove_byte_ranges(content: Content, ranges: Sequence[tuple[int, int, object]]) -> Content:
    """Return a list of byte ranges without the given ranges, which are sorted and do not overlap."""
    parts: Sequence[tuple[int, int, object]] = content
    for start, end, _ in ranges:
        before = [(low, min(high, start), value) for low, high, value in parts if low < start]
        parts = [*before, *((max(low, end), high, value) for low, high, value in parts if high > end)]
    return tuple(parts)
