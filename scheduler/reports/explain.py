"""The report of a plan: cost, memory, and the devices, time and reason of each timeline entry."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ...backends.capabilities import SupportsTransports
from ...graph.attrs import quote_node_name
from ...graph.errors import format_count
from ...graph.graph import assign_names
from ...graph.layer_folding import find_adjacent_repetitions
from ...graph.node import Node, Value
from ...ops import REGISTRY
from ...ops.collectives import find_collective_sequence_number
from ...ops.registry import find_view_base
from ..costs.timeline import COMPUTE, TimelineEntry, count_bytes_of_exchanged_value
from ..ir.execution_plan import Plan
from ..ir.formatting import format_bytes, format_devices, format_seconds, format_table
from ..ir.layout import Local, Shard
from ..lowering.device_plan import DevicePlan
from ..pipelining.stage_times import count_pipeline_stages, estimate_pipeline_speedup, format_stage_count
from .critical_path import find_critical_path
from .pass_dumps import format_node_reference, format_program
from .placement_hints import SingleDevicePlacementHint, suggest_weights_for_single_device
from .weight_balance import find_weight_imbalance


def explain_plan(plan: Plan, *, steps: bool = False) -> str:
    """Return a text report about a plan: summary, reasons, memory, weight balance and timeline.

    Args:
        plan: The plan.
        steps: Whether the report also lists the instructions of each device.
    """
    lines = [format_summary(plan), *(f"  {reason}" for reason in format_decision_lines(plan))]
    lines += ["", *format_memory_table(plan), ""]
    if uneven := find_weight_imbalance(plan):
        lines += [*uneven.format_lines(), ""]
    lines += format_timeline_table(plan)
    if steps:
        for device_plan in plan.device_plans:
            lines += ["", f"{device_plan.device}: {format_program(device_plan.program)}"]
    return "\n".join(lines)


def format_summary(plan: Plan) -> str:
    """Return a plan in one line: devices, nodes, steps, collectives by kind, FLOPs and predicted time."""
    views = sum(not n.is_leaf and REGISTRY[n.op].is_view for n in plan.graph.nodes)
    longest = max(len(device_plan.program.instructions) for device_plan in plan.device_plans)
    counts: dict[str, int] = {}
    for stage in plan.timeline:
        if stage.op != COMPUTE:
            name = "copy" if stage.op == "send" else stage.op
            counts[name] = counts.get(name, 0) + 1
    collectives = ", ".join(f"{n} {op}" for op, n in sorted(counts.items())) or "no collectives"
    where = format_devices([str(device_plan.device) for device_plan in plan.device_plans])
    simulated = " (simulated)" if plan.device_plans[0].backend.name == "simulated" else ""
    idle = f"{format_devices(plan.unused_devices)} left free; " if plan.unused_devices else ""
    if len(plan.device_plans) > 1 and len(plan.timeline) == 1 and not _has_sharded_or_local_values(plan):
        idle += f"each of {len(plan.device_plans)} devices does all; "
    return (
        f"{idle}{format_count(len(plan.graph.nodes), 'node')}, {views} of them views; "
        f"{format_count(longest, 'step')} on {where}{simulated}; "
        f"{collectives}; {plan.flops() / 1e6:.1f} MFLOP; {format_seconds(plan.cost.total)} a run estimated, "
        f"{format_seconds(plan.cost.collectives)} of it in collectives; speeds: {plan.hardware.source}"
    )


def _has_sharded_or_local_values(plan: Plan) -> bool:
    """Return whether devices have different parts of the leaves or outputs: a layout is sharded or local."""
    return any(isinstance(layout, Shard | Local) for layout in (*plan.leaves.values(), *plan.outputs.values()))


def format_decision_lines(plan: Plan) -> list[str]:
    """Return the lines of the report about the choice of the plan: placement, overlap, speedups and more."""
    return [
        *plan.reasons,
        *format_sharded_time_line(plan),
        *format_pinned_node_lines(plan),
        *format_transport_lines(plan),
        *format_device_and_collective_shares(plan),
        *format_overlap_saving_lines(plan),
        *format_pipeline_speedup_lines(plan),
        *format_numpy_fallback_lines(plan),
    ]


def format_sharded_time_line(plan: Plan) -> list[str]:
    """Return a line with the predicted time of the plan if factors are sharded; otherwise return no line.

    It is longer than the times of the factor search, because the search does not see the copies in the programs.
    """
    if not plan.sharded_factors:
        return []
    return [
        f"with all that the programs copy: {format_seconds(plan.cost.total)}, "
        f"{format_count(plan.cost.collective_count, 'collective')}"
    ]


def format_pinned_node_lines(plan: Plan) -> list[str]:
    """Return one line for each group of pinned nodes: the device that alone runs them, the nodes and the reason."""
    lines = []
    for placed in plan.pinned_nodes:
        first, *others = (f"%{name if name.isdecimal() else quote_node_name(name)}" for name in placed.nodes)
        node_range = (
            first if not others else f"{first}, {others[0]}" if len(others) == 1 else f"{first} to {others[-1]}"
        )
        count = format_count(len(placed.nodes), "node")
        lines.append(f"{plan.device_plans[placed.device].device} alone runs {count} ({node_range}): {placed.because}")
    return lines


def format_transport_lines(plan: Plan) -> list[str]:
    """Return lines that say how devices exchange data, for backends that have several transports."""
    kinds: dict[type, list[DevicePlan]] = {}
    for device_plan in plan.device_plans:
        kinds.setdefault(type(device_plan.backend), []).append(device_plan)
    lines = []
    for device_plans in kinds.values():
        devices, backend = [device_plan.device for device_plan in device_plans], device_plans[0].backend
        if isinstance(backend, SupportsTransports) and len(devices) > 1:
            how = (
                backend.describe_transport(devices)
                if len(kinds) == 1
                else "through memory of the host, as devices of several kinds do"
            )
            lines.append(f"{format_devices(list(map(str, devices)))} meet {how}")
    return lines


def format_device_and_collective_shares(plan: Plan) -> list[str]:
    """Return a line with the shares of devices and collectives in the critical path; for one device, return no line."""
    if len(plan.device_plans) == 1 or not plan.cost.total:
        return []
    seconds: dict[str, float] = defaultdict(float)
    for link in find_critical_path(plan.timeline, len(plan.device_plans)):
        name = "collectives" if link.device is None else f"work of {plan.device_plans[link.device].device}"
        seconds[name] += link.stage.seconds
    ranked = sorted(seconds, key=seconds.__getitem__, reverse=True)
    shares = (f"{seconds[name] / plan.cost.total:.0%} {name}" for name in ranked)
    return [f"the time of a run is {', '.join(shares)}"]


def format_overlap_saving_lines(plan: Plan) -> list[str]:
    """Return a line with the time that is saved because devices compute during collectives; no line without overlap."""
    if not (hidden := plan.cost.overlapped_seconds):
        return []
    device_plans = {id(device_plan.program): device_plan for device_plan in plan.device_plans}.values()
    steps = [
        device_plan.program.instructions[at]
        for device_plan in device_plans
        for at in device_plan.overlapped_instructions
    ]
    count = len({find_collective_sequence_number(i.op, i.attrs) for i in steps})
    saved = format_seconds(hidden)
    return [f"devices compute beside {count} of {plan.cost.collective_count} collectives, which saves {saved}"]


def format_pipeline_speedup_lines(plan: Plan) -> list[str]:
    """Return a line with the predicted speedup of pipelined runs. There is no line if the speedup is below 1%."""
    times, through = (
        estimate_pipeline_speedup(plan),
        format_stage_count(count_pipeline_stages(plan), len(plan.device_plans)),
    )
    if times < 1.01:
        return []
    return [f"runs that follow each other through {through} are {times:.2f} times as fast as one by one"]


def format_numpy_fallback_lines(plan: Plan) -> list[str]:
    """Return one line for each kind of device with the ops that NumPy computes for lack of a compiled kernel."""
    nodes: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for device_plan, costs in zip(plan.device_plans, plan.instruction_costs, strict=True):
        for position in costs.stand_ins:
            instruction = device_plan.program.instructions[position]
            nodes[device_plan.device.kind][instruction.op].add(instruction.index)
    lines = []
    for kind, by_op in nodes.items():
        counts = ", ".join(f"{op} ({len(numbers)})" for op, numbers in sorted(by_op.items()))
        lines.append(f"{kind} has no compiled kernel for these nodes, which NumPy computes: {counts}")
    return lines


def format_memory_table(plan: Plan) -> list[str]:
    """Return a table of the bytes on each device: a column for each kind of memory, and the free memory.

    The column "to undo" has the bytes that are saved for the rollback of a failed run. They are part of "compute".
    """
    rows: list[tuple[str, ...]] = [("device", "weights", "states", "constants", "compute", "to undo", "free after")]
    for device_plan in plan.device_plans:
        bytes_by_kind = device_plan.count_memory_bytes_by_kind()
        free = "-"
        if device_plan.device.memory is not None:
            own = (device_plan.device.kind, device_plan.device.index)
            parts = [other for other in plan.device_plans if (other.device.kind, other.device.index) == own]
            left = device_plan.device.memory - sum(sum(part.count_memory_bytes_by_kind().values()) for part in parts)
            free = format_bytes(left) if left >= 0 else f"{format_bytes(-left)} short"
        kinds = ("weight", "state", "constant", "arena")
        sizes = (*(bytes_by_kind[k] for k in kinds), device_plan.program.undo_bytes)
        rows.append((str(device_plan.device), *(format_bytes(n) if n else "-" for n in sizes), free))
    return format_table(rows, "lrrrrrr")


def format_timeline_table(plan: Plan) -> list[str]:
    """Format the timeline as a table with one row for each entry and its reason; repeated layers are shown once.

    The column `steps` has the number of instructions, as the summary; their number is not the number of graph nodes.
    """
    reasons, advice = TimelineReasons(plan), suggest_weights_for_single_device(plan)
    rows = [("stage", "where", "steps", "reads", "moved", "est", "uncut", "because")]
    table: list[tuple[str, ...]] = []
    for number, stage in enumerate(plan.timeline):
        phrases = [
            reasons.explain_devices_or_collective(stage),
            *(f"hint: {hint}" for hint in reasons.select_hints_for_entry(stage, advice)),
        ]
        table.append(_format_timeline_row(plan, number, stage, "; ".join(phrases)))
    table_rows: list[tuple[str, ...]] = []
    notes: dict[int, str] = {}
    for start, length, times in find_adjacent_repetitions([_make_row_key_without_numbers(row) for row in table]):
        table_rows += table[start : start + length]
        if times > 1:
            last = start + length * times - 1
            notes[len(table_rows)] = f"     … these {length} stages {times - 1} times more, to stage {last}"
    lines = format_table([*rows, *table_rows], "rlrrrrrl")
    for at in sorted(notes, reverse=True):
        lines.insert(at + 1, notes[at])
    return lines


def _format_timeline_row(plan: Plan, number: int, entry: TimelineEntry, reason: str) -> tuple[str, ...]:
    """Return the cells of the table row of one timeline entry.

    Args:
        plan: The plan.
        number: The number of the entry.
        entry: The timeline entry.
        reason: The text of the last column.
    """
    where = format_devices([str(plan.device_plans[d].device) for d in entry.devices])
    if entry.op == "send":
        where = " -> ".join(
            str(plan.device_plans[d].device) for d in sorted(entry.devices, key=lambda d: d != entry.sending_device)
        )
    if entry.op != COMPUTE:
        where = f"{'copy' if entry.op == 'send' else entry.op} {where}"
    reads, moved = (format_bytes(n) if n else "-" for n in (entry.bytes_read, entry.bytes_sent))
    uncut = "-" if entry.unsharded_seconds is None else format_seconds(entry.unsharded_seconds)
    if entry.is_overlapped:
        reason = f"beside the meeting before it; {reason}"
    return (
        str(number),
        where,
        str(entry.instruction_count),
        reads,
        moved,
        format_seconds(entry.seconds),
        uncut,
        reason,
    )


def _make_row_key_without_numbers(row: tuple[str, ...]) -> tuple[str, ...]:
    """Return a table row without the numbers in its reason, so that the rows of repeated layers are equal."""
    return (*row[1:-1], re.sub(r"\d+", "N", row[-1]))


class TimelineReasons:
    """Explains why each entry of a timeline runs on its devices, or why it communicates."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pin_reasons = _find_pin_of_nodes_and_leaves(plan)
        self.shapes_by_name = {
            name: [spec.shape for spec in node.specs] for node, name in assign_names(plan.graph).items()
        }

    def explain_devices_or_collective(self, entry: TimelineEntry) -> str:
        """Return why a timeline entry runs on its devices, or for a collective why it is needed."""
        nodes = self._list_nodes_computed_by_entry(entry)
        if entry.op == COMPUTE:
            return self._explain_devices_by_read_leaves(nodes, entry.devices)
        return self._explain_need_of_collective(self.plan.device_plans[entry.sending_device], entry, nodes[0])

    def select_hints_for_entry(
        self, entry: TimelineEntry, hints_by_weight: Mapping[str, SingleDevicePlacementHint]
    ) -> list[SingleDevicePlacementHint]:
        """Return the placement hints for the weights that a timeline entry reads.

        A placement hint is the advice to put a weight on one device.

        Args:
            entry: The timeline entry.
            hints_by_weight: The placement hints of the plan, by weight name.
        """
        read = (
            (find_view_base(s).node.name for n in self._list_nodes_computed_by_entry(entry) for s in n.inputs)
            if entry.op == COMPUTE
            else ()
        )
        return list(dict.fromkeys(hints_by_weight[name] for name in read if name in hints_by_weight))

    def _list_nodes_computed_by_entry(self, entry: TimelineEntry) -> list[Node]:
        """List the nodes that a timeline entry computes, in the graph of its first device, or of the sender."""
        device_plan = self.plan.device_plans[entry.sending_device]
        instructions = device_plan.program.instructions[
            entry.first_instruction : entry.first_instruction + entry.instruction_count
        ]
        return [device_plan.graph.nodes[i.index] for i in instructions if i.index >= 0]

    def _explain_devices_by_read_leaves(self, nodes: Sequence[Node], devices: Sequence[int]) -> str:
        """Return why nodes run on their devices, from the weights and states that they read.

        The text names the largest leaf that is placed on one device, and the largest sharded leaf. If there is neither,
        it has the reason of a pin, or explains the unsharded work.
        """
        because = {name: why for name, (device, why) in self.pin_reasons.items() if device in devices}
        leaves = {find_view_base(s).node.name: find_view_base(s).node for n in nodes for s in n.inputs}
        stored_leaves = [n for n in leaves.values() if n.op in ("weight", "state") and n.name in self.plan.leaves]
        special = [n for n in stored_leaves if isinstance(self.plan.leaves[n.name], Shard | Local)]
        if not special:
            why = [because[n.name] for n in nodes if n.name in because]
            return f"placed here: {why[0]}" if why else self._explain_devices_of_unsharded_work(nodes)
        sharded_leaves = [n for n in special if isinstance(self.plan.leaves[n.name], Shard)]
        local = [n for n in special if n not in sharded_leaves]
        phrases = []
        if local:
            largest_leaf, others = _find_largest_leaf_and_describe_others(local)
            phrases.append(
                f"%{largest_leaf.label}{others} placed here: {because.get(largest_leaf.name, 'nothing else reads it')}"
            )
        if sharded_leaves:
            largest_leaf, others = _find_largest_leaf_and_describe_others(sharded_leaves)
            phrases.append(f"%{largest_leaf.label}{others} cut on axis {self._find_shard_axis(largest_leaf)}")
        return "; ".join(phrases)

    def _explain_devices_of_unsharded_work(self, nodes: Sequence[Node]) -> str:
        """Return why a compute span runs on its devices, if it reads no sharded or placed weight or state."""
        read = [(s, find_view_base(s).node) for n in nodes if not REGISTRY[n.op].is_view for s in n.inputs]
        stored = [(s, leaf) for s, leaf in read if leaf.op in ("weight", "state")]
        if part := [leaf for s, leaf in stored if s.spec.nbytes < leaf.specs[0].nbytes]:
            return f"a part of %{part[0].label}, which is whole on each device"
        if stored:
            return "its weights are whole on each device"
        for s, _ in read:
            if s.shape != self.shapes_by_name.get(s.node.name, [s.shape] * (s.index + 1))[s.index]:
                return f"{format_user_value_name(s)} lies in shards, with which each device goes on"
        return "what it reads is whole on each device"

    def _explain_need_of_collective(self, device_plan: DevicePlan, entry: TimelineEntry, node: Node) -> str:
        """Return why a collective or a message is needed, with the name of the value that it exchanges."""
        if entry.op == "send":
            to = self.plan.device_plans[next(d for d in entry.devices if d != entry.sending_device)].device
            return f"{format_user_value_name(node.inputs[0])} is made on {device_plan.device} and read on {to}"
        source = node.inputs[0]
        sharded_leaf = self._find_nearest_sharded_leaf(source.node)
        because = (
            ""
            if sharded_leaf is None
            else f": %{sharded_leaf.label} is cut on axis {self._find_shard_axis(sharded_leaf)}"
        )
        if entry.op == "all_gather":
            return f"{format_user_value_name(source)} lies in shards and is read whole{because}"
        whose = ", of which each keeps its own rows" if entry.op == "reduce_scatter" else ""
        machines = self._describe_sum_seconds_by_machine_scope(device_plan, entry)
        return f"{format_user_value_name(source)} is a sum over the devices{whose}{because}{machines}"

    def _describe_sum_seconds_by_machine_scope(self, device_plan: DevicePlan, entry: TimelineEntry) -> str:
        """Return a text about the seconds of a sum within machines and across machines, if it has steps of both."""
        cost = self.plan.hardware.estimate_fastest_collective_cost(
            entry.op,
            count_bytes_of_exchanged_value(device_plan.program.instructions[entry.first_instruction]),
            entry.devices,
        )
        if not (cost.inside_machine_seconds and cost.across_machines_seconds):
            return ""
        over = f"{cost.machine_count} x {len(entry.devices) // cost.machine_count}"
        inside, across = map(format_seconds, (cost.inside_machine_seconds, cost.across_machines_seconds))
        return f"; {entry.op} over {over}: {inside} inside, {across} across"

    def _find_shard_axis(self, leaf: Node) -> int:
        """Return the axis along which a weight or state is sharded."""
        layout = self.plan.leaves[leaf.name]
        assert isinstance(layout, Shard)
        return layout.axis

    def _find_nearest_sharded_leaf(self, node: Node) -> Node | None:
        """Return the sharded weight or state that is the fewest nodes before a value.

        None is returned if there is none within 1000 nodes.
        """
        queue, seen = [node], {node}
        for here in queue:
            leaves = [s.node for s in here.inputs if s.node.is_leaf]
            for leaf in leaves:
                if isinstance(self.plan.leaves.get(leaf.name), Shard):
                    return leaf
            fresh = [s.node for s in here.inputs if s.node not in seen and not s.node.is_leaf]
            queue += fresh
            seen.update(fresh)
            if len(seen) > 1000:
                break
        return None


def _find_largest_leaf_and_describe_others(leaves: Sequence[Node]) -> tuple[Node, str]:
    """Return the leaf with the most bytes, and a text such as " and 3 more" about the other leaves."""
    return max(leaves, key=lambda n: n.specs[0].nbytes), f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""


def format_user_value_name(value: Value) -> str:
    """Return the name of a device value as the user sees it in the graph text of the user's graph."""
    return format_node_reference(value.node.name or value.node.op) + (
        f"#{value.index}" if len(value.node.specs) > 1 else ""
    )


def _find_pin_of_nodes_and_leaves(plan: Plan) -> dict[str, tuple[int, str]]:
    """Return the device and the reason of each pinned node and of each leaf that a pinned node reads, by name."""
    pins_by_name = {name: (placed.device, placed.because) for placed in plan.pinned_nodes for name in placed.nodes}
    reasons = dict(pins_by_name)
    for node, name in assign_names(plan.graph).items() if pins_by_name else ():
        for leaf in (find_view_base(source).node for source in node.inputs):
            if name in pins_by_name:
                reasons.setdefault(leaf.name, pins_by_name[name])
    return reasons
