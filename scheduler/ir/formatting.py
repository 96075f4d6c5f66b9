"""Formatting of bytes, seconds, device names and tables as text for people."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...graph.errors import PlanError
from ...graph.validation import REAL, validate_arguments


@validate_arguments(PlanError, n=REAL)
def format_bytes(n: float) -> str:
    """Format a number of bytes as text with a unit: ``4.2 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


@validate_arguments(PlanError, seconds=REAL)
def format_seconds(seconds: float) -> str:
    """Format seconds as text with three digits and a unit: ``21.3 us``."""
    for unit in ("us", "ms"):
        seconds *= 1e6 if unit == "us" else 1e-3
        if seconds < 999.5:
            return f"{seconds:.3g} {unit}"
    return f"{seconds / 1e3:.3g} s"


def format_table(rows: Sequence[Sequence[str]], alignments: str) -> list[str]:
    """Format the rows of a table as lines with aligned columns.

    Args:
        rows: The cells of each row.
        alignments: One letter for each column: ``r`` aligns to the right, ``l`` to the left.
    """
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = zip(row, widths, alignments, strict=True)
        lines.append("  ".join(t.rjust(w) if side == "r" else t.ljust(w) for t, w, side in cells).rstrip())
    return lines


def format_devices(devices: Sequence[str]) -> str:
    """Format device names as text, with consecutive numbers joined: ``cpu:0-3``.

    Consecutive parts of one device are joined too: ``cuda:0.0-1``.
    """
    ranges: list[tuple[str, int, int]] = []
    for name in devices:
        head, number = name.rstrip("0123456789"), int(re.findall(r"\d+", name)[-1])
        if ranges and ranges[-1][0] == head and ranges[-1][2] + 1 == number:
            ranges[-1] = (head, ranges[-1][1], number)
        else:
            ranges.append((head, number, number))
    return " ".join(f"{head}{a}" if a == b else f"{head}{a}-{b}" for head, a, b in ranges)
