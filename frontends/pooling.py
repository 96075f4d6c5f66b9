"""From the rows of a text's tokens to one vector, in the way that a model file names."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import ModelError
from .session import F32

MEAN, FIRST, LAST, RANK = 1, 2, 3, 4
"""Ways of pooling, as ``pooling_type`` of a GGUF file numbers them; 0 is none, for which the mean is taken."""


def pooling(kind: object) -> Any:
    """From rows of tokens f32[n, width] to one vector."""
    ways = {0: _mean, MEAN: _mean, FIRST: lambda rows: rows[0], LAST: lambda rows: rows[-1]}
    if kind == RANK:
        raise ModelError("pooling_type of the file is 4 (rank): it scores pairs of texts; use a model that embeds")
    if kind not in ways:
        raise ModelError(f"pooling_type of the file is {kind!r}; need 0 (none), 1 (mean), 2 (first) or 3 (last)")
    return ways[kind]


def _mean(rows: F32) -> F32:
    return np.asarray(rows.mean(0, dtype=np.float64).astype(np.float32))
