"""Where commands write: data go to stdout, everything else to stderr."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def write(text: str) -> None:
    """Data, which a reader has at once; nowhere if whoever started us has closed stdout."""
    if sys.stdout is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def check_writable(path: str | Path) -> None:
    """Raise `OSError` before the work, not after it, if a file cannot be written; what is there stays as it is."""
    was_there = os.path.lexists(path)
    with open(path, "ab"):
        pass
    if not was_there:
        os.unlink(path)


def log(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr)
