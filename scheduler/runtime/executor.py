"""The executor of a plan: it writes the inputs, runs each device program on its own thread, and reads the outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ...backends.base import Array
from ...backends.capabilities import SupportsLaunchAhead, SupportsTiming, TimedKernel
from ...distributed import SINGLE_PROCESS, RanksError, World
from ...distributed.mpi_link import MpiLink
from ...distributed.presence import format_failure_reason
from ...graph.attrs import quote_node_name
from ...graph.dtypes import DType
from ...graph.errors import BackendError, PlanError, StatesLostError, StepError
from ...graph.old_names import RenamedAttribute
from ...graph.validation import (
    BOOL,
    TEXT,
    ArgumentKind,
    did_you_mean,
    instance_of,
    integer_between,
    number_between,
    require,
    validate_arguments,
)
from ..ir.execution_plan import PLAN_KIND, Plan
from ..ir.layout import Replicate
from .bound_plan import BoundPlan
from .device_locks import DeviceLock
from .device_threads import DeviceThreads
from .interrupts import DeferredInterrupts
from .rollback_log import RollbackLog
from .store import Store
from .trace import MAX_TRACED_RUNS, Trace

MAX_TIMEOUT_SECONDS = 1e9
TRANSFER_DTYPE_KIND = ArgumentKind("DType.F32 or DType.BF16", lambda v: v is DType.F32 or v is DType.BF16)


class Executor:
    """Runs one plan, which is compiled and bound to its memory.

    If a device fails, all devices stop, and the states are restored to their values before the run. The error names
    the node and the device. States that cannot be restored are lost: no later run uses them. An interrupt waits for the
    end of a run; a second one stops it. The states are then lost if a device cannot say how far it came.

    Several threads may share an executor: runs wait for each other, and for runs of all executors with the same
    store or backends. For parallel runs, plan and load once per thread. While `trace` is set, runs are timed step by
    step and added to it under `label`.

    Args:
        plan: The plan to run.
        store: Weights and states of the plan's devices.
        timeout: Maximum seconds that a collective waits; after that it is an error.
        wire: Dtype of large sums between devices with separate memories, float32 or bfloat16.
        label: The name of runs in traces.
        pipelined: Whether a device may begin its part of the next run before the other devices have finished the last
            run, as in `PipelinedRuns`. Messages between devices then take a way that keeps several of them.
        staying: Names of states that a rollback of finished pipelined runs does not restore, because later runs do not
            read the new entries. An example is a KV cache behind the end of its sequence.
    """

    plan: Plan
    store: Store
    label: str
    is_pipelined: bool

    copies = RenamedAttribute("read_output_copies")
    measure = RenamedAttribute("time_kernels")
    kernels = RenamedAttribute("list_kernel_names")

    @validate_arguments(
        PlanError,
        plan=PLAN_KIND,
        store=instance_of(Store),
        timeout=number_between(0, MAX_TIMEOUT_SECONDS),
        wire=TRANSFER_DTYPE_KIND,
        label=TEXT,
        pipelined=BOOL,
        staying=instance_of(Container),
    )
    def __init__(
        self,
        plan: Plan,
        store: Store,
        *,
        timeout: float = 60.0,
        wire: DType = DType.F32,
        label: str = "run",
        pipelined: bool = False,
        staying: Container[str] = frozenset(),
    ) -> None:
        self.plan, self.store, self.label, self.is_pipelined = plan, store, label, pipelined
        self.trace: Trace | None = None
        self.verified_orders: set[tuple[Executor, ...]] = set()
        """Sequences of these executors that are verified to follow each other through the devices."""
        store.require_devices(plan)
        self._device_lock = DeviceLock(
            (*store.backends, *(plan.device_plans[number].backend for number in store.between.local_devices))
        )
        with self._device_lock:
            self._bound_plan = bound = BoundPlan(plan, store)
            self._communicator_group = bound.make_communicator_group(timeout, wire, follow=pipelined)
            self._program_runners = bound.compile_programs(self._communicator_group)
            self._output_runners = {
                number: bound.make_runner_of_locally_whole_outputs(number, replay)
                for number, replay in self._program_runners.items()
            }
            self._device_stages = {
                number: _DeviceStage(bound, number, replay, staying) for number, replay in self._program_runners.items()
            }
            self._output_devices = {name: bound.find_output_device(name) for name in plan.graph.outputs}
        devices = [device_plan.device for device_plan in plan.device_plans]
        self._device_threads = DeviceThreads(devices, bound.local_devices, self._communicator_group, timeout)
        self._timed_runners = {
            number: cast(SupportsTiming, replay).run_timed
            for number, replay in self._program_runners.items()
            if isinstance(replay, SupportsTiming)
        }
        self._untimed_device = next(
            (devices[number] for number in self._program_runners if number not in self._timed_runners), None
        )

    def __repr__(self) -> str:
        return f"Executor({self.plan!r})"

    @validate_arguments(PlanError)
    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Run the plan once on `inputs`, and return the outputs by name as new host arrays.

        States keep their new values for the next run. Raises `PlanError` for an input that is missing, unknown or does
        not fit, and `BackendError` if a device fails.
        """
        with self._device_lock:
            self._write_inputs(inputs)
            outputs_by_device = self._run_or_trace(self._output_runners)
            return {
                name: self._read_output(name, number, outputs_by_device)
                for name, number in self._output_devices.items()
            }

    def launch(self, inputs: Mapping[str, npt.ArrayLike]) -> LaunchedRun:
        """Start a run on `inputs`, and return before the device has ended it.

        The caller holds the lock of the store. Another run may be launched before this one is finished. A traced run, a
        run on several devices, and a run of a backend without `SupportsLaunchAhead`, has ended when the method returns.

        Raises:
            PlanError: As `run`.
            BackendError: The device cannot start the run; the states are restored.
        """
        with self._device_lock:
            if self.trace is not None or self._start_run_on_only_device is None:
                outputs = self.run(inputs)
                return LaunchedRun(self, lambda: [outputs[name] for name in self._output_devices])
            self._write_inputs(inputs)
            return LaunchedRun(self, self._run_local_devices_or_restore({0: self._start_run_on_only_device})[0])

    @cached_property
    def _start_run_on_only_device(self) -> Callable[[], Callable[[], Sequence[Array]]] | None:
        """Starts the program of the only device; None if it cannot be launched ahead, or if there are more devices."""
        if len(self.plan.device_plans) > 1:
            return None
        runner, outputs = self._program_runners[0], self.plan.device_plans[0].program.outputs
        tensors = [outputs[name] for name in self._output_devices]
        if not isinstance(runner, SupportsLaunchAhead) or any(
            t.dtype is DType.BF16 or t.dtype.is_quantised for t in tensors
        ):
            return None
        return runner.make_starter_with_outputs(tensors)

    def _await_outputs_or_restore_states(self, finish: Callable[[], Sequence[Array]]) -> dict[str, Array]:
        """Wait for the end of a launched run, and return its outputs by name; after an error restore the states."""
        with self._device_lock:
            if self.store.lost_states.reason:  # the device must end the run, although its outputs are refused
                self._wait_and_undo_launched_run(finish)
            return self._name_outputs(self._run_local_devices_or_restore({0: finish})[0])

    def _name_outputs(self, arrays: Sequence[Array]) -> dict[str, Array]:
        """Return the arrays of a launched run by the names of the outputs."""
        return dict(zip(self._output_devices, arrays, strict=True))

    def _wait_and_undo_launched_run(self, finish: Callable[[], Sequence[Array]]) -> None:
        """Wait for the end of a launched run, and restore the states. A fault of the run has no further effect.

        If they cannot be restored, the states are lost. This raises no error, because the caller may have other states.
        """

        def undo(number: int, _: BaseException | None) -> None:
            log = self._device_stages[number].rollback_log
            try:
                finish()
            except StepError as fault:
                log.roll_back_current_run(fault)
            else:
                log.undo_last_run()

        loss = "an interrupt has stopped the undo of a launched run"
        with self._device_lock, DeferredInterrupts():
            try:
                self._device_threads.roll_back(undo, BackendError("a launched run is not wanted any more"))
                loss = ""
            except StatesLostError as why:
                loss = str(why)
            finally:
                self.store.lost_states.reason = self.store.lost_states.reason or loss

    def _read_output(
        self, name: str, number: int | None, outputs_by_device: Mapping[int, Mapping[str, Array]]
    ) -> Array:
        """Return one output of the run that has ended.

        Args:
            name: Name of the output.
            number: The device that has the whole output; None if it must be assembled from parts.
            outputs_by_device: Outputs that devices have returned already, by device number.
        """
        if number is None:
            return self._bound_plan.assemble_output_across_processes(name, self._bound_plan.decode_output_shards(name))
        return (
            outputs_by_device[number][name]
            if outputs_by_device
            else self._bound_plan.output_shards[name][number].copy_to_host()
        )

    @validate_arguments(PlanError, name=TEXT)
    def read_output_copies(self, name: str) -> list[Array]:
        """Return an output of the last run once for each local device that has all of it.

        If the output is not on all devices, it is returned once, assembled from its parts. Raises `PlanError` for an
        unknown output.
        """
        if name not in self._output_devices:
            raise PlanError(
                f"there is no output {quote_node_name(name):.60}; outputs: {', '.join(self._output_devices)}"
            )
        parts = self._bound_plan.decode_output_shards(name)
        if isinstance(self.plan.outputs[name], Replicate):
            return [np.array(part) for part in parts.values()]
        return [self._bound_plan.assemble_output_across_processes(name, parts)]

    def bind(self, inputs: Mapping[str, npt.ArrayLike]) -> None:
        """Copy inputs to all devices, where later `replay` calls use them."""
        with self._device_lock:
            self._write_inputs(inputs)

    def _write_inputs(self, inputs: Mapping[str, npt.ArrayLike]) -> None:
        arrays = self._bound_plan.as_input_arrays(inputs)
        self._bound_plan.write_inputs(arrays, [stage.input_slots for stage in self._device_stages.values()])
        self._bound_plan.require_equal_inputs_on_ranks([arrays])

    def replay(self) -> None:
        """Run the plan once on the inputs of the last `bind`, without returned outputs.

        An interrupt waits for the end of the run. Raises `BackendError` if a device fails.
        """
        with self._device_lock:
            self._run_or_trace(self._program_runners)

    def _run_or_trace(self, works: Mapping[int, Callable[[], Any]]) -> Mapping[int, Any]:
        """Run the work of each local device, and return the results by device number.

        If a trace is set, the programs are timed instead: the times are added to the trace, and the result is empty.
        """
        with DeferredInterrupts():
            trace = self.trace
            if trace is not None and len(trace.noted) < MAX_TRACED_RUNS:
                self._require_timing_support()
                start = time.monotonic()
                steps = self._run_local_devices_or_restore(self._timed_runners)
                in_order = tuple(steps.get(number, ()) for number in range(len(self.plan.device_plans)))
                trace.noted.append((self.plan, self.label, start, time.monotonic(), in_order))
                return {}
            if trace is not None:
                trace.dropped_runs += 1
            return self._run_local_devices_or_restore(works)

    def _require_timing_support(self) -> None:
        """Raise `PlanError` unless all backends can time their steps."""
        if self._untimed_device is not None:
            raise PlanError(f"device {self._untimed_device} cannot time its steps; its backend compiles no `Measures`")

    def _run_local_devices_or_restore(self, works: Mapping[int, Callable[[], Any]]) -> Mapping[int, Any]:
        """Run the work of all devices of this process; if a device fails, restore all states and raise its error."""
        try:
            self.store.lost_states.require_none()
            results = self._device_threads.run_devices(works)
            if self._device_threads.failures:
                self._device_threads.roll_back_and_raise(self._roll_back)
        except BackendError as why:
            if isinstance(why, StatesLostError):
                self.store._record_lost_states(why)
            if self.store.between.world.failure is not None:  # signal pads say only that a device failed
                raise RanksError(str(self.store.between.world.failure)) from why
            raise
        return results

    def _roll_back(self, number: int, error: BaseException | None) -> None:
        self._device_stages[number].rollback_log.roll_back_current_run(error)

    def list_kernel_names(self, device: int = 0) -> list[str]:
        """Return the names of the kernels that a run calls on one device, in order.

        They are op names if the backend has no kernel names, or if the device belongs to another process.

        Args:
            device: The number of the device in the plan.

        Raises:
            PlanError: There is no such device.
        """
        require(PlanError, "kernels", "device", device, integer_between(0, len(self.plan.device_plans) - 1))
        compiled = self._program_runners.get(device)
        ops = [i.op for i in self.plan.device_plans[device].program.instructions]
        return compiled.kernels() if isinstance(compiled, SupportsTiming) else ops

    def time_kernels(self) -> Sequence[Sequence[TimedKernel]]:
        """Run once on the inputs of the last `bind`, and return the timed kernels of each device.

        Raises `PlanError` if a backend cannot time its steps.
        """
        with self.tracing() as trace:
            self.replay()
        return trace.runs[-1].steps

    @contextmanager
    def tracing(self) -> Iterator[Trace]:
        """Time every run in this context, kernel by kernel, and yield the trace that collects the times.

        The trace has the devices of this process. Raises `PlanError` if a backend cannot time its steps.
        """
        self._require_timing_support()
        before, self.trace = self.trace, Trace()
        try:
            yield self.trace
        finally:
            self.trace = before


