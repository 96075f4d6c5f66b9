"""Prompts that are read in parts which follow each other through devices: the same numbers, all of it or nothing."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hocket.backends.base import find_device
from hocket.cli import main
from hocket.frontends.inference import device_group, prefill_chunks
from hocket.frontends.inference.prefill_chunks import MIN_CHUNK_TOKENS, list_allowed_chunk_sizes
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.graph import StepError
from hocket.scheduler.pipelining import stage_times

from ...given.devices.faulty import FaultyCpu
from ...given.models.goldens import TINY, nmse, path_of, tokens_of

ONE, LAYERS = DeviceGroup(threads=1), DeviceGroup(devices=("cpu:0", "cpu:1"), split_mode="layer", threads=1)
FOUR = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
STAGES_OF_GROUPS = DeviceGroup(devices=FOUR, split_mode="layer,tensor", threads=1)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Parts of four tokens, so that texts of tests have several."""
    monkeypatch.setattr(prefill_chunks, "MIN_CHUNK_TOKENS", 4)
    monkeypatch.setattr(prefill_chunks, "list_allowed_chunk_sizes", lambda max_tokens: (4,))


def copy_written_states(session):
    """Return the parts of states that tokens have written, without the spare rows for padding."""
    caches = {
        name: np.asarray(session.store.state(name)) for name in session.state_names if session.is_per_cell_cache(name)
    }
    return {
        name: cache.reshape(session.sequences, -1, cache.shape[-1])[:, : session.cell_count(name)]
        for name, cache in caches.items()
    }


@pytest.mark.parametrize("name", ["llama", "qwen35", "qwen3moe"])
def test_parts_that_follow_each_other_give_what_they_give_one_by_one(name):
    model, tokens = open_model(path_of(name)), tokens_of(name)
    alone, follow = Session(model, on=ONE, batch=4, context=64), Session(model, on=LAYERS, context=64)
    for start, stop in ((0, 15), (15, 16), (16, 27)):
        expected = alone.evaluate([tokens[start:stop]], every_position=True)[0]
        results = follow.evaluate([tokens[start:stop]], every_position=True)[0]
        assert results.tobytes() == expected.tobytes()
    assert len(follow._pipelines) == 1, "both prompts have the same parts and reach as far"
    assert follow.lengths == alone.lengths == [27]
    ours, theirs = copy_written_states(follow), copy_written_states(alone)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", ["llama", "qwen35", "qwen3moe"])
def test_pipelined_prefill_chunks_give_the_results_of_single_ones(name):
    model, tokens = open_model(path_of(name)), tokens_of(name)
    alone, follow = (
        Session(model, on=STAGES_OF_GROUPS, batch=4, context=64),
        Session(model, on=STAGES_OF_GROUPS, context=64),
    )
    for start, stop in ((0, 15), (15, 16), (16, 27)):
        with alone.tracing():  # part by part
            expected = alone.evaluate([tokens[start:stop]], every_position=True)[0]
        results = follow.evaluate([tokens[start:stop]], every_position=True)[0]
        assert results.tobytes() == expected.tobytes()
    assert follow._pipelines
    assert not alone._pipelines
    ours, theirs = copy_written_states(follow), copy_written_states(alone)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("mode", "devices"), [("layer", FOUR[:3]), ("layer,tensor", FOUR)])
def test_exact_results_are_those_of_one_device(mode, devices):
    model, tokens = open_model(path_of("qwen35")), tokens_of("qwen35")[:14]
    one = Session(model, on=DeviceGroup(exact=True), context=64).evaluate([tokens], every_position=True)[0]
    several = Session(model, on=DeviceGroup(devices=devices, split_mode=mode, exact=True), context=64)
    assert nmse(several.evaluate([tokens], every_position=True)[0], one) <= 1e-10
    assert several._pipelines


def test_sequences_of_any_lengths_follow_each_other_together():
    model, tokens = open_model(path_of("llama")), tokens_of("llama")
    texts = [tokens[:11], [], tokens[5:8], tokens[3:7]]
    alone = Session(model, on=ONE, batch=4, context=64, sequences=4).evaluate(texts)
    follow = Session(model, on=LAYERS, context=64, sequences=4)
    results = follow.evaluate(texts)
    assert [rows.shape for rows in results] == [rows.shape for rows in alone]
    assert all(one.tobytes() == two.tobytes() for one, two in zip(results, alone, strict=True))
    assert follow.lengths == [11, 0, 3, 4]


def test_plans_for_a_prompt_are_built_before_it():
    model, tokens = open_model(path_of("llama")), tokens_of("llama")[:12]
    session = Session(model, on=LAYERS, context=64)
    session.compile_plans_for_tokens(len(tokens))
    pipelines = dict(session._pipelines)
    assert {step.output_kind for step in pipelines} == {"hidden", "logits"}, (
        "only the last part reads the output matrix"
    )
    session.evaluate([tokens])
    assert session._pipelines == pipelines


