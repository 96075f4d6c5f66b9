"""Write the result page of a nightly run: ``python .ci/nightly_page.py pytest.log SECONDS [FAILED STEP ...]``.

The page is ``benchmarks/results/nightly.md``. It has the date, the commit and the counts of the last run.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "results" / "nightly.md"
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)\b")
COUNT_NAMES = ("passed", "failed", "error", "skipped")


def count_outcomes(log: str) -> dict[str, int]:
    """Return the tests by outcome, from the last line of pytest's output that counts them; empty without one."""
    lines = [found for line in log.splitlines() if (found := COUNT.findall(line)) and " in " in line]
    return {name.removesuffix("s"): int(count) for count, name in lines[-1]} if lines else {}


def format_nightly_page(counts: dict[str, int], commit: str, seconds: int, failed_steps: Sequence[str]) -> str:
    """Return the page of a run.

    Args:
        counts: The tests by outcome; empty if pytest ended without a summary.
        commit: The commit, with a word about changes that were not committed.
        seconds: The duration of the run.
        failed_steps: The steps of `.ci/run` that failed.
    """
    row = " | ".join(f"{counts.get(name, 0):,}" for name in COUNT_NAMES) if counts else "no summary | | | "
    failed = ", ".join(failed_steps) or "none"
    return (
        "# The last nightly run\n\n"
        "Written by `.ci/nightly`: all steps of `.ci/run`, with every case of the slowest tests.\n\n"
        f"- Machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}.\n"
        f"- Date and commit: {datetime.now(UTC):%Y-%m-%d}, {commit}.\n"
        f"- Duration: {seconds // 60} min {seconds % 60} s.\n"
        f"- Steps that failed: {failed}.\n\n"
        f"| {' | '.join(COUNT_NAMES)} |\n|{'--:|' * len(COUNT_NAMES)}\n| {row} |\n"
    )


def describe_commit() -> str:
    """Return the short id of the commit, and whether files differ from it."""
    git = ("git", "-C", str(ROOT))
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.strip()
    return (name or "unknown") + (" with uncommitted changes" if changed else "")


def main(words: Sequence[str]) -> int:
    log, seconds, *failed_steps = words
    text = Path(log).read_text(encoding="utf-8", errors="replace") if Path(log).exists() else ""
    PAGE.write_text(
        format_nightly_page(count_outcomes(text), describe_commit(), int(seconds), failed_steps), encoding="utf-8"
    )
    print(f"wrote {PAGE.relative_to(ROOT)}; commit it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
