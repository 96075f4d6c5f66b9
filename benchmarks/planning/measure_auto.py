"""Measure the split mode that `auto` chooses on two CPU devices against each mode that a user can choose.

    python benchmarks/planning/measure_auto.py MODEL.gguf [...] [--save STEM]

Each device has one thread. A test is a prompt of all sequences, followed by steps in which each sequence gets a token;
plans are chosen for this workload. In every round all choices run one after the other. Ratios are medians over the
ratios within a round.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from hocket.benchmarks.results_file import collect_circumstances, format_circumstances, format_table, write_result
from hocket.frontends.commands.bench_batched import measure_batch_seconds
from hocket.frontends.inference.micro_batches import make_session_micro_batched_if_faster
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model, open_session

DEVICES = ("cpu:0", "cpu:1")
GROUP_BY_CHOICE = {
    "one device": DeviceGroup(devices=DEVICES[:1], threads=1),
    "layer": DeviceGroup(devices=DEVICES, split_mode="layer", threads=1),
    "tensor": DeviceGroup(devices=DEVICES, split_mode="tensor", threads=1),
    "auto": DeviceGroup(devices=DEVICES, split_mode="auto", threads=1),
}
HEAD = (
    "model",
    "sequences",
    *(f"{choice}, tok/s" for choice in GROUP_BY_CHOICE),
    "choice of auto",
    "ratio to one device",
    "share of best",
)
ResultRow = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL.gguf", type=Path)
    parser.add_argument("-p", type=int, default=512, help="tokens of the prompt of each sequence (512)")
    parser.add_argument("-n", type=int, default=128, help="steps after it (128)")
    parser.add_argument("-np", type=int, nargs="+", default=[1, 4], help="sequences (1 and 4)")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--shared", action="store_true", help="say that others used the machine meanwhile")
    parser.add_argument("--save", metavar="STEM", type=Path, help="write STEM.json and STEM.md")
    args = parser.parse_args()
    about = collect_circumstances(args.shared)
    rows, lines = [], []
    for path in args.models:
        for sequences in args.np:
            took, rounds = measure_choices(path, args.p, args.n, sequences, args.rounds)
            rows += [{"model": path.name, "sequences": sequences, "took": took, **row} for row in rounds]
            lines.append([path.name, sequences, *format_comparison(rounds, sequences * (args.p + args.n), took)])
    text = format_table(HEAD, lines)
    print(format_circumstances(about) + "\n\n" + text, end="")
    if args.save:
        write_result(args.save, about, rows, text)


def measure_choices(
    path: Path, prompt: int, new: int, sequences: int, rounds: int
) -> tuple[str, list[dict[str, float]]]:
    """Return the split mode that `auto` chose, and the seconds of each choice in every round.

    A first round, which is left out, warms up.

    Args:
        path: The GGUF file.
        prompt: Prompt tokens of each sequence.
        new: Decode steps after the prompt.
        sequences: The number of sequences.
        rounds: Timed rounds.
    """
    model = open_model(path)
    room = {"context": prompt + new, "batch": 2048 // sequences}
    first = {choice: open_session(model, on=on, sequences=sequences, **room) for choice, on in GROUP_BY_CHOICE.items()}
    sessions = {
        choice: make_session_micro_batched_if_faster(session, sequences, **room) for choice, session in first.items()
    }
    times = [
        {choice: sum(measure_batch_seconds(session, prompt, new)) for choice, session in sessions.items()}
        for _ in range(1 + rounds)
    ]
    return find_chosen_mode(first["auto"], sequences), times[1:]


def find_chosen_mode(session: Session, sequences: int) -> str:
    """Return the choice that the plan of the session reports."""
    reasons = session.plan(session.make_step(1, 1, sequences)).reasons
    choices = (reason.removeprefix("taken: ") for reason in reasons if reason.startswith("taken: "))
    return next(choices, "one device").partition(",")[0]


def format_comparison(rounds: Sequence[Mapping[str, float]], tokens: int, took: str) -> list[str]:
    """Return tokens/s of each choice, the choice of `auto`, and its ratios to one device and to the best."""
    speeds = [f"{median(tokens / row[choice] for row in rounds):.0f}" for choice in GROUP_BY_CHOICE]
    one = median(row["one device"] / row["auto"] for row in rounds)
    best = median(min(row[choice] for choice in GROUP_BY_CHOICE if choice != "auto") / row["auto"] for row in rounds)
    return [*speeds, took, f"{one:.2f}", f"{best:.0%}"]


if __name__ == "__main__":
    main()
