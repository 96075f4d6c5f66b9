"""What undoes the runs of a device that have ended: the arena holds that of the last one only."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...backends.base import Array, Instruction, Tensor
from .bound_plan import BoundPlan

ARENA = 0
"""The number of that buffer in every program."""
Saved = Mapping[Tensor, Array]
"""What lay in the arena where that tensor is."""


class Journal:
    """What undoes runs of one plan on device `number`, where runs are taken back together or not at all.

    Of a run it keeps what the instructions that undo it read of the arena: not for states that may stay as runs have
    left them, those named in `staying`, and not for those that an earlier run of them puts back as a whole, which are
    in the end what that makes of them.
    """

    def __init__(self, bound: BoundPlan, number: int, staying: Container[str]) -> None:
        self._bound, self._number, self._program = bound, number, bound.plan.lanes[number].program
        named = [(self._program.buffers[back.dst[0].buffer].name, back) for _, back in self._program.undo]
        self._backs = [(name, back) for name, back in named if name not in staying]
        self._whole = frozenset(name for name, back in self._backs if _is_whole(back))
        self._is_crossed = any(
            t.buffer not in (ARENA, back.dst[0].buffer) for _, back in self._backs for t in _read(back)
        )
        """Whether one state says what is put back of another, and has to be right each time."""
        self._views: dict[frozenset[str], Mapping[Tensor, Any]] = {}

    def behind(self, earlier: Iterable[Journal]) -> frozenset[str]:
        """The states for which a run need not keep anything behind earlier ones that are taken back with it."""
        before = [*earlier]
        if self._is_crossed or any(journal._is_crossed for journal in before):
            return frozenset()
        return frozenset().union(*(journal._whole for journal in before))

    def save_undo_data(self, behind: frozenset[str]) -> Saved:
        """What undoes the run that has just ended, but for the states `behind` others."""
        if behind not in self._views:
            saved = dict.fromkeys(t for back in self._but(behind) for t in _read(back) if t.buffer == ARENA)
            self._views[behind] = {t: self._bound.view_tensor(self._number, t) for t in saved}
        return {t: np.array(view) for t, view in self._views[behind].items()}

    def undo(self, saved: Saved, behind: frozenset[str]) -> None:
        """Take a run back of which that was kept, when all behind it have been taken back."""
        for t, array in saved.items():
            self._views[behind][t][...] = array
        backs = tuple(reversed(self._but(behind)))
        self._bound.run_program(self._number, replace(self._program, instructions=backs, undo=()))

    def _but(self, behind: Container[str]) -> list[Instruction]:
        return [back for name, back in self._backs if name not in behind]


def _read(back: Instruction) -> list[Tensor]:
    return [t for t in back.src if t is not None]


def _is_whole(back: Instruction) -> bool:
    """Whether what an instruction puts back does not depend on what is there: then it writes all of the state."""
    return all(t.buffer == ARENA for t in _read(back))
