"""The progress line of kernel compilation, which takes seconds at the first run of a model on a machine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ...backends.compile_log import COMPILING_MESSAGE, MISSING_KERNELS_MESSAGE

LINE_WIDTH = 78


class CompileProgressHandler(logging.Handler):
    """A logging handler that shows the progress of kernel compilation on one terminal line, which it overwrites.

    Warnings stay visible.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream, self.count, self.total = stream, 0, 0

    def emit(self, record: logging.LogRecord) -> None:
        line = ""
        if record.levelno >= logging.WARNING:
            self.stream.write(f"\r{'':{LINE_WIDTH}}\rhocket: {record.getMessage()}\n")
        elif record.msg == MISSING_KERNELS_MESSAGE:
            self.total = self.count + int(record.args[0])  # type: ignore[index,arg-type]  # a number
        elif record.msg == COMPILING_MESSAGE:
            self.count += 1
            count = f"{self.count} of {max(self.count, self.total)}"
            line = f"compiling kernels: {count}, first run only ({record.getMessage().split()[-1]})"[:LINE_WIDTH]
        self.stream.write(f"\r{line:{LINE_WIDTH}}\r{line}")
        self.stream.flush()


@contextmanager
def show_compile_progress(stream: TextIO | None = None) -> Iterator[None]:
    """Show the progress of kernel compilation in this context on `stream`, by default stderr, if it is a terminal."""
    stream = stream or sys.stderr
    if stream is None or not stream.isatty():
        yield
        return
    logger, handler = logging.getLogger("hocket.kernels"), CompileProgressHandler(stream)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
