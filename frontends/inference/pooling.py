"""Pooling of the rows of a text's tokens to one vector, by the pooling type of a model file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ModelError
from .session import F32

MEAN_POOLING, FIRST_TOKEN_POOLING, LAST_TOKEN_POOLING, RANK_POOLING = 1, 2, 3, 4
"""Pooling types, as ``pooling_type`` of a GGUF file numbers them. Type 0 is none; the mean is taken then."""

EMBED_BATCH_TEXTS = 8
"""Maximum texts that `hocket.Model` pools at once."""


def choose_pooling_function(kind: object) -> Any:
    """Return the function of a pooling type, which pools rows f32[n, width] to one vector f32[width].

    Raises:
        ModelError: The type is unknown, or is 4 (rank), which scores pairs of texts.
    """
    pooling_functions = {
        0: _pool_mean,
        MEAN_POOLING: _pool_mean,
        FIRST_TOKEN_POOLING: lambda rows: rows[0],
        LAST_TOKEN_POOLING: lambda rows: rows[-1],
    }
    if kind == RANK_POOLING:
        raise ModelError("pooling_type of the file is 4 (rank): it scores pairs of texts; use a model that embeds")
    if kind not in pooling_functions:
        raise ModelError(f"pooling_type of the file is {kind!r}; need 0 (none), 1 (mean), 2 (first) or 3 (last)")
    return pooling_functions[kind]


def read_pooling_function(metadata: Mapping[str, object], architecture: str) -> Any:
    """Return the pooling function of a model file.

    Without a pooling type it is the mean.

    Raises:
        ModelError: As `choose_pooling_function`.
    """
    return choose_pooling_function(metadata.get(f"{architecture}.pooling_type", MEAN_POOLING))


def _pool_mean(rows: F32) -> F32:
    return np.asarray(rows.mean(0, dtype=np.float64).astype(np.float32))
