"""A simulated run of a plan: its programs on devices with a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ...backends.base import Comm
from ...graph.errors import PlanError
from ..lowering.lane import teams_of
from ..plan import Plan
from .comm import Alone, meeting_of


class Tick(Protocol):
    """One instruction on a device's clock, in seconds from the start of the run."""

    @property
    def node(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def waited(self) -> float:
        """Seconds that the device waited for other devices before `start`."""


@runtime_checkable
class ClockBackend(Protocol):
    """A backend with devices that keep a virtual clock: the null backend."""

    @property
    def tracks(self) -> Mapping[str, Sequence[Tick]]: ...
    def alloc(self, nbytes: int, on: Any) -> Any: ...
    def compile(self, program: Any, buffers: Any, on: Any, comm: Comm) -> Any: ...


@dataclass(frozen=True)
class Timeline:
    """The instructions of each device with their times, and the peak bytes of each device."""

    tracks: tuple[tuple[Tick, ...], ...]
    peak: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """The time in seconds when the last device ends."""
        return max((step.end for track in self.tracks for step in track), default=0.0)

    def busy(self, device: int) -> float:
        """Return the share of the total time in which a device computes or communicates."""
        total, busy, until = self.seconds, 0.0, 0.0
        for step in sorted(self.tracks[device], key=lambda s: s.start):
            busy += max(0.0, step.end - max(step.start, until))
            until = max(until, step.end)
        return busy / total if total else 0.0

    def __str__(self) -> str:
        lines = [f"{self.seconds * 1e6:.1f} us"]
        for device, track in enumerate(self.tracks):
            waited = sum(s.waited for s in track)
            lines.append(
                f"  {device}: {len(track)} steps, busy {self.busy(device):.0%}, waited {waited * 1e6:.1f} us, "
                f"{self.peak[device]} bytes"
            )
        return "\n".join(lines)


def timeline(plan: Plan, on: ClockBackend | None = None) -> Timeline:
    """Simulate a run of `plan` on the virtual clock of its own devices, or on the backend `on` for any plan.

    Raises:
        PlanError: If there is a device without a virtual clock.
    """
    backends = [on if on is not None else lane.backend for lane in plan.lanes]
    clocks = [b for b in backends if isinstance(b, ClockBackend)]
    if len(clocks) < len(plan.lanes):
        raise PlanError(f"{plan.lanes[0].device} keeps no virtual clock; plan for null:0, …, or give a null backend")
    meeting = meeting_of(teams_of([lane.program for lane in plan.lanes]))
    comms: list[Comm] = [meeting.member(i) for i in range(len(clocks))] if len(clocks) > 1 else [Alone()]
    runs = []
    for clock, lane, comm in zip(clocks, plan.lanes, comms, strict=True):
        buffers = [clock.alloc(b.nbytes, lane.device) for b in lane.program.buffers]
        runs.append(clock.compile(lane.program, buffers, lane.device, comm))
    with ThreadPoolExecutor(len(runs)) as threads:
        for done in [threads.submit(run) for run in runs]:
            done.result()
    return Timeline(
        tuple(tuple(c.tracks[str(lane.device)]) for c, lane in zip(clocks, plan.lanes, strict=True)),
        tuple(sum(b.nbytes for b in lane.program.buffers) for lane in plan.lanes),
    )
