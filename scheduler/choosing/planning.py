"""One call of the planner, for some devices: the ways to answer it, each a plan that is not proven yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ...backends.abilities import can_group_overlap
from ...backends.base import DeviceName
from ...graph.errors import GraphError, PlanError
from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...graph.repeated_runs import RepeatedRuns, find_repeated_runs
from ..layout import REPLICATE, Layout, Local
from ..lowering.lane import Devices, lanes_of
from ..machines.hardware import Hardware
from ..plan import HostOffload, Plan, ShardedFactors
from ..sharding.axes import Factor
from ..sharding.chunks import CHUNK_COUNTS, SINGLE_CHUNK, OverlapChunks, find_token_factor, partition_in_chunks
from ..sharding.emit import PartitionedGraphs, partition_graph
from ..sharding.factors import Factors
from ..sharding.layers import (
    NO_FIXED_VALUES,
    Placement,
    compute_balanced_proportions,
    placement_from_layouts,
    split_layers,
)
from ..sharding.layers import emit_placed_graphs as place_nodes
from ..sharding.pins import (
    NO_PINS,
    Pin,
    Pins,
    PlacementRules,
    extend_pins,
    find_unsupported,
    find_user_pins,
    list_pinned_nodes,
    pin_discrete_choices,
    pin_earlier_layouts,
    pin_leaves,
    pins_from_layouts,
    relocate_unsupported,
)
from ..sharding.rows import MIN_GAIN, SequenceParallelOptions
from ..sharding.search import (
    NO_LEAF_LAYOUTS,
    FactorChoice,
    FactorSearch,
    assign_shard_ranges,
    describe_all_factors,
    describe_factors,
    factors_from_description,
)
from ..sharding.teams import (
    HybridGraphs,
    StageGroups,
    find_groups_of_programs,
    partition_hybrid,
    split_into_groups,
    stages_from_layouts,
)
from ..spelling import decompose_unsupported
from .branches import BranchSchedule
from .fits import by_memory, shortage, spilled
from .repeating import Repeated, repeated
from .uses import Use

Chooser = Callable[[Graph, Factors], frozenset[Factor]]


class Planning:
    """One call of `plan_for`, checked: the ways to answer it."""

    def __init__(
        self,
        graph: Graph,
        group: Devices,
        shares: Sequence[float],
        hardware: Hardware,
        place: PlacementRules = (),
        earlier: Plan | None = None,
        use: Use | None = None,
    ) -> None:
        self.graph, self.group, self.hardware, self.use = graph, group, hardware, use
        self.place = [(pattern, str(DeviceName.parse(device))) for pattern, device in place]
        self.shares = shares or (() if earlier is None else earlier.shares)
        self.lies = NO_LEAF_LAYOUTS if earlier is None else earlier.leaves
        self.proportions = self.shares or [1.0] * len(group)
        self.names = [str(device) for _, device in group]
        self.wished = find_user_pins(graph, self.place, self.names, strict=earlier is None)

        self.doubt: tuple[str, ...] = ()  # why runs are not repeated

    def made(self, mode: Mode, like: Plan | None, choose: Chooser | None, host: HostOffload | None) -> Plan:
        """The plan, not yet proven."""
        made = self.answer(mode, like, choose)
        if host is not None and like is None and mode is not Planning.shards and shortage(made):
            made = self.with_host(host, alone=mode is Planning.alone) or made
        taken = {str(lane.device) for lane in made.lanes}
        return replace(made, spare=tuple(name for name in self.names if name not in taken))

    @cached_property
    def search(self) -> FactorSearch:
        return FactorSearch(self.graph, Factors(self.graph))

    @cached_property
    def repeats(self) -> RepeatedRuns | None:
        return find_repeated_runs(self.graph)

    @property
    def factors(self) -> Factors:
        return self.search.factors

    def answer(self, mode: Mode, like: Plan | None, choose: Chooser | None) -> Plan:
        """The plan in `mode`, unless an earlier plan, a lack of choice or the caller decides."""
        if like is not None:
            return self.like(like)
        if len(self.group) == 1 and not self.place:
            return self.whole()
        if choose is not None:
            chosen, why = choose(self.graph, self.factors), "chosen by the caller"
            if mode is Planning.staged:
                return self.in_teams(split_into_groups(self.machine, len(self.group)), FactorChoice(chosen, (why,)))
            return self.given(chosen, why)
        return mode(self)

    def like(self, earlier: Plan) -> Plan:
        """Over weights and states that lie on the devices already."""
        if (teams := find_groups_of_programs([lane.program for lane in earlier.lanes])) is not None:
            where = stages_from_layouts(self.graph, earlier.leaves, teams)
            return self._composed(where, teams, earlier.cuts, ("an earlier plan's layout",), earlier.leaves)
        held = pins_from_layouts(self.graph, earlier.leaves)
        stored = [earlier.leaves[v.node.name] for v in (*earlier.graph.weights, *earlier.graph.states)]
        if stored and all(isinstance(layout, Local) for layout in stored):
            where = placement_from_layouts(self.graph, earlier.leaves)
            base = {n: Pin(d, "its weights lie there, or what it reads is made there") for n, d in where.items()}
            return self._placed(base, {v: lies for v, lies in held.leaves.items() if isinstance(lies, Local)})
        if len(self.group) == 1 and not self.place and not held.leaves:
            return self.whole("an earlier plan's layout")
        chosen = factors_from_description(self.graph, self.factors, earlier.cuts)
        if self.graph.digest() != earlier.graph.digest():  # what stands at a place may be another factor
            chosen = frozenset(f for f in chosen if f.can_be_sharded)
        choice = FactorChoice(chosen, ("an earlier plan's layout",))
        if (short := self._once(choice, earlier.leaves)) is not None:
            return short
        while True:
            try:
                plan = self.cut(choice, held)
            except GraphError as why:
                raise PlanError(
                    "this graph reads a weight in other pieces than an earlier plan has cut it, which cannot be put "
                    f"together: {why}; make one plan for both, or load the weights anew"
                ) from None
            before, held = held, pin_earlier_layouts(held, self.graph, plan.leaves, earlier.leaves)
            if held == before:
                return plan

    def alone(self) -> Plan:
        """All on the first device, but for what must run elsewhere; devices without work are left out.  While one
        works, the others of the group wait."""
        hardware = self.hardware if len(self.group) == 1 else self.hardware.alone
        first = Planning(self.graph, self.group[:1], (), hardware)
        first.doubt, first.repeats = self.doubt, self.repeats
        if not self.wished and not find_unsupported([self.graph], [{}], self.group[:1]):
            return first.whole()
        base = {
            n: Pin(0, f"split mode none: {self.group[0][1]} comes first") for n in self.graph.nodes if not n.is_leaf
        }
        return self._placed(base, trim=True)

    def whole(self, *reasons: str) -> Plan:
        """One device does all: there is nothing to find out about axes, which for a large graph takes most of the
        time."""
        if (
            not self.doubt
            and (short := repeated(self.graph, self.repeats, self.group, frozenset(), (1.0,), self.hardware))
            is not None
        ):
            return Plan(self.graph, short.lanes, short.leaves, short.outputs, frozenset(), reasons, self.hardware)
        leaves = {n.name: REPLICATE for n in self.graph.nodes if n.is_leaf}
        same = {node: node for node in self.graph.nodes}
        sharded = PartitionedGraphs((self.graph,), (same,), leaves, dict.fromkeys(self.graph.outputs, REPLICATE))
        return self._plan(self._able(sharded), frozenset(), reasons, {})

    def layers(self) -> Plan:
        """Consecutive nodes on each device, by the shares asked for or by the memory of the devices; where that is
        equal and there is a use, so that they take equally long for it."""
        memory = [device.memory for _, device in self.group]
        if self.use is not None and not self.shares and len(set(memory)) == 1:
            return self._layers(compute_balanced_proportions(self.use.evened, len(memory)))
        return self._layers(self.shares or by_memory([device for _, device in self.group]))

    def _layers(self, shares: Sequence[float], *, trim: bool = False, last: str = "") -> Plan:
        """Consecutive nodes on each device by their shares; `last` is why the last device takes part."""
        where = split_layers(self.graph, shares, self.wished)
        because = [f"layer split, with {share / sum(shares):.0%} of the weights and states" for share in shares]
        because[-1] = last or because[-1]
        return self._placed({n: Pin(d, because[d]) for n, d in where.items()}, trim=trim)

    def place_branches(self, schedule: BranchSchedule) -> Plan:
        """Build the plan of independent branches on different devices."""
        pins = {node: Pin(device, "it is in a branch of its own") for node, device in schedule.placement.items()}
        return self._placed(pins, trim=True, order=schedule.order)

    def with_host(self, host: HostOffload, *, alone: bool) -> Plan | None:
        """A layer split in which one more device, the host, takes what does not fit on the others."""
        if str(host.device) in {str(device) for _, device in self.group}:
            return None
        wider = Planning(self.graph, (*self.group, (host.backend, host.device)), (), self.hardware, self.place)
        shares = self.shares or by_memory([device for _, device in self.group])
        if alone:
            shares = [1.0] + [0.0] * (len(self.group) - 1)
        why = f"weights that do not fit stay on {host.device}"

        def plan_with(share: float) -> Plan:
            rest = [(1 - share) * s / sum(shares) for s in shares]
            made = wider._layers([*rest, share], trim=alone, last=why)
            return replace(made, host=host.hardware) if made.lanes[-1].device == host.device else made

        first = self._layers(shares, trim=alone)
        total = sum(first.memory()[kind] for kind in ("weight", "state"))
        return spilled(shortage(first) / max(total, 1), plan_with) if shortage(first) else first

    def _placed(
        self,
        base: Mapping[Node, Pin],
        held: Mapping[Value, Local] = NO_FIXED_VALUES,
        *,
        trim: bool = False,
        order: Sequence[Node] = (),
    ) -> Plan:
        """Whole nodes on devices: `base`, but for pins; with `trim` only devices that have work.  They start in
        `order`, if it is given."""

        def build(pins: Mapping[Node, Pin]) -> tuple[Mapping[Node, Pin], PartitionedGraphs]:
            where = {**base, **pins}
            placement = {n: p.device for n, p in where.items()}
            return where, place_nodes(self.graph, placement, len(self.group), held, order)

        where, sharded = self._built(self.wished, build)
        if not trim:
            return self._plan(sharded, frozenset(), (), where)
        kept = {device for _, device in self.place}
        used = sorted({0, *(p.device for p in where.values()), *(i for i, n in enumerate(self.names) if n in kept)})
        few = Planning(self.graph, tuple(self.group[d] for d in used), (), self.hardware)
        where = {n: replace(p, device=used.index(p.device)) for n, p in where.items()}
        placed = place_nodes(self.graph, {n: p.device for n, p in where.items()}, len(used), order=order)
        return few._plan(placed, frozenset(), (), where)

    def given(self, chosen: frozenset[Factor], why: str) -> Plan:
        """The plan in which these factors are cut, each where it can be; `why` is what explain shows."""
        return self.cut(FactorChoice(chosen, (why,)))

    def shards(self) -> Plan:
        """Cut wherever kernels get shorter."""
        return self.cut(self.search.choose_factors(len(self.group), self.hardware, eager=True))

    def staged(self) -> Plan:
        """Consecutive nodes on each team of devices, cut among the team wherever kernels get shorter."""
        teams = split_into_groups(self.machine, len(self.group))
        return self.in_teams(teams, self.search.choose_factors(len(teams[0]), self.hardware, eager=True))

    @property
    def machine(self) -> int:
        """How many devices each machine has; 0 where all are in one, or nobody knows."""
        ranks = [device.rank for _, device in self.group]
        counts = {ranks.count(rank) for rank in ranks}
        return self.hardware.machine or (counts.pop() if len(counts) == 1 and len(set(ranks)) > 1 else 0)

    def in_teams(self, teams: StageGroups, choice: FactorChoice) -> Plan:
        """Consecutive nodes on each team, cut among it as chosen."""
        if self.wished or pin_discrete_choices(self.graph, self.group):
            raise PlanError(
                "split mode layer,tensor places no single nodes and mixes no backends; "
                "leave --place out and name devices of one kind, or use layer or tensor"
            )
        held = self.shares or by_memory([device for _, device in self.group])
        where = split_layers(self.graph, [sum(held[d] for d in team) for team in teams])
        cuts = describe_all_factors(self.graph, self.factors, choice.factors)
        shown = [", ".join(self.names[d] for d in (team[0], team[-1])) for team in teams]
        notes = [f"stage {s} of the layers is on {name}" for s, name in enumerate(shown)]
        plan = self._composed(where, teams, cuts, (*choice.alternatives, *notes))
        if find_groups_of_programs([lane.program for lane in plan.lanes]) is None:
            raise PlanError("split mode layer,tensor finds nothing to cut within a stage; use layer")
        return plan

    def _composed(
        self,
        where: Placement,
        teams: StageGroups,
        cuts: ShardedFactors,
        why: tuple[str, ...],
        earlier: Mapping[str, Layout] | None = None,
    ) -> Plan:
        """The nodes in stages, each cut among its team."""

        def composed(chunks: OverlapChunks = SINGLE_CHUNK) -> HybridGraphs:
            return partition_hybrid(self.graph, where, teams, cuts, self.proportions, self.hardware, earlier, chunks)

        def chunked(chunks: OverlapChunks, note: str) -> Plan | None:
            made = composed(chunks)
            if not made.has_chunks or find_unsupported(
                made.partitioned_graphs.graphs, made.partitioned_graphs.source_nodes, self.group
            ):
                return None
            return self._plan(made.partitioned_graphs, made.sharded_factors, (*why, note), {})

        first = composed()
        plan = self._plan(self._able(first.partitioned_graphs), first.sharded_factors, why, {})
        return _in_chunks(plan, chunked) if first.has_chunks and can_group_overlap(self.group) else plan

    def first(self, devices: int) -> Planning:
        """The same for the first devices of the group."""
        if devices == len(self.group):
            return self
        few = Planning(self.graph, self.group[:devices], (), self.hardware, use=self.use)
        few.search, few.doubt, few.repeats = self.search, self.doubt, self.repeats
        return few

    def over(self, plan: Plan, graph: Graph) -> Plan:
        """The plan of a graph over weights and states as they lie in one of these devices; it is not proven."""
        if graph is self.graph:
            return plan
        return Planning(decompose_unsupported(graph, self.group), plan.group, (), plan.hardware, self.place, plan).like(
            plan
        )

    def cut(self, choice: FactorChoice, held: Pins | None = None) -> Plan:
        """What is chosen is cut, but for what is placed or `held`."""
        first = {**pin_discrete_choices(self.graph, self.group), **({} if held is None else held.nodes), **self.wished}
        if held is None and (short := self._once(choice)) is not None:
            return short
        asked = describe_factors(self.graph, self.factors, choice.factors, {})
        shares = assign_shard_ranges(self.graph, self.factors, asked, self.proportions, self.lies)

        def laying(nodes: Mapping[Node, Pin]) -> SequenceParallelOptions:
            pins = pin_leaves(self.graph, nodes) if held is None else Pins(nodes, held.leaves)
            given = pins if nodes or pins.leaves else NO_PINS
            return SequenceParallelOptions(
                self.graph, self.factors, choice.factors, given, len(self.group), self.hardware
            )

        def build(nodes: Mapping[Node, Pin]) -> tuple[Mapping[Node, Pin], PartitionedGraphs]:
            return nodes, partition_graph(self.graph, self.factors, laying(nodes).choose_fastest(), shares)

        where, sharded = self._built(first, build)

        def plan(sharded: PartitionedGraphs, *notes: str) -> Plan:
            cuts = describe_factors(self.graph, self.factors, choice.factors, sharded.leaves)
            note = ("what is placed on one device was left aside in choosing cuts",) if where and cuts else ()
            return self._plan(sharded, cuts, (*choice.alternatives, *note, *self.doubt, *notes), where)

        made = plan(sharded)
        if not can_group_overlap(self.group):
            return made
        of = laying(where)
        if (tokens := find_token_factor(of.replicated_assignment, self.factors)) is None:
            return made

        def chunked(chunks: OverlapChunks, note: str) -> Plan | None:
            laid = (
                of.replicated_assignment
                if chunks.required_saving_seconds is None
                else of.shard_if_saving(tokens, chunks.required_saving_seconds)
            )
            if laid is None:
                return None
            graphs = partition_in_chunks(self.graph, self.factors, laid, shares, tokens, chunks.chunk_count)
            return (
                None
                if graphs is None or find_unsupported(graphs.graphs, graphs.source_nodes, self.group)
                else plan(graphs, note)
            )

        return _in_chunks(made, chunked)

    def _once(self, choice: FactorChoice, lies: Mapping[str, Layout] | None = None) -> Plan | None:
        """The plan in which layers that are alike are planned once, if nothing is in the way."""
        if self.wished or self.doubt or pin_discrete_choices(self.graph, self.group):
            return None
        every = describe_all_factors(self.graph, self.factors, choice.factors)
        made = repeated(self.graph, self.repeats, self.group, every, self.proportions, self.hardware, lies)
        if made is None:
            return None
        cuts, shares = describe_factors(self.graph, self.factors, choice.factors, made.leaves), tuple(self.shares)

        def plan(of: Repeated, *notes: str) -> Plan:
            why = *choice.alternatives, *notes
            return Plan(self.graph, of.lanes, of.leaves, of.outputs, cuts, why, self.hardware, shares=shares)

        first, in_chunks = plan(made), made.in_chunks
        if in_chunks is None:
            return first
        return _in_chunks(first, lambda chunks, note: None if (of := in_chunks(chunks)) is None else plan(of, note))

    def _built(
        self,
        pins: Mapping[Node, Pin],
        build: Callable[[Mapping[Node, Pin]], tuple[Mapping[Node, Pin], PartitionedGraphs]],
    ) -> tuple[Mapping[Node, Pin], PartitionedGraphs]:
        """What `build` makes of the pins, more of which are added until every device can run what it is given."""
        pins = dict(pins)
        while True:
            where, sharded = build(extend_pins(self.graph, pins))
            if not (found := find_unsupported(sharded.graphs, sharded.source_nodes, self.group)):
                return where, sharded
            pins.update(relocate_unsupported(found, where, self.group))

    def _able(self, sharded: PartitionedGraphs) -> PartitionedGraphs:
        """The same.  Raises `PlanError` naming the first node that its device cannot run."""
        for found in find_unsupported(sharded.graphs, sharded.source_nodes, self.group):
            raise PlanError(f"{found.local_node!r} cannot run on {self.names[found.device]}: {found.reason}")
        return sharded

    def _plan(
        self, sharded: PartitionedGraphs, cuts: ShardedFactors, reasons: tuple[str, ...], where: Mapping[Node, Pin]
    ) -> Plan:
        lanes = lanes_of(sharded.graphs, self.group)
        placed = list_pinned_nodes(self.graph, where)
        shares = tuple(self.shares)
        return Plan(
            self.graph, lanes, sharded.leaves, sharded.outputs, cuts, reasons, self.hardware, placed, shares=shares
        )


def _in_chunks(made: Plan, chunked: Callable[[OverlapChunks, str], Plan | None]) -> Plan:
    """`made`, or one of the plans in which sums over devices are taken in chunks of tokens, if one costs less by more
    than predictions are good for; in more chunks, as long as enough is left to be hidden.  ``chunked(chunks, note)`` is
    such a plan, if there is one.

    Where chunks are dealt, of each sum the reduce-scatter of the last one and the all-gather of the first have nothing
    beside them: dealing has to save more than that takes.
    """
    best, least = made, made.cost.total * (1 - MIN_GAIN)
    enough, waiting = made.cost.total - least, made.cost.collectives - made.cost.hidden
    for count in CHUNK_COUNTS:
        if (
            waiting < enough
            or (one := chunked(OverlapChunks(count), note := f"tokens go in {count} chunks from sum to sum")) is None
        ):
            break
        waiting = one.cost.collectives - one.cost.hidden
        if one.cost.total < least:
            best, least = one, one.cost.total
        saving = max(0.0, one.cost.total - waiting + one.cost.collectives / count - least)
        if (dealt := chunked(OverlapChunks(count, saving), f"{note}, each dealt to the devices")) is None:
            continue
        if dealt.cost.total < least:
            best, least = dealt, dealt.cost.total
    return best


Mode = Callable[[Planning], Plan]
"""A way to answer a planning for several devices."""
