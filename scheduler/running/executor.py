"""Running a plan: one thread a device, inputs in, programs replayed, outputs out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ...backends.abilities import Measures, Timed
from ...backends.base import Array
from ...distributed import SINGLE_PROCESS, RanksError, World
from ...distributed.mpi_link import MpiLink
from ...distributed.presence import format_reason
from ...graph.attrs import quote_node_name
from ...graph.dtypes import DType
from ...graph.errors import BackendError, PlanError
from ...graph.validation import (
    TEXT,
    ArgumentKind,
    did_you_mean,
    instance_of,
    integer_between,
    number_between,
    require,
    validate_arguments,
)
from ..layout import Replicate
from ..plan import Plan
from .bound import Bound, finished_by
from .interrupts import InterruptsKept
from .side_by_side import SideBySide
from .store import Store
from .trace import MOST_RUNS, Trace
from .turns import Turn

MOST_SECONDS = 1e9
WIRE = ArgumentKind("DType.F32 or DType.BF16", lambda v: v is DType.F32 or v is DType.BF16)


class Executor:
    """One plan bound to its memory.

    Between devices with memories of their own large sums are sent as `wire`, float32 or bfloat16 (`Comm.wire`).  A
    collective that waits longer than `timeout` seconds is an error.  When a device fails, all stop, states become
    what they were before the run, and the error names the node and the device.  An interrupt waits for the end of a
    run; a second one stops it, and where a device cannot say how far it came its states are lost.

    Threads may share it: runs take turns, with those of all executors over the same store or the same backends.  To run
    side by side, plan and load once for each thread.  While `trace` is set, runs are timed step by step and added to it
    under `label`.
    """

    plan: Plan
    store: Store
    label: str

    @validate_arguments(
        PlanError,
        plan=instance_of(Plan),
        store=instance_of(Store),
        timeout=number_between(0, MOST_SECONDS),
        wire=WIRE,
        label=TEXT,
    )
    def __init__(
        self, plan: Plan, store: Store, *, timeout: float = 60.0, wire: DType = DType.F32, label: str = "run"
    ) -> None:
        self.plan, self.store, self.label = plan, store, label
        self.trace: Trace | None = None
        store.require_devices(plan)
        self._turn = Turn((*store.backends, *(plan.lanes[number].backend for number in store.between.local_devices)))
        with self._turn:
            self._bound = Bound(plan, store)
            self._inlets = [*map(self._bound.inlet, self._bound.own)]
            meeting = self._bound.meeting(timeout, wire)
            self._replays = self._bound.compiled_all(meeting)
            self._giving = {number: self._bound.giving(number, replay) for number, replay in self._replays.items()}
            self._holders = {name: self._bound.holder(name) for name in plan.graph.outputs}
        devices = [lane.device for lane in plan.lanes]
        self._devices = SideBySide(devices, self._bound.own, meeting, timeout)
        self._timed = {
            number: cast(Measures, replay).measured
            for number, replay in self._replays.items()
            if isinstance(replay, Measures)
        }
        self._untimed = next((devices[number] for number in self._replays if number not in self._timed), None)

    def __repr__(self) -> str:
        return f"Executor({self.plan!r})"

    @validate_arguments(PlanError)
    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Outputs by name, as host arrays of their own.  States advance.

        Raises `PlanError` for an input that is missing, unknown or does not fit, `BackendError` if a device fails.
        """
        with self._turn:
            self._bind(inputs)
            given = self._replay(self._giving)
            return {name: self._read(name, number, given) for name, number in self._holders.items()}

    def _read(self, name: str, number: int | None, given: Mapping[int, Mapping[str, Array]]) -> Array:
        """An output of device `number`, which may have `given` it, or put together."""
        if number is None:
            return self._bound.whole(name, self._bound.parts(name))
        return given[number][name] if given else self._bound.outputs[name][number].copied()

    @validate_arguments(PlanError, name=TEXT)
    def copies(self, name: str) -> list[Array]:
        """An output of the last run from each device of this process that has all of it, else put together.  Raises
        `PlanError` for a name that no output has."""
        if name not in self._holders:
            raise PlanError(f"there is no output {quote_node_name(name):.60}; outputs: {', '.join(self._holders)}")
        parts = self._bound.parts(name)
        if isinstance(self.plan.outputs[name], Replicate):
            return [np.array(part) for part in parts.values()]
        return [self._bound.whole(name, parts)]

    def bind(self, inputs: Mapping[str, npt.ArrayLike]) -> None:
        """Copy the inputs to all devices."""
        with self._turn:
            self._bind(inputs)

    def _bind(self, inputs: Mapping[str, npt.ArrayLike]) -> None:
        given = self._bound.given(inputs)
        self._bound.put(given, self._inlets)
        self._bound.agree([given])

    def replay(self) -> None:
        """Run the programs on the inputs that are bound; an interrupt comes once they have run.  Raises `BackendError`
        if a device fails."""
        with self._turn:
            self._replay(self._replays)

    def _replay(self, works: Mapping[int, Callable[[], Any]]) -> Mapping[int, Any]:
        """Do this work of all devices of this process; what it gave, nothing where steps were timed instead."""
        with InterruptsKept():
            trace = self.trace
            if trace is not None and len(trace.noted) < MOST_RUNS:
                self._demand_times()
                start = time.monotonic()
                steps = self._run_all(self._timed)
                in_order = tuple(steps.get(number, ()) for number in range(len(self.plan.lanes)))
                trace.noted.append((self.plan, self.label, start, time.monotonic(), in_order))
                return {}
            if trace is not None:
                trace.left_out += 1
            return self._run_all(works)

    def _demand_times(self) -> None:
        """Raises `PlanError` if a backend cannot tell what its steps take."""
        if self._untimed is not None:
            raise PlanError(f"device {self._untimed} cannot time its steps; its backend compiles no `Measures`")

    def _run_all(self, works: Mapping[int, Callable[[], Any]]) -> Mapping[int, Any]:
        """Run all devices of this process."""
        given = self._devices.work(works)
        if self._devices.failures:
            try:
                self._devices.undo(self._undo)
            except BackendError as why:
                if self.store.between.world.failure is not None:  # of which boards say only that a device failed
                    raise RanksError(str(self.store.between.world.failure)) from why
                raise
        return given

    def _undo(self, number: int, error: BaseException | None) -> None:
        finished = finished_by(error, len(self.plan.lanes[number].program.instructions))
        self._bound.undo(number, finished)

    def kernels(self, device: int = 0) -> list[str]:
        """What a run calls on one device of the plan, in order: kernels, or ops where its backend has none to name or
        it is a device of another process.  Raises `PlanError` for a number that no device has."""
        require(PlanError, "kernels", "device", device, integer_between(0, len(self.plan.lanes) - 1))
        compiled = self._replays.get(device)
        ops = [i.op for i in self.plan.lanes[device].program.instructions]
        return compiled.kernels() if isinstance(compiled, Measures) else ops

    def measure(self) -> Sequence[Sequence[Timed]]:
        """Run on the inputs that are bound; for each device what it did, step by step.

        Raises `PlanError` if a backend cannot tell.
        """
        with self.tracing() as trace:
            self.replay()
        return trace.runs[-1].steps

    @contextmanager
    def tracing(self) -> Iterator[Trace]:
        """In this context every run is added to the trace that it gives, with the steps of this process's devices.

        Raises `PlanError` if a backend cannot tell what its steps take.
        """
        self._demand_times()
        before, self.trace = self.trace, Trace()
        try:
            yield self.trace
        finally:
            self.trace = before


