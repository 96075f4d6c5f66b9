"""The thread pool of one CPU device: worker threads start once and take part in every run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from ..compilation.compiler import ALIGNMENT, KERNEL_FUNCTION, Kernel
from ..steps.thread_sync import (
    ASLEEP_FLAG,
    CACHE_LINE_BYTES,
    STATES_OFFSET,
    THREADS_SLEEPING,
    compute_shared_block_bytes,
    run_thread_zero_after_waking,
    run_unless_threads_sleep,
    run_worker_thread_until_sleep,
)

I64 = npt.NDArray[np.int64]


def _run_worker_loop(queue: SimpleQueue[bool], block: I64, thread: int, threads: int) -> None:
    """Run a worker thread: after each wake-up, do work of the calling thread until no more work comes."""
    at, run_worker = block.ctypes.data, KERNEL_FUNCTION(run_worker_thread_until_sleep.address)
    while queue.get():
        run_worker(at, thread, threads)


def _stop_workers(queues: Sequence[SimpleQueue[bool]]) -> None:
    for queue in queues:
        queue.put(False)


class ThreadPool:
    """The worker threads of one CPU device, in addition to the calling thread.

    Workers start with the first work and end with the pool. A lock serialises calls from several threads.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._queues: list[SimpleQueue[bool]] = []
        self._call_lock = threading.Lock()

    @property
    def start_and_end_kernels(self) -> Sequence[Kernel]:
        """The kernels that start and end runs of the pool. The sequence is empty with one thread."""
        return (
            (run_unless_threads_sleep, run_thread_zero_after_waking, run_worker_thread_until_sleep)
            if self.threads > 1
            else ()
        )

    def _start_workers(self) -> None:
        raw = np.zeros(compute_shared_block_bytes(self.threads) // 8 + ALIGNMENT // 8, np.int64)
        block = raw[-raw.ctypes.data % ALIGNMENT // 8 :]
        self._states, self._block_address = block[STATES_OFFSET // 8 :: CACHE_LINE_BYTES // 8], block.ctypes.data
        self._states[: self.threads] = ASLEEP_FLAG
        self._start_run, self._continue_run = (
            KERNEL_FUNCTION(run_unless_threads_sleep.address),
            KERNEL_FUNCTION(run_thread_zero_after_waking.address),
        )
        self._queues = [SimpleQueue() for _ in range(self.threads - 1)]
        for i, queue in enumerate(self._queues, 1):
            worker_args = (queue, block, i, self.threads)
            threading.Thread(target=_run_worker_loop, args=worker_args, name=f"hocket.{i}", daemon=True).start()
        weakref.finalize(self, _stop_workers, self._queues)

    def run(self, run_args_address: int) -> int:
        """Run a loop on all threads and return its status on the calling thread.

        `run_args_address` is the address of the argument words (`steps.thread_sync.RUN_ARGS`).
        """
        with self._call_lock:
            if not self._queues:
                self._start_workers()
            status: int = self._start_run(run_args_address, self._block_address, self.threads)
            if status == THREADS_SLEEPING:
                for queue, state in zip(self._queues, self._states[1:].tolist(), strict=False):
                    if state >= ASLEEP_FLAG:
                        queue.put(True)
                status = self._continue_run(run_args_address, self._block_address, self.threads)
        return status
