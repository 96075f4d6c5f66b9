"""Where memory is short: shares by free memory, and how much of a graph the host takes so that the rest fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..backends.base import Device
from .fits import shortage

if TYPE_CHECKING:
    from .plan import Plan

TRIES = 8
"""Plans made in looking for the least that the host must take."""


def by_memory(devices: Sequence[Device]) -> list[float]:
    """Proportions of a layer split that nobody asked for: the devices' memory, where it is known."""
    sizes = [float(device.memory or 0) for device in devices]
    return sizes if all(sizes) else [1.0] * len(sizes)


def spilled(lacking: float, plan_with: Callable[[float], Plan]) -> Plan | None:
    """The plan that fits in which the host has least, found by halving; `plan_with` makes the one in which it has a
    share of all weights and states, and `lacking` is the share that did not fit.  None if none was found."""
    low, share, found = 0.0, min(1.0, lacking), None
    for _ in range(TRIES):
        made = plan_with(share)
        if not shortage(made):
            found, high = made, share
        elif share >= 1.0:
            return None
        else:
            low = share
        share = (low + high) / 2 if found else min(1.0, 2 * share)
    return found
