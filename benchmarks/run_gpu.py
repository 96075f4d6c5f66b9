"""Measure a GPU in one run: the limits of the device, the correctness of hocket on it, and the speed of hocket.

    python benchmarks/run_gpu.py [PART ...] --seconds 540 --save STEM [--model FILE.gguf]

Parts run one after the other, each in its own process and for at most its share of the remaining time. Rows are printed
and saved as they arrive. If a case raises, hangs or breaks the device, its row says so, and a new process continues
with the next case of the part. All parts together are meant for 20 minutes (``--seconds 1200``), or 30 minutes with
several GPUs. A machine with less time gets some of the parts, for example ``device compile delta-decode delta-prefill
delta-crossover``, or some of their cases (``--cases REGEX``).

``--minutes 10``, ``20`` or ``30`` measures the most important cases first, other libraries among them
(``benchmarks/gpu/time_plan.py``). ``--resume STEM.json`` continues an earlier run: it skips the cases that have ended
and tries those again that were left out. A plan of 30 minutes in calls of 10 minutes:

    python benchmarks/run_gpu.py --minutes 30 --seconds 570 --save out/first
    python benchmarks/run_gpu.py --minutes 30 --seconds 570 --save out/second --resume out/first.json

``--kind cuda-emulated --tiny`` runs every part on the processor of this machine with the smallest sizes; its times mean
nothing. A plan then runs all cases of its parts, because their titles have other sizes.

The machine needs hocket, CuPy, NVRTC and the package ``gguf``. hocket must be installed, because backends are found by
their entry points (without a network: ``pip install --no-deps --no-build-isolation -e .``). Other libraries are
compared if they are installed: PyTorch, flash-linear-attention, FlashInfer, and llama.cpp (``--llama FOLDER``). The
part ``counters`` needs ``ncu`` of Nsight Compute.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from hocket.backends import find_device
from hocket.benchmarks import kernel_candidates
from hocket.benchmarks import results_file as results
from hocket.benchmarks.finished_cases import STATE_CASE, BenchmarkRecord, RecordError, read_record
from hocket.benchmarks.gpu import (
    attention,
    compare_predictions,
    correctness,
    delta_net,
    device_limits,
    hardware_counters,
    llama_cpp,
    matmul,
    models,
    other_libraries,
    several_devices,
)
from hocket.benchmarks.gpu.harness import BenchmarkDevice, Case, NothingToMeasure, ResultRow
from hocket.benchmarks.gpu.machine import make_machine
from hocket.benchmarks.gpu.time_plan import RESERVED_SECONDS, TIME_PLANS, PlanStep, compute_step_seconds
from hocket.graph.errors import BackendError


@dataclass(frozen=True)
class BenchmarkPart:
    """One part of the benchmark, such as the conformance cases.

    Its share of the remaining time is `weight` relative to the parts that follow. One case may take `limit` seconds.
    Its processes have the variables of `environment`, unless the caller has set them.
    """

    cases: Callable[[BenchmarkDevice], Iterator[Case]]
    weight: float
    limit: float = 60.0
    environment: tuple[tuple[str, str], ...] = ()


SEVERAL_STREAMS = (("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("NCCL_MULTI_RANK_GPU_ENABLE", "1"))
"""Variables for parts of one device: streams with hardware queues of their own, and NCCL with several ranks on it."""
STARTUP_SECONDS = 120.0
"""Seconds in which a process must reach its first case."""
PARTS = {
    "device": BenchmarkPart(device_limits.make_device_cases, 1),
    "compile": BenchmarkPart(device_limits.make_compile_cases, 3, 300.0),
    "delta-decode": BenchmarkPart(delta_net.make_decode_cases, 3),
    "delta-prefill": BenchmarkPart(delta_net.make_prefill_cases, 3),
    "delta-crossover": BenchmarkPart(delta_net.make_crossover_cases, 2),
    "products": BenchmarkPart(matmul.make_matmul_cases, 4),
    "attention": BenchmarkPart(attention.make_attention_cases, 3),
    "candidates": BenchmarkPart(kernel_candidates.make_candidate_cases, 2, 120.0),
    "models": BenchmarkPart(models.make_model_cases, 6, 150.0),
    "sharded": BenchmarkPart(several_devices.make_sharded_cases, 3, 180.0, SEVERAL_STREAMS),
    "fixtures": BenchmarkPart(correctness.make_fixture_cases, 2),
    "conformance": BenchmarkPart(correctness.make_conformance_cases, 5, 120.0),
    "peers": BenchmarkPart(other_libraries.make_peer_cases, 4, 120.0),
    "llama.cpp": BenchmarkPart(llama_cpp.make_llama_cpp_cases, 2, 540.0),
    "counters": BenchmarkPart(hardware_counters.make_counter_cases, 2, 180.0),
}

# ---------------------------------------------------------------------------------------- one part, in its process


@dataclass(frozen=True)
class CaseSelection:
    """The cases of a part to run: from index `first` on, with a title that matches, except the cases in `ended`."""

    first: int = 0
    pattern: str = ""
    ended: frozenset[str] = frozenset()

    def __contains__(self, case: tuple[int, str]) -> bool:
        number, title = case
        return number >= self.first and title not in self.ended and re.search(self.pattern, title) is not None


ALL_CASES = CaseSelection()


def run_part(part: BenchmarkPart, bench: BenchmarkDevice, selection: CaseSelection = ALL_CASES) -> Iterator[ResultRow]:
    """Run the selected cases of a part, and yield their rows; stop after a case that raised.

    A case that raised may have broken the device. Rows with ``begins``, ``ended`` and ``ends`` report the progress.
    """
    for number, case in enumerate(part.cases(bench)):
        if (number, case.title) not in selection:
            continue
        yield {"begins": number, "case": case.title}
        outcome, start = "measured", time.monotonic()
        try:
            for row in case.rows():
                yield {"case": case.title, **row}
        except NothingToMeasure as why:
            yield {"case": case.title, "left out": str(why)}
            outcome = "left out"
        except Exception as why:  # a case may raise anything; its row says so, and the next case follows
            yield {"case": case.title, "error": f"{type(why).__name__}: {' '.join(str(why).split())}"}
            outcome = "failed"
        yield {"ended": outcome, "case": case.title, "seconds": time.monotonic() - start}
        if outcome == "failed":
            return
        bench.machine.release_memory()
    yield {"ends": bench.machine.read_state()}


def make_benchmark_device(args: argparse.Namespace, folder: str) -> BenchmarkDevice:
    """Build the device to measure from the command line. Raises `BackendError` if there is no such device."""
    backend, on = find_device(args.kind)
    driver = backend.driver
    options = {"models": args.model, "folder": folder, "llama": args.llama}
    return BenchmarkDevice(driver, make_machine(driver, on), on, tiny=args.tiny, **options)


def run_worker(args: argparse.Namespace) -> None:
    """Run one part in this process, and print its rows as lines of JSON.

    Libraries may print too; their text goes to the errors.
    """
    rows = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        selection = CaseSelection(args.work, args.cases, frozenset(json.loads(args.skip)))
        for row in run_part(PARTS[args.parts[0]], make_benchmark_device(args, folder), selection):
            print(json.dumps(row, default=str), flush=True, file=rows)


# ------------------------------------------------------------------------------------------------- all of the parts


class PartWorker:
    """A process that runs a part from one case on, with threads that read its output and its errors."""

    def __init__(self, words: list[str], name: str, first: int) -> None:
        command = [sys.executable, __file__, name, "--work", str(first), *words]
        variables = {**dict(PARTS[name].environment), **os.environ}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=variables,
            start_new_session=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.error_lines: list[str] = []
        self.threads = [threading.Thread(target=self._collect_rows), threading.Thread(target=self._collect_errors)]
        for thread in self.threads:
            thread.start()

    def _collect_rows(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def _collect_errors(self) -> None:
        assert self.process.stderr is not None
        self.error_lines.extend(self.process.stderr)

    def next_row(self, seconds: float) -> ResultRow | None:
        """Return the next row, or None after the last one. Raises `queue.Empty` after `seconds` without a row."""
        line = self.lines.get(timeout=max(0.0, seconds))
        return json.loads(line) if line else None

    def describe_end(self) -> str:
        """Wait for the end of the process, and return its last line of errors, or its exit code.

        Processes that it started, such as compilers, are killed: they would keep its pipes open.
        """
        code = self.process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for thread in self.threads:
            thread.join()
        return self.error_lines[-1].strip() if self.error_lines else f"exit code {code}"

    def __enter__(self) -> PartWorker:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.describe_end()
        for pipe in (self.process.stdout, self.process.stderr):
            pipe.close()


def run_part_in_processes(name: str, words: list[str], until: float) -> Iterator[ResultRow]:
    """Run a part until the time `until`, with a new process after each case that failed, and yield its rows.

    Rows with ``ended`` report the outcome of a case, and the row with ``ends`` reports that no case is left.
    """
    following: int | None = 0
    while following is not None:
        following = yield from run_part_in_process(name, words, until, following)


def run_part_in_process(
    name: str, words: list[str], until: float, first: int
) -> Generator[ResultRow, None, int | None]:
    """Run a part in one process, and yield its rows; return the index of the case for the next process, or None.

    Args:
        name: The name of the part.
        words: Flags of the command line for the process.
        until: The end of the part on the monotonic clock, in seconds.
        first: The index of the first case.
    """
    limit, case, following, start = STARTUP_SECONDS, "start", None, time.monotonic()
    with PartWorker(words, name, first) as worker:
        while True:
            try:
                row = worker.next_row(min(limit, until - time.monotonic()))
                error = "" if row is not None else f"the process ended: {worker.describe_end()}"
            except queue.Empty:
                if time.monotonic() >= until:
                    yield {"case": case, "left out": "the time of the part is over"}
                    return None
                row, error = None, f"nothing for {limit:g} s"
            if row is None:
                yield {"case": case, "error": error}
                if following is not None:
                    yield {"ended": "failed", "case": case, "seconds": time.monotonic() - start}
                return following
            match row:
                case {"begins": int(number), "case": str(case)}:
                    limit, following, start = PARTS[name].limit, number + 1, time.monotonic()
                case {"ended": outcome}:
                    yield row
                    if outcome == "failed":
                        return following
                case {"ends": _}:
                    yield row
                    return None
                case _:
                    yield row


def format_cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_tables(rows: list[ResultRow]) -> str:
    """Return a section in Markdown for each part, and a list of wrong predictions."""
    text = ""
    for name in dict.fromkeys(str(row["part"]) for row in rows):
        own_rows = [{k: v for k, v in row.items() if k != "part"} for row in rows if row["part"] == name]
        text += format_section(name, own_rows)
    lines = "".join(f"- {line}\n" for line in compare_predictions.list_wrong_predictions(rows))
    return text + (f"## Wrong predictions\n\n{lines}" if lines else "")


def format_section(name: str, rows: list[ResultRow]) -> str:
    """Return a heading, a table with a column for each key of the measurements, and a list of the other rows."""
    measurements = [row for row in rows if not is_note(row)]
    head = list(dict.fromkeys(k for row in measurements for k in row))
    text = f"## {name}\n\n"
    if measurements:
        cells = [[format_cell(row.get(k, "")) for k in head] for row in measurements]
        text += f"{results.format_table(head, cells)}\n"
    notes = "".join(f"{format_note(row)}\n" for row in rows if is_note(row))
    return text + (f"{notes}\n" if notes else "")


def is_note(row: ResultRow) -> bool:
    """Return whether a row is the state of the device, an error, or the load of a model."""
    cases, steps = ("device", STATE_CASE), ("loaded", "written")
    return row["case"] in cases or row.get("step") in steps or bool({"left out", "error"} & row.keys())


def format_note(row: ResultRow) -> str:
    """Return a row as an item of a Markdown list."""
    facts = ", ".join(f"{k} {format_cell(v)}" for k, v in row.items() if k != "case")
    return textwrap.fill(f"- {row['case']}: `{facts}`", 120, subsequent_indent="  ", break_on_hyphens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (all, in this order)")
    parser.add_argument("--kind", default="cuda", help="the device: cuda, cuda:1, hip, cuda-emulated (cuda)")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes of everything")
    parser.add_argument("--cases", default="", metavar="REGEX", help="only the cases with such titles")
    parser.add_argument("--minutes", type=int, choices=TIME_PLANS, help="the most important cases first, in this time")
    parser.add_argument("--seconds", type=float, help="for all parts together (1200, or the minutes)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue the run that saved this JSON file")
    parser.add_argument("--retry", action="store_true", help="with --resume: run failed cases again")
    parser.add_argument(
        "--model", type=Path, action="append", default=[], metavar="FILE", help="a GGUF file; repeatable"
    )
    parser.add_argument("--llama", type=Path, metavar="PATH", help="llama.cpp: programs, or a source to build (PATH)")
    parser.add_argument("--scratch", metavar="FOLDER", help="where random models are written (the system's)")
    parser.add_argument("--shared", action="store_true", help="say that others used the machine meanwhile")
    parser.add_argument("--commit", help="what is measured, where there is no git to tell")
    parser.add_argument("--save", type=Path, metavar="STEM", help="write STEM.json and STEM.md")
    parser.add_argument("--work", type=int, metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--skip", default="[]", metavar="JSON", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if args.minutes and (args.parts or args.cases):
        parser.error("--minutes chooses the parts and their cases; leave out PART and --cases")
    try:
        re.compile(args.cases)
    except re.error as why:
        parser.error(f"--cases {args.cases!r} is no regular expression: {why}")
    try:
        run_worker(args) if args.work is not None else run_steps(args)
    except (BackendError, RecordError) as why:
        sys.exit(f"run_gpu.py: {why}")


def make_record(args: argparse.Namespace) -> BenchmarkRecord:
    """Make the record of this run, with the finished cases of the run that it continues.

    Raises:
        BackendError: There is no such device.
        RecordError: The file of the earlier run is unusable.
    """
    _, on = find_device(args.kind)
    about = {**results.collect_circumstances(args.shared), "device": args.kind, "tiny": args.tiny}
    about |= {"gpu": on.description, **({"commit": args.commit} if args.commit else {})}
    record = BenchmarkRecord(about)
    if args.resume:
        record.continue_run(read_record(args.resume))
        if args.retry:
            record.forget_failures()
    return record


def choose_steps(args: argparse.Namespace) -> tuple[PlanStep, ...]:
    """Return the steps of the time plan, or one step for each part."""
    if args.minutes:
        return (
            tuple(replace(step, cases="") for step in TIME_PLANS[args.minutes])
            if args.tiny
            else TIME_PLANS[args.minutes]
        )
    return tuple(PlanStep(name, PARTS[name].weight, args.cases) for name in args.parts or PARTS)


def run_steps(args: argparse.Namespace) -> None:
    """Run all steps, and print and save their rows after each one.

    Raises:
        BackendError: There is no such device.
        RecordError: The file of the earlier run is unusable.
    """
    record = make_record(args)
    words = ["--kind", args.kind, *["--tiny"] * args.tiny, *(w for m in args.model for w in ("--model", str(m)))]
    words += [w for flag, at in (("--scratch", args.scratch), ("--llama", args.llama)) if at for w in (flag, str(at))]
    begin, before = time.monotonic(), record.used_seconds
    whole = 60.0 * args.minutes - RESERVED_SECONDS - before if args.minutes else 0.0
    seconds = args.seconds if args.seconds is not None else whole if args.minutes else 1200.0
    end, plan_end = begin + seconds, begin + max(whole, seconds)
    left = tuple(step for step in choose_steps(args) if (step.part, step.cases) not in record.finished_steps)
    while left:
        step, now = left[0], time.monotonic()
        if now >= end:
            print(f"\nthe time is over; {len(left)} parts are left, continue with --resume")
            break
        budget = min(end - now, compute_step_seconds(left, plan_end - now))
        left = left[1:]
        title = f"{step.part} ({step.cases})" if step.cases else step.part
        print(f"\n{title}, {max(0.0, budget):.0f} s at most", flush=True)
        own = [*words, f"--cases={step.cases}", "--skip", json.dumps(record.list_ended_cases(step.part))]
        for row in run_part_in_processes(step.part, own, now + budget):
            record.used_seconds = before + time.monotonic() - begin
            record_row(record, step, row)
            if args.save:
                record.save(args.save, format_tables(record.rows))
    if args.save:
        record.save(args.save, format_tables(record.rows))
    for line in compare_predictions.list_wrong_predictions(record.rows):
        print(line)


def record_row(record: BenchmarkRecord, step: PlanStep, row: ResultRow) -> None:
    """Add a row of a step to the record: a result, the end of a case, or the end of the step. Print results."""
    match row:
        case {"ended": str(outcome), "case": str(case), "seconds": float(seconds)}:
            own = [r for r in record.rows if (r["part"], r["case"]) == (step.part, case)]
            reason = str(own[-1].get("error") or own[-1].get("left out") or "") if own else ""
            record.add_end(step.part, case, outcome, seconds, reason)
            return
        case {"ends": dict(state)}:
            if record.is_whole(step.part):
                record.finished_steps.add((step.part, step.cases))
            if not state:
                return
            row = {"case": STATE_CASE, **state}
    record.rows.append({"part": step.part, **row})
    cells = (str(v) if k == "case" else f"{k} {format_cell(v)}" for k, v in row.items())
    print("  " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
