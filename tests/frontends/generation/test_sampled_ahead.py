"""Sampled steps are launched before the host has their token, and each text is the text that the host alone samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.numpy.backend import NumpyBackend
from hocket.frontends.generation.generate import NO_LOGITS, GenerationParams, sample_tokens_of_all_sequences
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.ops import REGISTRY
from hocket.scheduler import LaunchedRun

from ...given.devices.emulation import needs_compiler
from ...given.devices.late_stream import LateStream, make_emulation_late

FIRST_TOKENS = [[10, 20, 30], [7], [50, 60]]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    return make_emulation_late(monkeypatch)


@pytest.fixture
def undone(monkeypatch: pytest.MonkeyPatch) -> list[LaunchedRun]:
    """Let the host backends choose tokens, too, and collect the undone runs."""
    for backend in (CpuBackend, NumpyBackend):
        monkeypatch.setattr(backend, "has_separate_memory", True, raising=False)
    runs: list[LaunchedRun] = []
    undo = LaunchedRun.undo
    monkeypatch.setattr(LaunchedRun, "undo", lambda run: (runs.append(run), undo(run)))
    return runs


def open_small_session(device: str, sequences: int = 3) -> Session:
    return Session(open_model(None), on=DeviceGroup(devices=(device,)), context=64, sequences=sequences, batch=64)


def sample_pairs(session: Session, sampling: Sampling, seed: int, *, limit: int = 6, needs_logits: bool = False) -> Any:
    for i in range(session.sequences):
        session.reset(i)
    params, known = GenerationParams(limit, sampling, seed=seed), [list[int]() for _ in range(session.sequences)]
    prompts = FIRST_TOKENS[: session.sequences]
    samples = [*sample_tokens_of_all_sequences(session, prompts, params, known=known, needs_logits=needs_logits)]
    assert all(one.logits is NO_LOGITS for one in samples[session.sequences :]) is not needs_logits
    return [(one.sequence, one.token) for one in samples]


def choose_settings(rng: np.random.Generator) -> Sampling:
    def pick(*values: float) -> float:
        return float(rng.choice(values))

    tokens = rng.integers(0, 256, int(rng.integers(0, 3))).tolist()
    return Sampling(
        temperature=pick(0, 0.7, 1, 3, 100),
        top_k=int(pick(1, 5, 40, 200)),
        top_p=pick(1, 0.95, 0.5),
        min_p=pick(0, 0.05, 0.5),
        repeat_penalty=pick(1, 1, 1.1, 0.5),
        repeat_last_n=int(pick(-1, 0, 1, 2, 64)),
        presence_penalty=pick(0, 0, 0.1, -2),
        frequency_penalty=pick(0, 0, 0.3, -3),
        bias=tuple((token, pick(-np.inf, 1.5, 5)) for token in [*tokens, *tokens[:1]]),
    )


@pytest.mark.long
@pytest.mark.parametrize("device", ["numpy:0", "cpu:0", pytest.param("cuda-emulated:0", marks=[needs_compiler])])
def test_every_setting_and_seed_gives_the_text_of_the_host(device: str, undone: list[LaunchedRun]) -> None:
    """The device has sampled each token of the text, or else a launched step would have been undone."""
    rng, session, kinds = np.random.default_rng(11), open_small_session(device), set[str]()
    for seed in range(60 if device == "numpy:0" else 6):
        sampling = choose_settings(rng)
        expected = sample_pairs(session, sampling, seed, needs_logits=True)
        assert sample_pairs(session, sampling, seed) == expected, (seed, sampling)
    kinds = {step.output_kind for step in session.planned_steps}
    assert {"logits", "sampled"} <= kinds <= {"logits", "sampled", "token"}
    assert not undone


def test_another_token_of_the_device_is_undone(undone: list[LaunchedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(temperature=1.0, repeat_penalty=1.2)
    expected = sample_pairs(open_small_session("numpy:0"), sampling, 3, needs_logits=True)
    original = type(REGISTRY["sample_token"]).run_reference

    def choose_second(self: Any, arrays: Any, attrs: Any) -> Any:
        return (arrays[1][..., 1].copy(),) if self.name == "sample_token" else original(self, arrays, attrs)

    monkeypatch.setattr(type(REGISTRY["sample_token"]), "run_reference", choose_second)
    assert sample_pairs(open_small_session("numpy:0"), sampling, 3) == expected
    assert undone


@pytest.mark.long
def test_a_text_goes_on_with_all_logits_when_candidates_are_too_many(undone: list[LaunchedRun]) -> None:
    """All earlier tokens have a penalty; the context of more than 128 different ones does not fit the candidates."""
    sampling = Sampling(temperature=1.0, presence_penalty=0.5, repeat_last_n=-1, top_k=200)
    session = Session(open_model(None), on=DeviceGroup(devices=("numpy:0",)), context=300, batch=300)
    prompt, texts = [*range(100, 220)], []
    for needs_logits in (True, False):
        session.reset(0)
        params = GenerationParams(150, sampling, seed=5)
        samples = sample_tokens_of_all_sequences(session, [prompt], params, known=[[]], needs_logits=needs_logits)
        texts.append([one.token for one in samples])
    assert texts[0] == texts[1]
    kinds = {step.output_kind for step in session.planned_steps}
    assert kinds == {"logits", "sampled"}


@pytest.mark.long
@needs_compiler
def test_the_next_sampled_step_is_launched_before_the_host_waits(late: LateStream) -> None:
    session = open_small_session("cuda-emulated:0", 1)
    sampling = Sampling(temperature=1.0, presence_penalty=0.3)
    expected = sample_pairs(session, sampling, 9, needs_logits=True)
    late.log.clear()
    first = late.runs
    assert sample_pairs(session, sampling, 9) == expected
    prompt, *steps = range(first, late.runs)
    order = [("launch", prompt), ("read", prompt), ("wait", prompt), ("launch", steps[0]), ("read", steps[0])]
    for step in steps:
        order += [("launch", step + 1), ("read", step + 1)] if step != steps[-1] else []
        order.append(("wait", step))
    assert late.log == order
