"""Traces: lists of runs with the measured times of the instructions of every device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...backends.capabilities import TimedKernel
from ...graph.errors import PlanError
from ...graph.lazy_dataclass import dataclass
from ...graph.old_names import RenamedAttribute
from ...graph.validation import FILE_KIND, instance_of, integer_between, validate_arguments, validate_constructor
from ..ir.execution_plan import Plan

if TYPE_CHECKING:
    from ...view import Page

MAX_TRACED_RUNS = 2000
"""Maximum runs of a trace. With a model of a thousand instructions, the file then has some hundred megabytes."""


class TracedRun(NamedTuple):
    """One measured run of a plan.

    - `plan`, `label`: the plan, and the name of the run.
    - `start`, `end`: seconds of `time.monotonic`.
    - `steps`: for each device its timed kernels, in order.
    """

    plan: Plan
    label: str
    start: float
    end: float
    steps: Sequence[Sequence[TimedKernel]]


@validate_constructor(PlanError, dropped_runs=integer_between(0), noted=instance_of(list))
@dataclass(slots=True)
class Trace:
    """The measured runs of plans, in the order of execution; at most `MAX_TRACED_RUNS`.

    - `dropped_runs`: the number of later runs, which are not timed.
    - `noted`: raw data of the runs, which `runs` evaluates later. So a run is hardly delayed by its trace.
    """

    dropped_runs: int = 0
    noted: list[tuple[Plan, str, float, float, Sequence[Iterable[TimedKernel]]]] = field(default_factory=list)
    _runs: list[TracedRun] = field(default_factory=list, init=False)

    left_out = RenamedAttribute("dropped_runs")

    @property
    def runs(self) -> Sequence[TracedRun]:
        """The traced runs in order. The first read after a run asks the backends for its timed kernels."""
        for plan, label, start, end, steps in self.noted[len(self._runs) :]:
            self._runs.append(TracedRun(plan, label, start, end, [list(own) for own in steps]))
        return self._runs

    @validate_arguments(PlanError, path=FILE_KIND)
    def save(self, path: str | Path) -> None:
        """Write the trace to a JSON file, which Perfetto, Chrome and ``hocket view --trace`` can read.

        A name that ends in ``.gz`` makes a gzip file. Raises `OSError`.
        """
        from ..reports.perfetto_trace import write_chrome_trace

        write_chrome_trace(self, path)

    def view(self, *, title: str = "trace") -> Page:
        """Return an HTML page with the measured times of a plan.

        The page shows the plan that has the most traced runs. Raises `PlanError` if the trace has no run.
        """
        from ...view import view_plan

        if not self.runs:
            raise PlanError("the trace has no run; run a plan in its context")
        plans = [run.plan for run in self.runs]
        return view_plan(max(plans, key=plans.count), trace=self, title=title)

    def _repr_html_(self) -> str:
        """Return the HTML page of the trace, which notebooks display."""
        return self.view()._repr_html_()
