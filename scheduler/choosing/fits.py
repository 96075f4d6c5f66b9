"""Whether a plan fits into the memory of its devices, and what to do if not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...backends.base import Device
from ..layout import Local, Shard
from ..lowering.lane import Lane
from ..plan import Plan
from ..units import format_bytes

STEP = 64
"""Context sizes are suggested in multiples of this."""
TRIES = 8
"""Plans made in looking for the least that the host must take."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices with one memory: each its own, unless it `is_shared`, as by parts of one device or machine."""

    lanes: tuple[Lane, ...]
    memory: int
    is_shared: bool = False

    @property
    def needed(self) -> int:
        return sum(sum(lane.memory().values()) for lane in self.lanes)

    @property
    def lacking(self) -> int:
        """Bytes that do not fit."""
        return max(0, self.needed - self.memory)

    def held(self, names: frozenset[str]) -> int:
        """Bytes of these leaves."""
        buffers = [b for lane in self.lanes for b in lane.program.buffers if b.kind != "arena"]
        return sum(b.nbytes for b in buffers if b.name in names)


def pools(plan: Plan) -> list[Pool]:
    """The memories of a plan; devices that do not say how much they have are left out."""
    groups: dict[str, list[Lane]] = {}
    for lane in plan.lanes:
        device = lane.device
        groups.setdefault(device.memory_of or f"{device.kind}:{device.index}@{device.rank}", []).append(lane)
    return [
        Pool(tuple(lanes), min(known), bool(lanes[0].device.memory_of) or len(lanes) > 1)
        for lanes in groups.values()
        if (known := [lane.device.memory for lane in lanes if lane.device.memory is not None])
    ]


def shortage(plan: Plan) -> int:
    """Bytes that do not fit, over all memories."""
    return sum(pool.lacking for pool in pools(plan))


def memory_problem(plan: Plan, *, context: int | None = None) -> str | None:
    """What does not fit where, and two ways out; None if all fits.  `context` is the number of cells of the caches."""
    short = [pool for pool in pools(plan) if pool.lacking]
    if not short:
        return None
    worst = max(short, key=lambda pool: pool.lacking)
    where = ", ".join(str(lane.device) for lane in worst.lanes)
    parts = {kind: sum(lane.memory()[kind] for lane in worst.lanes) for kind in worst.lanes[0].memory()}
    held = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in parts.items() if n)
    others = f" (and {len(short) - 1} more devices)" if len(short) > 1 else ""
    remedies = [r for r in (_context(short, plan, context), _devices(worst, plan), _split(worst, plan)) if r]
    remedies += [f"use a model with fewer bits a weight (these take {format_bytes(parts['weight'])} there)"]
    remedies += ["use devices with more memory"]
    return (
        f"{where}{others}: needs {format_bytes(worst.needed)} ({held}) but has {format_bytes(worst.memory)}; "
        f"{remedies[0]}, or {remedies[1]}"
    )


def _context(short: Sequence[Pool], plan: Plan, context: int | None) -> str | None:
    """The largest context that would fit, where caches are what is too large."""
    if context is None:
        return None
    caches = frozenset(v.node.name for v in plan.graph.states if v.shape and v.shape[0] >= context)
    sizes = []
    for pool in short:
        held = pool.held(caches)
        if held <= pool.lacking:
            return None
        sizes.append(context * (held - pool.lacking) / held)
    fitting = int(min(sizes)) // STEP * STEP
    return f"use context={fitting} or less" if fitting else None


def _devices(pool: Pool, plan: Plan) -> str | None:
    """How many devices like the worst would do: what is cut or placed gets less on each, the rest does not."""
    if pool.is_shared:
        return None
    leaves = {v.node.name for v in (*plan.graph.weights, *plan.graph.states)}
    spread = frozenset(n for n in leaves if isinstance(plan.leaves[n], Shard | Local) or not _is_cut(plan))
    shared = sum(Pool((lane,), 0).held(spread) for lane in plan.lanes) if _is_cut(plan) else pool.held(spread)
    room = pool.memory - (pool.needed - pool.held(spread))
    if room <= 0 or (count := math.ceil(shared / room * 1.02)) <= len(plan.lanes):
        return None
    mode = "" if _is_cut(plan) else " with split_mode='tensor'"
    return f"use {count} such devices{mode}"


def _split(pool: Pool, plan: Plan) -> str | None:
    """Another split mode, where there are devices and each holds everything, or whole layers."""
    if len(plan.lanes) == 1:
        return None
    if not _is_cut(plan):
        return "use split_mode='tensor' or split_mode='layer'"
    placed = any(isinstance(layout, Local) for layout in plan.leaves.values())
    mode, needed = ("tensor" if placed else "layer"), sum(sum(lane.memory().values()) for lane in plan.lanes)
    memory = sum(p.memory for p in pools(plan))
    return f"use split_mode='{mode}'" if needed <= memory else None


def _is_cut(plan: Plan) -> bool:
    """Whether devices hold different parts."""
    return any(isinstance(layout, Shard | Local) for layout in plan.leaves.values())


def spilled(lacking: float, plan_with: Callable[[float], Plan]) -> Plan | None:
    """The plan that fits in which the host has least, found by halving; `plan_with` makes the one in which it has a
    share of all weights and states, and `lacking` is the share that did not fit.  None if none was found."""
    low, share, fitting = 0.0, min(1.0, lacking), None
    for _ in range(TRIES):
        made = plan_with(share)
        if not shortage(made):
            fitting, high = made, share
        elif share >= 1.0:
            return None
        else:
            low = share
        share = (low + high) / 2 if fitting else min(1.0, 2 * share)
    return fitting


def by_memory(devices: Sequence[Device]) -> list[float]:
    """Proportions of a layer split that nobody asked for: the devices' memory, where it is known."""
    sizes = [float(device.memory or 0) for device in devices]
    return sizes if all(sizes) else [1.0] * len(sizes)
