"""Shares of threads: the range of items, or of whole units, that each thread computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....graph.old_names import make_module_getattr
from ..compilation.compiler import subroutine


@subroutine
def compute_thread_range(n, thread, threads):
    """Return the first and the end index of the items, of `n` in all, that thread number `thread` processes."""
    each = (n + threads - 1) // threads
    return min(n, each * thread), min(n, each * (thread + 1))


def compute_even_bounds(n: int, unit: int, threads: int) -> Sequence[int]:
    """Divide `n` items over threads in whole units of `unit` items, as evenly as possible; return the bounds.

    The result has the first item of each thread, and `n` at the end.
    """
    each = -(-n // unit // threads) * unit
    return [min(n, each * thread) for thread in range(threads + 1)]


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), share="compute_thread_range")
