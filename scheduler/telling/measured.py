"""The measured times of a plan's steps, from a trace of this plan or of a plan with the same steps and other shapes."""

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

from ...graph.errors import PlanError
from ..plan import Plan
from ..running.trace import Trace
from .perfetto import FIRST_DEVICE, FORMAT, MICRO, spec_text, trace_text

LARGEST = 1 << 30
"""Maximum bytes of an unpacked trace."""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction in the traced runs.

    `seconds` is its share of the median time of its kernel. The kernel runs `steps_in_kernel` instructions, and
    their estimates determine the shares.
    """

    kernel: str
    seconds: float
    together: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured steps of a plan, for each device by position; None for an instruction without a kernel."""

    label: str
    runs: int
    seconds: float
    """Seconds of the median run."""
    exact: bool
    """Whether all shapes equal the plan's shapes. They may differ, for example with a shorter context."""
    devices: tuple[tuple[Step | None, ...], ...]


def measured(plan: Plan, trace: Trace | str | Path) -> Measured:
    """Return the measured times of `plan` from a trace or a trace file.

    Raises:
        PlanError: If the file is not a trace, or has no run of a plan with the same steps.
        OSError: If the file cannot be read.
    """
    if isinstance(trace, Trace):
        return _measured(plan, json.loads("".join(trace_text(trace))))
    try:
        return _measured(plan, _read(trace))
    except PlanError as why:
        raise PlanError(f"{trace}: {why}") from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError):
        raise PlanError(f"{trace}: is no trace of hocket; write one with `hocket run --trace`") from None


def _read(path: str | Path) -> Any:
    """Read the JSON document of a trace file, gzipped or not."""
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            data = file.read(LARGEST + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise PlanError("is damaged: it does not unpack") from None
    if len(data) > LARGEST:
        raise PlanError(f"has more than {LARGEST} bytes; trace fewer runs")
    return json.loads(data)


def _measured(plan: Plan, document: Mapping[str, Any]) -> Measured:
    """Match a trace document with a plan and return the measured times of the plan's steps.

    The document may have several plans; the plan with the most equal shapes is taken.
    """
    about = document["otherData"]
    if about["format"] != FORMAT:
        raise PlanError(f"is a trace in the format {about['format']!s:.40}; this version reads {FORMAT}")
    known = [_likeness(plan, other["steps"]) for other in about["plans"]]
    if not any(known):
        raise PlanError(f"none of its {len(known)} plans has the steps of this one; trace the same devices and split")
    number = known.index(best := max(known))
    events = [e for e in document["traceEvents"] if e["ph"] == "X" and e["args"]["plan"] == number]
    runs = [_micro(e) for e in events if e["cat"] == "run"]
    taken: dict[tuple[int, tuple[int, ...]], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for e in events:
        if e["cat"] != "run":
            key = int(e["pid"]) - FIRST_DEVICE, tuple(map(int, e["args"]["steps"]))
            taken[key][str(e["args"]["kernel"])].append(_micro(e))
    devices: list[list[Step | None]] = [[None] * len(lane.program.instructions) for lane in plan.lanes]
    for (device, steps), kernels in taken.items():
        seconds = sum(median(each) * len(each) for each in kernels.values()) / len(runs) / MICRO
        costs = [plan.prices[device].of(step).seconds for step in steps]
        for step, cost in zip(steps, costs, strict=True):
            share = cost / sum(costs) if sum(costs) else 1 / len(steps)
            devices[device][step] = Step(" ".join(kernels), seconds * share, len(steps))
    exact = best == 1.0
    label = str(about["plans"][number]["label"])
    return Measured(label, len(runs), median(runs) / MICRO, exact, tuple(map(tuple, devices)))


def _micro(event: Mapping[str, Any]) -> float:
    """Return the duration of an event in microseconds."""
    lasted = float(event["dur"])
    if not 0 <= lasted < math.inf:
        raise ValueError("a time must be finite")
    return lasted


def _likeness(plan: Plan, steps: Sequence[Sequence[Sequence[str]]]) -> float:
    """Return the share of steps with equal shapes; 0 if the steps differ."""
    own = [[(i.op, i.node, spec_text(i)) for i in lane.program.instructions] for lane in plan.lanes]
    theirs = [[(op, node, spec) for op, node, spec in program] for program in steps]
    if [[s[:2] for s in program] for program in own] != [[s[:2] for s in program] for program in theirs]:
        return 0.0
    pairs = [(a, b) for mine, other in zip(own, theirs, strict=True) for a, b in zip(mine, other, strict=True)]
    return (1 + sum(a == b for a, b in pairs)) / (1 + len(pairs))
