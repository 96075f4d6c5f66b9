"""An engine on a device that selects candidates gives each request the tokens that it has from all logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hocket
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.numpy.backend import NumpyBackend
from hocket.frontends.errors import ModelError
from hocket.frontends.generation.generate import GenerationParams
from hocket.frontends.generation.grammar import Grammar
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.gguf.tokenization.tokenizer import tokenizer_from_metadata
from hocket.frontends.inference.decoding.launch_ahead import LaunchAheadDecoder
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.frontends.serving.blocks.make_pool import make_prefix_cache
from hocket.frontends.serving.blocks.slot_pool import BlockSlotPool
from hocket.frontends.serving.engine import Engine
from hocket.frontends.serving.prefix_cache import PrefixCache
from hocket.frontends.serving.requests import EndEvent, Event, GenerationRequest, TokenEvent
from hocket.frontends.serving.slots import SlotPool
from hocket.graph.errors import BackendError, StatesLostError
from hocket.scheduler import Executor, LaunchedRun

from ...given.devices.emulation import needs_compiler
from ...given.models.goldens import TINY, path_of
from ...given.serving.schedules import list_tokens

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.2),
    Sampling(temperature=0.8, top_k=5, repeat_penalty=1.3),
    Sampling(presence_penalty=2.0, bias=((7, 3.0), (8, -np.inf))),
)


def use_separate_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (CpuBackend, NumpyBackend):
        monkeypatch.setattr(backend, "has_separate_memory", True, raising=False)


def open_pool(device: str, slots: int = 4) -> SlotPool:
    like = Session(open_model(None), on=DeviceGroup(devices=(device,)), context=64)
    return SlotPool(like, slots, context=64, batch=16)


def make_requests(samplings: tuple[Sampling, ...] = SAMPLINGS, **settings: int | None) -> list[GenerationRequest]:
    prompts = ((1, 2, 3), (9,), (4, 5, 6, 7), (8, 8))
    return [
        GenerationRequest(f"r{i}", prompts[i], GenerationParams(6 + i, sampling, seed=i, **settings))  # type: ignore[arg-type]
        for i, sampling in enumerate(samplings)
    ]


def run_requests(pool: SlotPool, requests: list[GenerationRequest]) -> tuple[list[list[int]], set[str], list[Event]]:
    """Run requests together; return the tokens of each, the kinds of the decode steps, and the events."""
    cache = make_prefix_cache(pool, state_bytes=0, reserves_whole_texts=False, retains_contents=False)
    engine = Engine(pool, cache, queue_size=9, max_gap_seconds=0.01, clock=lambda: 0.0)
    for request in requests:
        engine.submit(request)
    events = list[Event]()
    while engine.has_work:
        events += engine.step()
    kinds = {step.output_kind for window in pool._windows.values() for step in window.planned_steps if step.tokens == 1}
    return [list_tokens(events, request.id) for request in requests], kinds, events


@pytest.mark.parametrize(
    "device", ["numpy:0", pytest.param("cuda-emulated:0", marks=[needs_compiler, pytest.mark.long])]
)
def test_requests_have_the_tokens_of_all_logits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_separate_memory(monkeypatch)
    found, kinds, _ = run_requests(open_pool(device), make_requests())
    assert kinds == {"sampled"}
    assert [len(tokens) for tokens in found] == [6, 7, 8, 9]
    monkeypatch.setattr(SlotPool, "decode_to_candidates", lambda *_: None)
    expected, kinds, _ = run_requests(open_pool(device), make_requests())
    assert kinds == {"logits"}
    assert found == expected


@pytest.mark.long
@pytest.mark.parametrize("grammar", [None, "root ::= [a-z ]*"])
def test_requests_over_a_pool_of_blocks_have_the_tokens_of_all_logits(
    grammar: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launched step also needs the block of its token."""
    found = []
    for is_separate in (False, True):
        if is_separate:
            use_separate_memory(monkeypatch)
        like = Session(open_model(path_of("llama")), on=DeviceGroup(devices=("numpy:0",)), context=192)
        pool = BlockSlotPool(like, 4, pool_tokens=384, context=192, batch=16)
        tokenizer = tokenizer_from_metadata(open_model(None).gguf.metadata)
        rules = None if grammar is None else Grammar(tokenizer, grammar=grammar)
        requests = [
            replace(one, params=replace(one.params, limit=90, grammar=rules)) for one in make_requests(SAMPLINGS[:2])
        ]
        tokens, kinds, events = run_requests(pool, requests)
        assert kinds == ({"logits"} if not is_separate else {"sampled"} if rules is None else {"unmasked", "masked"})
        assert [event.reason for event in events if isinstance(event, EndEvent)] == ["length", "length"]
        assert not any(pool.tables)
        found.append(tokens)
    assert found[0] == found[1]


