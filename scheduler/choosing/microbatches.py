"""Micro-batches: sequences of a model dealt into several, which follow each other through the devices of its layers.

A step in which each sequence gets a token waits for the step before it.  Run as one it is on one device at a time; in
micro-batches the next token of one may be on the first device while another is on the second.  Each of them reads all
weights, so where a device waits for memory rather than for arithmetic nothing is gained, and the plans say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...graph.lazy_dataclass import dataclass
from ..plan import Plan
from ..succession import MIN_PIPELINE_SPEEDUP, count_pipeline_stages, estimate_run_interval, format_stage_count
from ..units import format_seconds


@dataclass(frozen=True, slots=True)
class Dealing:
    """So many sequences in each micro-batch, one after the other; `considered` are numbers of micro-batches, from 1 on,
    with the predicted seconds of a step of all sequences.  Where there are several they follow each other through so
    many `stages`, of one device or of a team; 1 if all devices meet."""

    sizes: tuple[int, ...]
    considered: tuple[tuple[int, float], ...]
    stages: int
    devices: int

    @property
    def seconds(self) -> float:
        """Of a step of all sequences."""
        return dict(self.considered)[len(self.sizes)]

    def __str__(self) -> str:
        sequences, taken = sum(self.sizes), len(self.sizes)
        ways = {count: f"in {count} micro-batches" if count > 1 else "as one" for count, _ in self.considered}
        times = {count: format_seconds(seconds) for count, seconds in self.considered}
        follow = f" that follow each other through {format_stage_count(self.stages, self.devices)}" if taken > 1 else ""
        runs = f"{sequences} sequences run" if sequences > 1 else "1 sequence runs"
        said = [f"{runs} {ways[taken]}{follow}, predicted to take {times[taken]} a step"]
        if others := [f"{ways[count]} {times[count]}" for count in reversed(ways) if count != taken]:
            said.append(", ".join(others))
        if others and taken == 1:
            said.append(f"several have to be {MIN_PIPELINE_SPEEDUP} times as fast")
        elif self.stages < self.devices and self.stages == 1 < sequences:
            said.append("all devices meet, so that none can begin with other sequences")
        return "; ".join(said)


def counts_of(sequences: int, stages: int) -> list[int]:
    """Numbers of micro-batches to consider, at most as many as stages: halved again and again, down to two."""
    most = min(stages, sequences)
    return [most >> halved for halved in range(most.bit_length()) if most >> halved > 1]


def dealing(
    sequences: int, plan_of: Callable[[int], Plan], counts_of: Callable[[int, int], Sequence[int]] = counts_of
) -> Dealing:
    """How to deal so many sequences; ``plan_of(n)`` is the plan of a step in which each of `n` gets a token, and
    `counts_of` sequences and stages says which numbers of micro-batches are considered."""
    whole = plan_of(sequences)
    stages = count_pipeline_stages(whole)
    counts = counts_of(sequences, stages)
    seconds = {count: count * estimate_run_interval(plan_of(-(-sequences // count)), count) for count in counts}
    at_once = whole.cost.total
    best = min(seconds, key=seconds.__getitem__, default=1)
    taken = best if best > 1 and at_once >= MIN_PIPELINE_SPEEDUP * seconds[best] else 1
    sizes = tuple(sequences // taken + (at < sequences % taken) for at in range(taken))
    return Dealing(sizes, ((1, at_once), *sorted(seconds.items())), stages, len(whole.lanes))
