"""Attention by other kernels than an emulated device would choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from hocket.backends.cupy.device.device_limits import LARGEST_LIMITS, KernelCandidate
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.kernels.attention import attention
from hocket.backends.cupy.trial_binding import compute_scratch_bytes_at_placeholders

CANDIDATE_LIMITS = replace(LARGEST_LIMITS, candidates=frozenset(KernelCandidate))
"""Limits of a device that uses all candidates."""


@contextmanager
def by_warps() -> Iterator[None]:
    """Many rows meet keys and values by products of single warps."""
    compute_scratch_bytes_at_placeholders.cache_clear()  # it knows how much scratch other kernels take
    kinds = {kind: source for kind, source in attention.TILED_SOURCES.items() if not kind.uses_warpgroups}
    try:
        with patch.object(attention, "TILED_SOURCES", kinds):
            yield
    finally:
        compute_scratch_bytes_at_placeholders.cache_clear()


@contextmanager
def by_candidates() -> Iterator[None]:
    """Emulated devices use all candidates."""
    with patch.object(EmulatedDriver, "limits", lambda self, on: CANDIDATE_LIMITS):
        yield
