"""``hocket plan --measure``: measured times of the timeline entries of a plan, next to the predicted times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np

from ..graph.errors import format_count
from ..scheduler import Plan, describe_memory_problem
from ..scheduler.costs.timeline import TimelineEntry
from ..scheduler.ir.formatting import format_seconds
from ..scheduler.measurement.calibrate import load_probe_plan_with_fill_data
from ..scheduler.reports.measured_steps import MeasuredPlan, read_measured_times_from_trace
from .errors import ModelError
from .inference.session import DeviceGroup, Session
from .models import Model

MEASURED_RUNS = 9
"""Number of measured runs."""
MAX_LISTED_ENTRIES = 40
"""Maximum timeline entries in the list."""


def measure_steps_against_predictions(model: Model, on: DeviceGroup, tokens: int, context: int | None) -> list[str]:
    """Measure steps of `tokens` tokens, and return a table of predicted and measured times, as lines.

    The table has the whole step, and each timeline entry; if there is only one entry, each op.

    Args:
        model: The model.
        on: The devices.
        tokens: New tokens of a step.
        context: Context in tokens; by default the default of a session.

    Raises:
        ModelError: The context is shorter than `tokens`.
    """
    session = Session(model, on=on, batch=tokens, context=context)
    if tokens > session.context:
        raise ModelError(
            f"a context of {session.context} has no room for {format_count(tokens, 'token')}; give a larger context=N"
        )
    tokens_to_run = draw_random_token_lists_endlessly(session, tokens)
    run_at_context_end(session, next(tokens_to_run))  # makes plans, compiles and warms up
    with session.tracing() as trace:
        for _ in range(MEASURED_RUNS):
            run_at_context_end(session, next(tokens_to_run))
    plan = trace.runs[-1].plan
    seconds = median(run.end - run.start for run in trace.runs)
    return format_time_comparison_table(plan, seconds, read_measured_times_from_trace(plan, trace))


def measure_graph_against_predictions(plan: Plan) -> list[str]:
    """Measure runs of the plan of a graph, and return a table of predicted and measured times, as lines.

    Weights have constant values, and inputs are zeros.

    Raises:
        ModelError: The plan does not fit into memory.
    """
    if problem := describe_memory_problem(plan):
        raise ModelError(f"does not fit: {problem}")
    executor = load_probe_plan_with_fill_data(plan)
    inputs = {value.node.name: np.zeros(value.shape, value.dtype.storage) for value in plan.graph.inputs}
    executor.run(inputs)  # compiles and warms up
    with executor.tracing() as trace:
        for _ in range(MEASURED_RUNS):
            executor.run(inputs)
    seconds = median(run.end - run.start for run in trace.runs)
    return format_time_comparison_table(plan, seconds, read_measured_times_from_trace(plan, trace))


def run_at_context_end(session: Session, tokens: Sequence[int]) -> None:
    """Run tokens at the last positions of the context, where a step takes as long as plans assume.

    The content of the caches is arbitrary, because it does not change the time.
    """
    session.lengths[0] = session.context - len(tokens)
    session.evaluate([tokens])


def draw_random_token_lists_endlessly(session: Session, count: int) -> Iterator[list[int]]:
    """Yield lists of `count` random tokens without end.

    The lists differ, so that a mixture of experts reads other experts in each run.
    """
    draws = np.random.default_rng(0)
    while True:
        yield draws.integers(session.model.vocabulary_size, size=count).tolist()


def format_time_comparison_table(plan: Plan, seconds: float, steps: MeasuredPlan) -> list[str]:
    """Format a table of predicted and measured times as lines.

    Args:
        plan: The plan with the predicted times.
        seconds: The measured seconds of a whole step.
        steps: The measured times of the parts of a step.
    """
    rows = list(
        compare_timeline_entry_seconds(plan, steps)
        if len(plan.timeline) > 1
        else compare_first_device_op_seconds(plan, steps)
    )
    lines = [_format_row(*row) for row in rows[:MAX_LISTED_ENTRIES]]
    more = [f"... and {len(rows) - MAX_LISTED_ENTRIES} more"] if len(rows) > MAX_LISTED_ENTRIES else []
    head = f"{'predicted':>12} {'measured':>12} {'error':>8}  of"
    return [head, _format_row("a run", plan.cost.total, seconds), *lines, *more]


def compare_timeline_entry_seconds(plan: Plan, steps: MeasuredPlan) -> Iterator[tuple[str, float, float]]:
    """Yield name, predicted seconds and measured seconds of each timeline entry of a plan.

    If several devices run an entry, the slowest one counts.
    """
    for number, stage in enumerate(plan.timeline, 1):
        yield (
            f"stage {number}, {stage.op}",
            stage.seconds,
            max(_sum_measured_seconds(stage, d, steps) for d in stage.devices),
        )


def _sum_measured_seconds(stage: TimelineEntry, device: int, steps: MeasuredPlan) -> float:
    own = steps.steps_by_device[device][stage.first_instruction : stage.first_instruction + stage.instruction_count]
    return sum(step.seconds for step in own if step is not None)


def compare_first_device_op_seconds(plan: Plan, steps: MeasuredPlan) -> Iterator[tuple[str, float, float]]:
    """Yield name, predicted seconds and measured seconds of each op on the first device. The slowest op comes first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for at, (i, step) in enumerate(
        zip(plan.device_plans[0].program.instructions, steps.steps_by_device[0], strict=True)
    ):
        if step is not None:
            sums[i.op][0] += plan.instruction_costs[0].get_cost(at).seconds
            sums[i.op][1] += step.seconds
    for op, (predicted, took) in sorted(sums.items(), key=lambda item: -item[1][1]):
        yield op, predicted, took


def _format_row(name: str, predicted: float, took: float) -> str:
    error = f"{100 * (predicted / took - 1):+.0f}%" if took else "-"
    return f"{format_seconds(predicted):>12} {format_seconds(took):>12} {error:>8}  {name}"
