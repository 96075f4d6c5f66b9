"""The steps of longer texts, which a server prepares while it has no work."""

from __future__ import annotations

import pytest

from hocket.frontends.inference.session import MIN_CONTEXT_BUCKET, Session
from hocket.frontends.open_model import open_model
from hocket.frontends.serving.slots import SlotPool

from ...given.models.goldens import path_of


@pytest.mark.long
def test_a_text_that_reaches_a_longer_bucket_finds_its_steps_prepared() -> None:
    session = Session(open_model(path_of("llama")), context=2 * MIN_CONTEXT_BUCKET, batch=32)
    pool = SlotPool(session, 2, context=2 * MIN_CONTEXT_BUCKET, batch=32)
    pool.compile_short_steps()
    short = set(session._plans)
    assert len([*pool.compile_longer_steps()]) == 2 + 2 + 2  # one and two sequences, prompts of 16 and 32 tokens, both
    assert len(set(session._plans) - short) == 6
    prepared = set(session._plans)
    tokens = [1 + i % 7 for i in range(MIN_CONTEXT_BUCKET + 20)]
    for slot in (0, 1):
        for start in range(0, len(tokens), 32):
            pool.read_prompt(slot, tokens[start : start + 32], tokens[:start])
    pool.decode({0: 3}, {0: tokens})
    pool.decode({0: 4, 1: 5}, {0: [*tokens, 3], 1: tokens})
    assert set(session._plans) == prepared
