"""Compare predicted with measured times of models on a CPU, while the speeds of the machine are measured repeatedly.

    python benchmarks/predicted_times.py MODEL.gguf [...] [--save STEM]

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

from results_file import circumstances, one_line, save, table

from hocket.frontends.devices import ONE_DEVICE
from hocket.frontends.measuring import random_tokens, step_behind_context
from hocket.frontends.open import open_model, open_session
from hocket.frontends.session import Session
from hocket.scheduler import Plan, plan_for
from hocket.scheduler.machines.speeds import Speeds
from hocket.scheduler.probing.calibrating import PROBED_DTYPES, Probes, middle

HEAD = ("model", "tokens of a run", "predicted", "measured", "error", "errors of the rounds")
TURNS = 5
"""Turns in a round; each turn measures every run once."""


@dataclass
class Run:
    """Steps of `token_count` tokens of a model at the end of a context."""

    name: str
    session: Session
    tokens: int
    plan: Plan
    drawn: Iterator[list[int]]

    def seconds(self) -> float:
        """Return the interquartile mean of the seconds of some runs in a row, after runs that fill the caches."""
        each = []
        for _ in range(self.before + self.times):
            tokens = next(self.drawn)
            start = perf_counter()
            step_behind_context(self.session, tokens)
            each.append(perf_counter() - start)
        return middle(each[self.before :])

    @property
    def before(self) -> int:
        """The number of runs that are not timed; a token finds data of many previous tokens in a large cache."""
        return 16 if self.tokens == 1 else 1

    @property
    def times(self) -> int:
        """The number of runs that are timed: more for short runs."""
        return 16 if self.tokens == 1 else 1

    def predicted(self, speeds: Speeds) -> float:
        graph = self.plan.graph
        return plan_for(graph, self.plan.group, hardware=speeds.hardware(graph)).cost.total


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
    about = circumstances(args.shared)
    runs = [run for path in args.models for run in runs_of(path, args.p, args.c, args.threads)]
    dtypes = {str(weight.dtype) for run in runs for weight in run.plan.graph.weights}
    probes = Probes([run.plan.group[0] for run in runs[:1]], [kind for kind in PROBED_DTYPES if str(kind) in dtypes])
    rounds = [row for _ in range(args.rounds) for row in measured(probes, runs)]
    text = table(HEAD, [told(run, rounds) for run in runs])
    print(one_line(about) + "\n\n" + text, end="")
    if args.save:
        save(args.save, about, rounds, text)


def runs_of(path: Path, tokens: list[int], context: int, threads: int | None) -> list[Run]:
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
        drawn = random_tokens(session, count)
        step_behind_context(session, next(drawn))
        with session.tracing() as trace:
            step_behind_context(session, next(drawn))
        runs.append(Run(path.name, session, count, trace.runs[-1].plan, drawn))
    return runs


def measured(probes: Probes, runs: list[Run]) -> list[dict[str, object]]:
    """Return the predicted and measured seconds of each run in one round."""
    beside: dict[int, list[dict[str, float]]] = defaultdict(list)
    seconds: dict[int, list[float]] = defaultdict(list)
    before = probes.seconds()
    for at, run in [*enumerate(runs)] * TURNS:
        seconds[at].append(run.seconds())
        after = probes.seconds()
        beside[at] += before, after
        before = after
    return [
        {
            "model": run.name,
            "tokens": run.tokens,
            "predicted": run.predicted(probes.speeds(beside[at])),
            "measured": middle(seconds[at]),
        }
        for at, run in enumerate(runs)
    ]


def told(run: Run, rounds: list[dict[str, object]]) -> list[str]:
    """Return a table row with medians; errors are computed within a round."""
    own = [row for row in rounds if (row["model"], row["tokens"]) == (run.name, run.tokens)]
    pairs = [(float(str(row["predicted"])), float(str(row["measured"]))) for row in own]
    errors = [predicted / seconds - 1 for predicted, seconds in pairs]
    predicted, seconds = (1e3 * median(column) for column in zip(*pairs, strict=True))
    spread = ", ".join(f"{error:+.0%}" for error in sorted(errors))
    return [run.name, str(run.tokens), f"{predicted:.2f} ms", f"{seconds:.2f} ms", f"{median(errors):+.0%}", spread]


if __name__ == "__main__":
    main()
