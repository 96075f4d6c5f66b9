"""Count the findings of `words.py` by top-level folder, and compare the counts with their maxima, `word_counts.toml`.

```
python tests/repository/word_counts.py                    print the counts
python tests/repository/word_counts.py --list METRIC      print every place that a metric counts
python tests/repository/word_counts.py --update           lower the maxima to the counts
python tests/repository/word_counts.py --update --raise   raise maxima as well, after files changed their folder
```
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable

from hocket.tests.repository.files import ROOT, run_git
from hocket.tests.repository.words import (
    METRICS,
    RETIRED_WORDS,
    Finding,
    find_all,
    find_in_repository,
    is_read,
    read_retired,
)

WORD_COUNTS = ROOT / "tests/repository/word_counts.toml"
Counts = dict[tuple[str, str], int]
"""A count for each folder and metric; zeros are left out."""


def count_findings(findings: Iterable[Finding]) -> Counts:
    """Return the number of findings by folder and metric."""
    return dict(Counter((finding.folder, finding.metric) for finding in findings))


def read_maxima(text: str) -> Counts:
    """Parse the table of maxima."""
    table = tomllib.loads(text)
    return {(folder, metric): n for folder, row in table.items() for metric, n in row.items() if n}


def format_maxima(counts: Counts) -> str:
    """Return the table of maxima as TOML, a table for each folder."""
    lines = [
        "# The most findings that each folder may have, by metric of words.py; what is not listed may have none.",
        "# `python tests/repository/word_counts.py --update` lowers them to the present counts.",
    ]
    for folder in sorted({folder for folder, _ in counts}):
        lines += ["", f'["{folder}"]', *(f"{m} = {counts[folder, m]}" for m in METRICS if counts.get((folder, m)))]
    return "\n".join(lines) + "\n"


def find_grown(counts: Counts, maxima: Counts) -> list[tuple[str, str]]:
    """Return the folders and metrics with more findings than their maximum."""
    return sorted(key for key, count in counts.items() if count > maxima.get(key, 0))


def find_excessive(counts: Counts, maxima: Counts) -> list[tuple[str, str]]:
    """Return the folders and metrics with a maximum that is larger than needed."""
    return sorted(key for key, limit in maxima.items() if limit > counts.get(key, 0))


def merge_maxima(counts: Counts, maxima: Counts, may_rise: bool) -> Counts:
    """Return the new maxima: the counts, but no more than today unless `may_rise`."""
    merged = {key: n if may_rise else min(n, maxima.get(key, 0)) for key, n in counts.items()}
    return {key: n for key, n in merged.items() if n}


def read_earlier_files(folder: str) -> dict[str, str] | None:
    """Return the files of a folder that changed since the maxima were last written, as they were; None without git."""
    commit = (run_git("log", "-1", "--format=%H", "--", WORD_COUNTS.relative_to(ROOT).as_posix()) or "").strip()
    where = ["--", folder] if folder != "." else ["--", ":(glob)*"]
    if not commit or (changed := run_git("diff", "--name-only", "--no-renames", "-z", commit, *where)) is None:
        return None
    texts = {path: run_git("show", f"{commit}:{path}") for path in changed.split("\0") if path and is_read(path)}
    return {path: text or "" for path, text in texts.items()}


def find_new(folder: str, metric: str, findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings of a folder that it had not when the maxima were written.

    Without git, return all findings of the folder. Lines may have moved: texts are compared.
    """
    present = [finding for finding in findings if (finding.folder, finding.metric) == (folder, metric)]
    earlier = read_earlier_files(folder)
    if earlier is None or metric == "duplicates":
        return present
    before = find_all(earlier, read_retired(RETIRED_WORDS.read_text("utf-8")))
    left = Counter(finding.text for finding in before if finding.metric == metric)
    untracked = set((run_git("ls-files", "--others", "--exclude-standard", "-z") or "").split("\0"))
    new = []
    for finding in present:
        if finding.path in earlier or finding.path in untracked:
            left[finding.text] -= 1
            new += [finding] if left[finding.text] < 0 else []
    return new or present


def describe_growth(findings: Iterable[Finding], maxima: Counts) -> list[str]:
    """Return a line for each folder and metric that has grown, followed by the new findings."""
    findings = tuple(findings)
    counts = count_findings(findings)
    lines = []
    for folder, metric in find_grown(counts, maxima):
        limit = maxima.get((folder, metric), 0)
        lines.append(f"{folder}: {METRICS[metric]}: {counts[folder, metric]}, at most {limit} allowed; new:")
        lines += [f"    {finding}" for finding in find_new(folder, metric, findings)]
    return lines


def format_counts(counts: Counts) -> str:
    """Return the counts as a table for people."""
    folders = sorted({folder for folder, _ in counts})
    rows = [(folder, *(counts.get((folder, metric), 0) for metric in METRICS)) for folder in folders]
    rows.append(("all", *(sum(row[i] for row in rows) for i in range(1, len(METRICS) + 1))))
    return "\n".join(f"{row[0]:<14}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in [("", *METRICS), *rows])


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if a count is larger than its maximum."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", choices=METRICS, metavar="METRIC", help=", ".join(METRICS))
    parser.add_argument("--update", action="store_true", help="lower the maxima to the counts")
    parser.add_argument("--raise", dest="may_rise", action="store_true", help="with --update: raise maxima as well")
    options = parser.parse_args(arguments)
    findings = find_in_repository()
    counts, maxima = count_findings(findings), read_maxima(WORD_COUNTS.read_text("utf-8"))
    if options.list:
        print(*(finding for finding in findings if finding.metric == options.list), sep="\n")
        return 0
    if options.update:
        maxima = merge_maxima(counts, maxima, options.may_rise)
        WORD_COUNTS.write_text(format_maxima(maxima), "utf-8")
    print(format_counts(counts), *describe_growth(findings, maxima), sep="\n")
    return 1 if find_grown(counts, maxima) else 0


if __name__ == "__main__":
    sys.exit(main())
