"""Traces as JSON in the Chrome trace format, which Perfetto and speedscope open.

Every device is a process. Its first thread is the stream of its steps, and two counters show its memory. For each
collective, arrows go from the device that came last to the devices that waited for it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from ...backends.base import Instruction, Program
from ...backends.capabilities import TimedKernel
from ...graph.storage.files import replacing
from ...ops.collectives import find_collective_sequence_number
from ..ir.execution_plan import Plan
from ..runtime.trace import Trace, TracedRun
from .pass_dumps import compute_memory_and_last_use_by_step

TRACE_FORMAT = "hocket-trace-1"
"""The name and the version of the format of the metadata."""
STREAM_THREAD = 0
"""The thread of a device's steps. A backend has one stream for each device, or for each part of a device."""
HOST_PROCESS, FIRST_DEVICE_PROCESS = 1, 2
"""The process of the whole runs, and the process of the first device."""
MICROSECONDS_PER_SECOND = 1e6
"""Microseconds per second."""


def write_chrome_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace to a file in the Chrome trace format.

    A name that ends in ``.gz`` gives a gzipped file.

    Raises:
        OSError: The file cannot be written.
    """
    lines = (text.encode() for text in format_chrome_trace(trace))
    with replacing(path) as file:
        if str(path).endswith(".gz"):
            with gzip.GzipFile(Path(path).name, "wb", fileobj=file) as packed:
                packed.writelines(lines)
        else:
            file.writelines(lines)


def format_chrome_trace(trace: Trace) -> Iterator[str]:
    """Yield a trace in the Chrome trace format, as pieces of JSON text."""
    plans = list({id(run.plan): run.plan for run in trace.runs}.values())
    labels = {id(run.plan): run.label for run in reversed(trace.runs)}
    about = {
        "format": TRACE_FORMAT,
        "left_out": trace.dropped_runs,
        "plans": [_list_devices_and_instructions(p, labels[id(p)]) for p in plans],
    }
    yield f'{{"displayTimeUnit": "ns", "otherData": {_to_json(about)},\n"traceEvents": [\n'
    yield ",\n".join(_to_json(event) for event in _make_process_name_events(plans))
    events_by_plan = {id(plan): _PlanTraceEvents(plan, number) for number, plan in enumerate(plans)}
    arrows = count(1)
    first = trace.runs[0].start if trace.runs else 0.0
    for number, run in enumerate(trace.runs):
        yield from (
            f",\n{event}" for event in events_by_plan[id(run.plan)].format_run_events(run, number, first, arrows)
        )
    yield "\n]}\n"


def _list_devices_and_instructions(plan: Plan, label: str) -> dict[str, Any]:
    """Return the devices and the instructions of a plan; a reader of the trace recognises the plan by them."""
    steps = [
        [[i.op, i.node, format_first_result_spec(i)] for i in device_plan.program.instructions]
        for device_plan in plan.device_plans
    ]
    return {"label": label, "devices": [str(device_plan.device) for device_plan in plan.device_plans], "steps": steps}


def format_first_result_spec(i: Instruction) -> str:
    """Return the dtype and the shape of an instruction's first result as text; empty without a result."""
    return str(i.dst[0].spec) if i.dst else ""


def _to_json(event: object) -> str:
    return json.dumps(event, ensure_ascii=True, allow_nan=False)


def _compute_process_id(device: int) -> int:
    return device + FIRST_DEVICE_PROCESS


def _make_process_name_events(plans: Sequence[Plan]) -> Iterator[dict[str, Any]]:
    """Yield the trace events that name the processes (host and devices) and their threads."""
    yield _make_name_event("process_name", HOST_PROCESS, "hocket")
    yield _make_name_event("thread_name", HOST_PROCESS, "runs")
    names = {d: str(device_plan.device) for plan in plans for d, device_plan in enumerate(plan.device_plans)}
    for device, name in sorted(names.items()):
        yield _make_name_event("process_name", _compute_process_id(device), name)
        yield _make_name_event("thread_name", _compute_process_id(device), "stream 0")