def test_what_needs_the_part_before_or_is_watched_is_read_part_by_part():
    model, tokens = open_model(path_of("llama")), tokens_of("llama")[:12]
    session = Session(model, on=LAYERS, context=64)
    session.evaluate([tokens], reversible=True)
    session.reset(0)
    with session.tracing() as trace:
        session.evaluate([tokens])
    assert len(trace.runs) == 1
    assert not session._pipelines
    assert not Session(
        model, on=DeviceGroup(devices=("cpu:0", "cpu:1"), split_mode="tensor"), context=64
    )._can_pipeline_chunks(12)


@pytest.mark.long
@pytest.mark.parametrize("on", [LAYERS, STAGES_OF_GROUPS], ids=["layer", "layer,tensor"])
def test_a_prompt_that_fails_in_the_middle_leaves_everything_as_it_was(monkeypatch, on):
    backend = FaultyCpu()
    monkeypatch.setattr(device_group, "find_device", lambda name: (backend, find_device(name)[1]))
    model, tokens = open_model(path_of("qwen35")), tokens_of("qwen35")
    whole, broken = (Session(model, on=on, context=64) for _ in range(2))
    for session in (whole, broken):
        session.evaluate([tokens[:3]])
    last, again = broken.group[-1][1], []

    def skip() -> None:
        again.append(0)
        backend.plan_fault(last, 30, late=True, **({"what": skip} if len(again) < 2 else {}))

    backend.plan_fault(last, 30, late=True, what=skip)
    with pytest.raises(StepError, match=str(last)):
        broken.evaluate([tokens[3:20]])
    assert len(again) == 2, "it fails in the third part"
    assert broken.lengths == [3]
    for new in (tokens[8:12], tokens[3:20]):  # fewer, and others, than were written behind the end
        expected = whole.evaluate([new])[0]
        assert broken.evaluate([new])[0].tobytes() == expected.tobytes()


# --------------------------------------------------------------------------------------------------- how many tokens


@pytest.mark.parametrize(
    ("max_tokens", "sizes"),
    [(512, (64, 96, 128, 192, 256, 384, 512)), (100, (64, 96, 100)), (64, (64,)), (20, (20,))],
)
def test_a_part_has_few_sizes(monkeypatch, max_tokens, sizes):
    monkeypatch.setattr(prefill_chunks, "MIN_CHUNK_TOKENS", MIN_CHUNK_TOKENS)
    assert list_allowed_chunk_sizes(max_tokens) == sizes


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "fewest", "message"),
    [
        ("2 layer 256", 64, "in 4 parts of 64, that follow each other through 2 devices, {T}; as one T"),
        ("2 layer 999", 64, "in 4 parts of 64, that follow each other through 2 devices, {T}; as one T"),
        ("2 layer 200", 4, "in 7 parts of 32, 8, that follow each other through 2 devices, {T};"),
        ("4 layer,tensor 128", 64, "in 2 parts of 64, that follow each other through 2 teams of 2 devices,"),
        ("2 layer 64", 64, "as one, {T}; parts have 64 tokens at least"),
        ("2 tensor 256", 64, "as one, {T}; all devices meet, so that none can begin with other tokens"),
    ],
)
def test_the_plan_of_a_prompt_says_in_how_many_parts_it_is_read_and_why(words, fewest, message, capsys, monkeypatch):
    monkeypatch.setattr(prefill_chunks, "MIN_CHUNK_TOKENS", fewest)
    monkeypatch.setattr(prefill_chunks, "list_allowed_chunk_sizes", list_allowed_chunk_sizes)
    count, mode, batch = words.split()
    asked = ("--devices", ",".join(FOUR[: int(count)]), "--split-mode", mode, "-b", batch)
    (line,) = prompt_lines(capsys, *asked)
    assert line.startswith(f"prompt: {min(int(batch), 256)} tokens are read {message.format(T='predicted to take T')}")


def prompt_lines(capsys, *words):
    """Return the lines of `hocket plan` about the prefill, with T for its times."""
    assert main(["plan", str(TINY), "--phase", "prefill", "--ctx-size", "256", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [re.sub(r"\S+ [mu]s", "T", line) for line in lines if line.startswith("prompt: ")]


@pytest.mark.long
def test_what_gains_too_little_is_read_as_one_and_one_device_has_nothing_to_say(capsys, monkeypatch):
    monkeypatch.setattr(prefill_chunks, "MIN_CHUNK_TOKENS", MIN_CHUNK_TOKENS)
    monkeypatch.setattr(stage_times, "MIN_PIPELINE_SPEEDUP", 2.5)
    (line,) = prompt_lines(capsys, "--devices", "cpu:0,cpu:1", "--split-mode", "layer", "-b", "256")
    why = r"steps that follow each other are 1\.\d\d times as fast, and have to be 2\.5 times as fast"
    assert re.fullmatch(rf"prompt: 256 tokens are read as one, predicted to take T; {why}", line)
    assert prompt_lines(capsys, "-b", "256") == []
