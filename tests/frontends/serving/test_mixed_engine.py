"""Mixed steps of the engine over a pool without a model."""

from __future__ import annotations

from ...given.serving.engine_runs import BASE, end_of, make_engine, make_request, run_all, tokens_of
from ...given.serving.fake_pool import FakePool, generate_alone


def test_a_mixed_step_reads_a_chunk_and_decodes_where_it_saves_time():
    """Each step then has a token, so the time between two tokens does not change while a prompt is read."""
    pool = FakePool(2, context=256, batch=16)
    pool.saved_seconds = 1.0
    engine = make_engine(pool)
    requests = make_request("short", (1, 2), limit=12), make_request("long", tuple(i % 30 + 1 for i in range(100)))
    engine.submit(requests[0])
    events = [*engine.step(), *engine.step()]  # the first decode step is measured
    engine.submit(requests[1])
    events += run_all(engine)
    assert [count for _, count, _ in pool.mixed] == [16] * 6 + [4]
    assert pool.reads == [(0, 2)]
    assert {step.kind for step in engine.history.trace_request_or_choices("long")[0].steps} == {"mixed", "decode"}
    for request in requests:
        assert tokens_of(events, request.id) == generate_alone(request, pool.context)[0]


def test_a_mixed_step_that_fails_ends_only_the_request_that_fails():
    pool = FakePool(2, context=256, batch=16)
    pool.saved_seconds = 1.0
    engine = make_engine(pool)
    requests = make_request("short", (1, 2), limit=12), make_request("long", BASE)
    engine.submit(requests[0])
    events = [*engine.step(), *engine.step()]
    engine.submit(requests[1])
    pool.failing = {1}
    events += engine.step()
    pool.failing = set()
    events += run_all(engine)
    assert (end_of(events, "long").reason, end_of(events, "long").message) == ("error", "device fake:0 failed")
    assert tokens_of(events, "short") == generate_alone(requests[0], pool.context)[0]
