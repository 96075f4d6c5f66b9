"""A step is launched before the host has the token of the last one, and the texts are the same as without that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.numpy.backend import NumpyBackend
from hocket.frontends.generation.generate import (
    GenerationParams,
    SampledToken,
    generate_texts,
    sample_tokens_of_all_sequences,
)
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.gguf.tokenization.tokenizer import tokenizer_from_metadata
from hocket.frontends.inference.decoding.launch_ahead import LaunchAheadDecoder
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.graph.errors import BackendError
from hocket.scheduler import LaunchedRun

from ...given.devices.emulation import needs_compiler
from ...given.devices.late_stream import LateStream, make_emulation_late
from ...given.models.goldens import NAMES_OF_EACH_GRAPH, path_of

THREE_PROMPTS = [[10, 20, 30], [7], [50, 60]]
Use = Callable[[Session, list[list[int]]], object]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    return make_emulation_late(monkeypatch)


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backends with outputs in host memory choose tokens, too; their runs end when they are launched."""
    for backend in (CpuBackend, NumpyBackend):
        monkeypatch.setattr(backend, "has_separate_memory", True, raising=False)


def open_session(device: str, sequences: int = 1, *, path: Path | None = None, context: int = 64) -> Session:
    return Session(open_model(path), on=DeviceGroup(devices=(device,)), context=context, sequences=sequences, batch=64)


def sample(
    session: Session,
    prompts: list[list[int]],
    known: list[list[int]],
    limit: int = 6,
    end: frozenset[int] = frozenset(),
    active: set[int] | None = None,
) -> Iterator[SampledToken]:
    params = GenerationParams(limit, Sampling(), end_tokens=end)
    return sample_tokens_of_all_sequences(session, prompts, params, known=known, active=active, needs_logits=False)


def stop_at_an_end_token(session: Session, known: list[list[int]]) -> object:
    first = [one.token for one in sample(session, THREE_PROMPTS, known)]
    for i in range(3):
        session.reset(i)
        known[i].clear()
    return first, [one.token for one in sample(session, THREE_PROMPTS, known, end=frozenset({first[6], first[10]}))]


def leave_a_text(session: Session, known: list[list[int]]) -> object:
    """The caller takes two tokens of each sequence, and goes."""
    with closing(sample(session, THREE_PROMPTS, known)) as samples:
        return [next(samples).token for _ in range(6)]


def end_one_sequence(session: Session, known: list[list[int]]) -> object:
    active: set[int] = set()
    tokens = []
    for one in sample(session, THREE_PROMPTS, known, active=active):
        tokens.append((one.sequence, one.token))
        if len(tokens) == 7:
            active.discard(1)
    return tokens


def fill_the_context(session: Session, known: list[list[int]]) -> object:
    return [one.token for one in sample(session, THREE_PROMPTS, known, limit=-1)]


def alternate_with_logits(session: Session, known: list[list[int]]) -> object:
    """The same thread evaluates another sequence while the step of sequence 0 is launched."""
    found: list[object] = []
    for one in sample(session, [[10, 20, 30], [], []], known):
        (_, logits, _) = session.evaluate([[], [one.token], []])
        found.append((one.token, logits.tolist()))
    return found


def reset_while_a_step_is_launched(session: Session, known: list[list[int]]) -> object:
    found = []
    for one in sample(session, THREE_PROMPTS, known):
        found.append(one.token)
        if len(found) in (5, 12):
            session.reset(2)
    return found


