"""Drafts in batches change no bit of any logits: random schedules with right and wrong drafts, and cancellations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np
import pytest

from hocket.cli import main
from hocket.frontends.generation.generate import GenerationParams
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.frontends.serving.drafting import drafting_pool
from hocket.frontends.serving.drafting.drafter import MAX_DRAFT_TOKENS
from hocket.frontends.serving.drafting.drafting_pool import DraftingSlotPool
from hocket.frontends.serving.drafting.model_drafter import ModelSlotDrafter
from hocket.frontends.serving.prefix_cache import PrefixCache
from hocket.frontends.serving.requests import EndEvent, GenerationRequest
from hocket.frontends.serving.slot_files import SlotFiles
from hocket.frontends.serving.slots import SlotPool
from hocket.graph.errors import BackendError

from ....given.models.goldens import TINY, path_of
from ....given.serving.engine_runs import BATCH, CONTEXT, make_pool, prompt_of
from ....given.serving.real_service import BODY, complete, open_client
from ....given.serving.schedules import (
    count_ends,
    draw_requests,
    list_tokens,
    make_schedule_engine,
    run_alone,
    run_schedule,
)

CLIENT_BODY = {"prompt": BODY["prompt"], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
DRAFTED_REQUESTS, DRAFTED_SLOTS = 40, 12
DRAFT_CASES = {
    "attention": ("llama", "llama", 3),
    "quantised": ("qwen3-q4_k_m", "qwen3-q8_0", 7),
    "delta net": ("qwen35", "qwen35", 4),
    "rings": ("gemma3", "gemma3", 2),
    "experts": ("qwen3moe", "qwen3moe", 1),
}
"""The model, the draft model, and the draft tokens of a run."""


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model is as large as the model, so its drafts would not be worth their time."""
    monkeypatch.setattr(DraftingSlotPool, "predict_break_even_acceptance", lambda *_: 0.0)


class PartlyWrongDrafter(ModelSlotDrafter):
    """A drafter that replaces some draft tokens by wrong ones, at places that follow from the text."""

    def draft_tokens(self, known: Mapping[int, tuple[int, ...]]) -> dict[int, list[int]]:
        found = super().draft_tokens(known)
        vocabulary = self.own_pool.all_slots_session.model.vocabulary_size
        for slot, tokens in found.items():
            at = sum(known[slot]) % (self.max_tokens + 1)
            tokens[at:] = [(token + 1) % vocabulary for token in tokens[at:]]
        return found


def make_drafting_pool(name: str, draft: str, draft_tokens: int, slots: int = DRAFTED_SLOTS) -> DraftingSlotPool:
    group = DeviceGroup(threads=2)
    small = Session(open_model(path_of(draft)), on=group)
    drafter = PartlyWrongDrafter(SlotPool(small, slots, context=CONTEXT, batch=BATCH), draft_tokens)
    return DraftingSlotPool(
        Session(open_model(path_of(name)), on=group),
        slots,
        context=CONTEXT,
        batch=BATCH,
        make_drafter=lambda pool: drafter,
    )


@pytest.mark.nightly(cases=2)
@pytest.mark.long
@pytest.mark.parametrize("case", DRAFT_CASES)
def test_a_schedule_with_drafts_has_the_bits_of_each_request_alone_without(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting_pool, "MAX_DRAFTED_WINDOW", 16)
    name, draft, draft_tokens = DRAFT_CASES[case]
    rng = np.random.default_rng(49)
    pool = make_drafting_pool(name, draft, draft_tokens)
    requests = draw_requests(DRAFTED_REQUESTS, pool.all_slots_session.model.vocabulary_size, rng)
    engine, mixed = make_schedule_engine(pool)
    events = run_schedule(engine, requests, rng)
    alone_engine, alone = make_schedule_engine(make_pool(name, DRAFTED_SLOTS))

    ends = {event.request: event for event in events if isinstance(event, EndEvent)}
    for request in requests:
        want, got = run_alone(alone_engine, request), list_tokens(events, request.id)
        assert got == want[: len(got)], request.id
        assert ends[request.id].reason == "cancelled" or len(got) == len(want)
    common = mixed.digests.keys() & alone.digests.keys()
    assert {key: mixed.digests[key] for key in common} == {key: alone.digests[key] for key in common}
    assert len(common) >= 0.9 * sum(len(list_tokens(events, request.id)) for request in requests)

    sums = engine.status.sums
    assert 0 < sums.accepted_tokens < sums.drafted_tokens
    assert sums.accepted_tokens == sum(end.timing.accepted_tokens for end in ends.values())
    assert sums.drafted_tokens == sum(end.timing.drafted_tokens for end in ends.values())
    assert sums.cached_tokens > 0
    assert count_ends(events, "cancelled") > 0


