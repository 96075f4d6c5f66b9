"""The planner: build a verified plan from a graph and a device group, by one of the split modes.

Every split mode takes the same steps:

1. `sharding` chooses the device of each node, or the factors (indices of the graph) to shard.
2. `sharding.partitioner` or `sharding.layer_split` emits the graph of each device.
3. `lowering` turns each graph into a program.
4. `verifier` proves the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...backends.base import THREADS_KIND, find_devices
from ...graph.errors import PlanError, format_count
from ...graph.graph import Graph
from ...graph.node import Value
from ...graph.validation import (
    CALLABLE,
    MAX_MESSAGE_CHARACTERS,
    NONE,
    TEXT,
    format_value,
    instance_of,
    list_of,
    validate_arguments,
)
from ...ops import verify
from ...ops.collectives import COLLECTIVES
from ..costs.hardware import DEFAULT_HARDWARE, Hardware
from ..ir.execution_plan import PLAN_ARGUMENT_KINDS, HostOffload, Plan
from ..lowering.device_plan import DEVICES_KIND, Devices
from ..sharding.pins import PlacementRules
from ..verifier.plan_verifier import verify_plan
from .auto_candidates import choose_fastest_plan_with_penalties
from .decompose import decompose_unsupported_ops
from .gc_pause import pause_garbage_collection
from .plan_builder import FactorChooser, PlanBuilder, SplitModeBuilder
from .workload import Workload


@validate_arguments(
    PlanError, devices=TEXT | list_of(TEXT, "a sequence of texts"), threads=THREADS_KIND, **PLAN_ARGUMENT_KINDS
)
def plan(
    graph: Graph,
    devices: str | Sequence[str] = "cpu:0",
    *,
    split_mode: str = "auto",
    tensor_split: Sequence[float] = (),
    place: PlacementRules = (),
    like: Plan | None = None,
    threads: int | None = None,
) -> Plan:
    """Plan `graph` for devices by name, such as ``"cpu:0,cpu:1"``, and return the verified plan.

    Split modes:

    - ``none``: the first device computes everything.
    - ``layer``: each device computes consecutive nodes.
    - ``tensor``: factors are sharded over all devices wherever kernels get shorter.
    - ``layer,tensor``: each machine, or each group of devices, has consecutive nodes and shards them among its devices.
    - ``auto``: the fastest of these modes and of independent branches on different devices, on any number of the
      devices. Memory and devices have a price.

    Args:
        graph: The graph to plan.
        devices: Names of the devices, as one text or a list.
        split_mode: One of the modes above.
        tensor_split: The shares of the devices, in any unit.
        place: Pairs (regular expression, device). A node runs on that device alone if the expression matches its name,
            or the name of a weight or state that it reads. The first match counts.
        like: An earlier plan over the same weights and states; the new plan keeps their layouts.
        threads: Threads of each device; without a number the devices share the processors.

    Raises:
        GraphError: The graph is illegal.
        PlanError: There is no such plan, or an argument is wrong.
        BackendError: A device is missing or fails.
    """
    group = find_devices(devices.split(",") if isinstance(devices, str) else devices, threads)
    return plan_for_group(graph, group, split_mode=split_mode, tensor_split=tensor_split, place=place, like=like)


@validate_arguments(
    PlanError,
    group=DEVICES_KIND,
    hardware=instance_of(Hardware),
    choose=CALLABLE | NONE,
    host=instance_of(HostOffload) | NONE,
    use=instance_of(Workload) | NONE,
    **PLAN_ARGUMENT_KINDS,
)
@pause_garbage_collection()
def plan_for_group(
    graph: Graph,
    group: Devices,
    *,
    split_mode: str = "auto",
    tensor_split: Sequence[float] = (),
    place: PlacementRules = (),
    like: Plan | None = None,
    hardware: Hardware = DEFAULT_HARDWARE,
    choose: FactorChooser | None = None,
    host: HostOffload | None = None,
    use: Workload | None = None,
) -> Plan:
    """Plan `graph` for a device group, given as backends and devices; `plan` does the same for names of devices.

    In the modes ``none`` and ``auto`` the plan leaves out devices that have nothing to do.

    Args:
        graph: The graph to plan.
        group: The backend and the device of each member of the device group.
        split_mode: A name of `SPLIT_MODE_NAMES`.
        tensor_split: The shares of the devices, in any unit.
        place: Placement rules, pairs (regular expression, device).
        like: An earlier plan over the same weights and states; the new plan keeps their layouts.
        hardware: Speeds of devices and links.
        choose: A function that replaces the factor search.
        host: A further device for the weights and states that exceed the memory of the group; unused in mode
            ``tensor``.
        use: The workload for which mode ``auto`` optimises; without it, one run of `graph`.
    """
    if split_mode not in SPLIT_MODES:
        raise PlanError(f"split_mode is {format_value(split_mode)}; need one of {'; '.join(SPLIT_MODES)}")
    if len({str(device) for _, device in group}) < len(group) or not group:
        raise PlanError(
            f"devices='{','.join(str(d) for _, d in group)}': name each once, and at least one; "
            "parts of one device are named as cuda:0.0,cuda:0.1"
        )
    verify(graph)
    graph = decompose_unsupported_ops(graph, group)
    if strange := [n for n in graph.nodes if n.op in COLLECTIVES]:
        raise PlanError(f"{strange[0]!r}: collectives are put in by the planner; leave them out of the graph")
    if like is not None:
        group = _select_devices_of_earlier_plan(like, graph, group)
    shares = _pad_tensor_split_with_zeros(tensor_split, len(group))
    planning = PlanBuilder(graph, tuple(group), shares if tensor_split else (), hardware, place, like, use)
    new_plan = planning.build_unverified_with_host_fallback(SPLIT_MODES[split_mode], like, choose, host)
    try:
        verify_plan(new_plan)
    except PlanError as why:
        if all(device_plan.short is None for device_plan in new_plan.device_plans):
            raise
        planning.unrepeated_reasons = (f"every run of layers is planned by itself, since of {why}",)
        new_plan = planning.build_unverified_with_host_fallback(SPLIT_MODES[split_mode], like, choose, host)
        verify_plan(new_plan)
    return new_plan


SPLIT_MODES: Mapping[str, SplitModeBuilder] = {
    "none": PlanBuilder.build_mainly_on_first_device,
    "layer": PlanBuilder.build_layer_split,
    "tensor": PlanBuilder.build_tensor_parallel,
    "layer,tensor": PlanBuilder.build_hybrid,
    "auto": choose_fastest_plan_with_penalties,
}
"""The split modes by name, in the order of `SPLIT_MODE_NAMES`. Each function plans a graph for several devices."""


def _select_devices_of_earlier_plan(like: Plan, graph: Graph, group: Devices) -> Devices:
    """Select the devices of `group` that take part in the earlier plan `like`.

    Raises:
        PlanError: `like` is a plan over other devices, or over other weights and states than `graph` has.
    """
    names, taken = [str(device) for _, device in group], [str(device_plan.device) for device_plan in like.device_plans]
    if len(names) != len(taken):
        group = [pair for pair, name in zip(group, names, strict=True) if name not in like.unused_devices]
        if [str(device) for _, device in group] != taken:
            raise PlanError(
                f"like: it is a plan for {format_count(len(taken), 'device')}, and {len(names)} are given; "
                f"give {', '.join(taken):.{2 * MAX_MESSAGE_CHARACTERS}}"
            )
    stored = {v.node.name: v for v in (*like.graph.weights, *like.graph.states)}
    for value in (*graph.weights, *graph.states):
        earlier = stored.get(value.node.name, value)
        if not _can_keep_layout(earlier, value):
            raise PlanError(
                f"like: {value.label:.{MAX_MESSAGE_CHARACTERS}} is a {value.node.op} {value.spec}, and in the earlier "
                f"plan a {earlier.node.op} {earlier.spec}; rename it, or plan without like"
            )
    return group


def _can_keep_layout(earlier: Value, value: Value) -> bool:
    """Return whether a weight or state of a new graph can keep its layout in an earlier plan.

    Two weights need equal specs. Two states need equal dtypes and ranks; their sizes may differ.
    """
    if (earlier.node.op, earlier.spec.dtype) != (value.node.op, value.spec.dtype):
        return False
    if value.node.op == "state":
        return len(earlier.spec.shape) == len(value.spec.shape)
    return earlier.spec == value.spec


def _pad_tensor_split_with_zeros(tensor_split: Sequence[float], devices: int) -> Sequence[float]:
    """Expand the tensor split to one Python number for each device; missing shares at the end are zero.

    Without a tensor split all shares are equal. Raises `PlanError` for a split with too many or invalid shares.
    """
    if not tensor_split:
        return [1.0] * devices
    if len(tensor_split) > devices or any(s < 0 for s in tensor_split) or not sum(tensor_split):
        split_text = ",".join(f"{s:g}" for s in tensor_split)
        raise PlanError(
            f"tensor_split='{split_text}': need at most {format_count(devices, 'share')}, none negative, one above zero"
        )
    shares = (share.item() if isinstance(share, np.generic) else share for share in tensor_split)
    return [*shares, *[0.0] * (devices - len(tensor_split))]