def stop_at_strings(session: Session, known: list[list[int]]) -> object:
    tokenizer = tokenizer_from_metadata(session.model.gguf.metadata)
    params = GenerationParams(12, Sampling())
    texts = generate_texts(session, THREE_PROMPTS, params, (), tokenizer=tokenizer, known=[[], [], []])
    for i in range(3):
        session.reset(i)
    stops = [text[len(text) // 3 :][:2] for text in texts]
    return texts, generate_texts(session, THREE_PROMPTS, params, stops, tokenizer=tokenizer, known=known)


USES = (
    stop_at_an_end_token,
    leave_a_text,
    end_one_sequence,
    fill_the_context,
    alternate_with_logits,
    reset_while_a_step_is_launched,
    stop_at_strings,
)


def use_and_continue(use: Use, device: str, path: Path | None = None) -> tuple[object, ...]:
    """Use a session; then return the result, the tokens and lengths, and logits that depend on all states."""
    session = open_session(device, 3, path=path, context=24)
    known: list[list[int]] = [[], [], []]
    result = use(session, known)
    lengths = list(session.lengths)
    for i, length in enumerate(lengths):
        if length == session.context:
            session.reset(i)
    return result, known, lengths, [one.tolist() for one in session.evaluate([[3], [4], [6]])]


def without_launching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchAheadDecoder, "_launch_following_step", lambda *_: None)


@pytest.mark.long
@pytest.mark.usefixtures("host_memory")
@pytest.mark.parametrize("use", USES)
def test_texts_and_states_are_the_same_without_steps_ahead(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    undone: list[LaunchedRun] = []
    undo = LaunchedRun.undo
    monkeypatch.setattr(LaunchedRun, "undo", lambda run: (undone.append(run), undo(run)))
    found = use_and_continue(use, "numpy:0")
    assert undone or use is fill_the_context
    without_launching(monkeypatch)
    assert found == use_and_continue(use, "numpy:0")


@needs_compiler
@pytest.mark.long
@pytest.mark.nightly(cases=2)
@pytest.mark.parametrize("use", USES)
def test_a_device_that_works_late_gives_the_same(use: Use, late: LateStream, monkeypatch: pytest.MonkeyPatch) -> None:
    found = use_and_continue(use, "cuda-emulated:0")
    without_launching(monkeypatch)
    assert found == use_and_continue(use, "cuda-emulated:0")


@pytest.mark.usefixtures("host_memory")
@pytest.mark.long(cases=3)
@pytest.mark.parametrize("name", NAMES_OF_EACH_GRAPH)
def test_the_states_of_every_fixture_are_restored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = use_and_continue(leave_a_text, "numpy:0", path_of(name))
    without_launching(monkeypatch)
    assert found == use_and_continue(leave_a_text, "numpy:0", path_of(name))


@pytest.mark.long
@needs_compiler
def test_the_next_step_is_launched_before_the_host_waits_for_a_token(late: LateStream) -> None:
    session = open_session("cuda-emulated:0")
    assert len([*sample(session, [[1, 2, 3]], [[]])]) == 6
    prompt, *steps = range(late.runs)
    assert len(steps) == 5, "the last token is not evaluated, and no step is launched in vain"
    expected = [("launch", prompt), ("read", prompt), ("wait", prompt), ("launch", steps[0]), ("read", steps[0])]
    for step in steps:
        expected += [("launch", step + 1), ("read", step + 1)] if step != steps[-1] else []
        expected.append(("wait", step))
    assert late.log == expected


@pytest.mark.long
@needs_compiler
def test_a_text_that_shares_the_device_launches_no_more_steps(late: LateStream) -> None:
    """The other user would undo each of them, so the device would do the same work twice."""
    session = open_session("cuda-emulated:0")
    other = Session(session.model, like=session, context=64, batch=64)
    runs = []
    for _ in sample(session, [[1, 2, 3]], [[]]):
        other.evaluate([[7]])
        runs.append(late.runs)
    first, *steps = (after - before for before, after in pairwise(runs))
    assert first == 3, "a step, the step after it, and the run of the other session"
    assert steps == [2, 2, 2, 2]


@pytest.mark.long
@needs_compiler
def test_a_read_that_is_not_in_the_order_of_the_stream_is_found(late: LateStream) -> None:
    texts = []
    for late.reads_at_wait in (False, True):
        texts.append([one.token for one in sample(open_session("cuda-emulated:0"), [[1, 2, 3]], [[]])])
    assert texts[0] != texts[1]


@pytest.mark.long
@needs_compiler
def test_a_saved_state_lacks_the_launched_step(late: LateStream, tmp_path: Path) -> None:
    session = open_session("cuda-emulated:0")
    known: list[list[int]] = [[]]
    samples = sample(session, [[1, 2, 3]], known)
    tokens = [next(samples).token for _ in range(3)]
    assert late.log[-1][0] == "wait"
    assert late.log[-2] == ("read", late.runs - 1), "a step is launched"
    save_state(session, known, tmp_path / "state")
    tokens += [one.token for one in samples]
    other = open_session("cuda-emulated:0")
    (text,) = load_state(other, tmp_path / "state")
    assert text == [1, 2, 3, *tokens[:3]]
    rest = [one.token for one in sample(other, [text[other.lengths[0] :]], [text[: other.lengths[0]]], limit=3)]
    assert rest == tokens[3:]


@pytest.mark.long
@needs_compiler
def test_a_fault_in_the_last_step_restores_the_states(late: LateStream) -> None:
    session, other = (open_session("cuda-emulated:0") for _ in range(2))
    late.faulty_run = 3
    with pytest.raises(BackendError, match="cuda-emulated:0"):
        [*sample(session, [[1, 2, 3]], [[]], limit=4)]
    assert session.lengths == [5]
    known: list[list[int]] = [[]]
    assert len([*sample(other, [[1, 2, 3]], known, limit=4)]) == 4
    other.reset(0)
    other.evaluate([known[0][:5]])
    (logits,), (expected_logits,) = (one.evaluate([[9]]) for one in (session, other))
    assert np.allclose(logits, expected_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@needs_compiler
def test_a_fault_before_a_launched_step_says_that_states_are_lost(late: LateStream) -> None:
    session = open_session("cuda-emulated:0")
    late.faulty_run = 2
    with pytest.raises(BackendError, match="and states of cuda-emulated:0 are lost: the next run had begun; load anew"):
        [*sample(session, [[1, 2, 3]], [[]])]
    assert session.lengths == [4]


@pytest.mark.long
@needs_compiler
def test_an_interrupt_leaves_no_launched_step(late: LateStream) -> None:
    session, other = (open_session("cuda-emulated:0") for _ in range(2))

    def interrupt() -> None:
        samples = sample(session, [[1, 2, 3]], [[]])
        for number, _ in enumerate(samples):
            if number == 2:
                samples.throw(KeyboardInterrupt)  # type: ignore[attr-defined]

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    taken = [one.token for _, one in zip(range(3), sample(other, [[1, 2, 3]], [[]]), strict=False)]
    assert len(taken) == 3
    assert session.lengths == other.lengths == [5]
    (logits,), (expected_logits,) = (one.evaluate([[9]]) for one in (session, other))
    assert np.array_equal(logits, expected_logits)
