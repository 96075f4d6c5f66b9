"""``hocket plan --measure``: measured times of the timeline entries of a plan, next to the predicted times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np

from ..scheduler import Plan
from ..scheduler.stages import Stage
from ..scheduler.telling.measured import Measured, measured
from ..scheduler.units import time_text
from .errors import ModelError
from .models import Model
from .session import Group, Session

RUNS = 9
"""Runs over which times are measured."""
MOST = 40
"""Maximum timeline entries that are listed."""


def measured_lines(model: Model, on: Group, tokens: int, context: int | None) -> list[str]:
    """Run steps of `tokens` tokens, and return lines that compare measured with predicted times.

    The lines list the whole step, and each timeline entry; if there is only one entry, each op.

    Args:
        model: The model.
        on: The devices.
        tokens: New tokens of a step.
        context: Context in tokens; by default the default of a session.
    """
    session = Session(model, on=on, batch=tokens, context=context)
    if tokens > session.context:
        raise ModelError(f"a context of {session.context} has no room for {tokens} tokens; give a larger context=N")
    drawn = random_tokens(session, tokens)
    step_behind_context(session, next(drawn))  # makes plans, compiles and warms up
    with session.tracing() as trace:
        for _ in range(RUNS):
            step_behind_context(session, next(drawn))
    plan = trace.runs[-1].plan
    seconds = median(run.end - run.start for run in trace.runs)
    return compared(plan, seconds, measured(plan, trace))


def step_behind_context(session: Session, tokens: Sequence[int]) -> None:
    """Run tokens at the end of the context, as plans assume. The cached values do not matter for the time."""
    session.lengths[0] = session.context - len(tokens)
    session.evaluate([tokens])


def random_tokens(session: Session, count: int) -> Iterator[list[int]]:
    """Yield lists of `count` random tokens; each list differs, since a mixture of experts then loads other experts."""
    draws = np.random.default_rng(0)
    while True:
        yield draws.integers(session.model.vocabulary_size, size=count).tolist()


def compared(plan: Plan, seconds: float, steps: Measured) -> list[str]:
    """Return a table of predicted and measured times, as lines."""
    rows = list(by_stage(plan, steps) if len(plan.stages) > 1 else by_op(plan, steps))
    told = [_row(*row) for row in rows[:MOST]]
    more = [f"... and {len(rows) - MOST} more"] if len(rows) > MOST else []
    head = f"{'predicted':>12} {'measured':>12} {'error':>8}  of"
    return [head, _row("a run", plan.cost.total, seconds), *told, *more]


def by_stage(plan: Plan, steps: Measured) -> Iterator[tuple[str, float, float]]:
    """Yield the name of each timeline entry, with the predicted and the measured seconds of its slowest device."""
    for number, stage in enumerate(plan.stages, 1):
        yield f"stage {number}, {stage.op}", stage.seconds, max(_taken(stage, d, steps) for d in stage.devices)


def _taken(stage: Stage, device: int, steps: Measured) -> float:
    own = steps.devices[device][stage.first : stage.first + stage.count]
    return sum(step.seconds for step in own if step is not None)


def by_op(plan: Plan, steps: Measured) -> Iterator[tuple[str, float, float]]:
    """Yield each op of the first device, slowest first, with its predicted and its measured seconds."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for at, (i, step) in enumerate(zip(plan.lanes[0].program.instructions, steps.devices[0], strict=True)):
        if step is not None:
            sums[i.op][0] += plan.prices[0].of(at).seconds
            sums[i.op][1] += step.seconds
    for op, (predicted, took) in sorted(sums.items(), key=lambda item: -item[1][1]):
        yield op, predicted, took


def _row(name: str, predicted: float, took: float) -> str:
    error = f"{100 * (predicted / took - 1):+.0f}%" if took else "-"
    return f"{time_text(predicted):>12} {time_text(took):>12} {error:>8}  {name}"
