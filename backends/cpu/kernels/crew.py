"""Start and end of a run for all threads of a device, without the GIL.

1. Thread 0 writes the run to the shared block of the thread pool and publishes it to the other threads.
2. Thread 0 does its own work, then waits for the others.
3. The other threads spin for the next run before they sleep. A token of a small model takes 3 ms; waking a Python
thread takes a twentieth of it.
"""

from __future__ import annotations

from ..compiler import kernel, part
from ..simd.threads import call, fetch_add, give_way, load_shared, store_shared
from ..simd.vectors import load_long, store_long
from ..words import words
from .loop import SPINS, bide

LINE = 64
"""Bytes of a cache line. Each word that several threads write has its own line."""
LOOP, WORDS, THREADS, DONE, STATES = 0, 8, 16, LINE, 2 * LINE
"""Offsets into the shared block: loop, its words, thread count; finished threads; a line with the state of each thread.
"""
WORK, ASLEEP = 1, 2
"""Flags of a thread state: a run is waiting; the thread sleeps and must be woken."""
LOOKS = SPINS + 4000
"""Spins of a thread before it sleeps, about 2 ms. For most of them it yields its core."""
SOME_SLEEP = -1
"""Status of `lead` if threads must be woken. Kernels do not use it."""
ORDER = words("loop words")
"""Words of a run: the addresses of a loop and of its words."""


def crew_bytes(threads: int) -> int:
    """Return the bytes of the shared block."""
    return STATES + LINE * threads


@part
def tell(order, crew, threads):
    """Publish a run to all other threads, and return the number of sleeping threads."""
    store_long(crew + LOOP, ORDER.loop(order))
    store_long(crew + WORDS, ORDER.words(order))
    store_long(crew + THREADS, threads)
    asleep = 0
    for i in range(1, threads):
        asleep += fetch_add(crew + STATES + LINE * i, WORK) // ASLEEP
    return asleep


@part
def share(order, crew, threads):
    """Run the work of thread 0, wait for all others, and return the status of thread 0."""
    status = call(ORDER.loop(order), ORDER.words(order), 0, threads)
    looks = 0
    while load_shared(crew + DONE) < threads - 1:
        looks += 1
        bide(looks)
    store_shared(crew + DONE, 0)
    return status


@kernel
def lead(order, crew, threads):
    """Run all threads and return the status of thread 0.

    If threads sleep, return `THREADS_SLEEPING` before the work of thread 0. The caller wakes them and calls `go_on`.
    """
    if tell(order, crew, threads) > 0:
        return SOME_SLEEP
    return share(order, crew, threads)


@kernel
def go_on(order, crew, threads):
    """Go on with a run after all threads are awake, and return its status."""
    return share(order, crew, threads)


@kernel
def follow(crew, thread, threads):
    """Run the work of another thread for every run, until it sleeps."""
    state, looks = crew + STATES + LINE * thread, 0
    while True:
        if load_shared(state) % ASLEEP == WORK:
            call(load_long(crew + LOOP), load_long(crew + WORDS), thread, load_long(crew + THREADS))
            store_shared(state, 0)
            fetch_add(crew + DONE, 1)
            looks = 0
        elif looks < LOOKS:
            looks += 1
            if looks > SPINS:
                give_way()
        elif fetch_add(state, ASLEEP) == 0:
            return 0
