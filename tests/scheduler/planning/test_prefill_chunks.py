"""The prefill chunks of a prompt that are pipelined through devices."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from hocket.scheduler.pipelining.stage_times import StageTime
from hocket.scheduler.planning import prefill_chunks
from hocket.scheduler.planning.prefill_chunks import (
    ChunkTimeModel,
    choose_prefill_chunks,
    compute_pipelined_prefill_seconds,
    round_up_to_chunk_size,
)

SIZES = (64, 96, 128, 192, 256, 384, 512)


def fake_time_model(monkeypatch, *, run=0.0, token=1.0, seen=0.0, devices=2, message_seconds=0.0, last=1.0):
    """Install devices with these seconds per run, per token, and per cell that a token sees.

    `last` is the factor of the last device.
    """

    def stage_times(plan):
        each = run + plan.tokens * (token + seen * plan.cells)
        return [StageTime(message_seconds, each * (last if d == devices - 1 else 1)) for d in range(devices)]

    monkeypatch.setattr(prefill_chunks, "estimate_stage_times", stage_times)
    return ChunkTimeModel(lambda tokens, cells: SimpleNamespace(tokens=tokens, cells=cells), (64, 512), (256, 2048))


def test_between_plans_time_grows_evenly_with_tokens_and_with_cells(monkeypatch):
    of = fake_time_model(monkeypatch, run=3.0, seen=0.01, message_seconds=2.0, last=3.0)
    for tokens, end in product((64, 100, 512, 600), (600, 1000, 4096)):
        each = 3 + tokens * (1 + 0.01 * (end - tokens / 2) / prefill_chunks.CALIBRATED_VISIBLE_SHARE)
        assert [stage.compute_seconds for stage in of.predict_stage_times(tokens, end)] == pytest.approx(
            [each, 3 * each]
        )
        assert [stage.message_seconds for stage in of.predict_stage_times(tokens, end)] == pytest.approx([2, 2])
        assert of.predict_slowest_stage_seconds(tokens, end) == pytest.approx(3 * each)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_equal_parts_take_the_work_of_one_device_and_one_part_more_on_each_other(monkeypatch, devices):
    of = fake_time_model(monkeypatch, run=8.0, devices=devices)
    assert compute_pipelined_prefill_seconds([128] * 16, 0, SIZES, of) == pytest.approx((16 + devices - 1) * 136)


def test_messages_are_waited_for_once_by_each_device(monkeypatch):
    of = fake_time_model(monkeypatch, devices=3, message_seconds=5.0)
    assert compute_pipelined_prefill_seconds([64, 64], 0, SIZES, of) == pytest.approx(4 * 64 + 3 * 5)


def test_parts_take_equally_long_where_later_ones_see_more(monkeypatch):
    of = fake_time_model(monkeypatch, run=30.0, seen=0.003)
    best = choose_prefill_chunks(2048, 0, SIZES, of)
    assert sum(best.chunk_sizes) == 2048
    assert best.chunk_sizes[0] > best.chunk_sizes[-2]
    assert list(best.chunk_sizes[:-1]) == sorted(best.chunk_sizes[:-1], reverse=True)
    assert best.seconds == pytest.approx(compute_pipelined_prefill_seconds(best.chunk_sizes, 0, SIZES, of))
    assert best.seconds < min(
        compute_pipelined_prefill_seconds([size] * (2048 // size), 0, SIZES, of) for size in (64, 128, 256, 512)
    )


@pytest.mark.parametrize("run", [0.0, 10.0, 100.0, 1000.0])
def test_no_equal_parts_are_much_faster(monkeypatch, run):
    of = fake_time_model(monkeypatch, run=run)
    equal = [compute_pipelined_prefill_seconds([size] * (2048 // size), 0, SIZES, of) for size in (64, 128, 256, 512)]
    assert choose_prefill_chunks(2048, 0, SIZES, of).seconds <= prefill_chunks.FEWER_CHUNKS_TOLERANCE * min(equal)


def test_what_each_run_takes_makes_parts_few(monkeypatch):
    counts = [
        len(choose_prefill_chunks(2048, 0, SIZES, fake_time_model(monkeypatch, run=run)).chunk_sizes)
        for run in (0.0, 20.0, 3000.0)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > counts[2]


def test_a_prompt_behind_many_tokens_is_split_as_those_need(monkeypatch):
    of = fake_time_model(monkeypatch, run=30.0, seen=0.01)
    short_past, long_past = (choose_prefill_chunks(1024, behind, SIZES, of) for behind in (0, 8192))
    assert long_past.seconds > short_past.seconds
    assert long_past.chunk_sizes[0] <= short_past.chunk_sizes[0]


def test_the_last_part_may_be_short_and_takes_as_long_as_a_larger_one(monkeypatch):
    of = fake_time_model(monkeypatch)
    best = choose_prefill_chunks(1000, 0, SIZES, of)
    assert sum(best.chunk_sizes) == 1000
    assert round_up_to_chunk_size(best.chunk_sizes[-1], SIZES) in SIZES
    assert compute_pipelined_prefill_seconds([64, 1], 0, SIZES, of) == pytest.approx(
        compute_pipelined_prefill_seconds([64, 64], 0, SIZES, of)
    )
