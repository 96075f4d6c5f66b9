"""Threads that share the objects of a process: code, backends, executors, sessions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.thread_safe_cache import thread_safe_cache
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models.inputs.weights import ModelWeights
from hocket.scheduler.runtime.device_locks import DeviceLock

from ...given import threads
from ...given.models.goldens import FIXTURES, open_model
from ...given.waits import wait_until

STARTS = 8


def at_once(work: Callable[[int], object]) -> list[object]:
    """Return the results of `work` in threads that begin together."""
    start = threading.Barrier(STARTS)

    def go(number: int) -> object:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(STARTS) as pool:
        return list(pool.map(go, range(STARTS)))


@pytest.mark.long
def test_threads_that_plan_load_and_run_crash_nothing_and_get_right_numbers():
    """Run ``python tests/given/threads.py`` for the long version."""
    command = [sys.executable, threads.__file__, "--threads", "4", "--seconds", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr


def test_a_shared_object_is_built_once_however_many_threads_ask():
    built = []

    @thread_safe_cache
    def slowly(key: int) -> object:
        built.append(key)
        time.sleep(0.02)
        return object()

    assert len(set(map(id, at_once(lambda _: slowly(3))))) == 1
    assert built == [3]
    assert slowly(4) is not slowly(3)


def test_what_fails_once_is_tried_again():
    tries = []

    @thread_safe_cache
    def twice() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("not yet")
        return len(tries)

    with pytest.raises(OSError, match="not yet"):
        twice()
    assert twice() == twice() == 2


def test_a_cleared_cache_keeps_no_key():
    class Key:
        pass

    @thread_safe_cache
    def name(key: Key) -> str:
        return type(key).__name__

    key = Key()
    known = weakref.ref(key)
    assert name(key) == "Key"
    del key
    assert known() is not None
    name.cache_clear()
    assert known() is None


def test_threads_that_share_a_store_see_each_run_whole():
    s = hocket.state("s", (500,))
    graph = hocket.Graph({"before": ops.scale(s, scale=1.0)}, {s: ops.scale(s, scale=1.0, bias=1.0)})
    run = hocket.load(hocket.plan(graph, "numpy:0"), {})
    other = hocket.Executor(hocket.plan(graph, "numpy:0", like=run.plan), run.store)
    seen = [x for part in at_once(lambda n: [(run, other)[n % 2].run({})["before"] for _ in range(20)]) for x in part]
    assert all((x == x[0]).all() for x in seen)
    assert sorted(x[0] for x in seen) == list(range(20 * STARTS))


def test_threads_that_load_one_plan_get_memory_of_their_own():
    w = hocket.weight("w", (8, 8))
    plan = hocket.plan(hocket.Graph({"y": ops.neg(w)}), "cpu:0")
    runs = at_once(lambda n: hocket.load(plan, {"w": np.full((8, 8), n)}))
    assert [run.run({})["y"][0, 0] for run in runs] == [-n for n in range(STARTS)]


def test_threads_that_share_a_session_append_whole_calls():
    session = Session(open_model(FIXTURES / "llama/model.gguf"), on=DeviceGroup(devices=("numpy:0",)), context=64)
    at_once(lambda n: [session.evaluate([[n, n]]) for _ in range(2)])
    assert session.lengths == [4 * STARTS]


def test_threads_that_build_graphs_of_one_model_share_its_leaves():
    model = open_model(FIXTURES / "llama/model.gguf")
    name, tensor = next(iter(model.gguf.tensors.items()))
    for weights in [ModelWeights(model.gguf) for _ in range(5)]:
        assert len({id(leaf.node) for leaf in at_once(lambda _, w=weights: w(name, tensor.shape))}) == 1


def test_an_interrupt_ends_waiting_for_a_turn_and_leaves_it_to_others():
    class Backend:
        pass

    first, second = Backend(), Backend()
    busy, free = threading.Event(), threading.Event()

    def hold() -> None:
        with DeviceLock([second]):
            busy.set()
            free.wait()

    def interrupt(waiting: int) -> None:
        wait_until(lambda: sys._current_frames()[waiting].f_code is DeviceLock.__enter__.__code__)
        os.kill(os.getpid(), signal.SIGINT)

    holder = threading.Thread(target=hold)
    holder.start()
    busy.wait()
    threading.Thread(target=interrupt, args=(threading.get_ident(),)).start()
    with pytest.raises(KeyboardInterrupt), DeviceLock([first, second]):
        pass
    with ThreadPoolExecutor(1) as pool:  # no lease of an awaited result remains
        assert pool.submit(lambda: DeviceLock([first]).__enter__()).exception() is None
    free.set()
    holder.join()
