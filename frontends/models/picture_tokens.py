"""Tokens that stand for parts of pictures: find their ranges in a vocabulary, and suppress their logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce

from ... import ops
from ...graph import Value
from ..gguf.hyperparameter_keys import ArchitectureMetadata

PICTURE_TOKEN_PREFIX, DEFAULT_PICTURE_TOKENS = "IMGIMG", (4, 8196)
"""The prefix of picture tokens in Chameleon's vocabulary, and their range by default."""
MIN_LOGIT = -3.4028234663852886e38
"""The logit of a suppressed token: the lowest float32."""


def find_picture_token_ranges(keys: ArchitectureMetadata) -> tuple[tuple[int, int], ...]:
    """Find the ranges [start, stop) of token ids that stand for parts of pictures (Chameleon).

    Their names begin with ``IMGIMG``. A file without token names has them where llama.cpp expects them.
    """
    count, key = keys.count_token_embedding_rows(), "tokenizer.ggml.tokens"
    names = keys.gguf.strings(key)[:count] if key in keys.gguf.metadata else ()
    found = {i for i, name in enumerate(names) if name.startswith(PICTURE_TOKEN_PREFIX)}
    if not found:
        return (DEFAULT_PICTURE_TOKENS,) if count >= DEFAULT_PICTURE_TOKENS[1] else ()
    starts, stops = (sorted(i + side for i in found if i + step not in found) for side, step in ((0, -1), (1, 1)))
    return tuple(zip(starts, stops, strict=True))


def suppress_token_logits(logits: Value, ranges: Sequence[tuple[int, int]]) -> Value:
    """Suppress tokens: set their columns in ``logits`` f32[n, vocabulary] to the lowest float32.

    ``ranges`` has the token ranges [start, stop), ascending.
    """
    columns, done = list[Value](), 0
    for start, stop in ranges:
        hidden = ops.slice_(logits, axis=-1, start=start, stop=stop)
        columns += [ops.slice_(logits, axis=-1, start=done, stop=start)] if start > done else []
        columns += [ops.fill(hidden, value=MIN_LOGIT)]
        done = stop
    if done < logits.shape[-1]:
        columns += [ops.slice_(logits, axis=-1, start=done, stop=logits.shape[-1])]
    return reduce(partial(ops.concat, axis=-1), columns)
