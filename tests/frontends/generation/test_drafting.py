"""A draft that looks ahead changes no token, and leaves the session as one without a draft does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hocket.cli import main
from hocket.frontends.errors import ModelError
from hocket.frontends.generation.generate import generate_tokens
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.generation.speculative import ModelDrafter, SpeculativeDecoder
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model

from ...given.models.goldens import TINY, path_of, tokens_of

GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=1.0)


class Wrong(ModelDrafter):
    """A drafter with `right` correct draft tokens, one more in each turn; the others are wrong."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.right = 0

    def draft_tokens(self, known: Sequence[int], count: int) -> list[int]:
        tokens = super().draft_tokens(known, count)
        self.right = (self.right + 1) % (count + 1)
        vocabulary = self.session.model.vocabulary_size
        return [token if i < self.right else (token + 1) % vocabulary for i, token in enumerate(tokens)]


EXACT = DeviceGroup(exact=True)


def session(name: str, on: DeviceGroup = EXACT) -> Session:
    return Session(open_model(path_of(name)), on=on, context=64)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    ("name", "devices"), [("qwen3", 1), ("qwen35", 1), ("qwen35", 2)], ids=["cache", "states", "states cut"]
)
def test_a_draft_changes_no_token_and_leaves_nothing_behind(name: str, devices: int, sampling: Sampling) -> None:
    group = DeviceGroup(
        devices=tuple(f"cpu:{i}" for i in range(devices)), split_mode="tensor" if devices > 1 else "auto", exact=True
    )
    alone, drafted = session(name, group), session(name, group)
    ahead = SpeculativeDecoder(drafted, Wrong(session(name)), 3)
    prompt, more = tokens_of(name)[:5], tokens_of(name)[5:7]
    want = list(generate_tokens(alone, prompt, limit=12, sampling=sampling, seed=4))
    assert list(generate_tokens(drafted, prompt, limit=12, sampling=sampling, seed=4, ahead=ahead)) == want
    assert drafted.lengths == alone.lengths
    accepted = ahead.counts
    assert 0 < accepted.run_count < 11
    assert 0 < accepted.accepted_tokens < accepted.drafted_tokens
    known, tail = [*prompt, *want[:-1]], [want[-1], *more]
    want = list(generate_tokens(alone, tail, limit=6, sampling=sampling, seed=4, before=known))
    assert list(generate_tokens(drafted, tail, limit=6, sampling=sampling, seed=4, before=known, ahead=ahead)) == want


def test_every_draft_token_of_the_model_itself_is_right() -> None:
    ahead = SpeculativeDecoder(session("qwen3"), ModelDrafter(session("qwen3")), 4)
    list(generate_tokens(ahead.session, tokens_of("qwen3")[:5], limit=11, sampling=GREEDY, ahead=ahead))
    assert str(ahead.counts) == "draft: 8 of 8 tokens accepted, 4.00 a step"


def test_drafts_end_with_the_context() -> None:
    alone, ahead = session("qwen3"), SpeculativeDecoder(session("qwen3"), ModelDrafter(session("qwen3")), 4)
    prompt = tokens_of("qwen3")[:5] * 11
    want = list(generate_tokens(alone, prompt, limit=-1, sampling=GREEDY))
    assert list(generate_tokens(ahead.session, prompt, limit=-1, sampling=GREEDY, ahead=ahead)) == want
    assert len(want) == 64 - 55 + 1


def test_a_draft_of_other_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match="a draft model needs the same vocabulary"):
        SpeculativeDecoder(session("qwen3"), ModelDrafter(Session(open_model(TINY))), 4)
    assert main(["run", TINY, "-p", "Once", "-md", str(path_of("qwen3"))]) == 2
    assert "a draft model needs the same vocabulary" in capsys.readouterr().err
    assert main(["run", TINY, "-p", "Once", "--draft-max", "3"]) == 2
    assert "has no block that guesses further tokens (MTP); name a draft model with -md" in capsys.readouterr().err


@pytest.mark.long
def test_run_reports_the_count_of_accepted_draft_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    plain = ["run", TINY, "-p", "Once", "-n", "9", "--temp", "0", "--exact", "-c", "64"]
    assert main(plain) == 0
    want = capsys.readouterr().out
    assert main([*plain, "-md", TINY, "--draft-max", "2"]) == 0
    output = capsys.readouterr()
    assert output.out == want
    assert "; draft: 5 of 6 tokens accepted, 1.67 a step; " in output.err
