"""The weight balance of a plan: how far devices deviate from their shares of the weights, and which weights cause this.

The excess of a weight on a device is the stored bytes minus the device's share of the weight. The excess of all weights
adds up to the excess of the device, to the byte.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...graph.attrs import quote_node_name
from ...graph.errors import format_count
from ...graph.node import Node, Value
from ...graph.spec import Spec
from ..ir.execution_plan import Plan
from ..ir.formatting import format_bytes, format_devices, format_seconds
from ..ir.layout import Local, Shard, compute_local_shape
from ..sharding.axes import Factor
from ..sharding.cost import AssignmentCost
from ..sharding.factor_layouts import FactorShard
from ..sharding.factors import Factors
from ..sharding.propagation import ShardingAssignment, propagate_layouts
from ..sharding.search.greedy_search import factors_from_positions, find_conflicting_leaf, group_factors

BALANCE_TOLERANCE = 0.02
"""The relative deviation from its share up to which a device counts as balanced."""
MAX_LISTED_CAUSES = 4
"""Maximum causes that are listed one by one."""


@dataclass(frozen=True, slots=True)
class ExcessWeightsWithReason:
    """Weights that are larger on the fullest device than its share of them, all for the same reason.

    - `weights`: their names.
    - `nbytes`: their bytes on the fullest device.
    - `excess_bytes`: the part of these bytes above the device's share.
    - `reason`: the reason, as text.
    """

    weights: tuple[str, ...]
    nbytes: int
    excess_bytes: float
    reason: str


@dataclass(frozen=True, slots=True)
class WeightBalance:
    """The weight bytes on each device compared with its share, and the causes of the imbalance.

    - `device_names`, `stored_bytes`, `share_bytes`: for each device its name, its weight bytes, and its share of them.
    - `is_requested`: whether a tensor split requested the shares; else they are even.
    - `causes`: why the fullest device exceeds its share.
    """

    device_names: tuple[str, ...]
    stored_bytes: tuple[int, ...]
    share_bytes: tuple[float, ...]
    is_requested: bool
    causes: tuple[ExcessWeightsWithReason, ...]

    def format_lines(self) -> list[str]:
        """Return the weight balance as text: a line about the devices, and a line for each cause of the imbalance.

        Example: ``cpu:0 holds 3.1 KiB of weights, 55% more than an even share, 2.0 KiB:``.
        """
        devices_by_amounts: dict[tuple[int, float], list[str]] = defaultdict(list)
        for device, stored_bytes, share in zip(self.device_names, self.stored_bytes, self.share_bytes, strict=True):
            devices_by_amounts[stored_bytes, share].append(device)
        heads = [
            _format_weight_share_line(names, *amounts, self.is_requested)
            for amounts, names in devices_by_amounts.items()
        ]
        first, rest = self.causes[:MAX_LISTED_CAUSES], self.causes[MAX_LISTED_CAUSES:]
        rows = [
            (cause.excess_bytes, f"{_abbreviate_weight_list(cause.weights, cause.nbytes)} {cause.reason}")
            for cause in first
        ]
        if rest:
            count, nbytes = sum(len(cause.weights) for cause in rest), sum(cause.nbytes for cause in rest)
            rows.append(
                (
                    sum(cause.excess_bytes for cause in rest),
                    f"{format_count(count, 'other weight')} ({format_bytes(nbytes)})",
                )
            )
        sized = [("-" if over < 0 else "+") + format_bytes(abs(over)) for over, _ in rows]
        width = max(map(len, sized), default=0)
        cause_lines = (f"  {size:>{width}}  {text}" for size, (_, text) in zip(sized, rows, strict=True))
        return [f"{'; '.join(heads)}{self._format_fullest_device_suffix()}:", *cause_lines]

    def _format_fullest_device_suffix(self) -> str:
        """Return ``; on cpu:0`` with the fullest device, to which the causes belong.

        The text is empty if all devices are equally full.
        """
        if len({*zip(self.stored_bytes, self.share_bytes, strict=True)}) == 1:
            return ""
        return f"; on {self.device_names[find_fullest_device(self.stored_bytes, self.share_bytes)]}"


def find_fullest_device(stored_bytes: Sequence[int], share_bytes: Sequence[float]) -> int:
    """Return the index of the device with the most bytes of weights, relative to its share."""
    return max(range(len(stored_bytes)), key=lambda d: stored_bytes[d] / max(share_bytes[d], 1.0))


def find_weight_imbalance(plan: Plan) -> WeightBalance | None:
    """Return the weight bytes of each device and the causes of imbalance; None if all devices have about their share.

    A device may deviate from its share by the fraction `BALANCE_TOLERANCE`.
    """
    own = [
        {b.name: b.nbytes for b in device_plan.program.buffers if b.kind == "weight"}
        for device_plan in plan.device_plans
    ]
    once = {
        v.node.name: _compute_whole_bytes_on_first_holder(plan, v.node, [sizes.get(v.node.name, 0) for sizes in own])
        for v in plan.graph.weights
    }
    asked = plan.shares if sum(plan.shares) else (1.0,) * len(own)
    parts = [part / sum(asked) for part in asked]
    stored_bytes, total = [sum(sizes.values()) for sizes in own], sum(once.values())
    shares = [part * total for part in parts]
    if all(abs(h - s) <= BALANCE_TOLERANCE * s for h, s in zip(stored_bytes, shares, strict=True)):
        return None
    fullest = find_fullest_device(stored_bytes, shares)
    over = {name: own[fullest].get(name, 0) - parts[fullest] * size for name, size in once.items()}
    causes = _list_imbalance_causes(plan, fullest, own[fullest], {name: extra for name, extra in over.items() if extra})
    devices = tuple(str(device_plan.device) for device_plan in plan.device_plans)
    return WeightBalance(devices, tuple(stored_bytes), tuple(shares), bool(sum(plan.shares)), tuple(causes))


def _compute_whole_bytes_on_first_holder(plan: Plan, leaf: Node, bytes_by_device: Sequence[int]) -> int:
    """Return the bytes that a whole weight would have on the first device that stores a part of it.

    Backends may store a weight in different dtypes.

    Args:
        plan: The plan.
        leaf: The weight.
        bytes_by_device: Bytes of the weight on each device. If all are 0, the result is 0.
    """
    device_plan = next(
        (device_plan for device_plan, nbytes in zip(plan.device_plans, bytes_by_device, strict=True) if nbytes), None
    )
    return 0 if device_plan is None else device_plan.backend.storage_spec(leaf.specs[0], "weight").nbytes


def _list_imbalance_causes(
    plan: Plan, fullest: int, stored_bytes: Mapping[str, int], excess_bytes: Mapping[str, float]
) -> list[ExcessWeightsWithReason]:
    """Group the weights that exceed the share of the fullest device by reason, largest excess first.

    Args:
        plan: The plan.
        fullest: The number of the fullest device.
        stored_bytes: Stored bytes of each weight on this device.
        excess_bytes: Excess bytes of each weight on this device.
    """
    reasons = _ImbalanceReasons(plan, fullest)
    grouped: dict[str, list[str]] = defaultdict(list)
    for name in sorted(excess_bytes, key=lambda name: -stored_bytes.get(name, 0)):
        grouped[reasons.explain_weight(name)].append(name)
    causes = [
        ExcessWeightsWithReason(
            tuple(names), sum(stored_bytes.get(n, 0) for n in names), sum(excess_bytes[n] for n in names), why
        )
        for why, names in grouped.items()
    ]
    return sorted(causes, key=lambda cause: -cause.excess_bytes)


class _ImbalanceReasons:
    """Finds the reason why a weight exceeds the share of one device: it is sharded, placed or replicated."""

    def __init__(self, plan: Plan, device: int) -> None:
        self.plan, self.device = plan, device
        self.leaves = {v.node.name: v for v in plan.graph.weights}
        self.users = plan.graph.users()
        self.factors = Factors(plan.graph)
        self.sharded_factors = factors_from_positions(plan.graph, self.factors, plan.sharded_factors)
        self.factors_by_class = group_factors(plan.graph, self.factors)
        self.class_of = {factor: name for name, members in self.factors_by_class.items() for factor in members}
        self.costs = AssignmentCost(plan.graph, len(plan.device_plans), plan.hardware)
        self._assignment_by_factors: dict[frozenset[Factor], ShardingAssignment] = {}

    def explain_weight(self, name: str) -> str:
        """Return why one weight exceeds its share: how it is sharded, where it is placed, or why it is whole."""
        layout = self.plan.leaves[name]
        if isinstance(layout, Shard):
            return f"cut along {self._describe_shards(name, layout)}{self._describe_shard_dtype(name, layout)}"
        if isinstance(layout, Local):
            return self._explain_whole_weight_placement(layout.devices)
        return f"whole on each device: {self._explain_replication(self.leaves[name])}"

    def _explain_whole_weight_placement(self, devices: Sequence[int]) -> str:
        """Return why only the given devices have a weight, which is whole on each of them."""
        if self.device not in devices:
            return "whole on other devices"
        where = format_devices([str(self.plan.device_plans[d].device) for d in devices])
        reasons = "; ".join(dict.fromkeys(p.because for p in self.plan.pinned_nodes if p.device == self.device))
        return f"whole on {where}{' alone' if len(devices) == 1 else ''}{reasons and ': ' + reasons}"

    def _describe_shards(self, name: str, layout: Shard) -> str:
        """Return a text about the shards of a weight: ``axis 0, 4 kv heads on 3 devices: 2, 1 and 1``."""
        size = self.leaves[name].shape[layout.axis]
        lengths = [layout.count_entries(d) for d in range(len(layout.index_ranges))]
        if sum(lengths) > size:
            return f"axis {layout.axis}, a part of which is whole on several devices"
        own = self.factors.axes_of(self.leaves[name])[layout.axis]
        factor, word = next((f for segment in own for f in segment if f in self.sharded_factors), None), "entries"
        if factor is not None and all(n * factor.size % size == 0 for n in lengths):
            word = self.factors.format_signature_name_of_factor(factor) or "pieces"
            size, lengths = factor.size, [n * factor.size // size for n in lengths]
        counts = [str(n) for n in lengths]
        return (
            f"axis {layout.axis}, {size} {word} on {format_count(len(counts), 'device')}: "
            f"{', '.join(counts[:-1])} and {counts[-1]}"
        )

    def _describe_shard_dtype(self, name: str, layout: Shard) -> str:
        """Return a phrase such as ``, stored as f32`` if a shard is stored in another dtype than the whole weight."""
        leaf, backend = self.leaves[name], self.plan.device_plans[self.device].backend
        local = Spec(compute_local_shape(leaf.shape, layout, self.device), leaf.dtype)
        as_stored = backend.storage_spec(local, "weight").dtype
        return "" if as_stored is backend.storage_spec(leaf.spec, "weight").dtype else f", stored as {as_stored}"

    def _explain_replication(self, weight: Value) -> str:
        """Return why a weight is replicated: its cheapest sharding would take longer, or it cannot be sharded."""
        own = self.factors.factors_of(weight)
        if not own.isdisjoint(self.sharded_factors):
            return self._describe_reader_of_whole_weight(weight, self._propagate_sharding(self.sharded_factors))
        options = dict.fromkeys(
            self.class_of[f] for axis in self._list_factors_by_axis(weight) for f in axis if f in self.class_of
        )
        estimates = [self._estimate_extra_seconds_of_sharding(weight, name) for name in options]
        return min(estimates, key=lambda option: option[0])[1] if estimates else "no axis of it can be cut"

    def _list_factors_by_axis(self, weight: Value) -> list[list[Factor]]:
        """Return the factors (shardable indices) of each axis of a weight, as one list for all segments of the axis."""
        return [[f for segment in segments for f in segment] for segments in self.factors.axes_of(weight)]

    def _estimate_extra_seconds_of_sharding(self, weight: Value, name: str) -> tuple[float, str]:
        """Estimate how many seconds longer a run would be if a weight were sharded by a class of factors.

        The seconds are infinite if the weight cannot be sharded in this way.

        Args:
            weight: The weight.
            name: The name of the class of factors.

        Returns:
            The additional seconds, and a text that explains them.
        """
        chosen = self.sharded_factors.union(self.factors_by_class[name])
        axis = next(a for a, factors in enumerate(self._list_factors_by_axis(weight)) if not chosen.isdisjoint(factors))
        if (twice := find_conflicting_leaf(self.plan.graph, self.factors, chosen)) is not None:
            return math.inf, f"a cut along axis {axis} would cut {_abbreviate_weight_list([twice.node.name])} twice"
        then = self._propagate_sharding(chosen)
        if not isinstance(then.produced_layouts[weight], FactorShard):
            return math.inf, self._describe_reader_of_whole_weight(weight, then)
        now = self.costs.estimate_run_time(self._propagate_sharding(self.sharded_factors))
        cost = self.costs.estimate_run_time(then)
        longer, oftener = cost.total - now.total, cost.collective_count - now.collective_count
        comparison = (
            f"{'longer' if longer >= 0 else 'shorter'}, with {abs(oftener)} {'more' if oftener >= 0 else 'fewer'}"
        )
        return (
            longer,
            f"a cut along axis {axis} would make a run {format_seconds(abs(longer))} {comparison} collectives",
        )

    def _propagate_sharding(self, chosen: frozenset[Factor]) -> ShardingAssignment:
        """Return the layouts of all values if the factors `chosen` are sharded; results are cached."""
        if chosen not in self._assignment_by_factors:
            self._assignment_by_factors[chosen] = propagate_layouts(self.plan.graph, self.factors, chosen)
        return self._assignment_by_factors[chosen]

    def _describe_reader_of_whole_weight(self, weight: Value, assignment: ShardingAssignment) -> str:
        """Return a text that names the first node that reads the whole weight, which is why it is not sharded.

        Without such a node, the text says that the layout was requested, by a flag or by an earlier plan.
        """
        reader = next(
            (user for user in self.users[weight] if not isinstance(assignment.node_layouts[user], FactorShard)), None
        )
        return "it was to lie so" if reader is None else f"{reader.op} reads it whole"


def _format_weight_share_line(devices: Sequence[str], stored_bytes: int, share: float, is_asked: bool) -> str:
    """Return the line about devices with equal weight bytes: the bytes, and by how much they differ from the share.

    Args:
        devices: The names of the devices.
        stored_bytes: The weight bytes on each of them.
        share: The bytes that each should have.
        is_asked: Whether the user requested the share; else all shares are even.
    """
    verb, each = ("holds", "") if len(devices) == 1 else ("hold", " each")
    off = (
        f"{abs(stored_bytes / share - 1):.0%} {'more' if stored_bytes > share else 'less'} than"
        if share
        else "all of it beyond"
    )
    kind = "the share asked for" if is_asked else "an even share"
    amount = f"{format_devices(devices)} {verb} {format_bytes(stored_bytes)} of weights{each}"
    return f"{amount}, {off} {kind}, {format_bytes(share)}"


def _abbreviate_weight_list(weights: Sequence[str], nbytes: int = 0) -> str:
    """Format weights by the name of the first one, their number and their bytes on the device, if it has any."""
    others = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
    return f"%{quote_node_name(weights[0])}{others}" + (f" ({format_bytes(nbytes)})" if nbytes else "")
