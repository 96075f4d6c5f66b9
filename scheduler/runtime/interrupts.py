"""Deferred interrupts: Ctrl-C during a run waits for the end of the run, because half a run leaves invalid states."""

from __future__ import annotations

import _signal as signal  # CPython's own functions: `signal` converts results to enums, 25 µs per token (1 % at 2 ms)
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class DeferredInterrupts:
    """A context in which an interrupt (SIGINT, Ctrl-C) waits for the end of the block.

    At the end the previous handler is called; by default it raises KeyboardInterrupt. If the block raises an error, the
    signal is dropped, because the block has ended anyway. A second SIGINT does not wait. Outside the main thread, and
    in a nested block, the context does nothing: Python interrupts only the main thread.
    """

    def __init__(self) -> None:
        self._outer_context: DeferredInterrupts | None = None
        self._previous_handler: Callable[[int, FrameType | None], Any] | None = None
        self._pending_signal: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and callable(before) and not isinstance(before, DeferredInterrupts):
            self._previous_handler = before
            signal.signal(signal.SIGINT, self)
        elif isinstance(before, DeferredInterrupts):
            self._outer_context = before
        return self

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: keep the signal for the end of the block, and restore the previous handler."""
        self._pending_signal = number, frame
        signal.signal(number, self._previous_handler)

    @property
    def previous_handler(self) -> Callable[[int, FrameType | None], Any] | None:
        """The handler outside the block. It is `None` in a nested block and outside the main thread."""
        return self._previous_handler

    @property
    def is_interrupt_pending(self) -> bool:
        """Whether an interrupt has come that will raise KeyboardInterrupt at the end, so that work may be skipped."""
        keeper = self._outer_context or self
        return keeper._pending_signal is not None and keeper._previous_handler is signal.default_int_handler

    def __exit__(self, failure: object, *_: object) -> None:
        if self._previous_handler is None:
            return
        signal.signal(signal.SIGINT, self._previous_handler)
        if self._pending_signal and failure is None:
            self._previous_handler(*self._pending_signal)


class ImmediateInterrupts:
    """A context within `DeferredInterrupts` in which an interrupt (SIGINT) does not wait.

    It is for work that leaves no invalid states, such as the compilation of kernels. Outside such a block the context
    does nothing.
    """

    def __init__(self) -> None:
        self._outer_context: DeferredInterrupts | None = None

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        if isinstance(before, DeferredInterrupts) and threading.current_thread() is threading.main_thread():
            self._outer_context = before
            signal.signal(signal.SIGINT, before.previous_handler)
        return self

    def __exit__(self, *_: object) -> None:
        if self._outer_context is not None:
            signal.signal(signal.SIGINT, self._outer_context)
