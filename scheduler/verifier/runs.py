"""The check of one device: whether the repetitions of its short program may follow each other in any order.

The short program itself is proven elsewhere. In addition, this module requires:

1. A repetition reads only its own values, long-lived values, and values that the repetition before carries to it.
   Carried values have the same extent in every repetition.
2. No instruction overwrites a long-lived value.
3. The saved bytes of the repetitions lie one after the other at the end of the arena, and no other value lies there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from ...backends.base import ALIGNMENT, Backend, Instruction, Program, Tensor
from ...graph.attrs import quote_node_name
from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...graph.repeated_runs import PREAMBLE, ShortenedGraph, split_numbered_name
from ...ops.collectives import find_collective_number
from .contents import Views, extent_of, meet

Carried: TypeAlias = tuple[int, str]
"""The key of a carried node, equal in all repetitions: the position of the user's node, and a name ending."""
Extent: TypeAlias = tuple[int, int, int]


class Runs:
    """The repetition of each node of a device's short graph, and the values that are carried between repetitions."""

    def __init__(self, graph: Graph, of: ShortenedGraph) -> None:
        self.graph, self.of = graph, of
        self.kind = of.kind_by_node(graph)
        read = {self.name_of(s.node, self.kind[node]) for node in graph.nodes for s in node.inputs} - {None}
        offered = ((node, self.name_of(node, self.kind[node] + 1)) for node in graph.nodes)
        self.carried = {node: name for node, name in offered if name is not None and name in read}

    def name_of(self, node: Node, reader: int) -> Carried | None:
        """Return the key under which repetition `reader` finds `node` among its carried values; else None."""
        if self.kind[node] != reader - 1 or not PREAMBLE < reader <= self.of.short_count:
            return None
        number, ending = split_numbered_name(node.name)
        place = self.of.short_repetitions.position_if_carried(number, reader)
        return None if place is None else (place, ending)

    def meetings(self) -> list[tuple[int, int]]:
        """Return (sequence number, repetition) of each collective of the device, sorted."""
        met = ((self.kind[n], find_collective_number(n.op, n.attrs)) for n in self.graph.nodes)
        return sorted((number, kind) for kind, number in met if number is not None)

    def faults(self) -> Iterator[str]:
        """Yield nodes that read uncarried values of other repetitions, and values that only some repetitions carry."""
        for node in self.graph.nodes:
            kind = self.kind[node]
            for source in node.inputs:
                there, is_leaf = self.kind[source.node], source.node.is_leaf
                is_carried = self.name_of(source.node, kind) is not None
                lasts = (
                    there == PREAMBLE and (not is_carried or kind == PREAMBLE) and not self._stands_for_one(source.node)
                )
                if there != kind and not lasts and not (is_carried and not is_leaf):
                    yield f"{node!r} of run {kind} reads {source!r} of run {there}"
        makers: dict[Carried, list[Node]] = defaultdict(list)
        for node, name in self.carried.items():
            makers[name].append(node)
        for (place, ending), nodes in makers.items():
            makes = sorted(self.kind[node] for node in nodes) == [*range(PREAMBLE, self.of.short_count)]
            if not makes or len({node.specs for node in nodes}) > 1:
                yield f"what is carried from place {place} of a run{f' ({ending})' * bool(ending)} differs between runs"
        for old, new in self.graph.updates.items():
            if self.kind[old.node] != self.kind[new.node]:
                yield f"{old!r} changes in another run"
        for output, value in self.graph.outputs.items():
            if (
                self.kind[value.node] not in (PREAMBLE, self.of.short_count)
                or output not in self.of.short_graph.outputs
            ):
                yield f"output {output!r} belongs to a run"

    def _stands_for_one(self, node: Node) -> bool:
        """Return whether a node before all repetitions stands for a carried value."""
        return self.of.short_repetitions.position_if_carried(split_numbered_name(node.name)[0], 0) is not None


def run_faults(graph: Graph, program: Program, backend: Backend, of: ShortenedGraph) -> Iterator[str]:
    """Yield all reasons, as text, why the repetitions of a proven program may not follow each other.

    Args:
        graph: The device's short graph.
        program: Its proven program.
        backend: The backend of the device.
        of: The shortened graph of the user.
    """
    runs = Runs(graph, of)
    complaints = list(runs.faults())
    yield from complaints or _Steps(runs, program, backend).faults()


