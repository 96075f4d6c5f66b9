"""Placement hints: a flag ``--place`` for a weight, with the bytes that it saves and the time that it costs.

Only replicated weights at the start or the end of a graph are considered. Their readers run before or after all
other nodes, so the cost model of the plan predicts the time if one device runs them alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from ...graph.graph import assign_names
from ...graph.node import Node, Value
from ...ops import op_of
from ...ops.registry import find_view_base
from ..costs.hardware import WorkCounter
from ..costs.timeline import InstructionCosts
from ..ir.execution_plan import Plan
from ..ir.formatting import format_bytes, format_devices, format_seconds
from ..ir.layout import Replicate
from ..lowering.device_plan import DevicePlan, find_first_devices_with_same_program
from ..sharding.pins import find_user_pins, pin_neighbours_of_pinned_nodes
from .value_layouts import format_value_layouts

MIN_SAVED_SHARE = 0.01
"""The least share of a device's bytes that a hint must save."""
MAX_PATTERN_CHARACTERS = 80
"""Maximum characters of a pattern."""


@dataclass(frozen=True, slots=True, eq=False)
class SingleDevicePlacementHint:
    """The advice to store a weight on one device instead of all: memory is saved, and a run may take longer.

    - `placement_rule`: the argument of ``--place``, a pattern and a device.
    - `saved_bytes_by_device`: the bytes that each other device saves.
    - `extra_seconds`: the additional seconds of a run.
    """

    placement_rule: str
    saved_bytes_by_device: Mapping[str, int]
    extra_seconds: float

    def __str__(self) -> str:
        """Return the hint as text: ``place='token_embd=cpu:0' saves 28.7 MiB on cpu:1, costs 762 us a run``."""
        devices: dict[int, list[str]] = defaultdict(list)
        for device, nbytes in self.saved_bytes_by_device.items():
            devices[nbytes].append(device)
        phrases = [f"saves {format_bytes(n)} on {format_devices(where)}" for n, where in devices.items()]
        phrases.append(
            f"{'saves' if self.extra_seconds < 0 else 'costs'} {format_seconds(abs(self.extra_seconds))} a run"
        )
        return f"place='{self.placement_rule}' {', '.join(phrases)}"


def suggest_weights_for_single_device(
    plan: Plan, layouts: Mapping[Node, str] | None = None
) -> dict[str, SingleDevicePlacementHint]:
    """Find replicated weights that had better be stored on one device; return the best hint for each, by name.

    A hint saves memory on the other devices and may cost time. It is given only if the saved share of a device's
    bytes is at least the relative increase of the run time.

    Args:
        plan: The plan.
        layouts: The value layouts of the plan, if the caller has them.
    """
    if len(plan.device_plans) == 1:
        return {}
    moves = _PlacementHintFinder(plan, format_value_layouts(plan) if layouts is None else layouts)
    whole = [v.node for v in plan.graph.weights if isinstance(plan.leaves[v.node.name], Replicate)]
    options = {leaf.name: list(moves.find_single_weight_hints(leaf)) for leaf in whole}
    return {name: min(own, key=lambda hint: hint.extra_seconds) for name, own in options.items() if own}


