"""Drafts on several ranks change no bit of any logits: by a draft model, and by the MTP blocks of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hocket.distributed import World
from hocket.distributed.rank_calls import RankCalls
from hocket.frontends.inference.session import Session
from hocket.frontends.models import Model
from hocket.frontends.open_model import open_model
from hocket.frontends.serving.drafting.drafter import SlotDrafter
from hocket.frontends.serving.drafting.drafting_pool import DraftingSlotPool
from hocket.frontends.serving.drafting.model_drafter import DraftModelSlotPool, ModelSlotDrafter
from hocket.frontends.serving.drafting.mtp_drafter import MtpSlotDrafter, MtpSlotPool
from hocket.frontends.serving.slots import SlotPool

from ....given.models.goldens import path_of
from ....given.models.rewritten import with_blocks_ahead
from ....given.serving.engine_runs import BATCH, CONTEXT
from ....given.serving.rank_pools import ONE_RANK, TWO_DEVICES, lead_pool
from ....given.serving.schedules import count_ends, draw_requests, list_tokens, make_schedule_engine, run_schedule

SLOTS, REQUESTS, DRAFT_TOKENS = 4, 10, 3
Recorded = tuple[dict[tuple[str, tuple[int, ...]], bytes], dict[str, list[int]], int, int]


def run_requests(pool: SlotPool) -> Recorded:
    """Return the digests of the logits, the texts, and the counts of drafted and of accepted tokens."""
    rng = np.random.default_rng(7)
    requests = draw_requests(REQUESTS, pool.all_slots_session.model.vocabulary_size, rng)
    engine, recorded = make_schedule_engine(pool)
    events = run_schedule(engine, requests, rng)
    assert count_ends(events, "cancelled") > 0
    sums = engine.status.sums
    texts = {request.id: list_tokens(events, request.id) for request in requests}
    return recorded.digests, texts, sums.drafted_tokens, sums.accepted_tokens


def make_model_drafter(name: str, world: World, calls: RankCalls) -> Callable[[MtpSlotPool], SlotDrafter]:
    small = Session(open_model(path_of(name)), on=ONE_RANK, world=world)
    own = DraftModelSlotPool(small, SLOTS, context=CONTEXT, batch=BATCH, rank_calls=calls)
    return lambda pool: ModelSlotDrafter(own, DRAFT_TOKENS)


@pytest.mark.nightly(cases=1)
@pytest.mark.long
@pytest.mark.parametrize("drafts", ["MTP of a hybrid", "small hybrid", "small attention model"])
def test_a_schedule_with_drafts_on_two_ranks_has_the_bits_of_one_process_without(
    drafts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftingSlotPool, "predict_break_even_acceptance", lambda *_: 0.0)
    name = "llama" if drafts == "small attention model" else "qwen35"
    model = open_model(path_of(name))
    if drafts == "MTP of a hybrid":
        model = with_blocks_ahead(tmp_path / "ahead.gguf", path_of(name), 30.0)

    def make(world: World, calls: RankCalls) -> SlotPool:
        drafting: Model = model
        make_drafter: Callable[[MtpSlotPool], SlotDrafter] = partial(MtpSlotDrafter, max_tokens=DRAFT_TOKENS)
        if drafts == "MTP of a hybrid":
            drafting = model.with_mtp_blocks()
        else:
            make_drafter = make_model_drafter(name, world, calls)
        session = Session(drafting, on=ONE_RANK, world=world)
        return DraftingSlotPool(
            session, SLOTS, context=CONTEXT, batch=BATCH, make_drafter=make_drafter, rank_calls=calls
        )

    alone, texts, *_ = run_requests(SlotPool(Session(model, on=TWO_DEVICES), SLOTS, context=CONTEXT, batch=BATCH))
    ranks, rank_texts, drafted, accepted = lead_pool(make, run_requests)
    assert rank_texts.keys() == texts.keys()
    for request, tokens in texts.items():  # a request may be cancelled earlier in steps with several tokens
        shorter = min(len(tokens), len(rank_texts[request]))
        assert rank_texts[request][:shorter] == tokens[:shorter]
    common = alone.keys() & ranks.keys()
    assert {key: ranks[key] for key in common} == {key: alone[key] for key in common}
    assert len(common) >= 0.8 * len(alone)
    assert 0 < accepted <= drafted
