"""Micro-batches: sequences of a model dealt into several, which follow each other through the devices of its layers.

A step in which each sequence gets a token waits for the step before it.  Run as one it is on one device at a time; in
micro-batches the next token of one may be on the first device while another is on the second.  Each of them reads all
weights, so where a device waits for memory rather than for arithmetic nothing is gained, and the plans say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import takewhile

from ..graph.records import dataclass
from .plan import Plan
from .succession import seconds_apart
from .units import time_text

GAIN = 1.1
"""How many times as fast micro-batches have to be predicted to be."""


@dataclass(frozen=True, slots=True)
class Dealing:
    """So many sequences in each micro-batch, one after the other; predicted seconds of a step of all of them, and of
    the best of several micro-batches (infinite where these cannot follow each other) beside that of one."""

    sizes: tuple[int, ...]
    dealt: tuple[int, ...]
    seconds: float
    at_once: float

    def __str__(self) -> str:
        ways = ["as one", f"in {len(self.dealt)} micro-batches that follow each other"]
        seconds = [self.at_once, self.seconds]
        if len(self.sizes) > 1:
            ways, seconds = ways[::-1], seconds[::-1]
        said = f"{sum(self.sizes)} sequences run {ways[0]}, predicted to take {time_text(seconds[0])} a step"
        if len(self.dealt) == 1:
            return said
        if self.seconds == math.inf:
            return f"{said}; micro-batches follow each other only where devices meet by letters"
        return f"{said}; {ways[1]} {time_text(seconds[1])}"


def dealing(sequences: int, plan_of: Callable[[int], Plan]) -> Dealing:
    """How to deal so many sequences; ``plan_of(n)`` is the plan of a step in which each of `n` gets a token."""
    one = (sequences,)
    whole = plan_of(sequences)
    most = min(len(whole.lanes), sequences)
    counts = list(takewhile(lambda count: count > 1, (most >> halved for halved in range(most.bit_length()))))
    if not counts:
        return Dealing(one, one, whole.cost.total, whole.cost.total)
    seconds = {count: count * seconds_apart(plan_of(-(-sequences // count)), count) for count in counts}
    best = min(counts, key=seconds.__getitem__)
    dealt = tuple(sequences // best + (at < sequences % best) for at in range(best))
    pays = whole.cost.total >= GAIN * seconds[best]
    return Dealing(dealt if pays else one, dealt, seconds[best], whole.cost.total)
