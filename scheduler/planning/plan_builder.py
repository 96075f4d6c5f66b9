"""The builder of plans for one request of the planner; the plans are not verified yet.

Each split mode is a function of a `PlanBuilder`. Methods for tensor parallelism start from a factor choice, methods for
a layer split from a placement of nodes on devices. Both add pins until every device supports its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...backends.capabilities import can_group_overlap
from ...graph.errors import GraphError, PlanError
from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...graph.old_names import make_module_getattr
from ..ir.execution_plan import HostOffload, Plan, ShardedFactors
from ..ir.layout import REPLICATE, Layout, Local
from ..sharding.axes import Factor
from ..sharding.factors import Factors
from ..sharding.hybrid_split import (
    HybridGraphs,
    StageGroups,
    find_pipeline_stage_groups,
    partition_hybrid,
    split_devices_into_groups,
    stages_from_layouts,
)
from ..sharding.layer_split import (
    NO_FIXED_VALUES,
    Placement,
    compute_balanced_proportions,
    place_nodes_where_leaves_are_stored,
    split_layers,
)
from ..sharding.layer_split import emit_placed_graphs as place_nodes
from ..sharding.overlap_chunks import SINGLE_CHUNK, OverlapChunkOptions
from ..sharding.partitioner import PartitionedGraphs
from ..sharding.pins import (
    Pin,
    find_unsupported_nodes,
    pin_discrete_choices_if_backends_differ,
    pin_earlier_layouts_of_changed_leaves,
    pin_readers_to_devices_of_leaves,
)
from ..sharding.search.greedy_search import FactorChoice, factors_from_positions, list_leaf_positions_of_factors
from .branches import BranchSchedule
from .decompose import decompose_unsupported_ops
from .memory_fit import choose_smallest_fitting_host_offload, compute_memory_proportions, compute_missing_bytes
from .repeated_layers import plan_repeated_layers
from .sharded_plan import ShardedPlanBuilder, choose_plan_with_or_without_overlap_chunks

FactorChooser = Callable[[Graph, Factors], frozenset[Factor]]
"""Return the factors to shard, chosen by the caller."""


class PlanBuilder(ShardedPlanBuilder):
    """The methods that build a plan in each split mode, for one checked request of `plan_for_group`.

    Each `build_...` method without arguments builds the plan of one split mode.
    """

    def build_unverified_with_host_fallback(
        self,
        mode: SplitModeBuilder,
        earlier_plan: Plan | None,
        choose_factors: FactorChooser | None,
        host: HostOffload | None,
    ) -> Plan:
        """Build the unverified plan of the request; use host memory if the plan does not fit and a host is given.

        Args:
            mode: Builds the plan of the split mode.
            earlier_plan: An earlier plan; its layout is kept.
            choose_factors: Chooses the factors to shard instead of the search.
            host: The host device for weights and states that do not fit.
        """
        plan = self.build_by_mode_layout_or_factors(mode, earlier_plan, choose_factors)
        if (
            host is not None
            and earlier_plan is None
            and mode is not PlanBuilder.build_tensor_parallel
            and compute_missing_bytes(plan)
        ):
            plan = (
                self.build_layer_split_with_host(
                    host, uses_single_device=mode is PlanBuilder.build_mainly_on_first_device
                )
                or plan
            )
        taken = {str(device_plan.device) for device_plan in plan.device_plans}
        return replace(plan, unused_devices=tuple(name for name in self.device_names if name not in taken))

    def build_by_mode_layout_or_factors(
        self, mode: SplitModeBuilder, earlier_plan: Plan | None, choose_factors: FactorChooser | None
    ) -> Plan:
        """Build the plan for a split mode, unless one of three conditions selects another method.

        1. With `earlier_plan`, the plan gets the layout of the earlier plan.
        2. With one device and no placement rules, the plan is built without a split.
        3. With `choose_factors`, the plan shards the factors that this function of the caller returns.
        """
        if earlier_plan is not None:
            return self.build_with_fixed_layout(earlier_plan)
        if len(self.group) == 1 and not self.placement_rules:
            return self.build_for_single_device()
        if choose_factors is not None:
            chosen, why = choose_factors(self.graph, self.factors), "chosen by the caller"
            if mode is PlanBuilder.build_hybrid:
                return self.build_hybrid_over_groups(
                    split_devices_into_groups(self.devices_per_machine, len(self.group)), FactorChoice(chosen, (why,))
                )
            return self.build_with_factors(chosen, why)
        return mode(self)

    def build_with_fixed_layout(self, earlier_plan: Plan) -> Plan:
        """Build the plan in which weights and states have the layouts of an earlier plan.

        Raises:
            PlanError: The graph reads a weight in parts that the layouts of the earlier plan cannot give.
        """
        if (
            groups := find_pipeline_stage_groups([device_plan.program for device_plan in earlier_plan.device_plans])
        ) is not None:
            where = stages_from_layouts(self.graph, earlier_plan.leaves, groups)
            return self._build_hybrid_stages(
                where, groups, earlier_plan.sharded_factors, ("an earlier plan's layout",), earlier_plan.leaves
            )
        fixed_pins = pin_readers_to_devices_of_leaves(self.graph, earlier_plan.leaves)
        stored = [earlier_plan.leaves[v.node.name] for v in (*earlier_plan.graph.weights, *earlier_plan.graph.states)]
        if stored and all(isinstance(layout, Local) for layout in stored):
            where = place_nodes_where_leaves_are_stored(self.graph, earlier_plan.leaves)
            base = {n: Pin(d, "its weights or its operands are on this device") for n, d in where.items()}
            return self._build_with_pinned_nodes(
                base, {v: layout for v, layout in fixed_pins.leaves.items() if isinstance(layout, Local)}
            )
        if len(self.group) == 1 and not self.placement_rules and not fixed_pins.leaves:
            return self.build_for_single_device("an earlier plan's layout")
        chosen = factors_from_positions(self.graph, self.factors, earlier_plan.sharded_factors)
        if self.graph.digest() != earlier_plan.graph.digest():  # the same position may have another factor
            chosen = frozenset(f for f in chosen if f.can_be_sharded)
        choice = FactorChoice(chosen, ("an earlier plan's layout",))
        if (short := self._build_from_shortened_graph(choice, earlier_plan.leaves)) is not None:
            return short
        while True:
            try:
                plan = self.build_sharded(choice, fixed_pins)
            except GraphError as why:
                raise PlanError(
                    "this graph reads a weight in other pieces than an earlier plan has cut it, which cannot be put "
                    f"together: {why}; make one plan for both, or load the weights anew"
                ) from None
            before, fixed_pins = (
                fixed_pins,
                pin_earlier_layouts_of_changed_leaves(fixed_pins, self.graph, plan.leaves, earlier_plan.leaves),
            )
            if fixed_pins == before:
                return plan

    def build_mainly_on_first_device(self) -> Plan:
        """Build the plan of split mode ``none``: the first device computes all nodes that do not have to run elsewhere.

        A node must run elsewhere if a placement rule says so, or if the first device does not support it. Devices
        without work are left out.
        """
        lone = None if self.workload is None else self.workload.lone_hardware
        hardware = self.hardware if len(self.group) == 1 else lone or self.hardware.solo_hardware
        first = PlanBuilder(self.graph, self.group[:1], (), hardware)
        first.unrepeated_reasons, first.repeated_layers = self.unrepeated_reasons, self.repeated_layers
        if not self.user_pins and not find_unsupported_nodes([self.graph], [{}], self.group[:1]):
            return first.build_for_single_device()
        base = {
            n: Pin(0, f"split mode none: {self.group[0][1]} comes first") for n in self.graph.nodes if not n.is_leaf
        }
        return self._build_with_pinned_nodes(base, omits_idle_devices=True)

    def build_for_single_device(self, *reasons: str) -> Plan:
        """Build the plan for the only device of the group.

        The search for sharded factors (axes that one split cuts together) is left out: one device shards nothing.

        Args:
            reasons: The reasons of the plan, as text for `explain`.
        """
        if (
            not self.unrepeated_reasons
            and (
                short := plan_repeated_layers(
                    self.graph, self.repeated_layers, self.group, frozenset(), (1.0,), self.hardware
                )
            )
            is not None
        ):
            return Plan(
                self.graph,
                short.device_plans,
                short.leaf_layouts,
                short.output_layouts,
                frozenset(),
                reasons,
                self.hardware,
            )
        leaves = {n.name: REPLICATE for n in self.graph.nodes if n.is_leaf}
        same = {node: node for node in self.graph.nodes}
        sharded = PartitionedGraphs((self.graph,), (same,), leaves, dict.fromkeys(self.graph.outputs, REPLICATE))
        return self._assemble_plan(self._raise_if_nodes_unsupported(sharded), frozenset(), reasons, {})

    def build_layer_split(self) -> Plan:
        """Build the layer split: each device gets consecutive layers.

        The layers of a device are in proportion to the tensor split or its memory. If a workload is given, all memories
        are equal and there is no tensor split, the stages are balanced: they take equal time for this workload.
        """
        memory = [device.memory for _, device in self.group]
        if self.workload is not None and not self.tensor_split and len(set(memory)) == 1:
            return self._build_layer_split_by_proportions(
                compute_balanced_proportions(self.workload.graph_for_stage_balance, len(memory))
            )
        return self._build_layer_split_by_proportions(
            self.tensor_split or compute_memory_proportions([device for _, device in self.group])
        )

    def _build_layer_split_by_proportions(
        self, proportions: Sequence[float], *, omits_idle_devices: bool = False, last_device_reason: str = ""
    ) -> Plan:
        """Build the layer split in which each device stores the given proportion of the weights and states.

        Args:
            proportions: The proportion of each device.
            omits_idle_devices: Whether devices without work are left out.
            last_device_reason: The reason that `explain` gives for the nodes of the last device.
        """
        where = split_layers(self.graph, proportions, self.user_pins)
        because = [
            f"layer split; target: {share / sum(proportions):.0%} of the weights and states" for share in proportions
        ]
        because[-1] = last_device_reason or because[-1]
        return self._build_with_pinned_nodes(
            {n: Pin(d, because[d]) for n, d in where.items()}, omits_idle_devices=omits_idle_devices
        )

    def build_branch_plan(self, schedule: BranchSchedule) -> Plan:
        """Build the plan of a branch schedule, which runs independent branches of the graph on different devices."""
        pins = {node: Pin(device, "it is in a branch of its own") for node, device in schedule.placement.items()}
        return self._build_with_pinned_nodes(pins, omits_idle_devices=True, order=schedule.order)

    def build_layer_split_with_host(self, host: HostOffload, *, uses_single_device: bool) -> Plan | None:
        """Build a layer split in which the host is one more device, for weights and states that do not fit.

        Returns None if the host is already in the group, or if the plan does not fit even with the host.

        Args:
            host: The host device.
            uses_single_device: Whether only the first device and the host get work.
        """
        if str(host.device) in {str(device) for _, device in self.group}:
            return None
        wider = PlanBuilder(
            self.graph, (*self.group, (host.backend, host.device)), (), self.hardware, self.placement_rules
        )
        shares = self.tensor_split or compute_memory_proportions([device for _, device in self.group])
        if uses_single_device:
            shares = [1.0] + [0.0] * (len(self.group) - 1)
        why = f"weights that do not fit stay on {host.device}"

        def plan_with(share: float) -> Plan:
            rest = [(1 - share) * s / sum(shares) for s in shares]
            plan = wider._build_layer_split_by_proportions(
                [*rest, share], omits_idle_devices=uses_single_device, last_device_reason=why
            )
            return replace(plan, host=host.hardware) if plan.device_plans[-1].device == host.device else plan

        first = self._build_layer_split_by_proportions(shares, omits_idle_devices=uses_single_device)
        total = sum(first.count_memory_bytes_by_kind()[kind] for kind in ("weight", "state"))
        return (
            choose_smallest_fitting_host_offload(compute_missing_bytes(first) / max(total, 1), plan_with)
            if compute_missing_bytes(first)
            else first
        )

    def _build_with_pinned_nodes(
        self,
        base_pins: Mapping[Node, Pin],
        fixed_values: Mapping[Value, Local] = NO_FIXED_VALUES,
        *,
        omits_idle_devices: bool = False,
        order: Sequence[Node] = (),
    ) -> Plan:
        """Build the plan in which each node runs on the device of its pin.

        Pins of the user take precedence. A pin assigns a node to one device.

        Args:
            base_pins: A pin for each node.
            fixed_values: Weights and states with a device from an earlier plan.
            omits_idle_devices: Whether devices without work are left out.
            order: The nodes that compute, in order.
        """

        def build(pins: Mapping[Node, Pin]) -> tuple[Mapping[Node, Pin], PartitionedGraphs]:
            where = {**base_pins, **pins}
            placement = {n: p.device for n, p in where.items()}
            return where, place_nodes(self.graph, placement, len(self.group), fixed_values, order)

        where, sharded = self._pin_nodes_until_supported(self.user_pins, build)
        if not omits_idle_devices:
            return self._assemble_plan(sharded, frozenset(), (), where)
        named_devices = {device for _, device in self.placement_rules}
        used = sorted(
            {
                0,
                *(p.device for p in where.values()),
                *(i for i, n in enumerate(self.device_names) if n in named_devices),
            }
        )
        few = PlanBuilder(self.graph, tuple(self.group[d] for d in used), (), self.hardware)
        where = {n: replace(p, device=used.index(p.device)) for n, p in where.items()}
        placed = place_nodes(self.graph, {n: p.device for n, p in where.items()}, len(used), order=order)
        return few._assemble_plan(placed, frozenset(), (), where)

    def build_with_factors(self, chosen_factors: frozenset[Factor], reason: str) -> Plan:
        """Build the plan that shards the chosen factors wherever this is possible.

        Args:
            chosen_factors: The factors (shardable indices of the graph) to shard.
            reason: The reason of the choice, which `explain` shows.
        """
        return self.build_sharded(FactorChoice(chosen_factors, (reason,)))

    def build_tensor_parallel(self) -> Plan:
        """Build the plan with tensor parallelism: shard each node of the graph over all devices if that saves time."""
        return self.build_sharded(self.factor_search.choose_fastest_factors(len(self.group), self.hardware, eager=True))

    def build_hybrid(self) -> Plan:
        """Build the hybrid split: consecutive layers on each device group, with tensor parallelism inside the group."""
        groups = split_devices_into_groups(self.devices_per_machine, len(self.group))
        return self.build_hybrid_over_groups(
            groups, self.factor_search.choose_fastest_factors(len(groups[0]), self.hardware, eager=True)
        )

    @property
    def devices_per_machine(self) -> int:
        """The number of devices in each machine; 0 if one machine has all devices or the number is unknown."""
        ranks = [device.rank for _, device in self.group]
        counts = {ranks.count(rank) for rank in ranks}
        return self.hardware.machine or (counts.pop() if len(counts) == 1 and len(set(ranks)) > 1 else 0)

    def build_hybrid_over_groups(self, groups: StageGroups, choice: FactorChoice) -> Plan:
        """Build the hybrid split: one pipeline stage for each device group, with tensor parallelism inside the group.

        Args:
            groups: The devices of each pipeline stage.
            choice: The factors to shard within each group.

        Raises:
            PlanError: Nodes are pinned, backends are mixed, or no factor can be sharded within a stage.
        """
        if self.user_pins or pin_discrete_choices_if_backends_differ(self.graph, self.group):
            raise PlanError(
                "split mode layer,tensor places no single nodes and mixes no backends; "
                "leave place='REGEX=DEVICE' out and name devices of one kind, or use layer or tensor"
            )
        shares = self.tensor_split or compute_memory_proportions([device for _, device in self.group])
        where = split_layers(self.graph, [sum(shares[d] for d in group) for group in groups])
        cuts = list_leaf_positions_of_factors(self.graph, self.factors, choice.factors)
        group_names = [", ".join(self.device_names[d] for d in (group[0], group[-1])) for group in groups]
        notes = [f"stage {s} of the layers is on {name}" for s, name in enumerate(group_names)]
        plan = self._build_hybrid_stages(where, groups, cuts, (*choice.alternatives, *notes))
        if find_pipeline_stage_groups([device_plan.program for device_plan in plan.device_plans]) is None:
            raise PlanError("split mode layer,tensor finds nothing to cut within a stage; use layer")
        return plan

    def _build_hybrid_stages(
        self,
        stage_by_node: Placement,
        groups: StageGroups,
        sharded_factors: ShardedFactors,
        reasons: tuple[str, ...],
        earlier_layouts: Mapping[str, Layout] | None = None,
    ) -> Plan:
        """Build the plan of a graph in pipeline stages, each with tensor parallelism over its device group.

        Args:
            stage_by_node: The stage of each node.
            groups: The devices of each stage.
            sharded_factors: The factors to shard.
            reasons: The reasons of the plan, as text for `explain`.
            earlier_layouts: Layouts of weights and states from an earlier plan.
        """

        def partition_groups(chunks: OverlapChunkOptions = SINGLE_CHUNK) -> HybridGraphs:
            return partition_hybrid(
                self.graph,
                stage_by_node,
                groups,
                sharded_factors,
                self.proportions,
                self.hardware,
                earlier_layouts,
                chunks,
            )

        def build_with_chunks(chunks: OverlapChunkOptions, note: str) -> Plan | None:
            hybrid_graphs = partition_groups(chunks)
            if not hybrid_graphs.has_chunks or find_unsupported_nodes(
                hybrid_graphs.partitioned_graphs.graphs, hybrid_graphs.partitioned_graphs.source_nodes, self.group
            ):
                return None
            return self._assemble_plan(
                hybrid_graphs.partitioned_graphs, hybrid_graphs.sharded_factors, (*reasons, note), {}
            )

        first = partition_groups()
        plan = self._assemble_plan(
            self._raise_if_nodes_unsupported(first.partitioned_graphs), first.sharded_factors, reasons, {}
        )
        return (
            choose_plan_with_or_without_overlap_chunks(plan, build_with_chunks)
            if first.has_chunks and can_group_overlap(self.group)
            else plan
        )

    def with_first_devices(self, device_count: int) -> PlanBuilder:
        """Return the same request with only the first `device_count` devices of the group."""
        if device_count == len(self.group):
            return self
        few = PlanBuilder(self.graph, self.group[:device_count], (), self.hardware, workload=self.workload)
        few.factor_search, few.unrepeated_reasons, few.repeated_layers = (
            self.factor_search,
            self.unrepeated_reasons,
            self.repeated_layers,
        )
        return few

    def build_with_layout_of_other_plan(self, plan: Plan, graph: Graph) -> Plan:
        """Build the unverified plan of `graph` with the weight and state layouts of `plan`, of another graph."""
        if graph is self.graph:
            return plan
        return PlanBuilder(
            decompose_unsupported_ops(graph, self.group), plan.group, (), plan.hardware, self.placement_rules, plan
        ).build_with_fixed_layout(plan)


SplitModeBuilder = Callable[[PlanBuilder], Plan]
"""Build the plan of a split mode for several devices."""


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), Planning="PlanBuilder")
