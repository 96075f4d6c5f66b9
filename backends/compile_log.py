"""Log messages about the compilation of kernels; a terminal shows progress from these messages."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

COMPILING_MESSAGE, COMPILED_MESSAGE = "compiling %s", "compiled %s"
"""Messages at level INFO before and after the compilation of a kernel."""
MISSING_KERNELS_MESSAGE = "%d kernels to compile"
"""Message at level INFO before the compilation of several kernels."""
log = logging.getLogger("hocket.kernels")
PROGRESS_DELAY_SECONDS = 1.0
"""Seconds of compilation after which Python programs show a progress bar."""
T = TypeVar("T")


def with_progress_bar(kernels: Sequence[T]) -> Iterable[T]:
    """Return an iterable over kernels to compile, with a progress bar if they take more than a second.

    The bar is for Python programs on a terminal or in a notebook. Commands show the log messages instead.
    """
    is_visible = sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)
    if not is_visible or log.isEnabledFor(logging.INFO):
        return kernels
    from tqdm.auto import tqdm

    title = "compile kernels, first use only"
    bar: Iterable[T] = tqdm(kernels, desc=title, unit="kernel", leave=False, delay=PROGRESS_DELAY_SECONDS)
    return bar


@contextmanager
def log_compilation(name: str) -> Iterator[None]:
    """Log a message before and after the compilation of the kernel or source `name`, as a context manager."""
    log.info(COMPILING_MESSAGE, name)
    yield
    log.info(COMPILED_MESSAGE, name)
