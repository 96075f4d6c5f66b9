"""Slots on real models: a sequence has the same logits, to the last bit, as it has alone."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.generation.generate import GenerationParams
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.inference.prefill_chunks import F32
from hocket.frontends.inference.session import Session
from hocket.frontends.open_model import open_model
from hocket.frontends.serving.engine import Engine
from hocket.frontends.serving.prefix_cache import PrefixCache
from hocket.frontends.serving.requests import EndEvent, Event, GenerationRequest, TokenEvent
from hocket.frontends.serving.slots import SlotPool
from hocket.frontends.serving.step_runner import choose_smallest_aligned_slot_window
from hocket.frontends.terminal.arguments import replace_arguments_by_flag_names

from ...given.models.goldens import path_of
from ...given.serving.engine_runs import BATCH, CONTEXT, PROMPT_TOKENS, make_pool, prompt_of

FIXTURE_MODELS = ("llama", "qwen35", "gemma3")
"""Attention, a hybrid with recurrent states, and ring caches."""
NEW_TOKENS = 4
CHUNK_SIZES = (16, 32, 48, 64)


@cache
def shared_pool(name: str) -> SlotPool:
    """The pool of the tests of one model; each test reads its prompts anew."""
    return make_pool(name)


def read(pool: SlotPool, slot: int, prompt: tuple[int, ...], size: int = BATCH, start: int = 0) -> F32:
    """Read a prompt from token `start` on in chunks of `size`, and return the logits after it."""
    if start == 0:
        pool.clear_recurrent_states(slot)
    for i in range(start, len(prompt), size):
        logits = pool.read_prompt(slot, prompt[i : i + size], prompt[:i])
    return logits


def decode(pool: SlotPool, slot: int, prompt: tuple[int, ...], logits: F32) -> list[F32]:
    """Decode the most probable tokens in one slot, and return all logits, those after the prompt first."""
    tokens, found = list(prompt), [logits.copy()]
    for _ in range(NEW_TOKENS):
        token = int(found[-1].argmax())
        found.append(pool.decode({slot: token}, {slot: tokens})[slot].copy())
        tokens.append(token)
    return found


@cache
def logits_alone(name: str, seed: int = 0) -> tuple[F32, ...]:
    """The logits of a prompt and its continuation in a pool that has no other slot."""
    pool, prompt = make_pool(name, slots=1), prompt_of(name, seed)
    return tuple(decode(pool, 0, prompt, read(pool, 0, prompt)))


def require_equal(got: list[F32], want: tuple[F32, ...]) -> None:
    assert [np.array_equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * (NEW_TOKENS + 1)


@pytest.mark.parametrize("size", CHUNK_SIZES)
@pytest.mark.parametrize("name", FIXTURE_MODELS)
def test_a_prompt_in_chunks_is_the_prompt_alone(name: str, size: int) -> None:
    pool, prompt = shared_pool(name), prompt_of(name)
    require_equal(decode(pool, 2, prompt, read(pool, 2, prompt, size)), logits_alone(name))


@pytest.mark.parametrize("name", FIXTURE_MODELS)
def test_sequences_beside_others_are_those_alone(name: str) -> None:
    """Slots 0, 1 and 3 read in turns and decode together; they have prompts of different lengths."""
    pool = shared_pool(name)
    prompts = {0: prompt_of(name), 1: prompt_of(name, 1), 3: prompt_of(name, 2)}
    found: dict[int, list[F32]] = {}
    for slot, prompt in prompts.items():
        found[slot] = [read(pool, slot, prompt).copy()]
    tokens = {slot: list(prompt) for slot, prompt in prompts.items()}
    for _ in range(NEW_TOKENS):
        new = {slot: int(logits[-1].argmax()) for slot, logits in found.items()}
        for slot, logits in pool.decode(new, tokens).items():
            found[slot].append(logits.copy())
            tokens[slot].append(new[slot])
    for slot, seed in ((0, 0), (1, 1), (3, 2)):
        require_equal(found[slot], logits_alone(name, seed))


@pytest.mark.parametrize("name", FIXTURE_MODELS)
def test_a_prompt_that_is_read_while_others_decode_is_the_prompt_alone(name: str) -> None:
    pool, prompt, other = shared_pool(name), prompt_of(name), prompt_of(name, 1)
    tokens, logits = list(other), read(pool, 0, other)
    pool.clear_recurrent_states(1)
    for i in range(0, PROMPT_TOKENS, 16):
        own = pool.read_prompt(1, prompt[i : i + 16], prompt[:i]).copy()
        token = int(logits.argmax())
        logits = pool.decode({0: token}, {0: tokens, 1: prompt[: i + 16]})[0]
        tokens.append(token)
    require_equal(decode(pool, 1, prompt, own), logits_alone(name))


@pytest.mark.parametrize("name", FIXTURE_MODELS)
def test_copied_cells_and_states_continue_as_the_sequence_alone(name: str) -> None:
    """Half of a prompt is read in slot 0 and copied to slot 3, which reads the other half after slot 0 has gone on."""
    pool, prompt, half = shared_pool(name), prompt_of(name), PROMPT_TOKENS // 2
    read(pool, 0, prompt[:half])
    pool.copy_cache_cells(0, 3, half)
    pool.restore_recurrent_states(3, pool.save_recurrent_states(0))
    read(pool, 0, (*prompt[:half], *prompt_of(name, 1)[half:]), start=half)
    require_equal(decode(pool, 3, prompt, read(pool, 3, prompt, start=half)), logits_alone(name))


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_restored_states_continue_as_the_sequence_alone(name: str) -> None:
    """A slot goes back to the middle of its prompt; ring caches cannot."""
    pool, prompt, half = shared_pool(name), prompt_of(name), PROMPT_TOKENS // 2
    read(pool, 1, prompt[:half])
    saved = pool.save_recurrent_states(1)
    read(pool, 1, (*prompt[:half], *prompt_of(name, 1)[half:]), start=half)
    pool.restore_recurrent_states(1, saved)
    require_equal(decode(pool, 1, prompt, read(pool, 1, prompt, start=half)), logits_alone(name))


@pytest.mark.parametrize("name", FIXTURE_MODELS)
def test_a_wiped_slot_holds_nothing_of_an_earlier_sequence(name: str) -> None:
    pool, prompt = shared_pool(name), prompt_of(name)
    read(pool, 2, prompt_of(name, 1))
    pool.zero_slot_states(2)
    assert all(
        not np.asarray(pool.all_slots_session.store.state(state)[2:3]).any() for state in pool.save_recurrent_states(2)
    )
    require_equal(decode(pool, 2, prompt, read(pool, 2, prompt)), logits_alone(name))


@pytest.mark.long
@pytest.mark.parametrize("name", FIXTURE_MODELS)
def test_slots_on_two_devices_are_the_sequence_alone_there(name: str) -> None:
    """The reference is a pool of one slot on the same devices, because shards have other roundings than one device."""
    prompt, other = prompt_of(name), prompt_of(name, 1)
    alone = make_pool(name, 1, "cpu:0,cpu:1", "tensor")
    want = tuple(decode(alone, 0, prompt, read(alone, 0, prompt)))
    pool, half = make_pool(name, 2, "cpu:0,cpu:1", "tensor"), PROMPT_TOKENS // 2
    read(pool, 0, prompt[:half])
    pool.copy_cache_cells(0, 1, half)
    pool.restore_recurrent_states(1, pool.save_recurrent_states(0))
    read(pool, 0, other)
    require_equal(decode(pool, 1, prompt, read(pool, 1, prompt, start=half)), want)


@pytest.mark.parametrize("name", FIXTURE_MODELS)
def test_a_prompt_with_a_cached_beginning_has_the_probabilities_of_the_prompt_alone(name: str) -> None:
    """The beginnings have odd lengths, at which a cut of a delta rule would change its rounding."""
    pool = make_pool(name)
    engine = Engine(pool, PrefixCache(pool, state_bytes=1 << 24), queue_size=8, max_gap_seconds=1.0, clock=lambda: 0.0)
    base, cached = prompt_of(name), 0
    for number, (shared, seed) in enumerate(((51, 1), (51, 2), (51, 3), (83, 4), (96, 5))):
        prompt = (*base[:shared], *prompt_of(name, seed)[: 2 * number + 1])
        logprobs = []
        for uses_cache in (True, False):
            params = GenerationParams(NEW_TOKENS, Sampling(temperature=0))
            engine.submit(GenerationRequest(str(uses_cache), prompt, params, 1, uses_cache))
            events: list[Event] = []
            while engine.has_work:
                events += engine.step()
            logprobs.append([(event.token, event.logprob) for event in events if isinstance(event, TokenEvent)])
            cached += sum(event.timing.cached_tokens for event in events if isinstance(event, EndEvent))
        assert logprobs[0] == logprobs[1]
        assert len(logprobs[0]) == NEW_TOKENS
    assert cached >= 3 * 48


def test_what_a_model_keeps_is_known() -> None:
    kinds = {
        name: (shared_pool(name).has_recurrent_states, shared_pool(name).droppable_last_tokens)
        for name in FIXTURE_MODELS
    }
    assert kinds["llama"] == (False, None)
    assert kinds["qwen35"] == (True, None)
    assert kinds["gemma3"][0] is False
    assert (
        shared_pool("llama").compute_recurrent_state_bytes()
        == 0
        < shared_pool("qwen35").compute_recurrent_state_bytes()
    )


@pytest.mark.parametrize(
    ("slots", "window"), [([3], (3, 1)), ([2, 3], (2, 2)), ([1, 2], (0, 4)), ([5, 6], (4, 4)), ([0, 7], (0, 8))]
)
def test_a_window_is_the_smallest_aligned_one(slots: list[int], window: tuple[int, int]) -> None:
    assert choose_smallest_aligned_slot_window(slots) == window


def test_an_encoder_has_no_slots() -> None:
    model = SimpleNamespace(is_causal=False, is_encoder=True, architecture="bert")
    with pytest.raises(ModelError, match="bert sees all tokens at once; a server generates token by token"):
        SlotPool(SimpleNamespace(model=model), 2, context=16, batch=16)


def test_three_slots_take_the_memory_of_three_sequences() -> None:
    pool, prompts = make_pool("llama", slots=3), {slot: prompt_of("llama", slot) for slot in (1, 2)}
    assert pool.all_slots_session.sequences == 3
    tokens = {slot: int(read(pool, slot, prompt).argmax()) for slot, prompt in prompts.items()}
    found = pool.decode(tokens, prompts)
    for slot in prompts:
        assert np.array_equal(found[slot], logits_alone("llama", slot)[1])


def test_planning_and_predicted_seconds_of_a_chunk_are_those_of_its_plan() -> None:
    pool = make_pool("llama", 2)
    assert pool.planning_seconds == 0
    pool.read_prompt(0, (1, 2, 3), ())
    planning = pool.planning_seconds
    assert planning > 0
    pool.read_prompt(0, (4, 5), (1, 2, 3))
    assert pool.planning_seconds == planning
    window = pool.open_window_session(0, 1)
    assert pool.predict_prompt_seconds(32) == window.plan(window.make_step(32, 32)).cost.total > 0


def test_more_slots_than_memory_name_the_flag() -> None:
    session = Session(open_model(path_of("llama")), context=CONTEXT, batch=BATCH)
    with pytest.raises(ModelError) as caught:
        SlotPool(session, 1 << 40, context=CONTEXT, batch=BATCH)
    message = replace_arguments_by_flag_names(str(caught.value))
    assert re.fullmatch(
        rf"{1 << 40} slots of {CONTEXT} tokens need .* GiB, but the devices have .* GiB; "
        r"use --parallel \d+, or a smaller context",
        message,
    ), message


@pytest.mark.parametrize("error", [ModelError, RuntimeError])
def test_a_probe_says_that_a_broken_pool_runs_no_steps(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """Errors of other types had ended the engine without a restart."""
    pool = make_pool("llama", slots=1)
    assert pool.can_still_run_steps(0)

    def fail(*args: object) -> F32:
        raise error("the device is lost")

    monkeypatch.setattr(pool, "read_prompt", fail)
    assert not pool.can_still_run_steps(0)
