"""Simulated runs: the programs of a plan on devices with a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ...backends.base import Comm
from ...graph.errors import PlanError, format_count
from ..ir.execution_plan import Plan
from ..lowering.device_plan import find_collective_group_of_each_device
from .communicators import SingleDeviceComm, make_local_communicator_group


class SimulatedInstruction(Protocol):
    """One instruction in a simulated run, with its times in seconds from the start of the run."""

    @property
    def node(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def idle_seconds(self) -> float:
        """The seconds that the device waited for other devices before `start`."""


@runtime_checkable
class VirtualClockBackend(Protocol):
    """A backend with devices that keep a virtual clock, such as the null backend."""

    @property
    def tracks(self) -> Mapping[str, Sequence[SimulatedInstruction]]: ...
    def alloc(self, nbytes: int, on: Any) -> Any: ...
    def compile(self, program: Any, buffers: Any, on: Any, comm: Comm) -> Any: ...


@dataclass(frozen=True)
class SimulatedRunResult:
    """The times and the memory of a simulated run.

    - `events_by_device`: the instructions of each device with their times.
    - `peak_bytes`: the bytes of all buffers on each device.
    """

    events_by_device: tuple[tuple[SimulatedInstruction, ...], ...]
    peak_bytes: tuple[int, ...]

    @property
    def total_seconds(self) -> float:
        """The seconds from the start of the run until the last device ends."""
        return max((step.end for track in self.events_by_device for step in track), default=0.0)

    def compute_busy_share(self, device: int) -> float:
        """Return the fraction of the total time in which a device computes or communicates."""
        total, busy, until = self.total_seconds, 0.0, 0.0
        for step in sorted(self.events_by_device[device], key=lambda s: s.start):
            busy += max(0.0, step.end - max(step.start, until))
            until = max(until, step.end)
        return busy / total if total else 0.0

    def __str__(self) -> str:
        lines = [f"{self.total_seconds * 1e6:.1f} us"]
        for device, track in enumerate(self.events_by_device):
            waited = sum(s.idle_seconds for s in track)
            lines.append(
                f"  {device}: {format_count(len(track), 'step')}, busy {self.compute_busy_share(device):.0%}, "
                f"waited {waited * 1e6:.1f} us, {self.peak_bytes[device]} bytes"
            )
        return "\n".join(lines)


def simulate_run(plan: Plan, on: VirtualClockBackend | None = None) -> SimulatedRunResult:
    """Run a plan once on devices that only advance a clock by predicted seconds; return the simulated times.

    Args:
        plan: The plan.
        on: The backend of all devices; None for the backends of the plan.

    Raises:
        PlanError: If there is a device without a virtual clock.
    """
    backends = [on if on is not None else device_plan.backend for device_plan in plan.device_plans]
    clocks = [b for b in backends if isinstance(b, VirtualClockBackend)]
    if len(clocks) < len(plan.device_plans):
        raise PlanError(
            f"{plan.device_plans[0].device} keeps no virtual clock; plan for null:0, …, or give a null backend"
        )
    communicator_group = make_local_communicator_group(
        find_collective_group_of_each_device([device_plan.program for device_plan in plan.device_plans])
    )
    comms: list[Comm] = (
        [communicator_group.member(i) for i in range(len(clocks))] if len(clocks) > 1 else [SingleDeviceComm()]
    )
    runs = []
    for clock, device_plan, comm in zip(clocks, plan.device_plans, comms, strict=True):
        buffers = [clock.alloc(b.nbytes, device_plan.device) for b in device_plan.program.buffers]
        runs.append(clock.compile(device_plan.program, buffers, device_plan.device, comm))
    with ThreadPoolExecutor(len(runs)) as threads:
        for done in [threads.submit(run) for run in runs]:
            done.result()
    return SimulatedRunResult(
        tuple(
            tuple(c.tracks[str(device_plan.device)]) for c, device_plan in zip(clocks, plan.device_plans, strict=True)
        ),
        tuple(sum(b.nbytes for b in device_plan.program.buffers) for device_plan in plan.device_plans),
    )
