"""A program from value to value, and what may run in whose place: the ground on which compiled backends fuse.

A fused binding looks at a program through a `Flow`.  Whatever it asks that is otherwise than its kernels need raises
`NoKernelError`, and the instructions are bound one by one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from .base import Program, Tensor
from .liveness import Readers
from .operands import Bound, NoKernelError, Operand, Region, need

Touched = tuple[list[Region], list[Region]]
"""What an instruction reads, and what it writes."""


class Flow:
    """A program from value to value, and the order in which its instructions run: each in its own place, or several
    together in the place of the first or the last of them."""

    def __init__(self, program: Program, readers: Readers, fixed: Container[int]) -> None:
        """Nothing moves past the instructions that are `fixed`."""
        self.readers, self.saves = readers, program.saves
        self._scratch = [_all_of(i.scratch) for i in program.instructions]
        self._fixed = fixed
        self._place = list(range(len(program.instructions)))
        self._there = [[number] for number in self._place]
        self._touched: dict[int, Touched] = {}
        self._found: dict[int, list[int] | None] = {}

    def call(self, number: int) -> Bound:
        return self.readers.bound(number)

    # -------------------------------------------------------------------------------------------- from value to value

    def readers_of(self, number: int) -> list[int]:
        """All instructions that read what this one computes; nothing else does."""
        found = self.found(number)
        need(found, "a result is kept, or nobody reads it")
        return found or []

    def found(self, number: int) -> list[int] | None:
        """The same; None if the result is kept."""
        if number not in self._found:
            self._found[number] = self.readers.of(number, self.call(number).out)
        return self._found[number]

    def reader(self, number: int, op: str, index: int = 0) -> int:
        """The only instruction that reads what this one computes, all of it, as that operand."""
        found = self.readers_of(number)
        need(len(found) == 1 and self.call(found[0]).op == op, f"it is not read by {op} alone")
        need(self.makes(number, found[0], index), "another operand is read")
        return found[0]

    def any_reader(self, number: int, op: str) -> int:
        """The first of these that reads all that this instruction computes, in place of nothing else."""
        whole = self.call(number).out
        for later in range(number + 1, len(self._place)):
            if self.call(later).op == op and self.makes(number, later, 0):
                return later
            if any(region.overlaps(whole.region) for region in self.readers.touched(later)[1]):
                break
        raise NoKernelError(f"no {op} reads it")

    def makes(self, number: int, later: int, index: int) -> bool:
        """Whether that operand of a later instruction is all that this one computes."""
        source, out = self.call(later).optional(index), self.call(number).out
        return source is not None and source.region == out.region and source.tensor.spec.size == out.tensor.spec.size

    def maker(self, number: int, index: int) -> int:
        """The instruction that computes that operand, or that of which it is a part."""
        operand = self.call(number).optional(index)
        need(operand, "there is no such operand")
        assert operand is not None
        region = operand.region
        for earlier in reversed(range(number)):
            if any(written.overlaps(region) for written in self.readers.touched(earlier)[1]):
                return earlier
        raise NoKernelError("an operand comes from outside")

    def save(self, state: Operand, before: int) -> int | None:
        """The last instruction that saves all of what `state` is, or rows of it, before that one; None if none does."""
        for number in reversed(range(before)):
            if number in self.saves and self.call(number).operand(0).tensor.buffer == state.tensor.buffer:
                return number
        return None

    def writers(self, state: Operand, after: int) -> list[int]:
        """The instructions that write into the memory of a state, after that one."""
        later = range(after + 1, len(self._place))
        return [n for n in later if any(r.overlaps(state.region) for r in self.readers.touched(n)[1])]

    # ---------------------------------------------------------------------------------------------------------- order

    def has_moved(self, number: int) -> bool:
        """Whether it belongs to a chain."""
        return len(self._there[self._place[number]]) > 1

    def at(self, number: int) -> list[int]:
        """The instructions that run in the place of this one."""
        return self._there[number]

    def place_for(self, numbers: Sequence[int]) -> int | None:
        """In whose place instructions can run together: the last's, or else the first's."""
        if any(map(self.has_moved, numbers)):
            return None
        touched = {**self._touched, **self._together(numbers)}
        places = max(numbers), min(numbers)
        return next((at for at in places if self._may_meet(numbers, at, touched)), None)

    def gather(self, numbers: Sequence[int], at: int) -> None:
        self._touched |= self._together(numbers)
        for number in numbers:
            self._there[self._place[number]] = []
            self._place[number] = at
        self._there[at] = sorted(numbers)

    def _together(self, numbers: Sequence[int]) -> dict[int, Touched]:
        """What each of them still reads and writes: not what only they read of each other."""
        found = {n: self._alone(n) for n in numbers}
        for n in numbers:
            readers = self.found(n) if len(self.call(n).dst) == 1 else None
            if readers is None or not set(readers) <= {*numbers}:
                continue
            out = self.call(n).out.region
            found[n] = found[n][0], []
            for reader in readers:
                read, written = found[reader]
                found[reader] = [region for region in read if not region.overlaps(out)], written
        return found

    def _alone(self, number: int) -> Touched:
        read, written = self.readers.touched(number)
        return read, [*written, *self._scratch[number]]

    def _may_meet(self, numbers: Sequence[int], at: int, touched: Mapping[int, Touched]) -> bool:
        moves = ((n, range(min(n, at), max(n, at) + 1)) for n in numbers)
        passed = ((n, other) for n, places in moves for place in places for other in self._there[place])
        return not any(other not in numbers and self._disturb(n, other, touched) for n, other in passed)

    def _disturb(self, one: int, other: int, touched: Mapping[int, Touched]) -> bool:
        """Whether it matters which of them runs first."""
        if one in self._fixed or other in self._fixed or (one in self.saves and other in self.saves):
            return True
        (read, written), (read_there, written_there) = (touched.get(n) or self._alone(n) for n in (one, other))
        return _meet(written, [*read_there, *written_there]) or _meet(read, written_there)

    def unfinished(self, number: int) -> int:
        """How many instructions to take back, of which the saves have run, where the launch of this one fails."""
        done = {s for place in range(self._place[number]) for s in self._there[place] if s in self.saves}
        if done == {s for s in self.saves if s < number}:
            return number
        return min(self.saves - done, default=len(self._place))


def _meet(some: Iterable[Region], others: Sequence[Region]) -> bool:
    return any(a.overlaps(b) for a in some for b in others)


def _all_of(scratch: Tensor | None) -> list[Region]:
    if scratch is None:
        return []
    return [Region(scratch.buffer, scratch.offset, scratch.offset + scratch.spec.nbytes)]
