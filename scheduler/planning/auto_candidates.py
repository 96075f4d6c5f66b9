"""The candidates of split mode `auto`: tensor parallelism, a layer split, or both, on ever more devices.

A candidate is one way to plan on a number of devices. The plan of one device is built first. All other candidates begin
with an estimate of their time. `auto` builds the plan of a candidate only while its estimate is the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

from ..costs.hardware import Hardware
from ..ir.execution_plan import Plan
from ..sharding.axes import Factor
from ..sharding.cost import AssignmentCost
from ..sharding.hybrid_split import split_devices_into_groups
from ..sharding.pins import pin_discrete_choices_if_backends_differ
from .branches import MIN_BRANCH_SAVING, BranchScheduler
from .candidate import Candidate, choose_plan_with_fewest_missing_bytes, score_by_run_time_without_phrase
from .plan_builder import PlanBuilder
from .workload import OptimisticWorkloadEstimator

BRANCHES_KIND = "independent branches"


def choose_fastest_plan_with_penalties(plan_builder: PlanBuilder) -> Plan:
    """Choose the plan of split mode `auto`: the fastest plan that fits into memory, with penalties on its time.

    More devices and copies of weights and states are penalised. If no plan fits, choose the plan with the fewest
    missing bytes of memory.
    """
    alone, use, graph = plan_builder.build_mainly_on_first_device(), plan_builder.workload, plan_builder.graph
    among = replace(alone, hardware=plan_builder.hardware) if alone.hardware != plan_builder.hardware else alone
    costs = AssignmentCost(graph, 1, plan_builder.hardware)
    hardware = fit_launch_costs_to_plan(costs, among)
    estimator = None if use is None else OptimisticWorkloadEstimator(use, hardware)
    scorer = (
        score_by_run_time_without_phrase
        if estimator is None
        else partial(_score_layout_for_workload, plan_builder, estimator)
    )
    once = float(sum(v.spec.nbytes for v in (*graph.weights, *graph.states)))
    candidates = [Candidate("whole", 1, 0.0, once, 0.0, lambda: alone).with_built_plan(scorer)]
    if len(plan_builder.group) > 1:
        others = _list_multi_device_candidates(plan_builder, alone, once, hardware, costs)
        if estimator is not None:
            others = [
                estimator.estimate_candidate_for_whole_workload(candidate, among.cost.total) for candidate in others
            ]
        candidates += others
    best = choose_plan_with_fewest_missing_bytes(candidates, once, scorer)
    return best if use is None else replace(best, reasons=(f"judged by {use}", *best.reasons))


def _score_layout_for_workload(
    plan_builder: PlanBuilder, estimator: OptimisticWorkloadEstimator, plan: Plan
) -> tuple[float, str]:
    """Score the layout of `plan` by the predicted seconds of the whole workload.

    Returns the seconds, and a phrase such as ``in 2 micro-batches`` about pipelined runs; it is empty without such
    runs.

    Args:
        plan_builder: The request.
        estimator: Has the workload, and chooses its micro-batch count.
        plan: The plan of one run; the plans of all other runs get its layout.
    """
    use = estimator.workload
    over = cache(
        lambda sequences, tokens: plan_builder.build_with_layout_of_other_plan(plan, use.build_graph(sequences, tokens))
    )
    return use.score_plans(over, estimator.list_fastest_micro_batch_count)


def _list_multi_device_candidates(
    plan_builder: PlanBuilder,
    single_device_plan: Plan,
    single_device_bytes: float,
    hardware: Hardware,
    costs: AssignmentCost,
) -> list[Candidate]:
    """List the candidates that use several devices, each with an estimate of the time of one run.

    Args:
        plan_builder: The request, for all devices.
        single_device_plan: The plan of one device.
        single_device_bytes: Bytes of weights and states on one device.
        hardware: The hardware that `fit_launch_costs_to_plan` returned.
        costs: The work of each node.
    """
    devices = len(plan_builder.group)
    seconds = {node: hardware.compute_seconds(*work) for node, work in costs.node_work.items()}
    branches = BranchScheduler(
        plan_builder.graph, devices, hardware, seconds, _find_smallest_device_memory(plan_builder)
    )
    is_fixed = plan_builder.tensor_split or plan_builder.user_pins or len(single_device_plan.device_plans) > 1
    # Three devices are often faster than two or four: the fourth adds a copy for little work.
    fewer = () if is_fixed else (3, *(2**i for i in range(1, devices.bit_length())))
    candidates: list[Candidate] = []
    for count in sorted({*(n for n in fewer if n < devices), devices}):
        first = plan_builder.with_first_devices(count)
        candidates += (
            _with_stage_overlap_lower_bound(candidate, branches)
            for candidate in _make_sharded_and_layer_candidates(
                first, single_device_plan, single_device_bytes, hardware
            )
        )
        if _has_several_machines_or_halves(hardware.machine, count) and not plan_builder.user_pins:
            candidates += (
                _with_stage_overlap_lower_bound(candidate, branches)
                for candidate in _make_hybrid_candidates(first, hardware)
            )
        if not is_fixed and branches.total_seconds:
            lacking, refine = (
                max(0.0, single_device_bytes / count - branches.device_memory_bytes),
                partial(_make_branch_candidate_with_lower_bound, first, branches, single_device_bytes),
            )
            candidates.append(
                Candidate(
                    BRANCHES_KIND,
                    count,
                    branches.compute_time_lower_bound(count),
                    single_device_bytes,
                    lacking,
                    first.build_mainly_on_first_device,
                    refine=refine,
                )
            )
    return candidates


def _make_branch_candidate_with_lower_bound(
    plan_builder: PlanBuilder, branches: BranchScheduler, single_device_bytes: float
) -> Iterator[Candidate]:
    """Yield the candidate that runs independent branches on different devices.

    The candidate is left out if it cannot save enough time. Its estimate is a lower bound of its time, for which each
    cluster stays on one device. A cluster is a set of nodes that gain nothing from separate devices.
    """
    count = len(plan_builder.group)
    if (bound := branches.compute_lower_bound_with_unsplit_clusters(count)) is not None:
        lacking, refine = (
            max(0.0, single_device_bytes / count - branches.device_memory_bytes),
            partial(_make_branch_candidates, plan_builder, branches),
        )
        yield Candidate(
            BRANCHES_KIND,
            count,
            bound,
            single_device_bytes,
            lacking,
            plan_builder.build_mainly_on_first_device,
            refine=refine,
        )


def _make_branch_candidates(plan_builder: PlanBuilder, branches: BranchScheduler) -> Iterator[Candidate]:
    """Make a candidate for each schedule of independent branches on different devices."""
    for schedule in branches.find_time_saving_schedules(len(plan_builder.group)):
        leaf_bytes, make = schedule.leaf_bytes, partial(plan_builder.build_branch_plan, schedule)
        lacking = sum(max(0.0, each - branches.device_memory_bytes) for each in leaf_bytes)
        yield Candidate(BRANCHES_KIND, len(leaf_bytes), schedule.seconds, sum(leaf_bytes), lacking, make)


def _with_stage_overlap_lower_bound(candidate: Candidate, branches: BranchScheduler) -> Candidate:
    """Return the candidate with a smaller estimate, if its pipeline stages can overlap in time.

    The new estimate is a lower bound. Stages can overlap if they work on independent branches of the graph. A candidate
    that would save too little by overlap is returned unchanged.
    """
    if (
        candidate.stage_count == 1
        or not branches.can_save_time_by_stage_overlap
        or branches.estimate_time_share_with_overlap(candidate.stage_count) > 1 - MIN_BRANCH_SAVING
    ):
        return candidate
    part = branches.compute_time_lower_bound(candidate.stage_count) / branches.total_seconds
    if candidate.is_from_search:  # stages may gain differently from sharding
        part = 1 / candidate.stage_count
    return replace(candidate, seconds=candidate.seconds * part, is_from_search=False, group_sharding=None)


def _make_sharded_and_layer_candidates(
    plan_builder: PlanBuilder, single_device_plan: Plan, single_device_bytes: float, hardware: Hardware
) -> Iterator[Candidate]:
    """Make the candidates that use all devices of `plan_builder`: two by tensor parallelism, and one layer split.

    One tensor-parallel candidate shards where that saves time, the other wherever kernels get shorter.

    Args:
        plan_builder: The request.
        single_device_plan: The plan of one device.
        single_device_bytes: Bytes of weights and states on one device.
        hardware: The hardware that `fit_launch_costs_to_plan` returned.
    """
    count, room = len(plan_builder.group), _find_smallest_device_memory(plan_builder)
    seen = {frozenset[Factor]()}
    for eager, kind in ((False, "cut where that saves time"), (True, "cut wherever kernels get shorter")):
        choice = plan_builder.factor_search.choose_fastest_factors(count, hardware, eager=eager)
        if choice.factors not in seen:
            seen.add(choice.factors)
            lacking, make = max(0.0, choice.stored_bytes - room), partial(plan_builder.build_sharded, choice)
            lower_bound_seconds, group_sharding = choice.seconds - choice.communication_seconds, (count, choice.factors)
            yield Candidate(
                kind,
                count,
                choice.seconds,
                count * choice.stored_bytes,
                lacking,
                make,
                is_from_search=True,
                lower_bound_seconds=lower_bound_seconds,
                group_sharding=group_sharding,
            )
    seconds = single_device_plan.cost.total + _sum_stage_link_latencies(hardware, count, 1)
    yield Candidate(
        "layers",
        count,
        seconds,
        single_device_bytes,
        max(0.0, single_device_bytes / count - room),
        plan_builder.build_layer_split,
        stage_count=count,
    )


def _has_several_machines_or_halves(devices_per_machine: int, device_count: int) -> bool:
    """Return whether the devices can form at least two groups: whole machines, or the two halves of one machine."""
    return (
        device_count % devices_per_machine == 0
        if 0 < devices_per_machine < device_count
        else device_count >= 4 and device_count % 2 == 0
    )


def _make_hybrid_candidates(plan_builder: PlanBuilder, hardware: Hardware) -> Iterator[Candidate]:
    """Yield the candidate of the hybrid split: pipeline stages on device groups, with tensor parallelism in each group.

    A group is one machine, or one half of the only machine. There is no candidate if a node must stay on device 0
    because the backends differ.
    """
    if pin_discrete_choices_if_backends_differ(plan_builder.graph, plan_builder.group):
        return
    groups = split_devices_into_groups(hardware.machine, len(plan_builder.group))
    choice = plan_builder.factor_search.choose_fastest_factors(len(groups[0]), hardware, eager=True)
    stored_bytes = choice.stored_bytes / len(groups)
    lacking = max(0.0, stored_bytes - _find_smallest_device_memory(plan_builder))
    seconds = choice.seconds + _sum_stage_link_latencies(hardware, len(groups), len(groups[0]))
    count = len(plan_builder.group)
    across = f"{len(groups)} machines" if 0 < hardware.machine < count else f"{len(groups)} teams"
    kind = f"layers across {across}, cut within each"
    make = partial(plan_builder.build_hybrid_over_groups, groups, choice)
    lower_bound_seconds, group_sharding, stages = (
        choice.seconds - choice.communication_seconds,
        (len(groups[0]), choice.factors),
        len(groups),
    )
    yield Candidate(
        kind,
        count,
        seconds,
        count * stored_bytes,
        lacking,
        make,
        is_from_search=True,
        stage_count=stages,
        lower_bound_seconds=lower_bound_seconds,
        group_sharding=group_sharding,
    )


def _sum_stage_link_latencies(hardware: Hardware, stage_count: int, devices_per_stage: int) -> float:
    """Estimate the transfer seconds between pipeline stages as one link latency for each pair of adjacent stages.

    Bytes are not counted, so the estimate is a lower bound.
    """
    ends = ((s * devices_per_stage - 1, s * devices_per_stage) for s in range(1, stage_count))
    return sum(hardware.collective_seconds(0.0, hardware.count_machines(pair)) for pair in ends)


def _find_smallest_device_memory(plan_builder: PlanBuilder) -> float:
    """Find the memory of the smallest device in bytes. It is infinity if no device states its memory."""
    return min((device.memory for _, device in plan_builder.group if device.memory is not None), default=math.inf)


def fit_launch_costs_to_plan(costs: AssignmentCost, single_device_plan: Plan) -> Hardware:
    """Scale all launch costs of the hardware model, so that the times of all nodes add up to the time of a plan.

    The plan is for one device. The launch costs of the model are wrong there, because fused nodes share a launch, some
    nodes need several launches, and state saves add launches.
    """
    hardware, works = costs.hardware, costs.node_work.values()
    work = sum(hardware.compute_seconds(*done, launches=0.0) for done in works)
    launches = sum(hardware.compute_seconds(*done) for done in works) - work
    scale = max(0.0, single_device_plan.cost.total - work) / launches if launches > 0 else 0.0
    return replace(
        hardware,
        launch=hardware.launch * scale,
        op_launch={op: seconds * scale for op, seconds in hardware.op_launch.items()},
    )
