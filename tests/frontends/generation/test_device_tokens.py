"""Tokens that the device chooses: the same as the host chooses from the logits, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket import ops
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.numpy.backend import NumpyBackend
from hocket.frontends.errors import ModelError
from hocket.frontends.generation.generate import (
    NO_LOGITS,
    GenerationParams,
    SampledToken,
    compile_generation_plans,
    generate_texts,
    sample_tokens_of_all_sequences,
)
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.gguf.tokenization.tokenizer import tokenizer_from_metadata
from hocket.frontends.inference.decoding.device_tokens import (
    TokenChoice,
    can_choose_tokens_on_device,
    make_device_sampling_step,
    make_step_choosing_tokens_on_device,
)
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Batch, Model, Step
from hocket.frontends.open_model import open_model
from hocket.graph import DType, Graph, Value

from ...given.devices.emulation import needs_compiler
from ...given.models.goldens import NAMES_OF_EACH_GRAPH, path_of

LARGEST_LOGIT = Sampling()
PROMPTS_OF_THREE = [[100, 200, 300], [7], [50, 60]]
EMULATED = [needs_compiler, pytest.mark.long(cases=1)]
DEVICES_THAT_CHOOSE = ["cpu:0", "numpy:0", pytest.param("cuda-emulated:0", marks=EMULATED)]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backends with outputs in host memory choose tokens, too."""
    for backend in (CpuBackend, NumpyBackend):
        monkeypatch.setattr(backend, "has_separate_memory", True, raising=False)


def open_session(
    device: str = "cpu:0", path: Path | None = None, *, context: int = 64, sequences: int = 1, batch: int = 64
) -> Session:
    on = DeviceGroup(devices=(device,))
    return Session(open_model(path), on=on, context=context, sequences=sequences, batch=batch)


def sample(
    session: Session,
    prompts: list[list[int]],
    *,
    needs_logits: bool,
    known: list[list[int]] | None = None,
    **params: Any,
) -> Iterator[SampledToken]:
    known = [[] for _ in prompts] if known is None else known
    settings = replace(GenerationParams(6, LARGEST_LOGIT), **params)
    return sample_tokens_of_all_sequences(session, prompts, settings, known=known, needs_logits=needs_logits)


OpenEmptySession = Callable[[str, str], Session]


@pytest.fixture(scope="module")
def open_empty_session() -> OpenEmptySession:
    """Return a function of a device and a use, which gives the session of both, of three empty sequences.

    A session keeps its plans, which take most of the time of a case.
    """

    @cache
    def open_once(device: str, use: str) -> Session:
        return open_session(device, sequences=3)

    def open_and_reset(device: str, use: str) -> Session:
        session = open_once(device, use)
        for i in range(session.sequences):
            session.reset(i)
        return session

    return open_and_reset


def count_token_steps(session: Session) -> int:
    return sum(step.output_kind == "token" for step in session.planned_steps)


@pytest.mark.long
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("device", DEVICES_THAT_CHOOSE)
def test_a_device_chooses_the_tokens_that_the_host_chooses(device: str, open_empty_session: OpenEmptySession) -> None:
    """Three sequences; one of them ends early. Then the text goes on from the states that the steps have left."""
    found = []
    for needs_logits in (True, False):
        session = open_empty_session(device, "logits" if needs_logits else "token")
        known: list[list[int]] = [[], [], []]
        first = [*sample(session, PROMPTS_OF_THREE, needs_logits=needs_logits, known=known)]
        stop = frozenset({first[4].token})
        again = [*sample(session, [[5], [], [9, 8]], needs_logits=needs_logits, known=known, end_tokens=stop)]
        assert count_token_steps(session) == (0 if needs_logits else 1)
        assert all(one.logits is NO_LOGITS for one in first[3:]) is not needs_logits
        logits = session.evaluate([[3], [4], []])
        found.append(([(one.sequence, one.token) for one in (*first, *again)], known, session.lengths, logits))
    (tokens, texts, lengths, logits), (own_tokens, own_texts, own_lengths, own_logits) = found
    assert (own_tokens, own_texts, own_lengths) == (tokens, texts, lengths)
    assert all(np.array_equal(a, b) for a, b in zip(own_logits, logits, strict=True))


@pytest.mark.usefixtures("everywhere")
@pytest.mark.long(cases=2)
@pytest.mark.parametrize("name", NAMES_OF_EACH_GRAPH)
def test_every_fixture_continues_its_text_with_the_same_tokens(name: str) -> None:
    texts = []
    for needs_logits in (True, False):
        session = open_session(path=path_of(name))
        texts.append([one.token for one in sample(session, [[1, 2, 3]], needs_logits=needs_logits)])
        assert count_token_steps(session) == (0 if needs_logits else 1)
    assert texts[1] == texts[0]


