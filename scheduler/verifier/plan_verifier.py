"""The verifier of whole plans. It shares no code with the planner.

From the graphs of the devices and the declarations of ops, it derives which values of the user's graph each device
has, and which entries of them. It verifies that:

- each node of a device is a node of the user's graph on the entries of its operands;
- partial sums are operands of linear ops only, and are then reduced once, each term once;
- all devices execute collectives in one order, without deadlock;
- leaves are complete, and outputs and states end as the plan says;
- a node that is pinned to a device is computed only there, and each node on a device that supports it;
- the program of each device runs its graph (`verify_program`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from ...backends.capabilities import GeneratesFusedKernels, find_class_of_equal_devices
from ...graph.attrs import quote_node_name
from ...graph.errors import GraphError, PlanError, format_count
from ...graph.graph import assign_names
from ...graph.node import Node, Value
from ...graph.validation import validate_arguments
from ...ops import REGISTRY, op_of, verify
from ...ops.collectives import COLLECTIVES
from ..ir.execution_plan import PLAN_KIND, DevicePlan, Plan
from ..ir.layout import Layout, Local, Partial, Shard
from .communication.collective_order import find_collective_faults
from .fused_kernels import find_fusion_faults
from .memory.program_verifier import find_faults_against_graph
from .memory.rollback_verifier import list_standalone_save_and_restore_nodes
from .program_equality import is_equal_to_proven_program_except_names, make_program_prefilter_key
from .record_checks import find_device_leaf_faults, find_plan_field_faults
from .repeats.carried_values import CarriedValueTrace
from .repeats.induction import (
    find_common_shortened_graph,
    find_faults_of_reordering_repetitions,
    find_names_without_short_node_number,
    find_shortened_graph_mismatches,
    make_plan_before_unrolling,
)
from .values.device_values import ValueTrace
from .values.facts import DeviceValueFact
from .values.index_sets import (
    IndexRanges,
    concatenate_indices,
    format_index,
    list_entry_numbers,
    make_index_of_all_entries,
)
from .values.value_numbering import ValueNumbering


@validate_arguments(PlanError, plan=PLAN_KIND)
def verify_plan(plan: Plan) -> None:
    """Verify that a plan computes the user's graph; raise `PlanError` with the first fault."""
    for why in find_plan_faults(plan):
        raise PlanError(f"plan for {', '.join(str(device_plan.device) for device_plan in plan.device_plans)}: {why}")


def find_plan_faults(plan: Plan) -> Iterator[str]:
    """Yield as text all reasons why a plan does not compute the user's graph; a correct plan has none.

    All device plans may be unrolled from a short plan with few repeated layers. Then only the short plan is checked,
    and the conditions under which the proof holds for all layers.
    """
    of = find_common_shortened_graph(plan)
    if of is None:
        yield from _find_plan_faults_in_every_instruction(plan, ValueTrace)
        return
    if complaints := [*find_plan_field_faults(plan)] or [*find_shortened_graph_mismatches(plan, of)]:
        yield from complaints
        return  # the proof of the short plan holds for the long plan only without these faults
    short = make_plan_before_unrolling(plan, of)
    complaints = [*find_names_without_short_node_number(short, of)] or [
        *_find_plan_faults_in_every_instruction(short, partial(CarriedValueTrace, shortened=of))
    ]
    yield from complaints or find_faults_of_reordering_repetitions(short, of)