class _Steps:
    """The instructions of one short program, by repetition."""

    def __init__(self, runs: Runs, program: Program, backend: Backend) -> None:
        self.runs, self.of, self.program, self.views = runs, runs.of, program, Views(backend)
        nodes = runs.graph.nodes
        self.kinds = [
            runs.kind[nodes[i.index]] if i.index >= 0 else self.of.kind_of_name(i.node) for i in program.instructions
        ]
        self.buffers = [PREAMBLE, *(self.of.kind_of_name(b.name) for b in program.buffers[1:])]
        self.lies: dict[Value, Tensor] = {v: program.inputs[v.node.name] for v in runs.graph.inputs}
        for i in program.instructions:
            if i.index >= 0:
                self.lies.update(zip(nodes[i.index].results, i.dst, strict=True))

    def faults(self) -> Iterator[str]:
        """Yield all faults of the repetitions of one device."""
        if self.kinds != sorted(self.kinds):
            yield "steps of a run come after those of the next"
        yield from self._kept()
        for i, kind in zip(self.program.instructions, self.kinds, strict=True):
            yield from self._buffers(i, kind)
        carried = self._carried()
        if isinstance(carried, str):
            yield carried
            return
        yield from self._overwritten(self._lasting(), carried)

    def _inner(self, kind: int) -> bool:
        """Return whether instructions of this kind repeat: they are neither before nor after all repetitions."""
        return PREAMBLE < kind < self.of.short_count

    def _kept(self) -> Iterator[str]:
        """Yield saves that are not one after the other at the end of the arena, and other values that lie there."""
        program = self.program
        saves = [at for at in sorted(program.saves) if self._inner(self.kinds[at])]
        kept = [extent_of(program.instructions[at].dst[0]) for at in saves]
        start = at = min((low for _, low, _ in kept), default=program.buffers[0].nbytes)
        for _, low, high in kept:
            if low != at:
                yield f"what a run keeps begins at byte {low} of the arena, and not at {at}"
            at = -(-high // ALIGNMENT) * ALIGNMENT
        if at != program.buffers[0].nbytes:
            yield f"the arena has {program.buffers[0].nbytes} bytes, and what runs keep ends at {at}"
        own = set(kept)
        undone = (back for _, back in program.undo)
        used = [t for i in (*program.instructions, *undone) for t in (*i.src, *i.dst, i.scratch) if t is not None]
        for tensor in (*used, *program.inputs.values(), *program.outputs.values()):
            extent = extent_of(tensor)
            if tensor.buffer == 0 and extent[2] > start and extent[1] < extent[2] and extent not in own:
                yield f"{tensor} lies where runs keep what they saved"
        for at, i in enumerate(program.instructions):
            if at not in program.saves:
                if i.index < 0:
                    yield f"step %{quote_node_name(i.node)} copies a state when all runs have ended"
                elif any(t is not None and extent_of(t) in own for t in (*i.dst, i.scratch)):
                    yield f"step %{quote_node_name(i.node)} writes where runs keep what they saved"

    def _buffers(self, i: Instruction, kind: int) -> Iterator[str]:
        """Yield instructions that use leaves of another repetition.

        An instruction reads leaves of its own repetition or of none, and writes states of its own repetition.
        """
        for tensor in (*i.src, *i.dst):
            if tensor is not None and tensor.buffer and self.buffers[tensor.buffer] not in (kind, PREAMBLE):
                yield f"step %{quote_node_name(i.node)} of run {kind} uses a leaf of run {self.buffers[tensor.buffer]}"
        for tensor in i.dst:
            if tensor.buffer and self.buffers[tensor.buffer] != kind:
                yield f"step %{quote_node_name(i.node)} of run {kind} writes a state of another run"

    def _base(self, value: Value) -> Value:
        """Return the value that has the memory of `value`."""
        return self.views.of(value).base

    def _carried(self) -> Mapping[Value, Extent] | str:
        """Return the extent of each base value that has carried values, the same in all repetitions; or a fault."""
        places: dict[tuple[int, str, int], Extent] = {}
        found: dict[Value, Extent] = {}
        for node in self.runs.carried:
            for value in node.results:
                base = self._base(value)
                if base not in self.lies:
                    return f"{base!r} is carried from run to run, and lies in no arena"
                number, ending = split_numbered_name(base.node.name)
                kind = self.runs.kind[node]
                if (there := self.runs.kind[base.node]) != kind:
                    return f"{value!r} is carried from run {kind}, and lies in memory of run {there}"
                name = number - self.of.short_repetitions.first_node_of(kind), ending, base.index
                found[base] = extent_of(self.lies[base])
                if places.setdefault(name, found[base]) != found[base]:
                    return f"{base!r} is carried at bytes {found[base][1:]} of the arena, and in another run elsewhere"
        return found

    def _lasting(self) -> Mapping[Value, Extent]:
        """Return the extents of values from before all repetitions that are read later, except placeholders."""
        graph, kind = self.runs.graph, self.runs.kind
        read = [s for node in graph.nodes if kind[node] != PREAMBLE for s in node.inputs]
        bases = {self._base(v) for v in (*read, *graph.outputs.values()) if v.node not in self.runs.carried}
        there = {v for v in bases & self.lies.keys() if kind[v.node] == PREAMBLE or v.node.op == "input"}
        return {v: extent_of(self.lies[v]) for v in there}

    def _overwritten(self, lasting: Mapping[Value, Extent], carried: Mapping[Value, Extent]) -> Iterator[str]:
        """Yield instructions that overwrite a long-lived value, or a value that their repetition carries on."""
        nodes, ready = self.runs.graph.nodes, dict[Value, Extent]()
        for i, kind in zip(self.program.instructions, self.kinds, strict=True):
            written = [extent_of(t) for t in (*i.dst, i.scratch) if t is not None]
            own = nodes[i.index].results if i.index >= 0 else ()
            for value, extent in lasting.items() if self._inner(kind) else ():
                if any(meet(extent, other) for other in written):
                    yield f"step %{quote_node_name(i.node)} of run {kind} overwrites {value!r}, which later runs read"
            for value, extent in ready.items():
                if self.runs.kind[value.node] == kind and any(meet(extent, other) for other in written):
                    step = f"step %{quote_node_name(i.node)} of run {kind}"
                    yield f"{step} overwrites {value!r}, which the next run reads"
            ready.update((value, carried[value]) for value in own if value in carried)
