"""Compare the speed of hocket and llama.cpp on the same files, for prefill and decode.

``python benchmarks/comparison/vs_llama_cpp.py --llama-python PYTHON MODEL.gguf ...`` runs llama.cpp through
llama-cpp-python in another interpreter; ``--llama-bench PATH`` runs that program instead. In both cases llama.cpp
should be built from source on this machine. Each side is a process of its own and idles while the other side runs. The
sides alternate; the script prints medians of speeds, and medians of the ratios of adjacent runs, because the speed of a
shared machine changes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import TracebackType

from hocket.benchmarks import results_file as results

HERE = Path(__file__).parent
SpeedTest = dict[str, str | int]


def format_test_name(test: SpeedTest) -> str:
    """Return the name of a test as in llama-bench, for example ``pp512 @ d1024``."""
    return f"{test['kind']}{test['tokens']}" + (f" @ d{test['depth']}" if test["depth"] else "")


class ModelWorker:
    """A process that has loaded a model and runs the tests that it receives."""

    def __init__(self, python: str, script: str, model: Path, threads: int, context: int) -> None:
        command = [python, str(HERE / script), str(model), str(threads), str(context)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._read_answer()

    def measure_seconds(self, test: SpeedTest) -> float:
        """Run a test in the process, and return its seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(test) + "\n")
        self.process.stdin.flush()
        return self._read_answer()

    def _read_answer(self) -> object:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self.process.args)} ended with exit code {self.process.wait()}")
        return json.loads(line)

    def __enter__(self) -> ModelWorker:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.stdin.close()
        self.process.wait()


class LlamaBench:
    """The program llama-bench, which is started for every run."""

    def __init__(self, path: str, model: Path, threads: int) -> None:
        self.command = [path, "-m", str(model), "-t", str(threads), "-r", "1", "-fa", "1", "-o", "json"]
        self.about: dict[str, object] = {}

    def measure_seconds(self, test: SpeedTest) -> float:
        """Run llama-bench for a test, and return its average seconds."""
        counts = (
            ("-p", str(test["tokens"]), "-n", "0") if test["kind"] == "pp" else ("-p", "0", "-n", str(test["tokens"]))
        )
        command = [*self.command, *counts, "-d", str(test["depth"])]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        (report,) = json.loads(done.stdout)
        self.about = {"version": f"llama-bench, build {report['build_number']}, commit {report['build_commit']}"}
        return report["avg_ns"] / 1e9

    def __enter__(self) -> LlamaBench:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing; no process is left."""


def compare_speeds(
    args: argparse.Namespace, model: Path, threads: int, tests: list[SpeedTest]
) -> Iterator[dict[str, object]]:
    """Yield one result row for each test."""
    context = max(int(t["tokens"]) + int(t["depth"]) for t in tests)
    with ExitStack() as stack:
        ours = stack.enter_context(ModelWorker(sys.executable, "worker_hocket.py", model, threads, context))
        if args.llama_bench:
            theirs = stack.enter_context(LlamaBench(args.llama_bench, model, threads))
        else:
            theirs = stack.enter_context(ModelWorker(args.llama_python, "worker_llama_cpp.py", model, threads, context))
        for test in tests:
            for side in (ours, theirs):
                side.measure_seconds(test)  # to warm up
            pairs = [(ours.measure_seconds(test), theirs.measure_seconds(test)) for _ in range(args.rounds)]
            rates = [[test["tokens"] / s for s in side] for side in zip(*pairs, strict=True)]
            row: dict[str, object] = {"model": model.name, "threads": threads, "test": format_test_name(test)}
            row |= {"hocket": median(rates[0]), "llama_cpp": median(rates[1])}
            ratio = median(their / our for our, their in pairs)
            row |= {"ratio": ratio, "best_ratio": max(rates[0]) / max(rates[1])}
            yield row | {"hocket_samples": rates[0], "llama_cpp_samples": rates[1], "llama": theirs.about}


HEAD = ("model", "threads", "test", "hocket tok/s", "llama.cpp tok/s", "ratio", "ratio of the best runs")


def format_cells(row: dict[str, object]) -> list[str]:
    sides = [
        f"{row[side]:.1f} [{min(row[side + '_samples']):.1f}..{max(row[side + '_samples']):.1f}]"
        for side in ("hocket", "llama_cpp")
    ]
    return [row["model"], str(row["threads"]), row["test"], *sides, f"{row['ratio']:.2f}", f"{row['best_ratio']:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    other = parser.add_mutually_exclusive_group(required=True)
    other.add_argument("--llama-python", metavar="PATH", help="an interpreter that has llama-cpp-python")
    other.add_argument("--llama-bench", metavar="PATH", help="the program of that name")
    parser.add_argument("-p", type=int, default=512, help="tokens of the prompt (512)")
    parser.add_argument("-n", type=int, default=128, help="new tokens (128)")
    parser.add_argument("-d", type=int, default=0, help="tokens before what is timed (0)")
    parser.add_argument("-t", default="1,2", help="numbers of threads (1,2)")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--shared", action="store_true", help="say that others used the machine meanwhile")
    parser.add_argument("--save", type=Path, metavar="STEM", help="write STEM.json and STEM.md")
    args = parser.parse_args()
    tests: list[SpeedTest] = [
        {"kind": k, "tokens": n, "depth": args.d} for k, n in (("tg", args.n), ("pp", args.p)) if n
    ]
    rows: list[dict[str, object]] = []
    print(results.format_table(HEAD, []), end="")
    about = results.collect_circumstances(args.shared)
    for model in args.models:
        for threads in map(int, args.t.split(",")):
            for row in compare_speeds(args, model, threads, tests):
                print(f"| {' | '.join(format_cells(row))} |", flush=True)
                rows.append(row)
                if args.save:
                    results.write_result(
                        args.save, about, rows, results.format_table(HEAD, list(map(format_cells, rows)))
                    )


if __name__ == "__main__":
    main()
