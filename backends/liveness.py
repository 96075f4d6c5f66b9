"""The readers of every result of a program, up to the instruction that overwrites its bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter

from .base import Program, Tensor
from .operands import Bound, Operand, Region

Touched = tuple[list[Region], list[Region]]
"""The regions that an instruction reads, and the regions that it writes."""


class Readers:
    """The bound instructions of a program, and the readers of every result."""

    def __init__(self, program: Program, bind: Callable[[int], Bound], kept: Sequence[Region]) -> None:
        """Store the program and how to bind it; `kept` are the regions that are read after the last instruction."""
        self.program, self.kept = program, kept
        self._bind = bind
        self._bound: dict[int, Bound] = {}
        self._touched: dict[int, Touched] = {}

    def bound(self, number: int) -> Bound:
        if number not in self._bound:
            self._bound[number] = self._bind(number)
        return self._bound[number]

    def touched(self, number: int) -> Touched:
        if number not in self._touched:
            call = self.bound(number)
            self._touched[number] = ([o.region for o in call.src if o is not None], [o.region for o in call.dst])
        return self._touched[number]

    def calls(self, number: int) -> list[Bound] | None:
        """Return the instructions with the numbers of `find_readers`."""
        numbers = self.of(number)
        return None if numbers is None else [self.bound(n) for n in numbers]

    def of(self, number: int) -> list[int] | None:
        """Return the numbers of all readers of the first result of an instruction, in order.

        Returns None if the result is read after the last instruction, lies in retained memory, or has gaps.
        """
        return self._readers.get(number)

    def writers(self, buffer: int) -> Sequence[tuple[int, Region]]:
        """Return the regions that are written into a buffer, in order, each with the number of its instruction."""
        return self._writers.get(buffer, ())

    @cached_property
    def _writers(self) -> Mapping[int, list[tuple[int, Region]]]:
        writers = defaultdict(list)
        for number in range(len(self.program.instructions)):
            for region in self.touched(number)[1]:
                writers[region.buffer].append((number, region))
        return writers

    @cached_property
    def _readers(self) -> Mapping[int, list[int]]:
        """Readers by instruction, found in one pass that tracks the producer of each byte."""
        readers: dict[int, list[int]] = {}
        held: dict[int, list[Held]] = defaultdict(list)
        for number in range(len(self.program.instructions)):
            read, written = self.touched(number)
            for maker in {maker for region in read for maker in _makers(region, held[region.buffer])}:
                readers[maker].append(number)
            is_traced = written and not written[0].pitch and self.bound(number).out.declared is None
            for at, region in enumerate(written):
                if not region.pitch:  # a region with gaps leaves some bytes unchanged
                    _write(region, held[region.buffer], number if is_traced and at == 0 else None)
            if is_traced:
                readers[number] = []
        for region in self.kept:
            for maker in _makers(region, held[region.buffer]):
                readers.pop(maker, None)
        return readers


Held = tuple[int, int, int]
"""Bytes [start, stop) and the number of the instruction that produced their contents.

The entries of a buffer are in order and do not overlap.
"""


def _within(region: Region, held: Sequence[Held]) -> slice:
    """Return the slice of the entries that a region overlaps."""
    first = bisect_right(held, region.low, key=itemgetter(1))
    return slice(first, bisect_left(held, region.high, first, key=itemgetter(0)))


def _makers(region: Region, held: Sequence[Held]) -> list[int]:
    return [maker for _, _, maker in held[_within(region, held)]]


def _write(region: Region, held: list[Held], maker: int | None) -> None:
    """Update the entries of a buffer after a write; `maker` is None if the readers of the result are not tracked."""
    start, end, within = region.low, region.high, _within(region, held)
    over = held[within]
    before = [(low, start, old) for low, _, old in over[:1] if low < start]
    behind = [(end, high, old) for _, high, old in over[-1:] if end < high]
    held[within] = [*before, *([(start, end, maker)] if maker is not None and start < end else []), *behind]


def readers_of(program: Program, operand: Callable[[Tensor], Operand]) -> Readers:
    """Build the reader table of a program; `operand` gives a tensor its address."""

    def bind(number: int) -> Bound:
        i = program.instructions[number]
        src = tuple(None if t is None else operand(t) for t in i.src)
        dst = tuple(map(operand, i.dst))
        return Bound(i.op, src, dst, i.attrs, lambda: readers.calls(number))

    kept = [*program.outputs.values(), *(t for _, back in program.undo for t in back.src if t is not None)]
    readers = Readers(program, bind, [operand(t).region for t in kept])
    return readers
