"""Speeds that ranks have kept of the devices of a group, which they say to each other, so that all make the same plans.

The ranks of a machine know it; machines may have kept different speeds, or none.  Devices wait for the slowest of them,
so all plan with its speeds.
"""

from __future__ import annotations

import json
from dataclasses import replace

from ..distributed import World
from ..graph import Graph
from ..graph.lazy_dataclass import dataclass
from .lowering.lane import Devices
from .machines.calibrated import built_in, calibrated_source, speeds_data, speeds_here
from .machines.hardware import CPU, Hardware
from .machines.speeds import Speeds


@dataclass(frozen=True, slots=True)
class SharedSpeeds:
    """What the slowest devices of a group reach, the same on all ranks; None where no rank has kept any.  `is_apart`
    says that the devices are in several machines; `built_in` are the speeds where none were kept."""

    slowest: Speeds | None
    is_apart: bool
    built_in: Hardware = CPU
    source: str = "calibrated"

    def hardware(self, graph: Graph) -> Hardware:
        """The speeds for the weights of `graph`; links between machines are built-in ones."""
        if self.slowest is None:
            return self.built_in
        known = replace(self.slowest.hardware(graph), source=self.source)
        if not self.is_apart:
            return known
        return replace(known, link_bandwidth=known.across_bandwidth, link_latency=known.across_latency)


def shared_speeds(group: Devices, world: World) -> SharedSpeeds:
    """What is known of a group's devices on any rank; all ranks ask.  Each says what is kept of those of its machine:
    only there is it known with how many threads they compute, and so by which name their speeds are kept."""
    hosts = [world.hosts[device.rank or 0] for _, device in group]
    own = [one for one, host in zip(group, hosts, strict=True) if host == world.hosts[world.rank]]
    kept = speeds_here(own)
    said = world.all_gather_bytes(json.dumps(None if kept is None else speeds_data(kept)).encode())
    known = [Speeds(**data) for data in map(json.loads, said) if data is not None]
    slowest = min(known, key=lambda speeds: min(speeds.flops.values()), default=None)
    default = built_in(group) if world.size == 1 else CPU  # threads of other ranks are not known
    source = calibrated_source() if world.size == 1 else "calibrated"
    return SharedSpeeds(slowest, len(set(hosts)) > 1, default, source)
