"""The ways to plan of which the mode ``auto`` takes the best: cut, in layers, or both, on ever more of the devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

from ..machines.hardware import Hardware
from ..plan import Plan
from ..sharding.axes import Factor
from ..sharding.cost import AssignmentCost
from ..sharding.pins import pin_discrete_choices
from ..sharding.teams import split_into_groups
from .auto import Way, best_of, by_cost
from .branches import GAIN, Branches
from .planning import Planning
from .uses import Promises

BRANCHES = "independent branches"


def best_way(planning: Planning) -> Plan:
    """The plan that takes least time, where memory and devices have their price, of all that fit; if none does, the one
    that lacks least."""
    alone, use, graph = planning.alone(), planning.use, planning.graph
    among = replace(alone, hardware=planning.hardware) if alone.hardware != planning.hardware else alone
    costs = AssignmentCost(graph, 1, planning.hardware)
    hardware = _as_run(costs, among)
    promises = None if use is None else Promises(use, hardware)
    judge = by_cost if promises is None else partial(_judged, planning, promises)
    once = float(sum(v.spec.nbytes for v in (*graph.weights, *graph.states)))
    ways = [Way("whole", 1, 0.0, once, 0.0, lambda: alone).made(judge)]
    if len(planning.group) > 1:
        others = _ways(planning, alone, once, hardware, costs)
        if promises is not None:
            others = [promises.about(way, among.cost.total) for way in others]
        ways += others
    best = best_of(ways, once, judge)
    return best if use is None else replace(best, reasons=(f"judged by {use}", *best.reasons))


def _judged(planning: Planning, promises: Promises, plan: Plan) -> tuple[float, str]:
    """Seconds of what plans are wanted for, with weights as they lie in this one, and how runs follow each other."""
    use = promises.use
    over = cache(lambda sequences, tokens: planning.over(plan, use.graph_of(sequences, tokens)))
    return use.judged(over, promises.counts_of)


def _ways(planning: Planning, alone: Plan, once: float, hardware: Hardware, costs: AssignmentCost) -> list[Way]:
    """All that is not on one device alone, by single runs."""
    devices = len(planning.group)
    seconds = {node: hardware.compute_seconds(*work) for node, work in costs.node_work.items()}
    branches = Branches(planning.graph, devices, hardware, seconds, _room(planning))
    is_fixed = planning.shares or planning.wished or len(alone.lanes) > 1
    fewer = () if is_fixed else (2**i for i in range(1, devices.bit_length()))
    ways: list[Way] = []
    for count in sorted({*(n for n in fewer if n < devices), devices}):
        first = planning.first(count)
        ways += (_overlap_stages(way, branches) for way in _with_all(first, alone, once, hardware))
        if _divides(hardware.machine, count) and not planning.wished:
            ways += (_overlap_stages(way, branches) for way in _staged(first, hardware))
        if not is_fixed and branches.total:
            lacking, refine = max(0.0, once / count - branches.memory), partial(_bound_branches, first, branches, once)
            ways.append(
                Way(BRANCHES, count, branches.compute_lower_bound(count), once, lacking, first.alone, refine=refine)
            )
    return ways


def _bound_branches(planning: Planning, branches: Branches, once: float) -> Iterator[Way]:
    """Yield independent branches on different devices, if there are any, with a better bound of their time."""
    count = len(planning.group)
    if (bound := branches.compute_cluster_bound(count)) is not None:
        lacking, refine = max(0.0, once / count - branches.memory), partial(_schedule_branches, planning, branches)
        yield Way(BRANCHES, count, bound, once, lacking, planning.alone, refine=refine)


def _schedule_branches(planning: Planning, branches: Branches) -> Iterator[Way]:
    """Yield the schedules of independent branches on different devices."""
    for schedule in branches.find_schedules(len(planning.group)):
        leaf_bytes, make = schedule.leaf_bytes, partial(planning.place_branches, schedule)
        lacking = sum(max(0.0, each - branches.memory) for each in leaf_bytes)
        yield Way(BRANCHES, len(leaf_bytes), schedule.seconds, sum(leaf_bytes), lacking, make)


def _overlap_stages(way: Way, branches: Branches) -> Way:
    """Return the way with its least seconds if its stages work on different branches at the same time."""
    if way.stages == 1 or not branches.can_overlap or branches.estimate_overlap(way.stages) > 1 - GAIN:
        return way
    part = branches.compute_lower_bound(way.stages) / branches.total
    if way.searched:  # the gain of cuts may differ between stages
        part = 1 / way.stages
    return replace(way, seconds=way.seconds * part, searched=False, cut=None)


def _with_all(planning: Planning, alone: Plan, once: float, hardware: Hardware) -> Iterator[Way]:
    """The ways to plan for all devices; `alone` is the plan of one, and `hardware` is as `_as_run` says."""
    count, room = len(planning.group), _room(planning)
    seen = {frozenset[Factor]()}
    for eager, kind in ((False, "cut where that saves time"), (True, "cut wherever kernels get shorter")):
        choice = planning.search.choose_factors(count, hardware, eager=eager)
        if choice.factors not in seen:
            seen.add(choice.factors)
            lacking, make = max(0.0, choice.stored_bytes - room), partial(planning.cut, choice)
            least, cut = choice.seconds - choice.communication_seconds, (count, choice.factors)
            yield Way(
                kind,
                count,
                choice.seconds,
                count * choice.stored_bytes,
                lacking,
                make,
                searched=True,
                least=least,
                cut=cut,
            )
    seconds = alone.cost.total + _passed_on(hardware, count, 1)
    yield Way("layers", count, seconds, once, max(0.0, once / count - room), planning.layers, stages=count)


def _divides(machine: int, devices: int) -> bool:
    """Whether so many devices are teams of several: whole machines, or halves of one."""
    return devices % machine == 0 if 0 < machine < devices else devices >= 4 and devices % 2 == 0


def _staged(planning: Planning, hardware: Hardware) -> Iterator[Way]:
    """Layers across machines, or halves of one, cut within each."""
    if pin_discrete_choices(planning.graph, planning.group):
        return
    teams = split_into_groups(hardware.machine, len(planning.group))
    choice = planning.search.choose_factors(len(teams[0]), hardware, eager=True)
    held = choice.stored_bytes / len(teams)
    lacking = max(0.0, held - _room(planning))
    seconds = choice.seconds + _passed_on(hardware, len(teams), len(teams[0]))
    count = len(planning.group)
    across = f"{len(teams)} machines" if 0 < hardware.machine < count else f"{len(teams)} teams"
    kind = f"layers across {across}, cut within each"
    make = partial(planning.in_teams, teams, choice)
    least, cut, stages = choice.seconds - choice.communication_seconds, (len(teams[0]), choice.factors), len(teams)
    yield Way(kind, count, seconds, count * held, lacking, make, searched=True, stages=stages, least=least, cut=cut)


def _passed_on(hardware: Hardware, stages: int, devices: int) -> float:
    """Seconds that what goes from stage to stage takes, each of so many devices, at least."""
    ends = ((s * devices - 1, s * devices) for s in range(1, stages))
    return sum(hardware.collective_seconds(0.0, hardware.machines(pair)) for pair in ends)


def _room(planning: Planning) -> float:
    """The memory of the smallest device in bytes, as far as devices tell it."""
    return min((device.memory for _, device in planning.group if device.memory is not None), default=math.inf)


def _as_run(costs: AssignmentCost, alone: Plan) -> Hardware:
    """The hardware with the launch of a node by which the graph takes as long as its program on one device of those
    that work, where chains are launched together and states are saved."""
    work = sum(costs.hardware.compute_seconds(*done, launches=0.0) for done in costs.node_work.values())
    return replace(costs.hardware, launch=max(0.0, alone.cost.total - work) / max(1, len(costs.node_work)))
