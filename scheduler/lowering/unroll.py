"""Unrolling: the graph and the program of a deep graph on one device, built from its short graph and program.

The deep graph is the user's graph with all repeated layers, called repetitions. The short graph keeps a few
repetitions, the kinds. Each repetition of the deep graph equals its kind: the same instructions on the same arena
bytes, but with its own leaves. State saves of a repetition lie above the state saves of earlier ones. The numbers of
its collectives follow the numbers of earlier ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ...backends.base import BufferSpec, Instruction, Program, Tensor
from ...backends.capabilities import KernelCall
from ...graph.attrs import Attrs
from ...graph.graph import Graph, assign_names
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...graph.repeated_runs import PREAMBLE, ShortenedGraph, split_numbered_name
from ...ops.collectives import find_collective_sequence_number
from .arena import round_up_to_alignment

ARENA_BUFFER = 0


def unroll_program(graph: Graph, program: Program, shortened: ShortenedGraph) -> tuple[Graph, Program]:
    """Build a device's graph and program with all repeated layers from its graph and program with few of them.

    Args:
        graph: The device's part of the short graph.
        program: The program of `graph`.
        shortened: The short graph, the full ("deep") graph, and the repetitions of both.
    """
    unroller = _RepeatedLayerUnroller(graph, shortened)
    long = unroller.build_unrolled_graph_and_record_nodes()
    return long, unroller.build_unrolled_program(long, program)


def unroll_kernel_calls(
    graph: Graph, program: Program, shortened: ShortenedGraph, short_calls: Sequence[KernelCall]
) -> Sequence[KernelCall] | None:
    """Derive the kernel calls of the unrolled program from the kernel calls of the program with few repeated layers.

    Args:
        graph: The device's part of the short graph.
        program: The program of `graph`.
        shortened: The short graph, the full ("deep") graph, and the repetitions of both.
        short_calls: The kernel calls of `program`.

    Returns:
        The kernel calls; None if one call computes instructions of two repetitions.
    """
    kinds = find_short_repetition_of_each_instruction(graph, program, shortened)
    own: dict[int, list[KernelCall]] = defaultdict(list)
    for call in short_calls:
        kind, *others = {kinds[number] for number in call.instruction_numbers}
        if others:
            return None
        own[kind].append(call)
    first = {kind: kinds.index(kind) for kind in reversed(kinds)}
    found, start = list[KernelCall](), 0
    for _, kind in shortened.deep_and_short_repetitions:
        for call in own[kind]:
            numbers = tuple([start + number - first[kind] for number in call.instruction_numbers])
            found.append(KernelCall(call.kernel, call.source, numbers, call.launches))
        start += kinds.count(kind)
    return found


class _RepeatedLayerUnroller:
    """Builds the graph and the program of all layers from a short graph, which has a few copies of the repeated layer.

    The graph with all layers is called the deep graph. One copy of the layer is called a repetition. A repetition of
    the short graph is the model of several repetitions of the deep graph; its number is called their kind.

    Attributes:
        kind_by_node: The kind of each node of the short graph.
        nodes_by_repetition: For each repetition of the deep graph: its node for each node of the short graph.
    """

    def __init__(self, graph: Graph, shortened: ShortenedGraph) -> None:
        self.short_graph, self.shortened_graph = graph, shortened
        self.kind_by_node = shortened.short_repetition_by_node(graph)
        self.nodes_by_kind: dict[int, list[Node]] = defaultdict(list)
        self.collectives_by_kind: dict[int, list[int]] = defaultdict(list)
        for node in graph.nodes:
            self.nodes_by_kind[self.kind_by_node[node]].append(node)
            if (number := find_collective_sequence_number(node.op, node.attrs)) is not None:
                self.collectives_by_kind[self.kind_by_node[node]].append(number)
        self.nodes_by_repetition: dict[int, dict[Node, Node]] = {}

    # ------------------------------------------------------------------------------------------------- the graph

    def build_unrolled_graph_and_record_nodes(self) -> Graph:
        """Build the graph of the device with all repeated layers, and record the new nodes in `nodes_by_repetition`."""
        first_sequence = min((number for numbers in self.collectives_by_kind.values() for number in numbers), default=0)
        carried: dict[tuple[int, str], Node] = {}
        for run, kind in self.shortened_graph.deep_and_short_repetitions:
            numbers, unrolled_nodes = self.collectives_by_kind[kind], self.nodes_by_repetition.setdefault(run, {})
            for node in self.nodes_by_kind[kind]:
                reads = [
                    None if s is None else (self._find_deep_operand_node(s, run, kind, carried), s.index)
                    for s in node.src
                ]
                src, attrs = tuple([None if read is None else read[0].results[read[1]] for read in reads]), node.attrs
                if (number := find_collective_sequence_number(node.op, attrs)) is not None:
                    attrs = MappingProxyType({**attrs, "sequence": first_sequence + number - min(numbers)})
                unrolled_nodes[node] = Node(
                    node.op, src, attrs, node.specs, self.shortened_graph.deep_name_in_repetition(node.name, run, kind)
                )
            first_sequence += len(numbers)
            offered = ((self._make_carried_value_key(old, kind + 1), new) for old, new in unrolled_nodes.items())
            carried = {place: new for place, new in offered if place is not None}
        ends = {
            **self.nodes_by_repetition[PREAMBLE],
            **self.nodes_by_repetition[self.shortened_graph.deep_repetitions.count],
        }
        updates = {
            self.nodes_by_repetition[run][old.node].results[old.index]: self.nodes_by_repetition[run][new.node].results[
                new.index
            ]
            for run, kind in self.shortened_graph.deep_and_short_repetitions
            for old, new in self.short_graph.updates.items()
            if self.kind_by_node[old.node] == kind
        }
        return Graph({name: ends[v.node].results[v.index] for name, v in self.short_graph.outputs.items()}, updates)

    def _find_deep_operand_node(
        self, source: Value, repetition: int, kind: int, carried: Mapping[tuple[int, str], Node]
    ) -> Node:
        """Find the node of the full ("deep") graph that replaces an operand of the short graph in one repetition.

        This node is in the repetition of the reader, in the repetition before it (a carried value), or before all of
        them.

        Args:
            source: The operand in the short graph.
            repetition: The repetition of the reader in the deep graph.
            kind: The repetition of the short graph that is copied to it.
            carried: The nodes that the repetition before passes to this one, by key (position, name ending).
        """
        if self.kind_by_node[source.node] == kind:
            return self.nodes_by_repetition[repetition][source.node]
        place = self._make_carried_value_key(source.node, kind) if self.kind_by_node[source.node] == kind - 1 else None
        return self.nodes_by_repetition[PREAMBLE][source.node] if place is None else carried[place]

    def _make_carried_value_key(self, node: Node, reader_repetition: int) -> tuple[int, str] | None:
        """Return a key, equal in all layers, for a value that one layer passes to the next; None for all other values.

        The key is the position of the user's node in its repetition, and the ending of the device node's name.
        """
        number, ending = split_numbered_name(node.name)
        place = self.shortened_graph.short_repetitions.find_position_of_carried_value(number, reader_repetition)
        return None if place is None else (place, ending)

    # ----------------------------------------------------------------------------------------------- the program

    def build_unrolled_program(self, graph: Graph, program: Program) -> Program:
        """Build the program of the unrolled graph from the program of the short graph.

        Args:
            graph: The unrolled graph of the device, from `build_unrolled_graph_and_record_nodes`.
            program: The program of the short graph.
        """
        called, place = assign_names(graph), {node: at for at, node in enumerate(graph.nodes)}
        start, sizes = find_state_save_offset_and_bytes(program, self.shortened_graph)
        backs = dict(program.undo)
        steps, undo, buffers, top = list[Instruction](), list[tuple[int, Instruction]](), list[BufferSpec](), start
        positions: dict[int, list[int]] = defaultdict(list)
        for at, kind in enumerate(
            find_short_repetition_of_each_instruction(self.short_graph, program, self.shortened_graph)
        ):
            positions[kind].append(at)
        leaves: dict[int, list[int]] = defaultdict(list)
        for number, buffer in enumerate(program.buffers[1:], 1):
            leaves[self.shortened_graph.short_repetition_of_name(buffer.name)].append(number)
        shared: Mapping[int, int] = {}
        for run, kind in self.shortened_graph.deep_and_short_repetitions:
            own = {number: len(buffers) + at for at, number in enumerate(leaves[kind], 1)}
            buffers += [self._rename_buffer_for_repetition(program.buffers[number], run, kind) for number in own]
            shift = top - start - sum(size for other, size in sizes.items() if other < kind)
            moved = _RepetitionRelocator({**shared, **own}, start, shift)
            shared, top = (own if run == PREAMBLE else shared), top + sizes.get(kind, 0)
            for at in positions[kind]:
                i = program.instructions[at]
                if i.index >= 0:
                    node = self.nodes_by_repetition[run][self.short_graph.nodes[i.index]]
                    steps.append(moved.relocate_instruction(i, called[node], node.attrs, place[node]))
                    continue
                back = backs[at]
                undo.append(
                    (
                        len(steps),
                        moved.relocate_instruction(
                            back, self.shortened_graph.deep_name_in_repetition(back.node, run, kind), back.attrs
                        ),
                    )
                )
                steps.append(
                    moved.relocate_instruction(
                        i, self.shortened_graph.deep_name_in_repetition(i.node, run, kind), i.attrs
                    )
                )
        arena = replace(program.buffers[ARENA_BUFFER], nbytes=top)
        inputs = {self._find_leaf_name_in_full_graph(name): tensor for name, tensor in program.inputs.items()}
        return Program((arena, *buffers), tuple(steps), MappingProxyType(inputs), program.outputs, tuple(undo))

    def _rename_buffer_for_repetition(self, buffer: BufferSpec, repetition: int, kind: int) -> BufferSpec:
        """Return the buffer of a leaf, named as the leaf of the same position in one repetition of the deep graph.

        Args:
            buffer: The buffer in the short program.
            repetition: The repetition of the deep graph.
            kind: The repetition of the short graph from which it is copied.
        """
        name = self.shortened_graph.deep_name_in_repetition(buffer.name, repetition, kind)
        return BufferSpec(buffer.kind, name, buffer.nbytes, buffer.declared_spec, buffer.stored_spec)

    def _find_leaf_name_in_full_graph(self, name: str) -> str:
        """Return the name that a leaf of the shortened graph has in the full graph.

        The leaf must not belong to a repeated layer: such a leaf has another name in each repetition.
        """
        kind = self.shortened_graph.short_repetition_of_name(name)
        return self.shortened_graph.deep_name_in_repetition(
            name, PREAMBLE if kind == PREAMBLE else self.shortened_graph.deep_repetitions.count, kind
        )


@dataclass(frozen=True, slots=True)
class _RepetitionRelocator:
    """Adapts tensors and instructions of the short program to the buffers and arena offsets of one layer.

    - `buffer_numbers`: the buffer of the layer for each buffer of the short program.
    - `shifted_from_byte`: the arena offset at which state saves begin.
    - `shift_bytes`: the bytes that are added to arena offsets from there on.
    """

    buffer_numbers: Mapping[int, int]
    shifted_from_byte: int
    shift_bytes: int

    def relocate_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the short program with the buffer and the offset that it has in the repetition."""
        if tensor.buffer != ARENA_BUFFER:
            return Tensor(self.buffer_numbers[tensor.buffer], tensor.offset, tensor.shape, tensor.strides, tensor.dtype)
        if not self.shift_bytes or tensor.offset < self.shifted_from_byte:
            return tensor
        return Tensor(ARENA_BUFFER, tensor.offset + self.shift_bytes, tensor.shape, tensor.strides, tensor.dtype)

    def relocate_instruction(self, instruction: Instruction, name: str, attrs: Attrs, index: int = -1) -> Instruction:
        """Return an instruction of the short program with the buffers and offsets that it has in the repetition.

        Args:
            instruction: The instruction of the short program.
            name: The new name of its node.
            attrs: The new attributes.
            index: The position of its node in the unrolled graph; -1 for an instruction without a node.
        """
        src = tuple([None if t is None else self.relocate_tensor(t) for t in instruction.src])
        scratch = None if instruction.scratch is None else self.relocate_tensor(instruction.scratch)
        return Instruction(
            instruction.op, src, tuple(map(self.relocate_tensor, instruction.dst)), attrs, scratch, name, index
        )


