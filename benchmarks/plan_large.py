"""Time to plan Llama-3-70B and Qwen3-Next-80B for eight simulated H200, from files that are only headers.

Run ``python benchmarks/plan_large.py``; it prints medians of processor time, and the time of a sum that says how fast
this processor is just now: a shared one may run at half its speed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

from hocket.frontends.commands.plan import step_graph
from hocket.scheduler import plan_for, simulate

ROUNDS, LIMIT = 3, 5.0
"""How often a plan is made, and seconds that it may take."""


def seconds(path: str) -> float:
    start = process_time()
    graph, _ = step_graph(path, context=4096, tokens=1)
    simulation = simulate("h200:8,nvlink")
    plan_for(graph, simulation.group, hardware=simulation.hardware_for(graph)).explain()
    return process_time() - start


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.given.models.large_headers import LARGE

    start = process_time()
    sum(range(20_000_000))
    print(f"adding 20 million numbers: {process_time() - start:.2f} s")
    with TemporaryDirectory() as folder:
        for name, write in LARGE.items():
            path = write(Path(folder) / f"{name}.gguf")
            taken = median(seconds(path) for _ in range(ROUNDS))
            print(f"{name}: {taken:.2f} s of processor time (limit {LIMIT:g})")


if __name__ == "__main__":
    main()
