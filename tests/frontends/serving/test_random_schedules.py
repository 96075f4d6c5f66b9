"""Requests in random schedules: hits, cancellations and neighbours change no bit of any logits.

``HOCKET_SCHEDULE_REQUESTS=1000`` runs that many requests for each model instead of `REQUESTS`.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.frontends.serving.blocks.slot_pool import BlockSlotPool
from hocket.frontends.serving.engine import Engine
from hocket.frontends.serving.requests import EndEvent
from hocket.frontends.serving.slots import SlotPool

from ...given.models.goldens import path_of
from ...given.serving.engine_runs import BATCH, CONTEXT
from ...given.serving.schedules import (
    RecordingPool,
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


MIXED_CASES = ("floats", "bfloat16", "quantised", "delta net", "layers on two devices")
"""Cases with steps that read a prompt and decode; shards of a row would be summed in another order."""
BLOCK_CASES = {
    "floats": ("llama", "cpu:0", "layer"),
    "quantised": ("qwen3-q4_k_m", "cpu:0", "layer"),
    "delta net": ("qwen35", "cpu:0", "layer"),
    "shards on two devices": ("llama", "cpu:0,cpu:1", "tensor"),
}
POOL_TOKENS = 8 * 64
"""Cells of a pool of blocks, much fewer than 12 requests need."""


def make_slot_pool(name: str, devices: str, split_mode: str, threads: int) -> SlotPool:
    group = DeviceGroup(devices=tuple(devices.split(",")), split_mode=split_mode, threads=threads)
    return SlotPool(Session(open_model(path_of(name)), on=group), SLOTS, context=CONTEXT, batch=BATCH)


def make_block_pool(name: str, devices: str, split_mode: str) -> BlockSlotPool:
    group = DeviceGroup(devices=tuple(devices.split(",")), split_mode=split_mode, threads=2)
    session = Session(open_model(path_of(name)), on=group)
    return BlockSlotPool(session, SLOTS, pool_tokens=POOL_TOKENS, context=CONTEXT, batch=BATCH)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_requests_in_a_random_schedule_have_the_bits_that_they_have_alone(case: str) -> None:
    engine, mixed = check_schedule(make_slot_pool(*CASES[case], threads=2), CASES[case])
    assert max(mixed.decoded_counts) > 6
    assert bool(mixed.mixed_counts) == (case in MIXED_CASES)
    assert engine.status.sums.preemptions == 0


@pytest.mark.long
@pytest.mark.parametrize("case", BLOCK_CASES)
def test_requests_in_few_blocks_have_the_bits_that_they_have_alone(case: str) -> None:
    """Alone they have a region of each cache; together they share blocks, and some are preempted."""
    pool = make_block_pool(*BLOCK_CASES[case])
    engine, mixed = check_schedule(pool, BLOCK_CASES[case])
    assert max(mixed.decoded_counts) > 3
    assert engine.status.sums.preemptions > 0
    engine.restart_and_requeue_requests((), "")
    assert pool.allocator.free_count == pool.allocator.usable_count


def check_schedule(pool: SlotPool, case: tuple[str, str, str]) -> tuple[Engine, RecordingPool]:
    """Compare requests of a random schedule on `pool` with the same requests alone."""
    rng = np.random.default_rng(49)
    requests = draw_requests(REQUESTS, pool.all_slots_session.model.vocabulary_size, rng)
    engine, mixed = make_schedule_engine(pool)
    events = run_schedule(engine, requests, rng)
    alone_engine, alone = make_schedule_engine(make_slot_pool(*case, threads=1))

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
    return engine, mixed
