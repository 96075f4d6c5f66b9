"""Pipelined runs of plans: runs follow each other through the devices, so that all devices are busy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from threading import Condition
from typing import NamedTuple, Self

import numpy.typing as npt

from ...backends.base import Array
from ...graph.dtypes import DType
from ...graph.errors import PlanError
from ..plan import Plan
from ..succession import in_succession
from .bound import Bound, finished_by
from .interrupts import InterruptsKept
from .journal import Journal, Saved
from .side_by_side import SideBySide
from .store import Store
from .turns import Turn

Asked = tuple["Pipeline", Mapping[str, npt.ArrayLike]]
"""A requested run: its plan and its inputs by name."""


class Pipeline:
    """One plan bound to its memory for pipelined runs; apart from that it is like an `Executor`.

    A device begins its part of the next run without waiting for the end of the last run.

    Args:
        plan: The plan.
        store: Weights and states of the plan's devices.
        timeout: Maximum seconds that a collective waits.
        wire: Dtype of large sums between devices with separate memories.
        staying: States that a rollback of finished runs does not restore, because later runs do not read the new
            entries. An example is a KV cache behind the end of its sequence.
    """

    plan: Plan
    store: Store

    def __init__(
        self,
        plan: Plan,
        store: Store,
        *,
        timeout: float = 60.0,
        wire: DType = DType.F32,
        staying: Container[str] = frozenset(),
    ) -> None:
        self.plan, self.store = plan, store
        self.proven: set[tuple[Pipeline, ...]] = set()
        """Sequences of these plans that are verified to follow each other through the devices."""
        store.require_devices(plan)
        self._turn = Turn((*store.backends, *(plan.lanes[number].backend for number in store.between.local_devices)))
        with self._turn:
            self._bound = bound = Bound(plan, store)
            self._meeting = bound.meeting(timeout, wire, follow=True)
            replays = bound.compiled_all(self._meeting)
            self._lanes = {number: _Lane(bound, number, replays[number], staying) for number in bound.own}
        self._devices = SideBySide([lane.device for lane in plan.lanes], bound.own, self._meeting, timeout)


def in_turn(runs: Sequence[Asked]) -> list[dict[str, Array]]:
    """Run several requests in a pipeline and return the outputs of each run by name.

    The runs may be of several plans, over one store or several. If a device fails or an interrupt comes, states are
    restored to their values before the first run.

    Raises:
        PlanError: If inputs do not fit, or if a collective joins all devices.
        BackendError: If a device fails.
    """
    if not runs:
        return []
    with Succession(runs[0][0], together=True) as succession:
        succession.begin(runs)
        return [succession.ended() for _ in runs]


class Succession:
    """A context in which runs follow each other through the devices of the plan `first`.

    All stores must have the same devices. Each device begins the next run when it has finished the last run and
    saved its undo data. Runs with outputs returned by `wait_for_outputs` are final. All other runs are rolled back
    at the end. With `together`, returned runs are rolled back too if the context fails.
    """

    def __init__(self, first: Pipeline, *, together: bool = False) -> None:
        self._first, self._together = first, together
        self._devices, self._around = first._devices, ExitStack()
        self._own = {number: _Device(number) for number in first._bound.own}
        self._under_way: deque[_Run] = deque()
        self._begun: dict[Pipeline, None] = {}
        self._news = Condition()

    def __enter__(self) -> Self:
        self._around.enter_context(self._first._turn)
        interrupts = self._around.enter_context(InterruptsKept())
        self._devices.place = self
        works = {n: partial(device.work, interrupts, self._tell) for n, device in self._own.items()}
        self._working = self._around.enter_context(ThreadPoolExecutor(1, "hocket")).submit(self._devices.work, works)
        self._working.add_done_callback(self._wake)
        return self

    def begin(self, runs: Sequence[Asked]) -> None:
        """Append runs to the pending ones.

        Raises `PlanError` as `run_pipelined`, before any of the runs begins. Raises it also for a run over a store
        with a pending run, unless all runs are rolled back together.
        """
        given = [pipeline._bound.given(inputs) for pipeline, inputs in runs]
        following = [*(run.pipeline for run in self._under_way), *(pipeline for pipeline, _ in runs)]
        if not self._together and len({pipeline.store for pipeline in following}) < len(following):
            raise PlanError("a run over the same store is under way; begin the next when that has ended")
        if (whole := tuple(following)) not in self._first.proven:
            in_succession([pipeline.plan for pipeline in following])
            self._first.proven.add(whole)
        self._first._bound.agree(given)
        for (pipeline, _), arrays in zip(runs, given, strict=True):
            self._begun[pipeline] = None
            run = _Run(pipeline, arrays)
            self._under_way.append(run)
            for device in self._own.values():
                device.waiting.put(run)

    def wait(self) -> None:
        """Wait until the devices have finished all pending runs, or one device has failed."""
        with self._news:
            self._news.wait_for(lambda: self._are_done(self._under_way) or self._working.done())

    def ended(self) -> dict[str, Array]:
        """Wait for the first pending run and return its outputs by name. Raises the error of a device."""
        run = self._under_way[0]
        with self._news:
            self._news.wait_for(lambda: self._are_done([run]) or self._working.done())
        if not self._are_done([run]):
            self._working.result()
            raise self._devices.failures[0][1]
        outputs = {name: run.pipeline._bound.whole(name, run.parts(name)) for name in run.pipeline._bound.shapes}
        run.stays = not self._together
        self._under_way.popleft()
        return outputs

    def __exit__(self, kind: object, why: BaseException | None, trace: object) -> None:
        with self._around:
            if isinstance(why, KeyboardInterrupt) and not self._devices.failures:  # a second interrupt
                self._devices.stop(None, why)
            self._finish()
            if self._devices.failures:
                self._devices.undo(self._undo)
            if self._under_way or (why is not None and self._together):
                self._devices.take_back(self._undo, why or PlanError("runs that nobody waited for are taken back"))

    def _finish(self) -> None:
        """Wait until all devices have finished or stopped. Raises `BackendError` if a device does not stop."""
        for device in self._own.values():
            device.waiting.put(None)
        while True:
            try:
                self._working.result()
                return
            except KeyboardInterrupt as why:
                self._devices.stop(None, why)

    def _are_done(self, runs: Iterable[_Run]) -> bool:
        """Return whether all devices of this process have finished these runs."""
        return all(len(run.outputs) == len(self._own) for run in runs)

    def _undo(self, number: int, error: BaseException | None) -> None:
        self._own[number].undo(error)

    def _tell(self, run: _Run, number: int, outputs: Mapping[str, Array]) -> None:
        """Record that a device has finished its part of a run and saved its undo data."""
        with self._news:
            run.outputs[number] = outputs
            self._news.notify()

    def _wake(self, _: object) -> None:
        with self._news:
            self._news.notify()

    def abort(self, why: str) -> None:
        """Wake all waiting threads, because a device failed."""
        for device in self._own.values():
            device.stops = True
            device.waiting.put(None)
        for pipeline in list(self._begun):  # devices begin no later runs
            pipeline._meeting.abort(why)

    def clear(self) -> None:
        """Forget pending messages and failures when all devices have ended."""
        for pipeline in self._begun:
            pipeline._meeting.clear()


class _Run:
    """A pending run: its inputs, the outputs of each device that has finished, and whether it is final."""

    def __init__(self, pipeline: Pipeline, given: Mapping[str, Array]) -> None:
        self.pipeline, self.given, self.stays = pipeline, given, False
        self.outputs: dict[int, Mapping[str, Array]] = {}

    def parts(self, name: str) -> dict[int, Array]:
        """Return each local device's shard of an output."""
        return {number: own[name] for number, own in self.outputs.items() if name in own}


