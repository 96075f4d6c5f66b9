"""Compare a prompt in chunks on two pipeline stages with one device, and with the limit of two cores.

    python benchmarks/planning/pipelined_prefill.py MODEL.gguf [...] [--save STEM]

Each device has one thread. In every round run one after the other: one device; two independent sessions of one device
each, in parallel; the pipeline. The two sessions share only memory and caches. If two cores together are less than
twice as fast, as on a shared machine, two stages cannot be twice as fast. The column `limit` is the speed of two
sessions divided by the speed of one. The last column is the speed of the pipeline as a share of this limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from hocket.benchmarks.results_file import collect_circumstances, format_circumstances, format_table, write_result
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model, open_session

STAGE_DEVICES = ("cpu:0", "cpu:1")
HEAD = ("model", "tokens", "one device", "limit", "pipeline", "ratio to one device", "share of limit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL.gguf", type=Path)
    parser.add_argument("-p", type=int, default=2048, help="tokens of the prompt (2048)")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--shared", action="store_true", help="say that others used the machine meanwhile")
    parser.add_argument("--save", metavar="STEM", type=Path, help="write STEM.json and STEM.md")
    args = parser.parse_args()
    about = collect_circumstances(args.shared)
    rounds = [row for path in args.models for row in measure_rounds(path, args.p, args.rounds)]
    text = format_table(
        HEAD, [format_comparison(path.name, [r for r in rounds if r["model"] == path.name]) for path in args.models]
    )
    print(format_circumstances(about) + "\n\n" + text, end="")
    if args.save:
        write_result(args.save, about, rounds, text)


def measure_rounds(path: Path, tokens: int, rounds: int) -> list[dict[str, object]]:
    """Return the seconds of the three runs in every round, after a round that warms up."""
    model = open_model(path)
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, model.vocabulary_size, tokens)]
    one, other = (
        open_session(model, on=DeviceGroup(devices=STAGE_DEVICES[:1], threads=1), context=tokens) for _ in range(2)
    )
    stages = open_session(model, on=DeviceGroup(devices=STAGE_DEVICES, split_mode="layer", threads=1), context=tokens)

    def read(session: Session) -> None:
        session.evaluate([prompt])

    def both(pair: Sequence[Session]) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(read, pair))

    rows = []
    for _ in range(1 + rounds):
        for session in (one, other, stages):
            session.reset(0)
        alone = measure_seconds(lambda: read(one))
        one.reset(0)
        together, piped = measure_seconds(lambda: both((one, other))), measure_seconds(lambda: read(stages))
        known = {"model": path.name, "tokens": tokens}
        rows.append({**known, "one": alone, "two at once": together, "pipeline": piped})
    return rows[1:]


def measure_seconds(run: Callable[[], None]) -> float:
    """Return the wall time of a call, in seconds."""
    start = perf_counter()
    run()
    return perf_counter() - start


def format_comparison(name: str, rows: Sequence[dict[str, object]]) -> list[str]:
    """Return a table row of medians; ratios are computed within a round."""

    def middle(value: Callable[[float, float, float], float]) -> float:
        return median(value(*(float(str(row[k])) for k in ("one", "two at once", "pipeline"))) for row in rows)

    tokens = int(str(rows[0]["tokens"]))
    return [
        name,
        str(tokens),
        f"{middle(lambda one, two, piped: tokens / one):.0f} tok/s",
        f"{middle(lambda one, two, piped: 2 * one / two):.2f}",
        f"{middle(lambda one, two, piped: tokens / piped):.0f} tok/s",
        f"{middle(lambda one, two, piped: one / piped):.2f}",
        f"{middle(lambda one, two, piped: two / 2 / piped):.0%}",
    ]


if __name__ == "__main__":
    main()
