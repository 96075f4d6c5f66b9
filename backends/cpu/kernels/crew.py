"""How the threads of a device begin a run together and end it, without the GIL.

The first thread leads: it writes what is to be run into the block of the crew, tells the others, does its part and
waits until all have done theirs.  The others look for the next run for a while before they go to sleep, since a token
of a small model takes three milliseconds, and to wake a thread of Python one of its twentieths.
"""

from __future__ import annotations

from ..compiler import kernel, part
from ..simd.threads import call, fetch_add, give_way, load_shared, store_shared
from ..simd.vectors import load_long, store_long
from ..words import words
from .loop import SPINS, bide

LINE = 64
"""Bytes of a cache line: what several threads write lies on one of its own."""
LOOP, WORDS, THREADS, DONE, STATES = 0, 8, 16, LINE, 2 * LINE
"""Bytes into the block of a crew: the loop that is run, its words, how many run it; how many of the others are done;
the state of thread i, a line each."""
WORK, ASLEEP = 1, 2
"""Of a state: there is a run for the thread; it sleeps and has to be woken."""
LOOKS = SPINS + 4000
"""How often a thread looks for the next run, most of them while it gives its core away: about two milliseconds."""
SOME_SLEEP = -1
"""What `lead` returns if threads have to be woken; no kernel does."""
ORDER = words("loop words")
"""What is run: the address of a loop, and of its words."""


def crew_bytes(threads: int) -> int:
    """Of the block of a crew."""
    return STATES + LINE * threads


@part
def tell(order, crew, threads):
    """Give a run to all other threads; how many of them sleep."""
    store_long(crew + LOOP, ORDER.loop(order))
    store_long(crew + WORDS, ORDER.words(order))
    store_long(crew + THREADS, threads)
    asleep = 0
    for i in range(1, threads):
        asleep += fetch_add(crew + STATES + LINE * i, WORK) // ASLEEP
    return asleep


@part
def share(order, crew, threads):
    """Do the first thread's part, and wait for all others; its status."""
    status = call(ORDER.loop(order), ORDER.words(order), 0, threads)
    looks = 0
    while load_shared(crew + DONE) < threads - 1:
        looks += 1
        bide(looks)
    store_shared(crew + DONE, 0)
    return status


@kernel
def lead(order, crew, threads):
    """A run of all threads; the status of the first.  `SOME_SLEEP` before it does its part, if there are threads to be
    woken: then comes `go_on`."""
    if tell(order, crew, threads) > 0:
        return SOME_SLEEP
    return share(order, crew, threads)


@kernel
def go_on(order, crew, threads):
    """The rest of a run whose threads are awake now; its status."""
    return share(order, crew, threads)


@kernel
def follow(crew, thread, threads):
    """Another thread's part of every run, until none has come for a while."""
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
