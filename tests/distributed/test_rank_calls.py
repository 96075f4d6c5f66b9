"""Calls of rank 0 on all ranks: the same calls in the same order, one end, and no rank that goes on alone."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import pytest

from hocket.distributed import SINGLE_PROCESS, RanksError
from hocket.distributed.rank_calls import RankCalls, decode_call, encode_call, on_all_ranks
from hocket.graph.errors import BackendError, HocketError, PlanError

from ..given.ranks.thread_link import in_threads

STATES = {"a": np.arange(6, dtype=np.float16).reshape(2, 3), "empty": np.zeros((0, 4), np.float32)}


class Recorder:
    """An object of each rank that records its calls, in which all ranks meet."""

    def __init__(self, world, fails_on=()):
        self.rank_calls = RankCalls(world)
        self.world, self.fails_on, self.calls = world, fails_on, []

    @on_all_ranks
    def add(self, *args, **kwargs):
        """Record a call, in which all ranks meet."""
        self.calls.append(("add", args, kwargs))
        return self.world.all_gather_bytes(bytes([self.world.rank]))

    @on_all_ranks
    def add_twice(self, value):
        """Make two calls, which are not sent again."""
        self.add(value)
        self.add(value)

    @on_all_ranks
    def fail(self, kind):
        """Raise an error on the ranks that have to."""
        self.calls.append(("fail", kind))
        if self.world.rank in self.fails_on:
            raise kind_of(kind)("it went wrong")


def kind_of(name):
    return {"plan": PlanError, "backend": BackendError, "mistake": ZeroDivisionError}[name]


def run(lead, size=3, fails_on=()):
    """Return the recorder of each rank after `lead` has run on rank 0."""

    def one(world):
        recorder = Recorder(world, fails_on)
        if world.rank:
            recorder.rank_calls.follow_rank_0([recorder])
        else:
            lead(recorder)
            recorder.rank_calls.end()
        return recorder

    return in_threads(size, one)


def test_all_ranks_make_the_calls_of_rank_0():
    def lead(recorder):
        assert recorder.add(1, [2, None], name="é") == [b"\0", b"\1", b"\2"]
        recorder.add_twice({})
        threads = [threading.Thread(target=recorder.add, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    recorders = run(lead)
    assert len(recorders[0].calls) == 8
    assert all(recorder.calls == recorders[0].calls for recorder in recorders)


class LabelledRecorder(Recorder):
    """A recorder of the same methods with names of their own, which overrides one of them on rank 0."""

    rank_label = "other: "

    def add(self, *args, **kwargs):
        """Record a further argument."""
        return super().add("more", *args, **kwargs)


def test_two_objects_with_the_same_methods_follow_their_own_calls():
    """The other ranks make the inner call of a method that was overridden, and not the override."""

    def one(world):
        first = Recorder(world)
        second = LabelledRecorder(world)
        second.rank_calls = first.rank_calls
        if world.rank:
            first.rank_calls.follow_rank_0([first, second])
        else:
            first.add(1)
            second.add(2)
            first.rank_calls.end()
        return [recorder.calls for recorder in (first, second)]

    ranks = in_threads(2, one)
    assert ranks[0] == ranks[1] == [[("add", (1,), {})], [("add", ("more", 2), {})]]


def test_arrays_arrive_bit_by_bit():
    def lead(recorder):
        recorder.add("before", STATES, {"a": [1]}, STATES)

    for recorder in run(lead, 2):
        ((_, (_, first, plain, second), _),) = recorder.calls
        assert plain == {"a": [1]}
        for found in (first, second):
            assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in found.items()} == {
                n: (a.dtype, a.shape, a.tobytes()) for n, a in STATES.items()
            }


def test_an_error_of_all_ranks_is_the_error_of_the_call_alone():
    def lead(recorder):
        for _ in range(2):
            with pytest.raises(PlanError, match="it went wrong"):
                recorder.fail("plan")
        recorder.add(1)

    assert all(len(recorder.calls) == 3 for recorder in run(lead, fails_on=(0, 1, 2)))


@pytest.mark.parametrize("fails_on", [(0,), (1,), (0, 2)])
def test_an_error_of_some_ranks_ends_all(fails_on):
    def lead(recorder):
        with suppress(PlanError):
            recorder.fail("plan")
        recorder.add(1)

    with pytest.raises(RanksError, match=r"Recorder.fail had an error there alone|rank . on .*: .*had an error"):
        run(lead, fails_on=fails_on)


@pytest.mark.parametrize("kind", ["backend", "mistake"])
@pytest.mark.parametrize("fails_on", [(0,), (1,)])
def test_a_backend_that_fails_ends_all(kind, fails_on):
    def lead(recorder):
        recorder.fail(kind)
        recorder.add(1)

    with pytest.raises((RanksError, kind_of(kind)), match="it went wrong"):
        run(lead, fails_on=fails_on)


def test_no_call_after_the_end():
    def lead(recorder):
        recorder.rank_calls.end()
        with pytest.raises(HocketError, match="the ranks have ended; start the server again"):
            recorder.add(1)

    assert run(lead)[1].calls == []


def test_one_process_makes_its_calls_at_once():
    recorder = Recorder(SINGLE_PROCESS)
    value = object()  # nothing is encoded
    assert recorder.add(value) == [b"\0"]
    assert recorder.calls == [("add", (value,), {})]
    recorder.rank_calls.end()


@pytest.mark.parametrize("size", [0, 3, 8, 20, -1])
def test_bytes_that_are_no_call_are_refused(size):
    message = encode_call("a", (STATES,), {}, has_failed=False)[:size]
    with pytest.raises(RanksError, match=r"rank 0 sent [0-9]+ bytes that are no"):
        decode_call(np.frombuffer(message, np.uint8), "rank 0")
