"""The loop that runs a program: every thread of a device walks a table of its own, and does its share of each step."""

from __future__ import annotations

from ..compiler import kernel, part
from ..simd.threads import call, fetch_add, give_way, load_shared, now, rest, store_shared, ticks
from ..simd.vectors import load_long, store_long
from ..words import words

STEP = 4
"""Words of a step: address of the kernel, 0 where this thread has nothing to do; address of its arguments; MEETS and
WHOLE; the number of its instruction."""
MEETS, WHOLE = 1, 2
"""All threads meet before a step; the arguments are this thread's, who does all that they say."""
SPINS = 2000
"""How often a thread looks before it gives its core away: longer than a meeting takes, shorter than a time slice."""
YIELDS = 1000
"""How often it gives its core away before it sleeps between two looks: whom it waits for may be waiting for a core, and
the system moves a thread to one that is idle, not to one whose thread keeps giving way."""

ARRIVED, FAILED, STEP_FAILED = 0, 64, 72
"""Bytes into the shared block: how many have arrived in all; the status of a thread that failed, and its step."""
SHARED_BYTES = 128


@part
def bide(looks):
    """What a thread does that has looked so often in vain."""
    if looks > SPINS + YIELDS:
        rest()
    elif looks > SPINS:
        give_way()


@part
def meet(shared, threads):
    """Wait until all threads have come; the status of one that failed, or 0."""
    arrived = fetch_add(shared + ARRIVED, 1) + 1
    target = (arrived + threads - 1) // threads * threads
    looks = 0
    while load_shared(shared + ARRIVED) < target:
        if load_shared(shared + FAILED) != 0:
            return load_shared(shared + FAILED)
        looks += 1
        bide(looks)
    return 0


ARGS = words("table steps shared times")
"""Where the tables of steps are, how many steps each has, the shared block, where to write times."""


@part
def walk(a, thread, threads, times):
    """Every step in turn; thread 0 writes the ticks at which each began, and at which all were done, and then what the
    clock showed at the first and at the last of these, unless `times` is 0.

    A thread may be ahead of another up to the next meeting: `steps.RUN` is why that does no harm when one stops.
    """
    count, shared = ARGS.steps(a), ARGS.shared(a)
    if times != 0 and thread == 0:
        store_long(times + 8 * (count + 1), now())
    steps = ARGS.table(a) + thread * count * 8 * STEP
    for i in range(count):
        step = steps + i * 8 * STEP
        how = load_long(step + 16)
        if times != 0 and thread == 0:
            store_long(times + 8 * i, ticks())
        if threads > 1 and how & MEETS:
            status = meet(shared, threads)
            if status != 0:
                return status
        status = 0
        if load_long(step) != 0:
            whole = how & WHOLE != 0
            status = call(load_long(step), load_long(step + 8), 0 if whole else thread, 1 if whole else threads)
        if status != 0:
            store_long(shared + STEP_FAILED, load_long(step + 24))
            store_shared(shared + FAILED, status)
            return status
    status = meet(shared, threads) if threads > 1 else 0
    if times != 0 and thread == 0:
        store_long(times + 8 * count, ticks())
        store_long(times + 8 * (count + 2), now())
    return status


@kernel
def run(a, thread, threads):
    """Run all steps.  Returns 0, or the status of the step that stopped the run."""
    return walk(a, thread, threads, 0)


@kernel
def timed(a, thread, threads):
    """Run all steps, and write when each began and when all were done, as `walk` says; waiting counts to the step that
    had to wait.  Returns what `run` does."""
    return walk(a, thread, threads, ARGS.times(a))
