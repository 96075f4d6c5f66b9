"""Requests in random schedules: hits, cancellations and neighbours change no bit of any logits.

``HOCKET_SCHEDULE_REQUESTS=1000`` runs that many requests for each model instead of `REQUESTS`.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.frontends.serving.requests import EndEvent
from hocket.frontends.serving.slots import SlotPool

from ...given.models.goldens import path_of
from ...given.serving.engine_runs import BATCH, CONTEXT
from ...given.serving.schedules import (
    count_ends,
    draw_requests,
    list_tokens,
    make_schedule_engine,
    run_alone,
    run_schedule,
)

REQUESTS = int(os.environ.get("HOCKET_SCHEDULE_REQUESTS", "40"))
SLOTS = 12
CASES = {
    "floats": ("llama", "cpu:0", "layer"),
    "bfloat16": ("qwen3-bf16", "cpu:0", "layer"),
    "quantised": ("qwen3-q4_k_m", "cpu:0", "layer"),
    "delta net": ("qwen35", "cpu:0", "layer"),
    "layers on two devices": ("llama", "cpu:0,cpu:1", "layer"),
    "shards on two devices": ("qwen35", "cpu:0,cpu:1", "tensor"),
}


def make_slot_pool(name: str, devices: str, split_mode: str, threads: int) -> SlotPool:
    group = DeviceGroup(devices=tuple(devices.split(",")), split_mode=split_mode, threads=threads)
    return SlotPool(Session(open_model(path_of(name)), on=group), SLOTS, context=CONTEXT, batch=BATCH)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_requests_in_a_random_schedule_have_the_bits_that_they_have_alone(case: str) -> None:
    rng = np.random.default_rng(49)
    pool = make_slot_pool(*CASES[case], threads=2)
    requests = draw_requests(REQUESTS, pool.all_slots_session.model.vocabulary_size, rng)
    engine, mixed = make_schedule_engine(pool)
    events = run_schedule(engine, requests, rng)
    alone_engine, alone = make_schedule_engine(make_slot_pool(*CASES[case], threads=1))

    for request in requests:
        want, got = run_alone(alone_engine, request), list_tokens(events, request.id)
        (end,) = (event for event in events if isinstance(event, EndEvent) and event.request == request.id)
        assert got == want[: len(got)], request.id
        assert end.reason == "cancelled" or len(got) == len(want)
    common = mixed.digests.keys() & alone.digests.keys()
    assert {key: mixed.digests[key] for key in common} == {key: alone.digests[key] for key in common}

    produced = sum(len(list_tokens(events, request.id)) for request in requests)
    assert len(common) >= 0.9 * produced  # two requests may share a sequence
    assert count_ends(events, "cancelled") > 0
    assert engine.status.sums.cached_tokens > 0
    assert max(mixed.decoded_counts) > 6
