"""Compare the speed of models in hocket with eager PyTorch and with `torch.compile`.

``python benchmarks/comparison/vs_torch.py`` runs one sequence through Llama and BERT shapes with about 100 million
random float32 weights. `torch.compile` needs a C++ compiler. All sides have the same number of threads and run in one
process. A pause between two runs lets waiting threads fall asleep. The sides alternate; the script prints medians of
times, and medians of the ratios of adjacent runs, because the speed of a shared machine changes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

import torch
import transformers

import hocket
from hocket.benchmarks import results_file as results

PAUSE_SECONDS = 0.05
"""Seconds between two runs."""


def make_llama() -> torch.nn.Module:
    """Return a model of 12 layers of width 768, as large as GPT-2, with the MLP and the norms of Llama."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            vocab_size=16000,
            use_cache=False,
        )
    )


def make_bert() -> torch.nn.Module:
    """Return the base model of BERT."""
    return transformers.BertModel(transformers.BertConfig())


MODELS: Mapping[str, Callable[[], torch.nn.Module]] = {"llama": make_llama, "bert": make_bert}


def compare_speeds(name: str, tokens: int, threads: int, rounds: int, compiled: bool) -> Iterator[dict[str, object]]:
    """Measure one model; yield one row for each side that hocket is compared with.

    Args:
        name: A key of `MODELS`.
        tokens: Tokens of the sequence.
        threads: Threads of each side.
        rounds: Timed rounds, after two that warm up.
        compiled: Also measure `torch.compile`.
    """
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    ids = torch.randint(0, model.config.vocab_size, (1, tokens))
    runner = hocket.from_torch(torch.export.export(model, (ids,), strict=False)).on("cpu:0", threads=threads)
    sides: dict[str, Callable[[torch.Tensor], object]] = {"hocket": runner, "eager": model}
    if compiled:
        torch.compiler.reset()
        sides["inductor"] = torch.compile(model, dynamic=False)
    with torch.no_grad():
        results_of = {side: run(ids)[0] for side, run in sides.items()}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(rounds + 2):
            for side, run in sides.items():
                time.sleep(PAUSE_SECONDS)
                start = time.perf_counter()
                run(ids)
                if turn >= 2:  # the first two rounds warm up
                    seconds[side].append(time.perf_counter() - start)
    expected = results_of["eager"].double()
    error = float(((results_of["hocket"] - expected) ** 2).sum() / (expected**2).sum())
    weights = sum(p.numel() for p in model.parameters())
    for side in list(sides)[1:]:
        ratios = [theirs / ours for ours, theirs in zip(seconds["hocket"], seconds[side], strict=True)]
        yield {
            "model": name,
            "weights": weights,
            "tokens": tokens,
            "threads": threads,
            "side": side,
            "ratio": median(ratios),
            "nmse": error,
            "hocket_seconds": seconds["hocket"],
            "seconds": seconds[side],
        }


HEAD = ("model", "weights", "tokens", "threads", "hocket ms", "against", "its ms", "ratio", "NMSE to eager")


def format_cells(row: Mapping[str, object]) -> list[str]:
    """Return the cells of a result row for the table."""

    def spread(seconds: list[float]) -> str:
        return f"{1e3 * median(seconds):.1f} [{1e3 * min(seconds):.1f}..{1e3 * max(seconds):.1f}]"

    counts = (f"{row['weights'] / 1e6:.0f} M", str(row["tokens"]), str(row["threads"]))
    times = (spread(row["hocket_seconds"]), row["side"], spread(row["seconds"]))
    return [row["model"], *counts, *times, f"{row['ratio']:.2f}", f"{row['nmse']:.1e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help="llama, bert (both)")
    parser.add_argument("-n", "--tokens", default="128", help="numbers of tokens (128)")
    parser.add_argument("-t", "--threads", type=int, default=2, help="threads (2)")
    parser.add_argument("-r", "--rounds", type=int, default=11, help="rounds (11)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--shared", action="store_true", help="say that others used the machine meanwhile")
    parser.add_argument("--save", type=Path, metavar="STEM", help="write STEM.json and STEM.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    about = {**results.collect_circumstances(args.shared), "torch": torch.__version__}
    rows: list[dict[str, object]] = []
    print(results.format_circumstances(about), results.format_table(HEAD, []), sep="\n\n", end="")
    for name in args.models:
        for tokens in map(int, args.tokens.split(",")):
            for row in compare_speeds(name, tokens, args.threads, args.rounds, not args.no_compile):
                print(f"| {' | '.join(format_cells(row))} |", flush=True)
                rows.append(row)
    if args.save:
        results.write_result(args.save, about, rows, results.format_table(HEAD, list(map(format_cells, rows))))


if __name__ == "__main__":
    main()
