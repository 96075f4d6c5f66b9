"""Pieces of a step that threads take as they come, so that a thread that is held up leaves its work to the others.

All threads go through the same pieces in the same order and count them.  A thread does the piece whose number is on its
ticket and draws another one; the number of its last ticket is that of no piece:

    piece, mine = 0, draw(tickets, 0)
    for ...:
        if piece == mine:
            ...
            mine = draw(tickets, piece + 1)
        piece += 1
    settle(tickets, mine, piece, threads)

A step of many rows may be cut into a few spans of rows with tickets of their own (`spans_of`).  Each thread begins with
the span whose rows it has in steps that threads share row by row, so that few rows come from another processor's
caches, and helps with the others afterwards.
"""

from __future__ import annotations

from ..compiler import part
from ..simd.threads import fetch_add, store_shared

NBYTES = 64
"""Of the memory from which tickets are drawn, which is zero before a step and after it."""
SPANS = NBYTES // 8
"""Of one step at most."""


@part
def draw(tickets, following):
    """The number of a piece that no other thread does: that of the `following` one where there are no tickets (0),
    because one thread does them all."""
    return fetch_add(tickets, 1) if tickets != 0 else following


@part
def settle(tickets, mine, pieces, threads):
    """When a thread has come to the end of all pieces: whose ticket was the last one of all lays out new ones."""
    if tickets != 0 and mine == pieces + threads - 1:
        store_shared(tickets, 0)


@part
def spans_of(rows, least, threads):
    """How many spans of at least so many rows."""
    return max(1, min(threads, rows // least, SPANS))


@part
def span_of(turn, spans, thread, threads):
    """Which span a thread comes to as the first, the second and so on."""
    return (thread * spans // threads + turn) % spans


@part
def span_at(rows, tall, number, spans):
    """Where a span begins, and the one before it ends: at a whole number of `tall` rows."""
    return min(rows, (rows + tall - 1) // tall * number // spans * tall)


@part
def tickets_of(tickets, span):
    """The tickets of a span."""
    return tickets + 8 * span if tickets != 0 else 0
