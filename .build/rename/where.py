"""Prints the new name of each definition that had the name OLD, or that stood in the file OLD: ``where.py OLD``."""

from __future__ import annotations

import sys
from pathlib import Path


def find_rows(old: str) -> list[list[str]]:
    """The rows of the table with the old name OLD, the last part of an old name OLD, or the file OLD."""
    lines = Path(__file__).with_name("renames.tsv").read_text().splitlines()[1:]
    rows = (line.split("\t") for line in lines)
    return [row for row in rows if old in (row[1], row[2], row[2].rpartition(".")[2])]


if __name__ == "__main__":
    for kind, file, old, new in (row for name in sys.argv[1:] for row in find_rows(name)):
        print(f"{file}: {kind} {old} -> {new}")
