"""Running a plan: one thread a device, inputs in, programs replayed, outputs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.base import Array, Comm
from ..graph.errors import BackendError, HocketError, PlanError
from .comm import Alone, Meeting
from .plan import Plan
from .store import Store, assembled


class Executor:
    """One plan bound to its memory.

    A collective that waits longer than `timeout` seconds is an error.  When a device fails, all stop and the error
    names the device.
    """

    def __init__(self, plan: Plan, store: Store, *, timeout: float = 60.0) -> None:
        self.plan, self.store = plan, store
        self._specs = {v.node.name: v.spec for v in plan.graph.inputs}
        self._shapes = {name: v.shape for name, v in plan.graph.outputs.items()}
        self._timeout = timeout
        self._meeting: Meeting | None = None
        self._buffers = store.buffers(plan)
        self._inputs: list[dict[str, Any]] = []
        self._outputs: list[dict[str, Any]] = []
        for lane, buffers in zip(plan.lanes, self._buffers, strict=True):
            for views, tensors in ((self._inputs, lane.program.inputs), (self._outputs, lane.program.outputs)):
                views.append({name: lane.backend.view(buffers[t.buffer], t) for name, t in tensors.items()})
        self._compile()
        self._threads = ThreadPoolExecutor(len(plan.lanes) - 1, "hocket") if len(plan.lanes) > 1 else None

    def _compile(self) -> None:
        lanes = self.plan.lanes
        alike = len({type(lane.backend) for lane in lanes}) == 1
        self._meeting = Meeting(len(lanes), self._timeout, compiled=alike) if len(lanes) > 1 else None
        comms: list[Comm] = [self._meeting.member(i) for i in range(len(lanes))] if self._meeting else [Alone()]
        self._replays: list[Callable[[], None]] = [
            lane.backend.compile(lane.program, buffers, lane.device, comm)
            for lane, buffers, comm in zip(lanes, self._buffers, comms, strict=True)
        ]

    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Outputs by name, as host arrays of their own.  States advance.

        Raises `PlanError` for a missing, unknown or misshapen input, `BackendError` if a device fails.
        """
        self.bind(inputs)
        self.replay()
        return {
            name: assembled(shape, self.plan.outputs[name], [views.get(name) for views in self._outputs])
            for name, shape in self._shapes.items()
        }

    def bind(self, inputs: Mapping[str, npt.ArrayLike]) -> None:
        """Copy the inputs to all devices."""
        for name in inputs.keys() - self._specs.keys():
            raise PlanError(f"there is no input %{name}; inputs: {', '.join(self._specs) or 'none'}")
        for name, spec in self._specs.items():
            if name not in inputs:
                raise PlanError(f"input %{name}: {spec} is missing")
            data = np.asarray(inputs[name])
            if data.shape != spec.shape:
                raise PlanError(f"input %{name}: got shape {list(data.shape)}, need {spec}")
            if spec.dtype.is_integer and data.dtype.kind not in "iu":
                raise PlanError(f"input %{name}: got {data.dtype}, need {spec}")
            for views in self._inputs:
                if name in views:
                    views[name][...] = data

    def replay(self) -> None:
        """Run the programs on the inputs that are bound."""
        if self._threads is None:
            self._replays[0]()
            return
        futures = [self._threads.submit(self._guarded, i) for i in range(1, len(self._replays))]
        errors = [self._guarded(0), *(f.result() for f in futures)]
        found = [e for e in errors if e is not None]
        assert self._meeting is not None
        self._meeting.clear()
        if found:
            self._compile()  # a broken barrier stays broken; the next run starts with a new one
            raise next((e for e in found if not isinstance(e, BackendError)), found[0])

    def measure(self) -> list[list[tuple[str, float]]]:
        """Run on the inputs that are bound; for each device what it did, step by step, and the seconds of each.

        Raises `PlanError` if a backend cannot tell.
        """
        found: dict[int, list[tuple[str, float]]] = {}
        plain = self._replays

        def timed(number: int) -> Callable[[], None]:
            measured = getattr(plain[number], "measured", None)
            if measured is None:
                raise PlanError(f"device {self.plan.lanes[number].device} cannot time its steps; cpu can")
            return lambda: found.update({number: measured()})

        measuring = self._replays = [timed(i) for i in range(len(plain))]
        try:
            self.replay()
        finally:
            if self._replays is measuring:  # after a failure they are new ones
                self._replays = plain
        return [found[i] for i in range(len(plain))]

    def _guarded(self, number: int) -> Exception | None:
        """Run one device; on failure wake the others, who may be waiting for it."""
        try:
            self._replays[number]()
        except Exception as error:  # a thread's error is handed to the caller, whatever it is
            device = self.plan.lanes[number].device
            assert self._meeting is not None
            self._meeting.abort(f"device {device} failed: {error}")
            return error if isinstance(error, HocketError) else BackendError(f"device {device}: {error}")
        return None


def load(plan: Plan, weights: Mapping[str, npt.ArrayLike]) -> Executor:
    """Bind `weights` (arrays by name, in the dtypes the graph declares) and make `plan` ready to run."""
    store = Store([(lane.backend, lane.device) for lane in plan.lanes])
    for value in plan.graph.weights:
        name, spec = value.node.name, value.spec
        if name in weights:
            data = np.asarray(weights[name])
            if not spec.dtype.is_quantised and data.shape != spec.shape:
                raise PlanError(f"weight %{name}: got shape {list(data.shape)}, need {spec}")
            stored = data if spec.dtype.is_quantised else data.astype(spec.dtype.storage)
            store.bind(name, stored, spec, plan.leaves[name])
    return Executor(plan, store)
