"""What undoes the runs of a device that have ended: the arena holds that of the last one only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...backends.base import Array, Instruction, Program, Tensor
from .bound import Bound

ARENA = 0
"""The number of that buffer in every program."""


class Journal:
    """The runs of device `number`, which are taken back together or not at all.

    Of each run it keeps what the instructions that undo it read of the arena.  A state that these write whole is then
    what the first of them makes of it, so of the later runs nothing is kept for that.
    """

    def __init__(self, bound: Bound, number: int) -> None:
        self._bound, self._number = bound, number
        self._program = bound.plan.lanes[number].program
        backs = [back for _, back in self._program.undo]
        again = [back for back in backs if not _is_whole(back)]
        if any(t.buffer not in (ARENA, back.dst[0].buffer) for back in backs for t in _read(back)):
            again = backs  # one state says what is put back of another, and has to be right each time
        self._again = _undoing(self._program, again)
        self._views = [{t: bound.view(number, t) for t in _saved(some)} for some in (backs, again)]
        self._runs: list[Mapping[Tensor, Array]] = []

    def clear(self) -> None:
        """Forget all runs: nobody takes them back any more."""
        self._runs.clear()

    def keep(self) -> None:
        """Keep what undoes the run that has just ended, before the next one begins."""
        views = self._views[bool(self._runs)]
        self._runs.append({t: np.array(view) for t, view in views.items()})

    def undo(self, finished: int | frozenset[int] | None) -> None:
        """Take back the run that has begun, of which so many instructions have finished (None if nobody knows), or
        those, and all that have ended before."""
        self._bound.undo(self._number, finished)
        while self._runs:
            for t, array in self._runs.pop().items():
                self._views[0][t][...] = array
            program = self._again if self._runs else self._program.undoing(len(self._program.instructions))
            self._bound.run(self._number, program)


def _undoing(program: Program, backs: Sequence[Instruction]) -> Program:
    return replace(program, instructions=tuple(reversed(backs)), undo=())


def _read(back: Instruction) -> list[Tensor]:
    return [t for t in back.src if t is not None]


def _saved(backs: Sequence[Instruction]) -> dict[Tensor, None]:
    return dict.fromkeys(t for back in backs for t in _read(back) if t.buffer == ARENA)


def _is_whole(back: Instruction) -> bool:
    """Whether what an instruction puts back does not depend on what is there: then it writes all of the state."""
    return all(t.buffer == ARENA for t in _read(back))
