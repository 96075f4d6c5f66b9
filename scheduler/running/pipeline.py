"""Runs of one plan that follow each other through its devices, so that all of them are busy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from ...backends.base import Array
from ...graph.dtypes import DType
from ..acts import Act
from ..plan import Plan
from ..succession import in_succession
from .bound import Bound, finished_by
from .interrupts import InterruptsKept
from .journal import Journal
from .side_by_side import SideBySide
from .store import Store
from .turns import Turn


class Pipeline:
    """One plan bound to its memory, to be run several times in an order in which devices do not wait for the end of a
    run to begin their part of the next.

    When a device fails, or for an interrupt, states become what they were before the first of the runs.  Otherwise it
    is like an `Executor`.
    """

    plan: Plan

    def __init__(self, plan: Plan, store: Store, *, timeout: float = 60.0, wire: DType = DType.F32) -> None:
        self.plan = plan
        self._turn = Turn((*store.backends, *(plan.lanes[number].backend for number in store.between.own)))
        with self._turn:
            self._bound = bound = Bound(plan, store)
            meeting = bound.meeting(timeout, wire, shares=False)
            replays = bound.compiled_all(meeting)
            self._lanes = {number: _Lane(bound, number, replays[number]) for number in bound.own}
        self._devices = SideBySide([lane.device for lane in plan.lanes], bound.own, meeting, timeout)

    def run(self, inputs: Sequence[Mapping[str, npt.ArrayLike]]) -> list[dict[str, Array]]:
        """The outputs of each run, by name, from the inputs of each.

        Raises `PlanError` for inputs that do not fit, and where devices meet otherwise than by letters; `BackendError`
        if a device fails.
        """
        order = in_succession(self.plan, len(inputs))
        with self._turn:
            given = [self._bound.given(one) for one in inputs]
            self._bound.agree(given)
            with InterruptsKept() as interrupts:
                works = {n: partial(lane.work, order[n], given, interrupts) for n, lane in self._lanes.items()}
                self._devices.work(works)
                if self._devices.failures:
                    self._devices.undo(lambda number, error: self._lanes[number].undo(error))
            kept = [self._lanes[number].taken() for number in self._bound.own]
            return [self._whole([outputs[run] for outputs in kept]) for run in range(len(given))]

    def _whole(self, own: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        """The outputs of a run, of what each device of this process has of them."""
        parts = {
            name: {n: outputs[name] for n, outputs in zip(self._bound.own, own, strict=True) if name in outputs}
            for name in self._bound.shapes
        }
        return {name: self._bound.whole(name, there) for name, there in parts.items()}


class _Lane:
    """One device: what it does, and what it has kept of its runs."""

    def __init__(self, bound: Bound, number: int, replay: Callable[[], object]) -> None:
        self._bound, self._replay = bound, replay
        self._places, self._journal = bound.places([number]), Journal(bound, number)
        self._results = {name: parts[number] for name, parts in bound.outputs.items() if number in parts}
        self._whole = len(bound.plan.lanes[number].program.instructions)
        self._begun, self._ended = False, False
        self._outputs: list[dict[str, Array]] = []

    def work(self, acts: Sequence[Act], given: Sequence[Mapping[str, Array]], interrupts: InterruptsKept) -> None:
        """Do all that; what is interrupted ends with the run that has begun.  Raises what a device raises."""
        self._outputs = []
        self._journal.clear()  # runs whose states were lost are not taken back
        self._begun = self._ended = False
        for what, run in acts:
            if what == "put":
                if interrupts.would_interrupt:
                    raise KeyboardInterrupt
                self._bound.put(given[run], self._places)
            elif what == "run":
                self._begun = True
                self._replay()
                self._ended = True
            else:
                self._outputs.append({name: np.array(part.numbers()) for name, part in self._results.items()})
                self._journal.keep()
                self._begun = self._ended = False

    def taken(self) -> list[dict[str, Array]]:
        """What it has of the outputs of each run, when all have ended well."""
        self._journal.clear()
        return self._outputs

    def undo(self, error: BaseException | None) -> None:
        """Take everything back, when the device has stopped, of `error` or because it had done all."""
        finished = finished_by(None if self._ended else error, self._whole) if self._begun else 0
        self._journal.undo(finished)
