"""Runs of plans over one store that follow each other through its devices, so that all of them are busy."""

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
from .journal import Journal, Saved
from .side_by_side import Place, SideBySide
from .store import Store
from .turns import Turn


class Pipeline:
    """One plan bound to its memory, to be run in an order in which devices do not wait for the end of a run to begin
    their part of the next; otherwise it is like an `Executor`."""

    plan: Plan

    def __init__(self, plan: Plan, store: Store, *, timeout: float = 60.0, wire: DType = DType.F32) -> None:
        self.plan = plan
        self._turn = Turn((*store.backends, *(plan.lanes[number].backend for number in store.between.own)))
        with self._turn:
            self._bound = bound = Bound(plan, store)
            self._meeting = bound.meeting(timeout, wire, shares=False)
            replays = bound.compiled_all(self._meeting)
            self._lanes = {number: _Lane(bound, number, replays[number]) for number in bound.own}
        self._devices = SideBySide([lane.device for lane in plan.lanes], bound.own, self._meeting, timeout)


def in_turn(runs: Sequence[tuple[Pipeline, Mapping[str, npt.ArrayLike]]]) -> list[dict[str, Array]]:
    """The outputs of each run, by name, from its inputs; runs may be of several plans over one store.

    When a device fails, or for an interrupt, states become what they were before the first of the runs.  Raises
    `PlanError` for inputs that do not fit, and where devices meet otherwise than by letters; `BackendError` if a device
    fails.
    """
    if not runs:
        return []
    pipelines, (first, _) = [pipeline for pipeline, _ in runs], runs[0]
    order = in_succession([pipeline.plan for pipeline in pipelines])
    devices = first._devices
    with first._turn:
        given = [pipeline._bound.given(inputs) for pipeline, inputs in runs]
        first._bound.agree(given)
        devices.place = _Meetings([pipeline._meeting for pipeline in dict.fromkeys(pipelines)])
        with InterruptsKept() as interrupts:
            own = {n: _Device([pipeline._lanes[n] for pipeline in pipelines]) for n in first._bound.own}
            devices.work({n: partial(device.work, order[n], given, interrupts) for n, device in own.items()})
            if devices.failures:
                devices.undo(lambda number, error: own[number].undo(error))
        return [
            {name: pipeline._bound.whole(name, _of(name, run, own)) for name in pipeline._bound.shapes}
            for run, pipeline in enumerate(pipelines)
        ]


def _of(name: str, run: int, own: Mapping[int, _Device]) -> dict[int, Array]:
    """What each device of this process has of an output of a run."""
    return {number: device.outputs[run][name] for number, device in own.items() if name in device.outputs[run]}


class _Meetings:
    """Where the devices meet in any of the runs."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places

    def abort(self, why: str) -> None:
        for place in self._places:
            place.abort(why)

    def clear(self) -> None:
        for place in self._places:
            place.clear()


class _Lane:
    """One device's part of a plan."""

    def __init__(self, bound: Bound, number: int, replay: Callable[[], object]) -> None:
        self.bound, self.number, self.replay = bound, number, replay
        self.places, self.journal = bound.places([number]), Journal(bound, number)
        self.results = {name: parts[number] for name, parts in bound.outputs.items() if number in parts}
        self.whole = len(bound.plan.lanes[number].program.instructions)


class _Device:
    """What one device does of runs, and what it has kept of those that have ended; `lanes` are its part of each."""

    def __init__(self, lanes: Sequence[_Lane]) -> None:
        self._lanes = lanes
        self._begun, self._ended = False, False
        self._kept: list[Saved] = []
        self.outputs: list[dict[str, Array]] = []

    def work(self, acts: Sequence[Act], given: Sequence[Mapping[str, Array]], interrupts: InterruptsKept) -> None:
        """Do all that; what is interrupted ends with the run that has begun.  Raises what a device raises."""
        for what, run in acts:
            lane = self._lanes[run]
            if what == "put":
                if interrupts.would_interrupt:
                    raise KeyboardInterrupt
                lane.bound.put(given[run], lane.places)
            elif what == "run":
                self._begun = True
                lane.replay()
                self._ended = True
            else:
                self.outputs.append({name: np.array(part.numbers()) for name, part in lane.results.items()})
                self._kept.append(lane.journal.kept(first=not self._kept))
                self._begun = self._ended = False

    def undo(self, error: BaseException | None) -> None:
        """Take everything back, when the device has stopped, of `error` or because it had done all."""
        if self._begun:
            lane = self._lanes[len(self._kept)]
            lane.bound.undo(lane.number, finished_by(None if self._ended else error, lane.whole))
        for run, saved in reversed([*enumerate(self._kept)]):
            self._lanes[run].journal.undo(saved, first=run == 0)
