"""A device's graph and program of a short graph become those of the long graph that it stands for.

Each run of the long graph is its kind of the short one: the same steps on the same bytes of the arena, but on leaves of
its own.  What a run keeps to the end lies above what those before it keep, and its meetings come after theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ...backends.abilities import KernelCall
from ...backends.base import BufferSpec, Instruction, Program, Tensor
from ...graph.attrs import Attrs
from ...graph.graph import Graph, assign_names
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...graph.repeated_runs import PREAMBLE, ShortenedGraph, split_numbered_name
from ...ops.collectives import find_collective_number
from .arena import aligned

ARENA = 0


def unfolded(graph: Graph, program: Program, of: ShortenedGraph) -> tuple[Graph, Program]:
    """What a device runs of ``of.deep_graph`` if it runs `graph` by `program` of ``of.short_graph``."""
    unfolding = _Unfolding(graph, of)
    long = unfolding.graph()
    return long, unfolding.program(long, program)


def called_again(
    graph: Graph, program: Program, of: ShortenedGraph, calls: Sequence[KernelCall]
) -> Sequence[KernelCall] | None:
    """What the unfolded program calls, if that of `graph` makes these calls; None if one of them is of two runs."""
    kinds = kinds_of_steps(graph, program, of)
    own: dict[int, list[KernelCall]] = defaultdict(list)
    for call in calls:
        kind, *others = {kinds[number] for number in call.instruction_numbers}
        if others:
            return None
        own[kind].append(call)
    first = {kind: kinds.index(kind) for kind in reversed(kinds)}
    found, start = list[KernelCall](), 0
    for _, kind in of.repetitions_with_kind:
        for call in own[kind]:
            numbers = tuple([start + number - first[kind] for number in call.instruction_numbers])
            found.append(KernelCall(call.kernel, call.source, numbers))
        start += kinds.count(kind)
    return found


class _Unfolding:
    """One graph of a device; `made` gives for each run the nodes that its kind has become."""

    def __init__(self, graph: Graph, of: ShortenedGraph) -> None:
        self.short, self.of = graph, of
        self.kind = of.kind_by_node(graph)
        self.nodes: dict[int, list[Node]] = defaultdict(list)
        self.meetings: dict[int, list[int]] = defaultdict(list)
        for node in graph.nodes:
            self.nodes[self.kind[node]].append(node)
            if (number := find_collective_number(node.op, node.attrs)) is not None:
                self.meetings[self.kind[node]].append(number)
        self.made: dict[int, dict[Node, Node]] = {}

    # ------------------------------------------------------------------------------------------------- the graph

    def graph(self) -> Graph:
        met = min((number for numbers in self.meetings.values() for number in numbers), default=0)
        carried: dict[tuple[int, str], Node] = {}
        for run, kind in self.of.repetitions_with_kind:
            numbers, made = self.meetings[kind], self.made.setdefault(run, {})
            for node in self.nodes[kind]:
                reads = [None if s is None else (self._read(s, run, kind, carried), s.index) for s in node.src]
                src, attrs = tuple([None if read is None else read[0].results[read[1]] for read in reads]), node.attrs
                if (number := find_collective_number(node.op, attrs)) is not None:
                    attrs = MappingProxyType({**attrs, "sequence": met + number - min(numbers)})
                made[node] = Node(node.op, src, attrs, node.specs, self.of.name_in_repetition(node.name, run, kind))
            met += len(numbers)
            offered = ((self._carried_as(old, kind + 1), new) for old, new in made.items())
            carried = {place: new for place, new in offered if place is not None}
        ends = {**self.made[PREAMBLE], **self.made[self.of.deep_repetitions.count]}
        updates = {
            self.made[run][old.node].results[old.index]: self.made[run][new.node].results[new.index]
            for run, kind in self.of.repetitions_with_kind
            for old, new in self.short.updates.items()
            if self.kind[old.node] == kind
        }
        return Graph({name: ends[v.node].results[v.index] for name, v in self.short.outputs.items()}, updates)

    def _read(self, source: Value, run: int, kind: int, carried: Mapping[tuple[int, str], Node]) -> Node:
        """What a node of a run reads in the place of what its kind reads."""
        if self.kind[source.node] == kind:
            return self.made[run][source.node]
        place = self._carried_as(source.node, kind) if self.kind[source.node] == kind - 1 else None
        return self.made[PREAMBLE][source.node] if place is None else carried[place]

    def _carried_as(self, node: Node, reader: int) -> tuple[int, str] | None:
        """What those that run `reader` of the short graph reads of the run before have in common in all runs."""
        number, ending = split_numbered_name(node.name)
        place = self.of.short_repetitions.position_if_carried(number, reader)
        return None if place is None else (place, ending)

    # ----------------------------------------------------------------------------------------------- the program

    def program(self, graph: Graph, program: Program) -> Program:
        """The program of the unfolded `graph` from that of the short one."""
        called, place = assign_names(graph), {node: at for at, node in enumerate(graph.nodes)}
        start, sizes = kept_by_kind(program, self.of)
        backs = dict(program.undo)
        steps, undo, buffers, top = list[Instruction](), list[tuple[int, Instruction]](), list[BufferSpec](), start
        positions: dict[int, list[int]] = defaultdict(list)
        for at, kind in enumerate(kinds_of_steps(self.short, program, self.of)):
            positions[kind].append(at)
        leaves: dict[int, list[int]] = defaultdict(list)
        for number, buffer in enumerate(program.buffers[1:], 1):
            leaves[self.of.kind_of_name(buffer.name)].append(number)
        shared: Mapping[int, int] = {}
        for run, kind in self.of.repetitions_with_kind:
            own = {number: len(buffers) + at for at, number in enumerate(leaves[kind], 1)}
            buffers += [self._buffer(program.buffers[number], run, kind) for number in own]
            shift = top - start - sum(size for other, size in sizes.items() if other < kind)
            moved = _Moved({**shared, **own}, start, shift)
            shared, top = (own if run == PREAMBLE else shared), top + sizes.get(kind, 0)
            for at in positions[kind]:
                i = program.instructions[at]
                if i.index >= 0:
                    node = self.made[run][self.short.nodes[i.index]]
                    steps.append(moved.step(i, called[node], node.attrs, place[node]))
                    continue
                back = backs[at]
                undo.append(
                    (len(steps), moved.step(back, self.of.name_in_repetition(back.node, run, kind), back.attrs))
                )
                steps.append(moved.step(i, self.of.name_in_repetition(i.node, run, kind), i.attrs))
        arena = replace(program.buffers[ARENA], nbytes=top)
        inputs = {self._of_no_run(name): tensor for name, tensor in program.inputs.items()}
        return Program((arena, *buffers), tuple(steps), MappingProxyType(inputs), program.outputs, tuple(undo))

    def _buffer(self, buffer: BufferSpec, run: int, kind: int) -> BufferSpec:
        name = self.of.name_in_repetition(buffer.name, run, kind)
        return BufferSpec(buffer.kind, name, buffer.nbytes, buffer.declared_spec, buffer.stored_spec)

    def _of_no_run(self, name: str) -> str:
        """What a leaf is called that is before all runs or behind them."""
        kind = self.of.kind_of_name(name)
        return self.of.name_in_repetition(name, PREAMBLE if kind == PREAMBLE else self.of.deep_repetitions.count, kind)


@dataclass(frozen=True, slots=True)
class _Moved:
    """Where a run has what its kind has: in `buffers` of its own, and in the arena `shift` further from `start` on."""

    buffers: Mapping[int, int]
    start: int
    shift: int

    def tensor(self, t: Tensor) -> Tensor:
        if t.buffer != ARENA:
            return Tensor(self.buffers[t.buffer], t.offset, t.shape, t.strides, t.dtype)
        if not self.shift or t.offset < self.start:
            return t
        return Tensor(ARENA, t.offset + self.shift, t.shape, t.strides, t.dtype)

    def step(self, i: Instruction, name: str, attrs: Attrs, index: int = -1) -> Instruction:
        src = tuple([None if t is None else self.tensor(t) for t in i.src])
        scratch = None if i.scratch is None else self.tensor(i.scratch)
        return Instruction(i.op, src, tuple(map(self.tensor, i.dst)), attrs, scratch, name, index)


def kept_by_kind(program: Program, of: ShortenedGraph) -> tuple[int, Mapping[int, int]]:
    """Where in the arena begins what runs keep to the end, and how many bytes each kind of run keeps there."""
    sizes: dict[int, int] = {}
    first = [program.buffers[ARENA].nbytes]
    for at in sorted(program.save_positions):
        (kept,), kind = program.instructions[at].dst, of.kind_of_name(program.instructions[at].node)
        if PREAMBLE < kind < of.short_count:
            sizes[kind] = sizes.get(kind, 0) + aligned(kept.spec.nbytes)
            first.append(kept.offset)
    return min(first), sizes


def kinds_of_steps(graph: Graph, program: Program, of: ShortenedGraph) -> list[int]:
    """In which run of the short graph each step is."""
    kinds = of.kind_by_node(graph)
    return [of.kind_of_name(i.node) if i.index < 0 else kinds[graph.nodes[i.index]] for i in program.instructions]
