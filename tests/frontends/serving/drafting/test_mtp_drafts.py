"""Drafts by the MTP blocks of the served model change no bit of any logits, in batches and behind the prefix cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Model
from hocket.frontends.serving.drafting import drafting_pool
from hocket.frontends.serving.drafting.drafting_pool import DraftingSlotPool
from hocket.frontends.serving.drafting.mtp_drafter import DraftInputRows, MtpSlotDrafter
from hocket.frontends.serving.prefix_cache import PrefixCache
from hocket.frontends.serving.requests import EndEvent
from hocket.frontends.serving.slot_files import SlotFiles
from hocket.frontends.serving.slots import SlotPool

from ....given.models import architectures
from ....given.models.goldens import TINY, path_of
from ....given.models.rewritten import with_blocks_ahead
from ....given.serving.engine_runs import BATCH, CONTEXT, prompt_of
from ....given.serving.real_service import BODY, complete, open_client
from ....given.serving.schedules import (
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


def write_mtp_model(name: str, folder: Path, blocks: int, pull: float = 30.0) -> Model:
    """Write a model in which a token decides most of the next token, the more the larger `pull` is."""
    source = path_of(name) if name == "qwen35" else architectures.write_model(name, folder)
    return with_blocks_ahead(folder / "ahead.gguf", source, pull, blocks)


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


@pytest.mark.nightly(cases=2)
@pytest.mark.long
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


def test_the_row_after_a_prefix_is_found_and_no_other() -> None:
    known = DraftInputRows(10, np.arange(6, dtype=np.float32).reshape(3, 2))
    found = [known.find_row(length) for length in range(9, 16)]
    assert [None if row is None else row.tolist() for row in found] == [
        None,
        None,
        [[0.0, 1.0]],
        [[2.0, 3.0]],
        [[4.0, 5.0]],
        None,
        None,
    ]


@pytest.mark.long
def test_a_text_that_moves_to_another_slot_keeps_its_drafts(tmp_path: Path) -> None:
    """The caches of the MTP blocks and the rows that they read move with it."""
    model = write_mtp_model("glm4moe-moe", tmp_path, 2, pull=1.0)
    prompt = [token % model.vocabulary_size for token in prompt_of("llama")[:40]]
    pool, known = make_mtp_pool(model, 3), (*prompt, 7)
    pool.read_prompt(0, [5, *prompt[:39]], [])  # another text, of the same length
    pool.read_prompt(2, prompt, [])
    drafts = pool.drafter.draft_tokens({2: known})[2]
    assert pool.drafter.draft_tokens({0: known})[0] != drafts
    PrefixCache(pool, state_bytes=1 << 20).move_running_request(2, 0, len(prompt))
    assert pool.drafter.draft_tokens({0: known})[0] == drafts


@pytest.mark.long
def test_drafts_of_several_slots_are_those_of_each_slot_alone(tmp_path: Path) -> None:
    model = write_mtp_model("mimo2-moe", tmp_path, 3)
    texts = [
        [token % model.vocabulary_size for token in prompt_of("llama", seed)[:count]]
        for seed, count in enumerate((9, 40, 23))
    ]
    pool = make_mtp_pool(model, 4)
    for slot, text in enumerate(texts):
        pool.read_prompt(slot, text[:-1], [])
    together = pool.drafter.draft_tokens({slot: tuple(text) for slot, text in enumerate(texts)})
    alone = [pool.drafter.draft_tokens({slot: tuple(text)})[slot] for slot, text in enumerate(texts)]
    assert [together[slot] for slot in range(3)] == alone
    assert all(len(tokens) == 4 for tokens in alone)


@pytest.mark.long
def test_a_slot_with_mtp_drafts_is_saved_as_one_without(tmp_path: Path) -> None:
    model = write_mtp_model("qwen35", tmp_path, 1)
    prompt = [*prompt_of("qwen35")[:64]]

    def run(pool: SlotPool) -> dict[str, bytes]:
        known = list(prompt)
        pool.clear_recurrent_states(1)
        pool.read_prompt(1, known, [])
        for token in (5, 6, 7, 8):
            pool.decode({1: token}, {1: known})
            known.append(token)
        files = SlotFiles(pool, cache := PrefixCache(pool, state_bytes=1 << 30))
        cache.record_slot_contents(1, known, len(known))
        return {name: array.tobytes() for name, array in files.capture(1).arrays.items()}

    pool = make_mtp_pool(model, 3)
    assert run(pool) == run(make_plain_pool(model))
    assert not pool.list_evaluated_draft_tokens(1)


@pytest.mark.long
def test_a_server_drafts_with_the_model_itself(tmp_path: Path) -> None:
    path = str(with_blocks_ahead(tmp_path / "ahead.gguf", Path(TINY), 30.0).gguf.path)
    body = {**BODY, "n_predict": 20}
    with open_client(None, model=path) as client:
        plain = complete(client, **body)
    with open_client(None, model=path, draft_max=3) as client:
        answer = complete(client, **body)
    assert answer["tokens"] == plain["tokens"]
    assert "draft_n" not in plain["timings"]
    assert 0 < answer["timings"]["draft_n_accepted"] <= answer["timings"]["draft_n"]
