"""Plans as plain data, and back: the one serialiser of plans, for JSON files, digests and the plan cache.

A reader and a writer differ only in the devices. Graphs that the reader has anyway are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from ...backends.base import Backend, Device
from ...graph.export import graph_from_data, graph_to_data
from ...graph.graph import Graph
from ..costs.hardware import BUILT_IN_SOURCE, Hardware
from ..ir.execution_plan import PinnedNodes, Plan
from ..lowering.device_plan import DevicePlan, find_first_devices_with_same_program
from .program_data import (
    layout_from_data,
    layout_to_data,
    program_from_data,
    program_to_data,
    require_nonnegative_integer,
    require_nonnegative_number,
    require_text,
)

PLAN_FORMAT = "hocket-plan-3"
"""The name and the version of the format."""


def build_digest_names_outputs_key(graph: Graph) -> tuple[object, ...]:
    """Return the cache key of a graph: its digest, its node names and the order of its outputs.

    A cached plan is used for another graph only if all three are equal.
    """
    return graph.digest(), tuple(node.name for node in graph.nodes), tuple(graph.outputs)


def executable_parts_to_data(
    plan: Plan, device_to_data: Callable[[DevicePlan], dict[str, Any]], known: Graph | None = None
) -> dict[str, Any]:
    """Convert the parts of a plan that devices execute (graphs, programs, devices, layouts) to plain data for JSON.

    Devices with equal programs share one program. Dictionaries keep the order of the graph: sorted keys would change
    the order of a graph's outputs, and with it the numbers of unnamed nodes.

    Args:
        plan: The plan.
        device_to_data: Returns the data from which the reader finds the device of a device plan.
        known: The graph that the reader has; its data are then `None`.
    """
    first_equal = find_first_devices_with_same_program(plan.device_plans)
    own = {first: place for place, first in enumerate(dict.fromkeys(first_equal))}

    def graph(some: Graph) -> object:
        is_known = known is not None and build_digest_names_outputs_key(some) == build_digest_names_outputs_key(known)
        return None if is_known else graph_to_data(some)

    return {
        "format": PLAN_FORMAT,
        "graph": graph(plan.graph),
        "lanes": [
            {**device_to_data(device_plan), "program": own[first]}
            for device_plan, first in zip(plan.device_plans, first_equal, strict=True)
        ],
        "programs": [
            {"graph": graph(plan.device_plans[first].graph), **program_to_data(plan.device_plans[first].program)}
            for first in own
        ],
        "leaves": {name: layout_to_data(layout) for name, layout in plan.leaves.items()},
        "outputs": {name: layout_to_data(layout) for name, layout in plan.outputs.items()},
        "cuts": sorted(map(list, plan.sharded_factors)),
    }


def plan_to_data(
    plan: Plan, device_to_data: Callable[[DevicePlan], dict[str, Any]], known: Graph | None = None
) -> dict[str, Any]:
    """Return a plan as plain data for JSON, which `unverified_plan_from_data` reads; see `executable_parts_to_data`."""
    return {
        **executable_parts_to_data(plan, device_to_data, known),
        "reasons": list(plan.reasons),
        "placed": [asdict(placed) for placed in plan.pinned_nodes],
        "hardware": asdict(plan.hardware),
        "shares": list(plan.shares),
        "spare": list(plan.unused_devices),
        "host": None if plan.host is None else asdict(plan.host),
    }


def unverified_plan_from_data(
    document: Mapping[str, Any],
    find_device: Callable[[Mapping[str, Any]], tuple[Backend, Device]],
    known: Graph | None = None,
) -> Plan:
    """Build a plan from its plain data, without a verification of the plan.

    Args:
        document: The data of `plan_to_data`.
        find_device: Returns the backend and the device from the data of `device_to_data`.
        known: The graph that the writer left out.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, IndexError: The data are damaged.
        GraphError: A graph is illegal.
    """

    def read_graph(data: object) -> Graph:
        return known if data is None and known is not None else graph_from_data(data)

    graph = read_graph(document["graph"])
    graphs = [read_graph(entry["graph"]) for entry in document["programs"]]
    programs = [program_from_data(entry, own) for entry, own in zip(document["programs"], graphs, strict=True)]
    device_plans = []
    for entry in document["lanes"]:
        backend, device = find_device(entry)
        number = require_nonnegative_integer(entry["program"])
        device_plans.append(DevicePlan(device, backend, graphs[number], programs[number]))
    return Plan(
        graph,
        tuple(device_plans),
        MappingProxyType({name: layout_from_data(v) for name, v in document["leaves"].items()}),
        MappingProxyType({name: layout_from_data(v) for name, v in document["outputs"].items()}),
        frozenset(
            (
                require_text(n),
                require_nonnegative_integer(a),
                require_nonnegative_integer(s),
                require_nonnegative_integer(i),
            )
            for n, a, s, i in document["cuts"]
        ),
        tuple(map(require_text, document["reasons"])),
        _hardware_from_data(document["hardware"]),
        tuple(
            PinnedNodes(
                require_nonnegative_integer(p["device"]),
                require_text(p["because"]),
                tuple(map(require_text, p["nodes"])),
            )
            for p in document["placed"]
        ),
        None if document["host"] is None else _hardware_from_data(document["host"]),
        tuple(map(require_nonnegative_number, document["shares"])),
        tuple(map(require_text, document["spare"])),
    )


def _hardware_from_data(entry: Mapping[str, Any]) -> Hardware:
    figures: dict[str, Any] = {
        key: _parse_number_or_numbers_by_op(value) for key, value in entry.items() if key not in ("machine", "source")
    }
    source = require_text(entry.get("source", BUILT_IN_SOURCE))
    hardware = Hardware(**figures, machine=require_nonnegative_integer(entry.get("machine", 0)), source=source)
    if not hardware.is_valid:
        raise ValueError(f"hardware has a speed of zero: {hardware}")
    return hardware


def _parse_number_or_numbers_by_op(value: Any) -> Any:
    """Parse one field of `Hardware` from plain data: a nonnegative number, or a dict of such numbers by op."""
    return (
        {op: require_nonnegative_number(speed) for op, speed in value.items()}
        if isinstance(value, dict)
        else require_nonnegative_number(value)
    )
