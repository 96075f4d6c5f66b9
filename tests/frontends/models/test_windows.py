"""Layers with an attention window store only its last tokens, for any context; results stay the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hocket.frontends.inference.rewind import make_checkpoint, restore_checkpoint
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Model
from hocket.frontends.models.inputs.step import count_cache_rows_with_spare
from hocket.frontends.open_model import open_model

from ...given.models.architectures import write_model
from ...given.models.goldens import F64, nmse

EXACT, BATCH = DeviceGroup(exact=True), 8


def session(model: Model, batch: int = BATCH, *, on: DeviceGroup = EXACT, sequences: int = 1) -> Session:
    return Session(model, on=on, context=256, batch=batch, sequences=sequences)


def open_with_tokens(name: str, folder: Path) -> tuple[Model, int, list[int]]:
    """A model, the window of its layers, and four times as many tokens."""
    model = open_model(write_model(name, folder))
    window = max(model.hyper.windows.values())
    return model, window, np.random.default_rng(3).integers(1, model.vocabulary_size, 4 * window).tolist()


def logits(one: Session, tokens: list[int]) -> F64:
    return one.evaluate([tokens], every_position=True)[0].astype(np.float64)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma4-mixed", "gpt-oss-moe", "lfm2-dense", "dots3note-moe"])
def test_tokens_one_by_one_equal_one_batch_in_the_memory_of_a_window(name: str, tmp_path: Path) -> None:
    model, window, tokens = open_with_tokens(name, tmp_path)
    whole, rolling = session(model, 256), session(model)
    want = logits(whole, tokens)
    assert nmse(np.concatenate([logits(rolling, [token]) for token in tokens]), want) <= 1e-10
    assert nmse(logits(session(model), tokens), want) <= 1e-10
    for layer, seen in model.hyper.windows.items():
        for state in {f"cache_k.{layer}", f"cache_v.{layer}"} & set(rolling.store.states):
            assert rolling.store.state(state).shape[0] == count_cache_rows_with_spare(seen + BATCH if seen else 256)
            assert whole.store.state(state).shape[0] == count_cache_rows_with_spare(256)
    assert window in model.hyper.windows.values()


@pytest.mark.long
def test_sequences_that_turn_at_different_times_equal_each_alone(tmp_path: Path) -> None:
    model, _, tokens = open_with_tokens("gemma4-mixed", tmp_path)
    wants = [logits(session(model, 256), tokens[at:])[-1] for at in (0, 40)]
    both = session(model, on=DeviceGroup(devices=("cpu:0", "cpu:1"), split_mode="tensor", exact=True), sequences=2)
    both.evaluate([tokens[:33], []])
    both.evaluate([tokens[33:35], tokens[40:61]])
    got = both.evaluate([tokens[35:], tokens[61:]])
    assert max(nmse(a[-1], b) for a, b in zip(got, wants, strict=True)) <= 1e-10


def test_a_sequence_that_has_wrapped_around_is_rewound(tmp_path: Path) -> None:
    model, window, tokens = open_with_tokens("gemma4-mixed", tmp_path)
    one = session(model)
    one.evaluate([tokens[: 2 * window + 3]])
    point = make_checkpoint(one)
    assert not point.states  # caches are not copied
    want = one.evaluate([tokens[:BATCH]])[0]
    restore_checkpoint(one, point)
    one.evaluate([tokens[20 : 20 + BATCH]])
    restore_checkpoint(one, point)
    assert nmse(one.evaluate([tokens[:BATCH]])[0], want) <= 1e-12


@pytest.mark.parametrize("batch", [16, 256], ids=["longer", "whole"])
def test_a_saved_window_goes_on_in_another_one(batch: int, tmp_path: Path) -> None:
    model, window, tokens = open_with_tokens("gemma4-mixed", tmp_path)
    want = logits(session(model, 256), tokens)[-1]
    first, second, third = session(model), session(model, batch), session(model)
    first.evaluate([tokens[: 2 * window]])
    save_state(first, [tokens[: 2 * window]], tmp_path / "one")
    load_state(second, tmp_path / "one")
    second.evaluate([tokens[2 * window : 3 * window]])
    save_state(second, [tokens[: 3 * window]], tmp_path / "two")
    load_state(third, tmp_path / "two")
    assert nmse(third.evaluate([tokens[3 * window :]])[0][-1], want) <= 1e-10
