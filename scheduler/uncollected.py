"""Planning without Python's search for objects that only each other hold."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No such search meanwhile: what a plan is made of stays, and looking it through, again and again as it grows, took
    a third of the time of a large one."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
