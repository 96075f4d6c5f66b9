"""Where commands write: data go to stdout, everything else to stderr."""

from __future__ import annotations

import sys


def write_data(text: str) -> None:
    """Data, which a reader has at once; nowhere if whoever started us has closed stdout."""
    if sys.stdout is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def write_log_line(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr)
