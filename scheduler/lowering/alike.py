"""Graphs that are alike: they differ in names only, and in whom they meet under which numbers.

Stages of equal layers, and the devices of a team, have such graphs.  One of them is lowered, with numbers in place of
names, and what comes of it is called by the names of each.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from types import MappingProxyType

from ...backends.base import BufferSpec, Instruction, Program
from ...graph.attrs import Attrs
from ...graph.graph import Graph, assign_names
from ...graph.node import Node, Value
from ...graph.repeated_runs import split_numbered_name
from ...ops.collectives import COLLECTIVES, find_collective_number

MEETING = frozenset({"sequence", "to", "source", "rank"})
"""Attributes of a collective that say when it comes, and who meets whom: no kernel's place in memory follows from
them, but for the order of the numbers."""


def pattern(graph: Graph) -> Hashable:
    """Equal for graphs that are alike."""
    place = {node: at for at, node in enumerate(graph.nodes)}

    def refs(values: tuple[Value | None, ...]) -> tuple[Hashable, ...]:
        return tuple([None if v is None else (place[v.node], v.index) for v in values])

    nodes = [(n.op, refs(n.src), _terms(n.op, n.attrs), n.specs) for n in graph.nodes]
    numbers = [number for n in graph.nodes if (number := find_collective_number(n.op, n.attrs)) is not None]
    ranks = {number: at for at, number in enumerate(sorted(set(numbers)))}
    ends = len(graph.outputs), refs(graph.roots())
    return tuple(nodes), tuple(ranks[number] for number in numbers), ends


def skeleton(graph: Graph) -> Hashable:
    """Equal for graphs of the same ops on each other's results, if the same axes are empty, single or longer.

    Kernels are chosen by that, and an empty result has no kernel.
    """
    place = {node: at for at, node in enumerate(graph.nodes)}

    def reads(node: Node) -> tuple[Hashable, ...]:
        return tuple([None if s is None else (place[s.node], s.index) for s in node.src])

    def sizes(node: Node) -> tuple[Hashable, ...]:
        return tuple([(spec.dtype, tuple([min(n, 2) for n in spec.shape])) for spec in node.specs])

    return tuple([(node.op, reads(node), sizes(node)) for node in graph.nodes])


def identity(graph: Graph) -> Hashable:
    """Equal for graphs that are alike and mean the same: leaves and outputs have the same names, meetings the same
    numbers."""
    met = tuple(tuple(n.attrs.items()) for n in graph.nodes if n.op in COLLECTIVES)
    return tuple(n.name for n in graph.nodes if n.is_leaf), met, tuple(graph.outputs)


def structure(program: Program) -> Hashable:
    """Equal for programs of graphs that are alike: the same kernels on the same bytes."""
    steps = [(i.op, i.src, i.dst, _terms(i.op, i.attrs), i.scratch, i.index) for i in program.instructions]
    undo = [(at, i.op, i.src, i.dst) for at, i in program.undo]
    buffers = [(b.kind, b.nbytes, b.declared_spec, b.stored_spec) for b in program.buffers]
    return tuple(steps), tuple(undo), tuple(buffers), tuple(program.inputs.values()), tuple(program.outputs.values())


def _terms(op: str, attrs: Attrs) -> tuple[Hashable, ...]:
    """The attributes of a node by which it is told from others."""
    return tuple([item for item in attrs.items() if item[0] not in MEETING]) if op in COLLECTIVES else (*attrs.items(),)


def numbered(graph: Graph) -> Graph:
    """The same graph in which nodes and outputs are called by their numbers."""
    became: dict[Node, tuple[Value, ...]] = {}
    for at, node in enumerate(graph.nodes):
        became[node] = Node(node.op, _moved(node, became), node.attrs, node.specs, str(at)).results
    return _ended(graph, became, [str(at) for at in range(len(graph.outputs))])


def named(lowered: Graph, program: Program, graph: Graph) -> tuple[Graph, Program]:
    """What lowering made of a numbered graph, called by the names of `graph`, which is like it, and with its
    meetings."""
    became: dict[Node, tuple[Value, ...]] = {}
    for node in lowered.nodes:
        at, suffix = split_numbered_name(node.name)
        own = graph.nodes[at]
        name, attrs = (f"{own.name or own.op}{suffix}", node.attrs) if suffix else (own.name, own.attrs)
        became[node] = Node(node.op, _moved(node, became), attrs, node.specs, name).results
    renamed = _ended(lowered, became, list(graph.outputs))
    called = assign_names(renamed)

    def leaf(text: str) -> str:
        at, suffix = split_numbered_name(text)
        return graph.nodes[at].name + suffix

    def instruction(i: Instruction) -> Instruction:
        if i.index < 0:
            return replace(i, node=leaf(i.node))
        node = renamed.nodes[i.index]
        return Instruction(i.op, i.src, i.dst, node.attrs, i.scratch, called[node], i.index)

    buffers = [BufferSpec(b.kind, leaf(b.name), b.nbytes, b.declared_spec, b.stored_spec) for b in program.buffers[1:]]
    return renamed, Program(
        (program.buffers[0], *buffers),
        tuple(map(instruction, program.instructions)),
        MappingProxyType({leaf(name): tensor for name, tensor in program.inputs.items()}),
        MappingProxyType(dict(zip(graph.outputs, program.outputs.values(), strict=True))),
        tuple((at, instruction(back)) for at, back in program.undo),
    )


def _moved(node: Node, became: dict[Node, tuple[Value, ...]]) -> tuple[Value | None, ...]:
    return tuple([None if s is None else became[s.node][s.index] for s in node.src])


def _ended(graph: Graph, became: dict[Node, tuple[Value, ...]], outputs: list[str]) -> Graph:
    """The graph of the nodes that took the place of those of `graph`."""
    values = [became[v.node][v.index] for v in graph.outputs.values()]
    updates = {became[old.node][old.index]: became[new.node][new.index] for old, new in graph.updates.items()}
    return Graph(dict(zip(outputs, values, strict=True)), updates)