@pytest.mark.long
@pytest.mark.usefixtures("everywhere")
def test_two_texts_of_one_session_may_alternate() -> None:
    """The device holds the tokens of the last step, which the other text has run."""
    found = []
    for needs_logits in (True, False):
        session = open_session(sequences=2)
        first = sample(session, [[1, 2, 3], []], needs_logits=needs_logits)
        second = sample(session, [[], [7, 8]], needs_logits=needs_logits)
        found.append([(a.token, b.token) for a, b in zip(first, second, strict=True)])
    assert found[0] == found[1]
    assert len(found[0]) == 6


@needs_compiler
def test_only_eight_bytes_are_read_back_for_a_token() -> None:
    session = open_session("cuda-emulated:0")
    nbytes = {}
    for step in (make_step_choosing_tokens_on_device(session, 8), session.make_step(1, 8)):
        outputs = session.plan(step).graph.outputs.values()
        nbytes[step.output_kind] = sum(value.spec.nbytes for value in outputs)
    assert nbytes == {"token": 8, "logits": 4 * session.model.vocabulary_size}
    assert "tokens" in {v.node.name for v in session.plan(session.make_step(1, 8)).graph.inputs}
    assert "tokens" not in {
        v.node.name for v in session.plan(make_step_choosing_tokens_on_device(session, 8)).graph.inputs
    }


@needs_compiler
@pytest.mark.long
def test_the_host_writes_a_token_only_if_the_device_has_not_chosen_it(monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session("cuda-emulated:0")
    writes = []
    state = session.store.state

    def spy(name: str) -> object:
        writes.append(name)
        return state(name)

    monkeypatch.setattr(session.store, "state", spy)
    assert len([*sample(session, [[1, 2, 3]], needs_logits=False)]) == 6
    assert writes == ["next_token"]  # the first one, from the logits of the prompt


SAMPLED = [
    {"sampling": Sampling(temperature=1.0), "seed": 7},
    {"sampling": Sampling(temperature=0.7, top_k=3, top_p=0.6, min_p=0.2), "seed": 8},
    {"sampling": Sampling(bias=((5, 1.0),))},
    {"sampling": Sampling(repeat_penalty=1.1)},
    {"sampling": Sampling(temperature=1.0, presence_penalty=0.1), "seed": 9},
    {"sampling": Sampling(temperature=2.0, frequency_penalty=-3.0, bias=((5, 1.0), (6, -np.inf))), "seed": 10},
]
SAMPLED_ON_DEVICES = [
    pytest.param(
        params,
        device,
        marks=[
            *(EMULATED if device == "cuda-emulated:0" else ()),
            *([pytest.mark.nightly(cases=0)] if device != "cpu:0" and number not in (1, 5) else ()),
        ],
    )
    for device in ("cpu:0", "numpy:0", "cuda-emulated:0")
    for number, params in enumerate(SAMPLED)
]
"""All on the CPU. On the others a text without and one with names of tokens, which have graphs of their own."""


@pytest.mark.long
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(("params", "device"), SAMPLED_ON_DEVICES, ids=str)
def test_the_host_samples_from_candidates_as_from_all_logits(
    params: dict[str, Any], device: str, open_empty_session: OpenEmptySession
) -> None:
    found = []
    for needs_logits in (True, False):
        session = open_empty_session(device, "logits" if needs_logits else "sampled")
        prompts, stop = PROMPTS_OF_THREE, frozenset[int]()
        known: list[list[int]] = [[], [], []]
        for _ in range(2):  # a sequence of the second text ends early, if its token occurs again
            sampled = [*sample(session, prompts, needs_logits=needs_logits, known=known, end_tokens=stop, **params)]
            prompts, stop = [[5], [], [9, 8]], frozenset({sampled[4].token})
        assert any(one.logits is NO_LOGITS for one in sampled) is not needs_logits
        kinds = {step.output_kind for step in session.planned_steps}
        assert kinds == ({"logits"} if needs_logits else {"logits", "sampled"})
        logits = session.evaluate([[3], [4], []])
        found.append((known, session.lengths, [one.tolist() for one in logits]))
    assert found[0] == found[1]


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    "params",
    [
        {"sampling": Sampling(temperature=1.0, top_k=0)},
        {"sampling": Sampling(temperature=1.0, top_k=257)},
        {"sampling": Sampling(temperature=1.0, bias=tuple((i, 1.0) for i in range(300)))},
        {"token_count": 100},
        {"pinned_tokens": 2},
    ],
    ids=lambda params: str(params)[:60],
)
def test_the_host_reads_all_logits_for_other_texts(params: dict[str, object]) -> None:
    session = open_session()
    assert len([*sample(session, [[1, 2, 3]], needs_logits=False, limit=2, **params)]) == 2
    assert {step.output_kind for step in session.planned_steps} == {"logits"}


