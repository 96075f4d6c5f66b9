"""Work queues: threads take the work items of a step one by one, so that a delayed thread leaves its work to others.

All threads count the same items in the same order. A thread processes the item of its ticket, then draws another
ticket. The last ticket of each thread is behind all items:

    item, mine = 0, take_work_item(tickets, 0)
    for ...:
        if item == mine:
            ...
            mine = take_work_item(tickets, item + 1)
        item += 1
    reset_queue_after_last_ticket(tickets, mine, item, threads)

A step of many rows may be split into spans of rows with a queue each (`count_row_spans`). Each thread begins with the
span of its rows in steps that are shared row by row. Then few rows come from the caches of other processors. Later the
thread helps with the other spans.
"""

from __future__ import annotations

from ..compilation.compiler import subroutine
from ..simd.atomics import fetch_add, store_shared

QUEUE_BYTES = 64
"""Bytes of the queue memory of a step. It is zero before and after the step."""
MAX_SPANS = QUEUE_BYTES // 8
"""Largest number of spans of a step."""


@subroutine
def take_work_item(tickets, following):
    """Take the number of the next work item from the queue.

    Return `following` if there is no queue. `tickets` is the address of the queue, or 0 for none. Without a queue one
    thread does all items in order.
    """
    return fetch_add(tickets, 1) if tickets != 0 else following


@subroutine
def reset_queue_after_last_ticket(tickets, mine, item_count, threads):
    """Set the work queue back to 0 if `mine`, the last item number that this thread took, is the last one of all.

    Each thread takes one ticket behind the `item_count` items, so the last one is ``item_count + threads - 1``.
    """
    if tickets != 0 and mine == item_count + threads - 1:
        store_shared(tickets, 0)


@subroutine
def count_row_spans(rows, min_rows, threads):
    """Return the number of row spans for `rows` rows: from 1 to one per thread, with at least `min_rows` rows each.

    There is one span if there are fewer than `min_rows` rows. There are at most `MAX_SPANS` spans.
    """
    return max(1, min(threads, rows // min_rows, MAX_SPANS))


@subroutine
def choose_row_span(turn, spans, thread, threads):
    """Return the number of the row span from which a thread takes work in its turn number `turn`.

    Threads begin at different spans, and each thread visits all spans in a circle.
    """
    return (thread * spans // threads + turn) % spans


@subroutine
def compute_first_row_of_span(rows, row_multiple, span, spans):
    """Return the first row of row span number `span` if `rows` rows are split evenly into `spans` row spans.

    The result is a multiple of `row_multiple`. It is also the end of the span before.
    """
    return min(rows, (rows + row_multiple - 1) // row_multiple * span // spans * row_multiple)


@subroutine
def compute_span_queue_address(tickets, span):
    """Return the address of the work queue of row span number `span`; each span of rows has a queue of its own.

    The result is 0 if `tickets` is 0, which means no queues.
    """
    return tickets + 8 * span if tickets != 0 else 0
