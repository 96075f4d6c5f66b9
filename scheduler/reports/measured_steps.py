"""Measured times of the steps of a plan, from a trace of this plan or of a plan with equal steps and other shapes."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...graph.errors import PlanError, format_count
from ..ir.execution_plan import Plan
from ..runtime.trace import Trace
from .perfetto_trace import (
    FIRST_DEVICE_PROCESS,
    MICROSECONDS_PER_SECOND,
    TRACE_FORMAT,
    format_chrome_trace,
    format_first_result_spec,
)

MAX_TRACE_BYTES = 1 << 30
"""Maximum bytes of a trace document after unpacking."""


@dataclass(frozen=True, slots=True)
class MeasuredInstruction:
    """The measured time of one instruction in traced runs.

    - `kernel`: the names of the kernels that run it.
    - `seconds`: the median seconds of the kernel. Instructions of one kernel share them in proportion to their
      predicted seconds.
    - `steps_in_kernel`: the number of instructions that the kernel runs.
    """

    kernel: str
    seconds: float
    steps_in_kernel: int


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """The measured seconds of each instruction of a plan, from a trace of its runs.

    `steps_by_device` has for each device the measured step of each instruction, by position. It is None for an
    instruction that no kernel runs.
    """

    label: str
    run_count: int
    median_run_seconds: float
    """The median seconds of a run."""
    has_equal_shapes: bool
    """Whether all shapes equal the shapes of the plan. They may differ, for example with a shorter context."""
    steps_by_device: tuple[tuple[MeasuredInstruction | None, ...], ...]


def read_measured_times_from_trace(plan: Plan, trace: Trace | str | Path) -> MeasuredPlan:
    """Return the measured time of each instruction of a plan, from a trace or a trace file.

    Raises:
        PlanError: If the file is not a trace, or has no run of a plan with the same steps.
        OSError: If the file cannot be read.
    """
    if isinstance(trace, Trace):
        return _match_trace_with_plan(plan, json.loads("".join(format_chrome_trace(trace))))
    try:
        return _match_trace_with_plan(plan, _read_trace_file(trace))
    except PlanError as why:
        raise PlanError(f"{trace}: {why}") from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError):
        raise PlanError(f"{trace}: is no trace of hocket; write one with `hocket run --trace`") from None


def _read_trace_file(path: str | Path) -> Any:
    """Read the JSON document of a trace file, which may be gzipped."""
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            data = file.read(MAX_TRACE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise PlanError("is damaged: it does not unpack") from None
    if len(data) > MAX_TRACE_BYTES:
        raise PlanError(f"has more than {MAX_TRACE_BYTES} bytes; trace fewer runs")
    return json.loads(data)


def _match_trace_with_plan(plan: Plan, document: Mapping[str, Any]) -> MeasuredPlan:
    """Return the measured times of a plan from a trace document, which may have runs of several plans.

    The plan in the trace must have the same ops and nodes. If several have, the plan with the most equal shapes is
    taken.
    """
    about = document["otherData"]
    if about["format"] != TRACE_FORMAT:
        raise PlanError(f"is a trace in the format {about['format']!s:.40}; this version reads {TRACE_FORMAT}")
    known = [_compute_equal_shape_instruction_share(plan, other["steps"]) for other in about["plans"]]
    if not any(known):
        raise PlanError(
            f"none of its {format_count(len(known), 'plan')} has the steps of this one; trace the same devices "
            "and split"
        )
    number = known.index(best := max(known))
    events = [e for e in document["traceEvents"] if e["ph"] == "X" and e["args"]["plan"] == number]
    runs = [_read_event_microseconds(e) for e in events if e["cat"] == "run"]
    taken: dict[tuple[int, tuple[int, ...]], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for e in events:
        if e["cat"] != "run":
            key = int(e["pid"]) - FIRST_DEVICE_PROCESS, tuple(map(int, e["args"]["steps"]))
            taken[key][str(e["args"]["kernel"])].append(_read_event_microseconds(e))
    devices: list[list[MeasuredInstruction | None]] = [
        [None] * len(device_plan.program.instructions) for device_plan in plan.device_plans
    ]
    for (device, steps), kernels in taken.items():
        seconds = sum(median(each) * len(each) for each in kernels.values()) / len(runs) / MICROSECONDS_PER_SECOND
        costs = [plan.instruction_costs[device].get_cost(step).seconds for step in steps]
        for step, cost in zip(steps, costs, strict=True):
            share = cost / sum(costs) if sum(costs) else 1 / len(steps)
            devices[device][step] = MeasuredInstruction(" ".join(kernels), seconds * share, len(steps))
    exact = best == 1.0
    label = str(about["plans"][number]["label"])
    return MeasuredPlan(label, len(runs), median(runs) / MICROSECONDS_PER_SECOND, exact, tuple(map(tuple, devices)))


def _read_event_microseconds(event: Mapping[str, Any]) -> float:
    """Return the duration of a trace event in microseconds. Raises `ValueError` if it is negative or not finite."""
    lasted = float(event["dur"])
    if not 0 <= lasted < math.inf:
        raise ValueError("a time must be finite")
    return lasted


def _compute_equal_shape_instruction_share(plan: Plan, steps: Sequence[Sequence[Sequence[str]]]) -> float:
    """Return the fraction of instructions with equal shapes in a plan and in a trace; 0 if ops or nodes differ."""
    own = [
        [(i.op, i.node, format_first_result_spec(i)) for i in device_plan.program.instructions]
        for device_plan in plan.device_plans
    ]
    theirs = [[(op, node, spec) for op, node, spec in program] for program in steps]
    if [[s[:2] for s in program] for program in own] != [[s[:2] for s in program] for program in theirs]:
        return 0.0
    pairs = [(a, b) for mine, other in zip(own, theirs, strict=True) for a, b in zip(mine, other, strict=True)]
    return (1 + sum(a == b for a, b in pairs)) / (1 + len(pairs))
