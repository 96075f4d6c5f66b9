"""Measure the time to plan Llama-3-70B and Qwen3-Next-80B for eight simulated H200, from files that are only headers.

Run ``python benchmarks/planning/planning_time.py``. It prints medians of processor time for a token and for a prompt.
It also prints the time of a fixed sum, because a shared processor may run at half its speed. ``--layers 128 --devices
64`` instead plans one decoder with the widths of Llama-3.1-405B. Its shards all differ in size, so that no two devices
run the same program.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

from hocket.frontends.commands.plan import read_step_graph_and_context
from hocket.scheduler import parse_simulated_group, plan_for_group

ROUNDS, MAX_SECONDS, TOKEN_COUNTS = 3, 5.0, (1, 2048)
"""Plans of each step, the limit for a plan in seconds, and the token counts of the steps."""


def measure_plan_seconds(path: str, tokens: int) -> float:
    """Return the processor seconds to read, plan and explain a step of `tokens` tokens."""
    start = process_time()
    graph, _ = read_step_graph_and_context(path, context=4096, tokens=tokens)
    simulation = parse_simulated_group("h200:8,nvlink")
    plan_for_group(graph, simulation.group, hardware=simulation.hardware_for(graph)).explain()
    return process_time() - start


def measure_uneven_plan(path: str, devices: int) -> tuple[float, int]:
    """Return the planning seconds if device d has 1 + d / 100 shares, and the number of instructions of all devices."""
    graph, _ = read_step_graph_and_context(path, context=4096, tokens=1)
    simulation = parse_simulated_group(f"h200:{devices},nvlink")
    hardware, shares = simulation.hardware_for(graph), [1 + d / 100 for d in range(devices)]
    start = process_time()
    plan = plan_for_group(graph, simulation.group, hardware=hardware, split_mode="tensor", tensor_split=shares)
    return process_time() - start, sum(len(device_plan.program.instructions) for device_plan in plan.device_plans)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.given.models.large_headers import LARGE, llama_405b

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=128, help="layers of the decoder that is cut unevenly")
    parser.add_argument("--devices", type=int, default=0, help="devices that it is cut over; 0 plans the others")
    args = parser.parse_args()
    start = process_time()
    sum(range(20_000_000))
    print(f"adding 20 million numbers: {process_time() - start:.2f} s")
    with TemporaryDirectory() as folder:
        if args.devices:
            taken, steps = measure_uneven_plan(llama_405b(Path(folder) / "decoder.gguf", args.layers), args.devices)
            print(f"{args.layers} layers on {args.devices} uneven devices, {steps} steps: {taken:.2f} s")
            return
        for name, write in LARGE.items():
            path = write(Path(folder) / f"{name}.gguf")
            for tokens in TOKEN_COUNTS:
                taken = median(measure_plan_seconds(path, tokens) for _ in range(ROUNDS))
                print(f"{name}, {tokens} tokens: {taken:.2f} s of processor time (limit {MAX_SECONDS:g})")


if __name__ == "__main__":
    main()
