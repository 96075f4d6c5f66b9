"""Tokens per second of one `hocket.Model` that 1, 2, 4 and 8 Python threads share.

    python benchmarks/server/model_threads.py MODEL.gguf --threads 1,2,4,8 --save STEM

Each run makes the same calls of `Model.generate`, which the threads take from one list. Prompts are random token ids
with fixed seeds; the end token is ignored. The thread counts are measured in turns. The text of a
call must not depend on the thread count; the script counts the texts that differ from a run with one thread.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np

import hocket
from hocket.benchmarks import results_file as results

TABLE_TITLES = ("threads", "tok/s", "lowest", "highest", "CPU s per 1,000 tokens", "/ one thread", "different texts")


def make_prompts(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Make prompts of random tokens: half to all of `tokens` tokens, from the middle of a vocabulary."""
    random = np.random.default_rng(0)
    lengths = random.integers(tokens // 2, tokens + 1, count)
    return [random.integers(vocabulary // 8, vocabulary, length).tolist() for length in lengths]


def measure_threads(
    model: hocket.Model, prompts: Sequence[list[int]], threads: int, args: argparse.Namespace
) -> tuple[dict[str, float], list[str]]:
    """Continue all prompts on a number of threads; return the figures, and the new text of each prompt.

    Args:
        model: The model.
        prompts: The prompts.
        threads: Number of threads.
        args: The options of the command line.
    """

    def call(prompt: list[int]) -> str:
        return "".join(model.generate(prompt, max_tokens=args.n, temperature=args.temperature, seed=7, ignore_eos=True))

    start, cpu = time.perf_counter(), time.process_time()
    if threads == 1:
        texts = [call(prompt) for prompt in prompts]
    else:
        with ThreadPoolExecutor(threads) as pool:
            texts = list(pool.map(call, prompts))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    count = args.n * len(prompts)
    return {"threads": threads, "tokens_per_second": count / seconds, "cpu_seconds": cpu, "tokens": count}, texts


def format_thread_rows(rows: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """Return the cells of the table: one row for each thread count, with medians over the rounds."""
    groups: dict[float, list[Mapping[str, float]]] = {}
    for row in rows:
        groups.setdefault(row["threads"], []).append(row)
    first = next(iter(groups.values()))
    table = []
    for threads, group in groups.items():
        rates = [row["tokens_per_second"] for row in group]
        cpu = median(1e3 * row["cpu_seconds"] / row["tokens"] for row in group)
        ratio = median(rate / one["tokens_per_second"] for rate, one in zip(rates, first, strict=True))
        different = sum(row["different"] for row in group)
        cells = (median(rates), min(rates), max(rates))
        table.append([str(threads), *(f"{cell:.1f}" for cell in cells), f"{cpu:.2f}", f"{ratio:.2f}", str(different)])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL.gguf", nargs="?", help="the embedded model by default")
    parser.add_argument("--threads", default="1,2,4,8", metavar="LIST", help="numbers of Python threads (1,2,4,8)")
    parser.add_argument("-n", type=int, default=48, help="new tokens of a call (48)")
    parser.add_argument("-p", type=int, default=24, help="largest number of tokens of a prompt (24)")
    parser.add_argument("--calls", type=int, default=16, help="calls of each run (16)")
    parser.add_argument("-c", type=int, default=1024, help="context in tokens (1024)")
    parser.add_argument("-t", type=int, default=os.cpu_count(), help="threads of the device (all cores)")
    parser.add_argument("--temperature", type=float, default=0.0, help="temperature (0)")
    parser.add_argument("-r", "--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--shared", action="store_true", help="say that others used the machine meanwhile")
    parser.add_argument("--save", type=Path, metavar="STEM", help="write STEM.json and STEM.md")
    args = parser.parse_args()
    counts = [int(word) for word in args.threads.split(",")]
    about, rows = results.collect_circumstances(args.shared), list[dict[str, float]]()
    with hocket.Model(args.model, context=args.c, threads=args.t) as model:
        prompts = make_prompts(args.calls, args.p, model.session.model.vocabulary_size)
        for threads in counts:  # compiles the kernels of each batch size
            measure_threads(model, prompts, threads, args)
        _, expected = measure_threads(model, prompts, 1, args)
        for number in range(args.rounds):
            for threads in counts:
                row, texts = measure_threads(model, prompts, threads, args)
                different = sum(one != other for one, other in zip(texts, expected, strict=True))
                rows.append({"round": number, **row, "different": different})
                print(f"{threads} threads: {row['tokens_per_second']:.1f} tok/s, {different} different", flush=True)
    table = results.format_table(TABLE_TITLES, format_thread_rows(rows))
    print(f"\nMedians of {args.rounds} rounds:\n\n{table}")
    if args.save:
        results.write_result(args.save, about, rows, table)


if __name__ == "__main__":
    main()
