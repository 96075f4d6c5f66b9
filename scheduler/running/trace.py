"""What runs did when: a list of runs, each with the steps of every device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...backends.abilities import Timed
from ...graph.errors import PlanError
from ...graph.lazy_dataclass import dataclass
from ...graph.validation import instance_of, integer_between, validate_constructor
from ..plan import Plan

if TYPE_CHECKING:
    from ...view import Page

MOST_RUNS = 2000
"""Runs that a trace holds.  Those of a model of a thousand steps are then a file of some hundred megabytes."""


class Run(NamedTuple):
    """One run of `plan`, from `start` to `end` in seconds of `time.monotonic`; for each device its steps in order."""

    plan: Plan
    label: str
    start: float
    end: float
    steps: Sequence[Sequence[Timed]]


@validate_constructor(PlanError, left_out=integer_between(0), noted=instance_of(list))
@dataclass(slots=True)
class Trace:
    """Runs in the order in which they were made, up to `MOST_RUNS`; `left_out` counts those that came later, which
    nobody timed.

    `noted` is for executors: what they say of a run at its end, when every line of Python takes time from the next.
    """

    left_out: int = 0
    noted: list[tuple[Plan, str, float, float, Sequence[Iterable[Timed]]]] = field(default_factory=list)
    _runs: list[Run] = field(default_factory=list, init=False)

    @property
    def runs(self) -> Sequence[Run]:
        """The runs; backends are asked for the steps of each when this is first read behind it."""
        for plan, label, start, end, steps in self.noted[len(self._runs) :]:
            self._runs.append(Run(plan, label, start, end, [list(own) for own in steps]))
        return self._runs

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
