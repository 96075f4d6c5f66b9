"""The verifier of state saves: wherever a run stops, its undo restores every state.

Before an instruction overwrites a state, a save copies the state, or its rows that will change, into the arena. After
a failed run, the restoring instructions (`Program.undo`) run in reverse order. The states are right if:

1. each state is saved before its first write, and the save has all entries that are written;
2. if rows are saved again before other rows are written, each undo goes back to the save before it;
3. the saved values and the row indices outlive the run;
4. each undo instruction reads the save and writes it back to the same location.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ....backends.base import ALIGNMENT, Backend, Instruction, Program, Tensor
from ....graph.attrs import quote_node_name
from ....graph.dtypes import STATE_DTYPES, DType
from ....graph.graph import Graph
from ....graph.node import Node, Value, input
from ....ops import REGISTRY, op_of
from ....ops.elementwise.binary import cont
from ....ops.movement.rows import get_rows, set_rows
from .buffer_contents import (
    BufferContents,
    check_scratch_tensor,
    compute_byte_extent,
    find_stored_dtype,
    format_byte_range_content,
    has_common_bytes_in_same_buffer,
    is_dense,
)

RESTORE_OP_BY_SAVE_OP = {cont.name: cont.name, get_rows.name: set_rows.name}
"""For each op that saves a state, the op that restores it."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state that a program saved, so that the undo of a failed run can restore it.

    - `instruction_number`: the position of the save in the program.
    - `state`: the memory of the state.
    - `row_index`: the numbers of the saved rows; None if the whole state is saved.
    """

    instruction_number: int
    state: Tensor
    row_index: Tensor | None


@dataclass(frozen=True, slots=True)
class InstructionLabel:
    """The number and the node name of an instruction, for messages; the text is built only if it is needed."""

    number: int
    node_name: str

    def __str__(self) -> str:
        return f"step {self.number} (%{quote_node_name(self.node_name)})"


@dataclass(frozen=True, slots=True)
class SavedContentMarker:
    """Marks bytes of the arena that hold a saved copy of a state, in the simulated contents of memory."""

    state_name: str

    def __repr__(self) -> str:
        return f"the saved value of %{quote_node_name(self.state_name)}"


def build_nodes_for_rollback_support_check(instruction: Instruction, state: Value) -> tuple[Node, Node]:
    """Build two nodes that save and restore a state; the verifier asks the backend whether it supports them.

    Saves are instructions of a program without nodes in the graph, but backends answer questions about nodes only.

    Args:
        instruction: The saving instruction, `cont` (the whole state) or `get_rows` (some rows).
        state: The saved state.

    Returns:
        The saving node and the restoring node.
    """
    table = input("table", _assert_tensor_is_present(instruction.src[0]).shape, state.dtype)
    if instruction.op == cont.name:
        saved_value = cont(table)
        return saved_value.node, cont(saved_value).node
    rows = input(
        "rows", _assert_tensor_is_present(instruction.src[1]).shape, _assert_tensor_is_present(instruction.src[1]).dtype
    )
    saved_value = get_rows(table, rows)
    return saved_value.node, set_rows(table, saved_value, rows).node


def list_standalone_save_and_restore_nodes(graph: Graph, program: Program) -> Iterator[Node]:
    """Yield nodes that stand for the state saves of a program and for the restores from them.

    Programs save states before they overwrite them, by instructions without nodes in the graph. The verifier asks the
    backend whether it supports these nodes.
    """
    states = {v.node.name: v for v in graph.states}
    for at in program.save_positions:
        i = program.instructions[at]
        yield from build_nodes_for_rollback_support_check(
            i, states[program.buffers[_assert_tensor_is_present(i.src[0]).buffer].name]
        )


class FailedRunUndoChecker:
    """The check that the undo of a failed run can restore every state, wherever the run stopped.

    The caller simulates the program and calls the check for each instruction.

    Args:
        graph: The graph of the device.
        program: Its program.
        backend: The backend of the device.
        contents: The contents of all buffers at the current instruction, which the caller updates.
    """

    def __init__(self, graph: Graph, program: Program, backend: Backend, contents: BufferContents) -> None:
        self.program, self.backend, self.contents = program, backend, contents
        self.state_by_name = {v.node.name: v for v in graph.states}
        self.restore_by_step = dict(program.undo)
        self.saved_state_by_buffer: dict[int, SavedState] = {}  # by buffer number
        self.last_save_by_value: dict[
            object, int
        ] = {}  # values that the undo reads, each with the last save that needs it
        self.saved_extents: list[tuple[int, int, int]] = []
        self.valid_restores: list[Instruction] = []  # restoring instructions without faults

    def find_save_and_restore_faults(self, step: int, instruction: Instruction) -> Iterator[str]:
        """Yield the faults of an instruction that saves a state, and of the instruction that restores it.

        If the two are well-formed, the saved values are recorded as contents of memory.

        Args:
            step: The number of the saving instruction in the program.
            instruction: The saving instruction.
        """
        where, back = f"step {step} (%{quote_node_name(instruction.node)}, a save)", self.restore_by_step[step]
        complaints = list(self._find_save_operand_faults(instruction, back)) or list(
            self._find_unacceptable_save_operands(instruction, back)
        )
        yield from (f"{where}: {why}" for why in complaints)
        if complaints:
            return
        self.valid_restores.append(back)
        state, saved_tensor = _assert_tensor_is_present(instruction.src[0]), instruction.dst[0]
        name = self.program.buffers[state.buffer].name
        _, content = self.contents.find_content(compute_byte_extent(state))
        earlier, leaf = self.saved_state_by_buffer.get(state.buffer), self.state_by_name.get(name)
        if earlier is None and content != leaf:
            content_text = format_byte_range_content(content)
            yield f"{where}: %{quote_node_name(name)} holds {content_text} and not its value from before the run"
        if earlier is not None and (earlier.row_index is None or content == leaf or not isinstance(content, Value)):
            content_text = format_byte_range_content(content)
            yield f"{where}: %{quote_node_name(name)} is saved a second time, and holds {content_text}"
        index = instruction.src[1] if len(instruction.src) > 1 else None
        self.saved_state_by_buffer[state.buffer] = SavedState(step, state, index)
        for tensor in (instruction.scratch, saved_tensor):
            if tensor is not None:
                self.contents.record_write_and_overwritten_values(compute_byte_extent(tensor), None)
        token = SavedContentMarker(name)
        self.contents.record_write_and_overwritten_values(compute_byte_extent(saved_tensor), token)
        self.last_save_by_value[token] = step
        self.saved_extents.append(compute_byte_extent(saved_tensor))
        if index is not None and 0 not in index.shape:
            self.saved_extents.append(compute_byte_extent(index))
            _, numbers = self.contents.find_content(compute_byte_extent(index))
            if not isinstance(numbers, Value) or index.dtype is not find_stored_dtype(self.backend, numbers):
                yield f"{where}: the row numbers of the save are not in memory"
            else:
                self.last_save_by_value[numbers] = step
        yield from self._find_overwritten_undo_source_faults(where)

    def _find_save_operand_faults(self, save: Instruction, restore: Instruction) -> Iterator[str]:
        """Yield faults in the ops, operands and locations of a save and its restore; memory contents do not matter."""
        state, saved_tensor = (*save.src, None)[0], (*save.dst, None)[0]
        if (
            RESTORE_OP_BY_SAVE_OP.get(save.op) != restore.op
            or state is None
            or saved_tensor is None
            or None in (*save.src, *restore.src)
        ):
            yield f"{save.op} cannot save a state, or {restore.op} cannot restore it"
            return
        if any(step.attrs != REGISTRY[step.op].defaults or step.index != -1 for step in (save, restore)):
            yield f"{save.op} or {restore.op} has the number of a graph node, or other attributes than a copy"
        index = save.src[1:]
        restore_operands = (saved_tensor,) if not index else (state, saved_tensor, *index)
        if (
            (restore.src, restore.dst) != (restore_operands, (state,))
            or len(save.dst) != 1
            or len(index) != (save.op == get_rows.name)
        ):
            yield f"%{quote_node_name(restore.node)} does not restore the saved value to its location"
            return
        taken = [t for t in (saved_tensor, save.scratch, restore.scratch) if t is not None]
        for tensor in (*save.src, *taken):
            if why := self.contents.check_bounds(_assert_tensor_is_present(tensor)):
                yield f"it: {why}"
                return
        buffers = self.program.buffers
        if buffers[state.buffer].kind != "state" or compute_byte_extent(state)[1:] != (0, buffers[state.buffer].nbytes):
            yield f"{state} is not a whole state"
        if any(t.buffer or t.offset % ALIGNMENT for t in taken):
            yield f"the saved value is outside the arena, or does not begin at a multiple of {ALIGNMENT} bytes"
        whole = state.shape if not index else (*_assert_tensor_is_present(index[0]).shape, *state.shape[-1:])
        if (
            not is_dense(state)
            or not is_dense(saved_tensor)
            or saved_tensor.shape != whole
            or not _is_saved_losslessly(state, saved_tensor)
        ):
            yield f"{saved_tensor} cannot hold the saved entries of {state}"
        if index and (len(state.shape) < 2 or not _can_index_rows(_assert_tensor_is_present(index[0]), state)):
            yield f"{index[0]} does not number rows of {state}"
        reads = [compute_byte_extent(_assert_tensor_is_present(t)) for t in save.src]
        if save.scratch is not None and has_common_bytes_in_same_buffer(
            compute_byte_extent(save.scratch), compute_byte_extent(saved_tensor)
        ):
            yield "its scratch overlaps the saved value"
        if any(has_common_bytes_in_same_buffer(read, compute_byte_extent(t)) for read in reads for t in taken):
            yield "it overwrites its operands"

    def _find_unacceptable_save_operands(self, save: Instruction, restore: Instruction) -> Iterator[str]:
        """Yield the reasons why kernels reject a save or its restore (dtypes, scratch or strides), or wrong names."""
        state, saved_tensor, index = _assert_tensor_is_present(save.src[0]), save.dst[0], save.src[1:]
        name = self.program.buffers[state.buffer].name
        leaf = self.state_by_name[name]
        nodes = build_nodes_for_rollback_support_check(save, leaf)
        dtypes = find_stored_dtype(self.backend, leaf), find_stored_dtype(self.backend, nodes[0].results[0])
        if (state.dtype, saved_tensor.dtype) != dtypes or not (index or state.shape == leaf.shape):
            yield f"{state} is saved as {saved_tensor}, need {dtypes[0]} of %{quote_node_name(name)} as {dtypes[1]}"
        if (save.node, restore.node) != (f"{name}.save", f"{name}.undo"):
            yield f"it saves %{quote_node_name(name)}, which is restored by %{quote_node_name(restore.node)}"
        for node, step in zip(nodes, (save, restore), strict=True):
            if why := check_scratch_tensor(self.contents, step.scratch, self.backend.scratch(node)):
                yield f"{step.op}: {why}"
            for position, tensor in enumerate(map(_assert_tensor_is_present, step.src)):
                if not is_dense(tensor) and not self.backend.reads_strided(node, position):
                    yield f"operand {position} of {step.op} is {tensor}, but its kernel reads dense operands only"

    def find_unsafe_overwrite_faults(self, step: int, instruction: Instruction, node: Node | None) -> Iterator[str]:
        """Yield faults of an instruction that overwrites unsaved entries of a state, or values that the undo reads.

        Args:
            step: The number of the instruction in the program.
            instruction: An instruction that computes a node or copies a new state.
            node: The node of the graph that it computes; None for the copy of a new state.
        """
        where = InstructionLabel(step, instruction.node)
        yield from self._find_overwritten_undo_source_faults(where)
        scratch = [] if instruction.scratch is None else [instruction.scratch]
        for result, tensor in enumerate((*instruction.dst, *scratch)):
            if not 0 <= tensor.buffer < len(self.program.buffers) or 0 in tensor.shape:
                continue
            buffer = self.program.buffers[tensor.buffer]
            if buffer.kind != "state":
                continue
            saved = self.saved_state_by_buffer.get(tensor.buffer)
            if saved is None:
                yield f"{where}: overwrites state %{quote_node_name(buffer.name)}, which was not saved before"
            elif saved.row_index is not None and not _is_write_within_saved_rows(node, result, instruction, saved):
                yield f"{where}: overwrites more of state %{quote_node_name(buffer.name)} than the rows that were saved"

    def _find_overwritten_undo_source_faults(self, subject: object) -> Iterator[str]:
        """Yield faults for values that the last instruction overwrote, although the undo of a failed run reads them.

        Exception: a state with the row numbers of other states may change after its own save, because the undo restores
        it first.

        Args:
            subject: The instruction, as the subject of messages.
        """
        for value in self.contents.overwritten_values:
            if value in self.last_save_by_value and not self._is_restored_before_use_as_row_index(value):
                yield f"{subject}: overwrites {format_byte_range_content(value)}, which is needed to undo the run"
        self.contents.overwritten_values.clear()

    def _is_restored_before_use_as_row_index(self, value: object) -> bool:
        """Return whether `value` is a state of row numbers that is restored before another restore reads them."""
        if not isinstance(value, Value) or value.node.op != "state":
            return False
        saved = [
            s
            for s in self.saved_state_by_buffer.values()
            if self.program.buffers[s.state.buffer].name == value.node.name
        ]
        return (
            bool(saved) and saved[0].row_index is None and saved[0].instruction_number > self.last_save_by_value[value]
        )

    def find_undo_order_and_scratch_faults(self) -> Iterator[str]:
        """Yield faults of the undo as a whole: restores in a wrong order, or scratch memory that overlaps saved values.

        Restores must be in reverse order of the saves.
        """
        steps = [at for at, _ in self.program.undo]
        if any(a >= b for a, b in pairwise(steps)) or not all(0 <= at < len(self.program.instructions) for at in steps):
            yield f"the saves at steps {steps} are not restored in reverse order"
        for back in self.valid_restores:
            if back.scratch is None:
                continue
            self.contents.arena_end = max(self.contents.arena_end, compute_byte_extent(back.scratch)[2])
            if any(
                has_common_bytes_in_same_buffer(compute_byte_extent(back.scratch), saved_extent)
                for saved_extent in self.saved_extents
            ):
                yield f"%{quote_node_name(back.node)} has its scratch in bytes that the undo needs"


def _can_index_rows(index: Tensor, table: Tensor) -> bool:
    """Return whether the integers of `index` can select rows of `table`: both have the same leading axes."""
    return index.dtype.is_integer and index.shape[:-1] == table.shape[:-2]


def _assert_tensor_is_present(tensor: Tensor | None) -> Tensor:
    """Return a tensor; assert that it is present, which the caller has checked."""
    assert tensor is not None
    return tensor


def _is_saved_losslessly(state: Tensor, saved_tensor: Tensor) -> bool:
    """Return whether the dtype of the saved tensor can represent every number of the state."""
    return saved_tensor.dtype is state.dtype or (saved_tensor.dtype is DType.F32 and state.dtype in STATE_DTYPES)


def _is_write_within_saved_rows(node: Node | None, result: int, instruction: Instruction, saved: SavedState) -> bool:
    """Return whether a node that writes over a state changes only rows that were saved before.

    Its op must declare the index operand with the numbers of the changed rows. This operand must equal the row index of
    the save.

    Args:
        node: The node that writes the state; None for the copy of a new state.
        result: The number of the result that is written over the state.
        instruction: The instruction of the node.
        saved: The save of some rows of the state.
    """
    declared = None if node is None else op_of(node)
    changed = None if declared is None or node is None else declared.overwritten_entries(node.attrs)
    if declared is None or node is None or changed is None or result >= len(instruction.dst):
        return False
    operands = dict(zip(declared.operand_names, instruction.src, strict=False))
    into = operands.get(dict(declared.inplace_pairs(node.attrs)).get(result, ""))
    index = operands.get(changed[0])
    if (
        into is None
        or index is None
        or saved.row_index is None
        or compute_byte_extent(into) != compute_byte_extent(instruction.dst[result])
    ):
        return False
    axis = changed[1] % len(into.shape)
    if saved.state.shape[:-1] != into.shape[: axis + 1]:
        return False
    mine, theirs = (_list_row_index_byte_offsets(t, into.shape[:axis]) for t in (saved.row_index, index))
    same = saved.row_index.buffer == index.buffer and saved.row_index.dtype is index.dtype
    return same and mine is not None and theirs is not None and np.array_equal(mine, theirs)


def _list_row_index_byte_offsets(index: Tensor, leading_shape: tuple[int, ...]) -> npt.NDArray[np.int64] | None:
    """Return where each row number of a row index is in memory, in bytes, to compare it with another row index.

    Two tensors with equal offsets read the same row numbers. The offsets are sorted within each index of the leading
    axes.

    Args:
        index: The row index.
        leading_shape: The axes of the table before the row axis.

    Returns:
        The offsets; None if the shape of the index does not match `leading_shape`.
    """
    at: npt.NDArray[np.int64] = np.full((), index.offset, np.int64)
    for n, stride in zip(index.shape, index.strides, strict=True):
        at = at[..., None] + np.arange(n) * stride * index.dtype.block_bytes
    if not leading_shape:
        return np.sort(at, axis=None)
    if at.ndim != 1 and at.shape[:-1] != leading_shape:
        return None
    return np.sort(np.broadcast_to(at, (*leading_shape, at.shape[-1])), axis=-1)
