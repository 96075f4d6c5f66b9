"""Log messages about compiled kernels, from which a terminal shows the progress."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

COMPILING_MESSAGE, COMPILED_MESSAGE = "compiling %s", "compiled %s"
"""Logged at level INFO before and after a kernel is compiled."""
MISSING_KERNELS_MESSAGE = "%d kernels to compile"
"""Logged at level INFO before several kernels are compiled."""
log = logging.getLogger("hocket.kernels")


@contextmanager
def log_compilation(name: str) -> Iterator[None]:
    """Log the messages before and after the compilation of a kernel or a source."""
    log.info(COMPILING_MESSAGE, name)
    yield
    log.info(COMPILED_MESSAGE, name)