def _find_plan_faults_in_every_instruction(plan: Plan, make_trace: Callable[..., ValueTrace]) -> Iterator[str]:
    """Yield all faults of a plan, found by a check of every instruction of every device.

    Repeated layers are checked one by one, without the proof by induction.

    Args:
        plan: The plan.
        make_trace: Builds the value trace (facts about the values of all devices) from three arguments: the value
            numbering, the device graphs and the leaf facts.
    """
    sound = True
    for why in find_plan_field_faults(plan):
        sound = False
        yield why
    seen: dict[tuple[object, ...], tuple[list[str], list[Node]]] = {}  # equal devices share one program
    proven: dict[tuple[object, ...], list[DevicePlan]] = {}
    unable: dict[tuple[object, ...], list[tuple[Node, str]]] = {}
    for number, device_plan in enumerate(plan.device_plans):
        key = (type(device_plan.backend), id(device_plan.graph), id(device_plan.program))
        if key not in seen:
            complaints = list(_find_unproven_device_program_faults(device_plan, proven))
            added = (
                []
                if complaints
                else list(list_standalone_save_and_restore_nodes(device_plan.graph, device_plan.program))
            )
            seen[key] = complaints, [*filter(_needs_kernel, device_plan.graph.nodes), *added]
        complaints, nodes = seen[key]
        for why in complaints:
            sound = False
            yield f"device {number}: {why}"
        grade = (
            key,
            find_class_of_equal_devices(device_plan.backend, device_plan.device),
        )  # devices that share a program may support different ops
        if grade not in unable:
            answers = [(node, device_plan.backend.supports(node, device_plan.device)) for node in nodes]
            unable[grade] = [(node, answer.reason) for node, answer in answers if not answer.ok]
        for node, why in unable[grade]:
            sound = False
            yield f"device {number}: {node!r} cannot run on {device_plan.device}: {why}"
    for why in find_collective_faults([device_plan.program for device_plan in plan.device_plans]):
        sound = False
        yield why
    if sound:  # with a fault, the programs do not run the graphs
        complaints = list(find_device_leaf_faults(plan))
        complaints = complaints or list(_PlanChecker(plan, make_trace).find_faults())
        yield from complaints or _find_fused_kernel_faults(plan)


def _find_fused_kernel_faults(plan: Plan) -> Iterator[str]:
    """Yield the faults of the kernels that backends generate for several instructions of the programs.

    The unrolled programs of a short plan are checked when they are loaded (`verify_fused_kernels`).
    """
    seen: set[tuple[object, ...]] = set()
    for number, device_plan in enumerate(plan.device_plans):
        if not isinstance(device_plan.backend, GeneratesFusedKernels):
            continue
        key = (type(device_plan.backend), id(device_plan.program))
        if key not in seen:
            seen.add(key)
            fusion = device_plan.backend.describe_fusion(device_plan.program)
            yield from (f"device {number}: {why}" for why in find_fusion_faults(device_plan.program, fusion))


def _needs_kernel(node: Node) -> bool:
    """Return whether a node runs a kernel; leaves, views and unknown ops do not."""
    return node.op in REGISTRY and not node.is_leaf and not REGISTRY[node.op].is_view


def _find_unproven_device_program_faults(
    device_plan: DevicePlan, proven_device_plans: dict[tuple[object, ...], list[DevicePlan]]
) -> Iterator[str]:
    """Yield the faults of a device's program, unless an earlier device has an equal program that is proven correct.

    Args:
        device_plan: The graph and the program of the device.
        proven_device_plans: The device plans without faults so far, by program comparison key. `device_plan` is added
            if it has no faults.
    """
    try:
        if device_plan.graph.roots():  # a device may have no work
            verify(device_plan.graph)
    except GraphError as why:
        yield f"its graph is illegal: {why}"
        return
    key = (
        type(device_plan.backend),
        device_plan.backend.name,
        make_program_prefilter_key(device_plan.graph, device_plan.program),
    )
    others = proven_device_plans.setdefault(key, [])
    if not any(
        is_equal_to_proven_program_except_names(device_plan.graph, device_plan.program, other.graph, other.program)
        for other in others
    ):
        complaints = list(find_faults_against_graph(device_plan.graph, device_plan.program, device_plan.backend))
        yield from complaints
        if not complaints:
            others.append(device_plan)


