"""The check of one device: whether the repetitions of its short program may follow each other in any order.

A repetition is one repeated layer. The short program has a few repetitions, the kinds. With n kinds, kind k stands
for the repetitions k, k + n, k + 2n and so on of the user's deep graph. The kind `PREAMBLE` is the part before all
repetitions.

The short program itself is proven elsewhere. In addition, this module requires:

1. A repetition reads only its own values, long-lived values, and values that the repetition before carries to it.
   Carried values have the same extent in every repetition.
2. No instruction overwrites a long-lived value. A long-lived value is computed before all repetitions and read in
   them.
3. The saved bytes of the repetitions are one after the other at the end of the arena, which has no other value there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from ....backends.base import ALIGNMENT, Backend, Instruction, Program, Tensor
from ....graph.attrs import quote_node_name
from ....graph.graph import Graph
from ....graph.node import Node, Value
from ....graph.repeated_runs import PREAMBLE, ShortenedGraph, split_numbered_name
from ....ops.collectives import find_collective_sequence_number
from ..memory.buffer_contents import ViewCache, compute_byte_extent, has_common_bytes_in_same_buffer

CarriedKey: TypeAlias = tuple[int, str]
"""The key of a carried node, equal in all repetitions: the position of the user's node, and a name ending."""
ByteExtent: TypeAlias = tuple[int, int, int]


class RepetitionsOfDeviceGraph:
    """The repeated layers in a device's graph, and the values that each layer passes to the next.

    The graph is short: it has only a few of the repeated layers, each called a repetition.

    - `kind_by_node`: the repetition of each node, called kind.
    - `carried_key_by_node`: for each node that the next repetition reads, a key that is equal in all repetitions.
    """

    def __init__(self, graph: Graph, shortened: ShortenedGraph) -> None:
        self.graph, self.shortened_graph = graph, shortened
        self.kind_by_node = shortened.short_repetition_by_node(graph)
        read = {
            self.find_key_of_value_carried_forward(s.node, self.kind_by_node[node])
            for node in graph.nodes
            for s in node.inputs
        } - {None}
        offered = (
            (node, self.find_key_of_value_carried_forward(node, self.kind_by_node[node] + 1)) for node in graph.nodes
        )
        self.carried_key_by_node = {node: name for node, name in offered if name is not None and name in read}

    def find_key_of_value_carried_forward(self, node: Node, reader_repetition: int) -> CarriedKey | None:
        """Return a key that names a value which one repeated layer passes to the next, alike in all layers; else None.

        The key is the position of the user's node within its layer, and the ending of the device node's name.

        Args:
            node: A node of the device's graph.
            reader_repetition: The repetition that reads the node. Only the next repetition can read a carried value.
        """
        if (
            self.kind_by_node[node] != reader_repetition - 1
            or not PREAMBLE < reader_repetition <= self.shortened_graph.short_count
        ):
            return None
        number, ending = split_numbered_name(node.name)
        place = self.shortened_graph.short_repetitions.find_position_of_carried_value(number, reader_repetition)
        return None if place is None else (place, ending)

    def list_sequence_numbers_with_repetition(self) -> list[tuple[int, int]]:
        """Return (sequence number, repetition) of each collective of the device, sorted by sequence number."""
        collectives = ((self.kind_by_node[n], find_collective_sequence_number(n.op, n.attrs)) for n in self.graph.nodes)
        return sorted((number, kind) for kind, number in collectives if number is not None)

    def find_faults_forbidding_any_repetition_order(self) -> Iterator[str]:
        """Yield the reasons why the layers of a device's graph may not be repeated any number of times.

        - A repetition may read its own values, values that the repetition before carries to it, and long-lived
          values. These are computed before all repetitions.
        - Every repetition must carry the same values with the same specs.
        - A state must be updated in its own repetition, and outputs must not belong to a repetition.
        """
        for node in self.graph.nodes:
            kind = self.kind_by_node[node]
            for source in node.inputs:
                there, is_leaf = self.kind_by_node[source.node], source.node.is_leaf
                is_carried = self.find_key_of_value_carried_forward(source.node, kind) is not None
                lasts = (
                    there == PREAMBLE
                    and (not is_carried or kind == PREAMBLE)
                    and not self._is_initial_carried_value(source.node)
                )
                if there != kind and not lasts and not (is_carried and not is_leaf):
                    yield f"{node!r} of repetition {kind} reads {source!r} of repetition {there}"
        makers: dict[CarriedKey, list[Node]] = defaultdict(list)
        for node, name in self.carried_key_by_node.items():
            makers[name].append(node)
        for (place, ending), nodes in makers.items():
            makes = sorted(self.kind_by_node[node] for node in nodes) == [
                *range(PREAMBLE, self.shortened_graph.short_count)
            ]
            if not makes or len({node.specs for node in nodes}) > 1:
                yield (
                    f"the value carried from position {place} of a "
                    f"repetition{f' ({ending})' * bool(ending)} differs between repetitions"
                )
        for old, new in self.graph.updates.items():
            if self.kind_by_node[old.node] != self.kind_by_node[new.node]:
                yield f"{old!r} is updated in another repetition"
        for output, value in self.graph.outputs.items():
            if (
                self.kind_by_node[value.node] not in (PREAMBLE, self.shortened_graph.short_count)
                or output not in self.shortened_graph.short_graph.outputs
            ):
                yield f"output {output!r} belongs to a repetition"

    def _is_initial_carried_value(self, node: Node) -> bool:
        """Return whether the first layer reads this node where later layers read a value of the layer before."""
        return (
            self.shortened_graph.short_repetitions.find_position_of_carried_value(split_numbered_name(node.name)[0], 0)
            is not None
        )