def test_wrong_drafts_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses last 1, 3, 7, 15, 31 and 63 tokens; right drafts end them."""
    monkeypatch.setattr(ModelSlotDrafter, "draft_tokens", lambda self, known: {slot: [1, 1, 1] for slot in known})
    pool = make_drafting_pool("llama", "llama", 3)
    monkeypatch.setattr(pool, "drafter", ModelSlotDrafter(pool.drafter.own_pool, 3))
    known: list[int] = []

    def count_drafted_steps(tokens: list[int]) -> int:
        steps = 0
        for token in tokens:
            is_known = [*pool.list_evaluated_draft_tokens(0)[:1]] == [token]
            pool.decode({0: token}, {0: known})
            known.append(token)
            steps += not is_known and len(pool.list_evaluated_draft_tokens(0)) > 0
        return steps

    pool.read_prompt(0, [5], [])
    known.append(5)
    assert count_drafted_steps([7] * 126) == 6
    assert count_drafted_steps([7, 1, 1, 1, 7, 1, 1, 1]) == 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen35", "llama"])
def test_a_slot_with_drafts_is_saved_as_one_without(name: str) -> None:
    """The states are those after the last sampled token, although the run has evaluated further ones."""
    prompt = list(prompt_of(name))

    def run(pool: SlotPool) -> dict[str, bytes]:
        pool.clear_recurrent_states(1)
        pool.read_prompt(1, prompt[:64], [])
        known = prompt[:64]
        for token in prompt[64:69]:
            pool.decode({1: token}, {1: known})
            known = [*known, token]
        files = SlotFiles(pool, cache := PrefixCache(pool, state_bytes=1 << 30))
        cache.record_slot_contents(1, known, len(known))
        return {name: array.tobytes() for name, array in files.capture(1).arrays.items()}

    pool = make_drafting_pool(name, name, 3)
    for _ in range(2):  # the small model reads the prompt in the first decode step of a slot
        drafted = run(pool)
    assert drafted == run(make_pool(name))


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_a_text_that_moves_to_a_slot_gets_no_drafts_of_the_text_before(name: str) -> None:
    """Its next token is the draft token that the other text has left in the slot."""
    prompt, other = list(prompt_of(name)[:32]), [40, 41, 42, 43]
    pool, plain = make_drafting_pool(name, name, 3), make_pool(name, DRAFTED_SLOTS)
    pool.clear_recurrent_states(0)
    pool.read_prompt(0, prompt, [])
    for token in range(50, 60):
        if pool.list_evaluated_draft_tokens(0):
            break
        pool.decode({0: token}, {0: prompt})
        prompt = [*prompt, token]
    (token, *_) = pool.list_evaluated_draft_tokens(0)
    logits = []
    for one in (pool, plain):
        one.clear_recurrent_states(1)
        one.read_prompt(1, other, [])
        PrefixCache(one, state_bytes=1 << 20).move_running_request(1, 0, len(other))
        logits.append(one.decode({0: token}, {0: other})[0])
    assert np.array_equal(*logits)


@pytest.mark.long
def test_rejected_drafts_in_a_ring_are_not_read() -> None:
    """They overwrite further old cells, so a shorter beginning is read again a bit sooner."""
    prompt = (prompt_of("gemma3") * 2)[:150]
    params = GenerationParams(12, Sampling(), 1, frozenset())
    requests = [GenerationRequest("a", prompt, params), GenerationRequest("b", (*prompt[:102], 5, 6, 7), params)]
    engine, mixed = make_schedule_engine(make_drafting_pool("gemma3", "gemma3", 7, slots=1))
    alone_engine, alone = make_schedule_engine(make_pool("gemma3", 1))
    for request in requests:
        engine.submit(request)
        while engine.has_work:
            engine.step()
        run_alone(alone_engine, request)
    assert engine.status.sums.drafted_tokens > 0
    common = mixed.digests.keys() & alone.digests.keys()
    assert {key: mixed.digests[key] for key in common} == {key: alone.digests[key] for key in common}
    assert ("prompt", requests[1].prompt) in common


@pytest.mark.long
def test_accepted_tokens_are_counted_for_clients() -> None:
    body = {**BODY, "n_predict": 20}
    with open_client(None) as client:
        plain = complete(client, **body)
        assert "draft_n" not in plain["timings"]
        assert "completion_tokens_details" not in client.post("/v1/completions", json=CLIENT_BODY).json()["usage"]
    with open_client(None, draft=TINY, draft_max=3) as client:
        answer = complete(client, **body)
        usage = client.post("/v1/completions", json=CLIENT_BODY).json()["usage"]["completion_tokens_details"]
        metrics = client.get("/metrics").text
    assert answer["tokens"] == plain["tokens"]
    timings = answer["timings"]
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"] < 20
    accepted = timings["draft_n_accepted"] + usage["accepted_prediction_tokens"]
    drafted = accepted + timings["draft_n"] - timings["draft_n_accepted"] + usage["rejected_prediction_tokens"]
    for name, count in (("accepted", accepted), ("drafted", drafted)):
        assert f"hocket_{name}_tokens_total {float(count)}" in metrics
    assert f"llamacpp:spec_decode_num_draft_tokens_total {drafted}" in metrics
    assert f"llamacpp:spec_decode_num_accepted_tokens_total {accepted}" in metrics


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft-max", "3"], "has no block that guesses further tokens (MTP); name a draft model with -md FILE"),
        (
            ["-md", TINY, "--log-requests", "log"],
            "--log-requests does not support drafts; leave out -md and --draft-max, or",
        ),
        (["--draft-max", "3", "--dry-run"], "--dry-run does not support drafts; leave out -md and --draft-max, or"),
    ],
)
def test_flags_that_drafts_exclude(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", TINY, *flags]) == 2
    assert message in capsys.readouterr().err


def test_drafts_end_before_the_context_and_are_few() -> None:
    pool = make_drafting_pool("llama", "llama", 20)
    assert pool.drafter.max_tokens == MAX_DRAFT_TOKENS
    prompt = (prompt_of("llama") * 3)[: CONTEXT - 3]
    known: list[int] = []
    for start in range(0, len(prompt), BATCH):
        pool.read_prompt(0, prompt[start : start + BATCH], known)
        known += prompt[start : start + BATCH]
    for token in (5, 6, 7):
        pool.decode({0: token}, {0: known})
        assert not pool.list_evaluated_draft_tokens(0)
        known.append(token)


def test_a_refused_step_is_repeated_without_runs_of_the_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model had lost its recurrent states, and had read the whole prompt again."""
    pool = make_drafting_pool("qwen35", "qwen35", 3, slots=2)
    monkeypatch.setattr(pool, "drafter", ModelSlotDrafter(pool.drafter.own_pool, 3))
    prompt, runs = prompt_of("qwen35")[:9], list[str]()
    for name in ("read_prompt", "append_tokens"):
        run = getattr(pool.drafter.own_pool, name)
        monkeypatch.setattr(
            pool.drafter.own_pool, name, lambda *a, n=name, run=run, **k: [runs.append(n), run(*a, **k)][1]
        )

    def refuse(*_: object, **__: object) -> NoReturn:
        raise BackendError("refused")

    token = int(pool.read_prompt(0, prompt, []).argmax())
    with monkeypatch.context() as patch:
        patch.setattr(pool, "append_tokens", refuse)
        with pytest.raises(BackendError, match="refused"):
            pool.decode({0: token}, {0: prompt})
    assert runs == ["read_prompt", "append_tokens", "append_tokens", "append_tokens"]
    runs.clear()
    pool.decode({0: token}, {0: prompt})
    assert not runs
    drafts = [*pool.list_evaluated_draft_tokens(0)]
    assert drafts == ModelSlotDrafter(pool.drafter.own_pool, 3).draft_tokens({1: (*prompt, token)})[1]


