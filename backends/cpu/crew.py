"""The thread pool of one device: its threads start once and take part in every run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from .compiler import ALIGNMENT, REPLAY, Kernel
from .kernels.crew import ASLEEP, LINE, SOME_SLEEP, STATES, crew_bytes, follow, go_on, lead

I64 = npt.NDArray[np.int64]


def _serve(queue: SimpleQueue[bool], block: I64, number: int, threads: int) -> None:
    """Run a worker thread: after each wake-up, follow the calling thread until no more work comes."""
    at, followed = block.ctypes.data, REPLAY(follow.address)
    while queue.get():
        followed(at, number, threads)


def _dismiss(queues: Sequence[SimpleQueue[bool]]) -> None:
    for queue in queues:
        queue.put(False)


class Crew:
    """The worker threads of one CPU device, in addition to the calling thread.

    They start with the first work that needs them and end with the pool. Calls from several threads are serialised.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._queues: list[SimpleQueue[bool]] = []
        self._turn = threading.Lock()

    @property
    def kernels(self) -> Sequence[Kernel]:
        """The kernels that begin and end the runs of the pool."""
        return (lead, go_on, follow) if self.threads > 1 else ()

    def _start(self) -> None:
        raw = np.zeros(crew_bytes(self.threads) // 8 + ALIGNMENT // 8, np.int64)
        block = raw[-raw.ctypes.data % ALIGNMENT // 8 :]
        self._states, self._at = block[STATES // 8 :: LINE // 8], block.ctypes.data
        self._states[: self.threads] = ASLEEP
        self._lead, self._go_on = REPLAY(lead.address), REPLAY(go_on.address)
        self._queues = [SimpleQueue() for _ in range(self.threads - 1)]
        for i, queue in enumerate(self._queues, 1):
            given = (queue, block, i, self.threads)
            threading.Thread(target=_serve, args=given, name=f"hocket.{i}", daemon=True).start()
        weakref.finalize(self, _dismiss, self._queues)

    def run(self, order: int) -> int:
        """Run the work at `order` (`kernels.crew.ORDER`) on all threads, and return the status of the first."""
        with self._turn:
            if not self._queues:
                self._start()
            status: int = self._lead(order, self._at, self.threads)
            if status == SOME_SLEEP:
                for queue, state in zip(self._queues, self._states[1:].tolist(), strict=False):
                    if state >= ASLEEP:
                        queue.put(True)
                status = self._go_on(order, self._at, self.threads)
        return status