def _is_read_from_device_after_run(layout: Layout, device: int, device_entries: tuple[IndexRanges, ...]) -> bool:
    """Return whether a state or an output with this layout is read from `device` after the run.

    A `Local` value is read from its first device, and a replicated value from device 0. A shard is read from each
    device that has entries.

    Args:
        layout: The layout of the value.
        device: The number of the device.
        device_entries: The entries that the device has, for each axis.
    """
    if isinstance(layout, Shard):
        return 0 not in map(len, device_entries)
    return device == (layout.devices[0] if isinstance(layout, Local) else 0)


def _has_entries_only_on_other_devices(layout: Layout, device: int) -> bool:
    """Return whether a value is sharded in such a way that `device` has no entry of it."""
    return isinstance(layout, Shard) and not layout.index_ranges[device] and any(layout.index_ranges)


class _PlanChecker:
    """The check of one plan: it derives the values of all devices and compares them with the user's graph.

    Args:
        plan: The plan.
        make_trace: Builds the value trace, which derives the values of all devices.
    """

    def __init__(self, plan: Plan, make_trace: Callable[..., ValueTrace]) -> None:
        self.plan, self.device_count, self.make_trace = plan, len(plan.device_plans), make_trace
        self.numbering = ValueNumbering(plan.graph)

    def find_faults(self) -> Iterator[str]:
        """Yield the faults of the plan, as text.

        Leaf layouts and device values are checked first. If they are right, outputs, updates and pins are checked.
        """
        leaves: dict[tuple[int, str], DeviceValueFact] = {}
        for node in self.plan.graph.nodes:
            if node.is_leaf and node.op != "constant":
                yield from self._record_leaf_facts(node, leaves)
        trace = self.make_trace(self.numbering, [device_plan.graph for device_plan in self.plan.device_plans], leaves)
        faults = list(trace.find_faults())
        for why in faults or (
            *self._find_missing_wrong_or_unknown_outputs(trace),
            *self._find_update_faults(trace),
            *self._find_pinned_node_faults(trace),
        ):
            yield why + trace.search_limit_note

    def _find_pinned_node_faults(self, trace: ValueTrace) -> Iterator[str]:
        """Yield faults of pinned nodes: each must be computed on its device.

        No other device may compute the node. Nodes that compute equal values may run on the pinned device of any of
        them.
        """
        known = {name: node for node, name in assign_names(self.plan.graph).items()}
        allowed: dict[int, set[int]] = {}
        pin_by_number: dict[int, tuple[str, int]] = {}
        for placed in self.plan.pinned_nodes:
            if not 0 <= placed.device < self.device_count:
                yield f"nodes are pinned to device {placed.device} of {self.device_count}"
            for name in placed.nodes:
                if name not in known:
                    yield f"node %{quote_node_name(name)} is pinned, but the graph does not have it"
                    continue
                number = self.numbering.number_by_value[known.pop(name).results[0]]
                allowed.setdefault(number, set()).add(placed.device)
                pin_by_number[number] = (name, placed.device)
        for node in (n for n in known.values() if not n.is_leaf):  # not pinned
            allowed.pop(self.numbering.number_by_value[node.results[0]], None)
        for numbers, where in trace.computing_devices.items():
            if numbers <= allowed.keys() and (strange := where.difference(*(allowed[n] for n in numbers))):
                name, device = pin_by_number[min(numbers)]
                yield (
                    f"%{quote_node_name(name)} is pinned to device {device}, but computed on devices {sorted(strange)}"
                )
        for number, devices in allowed.items():
            value = self.numbering.value_by_number[number]
            is_computed = value.spec.size and not value.node.is_leaf and not op_of(value.node).is_view
            if is_computed and devices.isdisjoint(trace.complete_devices.get(number, ())):
                name, device = pin_by_number[number]
                yield f"%{quote_node_name(name)} is pinned to device {device}, but not computed there"

    # ---------------------------------------------------------------------------------------------------- layouts

    def _list_entries_by_device(
        self, value: Value, layout: Layout | None
    ) -> list[tuple[IndexRanges, ...] | None] | str:
        """Return the entries of `value` that each device has in a layout; None for a device without the value.

        A malformed layout gives the fault as text.
        """
        full = tuple(map(make_index_of_all_entries, value.shape))
        if isinstance(layout, Local):
            if not layout.devices or not all(0 <= d < self.device_count for d in layout.devices):
                return f"is on devices {list(layout.devices)} of {self.device_count}"
            return [full if d in layout.devices else None for d in range(self.device_count)]
        if isinstance(layout, Shard):
            if why := self._check_shard_form_and_coverage(value, layout):
                return why
            entries_of: list[tuple[IndexRanges, ...] | None] = []
            for runs in layout.index_ranges:
                entries_of.append((*full[: layout.axis], concatenate_indices([runs]), *full[layout.axis + 1 :]))
            return entries_of
        if layout is None or isinstance(layout, Partial):
            return f"has the layout {layout}"
        return [full] * self.device_count

    def _check_shard_form_and_coverage(self, value: Value, layout: Shard) -> str | None:
        """Return why a sharded layout is malformed or leaves entries of `value` on no device; None if it is right."""
        if not 0 <= layout.axis < len(value.shape) or len(layout.index_ranges) != self.device_count:
            return f"is sharded along axis {layout.axis} for {format_count(len(layout.index_ranges), 'device')}"
        n, dtype = value.shape[layout.axis], value.dtype
        if any(len(run) != 2 for runs in layout.index_ranges for run in runs):
            return "has index ranges that are not pairs of offset and length"
        if any(start < 0 or k < 0 or start + k > n for runs in layout.index_ranges for start, k in runs):
            return f"has index ranges outside its {format_count(n, 'entry', 'entries')}"
        in_blocks = dtype.is_quantised and layout.axis == len(value.shape) - 1
        if in_blocks and any(part % dtype.block for runs in layout.index_ranges for run in runs for part in run):
            return f"is split inside quantisation blocks of {dtype.block}"
        have = np.zeros(n, bool)
        for runs in layout.index_ranges:
            have[list_entry_numbers(concatenate_indices([runs]))] = True
        missing = int(n - have.sum())
        return f"has {missing} of {format_count(n, 'entry', 'entries')} on no device" if missing else None

    def _record_leaf_facts(self, node: Node, leaf_facts: dict[tuple[int, str], DeviceValueFact]) -> Iterator[str]:
        """Record the entries of a leaf that each device has by its layout; yield a fault if the layout is wrong.

        Args:
            node: The leaf.
            leaf_facts: Receives the facts, by device number and leaf name.
        """
        value, layout = node.results[0], self.plan.leaves.get(node.name)
        axes = self._list_entries_by_device(value, layout)
        if isinstance(axes, str):
            yield f"{node.op} %{node.label} {axes}"
            return
        if node.op == "input" and (isinstance(layout, Shard) or any(a != axes[0] for a in axes)):
            yield f"input %{node.label} must be whole on every device, but its layout is {layout}"
            return
        number = self.numbering.number_by_value[value]
        # Devices with the same entries share one fact.
        fact_by_entries = {a: DeviceValueFact(number, a) for a in {*axes} if a is not None}
        leaf_facts.update({(d, node.name): fact_by_entries[a] for d, a in enumerate(axes) if a is not None})

    # ------------------------------------------------------------------------------------------------------- ends

    def _find_missing_wrong_or_unknown_outputs(self, trace: ValueTrace) -> Iterator[str]:
        """Yield faults of outputs: missing or wrong outputs of a device, and outputs unknown to the user's graph."""
        for name, value in self.plan.graph.outputs.items():
            axes = self._list_entries_by_device(value, self.plan.outputs.get(name))
            if isinstance(axes, str):
                yield f"output {name!r} {axes}"
                continue
            for device, expected_entries in enumerate(axes):
                local = self.plan.device_plans[device].graph.outputs.get(name)
                if (
                    expected_entries is not None
                    and local is None
                    and not _has_entries_only_on_other_devices(self.plan.outputs[name], device)
                ):
                    yield f"output {name!r} is missing on device {device}"
                elif expected_entries is not None and local is not None:
                    yield from self._find_end_value_faults(
                        trace, device, local, value, expected_entries, f"output {name!r}"
                    )
        for device, device_plan in enumerate(self.plan.device_plans):
            strange = {name: v for name, v in device_plan.graph.outputs.items() if name not in self.plan.graph.outputs}
            if strange:
                used = {s for node in device_plan.graph.nodes for s in node.inputs}
                used |= {v for name, v in device_plan.graph.outputs.items() if name not in strange}
            for name, local in strange.items():
                if local.node.op not in COLLECTIVES or local in used:  # not an end for other devices
                    yield f"device {device} has an output {name!r}, which the graph does not have"

    def _find_update_faults(self, trace: ValueTrace) -> Iterator[str]:
        """Yield faults of state updates: wrong or missing updates, and states that a device should have but lacks."""
        updates_by_name = {s.node.name: (s, v) for s, v in self.plan.graph.updates.items()}
        entries_by_state = {
            s: self._list_entries_by_device(s, self.plan.leaves.get(s.node.name)) for s in self.plan.graph.states
        }
        for device, device_plan in enumerate(self.plan.device_plans):
            updates: Mapping[str, Value] = {s.node.name: v for s, v in device_plan.graph.updates.items()}
            state_names = {v.node.name for v in device_plan.graph.states}
            for state, axes in entries_by_state.items():
                name = state.node.name
                mine = None if isinstance(axes, str) else axes[device]
                new = updates_by_name.get(name, (state, state))[1]
                changes = self.numbering.number_by_value[new] != self.numbering.number_by_value[state]
                if mine is None:
                    if name in updates:
                        yield f"device {device} updates state %{quote_node_name(name)}, which it does not have"
                elif name in updates:
                    yield from self._find_end_value_faults(
                        trace, device, updates[name], new, mine, f"state %{quote_node_name(name)}"
                    )
                elif changes and 0 not in map(len, mine):
                    yield f"device {device} does not update its part of state %{quote_node_name(name)}"
                if (
                    mine is not None
                    and name not in state_names
                    and _is_read_from_device_after_run(self.plan.leaves[name], device, mine)
                ):
                    label = f"%{quote_node_name(name)}"
                    yield f"device {device} does not have state {label}, which is read from this device between runs"

    def _find_end_value_faults(
        self,
        trace: ValueTrace,
        device: int,
        device_value: Value,
        graph_value: Value,
        expected_entries: tuple[IndexRanges, ...],
        subject: str,
    ) -> Iterator[str]:
        """Yield a fault if an output or a new state of a device is another value, or has other entries than planned.

        Args:
            trace: The derived facts about all device values.
            device: The number of the device.
            device_value: The value on the device at the end of a run.
            graph_value: The value of the user's graph that it must be.
            expected_entries: The entries of `graph_value` that the device must have.
            subject: The subject of the message, such as ``output 'y'``.
        """
        facts = trace.find_equal_graph_values(device, device_value)
        if not any(self.numbering.is_proof_of_exact_entries(h, graph_value, expected_entries) for h in facts):
            number = self.numbering.number_by_value[graph_value]
            others = [
                "a partial sum that no all-reduce completes"
                if h.partial_sum
                else f"entries {[format_index(i) for i in h.axes]}"
                for h in facts
                if h.value_number == number
            ]
            yield (
                f"{subject} on device {device} should be entries {[format_index(i) for i in expected_entries]} "
                f"of {graph_value!r} and is {others[0] if others else 'another value'}"
            )
