"""Measure a GPU in one run: the limits of the device, the correctness of hocket on it, and the speed of hocket.

    python benchmarks/run_gpu.py [PART ...] --seconds 540 --save STEM [--model FILE.gguf]

Parts run one after the other, each in its own process and for at most its share of the remaining time. Rows are printed
and saved as they arrive. If a case raises, hangs or breaks the device, its row says so, and a new process continues
with the next case of the part. All parts together are meant for 20 minutes (``--seconds 1200``), or 30 minutes with
several GPUs. A machine with less time gets some of the parts, for example ``device compile delta-decode delta-prefill
delta-crossover``.

``--kind cuda-emulated --tiny`` runs every part on the processor of this machine with the smallest sizes; its times mean
nothing. The machine needs hocket, CuPy, NVRTC and the package ``gguf``. hocket must be installed, because backends are
found by their entry points (without a network: ``pip install --no-deps --no-build-isolation -e .``). Other libraries
are compared if they are installed: PyTorch, flash-linear-attention, FlashInfer, and llama.cpp (``--llama FOLDER``).
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hocket.backends import find_device
from hocket.benchmarks import results_file as results
from hocket.benchmarks.gpu import (
    attention,
    compare_predictions,
    correctness,
    delta_net,
    device_limits,
    llama_cpp,
    matmul,
    models,
    other_libraries,
    several_devices,
)
from hocket.benchmarks.gpu.harness import BenchmarkDevice, Case, NothingToMeasure, ResultRow
from hocket.benchmarks.gpu.machine import make_machine
from hocket.graph.errors import BackendError


@dataclass(frozen=True)
class BenchmarkPart:
    """One part of the benchmark, such as the conformance cases.

    Its share of the remaining time is `weight` relative to the parts that follow. One case may take `limit` seconds.
    """

    cases: Callable[[BenchmarkDevice], Iterator[Case]]
    weight: float
    limit: float = 60.0


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
    "models": BenchmarkPart(models.make_model_cases, 6, 150.0),
    "sharded": BenchmarkPart(several_devices.make_sharded_cases, 3, 120.0),
    "fixtures": BenchmarkPart(correctness.make_fixture_cases, 2),
    "conformance": BenchmarkPart(correctness.make_conformance_cases, 5, 120.0),
    "peers": BenchmarkPart(other_libraries.make_peer_cases, 4, 120.0),
    "llama.cpp": BenchmarkPart(llama_cpp.make_llama_cpp_cases, 2, 300.0),
}

# ---------------------------------------------------------------------------------------- one part, in its process


def run_part(part: BenchmarkPart, bench: BenchmarkDevice, first: int = 0) -> Iterator[ResultRow]:
    """Run all cases of a part from index `first` on, and yield their rows; stop after a case that raised.

    A case that raised may have broken the device. Rows with ``begins``, ``fails`` and ``ends`` report the progress.
    """
    kind = compare_predictions.find_gpu_kind(str(bench.machine.describe_device()["gpu"]))
    for number, case in enumerate(part.cases(bench)):
        if number < first:
            continue
        yield {"begins": number, "case": case.title}
        try:
            for row in case.rows():
                yield {"case": case.title, **compare_predictions.with_prediction(row, case.title, kind)}
        except NothingToMeasure as why:
            yield {"case": case.title, "left out": str(why)}
        except Exception as why:  # a case may raise anything; its row says so, and the next case follows
            yield {"case": case.title, "error": f"{type(why).__name__}: {' '.join(str(why).split())}"}
            yield {"fails": number}
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
    """Run one part in this process, and print its rows as lines of JSON."""
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        for row in run_part(PARTS[args.parts[0]], make_benchmark_device(args, folder), args.work):
            print(json.dumps(row, default=str), flush=True)


# ------------------------------------------------------------------------------------------------- all of the parts


class PartWorker:
    """A process that runs a part from one case on, with threads that read its output and its errors."""

    def __init__(self, words: list[str], name: str, first: int) -> None:
        command = [sys.executable, __file__, name, "--work", str(first), *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
        """Wait for the end of the process, and return its last line of errors, or its exit code."""
        code = self.process.wait()
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
    """Run a part until the time `until`, with a new process after each case that failed, and yield its rows."""
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
    limit, case, following = STARTUP_SECONDS, "start", None
    with PartWorker(words, name, first) as worker:
        while True:
            try:
                row = worker.next_row(min(limit, until - time.monotonic()))
            except queue.Empty:
                over = time.monotonic() >= until
                why = {"left out": "the time of the part is over"} if over else {"error": f"nothing for {limit:g} s"}
                yield {"case": case, **why}
                return None if over else following
            if row is None:
                yield {"case": case, "error": f"the process ended: {worker.describe_end()}"}
                return following
            match row:
                case {"begins": int(number), "case": str(case)}:
                    limit, following = PARTS[name].limit, number + 1
                case {"fails": _}:
                    return following
                case {"ends": state}:
                    if state:
                        yield {"case": "at the end", **state}
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
    cases, steps = ("device", "at the end"), ("loaded", "written")
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
    parser.add_argument("--seconds", type=float, default=1200.0, help="for all parts together (1200)")
    parser.add_argument(
        "--model", type=Path, action="append", default=[], metavar="FILE", help="a GGUF file; repeatable"
    )
    parser.add_argument("--llama", type=Path, metavar="FOLDER", help="where llama.cpp's test-backend-ops is (PATH)")
    parser.add_argument("--scratch", metavar="FOLDER", help="where random models are written (the system's)")
    parser.add_argument("--shared", action="store_true", help="say that others used the machine meanwhile")
    parser.add_argument("--commit", help="what is measured, where there is no git to tell")
    parser.add_argument("--save", type=Path, metavar="STEM", help="write STEM.json and STEM.md")
    parser.add_argument("--work", type=int, metavar="CASE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    try:
        run_worker(args) if args.work is not None else run_parts(args)
    except BackendError as why:
        sys.exit(f"gpu.py: {why}")


def run_parts(args: argparse.Namespace) -> None:
    """Run all parts, and print and save their rows. Raises `BackendError` if there is no such device."""
    find_device(args.kind)
    words = ["--kind", args.kind, *["--tiny"] * args.tiny, *(w for m in args.model for w in ("--model", str(m)))]
    words += [w for flag, at in (("--scratch", args.scratch), ("--llama", args.llama)) if at for w in (flag, str(at))]
    about, rows = {**results.collect_circumstances(args.shared), "device": args.kind, "tiny": args.tiny}, []
    about |= {"commit": args.commit} if args.commit else {}
    end, left = time.monotonic() + args.seconds, list(args.parts or PARTS)
    while left:
        share = PARTS[left[0]].weight / sum(PARTS[name].weight for name in left)
        name, now = left.pop(0), time.monotonic()
        print(f"\n{name}, {max(0.0, (end - now) * share):.0f} s at most", flush=True)
        for row in run_part_in_processes(name, words, now + (end - now) * share):
            rows.append({"part": name, **row})
            print(
                "  " + ", ".join(f"{k} {format_cell(v)}" if k != "case" else str(v) for k, v in row.items()), flush=True
            )
            if args.save:
                results.write_result(args.save, about, rows, format_tables(rows))
    for line in compare_predictions.list_wrong_predictions(rows):
        print(line)


if __name__ == "__main__":
    main()
