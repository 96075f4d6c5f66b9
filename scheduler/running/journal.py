"""What undoes the runs of a device that have ended: the arena holds that of the last one only."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...backends.base import Array, Instruction, Program, Tensor
from .bound import Bound

ARENA = 0
"""The number of that buffer in every program."""
Saved = Mapping[Tensor, Array]
"""What lay in the arena where that tensor is."""


class Journal:
    """What undoes runs of one plan on device `number`, where runs are taken back together or not at all.

    Of a run it keeps what the instructions that undo it read of the arena.  A state that these write whole is in the
    end what the first of all runs makes of it, so of the later ones nothing is kept for that; nor is anything for
    states that may stay as runs have left them, those named in `staying`.
    """

    def __init__(self, bound: Bound, number: int, staying: Container[str]) -> None:
        self._bound, self._number = bound, number
        program = bound.plan.lanes[number].program
        backs = [back for _, back in program.undo if program.buffers[back.dst[0].buffer].name not in staying]
        again = [back for back in backs if not _is_whole(back)]
        if any(t.buffer not in (ARENA, back.dst[0].buffer) for back in backs for t in _read(back)):
            again = backs  # one state says what is put back of another, and has to be right each time
        self._programs = [_undoing(program, some) for some in (again, backs)]
        self._views = [{t: bound.view(number, t) for t in _saved(some)} for some in (again, backs)]

    def kept(self, *, first: bool) -> Saved:
        """What undoes the run that has just ended, the first of all or a later one."""
        return {t: np.array(view) for t, view in self._views[first].items()}

    def undo(self, saved: Saved, *, first: bool) -> None:
        """Take a run back of which that was kept, when all behind it have been taken back."""
        for t, array in saved.items():
            self._views[first][t][...] = array
        self._bound.run(self._number, self._programs[first])


def _undoing(program: Program, backs: Sequence[Instruction]) -> Program:
    return replace(program, instructions=tuple(reversed(backs)), undo=())


def _read(back: Instruction) -> list[Tensor]:
    return [t for t in back.src if t is not None]


def _saved(backs: Sequence[Instruction]) -> dict[Tensor, None]:
    return dict.fromkeys(t for back in backs for t in _read(back) if t.buffer == ARENA)


def _is_whole(back: Instruction) -> bool:
    """Whether what an instruction puts back does not depend on what is there: then it writes all of the state."""
    return all(t.buffer == ARENA for t in _read(back))
