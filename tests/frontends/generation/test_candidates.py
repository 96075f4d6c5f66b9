"""The choice among a few candidates is the choice among all logits, for every setting, seed and tie."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.inference.decoding.device_tokens import DeviceArgmaxToken, TokenCandidates

Logits = npt.NDArray[np.float32]
TOKEN_COUNT = 700


def _make_normal(rng: np.random.Generator) -> Logits:
    return rng.normal(0, 3, TOKEN_COUNT).astype(np.float32)


def _make_tied(rng: np.random.Generator) -> Logits:
    """Few different logits, among them both zeros: ties within the candidates and at their end."""
    return rng.choice(np.array([-1.0, -0.0, 0.0, 0.5, 1.0], np.float32), TOKEN_COUNT)


def _make_nearly_tied(rng: np.random.Generator) -> Logits:
    """Neighbours in float32: a penalty that is rounded differently would exchange them."""
    return (np.float32(5) + rng.integers(0, 3, TOKEN_COUNT) * np.spacing(np.float32(5))).astype(np.float32)


def _make_partly_banned(rng: np.random.Generator) -> Logits:
    return np.where(rng.random(TOKEN_COUNT) < 0.95, -np.inf, rng.normal(0, 3, TOKEN_COUNT)).astype(np.float32)


def choose_settings(rng: np.random.Generator) -> Sampling:
    def pick(*values: float) -> float:
        return float(rng.choice(values))

    tokens = rng.integers(0, TOKEN_COUNT, int(rng.integers(0, 4))).tolist()
    return Sampling(
        temperature=pick(0, 1e-3, 0.7, 1, 3),
        top_k=int(pick(1, 2, 40, 64, 256)),
        top_p=pick(1, 0.95, 0.5, 1e-6),
        min_p=pick(0, 0.05, 0.5, 0.999),
        repeat_penalty=pick(1, 1, 1.1, 0.5),
        repeat_last_n=int(pick(-1, 0, 1, 64)),
        presence_penalty=pick(0, 0, 0.1, -2),
        frequency_penalty=pick(0, 0, 0.3, -1e30, 1e30),
        bias=tuple((token, pick(-np.inf, 1.5, -1e30, 1e30, 3)) for token in tokens),
    )


def select_candidates(logits: Logits, count: int, named: list[int]) -> TokenCandidates:
    """Select candidates as the graph of a step does, by a stable order."""
    largest = int(np.argmax(logits))
    ids = np.concatenate((np.argsort(-logits, kind="stable")[:count], np.array(named, np.int64))).astype(np.int32)
    return TokenCandidates(DeviceArgmaxToken(largest, float(logits[largest])), ids, logits[ids])


def list_changed_tokens(sampling: Sampling, before: list[int]) -> list[int]:
    """List the tokens that have a bias or a penalty, as a step that reads the last token of `before` names them."""
    choice = sampling.describe_choice(0, before, max(0, len(before) - 1))
    return sorted({*(choice.changed or ()), *(before[-1:] if choice.counts_read_token else ())})


def result_or_message(choose: Callable[..., int], *operands: object) -> int | str:
    try:
        return choose(*operands)
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize("make_logits", [_make_normal, _make_tied, _make_nearly_tied, _make_partly_banned])
def test_a_choice_among_candidates_is_the_choice_among_all_tokens(make_logits: Callable[..., Logits]) -> None:
    rng = np.random.default_rng(20261130)
    changed_a_logit = 0
    for seed in range(600):
        logits, sampling = make_logits(rng), choose_settings(rng)
        before = rng.choice(np.argsort(-logits)[:20], int(rng.integers(0, 90))).tolist()
        named = list_changed_tokens(sampling, before)
        assert sampling.largest_logits_needed is not None
        candidates = select_candidates(logits, sampling.largest_logits_needed + len(named), named)
        expected = result_or_message(sampling.choose_token, logits, np.random.default_rng(seed), before)
        found = result_or_message(sampling.choose_candidate, candidates, np.random.default_rng(seed), before)
        assert found == expected, (seed, sampling)
        changed_a_logit += bool(named)
    assert changed_a_logit > 200


def test_a_token_is_sampled_as_numpy_chooses_it() -> None:
    rng = np.random.default_rng(5)
    for seed in range(2000):
        logits, temperature = _make_normal(rng), float(rng.choice([1e-3, 0.7, 1, 3]))
        sampling = Sampling(temperature=temperature, top_k=int(rng.choice([0, 5, 40])))
        ids, filtered = sampling.filter_tokens(logits)
        weights = np.exp((filtered - filtered[0]) / temperature)
        expected = np.random.default_rng(seed).choice(ids, p=weights / weights.sum())
        assert sampling.choose_token(logits, np.random.default_rng(seed)) == expected


def test_too_few_candidates_would_change_the_choice() -> None:
    """The test above can fail: a penalty moves the largest logits behind the missing ones."""
    logits = np.arange(10, 0, -1, dtype=np.float32)
    sampling = Sampling(presence_penalty=100.0)
    named = list_changed_tokens(sampling, [0, 1])
    assert named == [0, 1]
    rng = np.random.default_rng(0)
    assert sampling.choose_candidate(select_candidates(logits, 3, named), rng, [0, 1]) == 2
    assert sampling.choose_candidate(select_candidates(logits, 2, named), rng, [0, 1]) == 0


def test_a_nan_or_an_infinity_is_the_error_of_all_logits() -> None:
    for bad in (np.nan, np.inf):
        logits = np.zeros(9, np.float32)
        logits[4] = bad
        with pytest.raises(ModelError, match=f"gives token 4 the logit {bad}; its file is damaged"):
            Sampling(temperature=1.0).choose_candidate(select_candidates(logits, 2, []), np.random.default_rng(0))


def test_a_choice_that_may_read_all_logits_names_no_count() -> None:
    assert Sampling(temperature=1.0, top_k=0).largest_logits_needed is None
    assert Sampling(temperature=1.0, top_k=257).largest_logits_needed is None
    assert Sampling(temperature=1.0, top_k=256).largest_logits_needed == 256
    assert Sampling(top_k=0).largest_logits_needed == 1
