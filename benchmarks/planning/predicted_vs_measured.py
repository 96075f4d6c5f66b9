"""Compare predicted with measured times of models on a CPU, while the speeds of the machine are measured repeatedly.

    python benchmarks/planning/predicted_vs_measured.py MODEL.gguf [...] [--save STEM]

The machine is measured once before and once after each run, as `hocket calibrate` does many times. A round repeats this
some times and takes the mean of the middle half. Therefore prediction and run have seen the same machine; on a shared
host the speeds change within a minute.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

from hocket.benchmarks.results_file import collect_circumstances, format_circumstances, format_table, write_result
from hocket.frontends.inference.device_group import ONE_DEVICE
from hocket.frontends.inference.session import Session
from hocket.frontends.measure_plan import draw_random_token_lists_endlessly, run_at_context_end
from hocket.frontends.open_model import open_model, open_session
from hocket.scheduler import Plan, plan_for_group
from hocket.scheduler.costs.speeds import Speeds
from hocket.scheduler.measurement.calibrate import PROBED_DTYPES, BoundCalibrationProbes, compute_trimmed_mean

HEAD = ("model", "tokens of a run", "predicted", "measured", "error", "errors of the rounds")
TURNS_PER_ROUND = 5
"""Turns in a round; each turn measures every run once."""


@dataclass
class ModelRun:
    """A run of a model: steps of `token_count` tokens at the end of a context."""

    name: str
    session: Session
    token_count: int
    plan: Plan
    token_batches: Iterator[list[int]]

    def measure_seconds(self) -> float:
        """Return the interquartile mean of the seconds of some runs in a row, after runs that fill the caches."""
        each = []
        for _ in range(self.warm_up_count + self.timed_count):
            tokens = next(self.token_batches)
            start = perf_counter()
            run_at_context_end(self.session, tokens)
            each.append(perf_counter() - start)
        return compute_trimmed_mean(each[self.warm_up_count :])

    @property
    def warm_up_count(self) -> int:
        """The number of runs that are not timed; a token finds data of many previous tokens in a large cache."""
        return 16 if self.token_count == 1 else 1

    @property
    def timed_count(self) -> int:
        """The number of runs that are timed: more for short runs."""
        return 16 if self.token_count == 1 else 1

    def predict_seconds(self, speeds: Speeds) -> float:
        graph = self.plan.graph
        return plan_for_group(graph, self.plan.group, hardware=speeds.hardware_for(graph)).cost.total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL.gguf", type=Path)
    parser.add_argument("-p", type=int, nargs="+", default=[1, 512], help="tokens of the runs (1 512)")
    parser.add_argument("-c", type=int, default=1024, help="tokens of the context (1024)")
    parser.add_argument("-t", "--threads", type=int, help="threads of the device (those that plans take)")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--shared", action="store_true", help="say that others used the machine meanwhile")
    parser.add_argument("--save", metavar="STEM", type=Path, help="write STEM.json and STEM.md")
    args = parser.parse_args()
    about = collect_circumstances(args.shared)
    runs = [run for path in args.models for run in make_runs(path, args.p, args.c, args.threads)]
    dtypes = {str(weight.dtype) for run in runs for weight in run.plan.graph.weights}
    probes = BoundCalibrationProbes(
        [run.plan.group[0] for run in runs[:1]], [kind for kind in PROBED_DTYPES if str(kind) in dtypes]
    )
    rounds = [row for _ in range(args.rounds) for row in measure_round(probes, runs)]
    text = format_table(HEAD, [format_errors(run, rounds) for run in runs])
    print(format_circumstances(about) + "\n\n" + text, end="")
    if args.save:
        write_result(args.save, about, rounds, text)


def make_runs(path: Path, tokens: list[int], context: int, threads: int | None) -> list[ModelRun]:
    """Return runs of a model that are warmed up.

    Args:
        path: The GGUF file.
        tokens: Token counts, one for each run.
        context: Tokens of the context.
        threads: Threads of the device; None for the default.
    """
    session = open_session(open_model(path), on=replace(ONE_DEVICE, threads=threads), context=context)
    runs = []
    for count in tokens:
        tokens_to_run = draw_random_token_lists_endlessly(session, count)
        run_at_context_end(session, next(tokens_to_run))
        with session.tracing() as trace:
            run_at_context_end(session, next(tokens_to_run))
        runs.append(ModelRun(path.name, session, count, trace.runs[-1].plan, tokens_to_run))
    return runs


def measure_round(probes: BoundCalibrationProbes, runs: list[ModelRun]) -> list[dict[str, object]]:
    """Return the predicted and measured seconds of each run in one round."""
    beside: dict[int, list[dict[str, float]]] = defaultdict(list)
    seconds: dict[int, list[float]] = defaultdict(list)
    before = probes.measure_round_seconds()
    for at, run in [*enumerate(runs)] * TURNS_PER_ROUND:
        seconds[at].append(run.measure_seconds())
        after = probes.measure_round_seconds()
        beside[at] += before, after
        before = after
    return [
        {
            "model": run.name,
            "tokens": run.token_count,
            "predicted": run.predict_seconds(probes.fit_speeds(beside[at])),
            "measured": compute_trimmed_mean(seconds[at]),
        }
        for at, run in enumerate(runs)
    ]


def format_errors(run: ModelRun, rounds: list[dict[str, object]]) -> list[str]:
    """Return a table row with medians; errors are computed within a round."""
    own = [row for row in rounds if (row["model"], row["tokens"]) == (run.name, run.token_count)]
    pairs = [(float(str(row["predicted"])), float(str(row["measured"]))) for row in own]
    errors = [predicted / seconds - 1 for predicted, seconds in pairs]
    predicted, seconds = (1e3 * median(column) for column in zip(*pairs, strict=True))
    spread = ", ".join(f"{error:+.0%}" for error in sorted(errors))
    return [
        run.name,
        str(run.token_count),
        f"{predicted:.2f} ms",
        f"{seconds:.2f} ms",
        f"{median(errors):+.0%}",
        spread,
    ]


if __name__ == "__main__":
    main()
