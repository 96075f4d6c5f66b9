"""The choice among candidates: the fastest plan, with penalties for memory and for devices.

Plans take long to build, so candidates compete with estimates first:

1. Take the candidate with the lowest estimated cost; a candidate that fits precedes one that does not fit.
2. If the candidate has a plan, its plan is the result.
3. Otherwise build its plan, replace the estimate by the seconds of the plan, and correct the estimates of similar
   candidates. Continue with step 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ...graph.errors import GraphError, PlanError, format_count
from ..ir.execution_plan import Plan
from ..ir.formatting import format_bytes, format_seconds
from ..records.illegal_records import IllegalRecordError
from ..sharding.axes import Factor
from .memory_fit import compute_missing_bytes

FULL_COPY_PENALTY = 0.1
"""The least share of the time that a full copy of weights and states on every device must save."""
DOUBLED_DEVICES_PENALTY = 0.01
"""The least share of the time that twice as many devices must save."""


PlanScorer = Callable[[Plan], tuple[float, str]]
"""Return the predicted seconds of a plan for its workload, and a phrase about pipelined runs, empty without them."""


@dataclass(frozen=True)
class Candidate:
    """A candidate of split mode `auto`: one way to plan, with its estimates, and the function that builds its plan.

    - `seconds`, `stored_bytes` and `missing_bytes` are estimates until `plan` is set. Then they are the values of the
      plan.
    - `stored_bytes` counts weights and states on all devices. `missing_bytes` counts the bytes that do not fit.
    - `stage_count` is the number of pipeline stages. With `assumes_pipelining` the estimate assumes that the stages
      work on different runs at the same time; `pipeline_description` describes these runs.
    - `is_from_search` marks estimates of the factor search, which are too low, because the search ignores small costs.
    - `correction_factor` is the assumed ratio of plan seconds to estimated seconds; 0 if it is unknown.
    - `lower_bound_seconds` is the time if all collectives overlap with compute.
    - `group_sharding` is the pair (devices of each stage, factors that these devices shard).
    - With `refine`, `seconds` is a lower bound of the candidates that `refine` returns. They replace the candidate, and
      candidates of the same kind that have no plan yet.
    """

    kind: str
    device_count: int
    seconds: float
    stored_bytes: float
    missing_bytes: float
    build_plan: Callable[[], Plan]
    plan: Plan | None = None
    is_from_search: bool = False
    stage_count: int = 1
    pipeline_description: str = ""
    assumes_pipelining: bool = False
    lower_bound_seconds: float = 0.0
    correction_factor: float = 0.0
    group_sharding: tuple[int, frozenset[Factor]] | None = None
    refine: Callable[[], Iterable[Candidate]] | None = None

    def has_same_estimate_bias_as(self, other: Candidate) -> bool:
        """Return whether a correction of the estimate of `other` fits this candidate, because both err in the same way.

        The plan of `other` shows its error. This candidate must have no plan yet. Two estimates of the factor search
        have the same bias. So have two estimates that assume pipelining, if this candidate has at least as many
        stages; with fewer stages, estimates are more optimistic. An estimate with pipelining and one without it have
        different biases.
        """
        if self.assumes_pipelining or other.assumes_pipelining:
            return (
                self.plan is None
                and self.assumes_pipelining
                and other.assumes_pipelining
                and self.stage_count >= other.stage_count
            )
        return self.plan is None and other.is_from_search and self.is_from_search

    def with_correction_if_stronger(self, time_ratio: float) -> Candidate:
        """Return the candidate with its uncorrected estimate multiplied by `time_ratio`.

        The candidate is returned unchanged if an earlier correction was at least as strong, that is, its factor was not
        larger.

        Args:
            time_ratio: The plan seconds of a similar candidate, divided by its estimated seconds.
        """
        known = self.correction_factor or 1.0
        return (
            replace(self, seconds=self.seconds * time_ratio / known, correction_factor=time_ratio)
            if time_ratio < (self.correction_factor or math.inf)
            else self
        )

    def with_estimate_capped_by_overlap(self, seconds: float) -> Candidate:
        """Return the candidate with an estimate of at most `seconds`.

        The estimate does not fall below the candidate's own lower bound. The method is used after the plan of a similar
        candidate got faster by overlap of collectives with compute.

        Args:
            seconds: The seconds of the plan of the similar candidate.
        """
        return replace(self, seconds=min(self.seconds, max(self.lower_bound_seconds, seconds)))

    def with_single_stage_lower_bound(self, built_candidate: Candidate) -> Candidate:
        """Return the candidate with an estimate that is at least as long as a plan with a single pipeline stage.

        Without pipelining, a run through several stages takes no less time than a run through one stage with all
        layers. The candidate is unchanged if `built_candidate` has several stages or another `group_sharding`.
        """
        is_one = (
            built_candidate.stage_count == 1
            and built_candidate.group_sharding is not None
            and built_candidate.group_sharding == self.group_sharding
        )
        return (
            replace(self, seconds=max(self.seconds, built_candidate.seconds))
            if is_one and self.has_sequential_stages
            else self
        )

    @property
    def has_sequential_stages(self) -> bool:
        """Whether the estimate is of one run that goes through several pipeline stages one after the other.

        The property is false once the candidate has a plan.
        """
        return self.plan is None and self.stage_count > 1 and not self.assumes_pipelining

    def with_built_plan(self, scorer: PlanScorer) -> Candidate:
        """Build the plan of the candidate; return the candidate with this plan, and with its seconds and bytes."""
        plan = self.build_plan()
        seconds, how = scorer(plan)
        memory = plan.count_memory_bytes_by_kind()
        stored_bytes = memory["weight"] + memory["state"]
        return replace(
            self,
            plan=plan,
            device_count=len(plan.device_plans),
            seconds=seconds,
            stored_bytes=stored_bytes,
            missing_bytes=compute_missing_bytes(plan),
            pipeline_description=how,
        )

    def compute_device_and_copy_penalised_seconds(self, single_device_bytes: float) -> float:
        """Compute the seconds for the comparison of candidates, with penalties for more devices and for copied leaves.

        There is a penalty for each doubling of devices, and one for copies of weights and states.

        Args:
            single_device_bytes: The bytes of weights and states that one device would store.
        """
        if self.device_count == 1:
            return self.seconds
        copied = min(1.0, max(0.0, self.stored_bytes / max(single_device_bytes, 1.0) - 1) / (self.device_count - 1))
        return (
            self.seconds
            / (1 - FULL_COPY_PENALTY * copied)
            * (1 + DOUBLED_DEVICES_PENALTY * math.log2(self.device_count))
        )

    def describe(self) -> str:
        """Describe the candidate in one phrase: kind, device count, seconds and bytes."""
        about = "" if self.plan is not None else "about "
        short = f", {format_bytes(int(self.missing_bytes))} short" if self.missing_bytes else ""
        devices = format_count(self.device_count, "device")
        stored_text = format_bytes(int(self.stored_bytes))
        kind = f"{self.kind} ({self.pipeline_description})" if self.pipeline_description else self.kind
        return f"{kind}, on {devices}: {about}{format_seconds(self.seconds)}, {stored_text} held in all{short}"


def score_by_run_time_without_phrase(plan: Plan) -> tuple[float, str]:
    """Score a plan by the predicted seconds of one run; return (seconds, empty text), the form of all scorers."""
    return plan.cost.total, ""


def choose_plan_with_fewest_missing_bytes(
    candidates: Sequence[Candidate], single_device_bytes: float, scorer: PlanScorer = score_by_run_time_without_phrase
) -> Plan:
    """Choose the plan with the fewest missing bytes of memory; among equals, the plan with the least penalised seconds.

    Only promising candidates are built:

    1. Build the plan of the candidate with the best estimate. Stop if it has a plan already.
    2. Correct the estimates of candidates with the same bias (`Candidate.has_same_estimate_bias_as`) by the ratio of
       plan seconds to estimated seconds.
    3. If the plan overlaps collectives with compute, reduce the estimates of the same candidates to the seconds of
       this plan. Estimates ignore the overlap.
    4. Continue with step 1.

    The reasons of the result list the rejected candidates, also candidates without a possible plan.

    Args:
        candidates: The candidates. The first one has its plan.
        single_device_bytes: Bytes of weights and states on one device.
        scorer: Returns the seconds of a plan.
    """
    left = list(candidates)
    unbuilt: list[str] = []

    alone_bytes = candidates[0].stored_bytes  # bytes of a plan, which may store weights with another dtype

    def cost(candidate: Candidate) -> tuple[float, float]:
        return candidate.missing_bytes, candidate.compute_device_and_copy_penalised_seconds(
            single_device_bytes if candidate.plan is None else alone_bytes
        )

    while (best := min(left, key=cost)).plan is None:
        if best.refine is not None:
            left = _replace_by_refined_candidates(left, best, best.refine())
            continue
        try:
            built_candidate = left[left.index(best)] = best.with_built_plan(scorer)
        except IllegalRecordError:
            raise  # the planner built the record, so hocket is at fault
        except (PlanError, GraphError) as why:
            left.remove(best)
            unbuilt.append(
                f"left aside: {best.kind}, on {format_count(best.device_count, 'device')}; it cannot be built: {why}"
            )
            continue
        if best.seconds > 0:
            off = built_candidate.seconds / best.seconds * (best.correction_factor or 1.0)
            left = [
                candidate.with_correction_if_stronger(off) if candidate.has_same_estimate_bias_as(best) else candidate
                for candidate in left
            ]
        if built_candidate.plan is not None and built_candidate.plan.cost.overlapped_seconds:
            left = [
                w.with_estimate_capped_by_overlap(built_candidate.seconds) if w.has_same_estimate_bias_as(best) else w
                for w in left
            ]
        left = [candidate.with_single_stage_lower_bound(built_candidate) for candidate in left]
    left = [candidate for candidate in left if candidate.refine is None]
    others = sorted((candidate for candidate in left if candidate is not best), key=cost)
    first = {candidate.kind: candidate for candidate in reversed(others)}.values()
    max_device_count = max(candidate.device_count for candidate in left)
    listed_candidates = [
        candidate for candidate in others if candidate in first or candidate.device_count == max_device_count
    ]
    notes = [
        f"taken: {best.describe()}",
        *(
            f"left aside: {candidate.describe()}; {_explain_rejection(candidate, best)}"
            for candidate in listed_candidates
        ),
    ]
    notes += (
        [f"left aside: {format_count(len(others) - len(listed_candidates), 'similar candidate')}"]
        if len(others) > len(listed_candidates)
        else []
    )
    notes = [*notes, *unbuilt] if others or unbuilt else []
    return replace(best.plan, reasons=(*best.plan.reasons, *notes))


def _replace_by_refined_candidates(
    candidates: Sequence[Candidate], replaced: Candidate, refined: Iterable[Candidate]
) -> list[Candidate]:
    """Return the candidates with `replaced` exchanged for more exact candidates of the same kind.

    Candidates with the same kind and device count exclude each other. One with a plan excludes a refined candidate,
    and a refined candidate excludes one without a plan.
    """
    known = {(candidate.kind, candidate.device_count) for candidate in candidates if candidate.plan is not None}
    fresh = [candidate for candidate in refined if (candidate.kind, candidate.device_count) not in known]
    known = {(candidate.kind, candidate.device_count) for candidate in fresh}
    return [
        *(
            candidate
            for candidate in candidates
            if candidate is not replaced and (candidate.kind, candidate.device_count) not in known
        ),
        *fresh,
    ]


def _explain_rejection(other: Candidate, best: Candidate) -> str:
    """Explain in a phrase why the candidate `other` was not chosen, compared with `best`."""
    if other.missing_bytes > best.missing_bytes:
        return "does not fit"
    gain = 1 - other.seconds / best.seconds if best.seconds else 0.0
    if gain < 0:
        return f"{-gain:.1%} slower"
    dear = [format_count(other.device_count, "device")] if other.device_count > best.device_count else []
    dear += (
        [f"{format_bytes(int(other.stored_bytes - best.stored_bytes))} more"]
        if other.stored_bytes > best.stored_bytes
        else []
    )
    return f"{gain:.1%} faster, too little for {' and '.join(dear) or 'another way'}"