def _make_name_event(what: str, pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": STREAM_THREAD, "args": {"name": name}}


class _PlanTraceEvents:
    """Formats the runs of one plan as trace events. Text that is equal in all runs is formatted only once."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan, self.number = plan, number
        self.live_bytes = [
            compute_memory_and_last_use_by_step(device_plan.program)[0] for device_plan in plan.device_plans
        ]
        self._constant_texts: dict[tuple[int, str, tuple[int, ...]], str] = {}

    def format_run_events(self, run: TracedRun, number: int, first: float, arrows: Iterator[int]) -> Iterator[str]:
        """Yield the trace events of one run as JSON texts: the run, its steps, memory counters and collectives.

        Args:
            run: The run.
            number: Number of the run in the trace.
            first: Start of the first run in seconds; all times are relative to it.
            arrows: Yields an unused number for each arrow between devices.
        """
        at = (run.start - first) * MICROSECONDS_PER_SECOND
        args = {"run": number, "plan": self.number}
        yield _to_json(
            _make_duration_event(
                HOST_PROCESS, run.label, "run", at, (run.end - run.start) * MICROSECONDS_PER_SECOND, args
            )
        )
        calls_by_collective: dict[int, list[tuple[int, float, float, bool]]] = {}
        for device, steps in enumerate(run.steps):
            program = self.plan.device_plans[device].program
            yield _to_json(
                _make_counter_event(
                    device, "weights and states", at, program.nbytes("weight") + program.nbytes("state")
                )
            )
            before = -1
            for step in steps:
                start, end = ((t - first) * MICROSECONDS_PER_SECOND for t in (step.start, step.end))
                when = f'"ts": {start:.3f}, "dur": {end - start:.3f}, "pid": {_compute_process_id(device)}'
                yield f"{{{when}, {self._format_event_constant_part(device, step)}"
                if (live := self.live_bytes[device][step.instruction_numbers[-1]]) != before:
                    before = live
                    yield _to_json(_make_counter_event(device, "compute memory", start, live))
                if (collective := _find_collective_of_step(program, step)) is not None:
                    came = calls_by_collective.setdefault(collective[0], [])
                    if came and came[-1][0] == device:  # several kernels run one collective
                        came[-1] = (device, came[-1][1], end, collective[1])
                    else:
                        came.append((device, start, end, collective[1]))
        for came in calls_by_collective.values():
            yield from _format_arrows_from_last_device(came, arrows)

    def _format_event_constant_part(self, device: int, step: TimedKernel) -> str:
        """Return the part of a step's JSON event that is equal in all runs; the times of a run are put before it."""
        key = device, step.kernel, step.instruction_numbers
        if key not in self._constant_texts:
            i = [self.plan.device_plans[device].program.instructions[n] for n in step.instruction_numbers]
            costs = [self.plan.instruction_costs[device].get_cost(n) for n in step.instruction_numbers]
            args = {
                "op": " ".join(each.op for each in i),
                "kernel": step.kernel,
                "shape": format_first_result_spec(i[-1]),
                "bytes": round(sum(c.nbytes + c.bytes_sent for c in costs)),
                "flop": round(sum(c.flops for c in costs)),
                "estimate_us": float(f"{sum(c.seconds for c in costs) * MICROSECONDS_PER_SECOND:.4g}"),
                "nodes": " ".join(each.node for each in i),
                "steps": list(step.instruction_numbers),
                "plan": self.number,
            }
            rest = {"ph": "X", "tid": STREAM_THREAD, "name": i[-1].node, "cat": i[-1].op, "args": args}
            self._constant_texts[key] = _to_json(rest)[1:]
        return self._constant_texts[key]


def _make_duration_event(
    pid: int, name: str, kind: str, start: float, lasts: float, args: dict[str, Any]
) -> dict[str, Any]:
    at = {"ts": round(start, 3), "dur": round(lasts, 3)}
    return {"ph": "X", "pid": pid, "tid": STREAM_THREAD, "name": name, "cat": kind, **at, "args": args}


def _make_counter_event(device: int, name: str, at: float, nbytes: int) -> dict[str, Any]:
    return {"ph": "C", "pid": _compute_process_id(device), "name": name, "ts": round(at, 3), "args": {"bytes": nbytes}}


def _find_collective_of_step(program: Program, step: TimedKernel) -> tuple[int, bool] | None:
    """Return the sequence number of the collective that a step runs, and whether the step only sends; else None."""
    for number in step.instruction_numbers:
        i = program.instructions[number]
        if (sequence := find_collective_sequence_number(i.op, i.attrs)) is not None:
            return sequence, i.op == "send"
    return None


def _format_arrows_from_last_device(
    calls: Sequence[tuple[int, float, float, bool]], numbers: Iterator[int]
) -> Iterator[str]:
    """Yield the arrows that show in a trace viewer for which device the others waited in a collective.

    They go from the sender of a message, or from the device that arrived last, to each of the other devices.

    Args:
        calls: For each device: its number, start, end, and whether it only sends.
        numbers: Yields an unused number for each arrow.
    """
    last = max(calls, key=lambda one: (one[3], one[1]))
    for device, start, end, _ in calls:
        if device == last[0]:
            continue
        arrow = {"name": "meeting", "cat": "meeting", "id": next(numbers), "tid": STREAM_THREAD}
        goes = (
            last[1] + (min(last[2], end) - last[1]) / 3
        )  # within both steps: an arrow belongs to the step in which it begins
        comes = (max(goes, start) + end) / 2
        yield _to_json({"ph": "s", "pid": _compute_process_id(last[0]), "ts": round(goes, 3), **arrow})
        yield _to_json({"ph": "f", "bp": "e", "pid": _compute_process_id(device), "ts": round(comes, 3), **arrow})