class _DeviceStage:
    """The part of a plan that one device runs: its inputs, program, outputs and rollback log."""

    def __init__(self, bound: BoundPlan, number: int, replay: Callable[[], object], staying: Container[str]) -> None:
        self.run_program, self.input_slots = replay, bound.locate_input_memory(number)
        self.rollback_log = RollbackLog(bound, number, staying)
        self.output_shards = {name: parts[number] for name, parts in bound.output_shards.items() if number in parts}


class LaunchedRun:
    """A run that a device has begun, and that `finish` or `undo` ends; further calls have no effect.

    Args:
        executor: The executor that launched the run.
        finish: Waits for the end of the run and returns its outputs.
    """

    def __init__(self, executor: Executor, finish: Callable[[], Sequence[Array]]) -> None:
        self._executor = executor
        self._finish: Callable[[], Sequence[Array]] | None = finish

    def finish(self, follower: LaunchedRun | None = None) -> dict[str, Array]:
        """Wait for the end of the run, and return its outputs by name.

        Args:
            follower: The run that was launched after this one, if any; it is undone if this one fails.

        Raises:
            BackendError: The run failed; the states are restored.
            StatesLostError: The run failed, and a follower has overwritten the saved states. Or another run has lost
                the states meanwhile; both runs are undone.
        """
        finish, self._finish = self._finish, None
        assert finish is not None, "a run ends once"
        if follower is not None and self._executor.store.lost_states.reason:
            follower.undo()
            follower = None
        if follower is None:
            return self._executor._await_outputs_or_restore_states(finish)
        try:
            return self._executor._name_outputs(finish())
        except BackendError as why:
            device = self._executor.plan.device_plans[0].device
            follower.undo()
            lost = StatesLostError(f"{why}; and states of {device} are lost: the next run had begun; load anew")
            self._executor.store.lost_states.record(lost)
            raise lost from why

    def undo(self) -> None:
        """Wait for the end of the run, and restore the states to their values before it.

        If that fails, the states are lost: later runs over them raise `StatesLostError`.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            self._executor._wait_and_undo_launched_run(finish)


@validate_arguments(PlanError, plan=PLAN_KIND, weights=instance_of(Mapping))
def load(plan: Plan, weights: Mapping[str, npt.ArrayLike], *, comm: Any = None) -> Executor:
    """Load `weights` to the devices of `plan`, and return an executor that can run the plan.

    The plan states the thread count (`hocket.plan`). If its devices belong to several processes (``cpu:0@1``), each
    process calls this function and every later `run` with the same plan, weights and inputs. All processes get the
    same outputs.

    Args:
        plan: The plan.
        weights: Arrays by name, in the dtypes that the graph declares.
        comm: The communicator of several processes, such as mpi4py's ``MPI.COMM_WORLD``.

    Raises:
        PlanError: If a weight is missing or does not fit.
        BackendError: If a device fails, if plans differ between processes, or if another process has failed.
    """
    world = SINGLE_PROCESS if comm is None else World(MpiLink(comm))
    try:
        return _bind_and_compile(plan, weights, world)
    except BaseException as why:
        world.announce_failure(format_failure_reason(why))
        raise


def _bind_and_compile(plan: Plan, weights: Mapping[str, npt.ArrayLike], world: World) -> Executor:
    """Make an executor: bind all weights of the plan to a new store, and compile the programs."""
    store = Store([(device_plan.backend, device_plan.device) for device_plan in plan.device_plans], world)
    for value in plan.graph.weights:
        name, spec = value.node.name, value.spec
        if name not in weights:
            hint = did_you_mean(name, weights)
            raise PlanError(
                f"weight %{quote_node_name(name)}: {spec} is not bound; pass it when loading the plan{hint}"
            )
        store.bind(name, weights[name], spec, plan.leaves[name])
    return Executor(plan, store)
