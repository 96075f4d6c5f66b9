"""Device plans: the graph and the program of one device of a plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any, NamedTuple

from ...backends.base import BACKEND_KIND, Backend, Device, Program
from ...backends.capabilities import STAND_IN, KernelCall, ListsKernels, can_group_overlap
from ...backends.fusion.overlap import find_instructions_beside_collectives
from ...graph.errors import PlanError
from ...graph.graph import Graph
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node
from ...graph.old_names import RenamedAttribute
from ...graph.repeated_runs import DeviceNodeRepetitions, ShortenedGraph, split_numbered_name
from ...graph.validation import instance_of, list_of, pair_of, validate_constructor
from ...ops.collectives import COLLECTIVES, POINT_TO_POINT_OPS, find_collective_sequence_number
from ..records.illegal_records import blame_illegal_record
from .lower import FusedGroups, lower_with_state_saves
from .structural_equality import (
    make_leaf_output_and_collective_key,
    make_structural_key,
    restore_graph_names,
    with_numbered_names,
)
from .unroll import unroll_kernel_calls, unroll_program

Devices = Sequence[tuple[Backend, Device]]
DEVICES_KIND = list_of(
    pair_of(BACKEND_KIND, instance_of(Device)),
    "a sequence of pairs of a backend and a Device",
)
"""The devices of a plan, each with its backend."""


class KernelLaunchesAndFallbacks(NamedTuple):
    """How many kernels a program launches, which instructions have no compiled kernel, and which ones overlap.

    - `launches`: the kernel launches of each instruction; a fraction if one kernel computes several instructions.
    - `numpy_fallback_positions`: the positions of the instructions that NumPy computes for lack of a compiled kernel.
    - `overlapped_instructions`: the instructions that run at the same time as a collective, by its position.
    """

    launches: Sequence[float]
    numpy_fallback_positions: frozenset[int]
    overlapped_instructions: Mapping[int, Sequence[int]]


@validate_constructor(
    PlanError,
    device=instance_of(Device),
    backend=BACKEND_KIND,
    graph=instance_of(Graph),
    program=instance_of(Program),
)
@dataclass(frozen=True, eq=False)
class DevicePlan:
    """The plan of one device: its part of the graph, with local shapes, and the program that runs this part.

    - `graph`: the nodes that the device computes, with the `cont` nodes (copies) that its kernels need.
    - `program`: the instructions; the `index` of each is the position of its node in `graph`.
    - `short`: a graph and a program with few repeated layers, or None. If it is present, `graph` and `program` are
      unrolled from it at the first access.
    """

    device: Device
    backend: Backend
    graph: Graph
    program: Program
    short: UnrollableProgram | None = field(default=None, init=False, compare=False, repr=False)

    memory = RenamedAttribute("count_memory_bytes_by_kind")

    def __getattr__(self, name: str) -> Any:
        if name not in ("graph", "program") or self.short is None:
            raise AttributeError(name)
        for own, value in zip(("graph", "program"), self.short.unrolled_graph_and_program, strict=True):
            object.__setattr__(self, own, value)
        return vars(self)[name]

    @cached_property
    @blame_illegal_record
    def predicted_kernel_calls(self) -> Sequence[KernelCall] | None:
        """The kernel calls that the backend will make for the program; None if the backend cannot list them.

        Calls that depend on the addresses of allocated memory are left out.
        """
        backend, device, short = self.backend, self.device, self.short
        if not isinstance(backend, ListsKernels):
            return None
        if short is not None:
            known = unroll_kernel_calls(
                short.graph, short.program, short.shortened_graph, backend.list_kernels(short.program, device)
            )
            if known is not None:
                return known
        return backend.list_kernels(self.program, device)

    @cached_property
    @blame_illegal_record
    def overlapped_instructions(self) -> Mapping[int, Sequence[int]]:
        """The instructions that run at the same time as a collective, by the position of the collective in the program.

        Empty if the backend cannot overlap collectives with other instructions.
        """
        if not can_group_overlap([(self.backend, self.device)]):
            return {}
        together = {
            number: call.instruction_numbers
            for call in self.predicted_kernel_calls or ()
            for number in call.instruction_numbers
        }
        order = range(len(self.program.instructions))
        return find_instructions_beside_collectives(
            self.program, dict.fromkeys(together.get(number, (number,)) for number in order)
        )

    @blame_illegal_record
    def predict_launches_by_instruction(self) -> Sequence[float]:
        """Return the number of kernel launches of each instruction, as predicted by the backend.

        Instructions that one kernel computes together share its launch in equal parts: 0.5 each for two instructions.
        If the backend makes no prediction, each instruction counts as one launch.
        """
        if self.predicted_kernel_calls is None:
            return [1.0] * len(self.program.instructions)
        launches = [0.0] * len(self.program.instructions)
        for call in self.predicted_kernel_calls:
            for number in call.instruction_numbers:
                launches[number] += call.launches / len(call.instruction_numbers)
        return launches

    @blame_illegal_record
    def find_numpy_fallback_positions(self) -> frozenset[int]:
        """Find the positions of the instructions that NumPy computes, for lack of a compiled kernel in the backend."""
        return frozenset(
            n for call in self.predicted_kernel_calls or () if call.kernel == STAND_IN for n in call.instruction_numbers
        )

    @blame_illegal_record
    def find_kernel_launches_and_fallbacks(self) -> KernelLaunchesAndFallbacks:
        """Return the kernel launches, the instructions that NumPy computes, and the overlap with collectives.

        Programs with equal structure have equal results.
        """
        return KernelLaunchesAndFallbacks(
            self.predict_launches_by_instruction(), self.find_numpy_fallback_positions(), self.overlapped_instructions
        )

    @blame_illegal_record
    def count_memory_bytes_by_kind(self) -> dict[str, int]:
        """Return the bytes that the program needs on the device, by kind: weight, state, constant and arena."""
        return {kind: self.program.nbytes(kind) for kind in ("weight", "state", "constant", "arena")}


@dataclass(frozen=True, eq=False)
class UnrollableProgram:
    """A device's graph and program with only a few of the repeated layers, and all that is needed to unroll them.

    Planning a few layers is much faster than planning all.

    - `graph`, `program`: the device's part of the short graph, and the program of this part.
    - `shortened_graph`: the short graph, the full ("deep") graph with all layers, and the relation between the two.
    """

    graph: Graph
    program: Program
    shortened_graph: ShortenedGraph

    @cached_property
    def unrolled_graph_and_program(self) -> tuple[Graph, Program]:
        """The graph and the program of the device with all repeated layers; computed at the first access."""
        return unroll_program(self.graph, self.program, self.shortened_graph)


def make_lazily_unrolled_device_plan(device: Device, backend: Backend, short: UnrollableProgram) -> DevicePlan:
    """Make a device plan that builds its graph and program at the first access, by unrolling `short`."""
    device_plan: DevicePlan = object.__new__(DevicePlan)
    for name, value in {"device": device, "backend": backend, "short": short}.items():
        object.__setattr__(device_plan, name, value)
    return device_plan


def unroll_device_plans(device_plans: Sequence[DevicePlan], shortened: ShortenedGraph) -> tuple[DevicePlan, ...]:
    """Turn device plans of a shortened graph, with few repeated layers, into device plans of the full graph.

    The graph and the program of each plan are unrolled at the first access. Device plans that share a program also
    share the unrolled program.
    """
    shorts: dict[tuple[int, int], UnrollableProgram] = {}
    for device_plan in device_plans:
        shorts.setdefault(
            (id(device_plan.graph), id(device_plan.program)),
            UnrollableProgram(device_plan.graph, device_plan.program, shortened),
        )
    return tuple(
        make_lazily_unrolled_device_plan(
            device_plan.device, device_plan.backend, shorts[id(device_plan.graph), id(device_plan.program)]
        )
        for device_plan in device_plans
    )


def find_first_devices_with_same_program(device_plans: Sequence[DevicePlan]) -> list[int]:
    """Return for each device plan the number of the first device that has the same program object.

    A device without an earlier such device gets its own number.
    """
    first: dict[int, int] = {}
    return [first.setdefault(id(device_plan.program), number) for number, device_plan in enumerate(device_plans)]


def find_collective_group_of_each_device(programs: Sequence[Program]) -> tuple[tuple[int, ...], ...]:
    """Find the collective group of each device: the numbers of the devices that call its collectives with it.

    Devices that call a collective with the same sequence number are one group. Sends and receives do not count. Only
    the first collective of each program is read: the verifier checks that all collectives of a device have one group. A
    device without collectives is a group alone. If no device has a collective, all devices are one group.
    """
    numbers: list[int | None] = []
    known: dict[int, int | None] = {}
    for program in programs:
        if id(program) not in known:
            together = (i for i in program.instructions if i.op in COLLECTIVES and i.op not in POINT_TO_POINT_OPS)
            known[id(program)] = next((find_collective_sequence_number(i.op, i.attrs) for i in together), None)
        numbers.append(known[id(program)])
    if not any(number is not None for number in numbers):
        return (tuple(range(len(numbers))),) * len(numbers)
    members: dict[int | None, list[int]] = {}
    for device, number in enumerate(numbers):
        members.setdefault(number, []).append(device)
    return tuple((d,) if number is None else tuple(members[number]) for d, number in enumerate(numbers))


def build_device_plans(
    graphs: Sequence[Graph], group: Devices, shortened: ShortenedGraph | None = None
) -> tuple[DevicePlan, ...]:
    """Lower the graph of each device to a program, and return the device plans.

    1. Structurally equal graphs on devices of one kind are lowered once, with node positions in place of names.
    2. Each graph gets a copy of this program with its own names. Devices with equal graphs share the copy.
    3. A device that does not support the state saves of the shared program is lowered separately.

    Args:
        graphs: The graph of each device; the device supports all of its nodes.
        group: The backend and the device of each graph.
        shortened: The shortened graph, if the graphs have few repeated layers and will be unrolled; else None.
    """
    numbers: dict[Hashable, int] = {}  # instead of structural keys: a lookup of one hashes all nodes of a graph
    patterns: dict[Graph, int] = {}
    for graph in set(graphs):
        its = (
            make_structural_key(graph),
            None if shortened is None else tuple(shortened.short_repetition_by_node(graph).values()),
        )
        patterns[graph] = numbers.setdefault(its, len(numbers))
    alone = {known for known, times in Counter(patterns.values()).items() if times == 1}
    identities = {graph: make_leaf_output_and_collective_key(graph) for graph in patterns}
    lowered: dict[Hashable, tuple[Graph, Program, tuple[Node, ...]]] = {}
    known: dict[Hashable, tuple[Graph, Program]] = {}
    gathered: dict[Hashable, FusedGroups] = defaultdict(dict)
    device_plans = []
    for graph, (backend, device) in zip(graphs, group, strict=True):
        kind: Hashable = (type(backend), backend.name, device.kind, patterns[graph])
        lowered_entry = lowered.get(kind)
        own = lowered_entry is None or not all(backend.supports(node, device).ok for node in lowered_entry[2])
        is_alone = patterns[graph] in alone  # no other graph shares its program, so names need no numbers
        if lowered_entry is None or own:
            of_its_kind = gathered[type(backend), backend.name, device.kind]
            own_names = graph if is_alone else with_numbered_names(graph)
            lowered_entry = lower_with_state_saves(
                own_names, backend, device, _find_device_repetitions(graph, is_alone, shortened), of_its_kind
            )
            lowered.setdefault(kind, lowered_entry)
        key = (kind, identities[graph])
        named_entry = known.get(key)
        if named_entry is None or own:
            named_entry = (
                lowered_entry[:2] if is_alone else restore_graph_names(lowered_entry[0], lowered_entry[1], graph)
            )
            known.setdefault(key, named_entry)
        device_plans.append(DevicePlan(device, backend, *named_entry))
    return tuple(device_plans)


def _find_device_repetitions(
    graph: Graph, is_alone: bool, shortened: ShortenedGraph | None
) -> DeviceNodeRepetitions | None:
    """Return the repetitions of layers in the program of a device; None without a shortened graph.

    Args:
        graph: The graph of the device.
        is_alone: Whether only this device runs the program. Then nodes of the program have the names of `graph`.
            Devices that share a program name a node by its position in `graph`; the result then translates positions
            to names.
        shortened: The graph with each repeated layer once or twice, or None.
    """
    if shortened is None or is_alone:
        return None if shortened is None else DeviceNodeRepetitions(shortened)

    def find_node_name(node: Node) -> str:
        number, ending = split_numbered_name(node.name)
        return graph.nodes[number].name + ending

    return DeviceNodeRepetitions(shortened, find_node_name)
