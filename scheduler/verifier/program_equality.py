"""The comparison of a device's program with a proven program, so that equal programs are proven once.

All inputs of the proof must be equal, node by node and instruction by instruction, with two exceptions:

- Names of leaves, outputs and nodes, if instructions, buffers, inputs and outputs use them in the same way.
- Collective partners and sequence numbers, which another proof checks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from ...backends.base import BufferSpec, Instruction, Program
from ...graph.attrs import Attr, make_attribute_key
from ...graph.graph import Graph, assign_names
from ...graph.node import Node, Value
from ...ops.collectives import COLLECTIVES

COMMUNICATION_ATTRS = ("sequence", "to", "source", "rank")
"""Attributes of collectives that no kernel before the collective depends on."""


def make_program_prefilter_key(graph: Graph, program: Program) -> Hashable:
    """Return a dictionary key that equal programs share, so that only programs with equal keys are compared in full.

    Programs with equal keys may still differ; `is_equal_to_proven_program_except_names` compares them.
    """
    return len(program.instructions), tuple([(n.op, n.specs) for n in graph.nodes])


def is_equal_to_proven_program_except_names(
    graph: Graph, program: Program, proven_graph: Graph, proven_program: Program
) -> bool:
    """Return whether a program differs from a proven program only in names, so that the proof holds for both.

    Collective partners and sequence numbers may also differ, because another proof checks them.

    Args:
        graph: The graph of the program in question. It is legal.
        program: The program in question.
        proven_graph: The graph of the proven program.
        proven_program: The proven program.
    """
    here, there = ({n: at for at, n in enumerate(g.nodes)} for g in (graph, proven_graph))
    if len(here) != len(there) or not all(
        _is_equal_node(a, b, here, there) for a, b in zip(graph.nodes, proven_graph.nodes, strict=True)
    ):
        return False
    if _list_value_positions(graph.roots(), here) != _list_value_positions(proven_graph.roots(), there) or len(
        graph.outputs
    ) != len(proven_graph.outputs):
        return False
    leaves = {b.name: a.name for a, b in zip(graph.nodes, proven_graph.nodes, strict=True) if b.is_leaf}
    outputs = dict(zip(proven_graph.outputs, graph.outputs, strict=True))
    if not (
        _has_equal_tensors_after_renaming(program.inputs, proven_program.inputs, leaves)
        and _has_equal_tensors_after_renaming(program.outputs, proven_program.outputs, outputs)
    ):
        return False
    if (
        len(program.buffers) != len(proven_program.buffers)
        or not program.buffers
        or program.buffers[0] != proven_program.buffers[0]
    ):
        return False
    pairs = zip(program.buffers[1:], proven_program.buffers[1:], strict=True)
    if not all(a == BufferSpec(b.kind, leaves[b.name], b.nbytes, b.declared_spec, b.stored_spec) for a, b in pairs):
        return False
    if [at for at, _ in program.undo] != [at for at, _ in proven_program.undo]:
        return False
    if len(program.instructions) != len(proven_program.instructions):
        return False
    called = assign_names(graph)
    steps = [*program.instructions, *(back for _, back in program.undo)]
    known = [*proven_program.instructions, *(back for _, back in proven_program.undo)]
    return all(
        _is_equal_instruction_except_names(a, b)
        and _has_expected_name_and_attrs(a, b, graph, called, leaves, proven_program)
        for a, b in zip(steps, known, strict=True)
    )


def _is_equal_node(
    node: Node, proven_node: Node, positions: Mapping[Node, int], proven_positions: Mapping[Node, int]
) -> bool:
    """Return whether two nodes have the same op, attributes, specs, and operands at the same positions.

    For collectives, partners and sequence numbers may differ.
    """
    if node.op != proven_node.op or node.specs != proven_node.specs or len(node.src) != len(proven_node.src):
        return False
    if make_attribute_key(node.attrs) != make_attribute_key(proven_node.attrs) and (
        node.op not in COLLECTIVES
        or _remove_communication_attrs(node.attrs) != _remove_communication_attrs(proven_node.attrs)
    ):
        return False
    return _list_value_positions(node.src, positions) == _list_value_positions(proven_node.src, proven_positions)


def _remove_communication_attrs(attrs: Mapping[str, Attr]) -> dict[str, Attr]:
    """Return the attributes of a node; of a collective without its devices and its sequence number."""
    return {name: value for name, value in attrs.items() if name not in COMMUNICATION_ATTRS}


def _list_value_positions(
    values: tuple[Value | None, ...], position_by_node: Mapping[Node, int]
) -> list[tuple[int, int] | None]:
    """Return the position of each value as (node number in the graph, result number); None for a missing operand."""
    return [None if v is None else (position_by_node[v.node], v.index) for v in values]


def _has_equal_tensors_after_renaming(
    tensors: Mapping[str, Any], proven_tensors: Mapping[str, Any], name_by_proven_name: Mapping[str, str]
) -> bool:
    """Return whether two tables of tensors by name are equal after the names of the proven table are translated.

    Args:
        tensors: The tensors of the program in question, by name.
        proven_tensors: The tensors of the proven program, by name.
        name_by_proven_name: The name in the program in question for each name in the proven program.
    """
    return dict(tensors) == {
        name_by_proven_name.get(name, ""): tensor for name, tensor in proven_tensors.items()
    } and len(tensors) == len(proven_tensors)


def _is_equal_instruction_except_names(instruction: Instruction, proven_instruction: Instruction) -> bool:
    """Return whether two instructions have the same op, node number, operands, results and scratch; ignore names."""
    return (
        instruction.op == proven_instruction.op
        and instruction.index == proven_instruction.index
        and instruction.src == proven_instruction.src
        and instruction.dst == proven_instruction.dst
        and instruction.scratch == proven_instruction.scratch
    )


def _has_expected_name_and_attrs(
    instruction: Instruction,
    proven_instruction: Instruction,
    graph: Graph,
    node_names: Mapping[Node, str],
    leaf_by_proven_name: Mapping[str, str],
    proven_program: Program,
) -> bool:
    """Return whether an instruction has the name and the attributes that are right for its own graph.

    An instruction of a node must have the name and the attributes of this node. An instruction without a node copies or
    saves a state. It must have the attributes of the proven instruction, and be named after the state in the same
    buffer.

    Args:
        instruction: The instruction in question.
        proven_instruction: The instruction at the same position of the proven program.
        graph: The graph of the program in question.
        node_names: The name of each node of `graph`.
        leaf_by_proven_name: The name of each leaf in `graph`, by its name in the proven graph.
        proven_program: The proven program.
    """
    if instruction.index >= 0:
        node = graph.nodes[instruction.index]
        return instruction.attrs == node.attrs and instruction.node == node_names[node]
    buffers = {t.buffer for t in (*proven_instruction.src, *proven_instruction.dst) if t is not None}
    states = {
        proven_program.buffers[number].name for number in buffers if proven_program.buffers[number].kind == "state"
    }
    renamed = [
        leaf_by_proven_name[name] + proven_instruction.node[len(name) :]
        for name in states
        if proven_instruction.node.startswith(f"{name}.")
    ]
    return instruction.attrs == proven_instruction.attrs and instruction.node in renamed
