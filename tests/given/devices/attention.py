"""Attention by other kernels than an emulated device would choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from hocket.backends.cupy.device.device_limits import LARGEST_LIMITS, KernelTrial
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.kernels.attention import attention
from hocket.backends.cupy.trial_binding import compute_scratch_bytes_at_placeholders

TRIAL_LIMITS = replace(LARGEST_LIMITS, trials=frozenset(KernelTrial))
"""Limits of a device that uses all trials."""


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
def by_trials() -> Iterator[None]:
    """Emulated devices use all trials."""
    with patch.object(EmulatedDriver, "limits", lambda self, on: TRIAL_LIMITS):
        yield
