"""Tokens of a prompt in parts, which follow each other through the devices of a model's layers.

While a part is on the second device the next one is on the first, so a prompt takes what one device does for all parts,
and on the others one part more, that which takes longest.  Tokens that see more tokens before them take longer, so
parts that take equally long become shorter; and each part reads all weights, so that many parts take longer in all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from ...graph.lazy_dataclass import dataclass
from ..plan import Plan
from ..succession import StageTime, estimate_stage_times

PlanOf = Callable[[int, int], Plan]
"""The plan of a run of so many tokens that sees so many cells of a context."""


WORTH = 1.005
"""How many times as long fewer parts may take as those that take least: each has costs that no plan knows.  At 1.03
prompts of 2,048 tokens on two devices were read in 9 parts, and took 3 % longer than in 14 (Emerald Rapids)."""

SEEN = 0.75
"""Of the cells that plans count for attention, those that tokens saw when its speed was measured."""


@dataclass(frozen=True, slots=True)
class Parts:
    """So many tokens in each part, one after the other, and the predicted seconds of all."""

    sizes: tuple[int, ...]
    seconds: float


class Predicted:
    """What runs are predicted to take on each device or team that they pass through.

    Plans say so of few and of many tokens, with few and with many cells; between these, time grows evenly with each.
    """

    def __init__(self, plan_of: PlanOf, tokens: tuple[int, int], cells: tuple[int, int]) -> None:
        self._few, self._more = tokens[0], max(1, tokens[1] - tokens[0])
        self._short, self._longer = cells[0], max(1, cells[1] - cells[0])
        of = {asked: estimate_stage_times(plan_of(*asked)) for asked in {(t, c) for t in tokens for c in cells}}
        stops = [*zip(*(of[t, c] for c in cells for t in tokens), strict=True)]
        self._letters = [_bilinear(*(leg.letters for leg in corners)) for corners in stops]
        self._work = [_bilinear(*(leg.work for leg in corners)) for corners in stops]

    def _terms(self, tokens: int, end: int) -> tuple[float, float]:
        """How far a run of so many tokens, that a sequence of the length `end` has then, is from few tokens to many,
        and from few cells to many: tokens see all before them, and on average half of each other."""
        cells = (end - tokens / 2) / SEEN
        return (tokens - self._few) / self._more, (cells - self._short) / self._longer

    def legs(self, tokens: int, end: int) -> list[StageTime]:
        """Of a run of so many tokens that a sequence of the length `end` has then."""
        m, n = self._terms(tokens, end)
        letters, work = (
            [max(0.0, a + b * m + c * n + d * m * n) for a, b, c, d in of] for of in (self._letters, self._work)
        )
        return [*map(StageTime, letters, work)]

    def slowest(self, tokens: int, end: int) -> float:
        """Seconds of the device that takes longest.  Asked for some hundred times before a prompt begins."""
        m, n = self._terms(tokens, end)
        return max(0.0, *(a + b * m + c * n + d * m * n for a, b, c, d in self._work))


def _bilinear(few: float, more: float, few_longer: float, more_longer: float) -> tuple[float, float, float, float]:
    """Of what grows evenly with each of two numbers from 0 to 1: the factors of 1, of either, and of their product."""
    return few, more - few, few_longer - few, more_longer - few_longer - more + few


def in_parts(tokens: int, behind: int, sizes: Sequence[int], predicted: Predicted) -> Parts:
    """As few parts of `sizes`, ascending, as are predicted to take about the least time for so many tokens behind
    others; the last part may be shorter than any size, and takes as long as the next larger one.

    Considered are parts as large as can be of which none takes longer than some time: that of a part of one of the
    sizes at the beginning or at the end.
    """
    end = behind + tokens
    times = {predicted.slowest(size, cells) for size in sizes for cells in (behind + min(size, tokens), end)}
    ways = {_no_longer_than(seconds, behind, end, sizes, predicted) for seconds in times}
    told = [Parts(way, seconds_of(way, behind, sizes, predicted)) for way in ways]
    most = WORTH * min(parts.seconds for parts in told)
    good = [parts for parts in told if parts.seconds <= most]
    return min(good, key=lambda parts: (len(parts.sizes), parts.seconds))


def _no_longer_than(
    seconds: float, behind: int, end: int, sizes: Sequence[int], predicted: Predicted
) -> tuple[int, ...]:
    """Parts of which none takes longer, but for those of the least size."""
    way: list[int] = []
    while behind < end:
        fitting = bisect_right(sizes, seconds, key=lambda size: predicted.slowest(size, min(behind + size, end)))
        way.append(min(sizes[max(0, fitting - 1)], end - behind))
        behind += way[-1]
    return tuple(way)


def seconds_of(way: Sequence[int], behind: int, sizes: Sequence[int], predicted: Predicted) -> float:
    """When the last part is done on the last device."""
    done: list[float] = []
    for size, end in zip(way, accumulate(way, initial=behind), strict=False):
        here, there = 0.0, predicted.legs(room(size, sizes), end + size)
        done = done or [0.0] * len(there)
        for at, leg in enumerate(there):
            here = done[at] = max(done[at], here + leg.message_seconds) + leg.compute_seconds
    return max(done, default=0.0)


def room(tokens: int, sizes: Sequence[int]) -> int:
    """The size of the run that reads so many tokens of a part."""
    return sizes[bisect_left(sizes, tokens)]
