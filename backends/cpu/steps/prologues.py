"""Prologues of steps: adjacent steps become one step, and the kernel of the last one first calls the others.

A thread that need not wait between two steps runs one after the other in any case. So a prologue changes no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .step_table import StepWords, TableStep


def join_steps(steps: Sequence[TableStep]) -> list[TableStep]:
    """Merge steps into a later step, which calls their kernels first (its prologue); return the remaining steps.

    Steps merge if no barrier is between them, none may stop the run, and the words of each thread state its part. A
    thread with work in one of them must have work in the last one, which calls the others.
    """
    joined: list[TableStep] = []
    first = 0
    while first < len(steps):
        end = first + 1
        while end < len(steps) and _can_follow_in_prologue(steps[end - 1], steps[end]):
            end += 1
        last = next((n for n in range(end - 1, first, -1) if _can_take_as_prologue(steps[first:n], steps[n])), first)
        joined.append(_make_step_with_prologue(steps[first:last], steps[last]) if last > first else steps[first])
        first = last + 1
    return joined


def _can_follow_in_prologue(step: TableStep, following: TableStep) -> bool:
    """Return whether each thread can run two adjacent steps one after the other, without a barrier between them."""
    plain = all(s.is_presplit and not s.may_stop for s in (step, following))
    return plain and not following.has_barrier


def _can_take_as_prologue(earlier: Sequence[TableStep], last: TableStep) -> bool:
    has_work = all(
        words is not None or all(step.words[thread] is None for step in earlier)
        for thread, words in enumerate(last.words)
    )
    return last.prologue_word is not None and has_work


def _make_step_with_prologue(earlier: Sequence[TableStep], last: TableStep) -> TableStep:
    """Make the step that runs the kernels of the earlier steps as its prologue, then the work of the last step."""
    assert last.prologue_word is not None
    words: list[StepWords | None] = []
    kernel_words = []
    for thread, own in enumerate(last.words):
        called = [(s.kernel, w, s.kernel_words[thread]) for s in earlier if (w := s.words[thread]) is not None]
        addresses = [*last.kernel_words[thread]]
        if own is not None and called:
            parts = [own.copy(), np.array([len(called)])]
            parts[0][last.prologue_word] = len(own)
            at = len(own) + 1
            for kernel, block, inner in called:
                addresses += [(at, kernel), *((at + 2 + place, hook) for place, hook in inner)]
                parts += [np.array([0, len(block)]), block]
                at += 2 + len(block)
            own = np.concatenate(parts)
        words.append(own)
        kernel_words.append(tuple(addresses))
    return replace(
        last, words=words, has_barrier=earlier[0].has_barrier, kernel_words=tuple(kernel_words), prologue_word=None
    )
