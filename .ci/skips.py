"""Hold the skipped tests of a run against their budget: ``python .ci/skips.py pytest.log missing.txt``.

`skips.toml` has the reasons for which tests may skip, each with the largest count. A reason that is not listed is over
its budget, and so is a run that skips more tests for a listed one: the exit status is 1. A reason may name an optional
part of `parts.py`. While the registry of this part does not answer, its tests may skip in any number.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

LINE = re.compile(r"SKIPPED \[(\d+)\] (?:\S+: )?(.*)")


@dataclass(frozen=True)
class Budget:
    """Up to `max_count` tests may skip with a reason that begins with `reason`; `part` names an optional part."""

    reason: str
    max_count: int
    part: str = ""


def read_budgets(path: Path) -> tuple[Budget, ...]:
    return tuple(Budget(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["skip"])


def count_skips(log: str) -> Counter[str]:
    """Return the number of skipped tests by reason, from the lines of ``pytest -rs``."""
    counts: Counter[str] = Counter()
    for line in log.splitlines():
        if found := LINE.fullmatch(line.strip()):
            counts[found[2].strip()] += int(found[1])
    return counts


def find_excess(counts: Counter[str], budgets: Sequence[Budget], missing: Collection[str]) -> list[str]:
    """Return one line for each reason that is over its budget."""
    skipped: Counter[Budget] = Counter()
    excess = []
    for reason, count in counts.items():
        budget = next((b for b in budgets if reason.startswith(b.reason)), None)
        if budget is None:
            excess.append(f"{count} tests skip for a reason that skips.toml does not list: {reason}")
        elif budget.part not in missing:
            skipped[budget] += count
    for budget, count in skipped.items():
        if count > budget.max_count:
            excess.append(f"{count} tests skip, {budget.max_count} may: {budget.reason}")
    return excess


def main(words: Sequence[str]) -> int:
    log, missing = map(Path, words)
    counts = count_skips(log.read_text(encoding="utf-8", errors="replace"))
    for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        print(f"{count:8}  {reason}")
    print(f"{counts.total():8}  in all")
    absent = missing.read_text(encoding="utf-8").splitlines() if missing.exists() else []
    excess = find_excess(counts, read_budgets(Path(__file__).with_name("skips.toml")), absent)
    print("\n".join(excess), end="\n" if excess else "")
    return int(bool(excess))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
