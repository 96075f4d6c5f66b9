"""Speeds on which all ranks agree: each rank sends its calibrated speeds, and all ranks take the slowest ones.

Ranks of one machine read the same calibration. Machines may have different calibrations, or none. Devices wait for the
slowest device, so all ranks plan with its speeds, and get the same plans.
"""

from __future__ import annotations

import json
from dataclasses import replace

from ...distributed import World
from ...graph import Graph
from ...graph.lazy_dataclass import dataclass
from ..lowering.device_plan import Devices
from .calibration_file import (
    find_saved_speeds,
    format_calibrated_with_day,
    scale_built_in_hardware_by_threads,
    speeds_to_data,
)
from .hardware import DEFAULT_HARDWARE, Hardware
from .speeds import Speeds


@dataclass(frozen=True, slots=True)
class AgreedRankSpeeds:
    """The speeds for planning on which all ranks (processes) agreed: the speeds of the slowest device.

    - `slowest_speeds`: the calibrated speeds; None if all ranks lack a calibration.
    - `default_hardware`: the speeds to use in this case.
    - `has_several_machines`: whether the devices are in more than one machine.
    - `speeds_source`: the origin of the speeds, for reports.
    """

    slowest_speeds: Speeds | None
    has_several_machines: bool
    default_hardware: Hardware = DEFAULT_HARDWARE
    speeds_source: str = "calibrated"

    def hardware_for_graph(self, graph: Graph) -> Hardware:
        """Return the speeds for a graph, which depend on the dtypes of its weights.

        The speeds of links between machines are the built-in ones.
        """
        if self.slowest_speeds is None:
            return self.default_hardware
        known = replace(self.slowest_speeds.hardware_for(graph), source=self.speeds_source)
        if not self.has_several_machines:
            return known
        return replace(known, link_bandwidth=known.across_bandwidth, link_latency=known.across_latency)


def agree_on_slowest_rank_speeds(group: Devices, world: World) -> AgreedRankSpeeds:
    """Exchange the calibrated speeds of all ranks (processes), and return the slowest, which are equal on all ranks.

    Every rank must call this function. Each rank sends the speeds of the devices of its own machine. Other machines
    cannot look them up, because the keys of saved speeds contain thread counts.
    """
    hosts = [world.hosts[device.rank or 0] for _, device in group]
    own = [one for one, host in zip(group, hosts, strict=True) if host == world.hosts[world.rank]]
    own_speeds = find_saved_speeds(own)
    messages = world.all_gather_bytes(json.dumps(None if own_speeds is None else speeds_to_data(own_speeds)).encode())
    known = [Speeds(**data) for data in map(json.loads, messages) if data is not None]
    slowest = min(known, key=lambda speeds: min(speeds.flops.values()), default=None)
    default = (
        scale_built_in_hardware_by_threads(group) if world.size == 1 else DEFAULT_HARDWARE
    )  # threads of other ranks are not known
    source = format_calibrated_with_day(own) if world.size == 1 else "calibrated"
    return AgreedRankSpeeds(slowest, len(set(hosts)) > 1, default, source)
