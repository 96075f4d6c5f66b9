"""``hocket plan --measure``: what the stages of a plan take, beside what was predicted of them."""

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
MOST = 40
"""Stages that are listed."""


def measured_lines(model: Model, on: Group, tokens: int, context: int | None) -> list[str]:
    """Run steps of so many tokens and compare: all of a step, and stage by stage or, where there is one stage alone, op
    by op."""
    session = Session(model, on=on, batch=tokens, context=context)
    if tokens > session.context:
        raise ModelError(f"a context of {session.context} has no room for {tokens} tokens; give a larger context=N")
    drawn = random_tokens(session, tokens)
    step_behind_context(session, next(drawn))  # plans, compiles and warms up
    with session.tracing() as trace:
        for _ in range(RUNS):
            step_behind_context(session, next(drawn))
    plan = trace.runs[-1].plan
    seconds = median(run.end - run.start for run in trace.runs)
    return compared(plan, seconds, measured(plan, trace))


def step_behind_context(session: Session, tokens: Sequence[int]) -> None:
    """Run tokens as the last of the context, where plans take them to be; what it holds does not matter to time."""
    session.lengths[0] = session.context - len(tokens)
    session.evaluate([tokens])


def random_tokens(session: Session, count: int) -> Iterator[list[int]]:
    """So many tokens, again and again others: a mixture of experts reads others for each."""
    draws = np.random.default_rng(0)
    while True:
        yield draws.integers(session.model.vocabulary_size, size=count).tolist()


def compared(plan: Plan, seconds: float, steps: Measured) -> list[str]:
    """Predicted beside measured, in words."""
    rows = list(by_stage(plan, steps) if len(plan.stages) > 1 else by_op(plan, steps))
    told = [_row(*row) for row in rows[:MOST]]
    more = [f"... and {len(rows) - MOST} more"] if len(rows) > MOST else []
    head = f"{'predicted':>12} {'measured':>12} {'error':>8}  of"
    return [head, _row("a run", plan.cost.total, seconds), *told, *more]


def by_stage(plan: Plan, steps: Measured) -> Iterator[tuple[str, float, float]]:
    """For each stage its name and the seconds that its slowest device was predicted to take, and took."""
    for number, stage in enumerate(plan.stages, 1):
        yield f"stage {number}, {stage.op}", stage.seconds, max(_taken(stage, d, steps) for d in stage.devices)


def _taken(stage: Stage, device: int, steps: Measured) -> float:
    own = steps.devices[device][stage.first : stage.first + stage.count]
    return sum(step.seconds for step in own if step is not None)


def by_op(plan: Plan, steps: Measured) -> Iterator[tuple[str, float, float]]:
    """For each op, the slowest first, what its steps on the first device were predicted to take, and took."""
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
