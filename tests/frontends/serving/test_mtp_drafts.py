"""Drafts by the MTP blocks of the served model change no bit of any logits, in batches and behind the prefix cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Model
from hocket.frontends.open_model import open_model
from hocket.frontends.serving.drafting import drafting_pool
from hocket.frontends.serving.drafting.drafting_pool import DraftingSlotPool
from hocket.frontends.serving.drafting.mtp_drafter import DraftInputRows, MtpSlotDrafter, MtpSlotPool
from hocket.frontends.serving.prefix_cache import PrefixCache
from hocket.frontends.serving.requests import EndEvent
from hocket.frontends.serving.slots import SlotPool

from ...given.models import architectures
from ...given.models.goldens import path_of
from ...given.models.rewritten import with_blocks_ahead
from ...given.serving.engine_runs import BATCH, CONTEXT, prompt_of
from ...given.serving.schedules import (
    count_ends,
    draw_requests,
    list_tokens,
    make_schedule_engine,
    run_alone,
    run_schedule,
)

DRAFTED_REQUESTS, DRAFTED_SLOTS = 40, 12
MTP_CASES = {
    "delta net": ("qwen35", 1, 3),
    "latent": ("deepseek2-moe", 1, 1),
    "two blocks": ("glm4moe-moe", 2, 3),
    "rings": ("mimo2-moe", 3, 4),
    "streams": ("deepseek4-moe", 1, 3),
}
"""The model, its MTP blocks, and the draft tokens of a run."""


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MTP block of a tiny model is half of it, so its drafts may not be worth their time."""
    monkeypatch.setattr(DraftingSlotPool, "predict_break_even_acceptance", lambda *_: 0.0)


def write_mtp_model(name: str, folder: Path, blocks: int) -> Model:
    source = path_of(name) if name == "qwen35" else architectures.write_model(name, folder)
    return with_blocks_ahead(folder / "ahead.gguf", source, 30.0, blocks)


def make_mtp_pool(model: Model, draft_tokens: int, slots: int = DRAFTED_SLOTS) -> DraftingSlotPool:
    return DraftingSlotPool(
        Session(model.with_mtp_blocks(), on=DeviceGroup(threads=2), context=CONTEXT),
        slots,
        context=CONTEXT,
        batch=BATCH,
        make_drafter=lambda pool: MtpSlotDrafter(pool, draft_tokens),
    )


def make_plain_pool(model: Model, slots: int = DRAFTED_SLOTS) -> SlotPool:
    session = Session(model, on=DeviceGroup(threads=1), context=CONTEXT)
    return SlotPool(session, slots, context=CONTEXT, batch=BATCH)


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("case", MTP_CASES)
def test_a_schedule_with_mtp_drafts_has_the_bits_of_each_request_alone_without(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting_pool, "MAX_DRAFTED_WINDOW", 16)
    name, blocks, draft_tokens = MTP_CASES[case]
    model, rng = write_mtp_model(name, tmp_path, blocks), np.random.default_rng(49)
    requests = draw_requests(DRAFTED_REQUESTS, model.vocabulary_size, rng)
    engine, mixed = make_schedule_engine(make_mtp_pool(model, draft_tokens))
    events = run_schedule(engine, requests, rng)
    alone_engine, alone = make_schedule_engine(make_plain_pool(model))

    ends = {event.request: event for event in events if isinstance(event, EndEvent)}
    for request in requests:
        want, got = run_alone(alone_engine, request), list_tokens(events, request.id)
        assert got == want[: len(got)], request.id
        assert ends[request.id].reason == "cancelled" or len(got) == len(want)
    common = mixed.digests.keys() & alone.digests.keys()
    assert {key: mixed.digests[key] for key in common} == {key: alone.digests[key] for key in common}
    assert len(common) >= 0.9 * sum(len(list_tokens(events, request.id)) for request in requests)
    assert max(mixed.decoded_counts) > 1
    sums = engine.status.sums
    assert 0 < sums.accepted_tokens < sums.drafted_tokens
    assert sums.cached_tokens > 0
    assert count_ends(events, "cancelled") > 0
    print(case, sums)
