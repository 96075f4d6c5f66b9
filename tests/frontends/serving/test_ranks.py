"""Engines on several ranks: bits, prefix hits, cancellations and slot files are as in one process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hocket.distributed import World
from hocket.distributed.rank_calls import RankCalls
from hocket.frontends.errors import ModelError
from hocket.frontends.inference.session import Session
from hocket.frontends.language_model import Model
from hocket.frontends.open_model import open_model
from hocket.frontends.run_config import RunConfig
from hocket.frontends.serving.blocks.make_pool import make_slot_pool
from hocket.frontends.serving.prefix_cache import PrefixCache
from hocket.frontends.serving.requests import EndEvent
from hocket.frontends.serving.served_model import ServedModel
from hocket.frontends.serving.slot_files import SlotFiles
from hocket.frontends.serving.slots import SlotPool

from ...given.models.goldens import path_of
from ...given.ranks.thread_link import in_threads
from ...given.serving.engine_runs import BATCH, CONTEXT, prompt_of
from ...given.serving.rank_pools import ONE_RANK, TWO_DEVICES, LeadResult, lead_pool
from ...given.serving.schedules import draw_requests, list_tokens, make_schedule_engine, run_schedule

SLOTS, REQUESTS = 4, 10


def lead_slots(name: str, lead: Callable[[SlotPool], LeadResult], pool_tokens: int = 0) -> LeadResult:
    """Return the result of `lead` with the slots of a model on two ranks."""

    def make(world: World, calls: RankCalls) -> SlotPool:
        session = Session(open_model(path_of(name)), on=ONE_RANK, world=world, context=CONTEXT, batch=BATCH)
        return make_slot_pool(session, SLOTS, pool_tokens, calls)

    return lead_pool(make, lead)


def make_alone(name: str) -> SlotPool:
    return SlotPool(Session(open_model(path_of(name)), on=TWO_DEVICES), SLOTS, context=CONTEXT, batch=BATCH)


@pytest.mark.long
@pytest.mark.parametrize(("name", "pool_tokens"), [("qwen35", 0), ("llama", 0), ("qwen35", CONTEXT)])
def test_a_schedule_on_two_ranks_has_the_bits_of_one_process(name: str, pool_tokens: int) -> None:
    """Predicted times differ, and with them the chunks of prompts, so not all logits have a counterpart.

    A request is cancelled after some steps, so a cancelled text may end earlier in one of the runs.
    """

    cancelled = set[str]()

    def run(pool: SlotPool) -> tuple[dict[tuple[str, tuple[int, ...]], bytes], dict[str, list[int]]]:
        rng = np.random.default_rng(7)
        requests = draw_requests(REQUESTS, pool.all_slots_session.model.vocabulary_size, rng)
        engine, recorded = make_schedule_engine(pool)
        events = run_schedule(engine, requests, rng)
        ends = [event for event in events if isinstance(event, EndEvent) and event.reason == "cancelled"]
        cancelled.update(event.request for event in ends)
        assert cancelled
        assert engine.status.sums.cached_tokens > 0
        return recorded.digests, {request.id: list_tokens(events, request.id) for request in requests}

    (alone, texts), (ranks, rank_texts) = run(make_alone(name)), lead_slots(name, run, pool_tokens)
    for request, text in texts.items():
        end = min(len(text), len(rank_texts[request])) if request in cancelled else None
        assert rank_texts[request][:end] == text[:end]
    common = alone.keys() & ranks.keys()
    assert {key: ranks[key] for key in common} == {key: alone[key] for key in common}
    assert len(common) >= 0.9 * len(alone)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen35"])
def test_slots_are_saved_and_restored_on_ranks(name: str) -> None:
    """A state of two ranks is as in one process, and goes on there; a wrong one leaves the ranks as they are."""
    prompt = list(prompt_of(name))

    def save_and_restore(pool: SlotPool) -> object:
        files = SlotFiles(pool, cache := PrefixCache(pool, state_bytes=1 << 30))
        first = pool.read_prompt(1, prompt[:64], [])
        cache.record_slot_contents(1, [*prompt[:64], 5], 64)
        state = files.capture(1)
        with pytest.raises(ModelError, match="not a saved state of this model"):
            files.restore(2, type(state)({**state.header, "model": "another"}, state.arrays), "talk")
        assert files.restore(2, state, Path("talk")) == 64
        rest = pool.read_prompt(2, prompt[64:], prompt[:64])
        pool.copy_cache_cells(2, 3, 96)
        pool.restore_recurrent_states(3, pool.save_recurrent_states(2))
        more = pool.decode({1: 7, 3: 8}, {1: prompt[:64], 3: prompt})
        return [hashlib.sha256(np.ascontiguousarray(a).tobytes()).digest() for a in (first, rest, more[1], more[3])], {
            key: array.tobytes() for key, array in state.arrays.items()
        }

    assert lead_slots(name, save_and_restore) == save_and_restore(make_alone(name))


def test_vectors_of_texts_on_ranks_are_those_of_one_process() -> None:
    texts = [[5, 9, 12], [7], list(range(3, 30))]

    def embed(world: World) -> np.ndarray | None:
        config = RunConfig(str(path_of("llama")), devices=("numpy:0",), split_mode="tensor", context=64)
        with Model.open_on_ranks(config, world) as model:
            served = ServedModel(model, name="m", version="0")
            if world.rank:
                served.rank_calls.follow_rank_0([served])
                return None
            with pytest.raises(ModelError):
                served.embed([list(range(3, 100))], normalise=True)
            vectors = served.embed(texts, normalise=True)
            served.rank_calls.end()
            return np.array(vectors)

    with Model(str(path_of("llama")), devices="numpy:0,numpy:1", split_mode="tensor", context=64) as model:
        alone = ServedModel(model, name="m", version="0").embed(texts, normalise=True)
    np.testing.assert_array_equal(in_threads(2, embed)[0], alone)
