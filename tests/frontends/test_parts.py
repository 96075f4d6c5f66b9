"""Prompts that are read in parts which follow each other through devices: the same numbers, all of it or nothing."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.backends.base import find
from hocket.frontends import devices as devices_of
from hocket.frontends import parts
from hocket.frontends.open import open_model
from hocket.frontends.parts import FEWEST, tokens_of_part
from hocket.frontends.session import Group, Session
from hocket.graph import StepError

from ..given.devices.faulty import FaultyCpu
from ..given.models.goldens import nmse, path_of, tokens_of

ONE, LAYERS = Group(threads=1), Group(("cpu:0", "cpu:1"), "layer", threads=1)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Parts of four tokens, so that texts of tests have several."""
    monkeypatch.setattr(parts, "FEWEST", 4)


def held(session):
    """Of caches and other states all that tokens have written: the spare row takes what pads."""
    return {name: np.asarray(session.store.state(name))[:-1] for name in session.states if session.is_cache(name)}


@pytest.mark.parametrize("name", ["llama", "qwen35", "qwen3moe"])
def test_parts_that_follow_each_other_give_what_they_give_one_by_one(name):
    model, tokens = open_model(path_of(name)), tokens_of(name)
    alone, follow = Session(model, on=ONE, batch=4, context=64), Session(model, on=LAYERS, context=64)
    for start, stop in ((0, 15), (15, 16), (16, 27)):
        wanted = alone.evaluate([tokens[start:stop]], every_position=True)[0]
        given = follow.evaluate([tokens[start:stop]], every_position=True)[0]
        assert given.tobytes() == wanted.tobytes()
    assert len(follow._pipelines) == 1, "both prompts have the same parts and reach as far"
    assert follow.lengths == alone.lengths == [27]
    ours, theirs = held(follow), held(alone)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_exact_results_are_those_of_one_device():
    model, tokens = open_model(path_of("qwen35")), tokens_of("qwen35")[:14]
    one = Session(model, on=Group(exact=True), context=64).evaluate([tokens], every_position=True)[0]
    three = Group(("cpu:0", "cpu:1", "cpu:2"), "layer", exact=True)
    assert nmse(Session(model, on=three, context=64).evaluate([tokens], every_position=True)[0], one) <= 1e-10


def test_sequences_of_any_lengths_follow_each_other_together():
    model, tokens = open_model(path_of("llama")), tokens_of("llama")
    texts = [tokens[:11], [], tokens[5:8], tokens[3:7]]
    alone = Session(model, on=ONE, batch=4, context=64, sequences=4).evaluate(texts)
    follow = Session(model, on=LAYERS, context=64, sequences=4)
    given = follow.evaluate(texts)
    assert [rows.shape for rows in given] == [rows.shape for rows in alone]
    assert all(one.tobytes() == two.tobytes() for one, two in zip(given, alone, strict=True))
    assert follow.lengths == [11, 0, 3, 4]


def test_what_comes_before_a_prompt_is_made_for_it():
    model, tokens = open_model(path_of("llama")), tokens_of("llama")[:12]
    session = Session(model, on=LAYERS, context=64)
    session.prepare(len(tokens))
    made = dict(session._pipelines)
    assert len(made) == 1
    session.evaluate([tokens])
    assert session._pipelines == made


def test_what_needs_the_part_before_or_is_watched_is_read_part_by_part():
    model, tokens = open_model(path_of("llama")), tokens_of("llama")[:12]
    session = Session(model, on=LAYERS, context=64)
    session.evaluate([tokens], reversible=True)
    session.reset(0)
    with session.tracing() as trace:
        session.evaluate([tokens])
    assert len(trace.runs) == 1
    assert not session._pipelines
    assert not Session(model, on=Group(("cpu:0", "cpu:1"), "tensor"), context=64)._following(12, False) > 1


def test_a_prompt_that_fails_in_the_middle_leaves_everything_as_it_was(monkeypatch):
    backend = FaultyCpu()
    monkeypatch.setattr(devices_of, "find", lambda name: (backend, find(name)[1]))
    model, tokens = open_model(path_of("qwen35")), tokens_of("qwen35")
    whole, broken = (Session(model, on=LAYERS, context=64) for _ in range(2))
    for session in (whole, broken):
        session.evaluate([tokens[:3]])
    last, again = broken.group[1][1], []

    def skip() -> None:
        again.append(0)
        backend.plan_fault(last, 30, late=True, **({"what": skip} if len(again) < 2 else {}))

    backend.plan_fault(last, 30, late=True, what=skip)
    with pytest.raises(StepError, match="cpu:1"):
        broken.evaluate([tokens[3:20]])
    assert len(again) == 2, "it fails in the third part"
    assert broken.lengths == [3]
    wanted = whole.evaluate([tokens[3:20]])[0]
    assert broken.evaluate([tokens[3:20]])[0].tobytes() == wanted.tobytes()


# --------------------------------------------------------------------------------------------------- how many tokens


@pytest.mark.parametrize(
    ("tokens", "devices", "most", "size"),
    [
        (2048, 1, 512, 512),
        (2048, 2, 512, 128),
        (2048, 4, 512, 64),
        (2048, 2, 100, 100),
        (100, 2, 512, 64),
        (100_000, 2, 512, 512),
        (1, 2, 512, 64),
    ],
)
def test_parts_are_about_ten_for_each_device(monkeypatch, tokens, devices, most, size):
    monkeypatch.setattr(parts, "FEWEST", FEWEST)
    assert tokens_of_part(tokens, devices, most) == size
