"""Output of commands: data to stdout, messages to stderr."""

from __future__ import annotations

import sys
from contextlib import suppress


def write_to_stdout_unless_closed(text: str) -> None:
    """Write text to stdout and flush it; do nothing if stdout is closed."""
    if sys.stdout is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def write_line_to_stderr(line: str) -> None:
    """Write one line to stderr, unless that fails, as with a full disk: there is no other place to say so."""
    with suppress(OSError):
        print(line, file=sys.stderr)