def find_faults_of_any_repetition_order(
    graph: Graph, program: Program, backend: Backend, shortened: ShortenedGraph
) -> Iterator[str]:
    """Yield all reasons why the layers in a device's program may not be repeated in any order.

    A proof for a program with a few layers then holds for the program with all layers.

    Args:
        graph: The device's short graph.
        program: Its proven program.
        backend: The backend of the device.
        shortened: The user's shortened graph.
    """
    runs = RepetitionsOfDeviceGraph(graph, shortened)
    complaints = list(runs.find_faults_forbidding_any_repetition_order())
    yield from complaints or _RepetitionReorderingChecker(runs, program, backend).find_faults()


class _RepetitionReorderingChecker:
    """Checks that the layers in one device's program can be repeated in any order without a change of results."""

    def __init__(self, repetitions: RepetitionsOfDeviceGraph, program: Program, backend: Backend) -> None:
        self.device_repetitions, self.shortened_graph, self.program, self.views = (
            repetitions,
            repetitions.shortened_graph,
            program,
            ViewCache(backend),
        )
        nodes = repetitions.graph.nodes
        self.kind_by_instruction = [
            repetitions.kind_by_node[nodes[i.index]]
            if i.index >= 0
            else self.shortened_graph.short_repetition_of_name(i.node)
            for i in program.instructions
        ]
        self.kind_by_buffer = [
            PREAMBLE,
            *(self.shortened_graph.short_repetition_of_name(b.name) for b in program.buffers[1:]),
        ]
        self.tensor_by_value: dict[Value, Tensor] = {v: program.inputs[v.node.name] for v in repetitions.graph.inputs}
        for i in program.instructions:
            if i.index >= 0:
                self.tensor_by_value.update(zip(nodes[i.index].results, i.dst, strict=True))

    def find_faults(self) -> Iterator[str]:
        """Yield all reasons why the repetitions of the device's program may not follow each other in any order."""
        if self.kind_by_instruction != sorted(self.kind_by_instruction):
            yield "instructions of a repetition come after those of the next one"
        yield from self._find_gaps_in_state_saves()
        for i, kind in zip(self.program.instructions, self.kind_by_instruction, strict=True):
            yield from self._find_foreign_leaf_access_faults(i, kind)
        carried = self._find_carried_value_extents()
        if isinstance(carried, str):
            yield carried
            return
        yield from self._find_lasting_value_overwrite_faults(self._find_long_lived_value_extents(), carried)

    def _is_repeated_kind(self, kind: int) -> bool:
        """Return whether `kind` numbers a repeated layer, and not the part before or after all repeated layers."""
        return PREAMBLE < kind < self.shortened_graph.short_count

    def _find_gaps_in_state_saves(self) -> Iterator[str]:
        """Yield faults of the places of state saves: all layers together must fill the end of the arena without gaps.

        No other value may overlap these bytes, because unrolling appends the saves of further layers.
        """
        program = self.program
        saves = [at for at in sorted(program.save_positions) if self._is_repeated_kind(self.kind_by_instruction[at])]
        saved_extents = [compute_byte_extent(program.instructions[at].dst[0]) for at in saves]
        start = at = min((low for _, low, _ in saved_extents), default=program.buffers[0].nbytes)
        for _, low, high in saved_extents:
            if low != at:
                yield f"the saves of a repetition begin at byte {low} of the arena, need {at}"
            at = -(-high // ALIGNMENT) * ALIGNMENT
        if at != program.buffers[0].nbytes:
            yield f"the arena has {program.buffers[0].nbytes} bytes, but the saves of repetitions end at {at}"
        own = set(saved_extents)
        undone = (back for _, back in program.undo)
        used = [t for i in (*program.instructions, *undone) for t in (*i.src, *i.dst, i.scratch) if t is not None]
        for tensor in (*used, *program.inputs.values(), *program.outputs.values()):
            extent = compute_byte_extent(tensor)
            if tensor.buffer == 0 and extent[2] > start and extent[1] < extent[2] and extent not in own:
                yield f"{tensor} overlaps the saves of repetitions"
        for at, i in enumerate(program.instructions):
            if at not in program.save_positions:
                if i.index < 0:
                    yield f"step %{quote_node_name(i.node)} copies a state after all repetitions"
                elif any(t is not None and compute_byte_extent(t) in own for t in (*i.dst, i.scratch)):
                    yield f"step %{quote_node_name(i.node)} writes into the saves of repetitions"

    def _find_foreign_leaf_access_faults(self, instruction: Instruction, repetition_kind: int) -> Iterator[str]:
        """Yield faults of an instruction that uses the weights or states of another layer than its own.

        It may also read, but not write, leaves of the part before all repetitions.
        """
        for tensor in (*instruction.src, *instruction.dst):
            if (
                tensor is not None
                and tensor.buffer
                and self.kind_by_buffer[tensor.buffer] not in (repetition_kind, PREAMBLE)
            ):
                owner = self.kind_by_buffer[tensor.buffer]
                yield (
                    f"step %{quote_node_name(instruction.node)} of repetition {repetition_kind} uses a "
                    f"leaf of repetition {owner}"
                )
        for tensor in instruction.dst:
            if tensor.buffer and self.kind_by_buffer[tensor.buffer] != repetition_kind:
                yield (
                    f"step %{quote_node_name(instruction.node)} writes a state of another repetition than "
                    f"{repetition_kind}"
                )

    def _find_memory_owner(self, value: Value) -> Value:
        """Return the value that owns the memory of `value`: the base of a view, else `value` itself."""
        return self.views.resolve_view(value).base

    def _find_carried_value_extents(self) -> Mapping[Value, ByteExtent] | str:
        """Find the bytes of the values that each layer passes to the next; they must be the same bytes in all layers.

        Returns:
            The (buffer, first byte, end byte) extent, by the value that owns the memory. If it differs between
            repetitions, the reason as text.
        """
        places: dict[tuple[int, str, int], ByteExtent] = {}
        found: dict[Value, ByteExtent] = {}
        for node in self.device_repetitions.carried_key_by_node:
            for value in node.results:
                base = self._find_memory_owner(value)
                if base not in self.tensor_by_value:
                    return f"{base!r} is carried between repetitions, but is not in the arena"
                number, ending = split_numbered_name(base.node.name)
                kind = self.device_repetitions.kind_by_node[node]
                if (there := self.device_repetitions.kind_by_node[base.node]) != kind:
                    return f"{value!r} is carried from repetition {kind}, but is in memory of repetition {there}"
                name = number - self.shortened_graph.short_repetitions.first_node_of(kind), ending, base.index
                found[base] = compute_byte_extent(self.tensor_by_value[base])
                if places.setdefault(name, found[base]) != found[base]:
                    return (
                        f"{base!r} is carried at bytes {found[base][1:]} of the arena, but elsewhere in "
                        "another repetition"
                    )
        return found

    def _find_long_lived_value_extents(self) -> Mapping[Value, ByteExtent]:
        """Find the bytes of the values that are computed before all repeated layers and read in them, such as a mask.

        Values that the first repetition reads in place of carried values are not long-lived.
        """
        graph, kind = self.device_repetitions.graph, self.device_repetitions.kind_by_node
        read = [s for node in graph.nodes if kind[node] != PREAMBLE for s in node.inputs]
        bases = {
            self._find_memory_owner(v)
            for v in (*read, *graph.outputs.values())
            if v.node not in self.device_repetitions.carried_key_by_node
        }
        there = {v for v in bases & self.tensor_by_value.keys() if kind[v.node] == PREAMBLE or v.node.op == "input"}
        return {v: compute_byte_extent(self.tensor_by_value[v]) for v in there}

    def _find_lasting_value_overwrite_faults(
        self, lasting_extents: Mapping[Value, ByteExtent], carried_extents: Mapping[Value, ByteExtent]
    ) -> Iterator[str]:
        """Yield faults for instructions that overwrite a value which a later repetition reads.

        This value is long-lived, or it is a value that the repetition of the instruction carries to the next one.

        Args:
            lasting_extents: The byte extent of each long-lived value.
            carried_extents: The byte extent of each carried value.
        """
        nodes, ready = self.device_repetitions.graph.nodes, dict[Value, ByteExtent]()
        for i, kind in zip(self.program.instructions, self.kind_by_instruction, strict=True):
            written = [compute_byte_extent(t) for t in (*i.dst, i.scratch) if t is not None]
            own = nodes[i.index].results if i.index >= 0 else ()
            for value, extent in lasting_extents.items() if self._is_repeated_kind(kind) else ():
                if any(has_common_bytes_in_same_buffer(extent, other) for other in written):
                    yield (
                        f"step %{quote_node_name(i.node)} of repetition {kind} overwrites {value!r}, "
                        "which later repetitions read"
                    )
            for value, extent in ready.items():
                if self.device_repetitions.kind_by_node[value.node] == kind and any(
                    has_common_bytes_in_same_buffer(extent, other) for other in written
                ):
                    step = f"step %{quote_node_name(i.node)} of repetition {kind}"
                    yield f"{step} overwrites {value!r}, which the next repetition reads"
            ready.update((value, carried_extents[value]) for value in own if value in carried_extents)
