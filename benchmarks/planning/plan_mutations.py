"""Corrupt plans, and check that the verifier rejects each corrupt plan that runs wrong.

Run ``python benchmarks/planning/plan_mutations.py --plans 40 --rounds 2 --seed 0``. For each field it prints the number
of rejected plans, and of plans that run right in spite of the change. Then it prints each accepted plan that runs
wrong, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=40, help="plans of random graphs, besides those built by hand")
    parser.add_argument("--rounds", type=int, default=2, help="how often every field of every plan is made wrong")
    parser.add_argument("--seed", type=int, default=0, help="of the dice, and of the first random graph")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.given.plans.campaign import BY_HAND, campaign

    names = [*BY_HAND, *(f"random {args.seed + number}" for number in range(args.plans))]
    tally = campaign(names, args.rounds, args.seed)
    for where in sorted(tally.refused.keys() | tally.harmless.keys()):
        print(f"{where:24} {tally.refused[where]:6} refused {tally.harmless[where]:6} run right")
    for fault in (*tally.missed, *tally.raised):
        print(f"MISSED {fault}")
    print(f"{tally.refused.total()} refused, {tally.harmless.total()} run right, {len(tally.missed)} missed")
    return bool(tally.missed or tally.raised)


if __name__ == "__main__":
    sys.exit(main())