@pytest.mark.long
@needs_compiler
def test_candidates_are_few_bytes_in_few_launches() -> None:
    session = open_session("cuda-emulated:0")
    plain = session.make_step(1, 8)
    launches, nbytes = {}, {}
    for named, changed in ((0, None), (64, [5])):
        step, inputs = make_device_sampling_step(
            session, 8, [TokenChoice(40, changed=changed, bias=[1.0], occurrences=[1])]
        )
        assert sum(array.nbytes for array in inputs.values()) == 4 + 56 + (4 * named + 8 * (named + 1)) * (named > 0)
        nbytes[named] = sum(value.spec.nbytes for value in session.plan(step).graph.outputs.values())
        launches[named] = len(session.executor(step).list_kernel_names()) - len(
            session.executor(plain).list_kernel_names()
        )
    assert nbytes == {0: 8 + 8 * 64, 64: 8 + 8 * 128 + 4 * 65}
    assert launches[0] <= 7
    assert launches[64] <= 9


@pytest.mark.usefixtures("everywhere")
def test_a_nan_that_is_no_candidate_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(None)
    build = type(model).graph

    def spoil(self: Model, step: Step) -> Graph:
        graph = build(self, step)
        if step.output_kind != "sampled":
            return graph
        return Graph(
            {
                **graph.outputs,
                "token": ops.cast(
                    ops.fill(ops.cast(graph.outputs["token"], dtype=DType.F32), value=300.0), dtype=DType.I32
                ),
            },
            graph.updates,
        )

    monkeypatch.setattr(type(model), "graph", spoil)
    session = Session(model, on=DeviceGroup(devices=("numpy:0",)), context=64)
    with pytest.raises(ModelError, match="gives token 300 the logit nan; its file is damaged"):
        [*sample(session, [[1, 2, 3]], needs_logits=False, sampling=Sampling(temperature=1.0))]


@pytest.mark.usefixtures("everywhere")
def test_plans_of_a_text_are_compiled_before_it() -> None:
    session = open_session()
    compile_generation_plans(session, [1, 2, 3], GenerationParams(4, LARGEST_LOGIT))
    steps = session.planned_steps
    assert [step.output_kind for step in steps] == ["logits", "token"]
    assert len([*sample(session, [[1, 2, 3]], needs_logits=False, limit=4)]) == 4
    assert session.planned_steps == steps


def test_a_backend_with_outputs_in_host_memory_reads_logits() -> None:
    session = open_session()
    assert not can_choose_tokens_on_device(session)
    assert len([*sample(session, [[1, 2, 3]], needs_logits=False, limit=2)]) == 2
    assert count_token_steps(session) == 0


@pytest.mark.usefixtures("everywhere")
def test_logits_that_are_no_numbers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `Sampling.choose_token` says it, also if the device finds the NaN."""
    model = open_model(None)
    build = type(model).graph

    def spoil(self: Model, step: Step) -> Graph:
        graph = build(self, step)
        if step.output_kind != "token":
            return graph
        token, logit = graph.outputs["token"], graph.outputs["logit"]
        not_a_number: Value = ops.log(ops.scale(ops.fill(logit, value=0.0), scale=1.0, bias=-1.0))
        return Graph({"token": token, "logit": not_a_number}, graph.updates)

    monkeypatch.setattr(type(model), "graph", spoil)
    session = Session(model, on=DeviceGroup(devices=("numpy:0",)), context=64)
    with pytest.raises(ModelError, match="the logit nan; its file is damaged, fetch it again"):
        [*sample(session, [[1, 2, 3]], needs_logits=False)]


@pytest.mark.usefixtures("everywhere")
def test_a_step_of_tokens_has_one_token_for_each_sequence() -> None:
    for sizes in ((1, 2, 64, 64, 1), (2, 1, 64, 64, 1)):
        with pytest.raises(ModelError, match="the output kind token needs one new token and one output per sequence"):
            Step(*sizes, output_kind="token")
    session = open_session()
    inputs = session.model.inputs(make_step_choosing_tokens_on_device(session, 4), Batch([[5]], [3]))
    assert "tokens" not in inputs


@pytest.mark.usefixtures("everywhere")
def test_a_saved_session_has_no_next_token(tmp_path) -> None:
    session = open_session()
    known: list[list[int]] = [[]]
    assert len([*sample(session, [[1, 2, 3]], needs_logits=False, known=known)]) == 6
    assert "next_token" in session.store.states
    assert "next_token" not in session.state_names
    save_state(session, known, tmp_path / "state")
    other = open_session()
    (text,) = load_state(other, tmp_path / "state")
    assert text == known[0]
    (logits,), (expected,) = (one.evaluate([[9]]) for one in (other, session))
    assert np.array_equal(logits, expected)
    session.reset(0)
    assert not session.store.state("next_token").any()


@pytest.mark.long
@pytest.mark.usefixtures("everywhere")
def test_texts_of_several_prompts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for on_device in (True, False):
        session = open_session(sequences=3)
        if not on_device:
            monkeypatch.undo()
        tokenizer = tokenizer_from_metadata(session.model.gguf.metadata)
        params = GenerationParams(8, LARGEST_LOGIT)
        known: list[list[int]] = [[], [], []]
        texts.append(generate_texts(session, PROMPTS_OF_THREE, params, (), tokenizer=tokenizer, known=known))
        assert count_token_steps(session) == on_device
    assert texts[0] == texts[1]
