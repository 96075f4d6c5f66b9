"""What runs did when: a list of runs, each with the steps of every device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...backends.base import Timed
from ...graph.errors import PlanError
from ..plan import Plan

if TYPE_CHECKING:
    from ...view import Page

MOST_RUNS = 2000
"""Runs that a trace holds.  Those of a model of a thousand steps are then a file of some hundred megabytes."""


class Run:
    """One run of `plan`, from `start` to `end` in seconds of `time.monotonic`."""

    def __init__(self, plan: Plan, label: str, start: float, end: float, noted: Sequence[Iterable[Timed]]) -> None:
        self.plan, self.label, self.start, self.end = plan, label, start, end
        self._noted: Sequence[Iterable[Timed]] = noted

    @property
    def steps(self) -> Sequence[Sequence[Timed]]:
        """For each device what it did, in order; backends say it when it is first asked for."""
        self._noted = noted = [list(steps) for steps in self._noted]
        return noted


@dataclass(slots=True)
class Trace:
    """Runs in the order in which they were made, up to `MOST_RUNS`; `left_out` counts those that came later, which
    nobody timed."""

    runs: list[Run] = field(default_factory=list)
    left_out: int = 0

    def has_room(self) -> bool:
        """Whether one more run is to be timed; if not, it is counted."""
        full = len(self.runs) >= MOST_RUNS
        self.left_out += full
        return not full

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON for Perfetto or Chrome, gzipped if the name ends in ``.gz``; ``hocket view --trace``
        reads it too.  Raises `OSError`."""
        from ..telling.perfetto import save

        save(self, path)

    def view(self, *, title: str = "trace") -> Page:
        """A page of the plan that was run most often, with what its steps took.  Raises `PlanError` if none was run."""
        from ...view import view_plan

        if not self.runs:
            raise PlanError("the trace has no run; run a plan in its context")
        plans = [run.plan for run in self.runs]
        return view_plan(max(plans, key=plans.count), trace=self, title=title)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.view()._repr_html_()
