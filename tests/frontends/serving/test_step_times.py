"""The sizes of prompt chunks, which follow from the measured times of steps and from plans."""

from __future__ import annotations

import pytest

from hocket.frontends.serving.step_times import StepTimes

from ...given.serving.fake_pool import FakePool


def make_step_times(monkeypatch):
    """Return the times of steps in which a chunk of n tokens takes 1 + n / 32 seconds by its plan."""
    monkeypatch.setattr(FakePool, "predict_prompt_seconds", lambda pool, size: 1.0 + size / 32)
    pool = FakePool(2, context=256, batch=128)
    return StepTimes(pool, max_gap_seconds=20.0, idle_chunk_seconds=1.0, mixes_steps=True)


@pytest.mark.parametrize(("measured", "decode", "chosen"), [((16, 3.0), 6.0, 64), ((128, 10.0), 3.0, 16)])
def test_the_size_of_a_chunk_follows_the_plans_from_one_measured_size(monkeypatch, measured, decode, chosen):
    """A larger chunk had been predicted in proportion to its tokens, and a smaller one with the time of the larger."""
    times = make_step_times(monkeypatch)
    times.record_chunk(*measured)
    times.record_decode(2, decode)
    assert times.choose_power_of_two_chunk_size(2) == chosen


def test_the_size_of_a_chunk_follows_the_seconds_of_mixed_steps(monkeypatch):
    """The first chunk is often slow. If all later ones are read in mixed steps, they had stayed small for ever."""
    times = make_step_times(monkeypatch)
    times.record_chunk(16, 9.0)
    times.record_decode(2, 3.0)
    assert times.choose_power_of_two_chunk_size(2) == 16
    for _ in range(20):
        times.record_mixed(16, 2, 4.5)
    assert times.choose_power_of_two_chunk_size(2) == 32


def test_one_slow_chunk_does_not_keep_later_chunks_small(monkeypatch):
    """The time of a size that was read once, with cold weights, had stayed for ever."""
    times = make_step_times(monkeypatch)
    times.record_decode(2, 6.0)
    times.record_chunk(128, 100.0)
    for _ in range(40):
        size = times.choose_power_of_two_chunk_size(2)
        times.record_chunk(size, 1.0 + size / 32)
    assert size == 128
