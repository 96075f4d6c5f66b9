"""A plan: for each device the graph and the program it runs, how leaves and outputs lie on them, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..backends.base import Backend, Device, Program, find
from ..graph.errors import PlanError
from ..graph.graph import Graph
from ..ops import REGISTRY, verify
from ..ops.collective import COLLECTIVES
from .assign import assign
from .choose import Choice, cuts_of, factors_at
from .choose import choose as search
from .cost import CPU, Estimate, Hardware
from .explain import explain, memory_table, stages_of, summary
from .factors import Factor, Factors
from .fits import shortage
from .layout import REPLICATE, Layout, Local, Shares
from .lower import check_support, lower
from .place import Placement, layer_split, place, placed_like
from .shard import Sharded, shard
from .stages import Stage
from .stages import estimate as timed
from .units import nbytes_text as nbytes_text

SPLIT_MODES = ("none", "layer", "tensor", "auto")
Chooser = Callable[[Graph, Factors], frozenset[Factor]]
Group = Sequence[tuple[Backend, Device]]
Cuts = frozenset[tuple[str, int, int, int]]
"""The factors that are cut, each by a leaf that has it: (leaf, axis, segment, place)."""


@dataclass(frozen=True, eq=False)
class Lane:
    """One device's part of a plan: `graph` is what it runs, with local shapes and the `cont` nodes kernels needed."""

    device: Device
    backend: Backend
    graph: Graph
    program: Program

    def memory(self) -> dict[str, int]:
        """Bytes on the device: weights, states and constants as stored, and the arena of intermediate values."""
        return {kind: self.program.nbytes(kind) for kind in ("weight", "state", "constant", "arena")}


