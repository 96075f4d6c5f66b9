"""Lowering of one graph to a program: the execution order of the nodes, and a buffer location for each value.

1. Insert copies where a kernel or a state update needs them (`strides`, `execution_order`).
2. Choose the execution order, and the states that are updated in place (`execution_order`).
3. Ask the backend for groups of nodes that it runs in one kernel, and move the nodes of a group together.
4. Add the saves of states, so that a failed run can be undone (`state_saves`).
5. Choose the values that share memory, and the offset of each value in the arena (`arena`).
6. Build the instructions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from types import MappingProxyType

from ...backends.base import BACKEND_KIND, Backend, BufferSpec, Device, Instruction, Program, Tensor
from ...backends.capabilities import ReportsFusion, can_group_overlap
from ...backends.fusion.overlap import can_be_overlapped
from ...graph.dtypes import DType
from ...graph.errors import PlanError
from ...graph.graph import Graph, assign_names
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...graph.repeated_runs import PREAMBLE, DeviceNodeRepetitions
from ...graph.spec import Spec
from ...graph.validation import instance_of, validate_arguments
from ...ops import op_of
from ...ops.collectives import COLLECTIVES
from ...ops.elementwise.binary import cont
from ...ops.registry import find_graph_role, find_inplace_operand
from .arena import Arena, Lifetime, assign_arena_offsets, assign_arena_offsets_for_any_repetition_order
from .execution_order import (
    ExecutionOrderWithInplaceStates,
    can_overwrite,
    insert_copies_before_state_updates,
    is_matmul_operand_computed_in_group,
    order_nodes_for_inplace_state_updates,
)
from .state_saves import StateSave, build_state_saves
from .strides import StridedView, insert_dense_copies
from .structural_equality import make_key_without_exact_sizes

ARENA_BUFFER = 0
_OPS_WITH_OWN_BUFFER = ("weight", "state", "constant")
FusedGroups = dict[Hashable, Sequence[Sequence[int]]]
"""The groups of node numbers that a backend runs in one kernel, by the size class key of the graph."""


@validate_arguments(PlanError, graph=instance_of(Graph), backend=BACKEND_KIND, device=instance_of(Device))
def lower_graph(graph: Graph, backend: Backend, device: Device) -> tuple[Graph, Program]:
    """Lower a graph to a program for one device; raise `PlanError` if the device does not support a node.

    Returns:
        The graph with the copies that kernels need, and its program.
    """
    require_device_support(graph, backend, device)
    graph, program, _ = lower_with_state_saves(graph, backend, device)
    return graph, program


def lower_with_state_saves(
    graph: Graph,
    backend: Backend,
    device: Device,
    repetitions: DeviceNodeRepetitions | None = None,
    fused_groups: FusedGroups | None = None,
) -> tuple[Graph, Program, tuple[Node, ...]]:
    """Lower a graph to a program for one device, with saves of the states that the program overwrites.

    Args:
        graph: The graph; the device supports all of its nodes.
        backend: The backend of the device.
        device: The device.
        repetitions: The repetitions of repeated layers in the graph; None unless the program will be unrolled.
        fused_groups: Known groups of nodes that the backend runs in one kernel. An entry is used if its order is
            valid for this graph. Otherwise the backend is asked, and its answer is stored here.

    Returns:
        The graph with the copies that kernels need, its program, and the nodes that save and restore states. These
        nodes are not in the graph.
    """
    graph, views = insert_dense_copies(insert_copies_before_state_updates(graph), backend.reads_strided)
    order = order_nodes_for_inplace_state_updates(
        graph,
        views,
        lambda value: backend.storage_spec(value.spec, find_graph_role(value)),
        can_group_overlap([(backend, device)]),
    )
    groups: Sequence[Sequence[Node]] = ()
    if isinstance(backend, ReportsFusion):
        known, key = {} if fused_groups is None else fused_groups, make_key_without_exact_sizes(graph)
        if (groups := _select_node_groups(graph, known.get(key, ()))) and not order.can_run_in_other_order(
            chain(*groups), views
        ):
            groups = ()
        if not groups:
            roomy = _ProgramBuilder(graph, backend, device, views, order, is_roomy=True)
            known[key] = roomy.list_node_numbers_of_instructions(
                backend.list_fused_groups(roomy.build_program(), device)
            )
            groups = _select_node_groups(graph, known[key])
    lowering = _ProgramBuilder(graph, backend, device, views, order, repetitions, groups)
    added = tuple(
        node
        for some in lowering.saves_by_writer.values()
        for save in some
        for node in (save.save_node, save.restore_node)
    )
    return graph, lowering.build_program(), added


def require_device_support(graph: Graph, backend: Backend, device: Device) -> None:
    """Raise `PlanError` for the first node of a graph that a device does not support."""
    for node in graph.nodes:
        if node.is_leaf or op_of(node).is_view:
            continue
        if not (support := backend.supports(node, device)).ok:
            raise PlanError(f"{node!r} cannot run on {device}: {support.reason}")


def _select_node_groups(graph: Graph, node_number_groups: Sequence[Sequence[int]]) -> Sequence[Sequence[Node]]:
    """Return groups of nodes of a graph, given groups of node numbers."""
    return [[graph.nodes[number] for number in group] for group in node_number_groups]


def _split_and_order_groups_by_repetition(
    groups: Sequence[Sequence[Node]], repetition_of_node: Mapping[Node, int]
) -> Sequence[Sequence[Node]]:
    """Split fused groups at the borders of repeated layers, and order them by layer, so that layers can be unrolled.

    Each node still follows its operands, because no node reads a result of a later repetition.

    Args:
        groups: The groups of nodes, in execution order.
        repetition_of_node: The number of the repetition (occurrence of the repeated layer) of each node.
    """
    parted: dict[int, list[Sequence[Node]]] = defaultdict(list)
    for group in groups:
        its: dict[int, list[Node]] = defaultdict(list)
        for node in group:
            its[repetition_of_node[node]].append(node)
        for run, part in its.items():
            parted[run].append(part)
    return [part for _, parts in sorted(parted.items()) for part in parts]


@dataclass(frozen=True, slots=True)
class _MemoryReuse:
    """The result of the memory analysis: which values share memory, and until which step each memory is read.

    - `slot_of`: for each value that shares memory, the value that owns it. Other values own their memory.
    - `last_reading_step`: the last step that reads the memory of each value.
    - `step_by_node`: the step of each node.
    - `overlap_end_by_node`: for each collective that overlaps other steps, the last of these steps.
    """

    slot_of: Mapping[Value, Value]
    last_reading_step: Mapping[Value, int]
    step_by_node: Mapping[Node, int]
    overlap_end_by_node: Mapping[Node, int]


class _ProgramBuilder:
    """The builder of the program of one graph: it decides instruction order, shared memory, buffers and offsets.

    Args:
        graph: The graph with dense copies.
        backend: The backend of the device.
        device: The device.
        views: The strided view of each value.
        order: The execution order, and the states that are updated in place.
        repetitions: The repetitions of repeated layers; None unless the program will be unrolled.
        groups: The groups of nodes that the backend may run in one kernel, in execution order. No node of a group
            writes memory that another node of the group reads. Empty: each node is a group.
        is_roomy: Whether no memory is reused. The backend then finds its groups without limits by shared memory.
    """

    def __init__(
        self,
        graph: Graph,
        backend: Backend,
        device: Device,
        views: Mapping[Value, StridedView],
        order: ExecutionOrderWithInplaceStates,
        repetitions: DeviceNodeRepetitions | None = None,
        groups: Sequence[Sequence[Node]] = (),
        is_roomy: bool = False,
    ) -> None:
        self.graph, self.backend, self.execution_order, self.device_repetitions = graph, backend, order, repetitions
        self.node_names, self.views = assign_names(graph), dict(views)
        self.can_overlap_collectives = can_group_overlap([(backend, device)])
        self.stored_specs: dict[Value, Spec] = {}
        self.tensor_by_value: dict[Value, Tensor] = {}
        self.node_indices = {node: i for i, node in enumerate(graph.nodes)}
        self.saves_by_writer: dict[Node | None, list[StateSave]] = defaultdict(list)  # by the node that they precede
        for save in build_state_saves(order, views, backend, device):
            self.saves_by_writer[save.writer].append(save)
            self.views.update(save.views)
            state = save.state.node.name
            self.node_names.update({save.save_node: f"{state}.save", save.restore_node: f"{state}.undo"})
        groups = groups or [(n,) for n in order.nodes if not n.is_leaf and not op_of(n).is_view]
        run_of = {} if repetitions is None else repetitions.short_repetition_by_node(graph)
        if groups and run_of:
            groups = _split_and_order_groups_by_repetition(groups, run_of)
        self.group_of, self.is_roomy = {node: group for group in groups for node in group}, is_roomy
        self.ordered_nodes = [*self.group_of]
        self.repetition_of_step = (
            list(accumulate((run_of[node] for node in self.ordered_nodes), max)) if repetitions else []
        )
        self.memory_slots = self._find_memory_reuse_and_last_reads()
        step = self.memory_slots.step_by_node
        self.group_spans = {step[n]: (step[group[0]], step[group[-1]]) for n, group in self.group_of.items()}
        self.buffers, self.buffer_locations, self.scratch_tensors = self._assign_buffers_locations_and_scratch()

    def build_program(self) -> Program:
        """Build the program: an instruction for each node, saves before state overwrites, final copies of states."""
        instructions: list[Instruction] = []
        undo: list[tuple[int, Instruction]] = []
        for node in (*self.ordered_nodes, None):
            for save in self.saves_by_writer.get(node, ()):
                keep = self._build_instruction(save.save_node)
                undo.append((len(instructions), self._build_undo_instruction(save, keep)))
                instructions.append(keep)
            if node is not None:
                instructions.append(self._build_instruction(node))
        for state, new in self.execution_order.copied_states.items():
            name = f"{self.node_names[state.node]}.update"
            source, target = self._find_or_make_tensor(new), self._find_or_make_tensor(state)
            instructions.append(Instruction(cont.name, (source,), (target,), cont.defaults, None, name))
        return Program(
            tuple(self.buffers),
            tuple(instructions),
            MappingProxyType({v.node.name: self._find_or_make_tensor(v) for v in self.graph.inputs}),
            MappingProxyType({name: self._find_or_make_tensor(v) for name, v in self.graph.outputs.items()}),
            tuple(undo),
        )

    def list_node_numbers_of_instructions(self, instruction_groups: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Translate groups of instruction positions into groups of node numbers; skip instructions without a node."""
        instructions = self.build_program().instructions
        numbers = ([instructions[n].index for n in group if instructions[n].index >= 0] for group in instruction_groups)
        return [group for group in numbers if group]

    def _build_undo_instruction(self, save: StateSave, save_instruction: Instruction) -> Instruction:
        """Build the instruction that copies saved entries back into a state, in order to undo a failed run.

        The first operand of `save_instruction` is the state.
        """
        (state, *_), back = save_instruction.src, self._build_instruction(save.restore_node)
        assert state is not None, "what is saved is there"
        return replace(back, dst=(state,))

    def _iterate_state_saves(self) -> Iterator[StateSave]:
        """Yield all saves of states in the program, which serve to undo a failed run."""
        return (save for saves in self.saves_by_writer.values() for save in saves)

    def _build_instruction(self, node: Node) -> Instruction:
        """Build the instruction of a node, with the tensors of its operands, results and scratch."""
        src = tuple(None if s is None else self._find_or_make_tensor(s) for s in node.src)
        dst = tuple(map(self._find_or_make_tensor, node.results))
        index = self.node_indices.get(node, -1)
        return Instruction(node.op, src, dst, node.attrs, self.scratch_tensors.get(node), self.node_names[node], index)

    # ------------------------------------------------------------------------------------------------- sharing

    def _find_memory_reuse_and_last_reads(self) -> _MemoryReuse:
        """Find the results that reuse the memory of another value, and the step at which each memory is read last.

        A result is written over an updated state, or over an in-place operand that no later node reads. Values that the
        undo of a failed run reads are needed until the end.
        """
        step = {n: i for i, n in enumerate(self.ordered_nodes)}
        last_read: dict[Value, int] = {}
        end = len(self.ordered_nodes)
        for node in self.ordered_nodes:
            for source in node.inputs:
                last_read[self.views[source].base] = end if self.is_roomy else step[node]
        if self.device_repetitions is not None:  # any repetition may be the last reader
            behind = bisect_left(self.repetition_of_step, self.repetition_of_step[-1])
            for value, last in last_read.items():
                if (
                    self.device_repetitions.is_preamble_without_carried_value(value.node)
                    and self.repetition_of_step[last] > PREAMBLE
                    and last < behind
                ):
                    last_read[value] = behind - 1
        for value in (*self.graph.outputs.values(), *self.execution_order.copied_states.values()):
            last_read[self.views[value].base] = end
        slot_of: dict[Value, Value] = dict(self.execution_order.inplace_states)
        for save in self._iterate_state_saves():
            step[save.save_node], step[save.restore_node] = (
                end if save.writer is None else step[save.writer],
                end,
            )
            slot_of[save.restore_node.results[0]] = save.state
            for source in (*save.save_node.inputs, *save.restore_node.inputs):
                last_read[self.views[source].base] = end
        for node in self.ordered_nodes:
            for index, _ in op_of(node).inplace_pairs(node.attrs):
                result = node.results[index]
                victim = (
                    None
                    if result in slot_of
                    else self._find_owner_of_reusable_operand_memory(result, slot_of, last_read, step)
                )
                if victim is not None:
                    slot_of[result] = victim
                    last_read[victim] = max(last_read[victim], last_read.get(result, step[node]))
        until = self._find_overlap_end_steps(step) if self.can_overlap_collectives else {}
        for node, last in until.items():
            base = self.views[node.inputs[0]].base
            slot = slot_of.get(base, base)
            last_read[slot] = max(last_read.get(slot, last), last)
        return _MemoryReuse(slot_of, last_read, step, until)

    def _find_overlap_end_steps(self, step_by_node: Mapping[Node, int]) -> dict[Node, int]:
        """Return for each collective that overlaps with compute the last step that may run at the same time.

        The overlap ends before the next collective, and before the first reader of the result. Until then, no
        instruction may write the memory that the collective reads.
        """
        until: dict[Node, int] = {}
        for at, collective in enumerate(self.ordered_nodes):
            if not can_be_overlapped(collective.op):
                continue
            last = at
            for node in self.ordered_nodes[at + 1 :]:
                if node.op in COLLECTIVES or any(self.views[s].base.node is collective for s in node.inputs):
                    break
                last = step_by_node[node]
            if last > at:
                until[collective] = last
        return until

    def _find_owner_of_reusable_operand_memory(
        self,
        result: Value,
        slot_of: Mapping[Value, Value],
        last_reading_step: Mapping[Value, int],
        step_by_node: Mapping[Node, int],
    ) -> Value | None:
        """Find an operand with memory that an in-place result can take over; return the owner of this memory, or None.

        Other operands and later nodes may not need the memory. `slot_of` has owners of memory.
        """
        node, source = result.node, find_inplace_operand(result)
        if source is None:
            return None
        base = self.views[source].base
        slot = slot_of.get(base, base)
        dies_here = last_reading_step[base] == last_reading_step.get(slot) == step_by_node[node]
        same_size = self._count_stored_bytes(base) == self._count_stored_bytes(result)
        if (slot.node.is_leaf and slot.node.op != "input") or not dies_here or not same_size:
            return None
        others = [v for v in node.inputs if slot_of.get(self.views[v].base, self.views[v].base) == slot]
        if any(self.views[v].base != base for v in others) or not can_overwrite(result, base, self.views):
            return None
        group = self.group_of[node]
        is_read_again = any(self.views[v].base == base for other in group if other is not node for v in other.inputs)
        return None if is_read_again or is_matmul_operand_computed_in_group(result, base, group, self.views) else slot

    # ------------------------------------------------------------------------------------------------- placing

    def _infer_stored_spec(self, value: Value) -> Spec:
        """Return the dtype and shape in which the backend stores a value; the results are cached."""
        if (spec := self.stored_specs.get(value)) is None:
            spec = self.stored_specs[value] = self.backend.storage_spec(value.spec, find_graph_role(value))
        return spec

    def _count_stored_bytes(self, value: Value) -> int:
        """Return the number of bytes of a value in the dtype and shape in which the backend stores it."""
        return self._infer_stored_spec(value).nbytes

    def _assign_buffers_locations_and_scratch(
        self,
    ) -> tuple[list[BufferSpec], dict[Value, tuple[int, int]], dict[Node, Tensor]]:
        """Choose the buffers, the location of each value that owns its memory, and the scratch memory of each node.

        Returns:
            The buffers of the program, the location (buffer number, byte offset) of each value that owns its memory,
            and the scratch tensor of each node that needs one.
        """
        owners: dict[Value, Lifetime] = {}
        make_lifetime = self._make_lifetime_extended_to_fused_groups
        for value in self.graph.inputs:
            last = self.memory_slots.last_reading_step.get(value, 0)
            owners[value] = make_lifetime(self._count_stored_bytes(value), -1, last)
        for node in (*self.ordered_nodes, *(save.save_node for save in self._iterate_state_saves())):
            now = self.memory_slots.step_by_node[node]
            for value in node.results:
                if value not in self.memory_slots.slot_of:
                    owners[value] = make_lifetime(
                        self._count_stored_bytes(value), now, self.memory_slots.last_reading_step.get(value, now)
                    )
        others = [node for save in self._iterate_state_saves() for node in (save.save_node, save.restore_node)]
        needs = {n: nbytes for n in (*self.ordered_nodes, *others) if (nbytes := self.backend.scratch(n))}
        step, until = self.memory_slots.step_by_node, self.memory_slots.overlap_end_by_node
        until = dict.fromkeys(needs, len(self.ordered_nodes)) if self.is_roomy else until
        temporary = [make_lifetime(nbytes, step[n], until.get(n, step[n])) for n, nbytes in needs.items()]
        arena = self._build_arena_unrollable_if_layers_repeat([*owners.values(), *temporary])
        buffers = [BufferSpec("arena", "", arena.nbytes)]
        places = {v: (ARENA_BUFFER, offset) for v, offset in zip(owners, arena.offsets, strict=False)}
        scratch = {
            n: Tensor(ARENA_BUFFER, offset, (nbytes,), (1,), DType.I8)
            for (n, nbytes), offset in zip(needs.items(), arena.offsets[len(owners) :], strict=True)
        }
        for node in self.graph.nodes:
            if node.op in _OPS_WITH_OWN_BUFFER:
                spec, stored = node.specs[0], self._infer_stored_spec(node.results[0])
                places[node.results[0]] = (len(buffers), 0)
                buffers.append(BufferSpec(node.op, node.name, stored.nbytes, spec, stored))
        return buffers, places, scratch

    def _build_arena_unrollable_if_layers_repeat(self, lifetimes: Sequence[Lifetime]) -> Arena:
        """Assign arena offsets to values; if the graph has repeated layers, so that unrolling can copy the layers."""
        return (
            assign_arena_offsets_for_any_repetition_order(lifetimes, self.repetition_of_step)
            if self.repetition_of_step
            else assign_arena_offsets(lifetimes)
        )

    def _make_lifetime_extended_to_fused_groups(self, nbytes: int, first_step: int, last_step: int) -> Lifetime:
        """Make the lifetime of a value in steps, extended to whole groups of nodes that may run as one kernel.

        One kernel reads and writes during all steps of its group. So the lifetime begins at the first step of the
        group of `first_step`, and ends at the last step of the group of `last_step`.
        """
        return Lifetime(
            nbytes,
            self.group_spans.get(first_step, (first_step, first_step))[0],
            self.group_spans.get(last_step, (last_step, last_step))[1],
        )

    def _find_or_make_tensor(self, value: Value) -> Tensor:
        """Return the location of a value in memory as a tensor; it is made at the first call."""
        if (tensor := self.tensor_by_value.get(value)) is None:
            tensor = self.tensor_by_value[value] = self._make_tensor(value)
        return tensor

    def _make_tensor(self, value: Value) -> Tensor:
        """Make the tensor that describes a value in memory: buffer, byte offset, shape, strides and dtype."""
        view = self.views[value]
        dtype = self._infer_stored_spec(view.base).dtype
        buffer, start = self.buffer_locations[self.memory_slots.slot_of.get(view.base, view.base)]
        offset = start + view.offset * dtype.block_bytes // dtype.block
        return Tensor(buffer, offset, view.shape, view.strides, dtype)
