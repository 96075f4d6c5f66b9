"""The rollback log of a device: it undoes the current run, the last run, and earlier runs of a pipeline.

The arena has the saved state entries of the last run only, because the next run overwrites them. Therefore a pipeline
copies these bytes after each run.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ...backends.base import Array, Instruction, Tensor
from ...graph.errors import BackendError, StepError
from .bound_plan import BoundPlan
from .communicators import SingleDeviceComm

ARENA_BUFFER = 0
"""The number of the arena among the buffers of every program."""
UndoData = Mapping[Tensor, Array]
"""The undo data of one run: a copy of the arena bytes of each tensor that the rollback reads."""


class RollbackLog:
    """Keeps the data with which one device can restore its states after failed runs, and restores them.

    `Program.undo` has the instructions that restore the states from the arena, as long as no other run has begun. For
    earlier runs of a pipeline, the log saves the arena bytes that these instructions read. Two kinds of states need
    no undo data:

    - states in `staying`, which a rollback does not restore;
    - states that the rollback of an earlier run overwrites completely.

    Args:
        bound: The plan with its memory.
        number: The number of the device.
        staying: Names of states that the rollback of an earlier run does not restore.
    """

    def __init__(self, bound: BoundPlan, number: int, staying: Container[str]) -> None:
        self._bound, self._number, self._program = bound, number, bound.plan.device_plans[number].program
        named = [(self._program.buffers[restore.dst[0].buffer].name, restore) for _, restore in self._program.undo]
        self._restores = [(name, restore) for name, restore in named if name not in staying]
        self._whole_states = frozenset(name for name, restore in self._restores if _is_whole_state_restore(restore))
        self._reads_other_states = any(
            t.buffer not in (ARENA_BUFFER, restore.dst[0].buffer)
            for _, restore in self._restores
            for t in _read(restore)
        )
        """Whether the rollback of a state reads another state. Then every run must save the data of all states."""
        self._views: dict[frozenset[str], Mapping[Tensor, Any]] = {}

    def roll_back_current_run(self, error: BaseException | None) -> None:
        """Restore the states to their values before the current run.

        Args:
            error: The error with which the run of this device ended; None for a complete run.

        Raises:
            BackendError: The error does not say which instructions have finished.
        """
        finished = error.finished_instructions if isinstance(error, StepError) else None
        if error is None:
            finished = len(self._program.instructions)
        if not self._program.undo:
            return
        if finished is None:
            raise BackendError("it does not say how far it came")
        self._bound.run_program_without_collectives_once(self._number, self._program.build_undo_program(finished))

    @cached_property
    def undo_last_run(self) -> Callable[[], object]:
        """The function that undoes the last run; it is compiled once, at its first use."""
        undo = self._program.build_undo_program(len(self._program.instructions))
        return self._bound.compile_program(self._number, undo, SingleDeviceComm())

    def list_states_restored_by(self, earlier_logs: Iterable[RollbackLog]) -> frozenset[str]:
        """Return the states that the rollback of earlier runs restores as a whole, so that they need no undo data.

        The result is empty if the rollback of one state reads another state.

        Args:
            earlier_logs: The rollback logs of the earlier runs.
        """
        before = [*earlier_logs]
        if self._reads_other_states or any(log._reads_other_states for log in before):
            return frozenset()
        return frozenset().union(*(log._whole_states for log in before))

    def save_undo_data(self, skipped_states: frozenset[str]) -> UndoData:
        """Copy the bytes that are needed to undo the run that has just ended, and return them.

        Args:
            skipped_states: The states for which nothing is saved.
        """
        if skipped_states not in self._views:
            saved = dict.fromkeys(
                t
                for restore in self._list_restores_except(skipped_states)
                for t in _read(restore)
                if t.buffer == ARENA_BUFFER
            )
            self._views[skipped_states] = {t: self._bound.view_tensor(self._number, t) for t in saved}
        return {t: np.array(view) for t, view in self._views[skipped_states].items()}

    def roll_back_run(self, saved: UndoData, skipped_states: frozenset[str]) -> None:
        """Restore the states to their values before one run; all later runs must be rolled back already.

        Args:
            saved: The undo data of the run.
            skipped_states: The states for which nothing was saved.
        """
        for t, array in saved.items():
            self._views[skipped_states][t][...] = array
        restores = tuple(reversed(self._list_restores_except(skipped_states)))
        self._bound.run_program_without_collectives_once(
            self._number, replace(self._program, instructions=restores, undo=())
        )

    def _list_restores_except(self, skipped_states: Container[str]) -> list[Instruction]:
        return [restore for name, restore in self._restores if name not in skipped_states]


def _read(restore: Instruction) -> list[Tensor]:
    return [t for t in restore.src if t is not None]


def _is_whole_state_restore(restore: Instruction) -> bool:
    """Return whether an instruction restores all of a state, and therefore reads only the arena."""
    return all(t.buffer == ARENA_BUFFER for t in _read(restore))
