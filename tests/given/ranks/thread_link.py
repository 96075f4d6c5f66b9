"""A stand-in for MPI: ranks are threads of this process."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hocket.distributed import World
from hocket.distributed import world as ranks_world
from hocket.scheduler.runtime import bound_plan

from ..waits import WAIT_SECONDS


class ThreadLink:
    """One thread's end; `messages` is shared by all of them."""

    def __init__(self, rank, size, messages, memory, *, hosts=1):
        self.rank, self.size, self.host = rank, size, f"machine{rank % hosts}"
        self._messages, self._memory = messages, memory

    def send(self, to, channel, packet):
        self._messages[self.rank, to, channel].append(packet.copy())

    def is_sent(self, posted):
        return True

    def try_receive(self, source, channel):
        waiting = self._messages[source, self.rank, channel]
        return waiting.popleft() if waiting else None

    def allocate_shared_words(self, words):
        with self._memory["lock"]:
            return self._memory.setdefault(words, np.zeros(words, np.int64))

    def close(self):
        pass


def in_threads(size, run, *, hosts=1):
    """Return the results of ``run(world)`` on each of `size` ranks, once all have left, or raise the first error."""
    messages, memory = defaultdict(deque), {"lock": threading.Lock()}

    def one(rank):
        world = World(ThreadLink(rank, size, messages, memory, hosts=hosts))
        try:
            result = run(world)
            world.wait_for_all_ranks_and_close()
            return result
        except BaseException as why:
            world.announce_failure(str(why))
            raise

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(size) as threads:
        patch.setattr(ranks_world, "SILENCE_TIMEOUT_SECONDS", WAIT_SECONDS)
        patch.setattr(bound_plan, "MAX_RANK_WAIT_SECONDS", WAIT_SECONDS)
        return [one.result() for one in [threads.submit(one, rank) for rank in range(size)]]
