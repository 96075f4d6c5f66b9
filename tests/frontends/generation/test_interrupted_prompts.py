"""An interrupt behind a chunk of a prompt: the tokens that the session has evaluated are known."""

from __future__ import annotations

import pytest

from hocket.frontends.generation.generate import GenerationParams, sample_tokens_of_all_sequences
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.inference.session import Session
from hocket.frontends.open_model import open_model

from ...given.models.goldens import TINY


@pytest.mark.parametrize("limit", [0, 3])
def test_the_known_tokens_are_those_of_the_session(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    session = Session(open_model(TINY), context=128, batch=16)
    advance = session.record_evaluated_chunk

    def interrupt_behind_the_second_chunk(chunk: list[list[int]]) -> None:
        advance(chunk)
        if session.lengths == [32]:
            raise KeyboardInterrupt

    monkeypatch.setattr(session, "record_evaluated_chunk", interrupt_behind_the_second_chunk)
    known, prompt = [list[int]()], [*range(3, 53)]
    params = GenerationParams(limit, Sampling(temperature=0.0), 0, frozenset())
    with pytest.raises(KeyboardInterrupt):
        list(sample_tokens_of_all_sequences(session, [prompt], params, known=known))
    assert (session.lengths, known) == ([32], [prompt[:32]])
