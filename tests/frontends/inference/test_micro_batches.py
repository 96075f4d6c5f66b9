"""Sequences in micro-batches give the results of one batch, also after errors, and keep all devices busy."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

import hocket
from hocket.backends.base import find_device
from hocket.cli import main
from hocket.frontends.errors import ModelError
from hocket.frontends.generation.generate import GenerationParams, sample_tokens_of_all_sequences
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.inference import device_group, prefill_chunks
from hocket.frontends.inference.micro_batches import (
    MicroBatchedSession,
    make_session_micro_batched_if_faster,
    open_decode_schedule,
)
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.graph import StepError
from hocket.scheduler import MicroBatchChoice

from ...given.devices.faulty import FaultyCpu
from ...given.models.goldens import TINY, nmse, path_of, tokens_of
from ...given.ranks.thread_link import in_threads

LAYERS = DeviceGroup(devices=("cpu:0", "cpu:1"), split_mode="layer", threads=1)
STAGES_OF_GROUPS = DeviceGroup(devices=("cpu:0", "cpu:1", "cpu:2", "cpu:3"), split_mode="layer,tensor", threads=1)
ON_SPLIT_LAYERS = pytest.mark.parametrize("on", [LAYERS, STAGES_OF_GROUPS], ids=["layer", "layer,tensor"])
GREEDY = Sampling(temperature=0)
MODELS = ["llama", "qwen35", "qwen3moe"]


def in_batches(root, *sizes):
    """Return micro-batches of these sizes, even where they are slower."""
    sessions = [Session(root.model, like=root, sequences=size, context=64, batch=16) for size in sizes]
    return MicroBatchedSession(sessions, MicroBatchChoice(sizes, ((1, 2.0), (len(sizes), 1.0)), 2, 2))


def make_root_session(name, on=LAYERS):
    return Session(open_model(path_of(name)), on=on, context=64)


def texts_of(name, sequences, length=4):
    """Prompts of several lengths, and five tokens behind each."""
    tokens = tokens_of(name)
    return [tokens[i : i + length + i % 3] for i in range(sequences)], [
        tokens[9 + i : 14 + i] for i in range(sequences)
    ]


def read_by(session, prompts, new):
    """Return the results of prompts and later steps by sequence; each step is pending in all micro-batches."""
    rows = [[one] for one in session.evaluate(prompts)]
    with open_decode_schedule(session) as steps:
        for group, place in enumerate(steps.sequence_ranges):
            steps.begin_step(group, [new[i][:1] for i in place])
        for step in range(1, 6):
            for group, place in enumerate(steps.sequence_ranges):
                for i, one in zip(place, steps.finish_oldest_step(), strict=True):
                    rows[i].append(one)
                if step < 5:
                    steps.begin_step(group, [new[i][step : step + 1] for i in place])
    return [np.concatenate(own) for own in rows]


@pytest.mark.long
@ON_SPLIT_LAYERS
@pytest.mark.parametrize("name", MODELS)
def test_exact_results_are_those_of_one_device(name, on):
    prompts, new = texts_of(name, 5)
    alone = Session(open_model(path_of(name)), on=DeviceGroup(exact=True), context=64, sequences=5, batch=16)
    expected = read_by(alone, prompts, new)
    results = read_by(in_batches(make_root_session(name, replace(on, exact=True)), 3, 2), prompts, new)
    assert all(nmse(one, two) <= 1e-10 for one, two in zip(results, expected, strict=True))


@pytest.mark.long
@ON_SPLIT_LAYERS
@pytest.mark.parametrize("name", MODELS)
def test_each_micro_batch_gives_the_bits_that_it_gives_alone(name, on):
    prompts, new = texts_of(name, 4)
    root = make_root_session(name, on)
    both = in_batches(root, 2, 2)
    results = read_by(both, prompts, new)
    for place in both.sequence_ranges:
        alone = Session(root.model, like=root, sequences=2, context=64, batch=16)
        own = slice(place.start, place.stop)
        expected = read_by(alone, prompts[own], new[own])
        assert all(one.tobytes() == two.tobytes() for one, two in zip(results[own], expected, strict=True))
    assert both.lengths == [len(prompt) + 5 for prompt in prompts]


def test_ranks_decode_micro_batches_as_one_device_does():
    prompts, new = texts_of("llama", 4)
    model = open_model(path_of("llama"))
    expected = read_by(
        Session(model, on=DeviceGroup(devices=("numpy:0",)), context=64, sequences=4, batch=16), prompts, new
    )

    def run(world):
        root = Session(model, on=DeviceGroup(devices=("numpy:0",), split_mode="layer"), context=64, world=world)
        return read_by(in_batches(root, 2, 2), prompts, new)

    for results in in_threads(2, run):
        assert all(nmse(one, two) <= 1e-10 for one, two in zip(results, expected, strict=True))


def test_sequences_may_idle_and_read_prompts_of_any_length(monkeypatch):
    monkeypatch.setattr(prefill_chunks, "MIN_CHUNK_TOKENS", 4)
    monkeypatch.setattr(prefill_chunks, "list_allowed_chunk_sizes", lambda max_tokens: (4,))
    tokens, root = tokens_of("llama"), make_root_session("llama")
    texts = [tokens[:11], [], tokens[5:8], tokens[3:7]]
    expected = Session(root.model, like=root, sequences=4, context=64).evaluate(texts, every_position=True)
    both = in_batches(root, 2, 2)
    results = both.evaluate(texts, every_position=True)
    assert [one.shape for one in results] == [one.shape for one in expected]
    assert all(nmse(one, two) <= 1e-3 for one, two in zip(results, expected, strict=True) if len(two))
    assert both.lengths == [11, 0, 3, 4]
    assert [len(one) for one in both.evaluate([[], [], [], []])] == [0, 0, 0, 0]
    with pytest.raises(ModelError, match="sequence 3 would have 66 tokens"):
        both.evaluate([[1], [1], [1], [1] * 62])
    both.reset(2)
    assert both.lengths == [11, 0, 0, 4]


def broken_batches(monkeypatch, on):
    backend = FaultyCpu()
    monkeypatch.setattr(device_group, "find_device", lambda name: (backend, find_device(name)[1]))
    return backend, in_batches(make_root_session("qwen35", on), 2, 2)


@pytest.mark.long
@pytest.mark.nightly(cases=1)
@ON_SPLIT_LAYERS
def test_a_step_that_fails_is_taken_back_for_all_sequences(monkeypatch, on):
    backend, broken = broken_batches(monkeypatch, on)
    prompts, new = texts_of("qwen35", 4)
    broken.evaluate(prompts)
    lengths, again = broken.lengths, []
    last = broken.sessions[0].group[-1][1]

    def skip():
        again.append(0)
        backend.plan_fault(last, 30, late=True)

    backend.plan_fault(last, 30, late=True, what=skip)
    with pytest.raises(StepError, match=str(last)):
        broken.evaluate([own[:1] for own in new])
    assert again, "it fails in the second micro-batch"
    assert broken.lengths == lengths
    expected = read_by(in_batches(make_root_session("qwen35", on), 2, 2), prompts, new)
    with open_decode_schedule(broken) as steps:
        steps.begin_step(0, [own[:1] for own in new[:2]])
        steps.begin_step(1, [own[:1] for own in new[2:]])
        results = [*steps.finish_oldest_step(), *steps.finish_oldest_step()]
    assert all(one.tobytes() == two[1:2].tobytes() for one, two in zip(results, expected, strict=True))


@pytest.mark.long
@pytest.mark.nightly(cases=1)
@ON_SPLIT_LAYERS
def test_returned_results_stay_when_a_later_step_fails(monkeypatch, on):
    backend, broken = broken_batches(monkeypatch, on)
    last = broken.sessions[0].group[-1][1]
    prompts, new = texts_of("qwen35", 4)
    broken.evaluate(prompts)
    before = broken.lengths

    def go_on():
        with open_decode_schedule(broken) as steps:
            steps.begin_step(0, [own[:1] for own in new[:2]])
            steps.begin_step(1, [own[:1] for own in new[2:]])
            steps.finish_oldest_step()
            steps.finish_oldest_step()
            backend.plan_fault(last, 30, late=True)
            steps.begin_step(0, [own[1:2] for own in new[:2]])
            steps.begin_step(1, [own[1:2] for own in new[2:]])
            steps.finish_oldest_step()

    with pytest.raises(StepError, match=str(last)):
        go_on()
    assert broken.lengths == [length + 1 for length in before]
    results = broken.evaluate([own[1:2] for own in new])
    expected = read_by(in_batches(make_root_session("qwen35", on), 2, 2), prompts, new)
    assert all(one.tobytes() == two[2:3].tobytes() for one, two in zip(results, expected, strict=True))


@pytest.mark.long
@pytest.mark.nightly(cases=3)
@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), (4,)), ((4,), (1, 3)), ((3, 1), (2, 2))])
@pytest.mark.parametrize("name", ["qwen35", "gemma3"])
def test_a_saved_state_goes_on_in_any_micro_batches(name, saved, loaded, tmp_path):
    root, path = make_root_session(name), tmp_path / "state"
    prompts, new = texts_of(name, 4)

    def sequences(sizes):
        return in_batches(root, *sizes) if len(sizes) > 1 else Session(root.model, like=root, sequences=4, batch=16)

    first, second = sequences(saved), sequences(loaded)
    first.evaluate(prompts)
    save_state(first, prompts, path)
    assert load_state(second, path) == prompts
    assert second.lengths == first.lengths
    one, two = first.evaluate([own[:1] for own in new]), second.evaluate([own[:1] for own in new])
    assert all(nmse(a, b) <= 1e-3 for a, b in zip(one, two, strict=True))


def test_traced_steps_run_one_by_one_and_are_all_in_the_trace():
    prompts, new = texts_of("llama", 4)
    both, plain = (in_batches(make_root_session("llama"), 2, 2) for _ in range(2))
    expected = read_by(plain, prompts, new)
    with both.tracing() as trace:
        results = read_by(both, prompts, new)
    assert len(trace.runs) == 2 * (1 + 5)
    assert all(one.tobytes() == two.tobytes() for one, two in zip(results, expected, strict=True))


def test_a_traced_step_that_fails_is_taken_back_for_all_sequences(monkeypatch):
    prompts, new = texts_of("qwen35", 4)
    broken, plain = (in_batches(make_root_session("qwen35"), 2, 2) for _ in range(2))
    expected = read_by(plain, prompts, new)
    broken.evaluate(prompts)
    lengths = broken.lengths

    def fails(*_, **__):
        raise ArithmeticError("no power")

    with monkeypatch.context() as patch, broken.tracing():
        patch.setattr(broken.sessions[1], "evaluate", fails)
        with pytest.raises(ArithmeticError):
            broken.evaluate([own[:1] for own in new])
    assert broken.lengths == lengths
    results = broken.evaluate([own[:1] for own in new])
    assert all(one.tobytes() == two[1:2].tobytes() for one, two in zip(results, expected, strict=True))


def test_sampled_tokens_are_those_of_each_sequence_alone():
    root, limits = make_root_session("llama"), GenerationParams(9, GREEDY)
    prompts, _ = texts_of("llama", 5)
    expected = []
    for prompt in prompts:
        alone = Session(root.model, like=root, context=64)
        expected.append([one.token for one in sample_tokens_of_all_sequences(alone, [prompt], limits, known=[[]])])
    both, known = in_batches(root, 2, 2, 1), [[] for _ in prompts]
    sampled = list(sample_tokens_of_all_sequences(both, prompts, limits, known=known))
    assert [[one.token for one in sampled if one.sequence == i] for i in range(5)] == expected
    assert known == [[*prompt, *new] for prompt, new in zip(prompts, expected, strict=True)]
    assert both.lengths == [len(tokens) - 1 for tokens in known]


def test_an_abandoned_reader_leaves_nothing_pending():
    both, known = in_batches(make_root_session("llama"), 1, 1), [[], []]
    prompts, _ = texts_of("llama", 2)
    token_stream = sample_tokens_of_all_sequences(both, prompts, GenerationParams(9, GREEDY), known=known)
    for _ in range(3):
        next(token_stream)
    token_stream.close()
    assert all(length < len(tokens) for length, tokens in zip(both.lengths, known, strict=True))
    results = both.evaluate([tokens[length:] for length, tokens in zip(both.lengths, known, strict=True)])
    alone = Session(both.model, like=both.sessions[0], sequences=2, context=64, batch=16)
    assert all(nmse(one, two) <= 1e-3 for one, two in zip(results, alone.evaluate(known), strict=True))


# ------------------------------------------------------------------------------------------------------ where it pays


@pytest.mark.long
def test_sequences_are_split_only_where_a_gain_is_predicted():
    root = Session(open_model(None), on=LAYERS, context=64)
    both = make_session_micro_batched_if_faster(root, 16, context=64)
    assert isinstance(both, MicroBatchedSession)
    assert [one.sequences for one in both.sessions] == [8, 8]
    assert isinstance(make_session_micro_batched_if_faster(root, 1, context=64), Session)
    one_device = Session(open_model(None), on=DeviceGroup(threads=1), context=64)
    assert isinstance(make_session_micro_batched_if_faster(one_device, 16, context=64), Session)
    tensor = Session(
        open_model(None), on=DeviceGroup(devices=("cpu:0", "cpu:1"), split_mode="tensor", threads=1), context=64
    )
    assert isinstance(make_session_micro_batched_if_faster(tensor, 16, context=64), Session)


@pytest.mark.long
def test_the_commands_report_whether_sequences_are_split(capsys):
    layers = ("--devices", "cpu:0,cpu:1", "--split-mode", "layer")
    assert main(["plan", str(TINY), "-np", "16", "--ctx-size", "64", *layers]) == 0
    lines = capsys.readouterr().out.splitlines()
    split_line = (
        r"sequences: 16 sequences run in 2 micro-batches that follow each other through 2 devices, predicted to "
    )
    assert any(re.fullmatch(split_line + r"take \S+ [mu]s a step; as one \S+ [mu]s", line) for line in lines)
    assert main(["plan", str(TINY), "-np", "2", "--phase", "prefill"]) == 2
    assert "-np with --phase prefill" in capsys.readouterr().err


@pytest.mark.long
def test_the_benchmark_of_several_sequences_deals_them(capsys):
    words = ("-np", "1,16", "-p", "4", "-n", "3", "-r", "1", "-t", "1", "-o", "json")
    assert main(["bench", str(TINY), *words, "--devices", "cpu:0,cpu:1", "--split-mode", "layer"]) == 0
    results = capsys.readouterr()
    assert [row["pl"] for row in json.loads(results.out)] == [1, 16]
    assert "hocket: 16 sequences run in 2 micro-batches that follow each other" in results.err


@pytest.mark.long
def test_texts_of_a_batch_are_what_each_would_be_alone():
    prompts = ["It is", "She was", "The", "Mr. Darcy", "On"]
    options = {"max_tokens": 6, "temperature": 0}
    with hocket.Model(devices="cpu:0,cpu:1", split_mode="layer", threads=1, context=64) as model:
        texts = model.generate_batch(prompts, **options)
        assert any(isinstance(lease.session, MicroBatchedSession) for lease in model._idle_sessions.idle_leases)
        assert texts == ["".join(model.generate(prompt, **options)) for prompt in prompts]
