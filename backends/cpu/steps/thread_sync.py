"""Start and end of a run for all threads of a device, without the GIL.

1. Thread 0 writes the run to the shared block of the thread pool and publishes it to the other threads.
2. Thread 0 does its own work, then waits for the others.
3. The other threads spin for the next run before they sleep. A token of a small model takes 3 ms; waking a Python
thread takes a twentieth of it.
"""

from __future__ import annotations

from ..compilation.compiler import kernel, subroutine
from ..compilation.kernel_args import declare_args
from ..simd.atomics import call_kernel, fetch_add, load_shared, store_shared, yield_core_to_scheduler
from ..simd.vectors import load_long, store_long
from .step_loop import SPINS_BEFORE_YIELD, back_off

CACHE_LINE_BYTES = 64
"""Bytes of a cache line. Each word that several threads write has its own line."""
LOOP_OFFSET, WORDS_OFFSET, THREADS_OFFSET, DONE_OFFSET, STATES_OFFSET = 0, 8, 16, CACHE_LINE_BYTES, 2 * CACHE_LINE_BYTES
"""Offsets into the shared block: loop, its words, thread count; finished threads; a line with the state of each thread.
"""
WORK_FLAG, ASLEEP_FLAG = 1, 2
"""Flags of a thread state: a run is waiting; the thread sleeps and must be woken."""
IDLE_SPINS = SPINS_BEFORE_YIELD + 4000
"""Spins of a thread before it sleeps, about 2 ms. For most of them it yields its core."""
THREADS_SLEEPING = -1
"""Status of `run_unless_threads_sleep` if threads must be woken. Kernels do not use it."""
RUN_ARGS = declare_args("loop words")
"""Words of a run: the addresses of a loop and of its words."""


def compute_shared_block_bytes(threads: int) -> int:
    """Return the bytes of the shared block of a thread pool with `threads` threads."""
    return STATES_OFFSET + CACHE_LINE_BYTES * threads


@subroutine
def publish_run_and_count_sleepers(run_args, shared_block, threads):
    """Make a run visible to all other threads of the pool, and return how many of them sleep and must be woken.

    `run_args` is the address of `RUN_ARGS`.
    """
    store_long(shared_block + LOOP_OFFSET, RUN_ARGS.loop(run_args))
    store_long(shared_block + WORDS_OFFSET, RUN_ARGS.words(run_args))
    store_long(shared_block + THREADS_OFFSET, threads)
    asleep = 0
    for i in range(1, threads):
        asleep += fetch_add(shared_block + STATES_OFFSET + CACHE_LINE_BYTES * i, WORK_FLAG) // ASLEEP_FLAG
    return asleep


@subroutine
def run_main_thread_and_return_status(run_args, shared_block, threads):
    """Run the work of thread 0, wait for all other threads, and return the status of thread 0.

    `run_args` is the address of `RUN_ARGS`, `shared_block` the address of the memory that the pool's threads share.
    """
    status = call_kernel(RUN_ARGS.loop(run_args), RUN_ARGS.words(run_args), 0, threads)
    looks = 0
    while load_shared(shared_block + DONE_OFFSET) < threads - 1:
        looks += 1
        back_off(looks)
    store_shared(shared_block + DONE_OFFSET, 0)
    return status


@kernel
def run_unless_threads_sleep(run_args, shared_block, threads):
    """Run work on all threads of a pool and return the status of thread 0; only announce the run if threads sleep.

    Without sleeping threads, the function returns at the end of the run. Otherwise it returns `THREADS_SLEEPING` before
    the work of thread 0. Then the caller wakes the threads and calls `run_thread_zero_after_waking`.
    """
    if publish_run_and_count_sleepers(run_args, shared_block, threads) > 0:
        return THREADS_SLEEPING
    return run_main_thread_and_return_status(run_args, shared_block, threads)


@kernel
def run_thread_zero_after_waking(run_args, shared_block, threads):
    """Run the work of thread 0 after the caller of `run_unless_threads_sleep` has woken all threads; return the status
    of thread 0.
    """
    return run_main_thread_and_return_status(run_args, shared_block, threads)


@kernel
def run_worker_thread_until_sleep(shared_block, thread, threads):
    """Run the work of a thread other than 0 for every run, and return when the thread goes to sleep."""
    state, looks = shared_block + STATES_OFFSET + CACHE_LINE_BYTES * thread, 0
    while True:
        if load_shared(state) % ASLEEP_FLAG == WORK_FLAG:
            call_kernel(
                load_long(shared_block + LOOP_OFFSET),
                load_long(shared_block + WORDS_OFFSET),
                thread,
                load_long(shared_block + THREADS_OFFSET),
            )
            store_shared(state, 0)
            fetch_add(shared_block + DONE_OFFSET, 1)
            looks = 0
        elif looks < IDLE_SPINS:
            looks += 1
            if looks > SPINS_BEFORE_YIELD:
                yield_core_to_scheduler()
        elif fetch_add(state, ASLEEP_FLAG) == 0:
            return 0
