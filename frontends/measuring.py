"""``hocket plan --measure``: what the stages of a plan take, beside what was predicted of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

import numpy as np

from ..scheduler import Executor, Plan, Store
from ..scheduler.stages import Stage
from ..scheduler.telling.measured import Measured, measured
from ..scheduler.units import time_text
from .laying_out import load_weights
from .models import Model

RUNS = 9
MOST = 40
"""Stages that are listed."""


def measured_lines(plan: Plan, model: Model) -> list[str]:
    """Run the plan with the weights of the model and compare: all of it, and stage by stage or, where there is one
    stage alone, op by op."""
    store = Store(plan.group)
    load_weights(store, model, plan, None)
    executor = Executor(plan, store)
    executor.bind({v.node.name: np.zeros(v.shape, v.dtype.storage) for v in plan.graph.inputs})
    return compared(plan, *timed(plan, executor))


def timed(plan: Plan, executor: Executor) -> tuple[float, Measured]:
    """Median seconds of a run from its start to its end, and what its steps took."""
    executor.replay()
    with executor.tracing() as trace:
        for _ in range(RUNS):
            executor.replay()
    return median(run.end - run.start for run in trace.runs), measured(plan, trace)


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
