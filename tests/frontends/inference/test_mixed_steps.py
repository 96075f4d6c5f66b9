"""Mixed steps of a session: a row has the bits that it has in a step of decoded tokens, or of a prompt, alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.inference.mixed_step import can_run_mixed_steps, evaluate_mixed_step, make_mixed_step
from hocket.frontends.inference.prefill_chunks import F32
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Step
from hocket.frontends.open_model import open_model

from ...given.models.goldens import path_of

SEQUENCES, CONTEXT, BLOCKS, BATCH = 4, 200, 17, 64
READING = 2
"""The sequence of the prompt."""
ROUNDS = (
    # new tokens of each sequence, and of the prompt
    ((1, 1, 0, 1), 40),
    ((1, 0, 0, 1), 64),
    ((1, 1, 0, 0), 3),
    ((0, 1, 0, 1), 16),
)


def make_session(name: str, blocks: int = 0, **options: object) -> Session:
    first = Session(open_model(path_of(name)), on=DeviceGroup(**options), context=CONTEXT, batch=BATCH)
    session = Session(first.model, like=first, sequences=SEQUENCES, context=CONTEXT, batch=BATCH, blocks=blocks)
    session.tables = np.random.default_rng(5).permutation(np.arange(1, 17)).reshape(SEQUENCES, 4).tolist()
    return session


def draw(rng: np.random.Generator, session: Session, count: int) -> list[int]:
    return rng.integers(0, session.model.vocabulary_size, count).tolist()


def evaluate_alone(session: Session, tokens: Sequence[list[int]], prompt: list[int]) -> list[F32]:
    """Decode in one step, and read the prompt in another one, as the engine does."""
    rows = session.evaluate(tokens)
    session.min_tokens = 16
    rows[READING] = session.evaluate([prompt if i == READING else [] for i in range(SEQUENCES)])[READING]
    session.min_tokens = 1
    return rows


CASES = {
    "floats": ("llama", {}),
    "bfloat16": ("qwen3-bf16", {}),
    "quantised": ("qwen3-q4_k_m", {"threads": 2}),
    "quantised caches": ("qwen3", {"cache_type_k": "q8_0", "cache_type_v": "q4_0"}),
    "delta net": ("qwen35", {"threads": 2}),
    "experts": ("qwen35moe", {}),
    "ring caches": ("gemma3", {}),
    "layers on two devices": ("llama", {"devices": ("cpu:0", "cpu:1")}),
}
RISKY = ("delta net", "ring caches")
"""The states of these cases differ with blocks and without, so each run tries both; of others it tries one."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "blocks"),
    [
        pytest.param(
            case, blocks, marks=[pytest.mark.nightly(cases=0)] * (case not in RISKY and (number + is_pool) % 2)
        )
        for number, case in enumerate(CASES)
        for is_pool, blocks in enumerate((0, BLOCKS))
    ],
)
def test_rows_of_mixed_steps_have_the_bits_of_separate_steps(case, blocks):
    name, options = CASES[case]
    apart, mixed = make_session(name, blocks, **options), make_session(name, blocks, **options)
    assert can_run_mixed_steps(mixed)
    rng = np.random.default_rng(3)
    starts = [draw(rng, apart, count) for count in (30, 5, 20, 41)]
    for session in (apart, mixed):
        session.evaluate(starts)
    for counts, length in ROUNDS:
        tokens, prompt = [draw(rng, apart, count) for count in counts], draw(rng, apart, length)
        want = evaluate_alone(apart, tokens, prompt)
        got = evaluate_mixed_step(mixed, tokens, READING, prompt, min_tokens=16)
        assert apart.lengths == mixed.lengths
        assert [len(rows) for rows in got] == [1 if count or i == READING else 0 for i, count in enumerate(counts)]
        for a, b in zip(want, got, strict=True):
            assert np.array_equal(a, b)
    want, got = (session.evaluate([[7], [8], [9], [10]]) for session in (apart, mixed))
    assert np.array_equal(want, got)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen35", {"devices": ("cpu:0", "cpu:1"), "split_mode": "tensor"}),
        ("llama", {"devices": ("numpy:0",)}),
    ],
)
def test_steps_are_not_mixed_where_a_row_would_have_other_bits(name, options):
    assert not can_run_mixed_steps(make_session(name, **options))


def test_steps_are_not_mixed_on_processors_with_amx(monkeypatch):
    monkeypatch.setattr("hocket.backends.cpu.backend.find_native_or_emulated_amx", lambda: "amx")
    assert not can_run_mixed_steps(make_session("llama"))


def test_a_mixed_step_has_one_new_token_and_logits():
    with pytest.raises(ModelError, match="a step with prompt tokens needs one new token, and logits"):
        Step(2, 4, 64, 64, 2, prompt_tokens=16)
    assert make_mixed_step(make_session("llama"), 16, 30).label == "1 token, 200 cells, 16 prompt tokens"
