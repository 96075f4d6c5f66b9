"""Ctrl-C in the middle of a run: kept until the run has ended, since half a run leaves states that nobody asked for."""

from __future__ import annotations

import _signal as signal  # CPython's own functions: `signal` makes enums of their results, 25 µs a token (1 % at 2 ms)
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class InterruptsKept:
    """In this context a SIGINT waits for the end, when its handler gets it, which by default raises KeyboardInterrupt;
    a block that fails has ended what was to be interrupted.  A second one does not wait: whoever insists gets out.

    Python interrupts its main thread only, so elsewhere there is nothing to keep; nor is there in a block in a block.
    """

    def __init__(self) -> None:
        self._around: InterruptsKept | None = None
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._kept: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and callable(before) and not isinstance(before, InterruptsKept):
            self._before = before
            signal.signal(signal.SIGINT, self)
        elif isinstance(before, InterruptsKept):
            self._around = before
        return self

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """As the handler: the one before is in charge again."""
        self._kept = number, frame
        signal.signal(number, self._before)

    @property
    def would_interrupt(self) -> bool:
        """Whether a SIGINT waits that will raise KeyboardInterrupt: nobody needs what the block still has to do."""
        keeper = self._around or self
        return keeper._kept is not None and keeper._before is signal.default_int_handler

    def __exit__(self, failure: object, *_: object) -> None:
        if self._before is None:
            return
        signal.signal(signal.SIGINT, self._before)
        if self._kept and failure is None:
            self._before(*self._kept)
