"""The engine over a pool without a model: every schedule gives each request the tokens that it gets alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hocket.frontends.errors import ModelError
from hocket.frontends.serving.engine import Engine
from hocket.frontends.serving.prefix_cache import PrefixCache
from hocket.frontends.serving.requests import (
    ContextExceededError,
    EndEvent,
    GenerationRequest,
    PromptProgressEvent,
    QueueFullError,
    TokenEvent,
)

from ...given.serving.engine_runs import BASE, end_of, make_engine, make_request, run_all, tokens_of
from ...given.serving.fake_pool import VOCABULARY, FakePool, generate_alone


@pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "recurrent"])
def test_requests_get_the_tokens_that_they_get_alone(recurrent):
    pool = FakePool(4, recurrent=recurrent)
    engine = make_engine(pool)
    requests = [make_request(str(i), BASE[: 5 + 5 * i], limit=3 + i, seed=i) for i in range(6)]
    for request in requests:
        engine.submit(request)
    events = run_all(engine)
    for request in requests:
        new, reason = generate_alone(request, pool.context)
        assert tokens_of(events, request.id) == new
        assert end_of(events, request.id).reason == reason


@pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "recurrent"])
def test_the_second_turn_of_a_talk_reads_only_what_is_new(recurrent):
    pool = FakePool(2, recurrent=recurrent)
    engine = make_engine(pool)
    engine.submit(make_request("first", BASE[:20]))
    answer = tokens_of(run_all(engine), "first")
    engine.submit(make_request("second", (*BASE[:20], *answer, 7, 8)))
    end = end_of(run_all(engine), "second")
    assert end.timing.cached_tokens == (16 if recurrent else 20)  # states are saved at multiples of 16
    assert sum(count for _, count in pool.reads) == 20 + 20 - end.timing.cached_tokens + len(answer) + 2


def test_a_recurrent_prompt_is_shared_from_the_second_time_on():
    pool = FakePool(4, recurrent=True)
    engine = make_engine(pool)
    cached = []
    for name, tail in (("a", [5] * 20), ("b", [7] * 20), ("c", [9] * 20)):
        engine.submit(make_request(name, (*BASE[:25], *tail)))
        cached.append(end_of(run_all(engine), name).timing.cached_tokens)
    assert cached == [0, 0, 16]  # the second prompt shows where they differ, and states are saved at multiples of 16


def test_a_step_after_an_interrupt_of_compilation_returns_the_events_before_it():
    """The token of a request in a step that was cut had been lost for its client."""

    class InterruptedPool(FakePool):
        sizes = iter(())

        def decode(self, tokens, before):
            match next(self.sizes, None):
                case "fail":
                    raise ModelError("no memory for the step of two slots")
                case "interrupt":
                    raise KeyboardInterrupt
            return super().decode(tokens, before)

    pool = InterruptedPool(2)
    engine, requests = (
        make_engine(pool),
        [make_request(name, BASE[:5], limit=6, seed=seed) for seed, name in enumerate("ab")],
    )
    events = []
    for request in requests:
        engine.submit(request)
    while not pool.decoded:
        events += engine.step()
    pool.sizes = iter(["fail", "", "interrupt"])
    with pytest.raises(KeyboardInterrupt):
        events.extend(event for _ in range(9) for event in engine.step())
    events += run_all(engine)
    for request in requests:
        assert tokens_of(events, request.id) == generate_alone(request, pool.context)[0]


def test_an_equal_recurrent_prompt_reads_its_last_tokens_alone():
    engine = make_engine(FakePool(2, recurrent=True))
    cached = []
    for name in ("a", "b"):
        engine.submit(make_request(name, BASE))
        cached.append(end_of(run_all(engine), name).timing.cached_tokens)
    assert cached == [0, 16]


def test_saved_states_of_tokens_that_were_replaced_are_not_used():
    pool = FakePool(1, recurrent=True)
    engine = make_engine(pool)
    replaced = (*BASE[:22], 31, 31, 31, 31, 31, 31, 31, 31)
    for number, prompt in enumerate((BASE[:20], BASE[:28], replaced, (*replaced, 3))):
        request = make_request(str(number), prompt, seed=number)
        engine.submit(request)
        assert tokens_of(run_all(engine), request.id) == generate_alone(request, pool.context)[0]


def test_saved_states_never_take_more_than_their_limit():
    pool = FakePool(3, recurrent=True)
    cache = PrefixCache(pool, state_bytes=4)
    engine = Engine(pool, cache, queue_size=50, max_gap_seconds=1e9, clock=lambda: pool.now)
    for number in range(20):
        engine.submit(make_request(str(number), (*BASE[: number + 5], 31 - number), seed=number))
    run_all(engine)
    assert 0 < cache.saved_state_bytes <= 4


def test_equal_prompts_that_come_together_are_read_once():
    pool = FakePool(4, context=256, batch=128)
    engine = make_engine(pool)
    prompt = tuple(i % 30 + 1 for i in range(100))
    for i in range(4):
        engine.submit(make_request(str(i), prompt, seed=i))
    ends = (
        [end_of(run_all(engine), "0")] if False else [event for event in run_all(engine) if isinstance(event, EndEvent)]
    )
    assert sorted(end.timing.cached_tokens for end in ends) == [0, 99, 99, 99]


@pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "recurrent"])
def test_slots_that_are_added_while_requests_run_change_no_text(recurrent):
    pool = FakePool(1, recurrent=recurrent)
    cache = PrefixCache(pool, state_bytes=100)
    engine = Engine(pool, cache, queue_size=8, max_gap_seconds=1e9, clock=lambda: pool.now)
    requests = [make_request(str(i), BASE[: 5 + 4 * i], limit=6, seed=i) for i in range(4)]
    events = []
    for number, request in enumerate(requests):
        engine.submit(request)
        if number:
            cache.resize_to_slot_count(number + 1)
        events += [event for _ in range(3) for event in engine.step()]
    events += run_all(engine)
    for request in requests:
        assert tokens_of(events, request.id) == generate_alone(request, pool.context)[0]
    assert max(map(len, pool.decoded)) >= 3


@pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "recurrent"])
def test_slots_that_are_taken_away_change_no_text(recurrent):
    pool = FakePool(8, recurrent=recurrent)
    cache = PrefixCache(pool, state_bytes=100)
    engine = Engine(pool, cache, queue_size=8, max_gap_seconds=1e9, clock=lambda: pool.now)
    early = [make_request(f"early {i}", tuple(range(i + 1, i + 20)), limit=3, seed=i) for i in range(6)]
    late = [make_request(f"late {i}", BASE[: 20 + 4 * i], limit=9, seed=i, slot=i) for i in range(2)]
    for request in early:
        engine.submit(request)
    events = run_all(engine)
    for request in late:
        engine.submit(request)
    events += [event for _ in range(4) for event in engine.step()]
    cache.resize_to_slot_count(2)
    assert engine.status.slots == len(engine.status.slot_tokens) == 2
    again = make_request("again", early[5].prompt, limit=3, seed=5)
    engine.submit(again)
    events += run_all(engine)
    for request in (*early, *late, again):
        assert tokens_of(events, request.id) == generate_alone(request, pool.context)[0]


def test_blocks_of_a_limited_window_take_turns():
    pool = FakePool(8)
    cache = PrefixCache(pool, state_bytes=100)
    engine = Engine(pool, cache, queue_size=8, max_gap_seconds=1e9, clock=lambda: pool.now, max_window=2)
    requests = [make_request(str(i), BASE[: 5 + i], limit=6, seed=i) for i in range(5)]
    for request in requests:
        engine.submit(request)
    events = run_all(engine)
    for request in requests:
        assert tokens_of(events, request.id) == generate_alone(request, pool.context)[0]
    blocks = [{slot // 2 for slot in slots} for slots in pool.decoded]
    assert set(map(len, blocks)) == {1}
    joined = [block for (block,) in blocks]
    assert set(joined) == {0, 1, 2}
    assert sum(one != other for one, other in pairwise(joined)) > 3  # without turns, a block runs until it ends


def test_a_paused_request_decodes_no_token():
    pool = FakePool(2)
    engine = make_engine(pool)
    requests = [make_request(name, BASE[:9], limit=8, seed=seed) for seed, name in enumerate("ab")]
    for request in requests:
        engine.submit(request)
    events = [event for _ in range(5) for event in engine.step()]
    before = len(tokens_of(events, "a"))
    events += [event for _ in range(3) for event in engine.step(paused={"a"})]
    assert len(tokens_of(events, "a")) == before
    events += run_all(engine)
    for request in requests:
        assert tokens_of(events, request.id) == generate_alone(request, pool.context)[0]


def test_a_context_that_is_filled_gives_one_more_token():
    pool, ends = FakePool(1, context=16), {}
    for fills in (False, True):
        cache = PrefixCache(pool, state_bytes=100)
        engine = Engine(pool, cache, queue_size=8, max_gap_seconds=1e9, clock=lambda: pool.now, fills_context=fills)
        request = make_request("a", BASE[:9], limit=-1)
        engine.submit(replace(request, params=replace(request.params, end_tokens=frozenset())))
        ends[fills] = end_of(run_all(engine), "a").timing.new_tokens
    assert ends == {False: 7, True: 8}


def test_sums_count_cached_tokens_as_prompt_tokens():
    engine = make_engine(FakePool(2))
    for name in ("a", "b"):
        engine.submit(make_request(name, BASE, limit=2))
        run_all(engine)
    sums = engine.status.sums
    assert (sums.prompt_tokens, sums.cached_tokens, sums.finished_requests) == (2 * len(BASE), len(BASE) - 1, 2)


def test_a_grammar_that_fails_ends_its_request_alone():
    class BrokenGrammar:
        def make_state(self):
            raise ModelError("no state")

    engine = make_engine(FakePool(2))
    params = replace(make_request("x", (1,)).params, grammar=BrokenGrammar())
    engine.submit(GenerationRequest("broken", (1, 2), params))
    engine.submit(make_request("whole", (1, 2, 3)))
    events = run_all(engine)
    assert (end_of(events, "broken").reason, end_of(events, "broken").message) == ("error", "no state")
    assert end_of(events, "whole").reason in ("stop", "length")


def test_a_request_without_cache_reads_its_whole_prompt():
    engine = make_engine(FakePool(2))
    for name in ("a", "b"):
        engine.submit(make_request(name, BASE[:20], uses_cache=False))
        assert end_of(run_all(engine), name).timing.cached_tokens == 0


def test_chunks_of_a_prompt_and_decode_steps_alternate():
    pool = FakePool(2, context=256, batch=16)
    engine = make_engine(pool)
    engine.submit(make_request("short", (1, 2), limit=12))
    engine.step()
    engine.submit(make_request("long", tuple(i % 30 + 1 for i in range(100)), limit=1))
    kinds = [type(event) for event in run_all(engine) if not isinstance(event, EndEvent)]
    assert kinds[:11] == [
        PromptProgressEvent,
        *[TokenEvent, PromptProgressEvent] * 5,
    ]  # the first one tells of the slot


def test_a_failed_device_ends_only_the_request_that_fails():
    pool = FakePool(3)
    engine = make_engine(pool)
    requests = [make_request(str(i), BASE[: 4 + i], limit=6, seed=3) for i in range(3)]
    for request in requests:
        engine.submit(request)
    events = []
    while engine.status.running < 3 or len(tokens_of(events, "2")) < 1:
        events += engine.step()
    failing = engine.status.slot_requests.index("1")
    pool.failing = {failing}
    while not any(isinstance(event, EndEvent) and event.request == "1" for event in events):
        events += engine.step()
    pool.failing = set()
    events += run_all(engine)
    assert (end_of(events, "1").reason, end_of(events, "1").message) == ("error", "device fake:0 failed")
    for request in (requests[0], requests[2]):
        assert tokens_of(events, request.id) == generate_alone(request, pool.context)[0]


@pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "recurrent"])
def test_requests_that_are_left_move_together(recurrent):
    pool = FakePool(8, recurrent=recurrent)
    engine = make_engine(pool)
    requests = [make_request(str(i), BASE[i : i + 3], limit=12 if i in (0, 6) else 2, seed=i + 1) for i in range(8)]
    for request in requests:
        engine.submit(request)
    events = run_all(engine)
    pairs = [slots for slots in pool.decoded if len(slots) == 2]
    assert len(pairs) > 3
    assert {slot // 2 for slot in pairs[-1]} == {pairs[-1][0] // 2}
    for request in requests:
        assert tokens_of(events, request.id) == generate_alone(request, pool.context)[0]


def test_the_cells_of_a_failed_request_are_not_reused():
    pool = FakePool(1)
    engine = make_engine(pool)
    request = make_request("a", BASE, limit=6, seed=3)
    engine.submit(request)
    engine.step()
    engine.step()
    pool.failing = {0}
    assert run_all(engine)[-1].reason == "error"
    pool.failing = set()
    assert pool.cells == [[]]
    engine.submit(request)
    assert tokens_of(run_all(engine), "a") == generate_alone(request, pool.context)[0]


def test_requests_that_cannot_run_are_refused_at_once():
    engine = make_engine(FakePool(1, context=32), queue_size=2)
    with pytest.raises(ModelError, match="the prompt is empty"):
        engine.submit(make_request("empty", ()))
    with pytest.raises(
        ContextExceededError, match=r"the prompt has 32 tokens, but the context holds 32 .* give a larger context=N$"
    ):
        engine.submit(make_request("long", [1] * 32))
    engine.submit(make_request("a", (1, 2)))
    engine.submit(make_request("b", (1, 2)))
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        engine.submit(make_request("c", (1, 2)))


def test_probabilities_are_those_of_the_model():
    engine = make_engine(FakePool(1))
    engine.submit(make_request("a", (1, 2), limit=2, top_logprobs=VOCABULARY))
    events = [event for event in run_all(engine) if isinstance(event, TokenEvent)]
    for event in events:
        assert sum(2.718281828459045**logprob for _, logprob in event.top) == pytest.approx(1)
        assert dict(event.top)[event.token] == event.logprob


class EngineMachine(RuleBasedStateMachine):
    """Random orders and steps. Each request ends once, with the tokens that it gets alone."""

    @initialize(
        slots=st.integers(1, 5),
        recurrent=st.booleans(),
        state_bytes=st.integers(0, 6),
        saved=st.sampled_from([0.0, 1.0]),
    )
    def open(self, slots, recurrent, state_bytes, saved):
        self.pool = FakePool(slots, context=40, batch=16, recurrent=recurrent)
        self.pool.saved_seconds = saved
        self.engine = make_engine(self.pool, queue_size=4, state_bytes=state_bytes)
        self.requests, self.events, self.count = {}, [], 0

    @rule(shared=st.integers(0, 30), tail=st.lists(st.integers(1, 31), max_size=8), limit=st.integers(-1, 6))
    def submit(self, shared, tail, limit):
        prompt = (*BASE[:shared], *tail)
        request = make_request(str(self.count), prompt, limit=limit, seed=self.count)
        try:
            self.engine.submit(request)
        except (ModelError, QueueFullError):
            assert not prompt or self.engine.status.queued >= 4  # a restart queues running requests again
            return
        self.requests[request.id], self.count = request, self.count + 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        self.events += self.engine.cancel(data.draw(st.sampled_from(sorted(self.requests))))

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            self.events += self.engine.step()

    @rule(data=st.data())
    def step_with_a_failing_slot(self, data):
        self.pool.failing = {data.draw(st.integers(0, self.pool.slots - 1))}
        self.events += self.engine.step()
        self.pool.failing = set()

    @rule(operations=st.frozensets(st.sampled_from(["read", "decode"])), breaks_all=st.booleans())
    def step_that_breaks_the_engine(self, operations, breaks_all):
        self.pool.breaks = operations
        try:
            self.events += self.engine.step()
        except RuntimeError:
            in_step = self.engine.requests_in_step
            running = [name for name in self.engine.status.slot_requests if name]
            self.events += self.engine.restart_and_requeue_requests(running if breaks_all else in_step, "broken")
        self.pool.breaks = frozenset()

    @invariant()
    def no_more_requests_than_slots_run(self):
        status = self.engine.status
        assert status.running <= self.pool.slots
        assert status.running == sum(map(bool, status.slot_requests))

    def teardown(self):
        self.events += run_all(self.engine)
        for name, request in self.requests.items():
            end = end_of(self.events, name)
            new, reason = generate_alone(request, self.pool.context)
            got = tokens_of(self.events, name)
            assert got == new[: len(got)]
            if end.reason not in ("cancelled", "error"):
                assert (got, end.reason) == (new, reason)
        assert len([event for event in self.events if isinstance(event, EndEvent)]) == len(self.requests)


TestRandomSchedules = EngineMachine.TestCase
TestRandomSchedules.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_the_first_chunk_has_the_size_of_the_predicted_time(monkeypatch):
    monkeypatch.setattr(FakePool, "predict_prompt_seconds", lambda pool, size: size / 20)
    pool = FakePool(1, context=256, batch=128)
    engine = make_engine(pool)
    engine.submit(make_request("a", [1] * 100))
    engine.step()
    assert pool.reads == [(0, 16)]  # 32 tokens would take 1.6 s, more than `IDLE_CHUNK_SECONDS`


def test_the_seconds_of_a_plan_do_not_shrink_later_chunks():
    def list_chunks(unplanned):
        pool = FakePool(2, context=256, batch=64)
        pool.unplanned = unplanned
        cache = PrefixCache(pool, state_bytes=100)
        engine = Engine(pool, cache, queue_size=8, max_gap_seconds=33.0, clock=lambda: pool.now)
        engine.submit(make_request("short", (1, 2), limit=30))
        engine.step()
        engine.submit(make_request("long", [i % 30 + 1 for i in range(100)], limit=1))
        run_all(engine)
        return pool.reads

    assert list_chunks({2, 16}) == list_chunks(set())
