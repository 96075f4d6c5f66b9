"""Workloads: the prompts and the decode steps of several sequences for which a layout is chosen.

A layout is scored by the whole workload, because prompts and decode steps use the same stored weights. One layout may
be better for prompts and another for decode steps. A layer split is fast only where pipelined runs keep its devices
busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...graph.errors import PlanError, format_count
from ...graph.graph import Graph
from ...graph.validation import CALLABLE, NONE, instance_of, integer_between, list_of, validate_constructor
from ..costs.hardware import Hardware
from ..ir.execution_plan import Plan
from ..pipelining.stage_times import MIN_PIPELINE_SPEEDUP, count_pipeline_stages, estimate_pipeline_speedup
from ..sharding.cost import AssignmentCost
from .candidate import Candidate
from .micro_batches import choose_micro_batches, list_micro_batch_counts_halved_from_stage_count
from .prefill_chunks import ChunkTimeModel, choose_prefill_chunks

MicroBatchCounts = Callable[[int, int], Sequence[int]]
PlanForRun = Callable[[int, int], Plan]
"""Return the plan of a run; the arguments are the sequence count and the tokens of each sequence."""


@validate_constructor(
    PlanError,
    build_graph=CALLABLE,
    chunk_sizes=list_of(integer_between(1), "a sequence of integers above zero"),
    sequence_count=integer_between(1),
    prompt_tokens=integer_between(0),
    new_tokens=integer_between(0),
    lone_hardware=instance_of(Hardware) | NONE,
)
@dataclass(frozen=True, slots=True)
class Workload:
    """A workload for which a layout is chosen: `sequence_count` sequences, each with a prompt and new tokens.

    - `build_graph(sequences, tokens)` returns the graph of a run that gives each sequence `tokens` tokens.
    - `chunk_sizes` are the token counts, ascending, that a prefill chunk may have.
    - `prompt_tokens` and `new_tokens` count the tokens of each sequence.
    - `lone_hardware` has the speeds of the first device if no other device is used. By default the device is as fast as
      while the others are idle.
    """

    build_graph: Callable[[int, int], Graph]
    chunk_sizes: Sequence[int]
    sequence_count: int = 1
    prompt_tokens: int = 0
    new_tokens: int = 1
    lone_hardware: Hardware | None = None

    def __str__(self) -> str:
        """Describe the workload: ``16 sequences, each of a prompt of 512 tokens and 128 steps``."""
        prompt = f"a prompt of {format_count(self.prompt_tokens, 'token')}" if self.prompt_tokens else ""
        steps = format_count(self.new_tokens, "step") if self.new_tokens else ""
        each = " and ".join(filter(None, (prompt, steps)))
        return f"{self.sequence_count} sequences, each of {each}" if self.sequence_count > 1 else each

    @property
    def graph_for_stage_balance(self) -> Graph:
        """The graph for which a layer split gives its stages equal times.

        It is the prefill of a whole prompt, or a step of all sequences if the workload has no prompts.
        """
        return (
            self.build_graph(1, self.prompt_tokens) if self.prompt_tokens else self.build_graph(self.sequence_count, 1)
        )

    def score_plans(
        self, plan_of: PlanForRun, counts_of: MicroBatchCounts = list_micro_batch_counts_halved_from_stage_count
    ) -> tuple[float, str]:
        """Score the plans of one layout by the predicted seconds of the workload.

        Returns the seconds, and a phrase such as ``in 2 micro-batches`` about pipelined runs; it is empty without such
        runs.

        Args:
            plan_of: Returns the plan of a run.
            counts_of: Returns the micro-batch counts to consider, from the sequence count and the stage count.
        """
        choice = choose_micro_batches(self.sequence_count, lambda n: plan_of(n, 1), counts_of)
        micro_batches = len(choice.batch_sizes)
        read, parts = self._estimate_prefill_seconds_and_chunk_count(plan_of) if self.prompt_tokens else (0.0, 1)
        how = [f"in {micro_batches} micro-batches"] if micro_batches > 1 else []
        how += [f"prompts in {format_count(parts, 'part')}"] if parts > 1 else []
        return self.new_tokens * choice.step_seconds + self.sequence_count * read, ", ".join(how)

    def _estimate_prefill_seconds_and_chunk_count(self, plan_of: PlanForRun) -> tuple[float, int]:
        """Estimate the seconds of the prefill of one prompt and its number of chunks; return (seconds, chunk count)."""
        step = plan_of(self.sequence_count, 1)
        if count_pipeline_stages(step) > 1 and estimate_pipeline_speedup(step) >= MIN_PIPELINE_SPEEDUP:
            ends = (self.chunk_sizes[0], self.chunk_sizes[-1])
            predicted = ChunkTimeModel(
                lambda tokens, cells: plan_of(1, tokens), ends, (self.prompt_tokens, self.prompt_tokens)
            )
            parts = choose_prefill_chunks(self.prompt_tokens, 0, self.chunk_sizes, predicted)
            if len(parts.chunk_sizes) > 1:
                return parts.seconds, len(parts.chunk_sizes)
        return plan_of(1, self.prompt_tokens).cost.total, 1


class OptimisticWorkloadEstimator:
    """Estimates the time of a workload before a plan exists, from the times of nodes on one device.

    The estimates are optimistic: they tend to be lower than the time of the plan.
    """

    def __init__(self, workload: Workload, hardware: Hardware) -> None:
        self.workload, self.hardware = workload, hardware
        self._seconds_by_run: dict[tuple[int, int], tuple[float, float]] = {}

    def estimate_candidate_for_whole_workload(self, candidate: Candidate, single_device_seconds: float) -> Candidate:
        """Return the candidate with estimates for the whole workload; before, they are for one step.

        In prefill, the devices of a stage are assumed to share all work except kernel launches.

        Args:
            candidate: The candidate, with estimates for one step of all sequences.
            single_device_seconds: The seconds of this step on one device.
        """
        use, stages, speed, refine = (
            self.workload,
            candidate.stage_count,
            single_device_seconds / candidate.seconds,
            candidate.refine,
        )
        one = self._estimate_run_seconds(use.sequence_count, 1)
        step = min(
            [
                one,
                *(
                    self._estimate_step_seconds(n, stages)
                    for n in self.list_fastest_micro_batch_count(use.sequence_count, stages)
                ),
            ]
        )
        read = 0.0
        if use.prompt_tokens and (stages > 1 or candidate.group_sharding is not None):
            read = self._estimate_fastest_prefill_seconds(stages, candidate.device_count // stages)
        elif use.prompt_tokens:  # no node is sharded
            read = self._estimate_run_seconds(1, use.prompt_tokens) / speed
        if stages > 1:  # one device may work while the others wait
            read /= max(self.hardware.alone_flops, self.hardware.alone_bandwidth)
        seconds = use.new_tokens * step / speed + use.sequence_count * read
        lower_bound_seconds = (
            use.new_tokens * step / speed * candidate.lower_bound_seconds / candidate.seconds
            + use.sequence_count * read
        )
        refined = (
            None
            if refine is None
            else lambda: [self.estimate_candidate_for_whole_workload(one, single_device_seconds) for one in refine()]
        )
        return replace(
            candidate,
            seconds=seconds,
            assumes_pipelining=stages > 1,
            lower_bound_seconds=lower_bound_seconds,
            refine=refined,
        )

    def list_fastest_micro_batch_count(self, sequence_count: int, stage_count: int) -> list[int]:
        """Choose the micro-batch count with the shortest estimated step; return a list with this count.

        The list is empty if there are fewer than two sequences or stages.
        """
        counts = list_micro_batch_counts_halved_from_stage_count(sequence_count, stage_count)
        return [min(counts, key=lambda n: self._estimate_step_seconds(n, stage_count))] if counts else []

    def _estimate_step_seconds(self, micro_batch_count: int, stage_count: int) -> float:
        """Estimate the seconds of a step of all sequences, in micro-batches through stages of one device each."""
        return (
            micro_batch_count
            * self._estimate_run_seconds(-(-self.workload.sequence_count // micro_batch_count), 1)
            / stage_count
        )

    def _estimate_fastest_prefill_seconds(self, stage_count: int, device_count: int) -> float:
        """Estimate the seconds of the prefill of a prompt: the faster of one run and pipelined chunks.

        Args:
            stage_count: The number of pipeline stages.
            device_count: The number of devices of each stage.
        """
        prompt = self.workload.prompt_tokens
        whole, sizes = (
            self._estimate_run_seconds(1, prompt, device_count),
            self.workload.chunk_sizes if stage_count > 1 else (),
        )
        turns = {size: prompt / size + stage_count - 1 for size in sizes}
        return min(
            [whole, *(turns[size] * self._estimate_run_seconds(1, size, device_count) / stage_count for size in sizes)]
        )

    def _estimate_run_seconds(self, sequence_count: int, token_count: int, device_count: int = 1) -> float:
        """Estimate the seconds of one run on several devices.

        The devices share the compute, but each launches all kernels.

        Args:
            sequence_count: The sequences of the run.
            token_count: The tokens of each sequence.
            device_count: The number of devices.
        """
        if (sequence_count, token_count) not in self._seconds_by_run:
            graph = self.workload.build_graph(sequence_count, token_count)
            done = AssignmentCost(graph, 1, self.hardware).node_work.values()
            work = sum(self.hardware.compute_seconds(*each, launches=0.0) for each in done)
            launches = sum(self.hardware.compute_seconds(*each) for each in done) - work
            self._seconds_by_run[sequence_count, token_count] = work, launches
        work, launches = self._seconds_by_run[sequence_count, token_count]
        return work / device_count + launches