@pytest.mark.long
def test_one_request_that_reads_all_logits_decides_for_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of the others stay the same, in steps with it and in steps without it."""
    expected, _, _ = run_requests(open_pool("numpy:0"), make_requests())
    use_separate_memory(monkeypatch)
    pool, requests = open_pool("numpy:0"), make_requests()
    tokenizer = tokenizer_from_metadata(pool.all_slots_session.model.gguf.metadata)
    readers = {
        "logprobs": replace(requests[0], top_logprobs=2),
        "grammar": replace(
            requests[0], params=replace(requests[0].params, grammar=Grammar(tokenizer, grammar="root ::= [a-z]*"))
        ),
        "all tokens": replace(
            requests[0], params=replace(requests[0].params, sampling=Sampling(temperature=1.0, top_k=0))
        ),
        "padding": replace(requests[0], params=replace(requests[0].params, token_count=100)),
    }
    for name, reader in readers.items():
        found, kinds, events = run_requests(open_pool("numpy:0"), [reader, *requests[1:]])
        assert kinds == ({"unmasked", "masked", "sampled"} if name == "grammar" else {"logits", "sampled"}), name
        assert found[1:] == expected[1:], name
        if name == "logprobs":
            assert found[0] == expected[0]
            tops = [event.top for event in events if isinstance(event, TokenEvent) and event.request == "r0"]
            assert all(len(top) == 2 for top in tops)


def test_steps_with_candidates_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    use_separate_memory(monkeypatch)
    pool = open_pool("numpy:0", slots=1)
    pool.compile_short_steps()
    before = pool.planning_seconds
    run_requests(pool, make_requests(SAMPLINGS[:2]))
    assert pool.planning_seconds == before


def test_a_model_generates_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for is_separate in (False, True):
        if is_separate:
            use_separate_memory(monkeypatch)
        with hocket.Model(TINY, devices="numpy:0", context=64) as model:
            texts.append(
                [
                    "".join(model.generate("Once", max_tokens=9, temperature=t, seed=3, repeat_penalty=1.1))
                    for t in (0.0, 1.5)
                ]
            )
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "device", ["numpy:0", pytest.param("cuda-emulated:0", marks=[needs_compiler, pytest.mark.long])]
)
def test_steps_of_the_same_requests_are_launched_ahead(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a step after which a request ends is not, and no launched step is in vain."""
    expected, _, _ = run_requests(open_pool("numpy:0"), make_requests()) if device == "numpy:0" else (None, None, None)
    use_separate_memory(monkeypatch)
    launched, undone = list[object](), list[object]()
    follow, undo = LaunchAheadDecoder._launch_following_step, LaunchedRun.undo

    def follow_and_count(self: LaunchAheadDecoder, *operands: Any) -> Any:
        launched.append(step := follow(self, *operands))
        return step

    monkeypatch.setattr(LaunchAheadDecoder, "_launch_following_step", follow_and_count)
    monkeypatch.setattr(LaunchedRun, "undo", lambda run: (undone.append(run), undo(run)))
    found, kinds, _ = run_requests(open_pool(device), make_requests())
    assert kinds == {"sampled"}
    assert None not in launched
    assert len(launched) == 4
    assert not undone
    assert expected is None or found == expected


