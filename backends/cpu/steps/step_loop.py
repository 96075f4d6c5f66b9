"""The loop of a program: every thread runs the steps of its own table, and does its part of each step."""

from __future__ import annotations

from ..compilation.compiler import kernel, subroutine
from ..compilation.kernel_args import declare_args
from ..simd.atomics import (
    call_kernel,
    fetch_add,
    load_shared,
    read_constant_rate_counter,
    read_monotonic_clock,
    sleep_50_microseconds,
    store_shared,
    yield_core_to_scheduler,
)
from ..simd.vectors import load_long, store_long

STEP_WORDS = 4
"""Words of a step: kernel address (0: no work for this thread), argument address, flags, instruction number."""
BARRIER_FLAG, WHOLE_FLAG = 1, 2
"""Flags of a step: all threads wait for each other before it; the arguments are the whole work of this thread."""
SPINS_BEFORE_YIELD = 2000
"""Spins before a thread yields its core: longer than a barrier takes, shorter than a time slice."""
YIELDS_BEFORE_SLEEP = 1000
"""Yields before a thread sleeps between two spins.

The awaited thread may need a core. The system moves threads to idle cores, not to the core of a yielding thread.
"""

ARRIVED_OFFSET, FAILED_OFFSET, STEP_FAILED_OFFSET = 0, 64, 72
"""Offsets into the shared block: the arrivals in all; the status of a failed thread; the failed step."""
SHARED_BYTES = 128


@subroutine
def back_off(spin_count):
    """Wait a little in a spin loop, longer after more checks (`spin_count`): spin, then yield the core, then sleep."""
    if spin_count > SPINS_BEFORE_YIELD + YIELDS_BEFORE_SLEEP:
        sleep_50_microseconds()
    elif spin_count > SPINS_BEFORE_YIELD:
        yield_core_to_scheduler()


@subroutine
def wait_at_barrier(shared, threads):
    """Wait until all threads have arrived at the barrier. Return the status of a failed thread, or 0."""
    arrived = fetch_add(shared + ARRIVED_OFFSET, 1) + 1
    target = (arrived + threads - 1) // threads * threads
    looks = 0
    while load_shared(shared + ARRIVED_OFFSET) < target:
        if load_shared(shared + FAILED_OFFSET) != 0:
            return load_shared(shared + FAILED_OFFSET)
        looks += 1
        back_off(looks)
    return 0


ARGS = declare_args("table steps shared times")
"""The tables of steps, the steps of a table, the shared block, and the target of times."""


@subroutine
def run_steps_of_thread(a, thread, threads, times):
    """Run every step of the step table of this thread, with a barrier before the steps that need one.

    Return 0, or the status of the step that stopped the run. Between two barriers, one thread may be ahead of another.
    `steps.RUN_STATUS_REGION` explains why that does no harm if a thread stops.

    If `times` is not 0, thread 0 writes there the cycle counter at the start of each step and after the last step.
    Behind them it writes the clock in nanoseconds at the start and at the end of the run.
    """
    count, shared = ARGS.steps(a), ARGS.shared(a)
    if times != 0 and thread == 0:
        store_long(times + 8 * (count + 1), read_monotonic_clock())
    steps = ARGS.table(a) + thread * count * 8 * STEP_WORDS
    for i in range(count):
        step = steps + i * 8 * STEP_WORDS
        how = load_long(step + 16)
        if times != 0 and thread == 0:
            store_long(times + 8 * i, read_constant_rate_counter())
        if threads > 1 and how & BARRIER_FLAG:
            status = wait_at_barrier(shared, threads)
            if status != 0:
                return status
        status = 0
        if load_long(step) != 0:
            whole = how & WHOLE_FLAG != 0
            status = call_kernel(load_long(step), load_long(step + 8), 0 if whole else thread, 1 if whole else threads)
        if status != 0:
            store_long(shared + STEP_FAILED_OFFSET, load_long(step + 24))
            store_shared(shared + FAILED_OFFSET, status)
            return status
    status = wait_at_barrier(shared, threads) if threads > 1 else 0
    if times != 0 and thread == 0:
        store_long(times + 8 * count, read_constant_rate_counter())
        store_long(times + 8 * (count + 2), read_monotonic_clock())
    return status


@kernel
def run_step_table(a, thread, threads):
    """Run all steps of the step table of this thread. Return 0, or the status of the step that stopped the run."""
    return run_steps_of_thread(a, thread, threads, 0)


@kernel
def run_step_table_timed(a, thread, threads):
    """Run all steps of the step table of this thread and write their times, as `run_steps_of_thread` explains.

    Waiting time counts for the step that waits. The result is as in `run_step_table`.
    """
    return run_steps_of_thread(a, thread, threads, ARGS.times(a))
