"""The verifier of the plan record: devices, layouts, sharded axes, tensor split, speeds and pins.

Graphs and programs have verifiers of their own. Each field must be well formed, and must name devices, leaves,
outputs and nodes that exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...backends.device_name import DeviceName
from ...graph.attrs import quote_node_name
from ...graph.errors import BackendError, GraphError, HocketError
from ...ops import verify
from ..ir.execution_plan import Plan
from ..ir.layout import Layout, Local, Replicate, Shard


def find_plan_field_faults(plan: Plan) -> Iterator[str]:
    """Yield as text the faults of a plan's fields: graph, devices, layouts, shares, unused devices and speeds.

    The graphs and programs of devices are checked elsewhere.
    """
    try:
        verify(plan.graph)
    except GraphError as why:
        yield f"its graph is illegal: {why}"
        return
    yield from _find_device_list_faults(plan)
    if plan.leaves.keys() != {n.name for n in plan.graph.nodes if n.is_leaf}:
        yield "its layouts are for other leaves than the graph has"
    if plan.outputs.keys() != plan.graph.outputs.keys():
        yield "its layouts are for other outputs than the graph has"
    yield from _find_missing_or_unsharded_axis_faults(plan)
    shares = all(0 <= share < math.inf for share in plan.shares) and sum(plan.shares) > 0
    if plan.shares and (len(plan.shares) != len(plan.device_plans) or not shares):
        yield f"its shares are {list(plan.shares)}, need one per device, none negative, one above zero"
    named = [*plan.unused_devices, *(str(device_plan.device) for device_plan in plan.device_plans)]
    if len({*named}) < len(named) or not all(map(_is_normal_device_name, plan.unused_devices)):
        yield (
            f"spare devices are {list(plan.unused_devices)}: a name is invalid, belongs to a device of the plan, "
            "or occurs twice"
        )
    for hardware in (plan.hardware, plan.host):
        if hardware is not None and not hardware.is_valid:
            yield f"{hardware} has an invalid speed"


def _is_normal_device_name(name: str) -> bool:
    """Return whether `name` is a valid device name in normal form, such as the name that `DeviceName` formats."""
    try:
        return str(DeviceName.parse(name)) == name
    except BackendError:
        return False


def _find_device_list_faults(plan: Plan) -> Iterator[str]:
    """Yield faults of the device list: no device, a repeated device, wrong ranks, or a device that does not exist."""
    if not plan.device_plans:
        yield "it has no devices"
    if len({str(device_plan.device) for device_plan in plan.device_plans}) != len(plan.device_plans):
        yield "it names a device twice"
    ranks = {device_plan.device.rank for device_plan in plan.device_plans}
    if (len(ranks) > 1 and None in ranks) or any(rank is not None and rank < 0 for rank in ranks):
        yield "ranks must be set for all devices or for none, and must not be negative"
    for number, device_plan in enumerate(plan.device_plans):
        try:
            own = device_plan.backend.device(device_plan.device.index)
        except HocketError as why:
            yield f"device {number}: {why}"
            continue
        part, multiprocessors = device_plan.device.part, device_plan.device.multiprocessors
        if (
            (own.kind, own.index) != (device_plan.device.kind, device_plan.device.index)
            or (part is not None and part < 0)
            or (multiprocessors is not None and (part is None or multiprocessors < 1))
            or own.index < 0
        ):
            yield f"device {number} is {device_plan.device}, but {device_plan.backend.name} names it {own}"


def find_device_leaf_faults(plan: Plan) -> Iterator[str]:
    """Yield faults of leaves on devices: a leaf that the user's graph does not have, or another op, dtype or layout.

    The caller has checked graphs and layouts before.
    """
    leaves = {n.name: n for n in plan.graph.nodes if n.is_leaf}
    for number, device_plan in enumerate(plan.device_plans):
        for own in (n for n in device_plan.graph.nodes if n.is_leaf):
            node = leaves.get(own.name)
            if node is None or (node.op, node.specs[0].dtype) != (own.op, own.specs[0].dtype):
                yield f"device {number}: {own!r} is not a part of a leaf of the graph"
            elif own.op == "constant" and not _has_whole_value_on_device(plan.leaves[own.name], number):
                yield (
                    f"device {number}: constant %{own.label} is on this device, but its layout is "
                    f"{plan.leaves[own.name]}"
                )


def _has_whole_value_on_device(layout: Layout, device: int) -> bool:
    """Return whether a device has all entries of a value with this layout."""
    return isinstance(layout, Replicate) or (isinstance(layout, Local) and device in layout.devices)


def _find_missing_or_unsharded_axis_faults(plan: Plan) -> Iterator[str]:
    """Yield faults of the list of sharded axes: an axis that does not exist, or that the layout does not shard."""
    stored = {n.name: n for n in plan.graph.nodes if n.op in ("weight", "state")}
    for sharded_factor in plan.sharded_factors:
        if [type(part) for part in sharded_factor] != [str, int, int, int]:
            yield f"{sharded_factor} is not a tuple of leaf name, axis, segment and position"
            continue
        name, axis, segment, place = sharded_factor
        if name not in stored or not 0 <= axis < len(stored[name].specs[0].shape) or segment < 0 or place < 0:
            yield f"sharded axis {axis} of %{quote_node_name(name)} does not exist"
        elif isinstance(layout := plan.leaves.get(name), Shard) and layout.axis != axis:
            yield f"%{quote_node_name(name)} is recorded as sharded on axis {axis}, but its layout is {layout}"
