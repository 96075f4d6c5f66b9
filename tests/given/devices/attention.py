"""Attention on devices without groups of four warps for products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from hocket.backends.cupy.kernels.attention import attention
from hocket.backends.cupy.trial_binding import compute_scratch_bytes_at_placeholders


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