def test_drafts_of_a_run_that_failed_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft tokens of both slots had been taken for complete drafts, so no slot was found to fail."""
    pool = make_drafting_pool("llama", "llama", 3, slots=2)
    drafter, prompt = ModelSlotDrafter(pool.drafter.own_pool, 3), prompt_of("llama")[:9]
    texts = {slot: (*prompt, slot) for slot in (0, 1)}

    def fail(*_: object, **__: object) -> NoReturn:
        raise BackendError("the draft model has no memory")

    for _ in range(3):  # a call reads one chunk of one prompt
        drafter.draft_tokens({slot: text[:-1] for slot, text in texts.items()})
    monkeypatch.setattr(drafter.own_pool, "decode", fail)
    for known in (texts, *({slot: text} for slot, text in texts.items())):
        with pytest.raises(BackendError, match="no memory"):
            drafter.draft_tokens(known)


@pytest.mark.parametrize("failing", ["append_tokens", "decode"])
def test_a_request_whose_drafts_fail_goes_on_without_them(
    failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It had ended with the error of the draft model."""
    pool = make_drafting_pool("llama", "llama", 3, slots=2)
    own = pool.drafter.own_pool
    run, failed = getattr(own, failing), list[int]()

    def fail_in_slot_1(tokens: Mapping[int, object], *args: object, **options: object) -> dict[int, np.ndarray]:
        if 1 in tokens:
            failed.append(len(tokens))
            raise BackendError("the draft model\nhas no memory")
        return run(tokens, *args, **options)

    monkeypatch.setattr(own, failing, fail_in_slot_1)
    params = GenerationParams(12, Sampling(), 1, frozenset())
    prompt = prompt_of("llama")[:9]
    requests = [GenerationRequest(name, (*prompt, token), params) for name, token in (("a", 7), ("b", 9))]
    engine, _ = make_schedule_engine(pool)
    for request in requests:
        engine.submit(request)
    events = [event for _ in range(60) for event in engine.step()]
    alone_engine, _ = make_schedule_engine(make_pool("llama", 2))
    assert [list_tokens(events, request.id) for request in requests] == [
        run_alone(alone_engine, request) for request in requests
    ]
    ends = {event.request: event for event in events if isinstance(event, EndEvent)}
    assert [ends[name].reason for name in "ab"] == ["length", "length"]
    assert ends["a"].timing.drafted_tokens > 0 == ends["b"].timing.drafted_tokens
    assert caplog.messages == ["slot 1 goes on without drafts: the draft model has no memory"]
    assert len(failed) <= 2  # one run of both slots, and one of slot 1 alone
