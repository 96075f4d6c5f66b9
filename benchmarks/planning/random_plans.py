"""Compare plans of random graphs with one device: every mode, one to five devices, uneven shares, placement rules.

    python benchmarks/planning/random_plans.py --seed 0 --count 2000

A refused graph, a raw Python error, and a different number are faults. Each fault is a line with the seed and the plan;
``--seed N --count 1`` repeats its graph. The script exits with 1 after a fault.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from time import monotonic


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.given.graphs.wide_graphs import wide_graph
    from tests.given.plans.ways import try_all_modes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=200, help="how many graphs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no graph after so long")
    args = parser.parse_args()
    start, faults, plans, ops = monotonic(), 0, 0, Counter[str]()
    for seed in range(args.seed, args.seed + args.count):
        if monotonic() - start > args.seconds:
            break
        graph = wide_graph(seed)
        ops.update({n.op for n in graph.nodes})
        for mode, fault in try_all_modes(graph, seed):
            plans += 1
            if fault:
                faults += 1
                print(f"seed {seed}, {mode}: {fault}", flush=True)
    print(f"{plans} plans, {len(ops)} ops, {faults} faults, {monotonic() - start:.0f} s")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
