"""Micro-batches: groups of sequences that pass through the pipeline stages one after the other.

A step waits for the tokens of the step before it. As one run, a step is on one stage at a time. In micro-batches, one
group may compute its next token on the first stage while another group is on the second stage. Each micro-batch reads
all weights. So nothing is gained where memory is the limit instead of arithmetic, and the plans say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...graph.errors import PlanError
from ...graph.lazy_dataclass import dataclass
from ...graph.validation import CALLABLE, integer_between, validate_arguments
from ..ir.execution_plan import Plan
from ..ir.formatting import format_seconds
from ..pipelining.stage_times import (
    MIN_PIPELINE_SPEEDUP,
    count_pipeline_stages,
    estimate_run_interval,
    format_stage_count,
)


@dataclass(frozen=True, slots=True)
class MicroBatchChoice:
    """The chosen micro-batches of a step, as sequence counts, and the considered alternatives.

    - `batch_sizes` has the number of sequences of each chosen micro-batch.
    - `seconds_of_counts` has pairs (micro-batch count, predicted seconds of a step of all sequences).
    - `stage_count` is the number of pipeline stages. A stage is one device, or devices that share collectives.
    - `device_count` is the number of devices of the plan.
    """

    batch_sizes: tuple[int, ...]
    seconds_of_counts: tuple[tuple[int, float], ...]
    stage_count: int
    device_count: int

    @property
    def step_seconds(self) -> float:
        """The predicted seconds of a decode step of all sequences, in the chosen micro-batches."""
        return dict(self.seconds_of_counts)[len(self.batch_sizes)]

    def __str__(self) -> str:
        sequences, taken = sum(self.batch_sizes), len(self.batch_sizes)
        count_phrases = {
            count: f"in {count} micro-batches" if count > 1 else "as one" for count, _ in self.seconds_of_counts
        }
        times = {count: format_seconds(seconds) for count, seconds in self.seconds_of_counts}
        follow = (
            f" that follow each other through {format_stage_count(self.stage_count, self.device_count)}"
            if taken > 1
            else ""
        )
        runs = f"{sequences} sequences run" if sequences > 1 else "1 sequence runs"
        clauses = [f"{runs} {count_phrases[taken]}{follow}, predicted to take {times[taken]} a step"]
        if others := [f"{count_phrases[count]} {times[count]}" for count in reversed(count_phrases) if count != taken]:
            clauses.append(", ".join(others))
        if others and taken == 1:
            clauses.append(f"several have to be {MIN_PIPELINE_SPEEDUP} times as fast")
        elif self.stage_count < self.device_count and self.stage_count == 1 < sequences:
            clauses.append("all devices meet, so that none can begin with other sequences")
        return "; ".join(clauses)


def list_micro_batch_counts_halved_from_stage_count(sequence_count: int, stage_count: int) -> list[int]:
    """List the micro-batch counts to consider: the stage count, half of it, and so on down to two.

    The largest count is not larger than the number of sequences.
    """
    max_count = min(stage_count, sequence_count)
    return [max_count >> halved for halved in range(max_count.bit_length()) if max_count >> halved > 1]


@validate_arguments(PlanError, sequence_count=integer_between(1), plan_of=CALLABLE, counts_of=CALLABLE)
def choose_micro_batches(
    sequence_count: int,
    plan_of: Callable[[int], Plan],
    counts_of: Callable[[int, int], Sequence[int]] = list_micro_batch_counts_halved_from_stage_count,
) -> MicroBatchChoice:
    """Choose how many micro-batches a decode step has.

    The choice is the fastest count, or one if several do not save enough. Several micro-batches must be predicted to be
    `MIN_PIPELINE_SPEEDUP` times as fast as one.

    Args:
        sequence_count: The number of sequences.
        plan_of: Returns the plan of a step in which each of `n` sequences gets a token.
        counts_of: Returns the micro-batch counts to consider, from the sequence count and the stage count.
    """
    whole = plan_of(sequence_count)
    stages = count_pipeline_stages(whole)
    counts = counts_of(sequence_count, stages)
    seconds = {count: count * estimate_run_interval(plan_of(-(-sequence_count // count)), count) for count in counts}
    at_once = whole.cost.total
    best = min(seconds, key=seconds.__getitem__, default=1)
    taken = best if best > 1 and at_once >= MIN_PIPELINE_SPEEDUP * seconds[best] else 1
    sizes = tuple(sequence_count // taken + (at < sequence_count % taken) for at in range(taken))
    return MicroBatchChoice(sizes, ((1, at_once), *sorted(seconds.items())), stages, len(whole.device_plans))