@pytest.mark.long
def test_a_request_that_comes_or_goes_undoes_the_launched_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot holds the tokens of its text alone, so another request can go on from them."""
    found = []
    for is_separate in (False, True):
        if is_separate:
            use_separate_memory(monkeypatch)
        pool = open_pool("numpy:0")
        engine = Engine(pool, PrefixCache(pool, state_bytes=0), queue_size=9, max_gap_seconds=0.01, clock=lambda: 0.0)
        first, second, third, fourth = (
            replace(request, params=replace(request.params, limit=20)) for request in make_requests()
        )
        events = list[Event]()
        engine.submit(first)
        for step in range(60):
            if step == 6:
                engine.submit(second)
            if step == 12:
                events += engine.cancel(first.id)
                engine.submit(replace(third, prompt=(*first.prompt, *list_tokens(events, first.id))))
            if step == 20:
                events += engine.cancel(second.id)
                engine.submit(fourth)
            events += engine.step()
        assert not engine.has_work
        found.append([list_tokens(events, request.id) for request in (first, second, third, fourth)])
    assert found[0] == found[1]
    assert len(found[0][2]) == 20


@pytest.mark.long
def test_lost_states_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is recurrent, so a step that is repeated from lost states would give other texts."""
    expected, _, _ = run_requests(open_pool("numpy:0"), make_requests())
    use_separate_memory(monkeypatch)
    finish, followers = LaunchedRun.finish, list[LaunchedRun]()

    def lose_states_once(run: LaunchedRun, follower: LaunchedRun | None = None) -> Any:
        outputs = finish(run, follower)
        if follower is not None:
            followers.append(follower)
            if len(followers) == 2:
                follower.undo()
                raise StatesLostError("states of numpy:0 are lost")
        return outputs

    monkeypatch.setattr(LaunchedRun, "finish", lose_states_once)
    pool, events = open_pool("numpy:0"), list[Event]()
    engine = Engine(pool, PrefixCache(pool, state_bytes=0), queue_size=9, max_gap_seconds=0.01, clock=lambda: 0.0)
    for request in make_requests():
        engine.submit(request)
    while engine.has_work:
        try:
            events += engine.step()
        except StatesLostError as error:
            events += engine.restart_and_requeue_requests((), str(error))
    assert engine.status.sums.restarts == 1
    assert [list_tokens(events, request.id) for request in make_requests()] == expected


@pytest.mark.long
def test_a_step_that_cannot_be_launched_ahead_is_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _, _ = run_requests(open_pool("numpy:0"), make_requests())
    use_separate_memory(monkeypatch)
    follow, failures = LaunchAheadDecoder._launch_following_step, list[object]()

    def fail_once(self: LaunchAheadDecoder, *operands: Any) -> Any:
        with monkeypatch.context() as patch:
            if not failures:
                patch.setattr(Executor, "launch", fail)
            return follow(self, *operands)

    def fail(*_: object) -> None:
        failures.append(1)
        raise BackendError("numpy:0 cannot begin a run")

    monkeypatch.setattr(LaunchAheadDecoder, "_launch_following_step", fail_once)
    found, _, _ = run_requests(open_pool("numpy:0"), make_requests())
    assert failures
    assert found == expected


@pytest.mark.long
def test_grammars_give_the_texts_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request ends alone if its grammar fails, also if it shares its steps with others."""
    found = []
    for is_separate in (False, True):
        if is_separate:
            use_separate_memory(monkeypatch)
        pool = open_pool("numpy:0")
        tokenizer = tokenizer_from_metadata(pool.all_slots_session.model.gguf.metadata)
        texts = ("root ::= [a-z]*", 'root ::= "a" [0-9]+ "b"', "root ::= [^a]*")
        requests = [
            replace(
                request,
                params=replace(request.params, limit=9, token_count=250, grammar=Grammar(tokenizer, grammar=text)),
            )
            for request, text in zip(make_requests(), texts, strict=False)
        ]
        monkeypatch.setattr(requests[1].params.grammar, "make_state", lambda: FailingState())
        requests.append(make_requests()[3])
        tokens, kinds, events = run_requests(pool, requests)
        assert ("masked" in kinds) is is_separate
        found.append((tokens, [event for event in events if isinstance(event, EndEvent)]))
    assert found[0] == found[1]
    assert [event.message for event in found[0][1] if event.reason == "error"] == ["no token"]


class FailingState:
    """A grammar state that allows token 5 three times, and then no token."""

    def __init__(self) -> None:
        self.left = 3

    def compute_mask(self, token_count: int) -> np.ndarray:
        if not self.left:
            raise ModelError("no token")
        mask = np.zeros(-(-token_count // 32), np.uint32)
        mask[0] = 1 << 5
        return mask

    def mask_logits(self, logits: np.ndarray) -> np.ndarray:
        bits = np.unpackbits(self.compute_mask(logits.size).view(np.uint8), bitorder="little", count=logits.size)
        return np.where(bits, logits, np.float32(-np.inf))

    def accept_token_and_can_continue(self, token: int) -> bool:
        self.left -= 1
        return True
