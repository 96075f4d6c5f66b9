"""The verifier of programs. It shares no code with the planner: it records the content of each byte of memory.

Writes of an instruction replace the content of the written bytes. Each read must find the complete value that the
graph names. So one check finds early reuse, a wrong alias, a reader after the writer of its state, and a lost output:
the bytes hold another value at this instruction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ....backends.base import ALIGNMENT, BACKEND_KIND, Backend, BufferSpec, Instruction, Program, Tensor
from ....graph.attrs import quote_node_name
from ....graph.errors import PlanError, format_count
from ....graph.graph import Graph, assign_names
from ....graph.node import Node, Value
from ....graph.validation import instance_of, validate_arguments
from ....ops import op_of
from ....ops.elementwise.binary import cont
from ...records.field_types import record_kind
from .buffer_contents import (
    BufferContents,
    ViewCache,
    check_scratch_tensor,
    compute_byte_extent,
    find_stored_dtype,
    format_byte_range_content,
    has_common_bytes_in_same_buffer,
    is_dense,
)
from .rollback_verifier import FailedRunUndoChecker, InstructionLabel

LEAF_OPS = ("weight", "state", "constant")
"""Leaves that have a buffer of their own."""


@validate_arguments(PlanError, graph=instance_of(Graph), program=record_kind(Program), backend=BACKEND_KIND)
def verify_program(graph: Graph, program: Program, backend: Backend) -> None:
    """Verify that a program computes its graph; raise `PlanError` with the first fault.

    Args:
        graph: The graph that the program must run.
        program: The program.
        backend: The backend of the device; it decides dtypes and scratch bytes.
    """
    for why in find_faults_against_graph(graph, program, backend):
        raise PlanError(f"program of {format_count(len(program.instructions), 'step')}: {why}")


def find_faults_against_graph(graph: Graph, program: Program, backend: Backend) -> Iterator[str]:
    """Yield as text all reasons why a program does not compute its graph.

    Args:
        graph: The graph that the program must run.
        program: The program.
        backend: The backend of the device; it decides dtypes and scratch bytes.
    """
    complaints = list(_find_buffer_faults(graph, program, backend))
    if not all([type(part) for part in entry] == [int, Instruction] for entry in program.undo):
        complaints.append("each entry of undo must be an instruction number and an instruction")
    yield from complaints
    if not complaints:  # with faults, buffer numbers have no meaning
        yield from _ProgramMemoryChecker(graph, program, backend).find_faults()


def _find_buffer_faults(graph: Graph, program: Program, backend: Backend) -> Iterator[str]:
    """Yield the faults of a program's buffers.

    Buffer 0 must be the arena. Each weight, state and constant must have one buffer of the stored size.
    """
    if not program.buffers or program.buffers[0] != BufferSpec("arena", "", program.buffers[0].nbytes):
        yield "its first buffer is not the arena"
        return
    leaves = {(n.op, n.name): n.specs[0] for n in graph.nodes if n.op in LEAF_OPS}
    times = Counter((b.kind, b.name) for b in program.buffers[1:])
    for number, buffer in enumerate(program.buffers[1:], 1):
        key = buffer.kind, buffer.name
        if key not in leaves or times[key] > 1:
            again = "like another buffer" if key in leaves else "which the graph does not have"
            yield f"buffer {number} is {buffer.kind} %{quote_node_name(buffer.name)}, {again}"
            continue
        stored = backend.storage_spec(leaves[key], buffer.kind)
        if buffer != BufferSpec(*key, stored.nbytes, leaves[key], stored):
            yield f"{buffer} is for {buffer.kind} %{quote_node_name(buffer.name)}: {leaves[key]}, stored as {stored}"
    for kind, name in leaves.keys() - times.keys():
        yield f"{kind} %{quote_node_name(name)} has no buffer"


class _ProgramMemoryChecker:
    """Checks one program: it simulates the instructions, and tracks which value is in which bytes of memory."""

    def __init__(self, graph: Graph, program: Program, backend: Backend) -> None:
        self.graph, self.program, self.backend = graph, program, backend
        self.name_by_node, self.views, self.contents = assign_names(graph), ViewCache(backend), BufferContents(program)
        self.undo_check = FailedRunUndoChecker(graph, program, backend, self.contents)
        self.state_name_by_buffer = {number: b.name for number, b in enumerate(program.buffers) if b.kind == "state"}
        self.updates = {s.node.name: (s, v) for s, v in graph.updates.items()}
        self.executed_work: set[object] = set()

    def find_faults(self) -> Iterator[str]:
        """Yield all faults of the program.

        Faults of the inputs come first, then faults of the instructions in order, then faults of the final contents.
        """
        yield from self._record_leaf_contents()
        for step, instruction in enumerate(self.program.instructions):
            if step in self.undo_check.restore_by_step:
                yield from self.undo_check.find_save_and_restore_faults(step, instruction)
                continue
            complaints = [
                f"{InstructionLabel(step, instruction.node)}: {why}"
                for why in self._find_instruction_faults_or_record_writes(instruction)
            ]
            yield from complaints
            if not complaints:
                node = self.graph.nodes[instruction.index] if instruction.index >= 0 else None
                yield from self.undo_check.find_unsafe_overwrite_faults(step, instruction, node)
        yield from self.undo_check.find_undo_order_and_scratch_faults()
        yield from self._find_faults_at_end_of_run()

    # -------------------------------------------------------------------------------------------------- both ends

    def _record_leaf_contents(self) -> Iterator[str]:
        """Record the leaves as the contents of their buffers before the first instruction.

        Yields faults of inputs: a missing or wrong location, or an overlap with another input.
        """
        memory, program = self.contents, self.program
        leaves = {(n.op, n.name): n.results[0] for n in self.graph.nodes if n.is_leaf}
        for number, buffer in enumerate(program.buffers[1:], 1):
            memory.record_write_and_overwritten_values((number, 0, buffer.nbytes), leaves[buffer.kind, buffer.name])
        for name in program.inputs.keys() - {v.node.name for v in self.graph.inputs}:
            yield f"input %{quote_node_name(name)} has a location, but the graph does not have it"
        for value in self.graph.inputs:
            what = f"input %{quote_node_name(value.node.name)}"
            if value.node.name not in program.inputs:
                yield f"{what} has no location"
                continue
            tensor = program.inputs[value.node.name]
            if why := self._check_write_location(tensor, value):
                yield f"{what}: {why}"
            elif tensor.buffer:
                yield f"{what} is outside the arena"
            else:
                memory.overwritten_values.clear()
                memory.record_write_and_overwritten_values(compute_byte_extent(tensor), value)
                if memory.overwritten_values:
                    yield f"{what} overlaps {format_byte_range_content(memory.overwritten_values[0])}"
        memory.overwritten_values.clear()

    def _find_faults_at_end_of_run(self) -> Iterator[str]:
        """Yield faults at the end of a run: nodes that did not run, wrong contents of outputs, leaves or the arena."""
        program, memory = self.program, self.contents
        for node in self.graph.nodes:
            if not node.is_leaf and not op_of(node).is_view and node not in self.executed_work:
                yield f"%{self.name_by_node[node]} never runs"
        for name in program.outputs.keys() - self.graph.outputs.keys():
            yield f"output {name!r} has a location, but the graph does not have it"
        for name, value in self.graph.outputs.items():
            if name not in program.outputs:
                yield f"output {name!r} is missing"
            elif why := memory.check_tensor_holds_view(program.outputs[name], self.views.resolve_view(value)):
                yield f"at the end, output {name!r}: {why}"
        for number, buffer in enumerate(program.buffers[1:], 1):
            _, content = memory.find_content((number, 0, buffer.nbytes))
            if buffer.nbytes and not self._is_allowed_final_leaf_content(content, buffer):
                content_text = format_byte_range_content(content)
                yield f"at the end, {buffer.kind} %{quote_node_name(buffer.name)} holds {content_text}"
        arena_bytes = program.buffers[0].nbytes
        if not memory.arena_end <= arena_bytes < memory.arena_end + ALIGNMENT:
            yield f"its arena has {arena_bytes} bytes, but its contents need {memory.arena_end}"

    def _is_allowed_final_leaf_content(self, content: object, buffer: BufferSpec) -> bool:
        """Return whether a leaf's buffer may hold this content after a run.

        A state with an update must hold the new value. All other leaves must hold their old value.
        """
        if buffer.kind != "state" or buffer.name not in self.updates:
            return isinstance(content, Value) and (content.node.op, content.node.name) == (buffer.kind, buffer.name)
        state, new = self.updates[buffer.name]
        seen = self.views.resolve_view(new)
        is_base = is_dense(seen) and (seen.offset, seen.base.spec.size) == (0, state.spec.size)
        in_place = is_base and seen.dtype is find_stored_dtype(self.backend, state)
        return content == (state, new) or (in_place and content == seen.base)

    # -------------------------------------------------------------------------------------------------- each step

    def _find_instruction_faults_or_record_writes(self, instruction: Instruction) -> Iterator[str]:
        """Yield the faults of an instruction that computes a node; if it has none, record its writes.

        Saves of states are checked elsewhere (`FailedRunUndoChecker`).
        """
        work = self._find_node_of_instruction(instruction)
        if isinstance(work, str):
            yield work
            return
        node, results, what = work
        if what in self.executed_work:
            yield "runs a second time"
        self.executed_work.add(what)
        if len(node.src) != len(instruction.src) or len(results) != len(instruction.dst):
            yield f"{format_count(len(instruction.src), 'operand')} and {format_count(len(instruction.dst), 'result')}"
            return
        complaints = list(self._find_operand_content_and_stride_faults(node, instruction))
        if why := check_scratch_tensor(self.contents, instruction.scratch, self.backend.scratch(node)):
            complaints.append(why)
        complaints += [
            f"result: {why}"
            for value, tensor in zip(results, instruction.dst, strict=True)
            if (why := self._check_write_location(tensor, value))
        ]
        yield from complaints
        if complaints:
            return
        taken = [compute_byte_extent(t) for t in (instruction.scratch, *instruction.dst) if t is not None]
        yield from _find_overwritten_operand_or_result_faults(instruction, node, taken)
        for extent in taken:
            self.contents.record_write_and_overwritten_values(extent, None)
        written_values = node.results if isinstance(what, Node) else (what,)
        for written_value, extent in zip(written_values, taken[instruction.scratch is not None :], strict=True):
            self.contents.record_write_and_overwritten_values(extent, written_value)

    def _find_node_of_instruction(self, instruction: Instruction) -> tuple[Node, Sequence[Value], object] | str:
        """Find the node that an instruction computes; if there is none, return the reason as text.

        An instruction may also copy a new state over the old one at the end of a run.

        Returns:
            The node, the values that it writes, and a key that is unique for each node or state copy.
        """
        if instruction.index >= 0:
            node = self.graph.nodes[instruction.index] if instruction.index < len(self.graph.nodes) else None
            if node is None or node.is_leaf or op_of(node).is_view:
                return "the graph has no such node to compute"
            if (instruction.op, instruction.attrs) != (node.op, node.attrs):
                return f"{instruction.op} with {dict(instruction.attrs)} is not {node!r}"
            return (
                (node, node.results, node)
                if instruction.node == self.name_by_node[node]
                else f"it is %{self.name_by_node[node]}"
            )
        name = self.state_name_by_buffer.get(instruction.dst[0].buffer) if instruction.dst else None
        if name not in self.updates or instruction.index != -1:
            return "the instruction is neither a node of the graph nor the copy of a new state"
        state, new = update = self.updates[name]
        if (instruction.op, instruction.attrs, instruction.node) != (
            cont.name,
            cont.defaults,
            f"{self.name_by_node[state.node]}.update",
        ):
            return f"{instruction.op} does not copy the new state over %{quote_node_name(name)}"
        return cont(new).node, (state,), update

    def _find_operand_content_and_stride_faults(self, node: Node, instruction: Instruction) -> Iterator[str]:
        """Yield faults of operands: memory without the node's operand, or strides that the kernel cannot read."""
        for position, (source, tensor) in enumerate(zip(node.src, instruction.src, strict=True)):
            if (source is None) != (tensor is None):
                yield f"operand {position} is {'missing' if tensor is None else 'unexpected'}"
            elif source is not None and tensor is not None:
                if why := self.contents.check_tensor_holds_view(tensor, self.views.resolve_view(source)):
                    yield f"operand {position}: {why}"
                elif not is_dense(tensor) and not self.backend.reads_strided(node, position):
                    yield f"operand {position} is {tensor}, but its kernel reads dense operands only"

    def _check_write_location(self, tensor: Tensor, value: Value) -> str | None:
        """Return why `value` may not be written to `tensor`, or None if it may.

        The tensor must have the stored shape and dtype, and be in the arena or in the buffer of a state.
        """
        whole = self.views.resolve_view(value)
        if (tensor.shape, tensor.strides, tensor.dtype) != (whole.shape, whole.strides, whole.dtype):
            return f"{value!r}, stored as {whole.dtype}, is written to {tensor}"
        if why := self.contents.check_bounds(tensor):
            return why
        if tensor.offset % ALIGNMENT:
            return f"{tensor} does not begin at a multiple of {ALIGNMENT} bytes"
        if tensor.buffer and tensor.buffer not in self.state_name_by_buffer:
            return f"{tensor} is written into {self.program.buffers[tensor.buffer].kind}s"
        return None


