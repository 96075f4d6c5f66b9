"""Running a plan: one thread a device, inputs in, programs replayed, outputs out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ...backends.abilities import Measures, Timed
from ...backends.base import Array, Comm, Program
from ...graph.arguments import ANY, TEXT, Kind, a, demand, near, needs, real, table_of, whole
from ...graph.arrays import fitted
from ...graph.attrs import quote
from ...graph.dtypes import DType
from ...graph.errors import BackendError, PlanError, StepError
from ...ops.quants import decoded, encoded
from ...ranks import ALONE, World
from ...ranks.meeting import WideMeeting
from ...ranks.mpi import MpiLink
from ..layout import Local, Replicate, Shard
from ..lowering.lane import teams_of
from ..plan import Plan
from .comm import Alone, Meeting, Teams, meeting_of
from .interrupts import InterruptsKept
from .store import Part, Store, assembled
from .trace import MOST_RUNS, Trace
from .turns import Turn

MOST_SECONDS = 1e9
PATIENCE, SLOWER = 6.0, 20.0
"""Another process is waited for so many seconds at most, and so many times what a run should take in all."""
WIRE = Kind("DType.F32 or DType.BF16", lambda v: v is DType.F32 or v is DType.BF16)
INPUTS = table_of(TEXT, ANY, "a mapping from names of inputs to arrays")


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

    @needs(PlanError, plan=a(Plan), store=a(Store), timeout=real(0, MOST_SECONDS), wire=WIRE, label=TEXT)
    def __init__(
        self, plan: Plan, store: Store, *, timeout: float = 60.0, wire: DType = DType.F32, label: str = "run"
    ) -> None:
        self.plan, self.store, self.label = plan, store, label
        self.trace: Trace | None = None
        self._between = store.between
        own = [plan.lanes[number] for number in self._between.own]
        self._turn = Turn((*store.backends, *(lane.backend for lane in own)))
        self._specs = {v.node.name: v.spec for v in plan.graph.inputs}
        self._shapes = {name: v.shape for name, v in plan.graph.outputs.items()}
        self._timeout = timeout
        self._meeting = self._met(wire)
        self._failures: list[tuple[int | None, BaseException]] = []
        self._lost: BackendError | None = None
        with self._turn:
            self._prepare()

    def _met(self, wire: DType) -> Meeting | Teams | WideMeeting:
        """Where the devices meet: in this process, or between several, none of which is waited for much longer than the
        whole run should take."""
        lanes, between = self.plan.lanes, self._between
        devices, teams = [lane.device for lane in lanes], teams_of([lane.program for lane in lanes])
        alike = devices if len({type(lane.backend) for lane in lanes}) == 1 else []
        if between.world.size == 1:
            return meeting_of(teams, self._timeout, devices=alike, wire=wire)
        timeout = min(self._timeout, PATIENCE + SLOWER * self.plan.cost.total)
        between.world.agree("plan", self.plan.digest(), "give all ranks the same model and flags")
        wide = WideMeeting(between, devices, timeout, wire, teams)
        if wide.is_apart:
            return wide
        near = Teams(teams, timeout, devices=alike, wire=wire, letters=wide)
        between.world.wakes(near.abort)
        return near

    def _prepare(self) -> None:
        plan = self.plan
        self._buffers = self.store.buffers(plan)
        self._inputs: dict[str, list[tuple[Any, DType]]] = {name: [] for name in self._specs}
        self._outputs: dict[str, dict[int, Part]] = {name: {} for name in self._shapes}
        for number, buffers in self._buffers.items():
            lane = plan.lanes[number]
            for name, t in lane.program.inputs.items():
                self._inputs[name].append((lane.backend.view(buffers[t.buffer], t), t.dtype))
            for name, t in lane.program.outputs.items():
                if name in self._outputs:  # others are for another device
                    self._outputs[name][number] = Part(lane.backend.view(buffers[t.buffer], t), t.dtype)
        self._reads = {name: self._reader(name) for name in self._shapes}
        self._replays = {
            n: self._compiled(n, plan.lanes[n].program, self._meeting.member(n) if len(plan.lanes) > 1 else Alone())
            for n in self._buffers
        }
        self._noted: list[Any] = [()] * len(plan.lanes)
        self._timed = {
            number: cast(Measures, replay).measured
            for number, replay in self._replays.items()
            if isinstance(replay, Measures)
        }
        untimed = (number for number in self._replays if number not in self._timed)
        self._untimed = next((plan.lanes[number].device for number in untimed), None)
        self._threads = ThreadPoolExecutor(len(self._replays) - 1, "hocket") if len(self._replays) > 1 else None
        self._between.world.everyones(b"")  # what others compile meanwhile takes longer than a run is waited for

    def _compiled(self, number: int, program: Program, comm: Comm) -> Callable[[], None]:
        lane = self.plan.lanes[number]
        return lane.backend.compile(program, self._buffers[number], lane.device, comm)

    def __repr__(self) -> str:
        return f"Executor({self.plan!r})"

    @needs(PlanError)
    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Outputs by name, as host arrays of their own.  States advance.

        Raises `PlanError` for an input that is missing, unknown or does not fit, `BackendError` if a device fails.
        """
        with self._turn:
            self._bind(inputs)
            self._replay()
            return {name: read() for name, read in self._reads.items()}

    def _reader(self, name: str) -> Callable[[], Array]:
        """What reads an output after a run: which way is settled once, since a token may take no more than 1 ms."""
        layout, parts = self.plan.outputs[name], self._outputs[name]
        if self._between.is_wide or isinstance(layout, Shard):
            return lambda: assembled(self._shapes[name], layout, self._parts(name), self._between)
        return parts[layout.devices[0] if isinstance(layout, Local) else 0].copied

    @needs(PlanError, name=TEXT)
    def copies(self, name: str) -> list[Array]:
        """An output of the last run from each device of this process that has all of it, else put together.  Raises
        `PlanError` for a name that no output has."""
        if name not in self._shapes:
            raise PlanError(f"there is no output {quote(name):.60}; outputs: {', '.join(self._shapes)}")
        parts, layout = self._parts(name), self.plan.outputs[name]
        if isinstance(layout, Replicate):
            return [np.array(part) for part in parts.values()]
        return [assembled(self._shapes[name], layout, parts, self._between)]

    def _parts(self, name: str) -> dict[int, Array]:
        """What each device of this process that has any of an output has of it."""
        return {number: part.numbers() for number, part in self._outputs[name].items()}

    def bind(self, inputs: Mapping[str, npt.ArrayLike]) -> None:
        """Copy the inputs to all devices."""
        with self._turn:
            self._bind(inputs)

    def _bind(self, inputs: Mapping[str, npt.ArrayLike]) -> None:
        if type(inputs) is not dict or not inputs.keys() <= self._specs.keys():
            demand(PlanError, "run", "inputs", inputs, INPUTS)
            for name in inputs.keys() - self._specs.keys():
                raise PlanError(f"there is no input %{quote(name):.60}; inputs: {', '.join(self._specs) or 'none'}")
        is_wide, check = self._between.is_wide, 0
        for name, spec in self._specs.items():
            if name not in inputs:
                raise PlanError(f"input %{name}: {spec} is missing")
            data = fitted(f"input %{name}", inputs[name], spec)
            if is_wide:
                check = crc32(np.ascontiguousarray(data).data, check)
            for view, dtype in self._inputs[name]:
                ready = data.dtype is dtype.storage and dtype is not DType.BF16
                view[...] = data if ready else encoded(decoded(data, spec.dtype), dtype)
        if is_wide:
            self._between.world.agree("run", f"inputs {check:08x}", "run the same inputs on all ranks", PATIENCE)

    def replay(self) -> None:
        """Run the programs on the inputs that are bound; an interrupt comes once they have run.  Raises `BackendError`
        if a device fails."""
        with self._turn:
            self._replay()

    def _replay(self) -> None:
        if self._lost is not None:
            raise self._lost
        with InterruptsKept():
            trace = self.trace
            if trace is None:
                self._run_all(self._replays)
            elif len(trace.noted) < MOST_RUNS:
                self._demand_times()
                start = time.monotonic()
                self._run_all(self._timed)
                trace.noted.append((self.plan, self.label, start, time.monotonic(), tuple(self._noted)))
            else:
                trace.left_out += 1
                self._run_all(self._replays)

    def _demand_times(self) -> None:
        """Raises `PlanError` if a backend cannot tell what its steps take."""
        if self._untimed is not None:
            raise PlanError(f"device {self._untimed} cannot time its steps; its backend compiles no `Measures`")

    def _run_all(self, replays: Mapping[int, Callable[[], Any]]) -> None:
        """Run all devices of this process; what each then says of its run is noted."""
        self._failures.clear()
        own, run = list(replays), self._guarded
        others = {n: self._threads.submit(run, n, replays[n]) for n in own[1:]} if self._threads else {}
        for number in own[:1]:  # no device of this process may take part
            run(number, replays[number])
        for number, other in others.items():
            self._await(number, other)
        if len(self.plan.lanes) > 1:
            self._meeting.clear()
        if self._failures:
            self._fail()

    def kernels(self, device: int = 0) -> list[str]:
        """What a run calls on one device of the plan, in order: kernels, or ops where its backend has none to name or
        it is a device of another process.  Raises `PlanError` for a number that no device has."""
        demand(PlanError, "kernels", "device", device, whole(0, len(self.plan.lanes) - 1))
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

    def _guarded(self, number: int, replay: Callable[[], Any]) -> None:
        """Run one device; on failure wake the others, who may be waiting for it."""
        try:
            self._noted[number] = replay()
        except BaseException as why:  # a thread's error is handed to the caller, whatever it is
            self._stop(number, why)

    def _stop(self, number: int | None, why: BaseException) -> None:
        """Note a failure of a device (or an interrupt), before others hear of it and fail for that reason."""
        self._failures.append((number, why))
        self._meeting.abort(str(why) or type(why).__name__)

    def _await(self, number: int, other: Future[None]) -> None:
        """Wait for a device; once another has failed, not for ever."""
        while not other.done():
            failed = bool(self._failures)
            try:
                other.result(self._timeout)
            except TimeoutError:
                if failed:
                    device, why = self.plan.lanes[number].device, self._failures[0][1]
                    self._lost = BackendError(f"{why}; and {device} does not stop: states are lost, load anew")
                    raise self._lost from why
            except KeyboardInterrupt as why:
                self._stop(None, why)

    def _fail(self) -> None:
        """Take the run back on all devices and raise what went wrong first."""
        why, failed = self._failures[0][1], dict(self._failures)
        for number in self._replays:
            lane = self.plan.lanes[number]
            error, program = failed.get(number), lane.program
            finished = (
                len(program.instructions) if error is None else error.finished if isinstance(error, StepError) else None
            )
            try:
                if program.undo and finished is None:
                    raise BackendError("it does not say how far it came")
                self._compiled(number, program.undoing(finished or 0), Alone())()
            except Exception as fault:  # whatever a backend raises here, the states are lost
                raise BackendError(f"{why}; and states of {lane.device} are lost: {fault}") from why
        if isinstance(why, StepError) and not isinstance(why.__cause__, Exception | None):
            raise why.__cause__  # an interrupt
        raise why


@needs(PlanError, plan=a(Plan), weights=a(Mapping))
def load(plan: Plan, weights: Mapping[str, npt.ArrayLike], *, comm: Any = None) -> Executor:
    """Bind `weights` (arrays by name, in the dtypes the graph declares) and make `plan` ready to run.

    The plan says with how many threads (`hocket.plan`).  For one over devices of several processes (``cpu:0@1``) `comm`
    is their communicator, as mpi4py's ``MPI.COMM_WORLD``: each process calls this, and every later `run`, with the same
    plan, weights and inputs, and gets the same outputs.  Raises `PlanError`, and `BackendError`, which it also is where
    the plans differ, or once another process has failed.
    """
    world = ALONE if comm is None else World(MpiLink(comm))
    store = Store([(lane.backend, lane.device) for lane in plan.lanes], world)
    for value in plan.graph.weights:
        name, spec = value.node.name, value.spec
        if name not in weights:
            hint = near(name, weights)
            raise PlanError(f"weight %{quote(name)}: {spec} is not bound; pass it when loading the plan{hint}")
        store.bind(name, weights[name], spec, plan.leaves[name])
    return Executor(plan, store)
