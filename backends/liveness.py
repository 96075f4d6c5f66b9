"""Who reads what an instruction computes, before something else stands in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .base import Program, Tensor
from .operands import Bound, Operand, Region

Ranges = list[tuple[int, int]]


class Readers:
    """The instructions of a program, bound; and which of them read a result."""

    def __init__(self, program: Program, bind: Callable[[int], Bound], kept: Sequence[Region]) -> None:
        """`kept` is what is read after the last instruction."""
        self.program, self.kept = program, kept
        self._bind = bind
        self._bound: dict[int, Bound] = {}
        self._touched: dict[int, tuple[list[Region], list[Region]]] = {}

    def bound(self, number: int) -> Bound:
        if number not in self._bound:
            self._bound[number] = self._bind(number)
        return self._bound[number]

    def touched(self, number: int) -> tuple[list[Region], list[Region]]:
        """What an instruction reads, and what it writes."""
        if number not in self._touched:
            call = self.bound(number)
            self._touched[number] = ([o.region for o in call.src if o is not None], [o.region for o in call.dst])
        return self._touched[number]

    def calls(self, number: int, value: Operand) -> list[Bound] | None:
        """The instructions of `of`."""
        numbers = self.of(number, value)
        return None if numbers is None else [self.bound(n) for n in numbers]

    def of(self, number: int, value: Operand) -> list[int] | None:
        """The numbers of all instructions that read `value`, which instruction `number` computes, in order; None if it
        is read after the last, or lies in memory that is kept."""
        whole = value.region
        if whole.pitch or value.declared is not None:
            return None
        left: Ranges = [(whole.low, whole.high)]
        readers = []
        for later in range(number + 1, len(self.program.instructions)):
            read, written = self.touched(later)
            if any(_meets(region, whole.buffer, left) for region in read):
                readers.append(later)
            for region in written:
                left = _without(left, region) if region.buffer == whole.buffer else left
            if not left:
                return readers
        return None if any(_meets(region, whole.buffer, left) for region in self.kept) else readers


def readers_of(program: Program, operand: Callable[[Tensor], Operand]) -> Readers:
    """The instructions of a program; `operand` gives a tensor its address."""

    def bind(number: int) -> Bound:
        i = program.instructions[number]
        src = tuple(None if t is None else operand(t) for t in i.src)
        dst = tuple(map(operand, i.dst))
        return Bound(i.op, src, dst, i.attrs, lambda: readers.calls(number, dst[0]))

    kept = [*program.outputs.values(), *(t for _, back in program.undo for t in back.src if t is not None)]
    readers = Readers(program, bind, [operand(t).region for t in kept])
    return readers


def _meets(region: Region, buffer: int, ranges: Ranges) -> bool:
    return region.buffer == buffer and any(region.low < high and low < region.high for low, high in ranges)


def _without(ranges: Ranges, written: Region) -> Ranges:
    """What is left of ranges when a region is written; all of it, if the region has holes."""
    if written.pitch:
        return ranges
    cut = [((low, min(high, written.low)), (max(low, written.high), high)) for low, high in ranges]
    return [(low, high) for pair in cut for low, high in pair if low < high]