def _has_equal_shape_and_strides(tensor: Tensor, other_tensor: Tensor) -> bool:
    """Return whether two tensors have equal shapes and strides. Strides of axes of size 1 are ignored."""
    triples = zip(tensor.shape, tensor.strides, other_tensor.strides, strict=False)
    return tensor.shape == other_tensor.shape and all(n == 1 or s == t for n, s, t in triples)


def _find_overwritten_operand_or_result_faults(
    instruction: Instruction, node: Node, written_extents: list[tuple[int, int, int]]
) -> Iterator[str]:
    """Yield faults of an instruction that writes over memory which it also reads, or twice over the same memory.

    Results and scratch may not overlap each other or an operand. Exception: a result may overwrite an operand that the
    op declares as in-place.

    Args:
        instruction: The instruction.
        node: The node that it computes.
        written_extents: The byte extents of the scratch, if there is one, and then of each result.
    """
    if any(
        has_common_bytes_in_same_buffer(one, two)
        for number, one in enumerate(written_extents)
        for two in written_extents[:number]
    ):
        yield "a result or the scratch overlaps another"
    declared = op_of(node)
    operands = [
        (n, t, compute_byte_extent(t))
        for n, t in zip(declared.operand_names, instruction.src, strict=False)
        if t is not None
    ]
    for result, extent in enumerate(written_extents, -(instruction.scratch is not None)):
        for name, tensor, read in operands:
            if not has_common_bytes_in_same_buffer(extent, read):
                continue
            allowed = [n for r, n in declared.inplace_pairs(node.attrs) if r == result]
            exact = result >= 0 and read == extent and _has_equal_shape_and_strides(tensor, instruction.dst[result])
            is_read_inplace = any(n in allowed and t == tensor for n, t, _ in operands)
            if not exact or not (name in allowed or is_read_inplace):
                yield f"overwrites its operand {name} while reading it"
