"""Work items that threads draw from a queue: each is done once per run, whichever thread is late."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hocket.backends.cpu.compilation.compiler import KERNEL_FUNCTION, Kernel, kernel
from hocket.backends.cpu.compilation.kernel_args import declare_args
from hocket.backends.cpu.simd.atomics import fetch_add
from hocket.backends.cpu.steps.work_queue import QUEUE_BYTES, reset_queue_after_last_ticket, take_work_item

ARGS = declare_args("tickets pieces done")


@kernel
def count_work_items(a, thread, threads):
    """Add 1 to the word of each piece that this thread does."""
    tickets = ARGS.tickets(a)
    item, mine = 0, take_work_item(tickets, 0)
    for _ in range(ARGS.pieces(a)):
        if item == mine:
            fetch_add(ARGS.done(a) + 8 * item, 1)
            mine = take_work_item(tickets, item + 1)
        item += 1
    reset_queue_after_last_ticket(tickets, mine, item, threads)
    return 0


def run(of: Kernel, args: np.ndarray, delays: list[float]) -> None:
    """Run one thread for each delay; a thread starts later by its delay."""
    call = KERNEL_FUNCTION(of.address)

    def come(thread: int, delay: float) -> None:
        time.sleep(delay)
        call(args.ctypes.data, thread, len(delays))

    threads = [threading.Thread(target=come, args=each) for each in enumerate(delays)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


@pytest.mark.parametrize("delays", [[0.0, 0.01], [0.01, 0.0], [0.0, 0.01, 0.0], [0.0] * 4], ids=str)
@pytest.mark.parametrize("item_count", [0, 1, 3, 5000])
def test_every_work_item_is_done_once_in_each_run_whichever_thread_is_late(item_count: int, delays: list[float]):
    tickets, done = np.zeros(QUEUE_BYTES // 8, np.int64), np.zeros(max(1, item_count), np.int64)
    args = np.array(ARGS(tickets=tickets.ctypes.data, pieces=item_count, done=done.ctypes.data), np.int64)
    for runs in range(1, 5):
        run(count_work_items, args, delays)
        assert (done[:item_count] == runs).all()
        assert not tickets.any()


def test_one_thread_without_tickets_does_every_work_item():
    done = np.zeros(7, np.int64)
    args = np.array(ARGS(tickets=0, pieces=7, done=done.ctypes.data), np.int64)
    run(count_work_items, args, [0.0])
    assert (done == 1).all()
