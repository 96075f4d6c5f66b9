"""Slots over a pool of blocks, without weights: shared prefixes, admission, preemption, and no lost block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hocket
from hocket.cli import main
from hocket.frontends.errors import ModelError
from hocket.frontends.generation.generate import GenerationParams
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.inference.session import Session
from hocket.frontends.open_model import open_model
from hocket.frontends.serving.blocks.allocator import BlockAllocator
from hocket.frontends.serving.blocks.block_cache import BlockPrefixCache
from hocket.frontends.serving.blocks.prefix_tree import PrefixTree
from hocket.frontends.serving.blocks.slot_pool import BlockSlotPool
from hocket.frontends.serving.engine import Engine
from hocket.frontends.serving.request_log import RequestLog
from hocket.frontends.serving.requests import EndEvent, GenerationRequest
from hocket.frontends.serving.slot_files import SlotFiles
from hocket.frontends.serving.slots import SlotPool
from hocket.frontends.serving.thread import EngineOptions, EngineThread
from hocket.graph.errors import BackendError
from hocket.graph.storage.files import open_log

from ...given.models.architectures import write_model
from ...given.models.goldens import path_of
from ...given.serving.engine_runs import end_of, make_request, run_all, tokens_of
from ...given.serving.fake_block_pool import FakeBlockPool
from ...given.serving.fake_pool import generate_alone
from ...given.waits import wait_until

CONTEXT = 512


def make_block_engine(slots, blocks, *, whole=False, context=CONTEXT):
    pool = FakeBlockPool(slots, blocks, context=context)
    cache = BlockPrefixCache(pool, reserves_whole_texts=whole)
    return pool, Engine(pool, cache, queue_size=1 << 20, max_gap_seconds=1e9, clock=lambda: pool.now)


def make_endless_request(name, prompt, limit, seed=0):
    request = make_request(name, prompt, limit, seed)
    return replace(request, params=replace(request.params, end_tokens=frozenset()))


def require_no_lost_block(pool, engine):
    assert not any(pool.tables)
    engine.restart_and_requeue_requests((), "")
    assert pool.allocator.free_count == pool.allocator.usable_count


@pytest.mark.long
@pytest.mark.parametrize("saved_seconds", [0.0, 1.0])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_texts_in_a_random_schedule_are_those_of_each_request_alone(whole, seed, saved_seconds):
    rng = np.random.default_rng(seed)
    pool, engine = make_block_engine(8, 12, whole=whole)
    pool.saved_seconds = saved_seconds
    requests, waiting, events = [], 150, []
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.5:
            prompt = rng.integers(1, 32, rng.integers(1, 200)).tolist()
            if requests and rng.random() < 0.7:
                other = requests[rng.integers(len(requests))].prompt
                prompt = [*other[: rng.integers(1, len(other) + 1)], *prompt][:400]
            requests.append(make_request(f"r{waiting}", prompt, int(rng.integers(0, 100)), waiting))
            engine.submit(requests[-1])
            waiting -= 1
        new = engine.step()
        if requests and rng.random() < 0.05:
            new += engine.cancel(requests[rng.integers(len(requests))].id)
        events += new
    for one in requests:
        tokens, reason = generate_alone(one, CONTEXT)
        end = end_of(events, one.id)
        assert tokens_of(events, one.id) == tokens[: end.timing.new_tokens if end.reason == "cancelled" else None]
        assert end.reason in (reason, "cancelled")
    assert engine.status.sums.cached_tokens > 0
    assert pool.copied_cells > 0
    assert (engine.status.sums.preemptions > 0) is not whole
    require_no_lost_block(pool, engine)


def test_whole_blocks_of_a_prefix_are_shared_and_the_last_one_is_copied():
    pool, engine = make_block_engine(2, 8)
    shared = tuple(np.random.default_rng(1).integers(1, 32, 150).tolist())
    run_first = make_request("a", shared, 40)
    engine.submit(run_first)
    while engine.status.sums.new_tokens < 3:
        engine.step()
    engine.submit(make_request("b", (*shared[:140], 1, 2), 40))
    engine.step()
    first, second = pool.tables[0], pool.tables[1]
    assert (first[:2], pool.copied_cells) == (second[:2], 140 - 128)
    assert first[2] != second[2]
    run_all(engine)
    require_no_lost_block(pool, engine)


def test_the_youngest_request_gives_its_blocks_and_continues_with_the_same_text():
    pool, engine = make_block_engine(3, 8)
    requests = [
        GenerationRequest(
            name, tuple(range(1, 60 + i)), GenerationParams(300, Sampling(temperature=0.8), i, frozenset())
        )
        for i, name in enumerate("abc")
    ]
    for one in requests:
        engine.submit(one)
    events = run_all(engine)
    assert engine.status.sums.preemptions > 0
    assert [event.request for event in events if isinstance(event, EndEvent)] == ["a", "b", "c"]
    for one in requests:
        assert (tokens_of(events, one.id), end_of(events, one.id).reason) == generate_alone(one, CONTEXT)
    require_no_lost_block(pool, engine)


def test_a_request_waits_until_blocks_for_all_of_its_tokens_are_free_if_they_are_reserved():
    pool, engine = make_block_engine(4, 8, whole=True)
    for i in range(3):
        engine.submit(make_request(f"r{i}", [i + 1] * 20, 200, i))  # 4 blocks each
    engine.step()
    assert (engine.status.running, engine.status.queued) == (2, 1)
    run_all(engine)
    assert engine.status.sums.preemptions == 0
    require_no_lost_block(pool, engine)


def test_the_first_of_the_queue_is_not_overtaken():
    pool, engine = make_block_engine(4, 8)
    engine.submit(make_request("long", range(1, 30), 300, 1))
    engine.step()
    engine.submit(make_request("longer", [2] * 400, 100, 2))
    engine.submit(make_request("short", [3] * 10, 1, 3))
    events = run_all(engine)
    ends = [event.request for event in events if isinstance(event, EndEvent)]
    assert ends.index("short") > ends.index("long")
    require_no_lost_block(pool, engine)


def test_a_failed_run_frees_and_zeroes_the_blocks_of_its_request_alone():
    pool, engine = make_block_engine(2, 8)
    engine.submit(make_request("good", range(1, 100), 20, 1))
    engine.submit(make_request("bad", [*range(1, 80), 9], 20, 2))
    append = pool._append

    def fail_at_nine(slot, tokens, before):
        if [*before, *tokens][79:80] == [9]:
            raise BackendError("device fake:0 failed")
        return append(slot, tokens, before)

    pool._append = fail_at_nine
    events = run_all(engine)
    assert end_of(events, "bad").reason == "error"
    assert tokens_of(events, "good") == generate_alone(make_request("good", range(1, 100), 20, 1), CONTEXT)[0]
    require_no_lost_block(pool, engine)


def test_a_request_without_a_limit_may_need_blocks_for_its_context():
    pool, engine = make_block_engine(2, 8)
    engine.submit(make_request("first", [3] * (64 * 7 - 2), 1))
    engine.submit(make_endless_request("endless", [9] * 65, -1))
    events = run_all(engine)
    assert end_of(events, "endless").timing.new_tokens == CONTEXT - 65
    require_no_lost_block(pool, engine)


def test_a_request_without_a_limit_reserves_its_context():
    pool, engine = make_block_engine(4, 8, whole=True)
    for i in range(3):
        engine.submit(make_endless_request(f"r{i}", [i + 1] * 20, -1, i))
    run_all(engine)
    assert engine.status.sums.preemptions == 0
    require_no_lost_block(pool, engine)


@pytest.mark.parametrize("saved_seconds", [0.0, 1.0])
def test_the_only_decoding_request_gives_its_blocks_to_an_older_one_that_reads(saved_seconds):
    pool, engine = make_block_engine(2, 8)
    pool.saved_seconds = saved_seconds
    requests = [
        replace(make_endless_request("first", [2] * 5, 100), slot=0),
        replace(make_endless_request("older", [1 + i % 7 for i in range(383)], 1), slot=0),  # waits for slot 0
        make_endless_request("younger", [5] * 20, 200),
    ]
    for one in requests:
        engine.submit(one)
    events = run_all(engine)
    assert engine.status.sums.preemptions == 1
    for one in requests:
        assert tokens_of(events, one.id) == generate_alone(one, CONTEXT)[0]
    require_no_lost_block(pool, engine)


def test_a_request_that_is_cancelled_while_it_waits_for_blocks_again_reports_its_tokens():
    _, engine = make_block_engine(2, 8)
    engine.submit(make_endless_request("older", [1] * 100, 400, 1))
    engine.submit(make_endless_request("younger", [5] * 100, 400, 2))
    events = []
    while not engine.status.sums.preemptions:
        events += engine.step()
    (end,) = engine.cancel("younger")
    assert end.timing.new_tokens == len(tokens_of(events, "younger")) > 0
    assert end.timing.decode_seconds > 0


def test_no_cell_of_a_failed_request_is_left_in_a_prompt_block():
    """Numbers that are not finite would spread from a cell that no token reads yet."""
    pool, engine = make_block_engine(1, 8)
    engine.submit(make_endless_request("bad", [*range(1, 32), *range(1, 32), *range(1, 11)], 20))
    append = pool._append

    def fail_after_some_tokens(slot, tokens, before):
        logits = append(slot, tokens, before)
        if len(before) == 75:
            raise BackendError("device fake:0 failed")
        return logits

    pool._append = fail_after_some_tokens
    assert end_of(run_all(engine), "bad").reason == "error"
    assert not [cell for block in pool.cells for cell in block if cell != -1]
    require_no_lost_block(pool, engine)


def test_blocks_are_evicted_in_the_order_of_their_last_use():
    blocks = BlockAllocator(6)
    tree = PrefixTree(blocks)
    first, second = [blocks.allocate(), blocks.allocate()], [blocks.allocate()]
    tree.add_prompt([1] * 100, first)
    tree.add_prompt([2] * 30, second)
    for block in (*first, *second):
        blocks.release(block)
    assert tree.find_prefix((1,) * 70) == (first, 70)
    assert (tree.count_evictable_blocks(), blocks.free_count) == (3, 2)
    evicted = []
    while tree.evict_block():
        evicted.append([*first, *second].index(blocks._free[-1]))
    assert evicted == [2, 1, 0]


def test_models_and_pools_that_do_not_fit_are_refused(tmp_path):
    session = Session(open_model(path_of("llama")))
    with pytest.raises(ModelError, match="pool_tokens is 100, less than the context of 128; use at least 128"):
        BlockSlotPool(session, 2, pool_tokens=100, context=128, batch=64)
    recurrent = Session(open_model(write_model("mamba-dense", tmp_path)))
    with pytest.raises(ModelError, match="mamba has no KV caches to share; start the server without --pool-tokens"):
        BlockSlotPool(recurrent, 2, pool_tokens=256, context=128, batch=64)
    with pytest.raises(ModelError, match=r"a pool of .* tokens needs .*, but the devices have"):
        BlockSlotPool(session, 2, pool_tokens=1 << 30, context=128, batch=64)


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("llama", ("--pool-tokens", "100"), "--pool-tokens is 100, less than the context of 128; use at least 128"),
        ("llama", ("--admit", "whole"), "--admit whole reserves tokens of a pool; give --pool-tokens"),
    ],
)
def test_a_dry_run_refuses_what_the_server_refuses(model, flags, message, capsys):
    assert main(["serve", str(path_of(model)), "-c", "128", "--dry-run", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_a_log_of_a_server_over_blocks_is_repeated_bit_by_bit(tmp_path, capsys):
    path, options = tmp_path / "log", {"context": 256, "batch": 64, "devices": "cpu:0", "threads": 1}
    events = []
    with hocket.Model(path_of("llama"), **options) as model:
        log = RequestLog(open_log(path), pytest.fail, {**options, "model": str(path_of("llama"))})
        service = EngineThread(model, EngineOptions(3, 8, pool_tokens=320), name="m", version="0", log=log)
        try:
            for i in range(5):
                params = GenerationParams(60, Sampling(temperature=0.8), i, frozenset())
                service.submit(GenerationRequest(f"r{i}", tuple(range(3, 90 + i)), params), events.append)
            wait_until(lambda: sum(isinstance(event, EndEvent) for event in events) == 5)
            assert service.status.sums.preemptions > 0
        finally:
            service.close(0)
    assert main(["replay", str(path)]) == 0
    assert "are equal to the log, bit by bit" in capsys.readouterr().out


def test_a_request_that_was_preempted_reports_the_cached_tokens_of_its_first_start():
    """Its own prompt is in the tree when it starts again, and had been counted."""
    pool, engine = make_block_engine(2, 8)
    for i, name in enumerate("ab"):
        engine.submit(make_endless_request(name, np.random.default_rng(i).integers(1, 32, 100).tolist(), 300, i))
    events = run_all(engine)
    assert engine.status.sums.preemptions > 0
    assert [end_of(events, name).timing.cached_tokens for name in "ab"] == [0, 0]
    require_no_lost_block(pool, engine)


def test_as_many_recurrent_states_as_cells_are_no_cache():
    """128 slots share two blocks of 64 cells, so states and caches have 128 rows."""
    root = Session(open_model(path_of("qwen35")), context=64, batch=16)
    pool = BlockSlotPool(root, 128, pool_tokens=64, context=64, batch=16)
    assert pool.all_slots_session.blocks * 64 == pool.slots
    assert pool.has_recurrent_states
    pool.set_table(3, [1])
    rows = []
    for each in (pool, SlotPool(root, 4, context=64, batch=16)):
        each.read_prompt(3, [5, 6, 7], [])
        each.clear_recurrent_states(3)
        each.read_prompt(3, [5, 6, 7], [])
        rows.append(each.decode({3: 8}, {3: [5, 6, 7]})[3])
    assert np.array_equal(*rows)


def test_a_slot_of_a_pool_is_erased_and_has_no_tokens_of_its_own():
    pool, engine = make_block_engine(2, 8)
    cache = BlockPrefixCache(pool)
    engine.submit(make_request("a", range(1, 30), 3))
    run_all(engine)
    assert SlotFiles(pool, cache).erase(0) == 0
    require_no_lost_block(pool, engine)