@validate_arguments(PlanError, plan=instance_of(Plan), weights=instance_of(Mapping))
def load(plan: Plan, weights: Mapping[str, npt.ArrayLike], *, comm: Any = None) -> Executor:
    """Bind `weights` (arrays by name, in the dtypes the graph declares) and make `plan` ready to run.

    The plan says with how many threads (`hocket.plan`).  For one over devices of several processes (``cpu:0@1``) `comm`
    is their communicator, as mpi4py's ``MPI.COMM_WORLD``: each process calls this, and every later `run`, with the same
    plan, weights and inputs, and gets the same outputs.  Raises `PlanError`, and `BackendError`, which it also is where
    the plans differ, or once another process has failed.
    """
    world = SINGLE_PROCESS if comm is None else World(MpiLink(comm))
    try:
        return _bind_and_compile(plan, weights, world)
    except BaseException as why:
        world.fail(format_reason(why))
        raise


def _bind_and_compile(plan: Plan, weights: Mapping[str, npt.ArrayLike], world: World) -> Executor:
    store = Store([(lane.backend, lane.device) for lane in plan.lanes], world)
    for value in plan.graph.weights:
        name, spec = value.node.name, value.spec
        if name not in weights:
            hint = did_you_mean(name, weights)
            raise PlanError(
                f"weight %{quote_node_name(name)}: {spec} is not bound; pass it when loading the plan{hint}"
            )
        store.bind(name, weights[name], spec, plan.leaves[name])
    return Executor(plan, store)
