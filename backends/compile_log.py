"""Log messages and a progress bar for the compilation of kernels."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .progress_bar import is_progress_visible, open_progress_bar

COMPILING_MESSAGE, COMPILED_MESSAGE = "compiling %s", "compiled %s"
"""Messages at level INFO before and after the compilation of a kernel."""
MISSING_KERNELS_MESSAGE = "%d kernels to compile"
"""Message at level INFO before the compilation of several kernels."""
BAR_DELAY_SECONDS = 1.0
"""Seconds of compilation before the bar appears."""
MAX_PAUSE_SECONDS = 1.0
"""Seconds without compilation after which the count of kernels begins anew."""
log = logging.getLogger("hocket.kernels")


@contextmanager
def log_compilation(name: str) -> Iterator[None]:
    """Log a message before and after the compilation of the kernel or source `name`, as a context manager.

    If the log shows no messages at level INFO, a progress bar appears after a second.
    """
    log.info(COMPILING_MESSAGE, name)
    if log.isEnabledFor(logging.INFO) or not is_progress_visible():
        yield
    else:
        with _compile_bar.show_kernel(name):
            yield
    log.info(COMPILED_MESSAGE, name)


@contextmanager
def log_number_of_kernels_to_compile(count: int) -> Iterator[None]:
    """Log the number of kernels that are compiled in this context; the progress bar counts to this number."""
    log.info(MISSING_KERNELS_MESSAGE, count)
    with _compile_bar.expect_kernels(count):
        yield


class _CompileProgressBar:
    """The progress bar of compilation.

    It shows the count of kernels and the name of the present one. A timer opens it, because the first kernel may take
    longer than the delay.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._bar: Any = None
        self._count = self._expected = self._running = self._groups = 0
        self._seconds, self._last_end, self._name = 0.0, 0.0, ""

    @contextmanager
    def expect_kernels(self, count: int) -> Iterator[None]:
        """Expect `count` further kernels in this context."""
        with self._lock:
            self._restart_after_pause()
            self._expected, self._groups = self._count + count, self._groups + 1
        try:
            yield
        finally:
            with self._lock:
                self._groups -= 1
                self._close_if_idle()

    @contextmanager
    def show_kernel(self, name: str) -> Iterator[None]:
        """Show that a kernel is compiled in this context."""
        start = time.monotonic()
        with self._lock:
            self._restart_after_pause()
            self._running, self._name = self._running + 1, name
            timer = threading.Timer(max(0.0, BAR_DELAY_SECONDS - self._seconds), self._open)
            timer.daemon = True
            if self._bar is not None:
                self._bar.set_postfix_str(name)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._count, self._running, self._last_end = self._count + 1, self._running - 1, time.monotonic()
                self._seconds += self._last_end - start
                if self._bar is not None:
                    self._bar.total = max(self._bar.total, self._count)
                    self._bar.update()
                self._close_if_idle()

    def _restart_after_pause(self) -> None:
        if not (self._running or self._groups) and time.monotonic() - self._last_end > MAX_PAUSE_SECONDS:
            self._count, self._expected, self._seconds = 0, 0, 0.0

    def _open(self) -> None:
        with self._lock:
            if self._bar is None and self._running:
                total = max(self._expected, self._count + 1)
                self._bar = open_progress_bar(
                    total=total, initial=self._count, desc="compile kernels, first run only", unit="kernel"
                )
                self._bar.set_postfix_str(self._name)

    def _close_if_idle(self) -> None:
        if self._bar is not None and not (self._running or self._groups):
            self._bar.close()
            self._bar = None


_compile_bar = _CompileProgressBar()
