"""Texts of grammars from candidates under a mask on the device are the texts from all logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.numpy.backend import NumpyBackend
from hocket.frontends.errors import ModelError
from hocket.frontends.generation.generate import (
    NO_LOGITS,
    GenerationParams,
    compile_generation_plans,
    sample_tokens_of_all_sequences,
)
from hocket.frontends.generation.grammar import Grammar, GrammarState
from hocket.frontends.generation.lazy_grammar import LazyJsonGrammar
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.gguf.tokenization.tokenizer import tokenizer_from_metadata
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model

from ...given.devices.emulation import needs_compiler
from ...given.devices.late_stream import make_emulation_late

FIRST_TOKENS = [[10, 20, 30], [7], [50, 60]]
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0, presence_penalty=0.5),
    Sampling(temperature=2.0, top_k=200, min_p=0.0, bias=((300, 4.0), (301, -np.inf))),
)
MASKING_DEVICES = [
    "numpy:0",
    "cpu:0",
    pytest.param("cuda-emulated:0", marks=[needs_compiler, pytest.mark.long(cases=1)]),
]


@pytest.fixture(autouse=True)
def separate_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (CpuBackend, NumpyBackend):
        monkeypatch.setattr(backend, "has_separate_memory", True, raising=False)


def open_small_session(device: str = "numpy:0", sequences: int = 3) -> Session:
    return Session(open_model(None), on=DeviceGroup(devices=(device,)), context=64, sequences=sequences, batch=64)


def make_grammars(session: Session) -> tuple[Grammar | LazyJsonGrammar, ...]:
    tokenizer = tokenizer_from_metadata(session.model.gguf.metadata)
    letters, digits = (Grammar(tokenizer, grammar=text) for text in ("root ::= [a-z ]*", 'root ::= ([0-9] "," )*'))
    schema = Grammar(tokenizer, json_schema={"type": "object", "properties": {"a": {"type": "integer"}}})
    return letters, digits, schema, LazyJsonGrammar(tokenizer, digits, "{")


def sample_and_continue(
    session: Session, params: GenerationParams, *, needs_logits: bool
) -> tuple[list[tuple[int, int]], *tuple[object, ...]]:
    """Return the tokens or the error, the texts and the logits of a further step, which depend on all states."""
    for i in range(session.sequences):
        session.reset(i)
    known, tokens = [list[int]() for _ in range(session.sequences)], list[tuple[int, int]]()
    prompts = FIRST_TOKENS[: session.sequences]
    samples = sample_tokens_of_all_sequences(session, prompts, params, known=known, needs_logits=needs_logits)
    try:
        for one in samples:
            tokens.append((one.sequence, one.token))
            is_first = len(tokens) <= session.sequences
            assert is_first or (one.logits is NO_LOGITS) is not needs_logits
        message = ""
    except ModelError as error:
        message = str(error)
    lengths = list(session.lengths)
    rows: Sequence[object] = [row.tolist() for row in session.evaluate([[3]] * session.sequences)]
    return tokens, message, known, lengths, rows


@pytest.mark.long
@pytest.mark.parametrize("device", MASKING_DEVICES)
def test_texts_of_grammars_are_those_of_all_logits(device: str) -> None:
    session = open_small_session(device)
    grammars = make_grammars(session)
    for number, grammar in enumerate(grammars if device == "numpy:0" else grammars[:2]):
        for sampling in SAMPLINGS[: 3 if device == "numpy:0" else 2]:
            params = GenerationParams(8, sampling, seed=number, grammar=grammar, token_count=400)
            expected = sample_and_continue(session, params, needs_logits=True)
            assert sample_and_continue(session, params, needs_logits=False) == expected, (number, sampling)
            assert len(expected[0]) > 3
    assert {step.output_kind for step in session.planned_steps} == {"logits", "unmasked", "masked"}


def test_an_error_of_a_mask_leaves_the_step_done(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, calls = GrammarState.compute_mask, 0

    def fail_later(self: GrammarState, token_count: int) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise ModelError("no token")
        return compute(self, token_count)

    monkeypatch.setattr(GrammarState, "compute_mask", fail_later)
    session, found = open_small_session(), []
    params = GenerationParams(8, Sampling(temperature=1.0), grammar=make_grammars(session)[0])
    for needs_logits in (True, False):
        calls = 0
        found.append(sample_and_continue(session, params, needs_logits=needs_logits))
    assert found[0][1] == "no token"
    assert found[0][1:] == found[1][1:]


def test_plans_of_a_grammar_are_compiled_before_its_text() -> None:
    session = open_small_session(sequences=1)
    params = GenerationParams(4, Sampling(temperature=1.0), grammar=make_grammars(session)[0])
    compile_generation_plans(session, FIRST_TOKENS[0], params)
    steps = session.planned_steps
    sample_tokens = sample_tokens_of_all_sequences(session, FIRST_TOKENS[:1], params, known=[[]], needs_logits=False)
    assert len([*sample_tokens]) == 4
    assert session.planned_steps == steps


@pytest.mark.long
@needs_compiler
def test_the_mask_is_computed_while_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    late = make_emulation_late(monkeypatch)
    compute = GrammarState.compute_mask

    def compute_and_log(self: GrammarState, token_count: int) -> np.ndarray:
        late.log.append(("mask", 0))
        return compute(self, token_count)

    monkeypatch.setattr(GrammarState, "compute_mask", compute_and_log)
    session = open_small_session("cuda-emulated:0", 1)
    params = GenerationParams(3, Sampling(), grammar=make_grammars(session)[0])
    samples = sample_tokens_of_all_sequences(session, FIRST_TOKENS[:1], params, known=[[]], needs_logits=False)
    assert len([*samples]) == 3
    assert [what for what, _ in late.log][-10:] == ["launch", "mask", "launch", "read", "wait"] * 2