@dataclass(frozen=True, eq=False)
class Plan:
    """What `graph` becomes on a group of devices.  Nothing is allocated yet, so a plan costs no device.

    `leaves` and `outputs` say how each input, weight, state and output lies on the devices; `reasons` is what the
    search considered; `cost` is predicted from the programs, for devices and links like `hardware`.
    """

    graph: Graph
    lanes: tuple[Lane, ...]
    leaves: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    cuts: Cuts
    reasons: tuple[str, ...]
    hardware: Hardware = CPU

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Work between meetings of the devices, and the meetings, with their times."""
        return tuple(stages_of(self))

    @cached_property
    def cost(self) -> Estimate:
        """The predicted time of one run."""
        return timed(self.stages, len(self.lanes))

    def memory(self) -> dict[str, int]:
        """Bytes by kind, summed over devices."""
        return {kind: sum(lane.memory()[kind] for lane in self.lanes) for kind in self.lanes[0].memory()}

    def flops(self) -> int:
        """Floating-point operations of one run on one device, however it is cut."""
        return sum(REGISTRY[n.op].flops(n) for n in self.graph.nodes if not n.is_leaf)

    def collectives(self) -> int:
        """How often the devices meet in one run."""
        return sum(i.op in COLLECTIVES for i in self.lanes[0].program.instructions)

    def digest(self) -> str:
        """SHA-256 of what runs where; equal in every process that plans the same, so that ranks can compare it."""
        from .plan_json import digest

        return digest(self)

    def explain(self, *, steps: bool = False) -> str:
        """What it costs, what was considered, memory, and each stage with its reason; `steps`: each instruction."""
        return explain(self, steps=steps)

    def __str__(self) -> str:
        return "\n".join([summary(self), *memory_table(self)])


def plan(
    graph: Graph,
    devices: str | Sequence[str] = "cpu:0",
    *,
    split_mode: str = "auto",
    tensor_split: Sequence[float] = (),
    like: Plan | None = None,
) -> Plan:
    """Verify `graph` and plan it for devices by name (``"cpu:0,cpu:1"`` or a list).

    `split_mode` is ``none`` (the first device alone), ``layer`` (consecutive nodes on each device), ``tensor`` (cut
    wherever kernels get shorter) or ``auto`` (cut where the predicted time falls).  `tensor_split` gives the devices'
    shares in any unit.  `like` is a plan over the same weights and states whose layout is kept.  Raises `GraphError`,
    `PlanError` or `BackendError`.
    """
    names = devices.split(",") if isinstance(devices, str) else devices
    return plan_for(graph, [find(n) for n in names], split_mode=split_mode, tensor_split=tensor_split, like=like)


def plan_for(
    graph: Graph,
    group: Group,
    *,
    split_mode: str = "auto",
    tensor_split: Sequence[float] = (),
    like: Plan | None = None,
    hardware: Hardware = CPU,
    choose: Chooser | None = None,
) -> Plan:
    """`plan` for backends and devices that are already at hand; `choose` takes the place of the search."""
    if split_mode not in SPLIT_MODES:
        raise PlanError(f"split mode is {split_mode!r}; one of {', '.join(SPLIT_MODES)}")
    if len({str(device) for _, device in group}) < len(group) or not group:
        raise PlanError(f"devices {', '.join(str(d) for _, d in group) or 'none'}: name each once, and at least one")
    if split_mode == "none":
        group = group[:1]
    from .verify import verify_plan  # it reads plans

    verify(graph)
    if strange := [n for n in graph.nodes if n.op in COLLECTIVES]:
        raise PlanError(f"{strange[0]!r}: collectives are put in by the planner; leave them out of the graph")
    made = _answer(
        _Request(graph, tuple(group), _proportions(tensor_split, len(group)), hardware), split_mode, like, choose
    )
    verify_plan(made)
    return made


def _answer(request: _Request, split_mode: str, like: Plan | None, choose: Chooser | None) -> Plan:
    if like is not None:
        return request.like(like)
    if split_mode == "layer":
        return request.layers()
    if len(request.group) == 1:
        return request.whole()
    if choose is not None:
        return request.given(choose(request.graph, request.factors), "chosen by the caller")
    return request.cheapest() if split_mode == "auto" else request.shards()


class _Request:
    """One call of `plan_for`, checked: the ways to answer it."""

    def __init__(self, graph: Graph, group: Group, proportions: Sequence[float], hardware: Hardware) -> None:
        self.graph, self.group, self.proportions, self.hardware = graph, group, proportions, hardware

    @cached_property
    def factors(self) -> Factors:
        return Factors(self.graph)

    def like(self, earlier: Plan) -> Plan:
        """Over weights and states that lie on the devices already."""
        if any(isinstance(layout, Local) for layout in earlier.leaves.values()):
            return self._placed(placed_like(self.graph, earlier.leaves))
        if len(self.group) == 1:
            return self.whole("an earlier plan's layout")
        return self.given(factors_at(self.graph, self.factors, earlier.cuts), "an earlier plan's layout")

    def whole(self, *reasons: str) -> Plan:
        """One device does all: there is nothing to find out about axes, which for a large graph takes most of the
        time."""
        leaves = {n.name: REPLICATE for n in self.graph.nodes if n.is_leaf}
        sharded = Sharded((self.graph,), leaves, dict.fromkeys(self.graph.outputs, REPLICATE))
        return self._plan(sharded, frozenset(), reasons)

    def layers(self) -> Plan:
        return self._placed(layer_split(self.graph, self.proportions))

    def _placed(self, placement: Placement) -> Plan:
        return self._plan(place(self.graph, placement, len(self.group)), frozenset(), ())

    def given(self, chosen: frozenset[Factor], why: str) -> Plan:
        return self._cut(Choice(chosen, assign(self.graph, self.factors, chosen), (why,)))

    def shards(self) -> Plan:
        """Cut wherever kernels get shorter."""
        return self._cut(search(self.graph, self.factors, len(self.group), self.hardware, eager=True))

    def cheapest(self) -> Plan:
        """The fastest plan that fits into memory; if none does, the one that lacks least."""
        choice = search(self.graph, self.factors, len(self.group), self.hardware)
        best = self._cut(choice)
        # The search does not see every copy that kernels need.
        if best.cuts and best.cost.total > choice.alone and best.cost.total > self._alone():
            alone = self.given(frozenset(), "whole on each device: no cut is faster")
            best = min(best, alone, key=lambda p: (shortage(p) > 0, p.cost.total))
        if not shortage(best):
            return best
        return min((best, self.shards(), self.layers()), key=shortage)

    def _alone(self) -> float:
        """The predicted time of one device, which is also that of many that all do the same."""
        one = _Request(self.graph, self.group[:1], [1.0], self.hardware)
        one.factors = self.factors
        return one.given(frozenset(), "").cost.total

    def _cut(self, choice: Choice) -> Plan:
        cuts = cuts_of(self.graph, self.factors, choice.factors)
        shares = _deal(self.graph, self.factors, cuts, self.proportions)
        sharded = shard(self.graph, self.factors, choice.assignment, shares)
        return self._plan(sharded, cuts, choice.considered)

    def _plan(self, sharded: Sharded, cuts: Cuts, reasons: tuple[str, ...]) -> Plan:
        lanes = _lanes(sharded, self.group)
        return Plan(self.graph, lanes, sharded.leaves, sharded.outputs, cuts, reasons, self.hardware)


def _lanes(sharded: Sharded, group: Group) -> tuple[Lane, ...]:
    """The lane of each device; equal graphs on devices of one kind are lowered once."""
    known: dict[tuple[object, ...], Lane] = {}
    found = []
    for graph, (backend, device) in zip(sharded.graphs, group, strict=True):
        key = (type(backend), backend.name, device.kind, graph.digest() if len(group) > 1 else "")
        if key in known:
            check_support(graph, backend, device)
            twin = known[key]
            found.append(Lane(device, backend, twin.graph, replace(twin.program, device=str(device))))
        else:
            lowered, program = lower(graph, backend, device)
            found.append(known.setdefault(key, Lane(device, backend, lowered, program)))
    return tuple(found)


def _proportions(tensor_split: Sequence[float], devices: int) -> Sequence[float]:
    if not tensor_split:
        return [1.0] * devices
    if len(tensor_split) > devices or any(s < 0 for s in tensor_split) or not sum(tensor_split):
        shown = ",".join(f"{s:g}" for s in tensor_split)
        raise PlanError(f"tensor split {shown}: need at most {devices} shares, none negative, one above zero")
    return [*tensor_split, *[0.0] * (devices - len(tensor_split))]


def _deal(graph: Graph, factors: Factors, cuts: Cuts, proportions: Sequence[float]) -> Shares:
    """Shares of all factors that are cut, dealt in the order of their leaves, so that related plans agree."""
    shares = Shares(proportions)
    for cut in sorted(cuts, key=_natural):
        (factor,) = factors_at(graph, factors, frozenset([cut]))
        shares.of(factor)
    return shares


def _natural(cut: tuple[str, int, int, int]) -> tuple[object, ...]:
    """Sort key in which layer 9 comes before layer 10."""
    name = tuple((part.isdecimal(), int(part) if part.isdecimal() else part) for part in cut[0].split("."))
    return (tuple((flag, str(value).zfill(12)) for flag, value in name), *cut[1:])
