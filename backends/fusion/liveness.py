"""The readers of every result of a program: instructions that read its bytes before these are overwritten."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter

from ..base import Program, Tensor
from .operands import BoundInstruction, MemoryRegion, Operand

AccessedRegions = tuple[list[MemoryRegion], list[MemoryRegion]]
"""The regions that an instruction reads, and the regions that it writes."""


class ReaderTable:
    """Which instructions read each result of a program, with the instructions bound to their memory."""

    def __init__(
        self, program: Program, bind: Callable[[int], BoundInstruction], final_reads: Sequence[MemoryRegion]
    ) -> None:
        """Store the program, its binder and `final_reads`: the regions that are read after the last instruction."""
        self.program, self.final_regions = program, final_reads
        self._bind = bind
        self._bound_instructions: dict[int, BoundInstruction] = {}
        self._accesses: dict[int, AccessedRegions] = {}
        self._retained_results: set[int] = set()

    def bound_instruction(self, number: int) -> BoundInstruction:
        if number not in self._bound_instructions:
            self._bound_instructions[number] = self._bind(number)
        return self._bound_instructions[number]

    def accessed_regions(self, number: int) -> AccessedRegions:
        if number not in self._accesses:
            call = self.bound_instruction(number)
            self._accesses[number] = ([o.region for o in call.src if o is not None], [o.region for o in call.dst])
        return self._accesses[number]

    def find_reader_instructions(self, number: int) -> list[BoundInstruction] | None:
        """Return all instructions that read the first result of instruction `number`, bound to their memory.

        The result is None if there may be other readers, as in `find_readers`.
        """
        numbers = self.find_readers(number)
        return None if numbers is None else [self.bound_instruction(n) for n in numbers]

    def find_readers(self, number: int) -> list[int] | None:
        """Return the numbers of all instructions that read the first result of instruction `number`, ascending.

        The result is None if there may be other readers: after the last instruction, through retained memory, or if
        the result has gaps.
        """
        readers = self._readers_by_instruction.get(number)
        return None if number in self._retained_results else readers

    def find_known_readers_of_first_result(self, number: int) -> list[int]:
        """Return the instructions that are known to read the first result of instruction `number`, ascending.

        Something else may read a retained result, too.
        """
        return self._readers_by_instruction.get(number, [])

    def list_writes(self, buffer: int) -> Sequence[tuple[int, MemoryRegion]]:
        """Return all writes into a buffer in program order, as (instruction number, written region)."""
        return self._writes_by_buffer.get(buffer, ())

    @cached_property
    def _writes_by_buffer(self) -> Mapping[int, list[tuple[int, MemoryRegion]]]:
        writers = defaultdict(list)
        for number in range(len(self.program.instructions)):
            for region in self.accessed_regions(number)[1]:
                writers[region.buffer].append((number, region))
        return writers

    @cached_property
    def _readers_by_instruction(self) -> Mapping[int, list[int]]:
        """The numbers of the instructions that read each result, by the number of the instruction that wrote it.

        They are found in one pass over the program, which tracks the last writer of each byte. The pass also records
        the results that are read after the last instruction.
        """
        readers: dict[int, list[int]] = {}
        producers: dict[int, list[ProducedBytes]] = defaultdict(list)
        for number in range(len(self.program.instructions)):
            read, written = self.accessed_regions(number)
            for maker in {maker for region in read for maker in _find_producers(region, producers[region.buffer])}:
                readers[maker].append(number)
            is_traced = written and not written[0].pitch and self.bound_instruction(number).out.declared_spec is None
            for at, region in enumerate(written):
                if not region.pitch:  # a region with gaps leaves some bytes unchanged
                    _record_write(region, producers[region.buffer], number if is_traced and at == 0 else None)
            if is_traced:
                readers[number] = []
        for region in self.final_regions:
            self._retained_results.update(_find_producers(region, producers[region.buffer]))
        return readers


ProducedBytes = tuple[int, int, int]
"""Bytes [start, stop) of a buffer, and the number of the instruction that produced their contents.

The entries of a buffer are in order and do not overlap.
"""


def _find_slice_of_overlapping_producers(region: MemoryRegion, producers: Sequence[ProducedBytes]) -> slice:
    """Return which part of the sorted list `producers` overlaps with a memory region, as a slice of the list."""
    first = bisect_right(producers, region.low, key=itemgetter(1))
    return slice(first, bisect_left(producers, region.high, first, key=itemgetter(0)))


def _find_producers(region: MemoryRegion, producers: Sequence[ProducedBytes]) -> list[int]:
    return [maker for _, _, maker in producers[_find_slice_of_overlapping_producers(region, producers)]]


def _record_write(region: MemoryRegion, producers: list[ProducedBytes], maker: int | None) -> None:
    """Record that instruction `maker` writes `region`, in the table of the last writer of each byte of a buffer.

    Entries that the region covers are removed; entries that it covers in part are shortened.

    Args:
        region: The written bytes.
        producers: The byte ranges of the buffer with their last writers, sorted.
        maker: The number of the writing instruction, or None if the readers of its result are not tracked.
    """
    start, end, within = region.low, region.high, _find_slice_of_overlapping_producers(region, producers)
    over = producers[within]
    before = [(low, start, old) for low, _, old in over[:1] if low < start]
    behind = [(end, high, old) for _, high, old in over[-1:] if end < high]
    producers[within] = [*before, *([(start, end, maker)] if maker is not None and start < end else []), *behind]


def build_reader_table(program: Program, operand: Callable[[Tensor], Operand]) -> ReaderTable:
    """Build the table that tells which instructions of a program read the result of each instruction.

    Args:
        program: The program.
        operand: Returns the operand of a tensor: the tensor with its memory address.
    """

    def bind(number: int) -> BoundInstruction:
        i = program.instructions[number]
        src = tuple(None if t is None else operand(t) for t in i.src)
        dst = tuple(map(operand, i.dst))
        scratch = None if i.scratch is None else operand(i.scratch)
        return BoundInstruction(
            i.op, src, dst, i.attrs, lambda: readers.find_reader_instructions(number), scratch=scratch
        )

    final_reads = [*program.outputs.values(), *(t for _, back in program.undo for t in back.src if t is not None)]
    readers = ReaderTable(program, bind, [operand(t).region for t in final_reads])
    return readers
