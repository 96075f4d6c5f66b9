"""Ctrl-C in the middle of a run: kept until the run has ended, since half a run leaves states that nobody asked for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Keeper:
    """A handler that keeps one signal and is then no longer in charge."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self.before = before
        self.kept: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.kept = number, frame
        signal.signal(number, self.before)


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Keep a SIGINT until the block ends, then give it to its handler, which by default raises KeyboardInterrupt; a
    block that fails has ended what was to be interrupted.  A second one is not kept: whoever insists gets out.

    Python interrupts its main thread only, so elsewhere there is nothing to keep; nor is there in a block in a block.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(before) or isinstance(before, _Keeper):
        yield
        return
    keeper = _Keeper(before)
    signal.signal(signal.SIGINT, keeper)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if keeper.kept:
        before(*keeper.kept)
