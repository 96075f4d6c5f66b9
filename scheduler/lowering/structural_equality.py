"""Structural equality of graphs: equality except for names, devices, and the numbers of collectives.

Pipeline stages of equal layers, and devices of a collective group, have such graphs. One of them is lowered, with
numbers as names. The result is copied with the names of each graph.
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
from ...ops.collectives import COLLECTIVES, find_collective_sequence_number

COMMUNICATION_ATTRS = frozenset({"sequence", "to", "source", "rank"})
"""Attributes of a collective with its number and its devices.

The memory of a kernel does not depend on them, except on the order of the numbers.
"""


def make_structural_key(graph: Graph) -> Hashable:
    """Return a dictionary key that is equal for two graphs only if they are structurally equal.

    Structurally equal graphs may differ in names, devices, and the sequence numbers of collectives, but in nothing
    else.
    """
    place = {node: at for at, node in enumerate(graph.nodes)}

    def refs(values: tuple[Value | None, ...]) -> tuple[Hashable, ...]:
        return tuple([None if v is None else (place[v.node], v.index) for v in values])

    nodes = [(n.op, refs(n.src), _list_attrs_for_structural_key(n.op, n.attrs), n.specs) for n in graph.nodes]
    numbers = [number for n in graph.nodes if (number := find_collective_sequence_number(n.op, n.attrs)) is not None]
    ranks = {number: at for at, number in enumerate(sorted(set(numbers)))}
    ends = len(graph.outputs), refs(graph.roots())
    return tuple(nodes), tuple(ranks[number] for number in numbers), ends


def make_key_without_exact_sizes(graph: Graph) -> Hashable:
    """Return a dictionary key of a graph that is equal for graphs of other sizes, such as for 7 and 8 tokens.

    Of each axis size the key has only the class: 0, 1 or larger. Backends choose kernels by size class, so graphs
    with equal keys usually have the same fused groups.
    """
    place = {node: at for at, node in enumerate(graph.nodes)}

    def reads(node: Node) -> tuple[Hashable, ...]:
        return tuple([None if s is None else (place[s.node], s.index) for s in node.src])

    def sizes(node: Node) -> tuple[Hashable, ...]:
        return tuple([(spec.dtype, tuple([min(n, 2) for n in spec.shape])) for spec in node.specs])

    return tuple([(node.op, reads(node), sizes(node)) for node in graph.nodes])


def make_leaf_output_and_collective_key(graph: Graph) -> Hashable:
    """Return a dictionary key of everything in a graph that its structural key leaves out.

    These are leaf names, output names and the attributes of collectives. Two graphs for which both keys are equal
    have the same program.
    """
    collective_attributes = tuple(tuple(n.attrs.items()) for n in graph.nodes if n.op in COLLECTIVES)
    return tuple(n.name for n in graph.nodes if n.is_leaf), collective_attributes, tuple(graph.outputs)


def make_program_key_without_names(program: Program) -> Hashable:
    """Return a dictionary key that is equal for programs with equal kernels on equal bytes; names do not count."""
    steps = [
        (i.op, i.src, i.dst, _list_attrs_for_structural_key(i.op, i.attrs), i.scratch, i.index)
        for i in program.instructions
    ]
    undo = [(at, i.op, i.src, i.dst) for at, i in program.undo]
    buffers = [(b.kind, b.nbytes, b.declared_spec, b.stored_spec) for b in program.buffers]
    return tuple(steps), tuple(undo), tuple(buffers), tuple(program.inputs.values()), tuple(program.outputs.values())


def _list_attrs_for_structural_key(op: str, attrs: Attrs) -> tuple[Hashable, ...]:
    """List the attributes of a node that count for structural equality.

    For a collective, its sequence number and its devices are left out.
    """
    return (
        tuple([item for item in attrs.items() if item[0] not in COMMUNICATION_ATTRS])
        if op in COLLECTIVES
        else (*attrs.items(),)
    )


def with_numbered_names(graph: Graph) -> Graph:
    """Return a copy of the graph in which each node is named by its position, and each output by its number.

    A program for this graph serves all structurally equal graphs, after `restore_graph_names`.
    """
    became: dict[Node, tuple[Value, ...]] = {}
    for at, node in enumerate(graph.nodes):
        became[node] = Node(node.op, _replace_operands(node, became), node.attrs, node.specs, str(at)).results
    return _rebuild_graph_with_replacements(graph, became, [str(at) for at in range(len(graph.outputs))])


def restore_graph_names(lowered_graph: Graph, program: Program, graph: Graph) -> tuple[Graph, Program]:
    """Rename a lowered graph and its program for another, structurally equal graph.

    The result has the names, the sequence numbers and the devices of collectives of this graph.

    Args:
        lowered_graph: The lowered graph with node positions as names, made from `with_numbered_names`.
        program: The program of `lowered_graph`.
        graph: The graph that gives the names. It is structurally equal to the graph that was lowered.

    Returns:
        The renamed lowered graph and its renamed program.
    """
    became: dict[Node, tuple[Value, ...]] = {}
    for node in lowered_graph.nodes:
        at, suffix = split_numbered_name(node.name)
        own = graph.nodes[at]
        name, attrs = (f"{own.name or own.op}{suffix}", node.attrs) if suffix else (own.name, own.attrs)
        became[node] = Node(node.op, _replace_operands(node, became), attrs, node.specs, name).results
    renamed = _rebuild_graph_with_replacements(lowered_graph, became, list(graph.outputs))
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


def _replace_operands(node: Node, replacements: dict[Node, tuple[Value, ...]]) -> tuple[Value | None, ...]:
    """Return the operands of a node, each replaced by the new value in `replacements`.

    Args:
        node: The node.
        replacements: The new results of each old node.
    """
    return tuple([None if s is None else replacements[s.node][s.index] for s in node.src])


def _rebuild_graph_with_replacements(
    graph: Graph, replacements: dict[Node, tuple[Value, ...]], output_names: list[str]
) -> Graph:
    """Rebuild a graph from replaced nodes: outputs and state updates refer to the values that replace the old ones.

    Args:
        graph: The old graph.
        replacements: The new results of each old node.
        output_names: The names of the outputs of the new graph.
    """
    values = [replacements[v.node][v.index] for v in graph.outputs.values()]
    updates = {
        replacements[old.node][old.index]: replacements[new.node][new.index] for old, new in graph.updates.items()
    }
    return Graph(dict(zip(output_names, values, strict=True)), updates)
