"""Memory fit: the check of a plan against the memory of its devices, and remedies if the plan does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...backends.base import Device
from ...graph.errors import PlanError, format_count
from ...graph.validation import NONE, integer_between, validate_arguments
from ..ir.execution_plan import PLAN_KIND, Plan
from ..ir.formatting import format_bytes
from ..ir.layout import Local, Shard
from ..lowering.device_plan import DevicePlan

CONTEXT_STEP_CELLS = 64
"""The suggested context sizes are multiples of this number of cells."""
MAX_OFFLOAD_PLANS = 8
"""The number of plans that the search for the smallest host offload builds."""


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """A memory of `memory_bytes` bytes and the plans of all devices that use it.

    Devices of one machine may share a memory.
    """

    device_plans: tuple[DevicePlan, ...]
    memory_bytes: int
    is_shared: bool = False

    @property
    def needed_bytes(self) -> int:
        """The bytes that all device plans in this memory need."""
        return sum(sum(device_plan.count_memory_bytes_by_kind().values()) for device_plan in self.device_plans)

    @property
    def missing_bytes(self) -> int:
        """The bytes that do not fit into the memory; 0 if all fit."""
        return max(0, self.needed_bytes - self.memory_bytes)

    def count_bytes_of_named_leaves(self, names: frozenset[str]) -> int:
        """Count the bytes of the weights and states with these names in this memory."""
        buffers = [b for device_plan in self.device_plans for b in device_plan.program.buffers if b.kind != "arena"]
        return sum(b.nbytes for b in buffers if b.name in names)


def list_memory_pools(plan: Plan) -> list[MemoryPool]:
    """List the memories of a plan's devices, each with the device plans that use it.

    Devices that do not state their memory are left out.
    """
    groups: dict[str, list[DevicePlan]] = {}
    for device_plan in plan.device_plans:
        device = device_plan.device
        groups.setdefault(device.memory_of or f"{device.kind}:{device.index}@{device.rank}", []).append(device_plan)
    return [
        MemoryPool(tuple(device_plans), min(known), bool(device_plans[0].device.memory_of) or len(device_plans) > 1)
        for device_plans in groups.values()
        if (
            known := [
                device_plan.device.memory for device_plan in device_plans if device_plan.device.memory is not None
            ]
        )
    ]


@validate_arguments(PlanError, plan=PLAN_KIND)
def compute_missing_bytes(plan: Plan) -> int:
    """Compute the bytes of a plan that do not fit, summed over all memories; 0 if the plan fits."""
    return sum(pool.missing_bytes for pool in list_memory_pools(plan))


@validate_arguments(PlanError, plan=PLAN_KIND, context=integer_between(1) | NONE)
def describe_memory_problem(plan: Plan, *, context: int | None = None) -> str | None:
    """Describe why a plan does not fit into memory, with two remedies; return None if the plan fits.

    The text describes the memory with the most missing bytes.

    Args:
        plan: The plan.
        context: The number of cells of the KV caches, in order to suggest a smaller context.
    """
    short = [pool for pool in list_memory_pools(plan) if pool.missing_bytes]
    if not short:
        return None
    worst = max(short, key=lambda pool: pool.missing_bytes)
    where = ", ".join(str(device_plan.device) for device_plan in worst.device_plans)
    parts = {
        kind: sum(device_plan.count_memory_bytes_by_kind()[kind] for device_plan in worst.device_plans)
        for kind in worst.device_plans[0].count_memory_bytes_by_kind()
    }
    bytes_by_kind = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in parts.items() if n)
    others = f" (and {format_count(len(short) - 1, 'more device')})" if len(short) > 1 else ""
    remedies = [
        r
        for r in (
            _suggest_largest_fitting_context(short, plan, context),
            _suggest_larger_device_count(worst, plan),
            _suggest_other_split_mode(worst, plan),
        )
        if r
    ]
    remedies += [f"use a model with fewer bits a weight (these take {format_bytes(parts['weight'])} there)"]
    remedies += ["use devices with more memory"]
    return (
        f"{where}{others}: needs {format_bytes(worst.needed_bytes)} ({bytes_by_kind}) but has "
        f"{format_bytes(worst.memory_bytes)}; {remedies[0]}, or {remedies[1]}"
    )


def _suggest_largest_fitting_context(short_pools: Sequence[MemoryPool], plan: Plan, context: int | None) -> str | None:
    """Suggest the largest context length with which all KV caches fit; None if smaller caches are not enough."""
    if context is None:
        return None
    caches = frozenset(v.node.name for v in plan.graph.states if v.shape and v.shape[0] >= context)
    sizes = []
    for pool in short_pools:
        cache_bytes = pool.count_bytes_of_named_leaves(caches)
        if cache_bytes <= pool.missing_bytes:
            return None
        sizes.append(context * (cache_bytes - pool.missing_bytes) / cache_bytes)
    fitting = int(min(sizes)) // CONTEXT_STEP_CELLS * CONTEXT_STEP_CELLS
    return f"use context={fitting} or less" if fitting else None


def _suggest_larger_device_count(pool: MemoryPool, plan: Plan) -> str | None:
    """Suggest a larger number of equal devices on which the plan fits, or return None.

    More devices shrink the share of each device in the leaves (weights and states) that are sharded or placed. Copied
    leaves keep their size. If no leaf is sharded yet, mode ``tensor`` is assumed.
    """
    if pool.is_shared:
        return None
    leaves = {v.node.name for v in (*plan.graph.weights, *plan.graph.states)}
    spread = frozenset(
        n for n in leaves if isinstance(plan.leaves[n], Shard | Local) or not _has_leaves_not_on_all_devices(plan)
    )
    shared = (
        sum(MemoryPool((device_plan,), 0).count_bytes_of_named_leaves(spread) for device_plan in plan.device_plans)
        if _has_leaves_not_on_all_devices(plan)
        else pool.count_bytes_of_named_leaves(spread)
    )
    room = pool.memory_bytes - (pool.needed_bytes - pool.count_bytes_of_named_leaves(spread))
    if room <= 0 or (count := math.ceil(shared / room * 1.02)) <= len(plan.device_plans):
        return None
    mode = "" if _has_leaves_not_on_all_devices(plan) else " with split_mode='tensor'"
    return f"use {format_count(count, 'such device')}{mode}"


def _suggest_other_split_mode(pool: MemoryPool, plan: Plan) -> str | None:
    """Suggest split mode ``tensor`` to a plan in mode ``layer``, or the reverse, if the plan may fit then.

    Both modes are suggested if all leaves are copied. The result is None for one device, or if the memory of all
    devices together is too small.
    """
    if len(plan.device_plans) == 1:
        return None
    if not _has_leaves_not_on_all_devices(plan):
        return "use split_mode='tensor' or split_mode='layer'"
    placed = any(isinstance(layout, Local) for layout in plan.leaves.values())
    mode, needed = (
        ("tensor" if placed else "layer"),
        sum(sum(device_plan.count_memory_bytes_by_kind().values()) for device_plan in plan.device_plans),
    )
    memory = sum(p.memory_bytes for p in list_memory_pools(plan))
    return f"use split_mode='{mode}'" if needed <= memory else None


def _has_leaves_not_on_all_devices(plan: Plan) -> bool:
    """Return whether devices store different parts of the weights and states, so that not every leaf is copied."""
    return any(isinstance(layout, Shard | Local) for layout in plan.leaves.values())


def choose_smallest_fitting_host_offload(
    missing_share: float, build_plan_for_share: Callable[[float], Plan]
) -> Plan | None:
    """Choose the plan that fits with the smallest share of weights and states in host memory, by bisection.

    At most `MAX_OFFLOAD_PLANS` plans are built. The result is None if even the whole share in host memory does not fit.

    Args:
        missing_share: The share of all weights and states that did not fit without the host.
        build_plan_for_share: Builds the plan in which the host has a given share of all weights and states.
    """
    low, share, fitting = 0.0, min(1.0, missing_share), None
    for _ in range(MAX_OFFLOAD_PLANS):
        offload_plan = build_plan_for_share(share)
        if not compute_missing_bytes(offload_plan):
            fitting, high = offload_plan, share
        elif share >= 1.0:
            return None
        else:
            low = share
        share = (low + high) / 2 if fitting else min(1.0, 2 * share)
    return fitting


def compute_memory_proportions(devices: Sequence[Device]) -> list[float]:
    """Compute the default proportions of a layer split: the bytes of memory of each device.

    If one device does not state its memory, all proportions are 1.0.
    """
    sizes = [float(device.memory or 0) for device in devices]
    return sizes if all(sizes) else [1.0] * len(sizes)