class _Kept(NamedTuple):
    """The undo data of one device for a finished run, without the states that earlier runs restore."""

    run: _Run
    behind: frozenset[str]
    saved: Saved


class _Lane:
    """One device's part of a plan."""

    def __init__(self, bound: Bound, number: int, replay: Callable[[], object], staying: Container[str]) -> None:
        self.bound, self.number, self.replay = bound, number, replay
        self.inlets, self.journal = [bound.inlet(number)], Journal(bound, number, staying)
        self.results = {name: parts[number] for name, parts in bound.outputs.items() if number in parts}
        self.whole = len(bound.plan.lanes[number].program.instructions)


class _Device:
    """The worker of one device with its queue of runs; None ends the queue."""

    def __init__(self, number: int) -> None:
        self.number, self.stops = number, False
        self.waiting: SimpleQueue[_Run | None] = SimpleQueue()
        self._kept: list[_Kept] = []
        self._begun: _Run | None = None
        self._has_ended = False

    def work(self, interrupts: InterruptsKept, tell: Callable[[_Run, int, Mapping[str, Array]], None]) -> None:
        """Run the queued runs. An interrupt takes effect after the current run. Raises the error of a device."""
        while (run := self.waiting.get()) is not None and not self.stops:
            if interrupts.would_interrupt:
                raise KeyboardInterrupt
            lane = run.pipeline._lanes[self.number]
            lane.bound.put(run.given, lane.inlets)
            self._begun = run
            lane.replay()
            self._has_ended = True
            outputs = {name: part.copied() for name, part in lane.results.items()}
            self._keep(run)
            self._begun, self._has_ended = None, False
            tell(run, self.number, outputs)

    def undo(self, error: BaseException | None) -> None:
        """Roll back all runs that are not final, after the device has stopped, with its error if it failed."""
        if self._begun is not None:
            lane = self._begun.pipeline._lanes[self.number]
            lane.bound.undo(self.number, finished_by(None if self._has_ended else error, lane.whole))
        for run, behind, saved in reversed([kept for kept in self._kept if not kept.run.stays]):
            run.pipeline._lanes[self.number].journal.undo(saved, behind)

    def _keep(self, run: _Run) -> None:
        """Save the undo data of a finished run, without states that earlier runs over its store restore."""
        self._kept = [kept for kept in self._kept if not kept.run.stays]
        same = [kept.run.pipeline for kept in self._kept if kept.run.pipeline.store is run.pipeline.store]
        journal = run.pipeline._lanes[self.number].journal
        behind = journal.behind(pipeline._lanes[self.number].journal for pipeline in same)
        self._kept.append(_Kept(run, behind, journal.kept(behind)))