def find_state_save_offset_and_bytes(program: Program, shortened: ShortenedGraph) -> tuple[int, Mapping[int, int]]:
    """Find where state saves (copies for a rollback) begin in the arena, and how many bytes each layer saves.

    Returns:
        The arena offset of the first state save, and the bytes by repetition of the short graph.
    """
    sizes: dict[int, int] = {}
    first = [program.buffers[ARENA_BUFFER].nbytes]
    for at in sorted(program.save_positions):
        (saved_tensor,), kind = (
            program.instructions[at].dst,
            shortened.short_repetition_of_name(program.instructions[at].node),
        )
        if PREAMBLE < kind < shortened.short_count:
            sizes[kind] = sizes.get(kind, 0) + round_up_to_alignment(saved_tensor.spec.nbytes)
            first.append(saved_tensor.offset)
    return min(first), sizes


def find_short_repetition_of_each_instruction(graph: Graph, program: Program, shortened: ShortenedGraph) -> list[int]:
    """Return for each instruction of the short program the repeated layer (kind) to which it belongs.

    A kind stands for several layers of the full graph.
    """
    kinds = shortened.short_repetition_by_node(graph)
    return [
        shortened.short_repetition_of_name(i.node) if i.index < 0 else kinds[graph.nodes[i.index]]
        for i in program.instructions
    ]
