"""Pipelined runs of plans: several runs are in progress on different devices, so that all devices are busy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Condition
from typing import NamedTuple, Self

import numpy.typing as npt

from ...backends.base import Array
from ...graph.errors import PlanError, StatesLostError
from ...graph.validation import BOOL, instance_of, list_of, pair_of, validate_arguments
from ..pipelining.stage_times import build_pipelined_action_order
from .executor import Executor
from .interrupts import DeferredInterrupts
from .rollback_log import UndoData

RunRequest = tuple[Executor, Mapping[str, npt.ArrayLike]]
"""A requested run: its plan and its inputs by name."""
RUN_REQUESTS = list_of(
    pair_of(instance_of(Executor), instance_of(Mapping)), "a sequence of pairs of an executor and a mapping of inputs"
)


PipelinedPlan = partial(Executor, pipelined=True)
"""Make an executor of pipelined runs: a plan that is compiled and bound to its memory."""


@validate_arguments(PlanError, runs=RUN_REQUESTS)
def run_pipelined(runs: Sequence[RunRequest]) -> list[dict[str, Array]]:
    """Run several requests as a pipeline on the same devices, and return the outputs of each run by name.

    The runs may be of several plans, over one store or several. If a device fails or an interrupt comes, all states are
    restored to their values before the first run.

    Args:
        runs: The plan and the inputs of each run, in order.

    Raises:
        PlanError: If inputs do not fit, or if a collective joins all devices.
        BackendError: If a device fails.
    """
    if not runs:
        return []
    with PipelinedRuns(runs[0][0], together=True) as pipeline:
        pipeline.enqueue(runs)
        return [pipeline.wait_for_outputs() for _ in runs]


class PipelinedRuns:
    """A context in which runs overlap: a device begins the next run while later devices still work on the last one.

    A device first saves the data with which the finished run can be undone. A run is final when `wait_for_outputs`
    has returned its outputs. All other runs are rolled back at the end.

    Args:
        first: A plan that runs here; all other plans have stores with the same devices.
        together: Whether runs with returned outputs are rolled back too if the context fails.
    """

    @validate_arguments(PlanError, first=instance_of(Executor), together=BOOL)
    def __init__(self, first: Executor, *, together: bool = False) -> None:
        self._leading_plan, self._is_all_or_nothing = first, together
        self._device_threads, self._exit_stack = first._device_threads, ExitStack()
        self._workers = {number: _DeviceWorker(number) for number in first._bound_plan.local_devices}
        self._pending_runs: deque[_PipelinedRun] = deque()
        self._used_plans: dict[Executor, None] = {}
        self._progress = Condition()

    def __enter__(self) -> Self:
        self._exit_stack.enter_context(self._leading_plan._device_lock)
        interrupts = self._exit_stack.enter_context(DeferredInterrupts())
        self._device_threads.rendezvous = self
        works = {
            n: partial(device.run_queued_runs, interrupts, self._record_done_and_wake_waiters)
            for n, device in self._workers.items()
        }
        self._workers_done = self._exit_stack.enter_context(ThreadPoolExecutor(1, "hocket")).submit(
            self._device_threads.run_devices, works
        )
        self._workers_done.add_done_callback(self._notify_progress)
        return self

    @validate_arguments(PlanError, runs=RUN_REQUESTS)
    def enqueue(self, runs: Sequence[RunRequest]) -> None:
        """Add runs to the end of the pipeline, which devices begin as soon as they are free.

        Raises:
            PlanError: The inputs or the order of the runs are wrong; then none of the runs begins. Or a run over one of
                the stores is pending already, and the runs are not rolled back together.
            StatesLostError: An earlier run has lost the states; then none of the runs begins.
        """
        if any(not pipeline.is_pipelined for pipeline, _ in runs):
            raise PlanError("enqueue: an executor is for single runs; make it with pipelined=True")
        for pipeline, _ in runs:
            pipeline.store.lost_states.require_none()
        arrays_of_runs = [pipeline._bound_plan.as_input_arrays(inputs) for pipeline, inputs in runs]
        following = [*(run.pipeline for run in self._pending_runs), *(pipeline for pipeline, _ in runs)]
        if not self._is_all_or_nothing and len({pipeline.store for pipeline in following}) < len(following):
            raise PlanError("a run over the same store is under way; begin the next when that has ended")
        if (whole := tuple(following)) not in self._leading_plan.verified_orders:
            build_pipelined_action_order([pipeline.plan for pipeline in following])
            self._leading_plan.verified_orders.add(whole)
        self._leading_plan._bound_plan.require_equal_inputs_on_ranks(arrays_of_runs)
        for (pipeline, _), arrays in zip(runs, arrays_of_runs, strict=True):
            self._used_plans[pipeline] = None
            run = _PipelinedRun(pipeline, arrays)
            self._pending_runs.append(run)
            for device in self._workers.values():
                device.queued_runs.put(run)

    def wait_for_all(self) -> None:
        """Wait until the devices have finished all pending runs. Also returns when one device has failed."""
        with self._progress:
            self._progress.wait_for(
                lambda: self._is_done_on_local_devices(self._pending_runs) or self._workers_done.done()
            )

    def wait_for_outputs(self) -> dict[str, Array]:
        """Wait for the oldest pending run, and return its outputs by name.

        Raises the error of a device that failed before the run ended.
        """
        run = self._pending_runs[0]
        with self._progress:
            self._progress.wait_for(lambda: self._is_done_on_local_devices([run]) or self._workers_done.done())
        if not self._is_done_on_local_devices([run]):
            self._workers_done.result()
            raise self._device_threads.failures[0][1]
        outputs = {
            name: run.pipeline._bound_plan.assemble_output_across_processes(name, run.list_local_output_shards(name))
            for name in run.pipeline._bound_plan.output_shapes
        }
        run.is_final = not self._is_all_or_nothing
        self._pending_runs.popleft()
        return outputs

    def __exit__(self, kind: object, why: BaseException | None, trace: object) -> None:
        with self._exit_stack, self._record_lost_states():
            if isinstance(why, KeyboardInterrupt) and not self._device_threads.failures:  # a second interrupt
                self._device_threads.record_failure_and_abort(None, why)
            self._end_and_join_workers()
            if self._device_threads.failures:
                self._device_threads.roll_back_and_raise(self._roll_back)
            if self._pending_runs or (why is not None and self._is_all_or_nothing):
                self._device_threads.roll_back(
                    self._roll_back, why or PlanError("runs that nobody waited for are taken back")
                )

    @contextmanager
    def _record_lost_states(self) -> Iterator[None]:
        """Return a context in which `StatesLostError` means the loss of the states of all plans."""
        try:
            yield
        except StatesLostError as why:
            for pipeline in self._used_plans:
                pipeline.store._record_lost_states(why)
            raise

    def _end_and_join_workers(self) -> None:
        """Tell the workers to end after their queued runs, and wait for them.

        Raises `StatesLostError` if a device does not stop.
        """
        for device in self._workers.values():
            device.queued_runs.put(None)
        while True:
            try:
                self._workers_done.result()
                return
            except KeyboardInterrupt as why:
                self._device_threads.record_failure_and_abort(None, why)

    def _is_done_on_local_devices(self, runs: Iterable[_PipelinedRun]) -> bool:
        """Return whether all devices of this process have finished the given runs."""
        return all(len(run.outputs_by_device) == len(self._workers) for run in runs)

    def _roll_back(self, number: int, error: BaseException | None) -> None:
        self._workers[number].roll_back(error)

    def _record_done_and_wake_waiters(self, run: _PipelinedRun, number: int, outputs: Mapping[str, Array]) -> None:
        """Record that a device has finished its part of a run, and wake the threads that wait for the run."""
        with self._progress:
            run.outputs_by_device[number] = outputs
            self._progress.notify()

    def _notify_progress(self, _: object) -> None:
        with self._progress:
            self._progress.notify()

    def abort(self, why: str) -> None:
        """Stop all workers and wake all waiting threads, because a device failed."""
        for device in self._workers.values():
            device.is_stopped = True
            device.queued_runs.put(None)
        for pipeline in list(self._used_plans):  # devices begin no later runs
            pipeline._communicator_group.abort(why)

    def clear_messages_and_failures(self) -> None:
        """Forget the pending messages and failures of all plans, after all devices have ended."""
        for pipeline in self._used_plans:
            pipeline._communicator_group.clear_messages_and_failures()


class _PipelinedRun:
    """One run in the pipeline.

    - `pipeline`, `input_arrays`: the plan and its inputs.
    - `outputs_by_device`: the outputs on each device that has finished its part of the run.
    - `is_final`: whether the run will not be rolled back.
    """

    def __init__(self, pipeline: Executor, input_arrays: Mapping[str, Array]) -> None:
        self.pipeline, self.input_arrays, self.is_final = pipeline, input_arrays, False
        self.outputs_by_device: dict[int, Mapping[str, Array]] = {}

    def list_local_output_shards(self, name: str) -> dict[int, Array]:
        """Return the parts of an output by device number, from the local devices that have a part."""
        return {number: own[name] for number, own in self.outputs_by_device.items() if name in own}


class _FinishedRunWithUndoData(NamedTuple):
    """A run that one device has finished, with the bytes that are needed to undo it.

    - `run`: the run.
    - `restored_states`: states that the rollback of earlier runs restores, so nothing is saved for them here.
    - `undo_data`: the saved bytes of all other states.
    """

    run: _PipelinedRun
    restored_states: frozenset[str]
    undo_data: UndoData


class _DeviceWorker:
    """The worker of one device in a pipeline: it runs the device's part of each queued run until an entry None."""

    def __init__(self, number: int) -> None:
        self.number, self.is_stopped = number, False
        self.queued_runs: SimpleQueue[_PipelinedRun | None] = SimpleQueue()
        self._saved_runs: list[_FinishedRunWithUndoData] = []
        self._current_run: _PipelinedRun | None = None
        self._has_finished_program = False

    def run_queued_runs(
        self,
        interrupts: DeferredInterrupts,
        report_finished_run: Callable[[_PipelinedRun, int, Mapping[str, Array]], None],
    ) -> None:
        """Run this device's part of each queued run, in order, until an entry None comes or a device fails.

        An interrupt takes effect after the current run. An error of the device is raised.

        Args:
            interrupts: Says whether an interrupt is pending.
            report_finished_run: Called after each run with the run, the device number and the outputs on the device.
        """
        while (run := self.queued_runs.get()) is not None and not self.is_stopped:
            if interrupts.is_interrupt_pending:
                raise KeyboardInterrupt
            stage = run.pipeline._device_stages[self.number]
            run.pipeline._bound_plan.write_inputs(run.input_arrays, [stage.input_slots])
            self._current_run = run
            stage.run_program()
            self._has_finished_program = True
            outputs = {name: part.copy_to_host() for name, part in stage.output_shards.items()}
            self._save_undo_data_of_finished_run(run)
            self._current_run, self._has_finished_program = None, False
            report_finished_run(run, self.number, outputs)

    def roll_back(self, error: BaseException | None) -> None:
        """Restore the device's states to their values before the first run that is not final.

        The device must have stopped.

        Args:
            error: The error of the device, if it failed.
        """
        if self._current_run is not None:
            stage = self._current_run.pipeline._device_stages[self.number]
            stage.rollback_log.roll_back_current_run(None if self._has_finished_program else error)
        for run, restored, saved in reversed(
            [saved_run for saved_run in self._saved_runs if not saved_run.run.is_final]
        ):
            run.pipeline._device_stages[self.number].rollback_log.roll_back_run(saved, restored)

    def _save_undo_data_of_finished_run(self, run: _PipelinedRun) -> None:
        """Save the data with which the run that has just finished can be undone on this device.

        States that the rollback of earlier runs over the same store restores are left out.
        """
        self._saved_runs = [saved_run for saved_run in self._saved_runs if not saved_run.run.is_final]
        same = [
            saved_run.run.pipeline
            for saved_run in self._saved_runs
            if saved_run.run.pipeline.store is run.pipeline.store
        ]
        log = run.pipeline._device_stages[self.number].rollback_log
        restored = log.list_states_restored_by(pipeline._device_stages[self.number].rollback_log for pipeline in same)
        self._saved_runs.append(_FinishedRunWithUndoData(run, restored, log.save_undo_data(restored)))