class _PlacementHintFinder:
    """Finds placement hints: it estimates memory and run time if only one device had a given weight."""

    def __init__(self, plan: Plan, layouts: Mapping[Node, str]) -> None:
        self.plan, self.layouts, self.work_counts = plan, layouts, WorkCounter()
        self.name_by_node = assign_names(plan.graph)
        self.users = plan.graph.users()
        self.devices = [str(device_plan.device) for device_plan in plan.device_plans]
        self.stored_bytes = [
            max(1, sum(device_plan.count_memory_bytes_by_kind().values())) for device_plan in plan.device_plans
        ]
        self.weight_bytes = [
            {b.name: b.nbytes for b in device_plan.program.buffers if b.kind == "weight"}
            for device_plan in plan.device_plans
        ]
        first_equal = find_first_devices_with_same_program(plan.device_plans)
        runs = {
            first: _sum_seconds_and_launches_by_node(plan.device_plans[first], plan.instruction_costs[first])
            for first in set(first_equal)
        }
        self.node_times = [runs[first] for first in first_equal]

    def find_single_weight_hints(self, leaf: Node) -> Iterator[SingleDevicePlacementHint]:
        """Yield a placement hint for each device on which one weight alone would save enough memory for its cost."""
        if (
            self._compute_largest_weight_fraction_of_device([leaf]) < MIN_SAVED_SHARE
            or (pattern := self._make_exact_name_regex(leaf.name)) is None
        ):
            return
        first = self.devices[0]  # the nodes are the same for every device
        moved = pin_neighbours_of_pinned_nodes(
            self.plan.graph, find_user_pins(self.plan.graph, [(pattern, first)], self.devices)
        ).keys()
        elsewhere = self._find_nodes_unneeded_elsewhere(moved)
        left = [n for n in self.plan.graph.nodes if n in elsewhere and n.op == "weight"]
        for to, device in enumerate(self.devices):
            seconds = self._estimate_extra_seconds_of_move(moved, elsewhere, to)
            if seconds is not None and self._compute_largest_weight_fraction_of_device(left) >= seconds / max(
                self.plan.cost.total, 1e-12
            ):
                others = (d for d in range(len(self.devices)) if d != to)
                saved = {self.devices[d]: sum(self.weight_bytes[d].get(n.name, 0) for n in left) for d in others}
                yield SingleDevicePlacementHint(f"{pattern}={device}", saved, seconds)

    def _make_exact_name_regex(self, name: str) -> str | None:
        """Return a regular expression that matches only this node name; None if it is too long to type."""
        word = re.escape(name)
        pattern = word if sum(name in other for other in self.name_by_node.values()) == 1 else f"^{word}$"
        return pattern if len(pattern) <= MAX_PATTERN_CHARACTERS and pattern.isprintable() else None

    def _compute_largest_weight_fraction_of_device(self, leaves: Sequence[Node]) -> float:
        """Return the fraction of a device's bytes that the given weights occupy, on the device where it is largest."""
        return max(
            sum(own.get(n.name, 0) for n in leaves) / stored_bytes
            for own, stored_bytes in zip(self.weight_bytes, self.stored_bytes, strict=True)
        )

    def _find_nodes_unneeded_elsewhere(self, moved: Set[Node]) -> Set[Node]:
        """Return the nodes that the other devices need no longer compute if one device alone computes `moved`.

        These are `moved`, and replicated nodes that only such nodes read.
        """
        ends = {v.node for v in (*self.plan.graph.outputs.values(), *self.plan.graph.updates.values())}
        elsewhere = set(moved)
        for node in reversed(self.plan.graph.nodes):
            readers = [user for v in node.results for user in self.users[v]]
            if self.layouts[node] == "R" and node not in ends and readers and elsewhere.issuperset(readers):
                elsewhere.add(node)
        return elsewhere

    def _estimate_extra_seconds_of_move(
        self, moved: Set[Node], skipped_nodes: Set[Node], target_device: int
    ) -> float | None:
        """Estimate how many seconds longer a run takes if one device alone computes some nodes and sends the results.

        The estimate is an upper bound. It is None (unknown) in two cases:

        - Other devices read a moved node that depends on computed values.
        - A moved node reads a value that is not replicated.

        Args:
            moved: The nodes that the target device alone computes.
            skipped_nodes: The nodes that the other devices do not compute any more: `moved`, and nodes that only
                these read.
            target_device: The number of the target device.
        """
        seconds = 0.0
        fed: set[Node] = set()
        for node in (n for n in self.plan.graph.nodes if n in skipped_nodes and not n.is_leaf and not op_of(n).is_view):
            sources = {find_view_base(s).node for s in node.inputs} - skipped_nodes
            computed = {n for n in sources if n.op not in ("weight", "input", "constant")}
            if computed or not fed.isdisjoint(find_view_base(s).node for s in node.inputs):
                fed.add(node)
            is_read = any(u not in skipped_nodes for v in node.results for u in self._list_readers_through_views(v))
            if node in moved and ((is_read and node in fed) or any(self.layouts[n] != "R" for n in computed)):
                return None
            name = self.name_by_node[node]
            _, launches = self.node_times[target_device].get(name, (0.0, 1.0))
            seconds += self.plan.speeds[target_device].compute_seconds(
                *self.work_counts.count_work(node), launches=launches
            )
            seconds -= max(own.get(name, (0.0, 1.0))[0] for own in self.node_times)
            seconds += (
                self.plan.hardware.collective_seconds(sum(v.spec.nbytes for v in node.results)) if is_read else 0.0
            )
        return seconds

    def _list_readers_through_views(self, value: Value) -> Iterator[Node]:
        """Yield the nodes that compute with a value, which they read directly or through views."""
        values = [value]
        for here in values:
            for user in self.users[here]:
                if op_of(user).is_view:
                    values += user.results
                else:
                    yield user


def _sum_seconds_and_launches_by_node(
    device_plan: DevicePlan, prices: InstructionCosts
) -> dict[str, tuple[float, float]]:
    """Return the predicted seconds and the number of kernel launches of each node of a device, by node name."""
    instructions = device_plan.program.instructions
    return {i.node: (prices.get_cost(at).seconds, prices.launch_counts[at]) for at, i in enumerate(instructions)}
