"""The memory of an engine over many short requests in a random schedule, with cancellations.

    python benchmarks/server/engine_memory.py --requests 10000 --save STEM

The requests have random prompts, some with a common beginning, random limits and seeds. Each step may submit and
cancel requests. The script reads RssAnon and VmSwap of its process ten times. It exits with 1 if the memory after the
first tenth is ever more than 2 % larger than at its end, or if a request has an error or no end. With 10,000 requests,
the first tenth fills the histories of the engine, which keep its last 1,024 requests and 8,192 steps.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hocket
from hocket.benchmarks import results_file as results
from hocket.benchmarks.server.serving import MAX_SOAK_GROWTH, SOAK_PARTS, read_memory_mib
from hocket.frontends.commands.serve import run_cyclic_gc_more_often
from hocket.frontends.generation.generate import GenerationParams
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.serving.blocks.make_pool import make_prefix_cache
from hocket.frontends.serving.engine import Engine
from hocket.frontends.serving.requests import EndEvent, GenerationRequest
from hocket.frontends.serving.served_model import ServedModel
from hocket.frontends.serving.thread import make_served_pool

CONTEXT, BATCH, QUEUE_SIZE = 128, 32, 16
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS, SHARED_TOKENS = 40, 32, 24
SUBMIT_PROBABILITY, CANCEL_PROBABILITY = 0.5, 0.02
"""The probabilities, in each step, of one more request and of a cancellation."""
STATE_BYTES = 1 << 22
"""Bytes of the saved recurrent states; the first tenth of the requests fills them."""
TABLE_TITLES = ("requests", "MiB", "/ first tenth", "steps", "cancelled", "threads", "open files")


def make_requests(count: int, vocabulary: int, seed: int) -> Iterator[GenerationRequest]:
    """Make random requests; equal seeds give equal requests."""
    rng = random.Random(seed)
    shared = rng.choices(range(5, vocabulary), k=SHARED_TOKENS)
    for number in range(count):
        begin = shared[: rng.choice((0, SHARED_TOKENS))]
        prompt = begin + rng.choices(range(5, vocabulary), k=rng.randint(1, MAX_PROMPT_TOKENS - SHARED_TOKENS))
        sampling = Sampling(temperature=rng.choice((0.0, 0.8)))
        params = GenerationParams(rng.randint(1, MAX_NEW_TOKENS), sampling, number, frozenset())
        yield GenerationRequest(f"r{number}", tuple(prompt), params)


def run_requests(engine: Engine, requests: Iterator[GenerationRequest], rng: random.Random) -> Iterator[str]:
    """Submit, cancel and run requests at random; yield the reason of each end."""
    open_requests, waiting = set[str](), next(requests, None)
    while waiting is not None or engine.has_work:
        if waiting is not None and len(open_requests) < QUEUE_SIZE and rng.random() < SUBMIT_PROBABILITY:
            engine.submit(waiting)
            open_requests.add(waiting.id)
            waiting = next(requests, None)
        events = []
        if open_requests and rng.random() < CANCEL_PROBABILITY:
            events += engine.cancel(rng.choice(sorted(open_requests)))
        events += engine.step()
        for event in events:
            if isinstance(event, EndEvent):
                open_requests.remove(event.request)
                yield event.reason
    if open_requests:
        raise SystemExit(f"{len(open_requests)} requests have no end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL.gguf", nargs="?", help="the embedded model by default")
    parser.add_argument("--requests", type=int, default=10_000, help="number of requests (10,000)")
    parser.add_argument("--slots", type=int, default=2, help="slots of the engine (2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests and of the schedule (0)")
    parser.add_argument("-t", type=int, default=1, help="threads of the device (1)")
    parser.add_argument("--shared", action="store_true", help="say that others used the machine meanwhile")
    parser.add_argument("--save", type=Path, metavar="STEM", help="write STEM.json and STEM.md")
    args = parser.parse_args()
    about, rows, reasons = results.collect_circumstances(args.shared), list[dict[str, float]](), Counter[str]()
    part, start = max(1, args.requests // SOAK_PARTS), time.process_time()
    with hocket.Model(args.model, context=CONTEXT, batch=BATCH, threads=args.t) as model:
        served = ServedModel(model, name="model", version="0")
        pool = make_served_pool(model, args.slots, served.rank_calls)
        cache = make_prefix_cache(pool, state_bytes=STATE_BYTES, reserves_whole_texts=False, retains_contents=False)
        engine = Engine(pool, cache, queue_size=QUEUE_SIZE, max_gap_seconds=0.1, clock=time.monotonic)
        pool.compile_short_steps()
        run_cyclic_gc_more_often()
        requests = make_requests(args.requests, model.session.model.vocabulary_size, args.seed)
        for count, reason in enumerate(run_requests(engine, requests, random.Random(args.seed)), 1):
            reasons[reason] += 1
            if count % part == 0:
                gc.collect()
                memory = read_memory_mib(os.getpid())
                first = rows[0]["memory_mib"] if rows else memory
                row = {"requests": count, "memory_mib": memory, "ratio": memory / first}
                row |= {"steps": engine.status.sums.decode_steps, "cancelled": reasons["cancelled"]}
                row |= {"threads": len(os.listdir("/proc/self/task")), "files": len(os.listdir("/proc/self/fd"))}
                rows.append(row)
                print(f"{count} requests: {memory:.1f} MiB, {dict(reasons)}", flush=True)
    cells = [
        [f"{row['requests']:,}", f"{row['memory_mib']:.1f}", f"{row['ratio']:.4f}"]
        + [f"{row[name]:,}" for name in ("steps", "cancelled", "threads", "files")]
        for row in rows
    ]
    growth = max(row["ratio"] for row in rows) - 1
    table = results.format_table(TABLE_TITLES, cells)
    text = (
        f"{table}\nLargest growth after the first tenth: {100 * growth:.2f} % (at most {100 * MAX_SOAK_GROWTH:g} %).\n"
    )
    print(f"\n{text}{time.process_time() - start:.0f} s of processor time")
    if args.save:
        results.write_result(args.save, about, rows, text)
    sys.exit(growth > MAX_SOAK_GROWTH or reasons["error"] > 0)


if __name__ == "__main__":
    main()
