"""The comparison of a device's program with a proven program, so that equal programs are proven once.

All inputs of the proof must be equal, node by node and instruction by instruction, with two exceptions:

- Names of leaves, outputs and nodes, if instructions, buffers, inputs and outputs use them in the same way.
- Collective partners and sequence numbers, which another proof checks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from ...backends.base import BufferSpec, Instruction, Program
from ...graph.attrs import Attr, attribute_key
from ...graph.graph import Graph, assign_names
from ...graph.node import Node, Value
from ...ops.collectives import COLLECTIVES

COMMUNICATION_ATTRS = ("sequence", "to", "source", "rank")
"""Attributes of collectives that no kernel before the collective depends on."""


def make_equality_key(graph: Graph, program: Program) -> Hashable:
    """Return a key that is equal for programs that may be equal."""
    return len(program.instructions), tuple([(n.op, n.specs) for n in graph.nodes])


def is_equal_to_proven(graph: Graph, program: Program, proven: Graph, by: Program) -> bool:
    """Return whether the proof of one program holds for another.

    Args:
        graph: A legal graph.
        program: The program in question.
        proven: The graph of the proven program.
        by: The proven program.
    """
    here, there = ({n: at for at, n in enumerate(g.nodes)} for g in (graph, proven))
    if len(here) != len(there) or not all(
        _is_equal_node(a, b, here, there) for a, b in zip(graph.nodes, proven.nodes, strict=True)
    ):
        return False
    if _locate_values(graph.roots(), here) != _locate_values(proven.roots(), there) or len(graph.outputs) != len(
        proven.outputs
    ):
        return False
    leaves = {b.name: a.name for a, b in zip(graph.nodes, proven.nodes, strict=True) if b.is_leaf}
    outputs = dict(zip(proven.outputs, graph.outputs, strict=True))
    if not (
        _has_equal_tensors(program.inputs, by.inputs, leaves)
        and _has_equal_tensors(program.outputs, by.outputs, outputs)
    ):
        return False
    if len(program.buffers) != len(by.buffers) or not program.buffers or program.buffers[0] != by.buffers[0]:
        return False
    pairs = zip(program.buffers[1:], by.buffers[1:], strict=True)
    if not all(a == BufferSpec(b.kind, leaves[b.name], b.nbytes, b.declared_spec, b.stored_spec) for a, b in pairs):
        return False
    if [at for at, _ in program.undo] != [at for at, _ in by.undo]:
        return False
    if len(program.instructions) != len(by.instructions):
        return False
    called = assign_names(graph)
    steps = [*program.instructions, *(back for _, back in program.undo)]
    known = [*by.instructions, *(back for _, back in by.undo)]
    return all(
        _is_equal_instruction(a, b) and _has_matching_name(a, b, graph, called, leaves, by)
        for a, b in zip(steps, known, strict=True)
    )


def _is_equal_node(a: Node, b: Node, here: Mapping[Node, int], there: Mapping[Node, int]) -> bool:
    """Return whether two nodes do the same with the values at the same positions."""
    if a.op != b.op or a.specs != b.specs or len(a.src) != len(b.src):
        return False
    if attribute_key(a.attrs) != attribute_key(b.attrs) and (
        a.op not in COLLECTIVES or _remove_communication_attrs(a.attrs) != _remove_communication_attrs(b.attrs)
    ):
        return False
    return _locate_values(a.src, here) == _locate_values(b.src, there)


def _remove_communication_attrs(attrs: Mapping[str, Attr]) -> dict[str, Attr]:
    """Return the attributes of a collective without partners and sequence number."""
    return {name: value for name, value in attrs.items() if name not in COMMUNICATION_ATTRS}


def _locate_values(values: tuple[Value | None, ...], place: Mapping[Node, int]) -> list[tuple[int, int] | None]:
    """Return each value as (position of its node, result index)."""
    return [None if v is None else (place[v.node], v.index) for v in values]


def _has_equal_tensors(mine: Mapping[str, Any], theirs: Mapping[str, Any], called: Mapping[str, str]) -> bool:
    """Return whether two tables of tensors are equal after the names of the second are translated by `called`."""
    return dict(mine) == {called.get(name, ""): tensor for name, tensor in theirs.items()} and len(mine) == len(theirs)


def _is_equal_instruction(a: Instruction, b: Instruction) -> bool:
    return a.op == b.op and a.index == b.index and a.src == b.src and a.dst == b.dst and a.scratch == b.scratch


def _has_matching_name(
    a: Instruction, b: Instruction, graph: Graph, called: Mapping[Node, str], leaves: Mapping[str, str], by: Program
) -> bool:
    """Return whether an instruction has the name and the attributes that it must have.

    They are the name and attributes of its node. A copy or save of a state has them from the proven program's state
    in the same buffer.
    """
    if a.index >= 0:
        node = graph.nodes[a.index]
        return a.attrs == node.attrs and a.node == called[node]
    buffers = {t.buffer for t in (*b.src, *b.dst) if t is not None}
    states = {by.buffers[number].name for number in buffers if by.buffers[number].kind == "state"}
    renamed = [leaves[name] + b.node[len(name) :] for name in states if b.node.startswith(f"{name}.")]
    return a.attrs == b.attrs and a.node in renamed
