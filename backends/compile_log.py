"""Log messages about the compilation of kernels; a terminal shows progress from these messages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

COMPILING_MESSAGE, COMPILED_MESSAGE = "compiling %s", "compiled %s"
"""Messages at level INFO before and after the compilation of a kernel."""
MISSING_KERNELS_MESSAGE = "%d kernels to compile"
"""Message at level INFO before the compilation of several kernels."""
log = logging.getLogger("hocket.kernels")


@contextmanager
def log_compilation(name: str) -> Iterator[None]:
    """Log a message before and after the compilation of the kernel or source `name`, as a context manager."""
    log.info(COMPILING_MESSAGE, name)
    yield
    log.info(COMPILED_MESSAGE, name)
