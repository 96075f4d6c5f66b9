"""State saves: copies of the state entries that a run overwrites, for rollback if the run fails.

Before a node overwrites a state, its changes are saved. If the op declares that it changes only the rows that an index
operand numbers, these rows are saved, else the whole state. The saves and the row numbers stay in memory until the run
has ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...backends.base import Backend, Device
from ...graph.dtypes import STATE_DTYPES, DType
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...ops import broadcast, cont, get_rows, op_of, reshape, set_rows
from ...ops.registry import find_graph_role, find_inplace_operand
from .execution_order import ExecutionOrderWithInplaceStates
from .strides import StridedView, compute_strides_of_view_node, make_dense_view


@dataclass(frozen=True, slots=True)
class StateSave:
    """A copy of one state before a node overwrites it, which allows a failed run to be undone.

    - `state`: the state.
    - `writer`: the node that overwrites the state; None for the state copies at the end of the run.
    - `save_node`: copies the state, or its changed rows, before `writer` runs.
    - `restore_node`: copies them back.
    - `views`: the strided views of the new values, which are not in the graph.
    """

    state: Value
    writer: Node | None
    save_node: Node
    restore_node: Node
    views: Mapping[Value, StridedView]


def build_state_saves(
    order: ExecutionOrderWithInplaceStates, views: Mapping[Value, StridedView], backend: Backend, device: Device
) -> tuple[StateSave, ...]:
    """Build the saves of all states that a run changes, so that a failed run can be undone.

    A save has only the rows that change, if the op declares them and the device can copy them. Otherwise it has the
    whole state.

    Args:
        order: The nodes in execution order, and the states that they overwrite.
        views: The strided view of each value.
        backend: The backend of the device.
        device: The device.
    """
    changes: list[StateSave] = []
    whole: set[Value] = set()  # states with a complete first save, which covers later writes
    for result, state in order.inplace_states.items():
        if state.spec.size and state not in whole:
            save = _make_changed_rows_save(result, state, order, views, backend, device)
            whole |= {state} if save is None else set()
            changes.append(save or _make_whole_state_save(result.node, state, order.overwritten_values[result]))
    return (*changes, *(_make_whole_state_save(None, state) for state in order.copied_states if state.spec.size))


def _make_whole_state_save(writer_node: Node | None, state: Value, earlier_result: Value | None = None) -> StateSave:
    """Make a save of all entries of a state.

    Args:
        writer_node: The node that overwrites the state; None for the state copies at the end of the run.
        state: The state.
        earlier_result: The value that an earlier node wrote over the state; None if the state is still the old one.
    """
    saved_value = cont(state if earlier_result is None else earlier_result)
    back = cont(saved_value)
    return StateSave(
        state,
        writer_node,
        saved_value.node,
        back.node,
        {saved_value: make_dense_view(saved_value), back: make_dense_view(back)},
    )


def _make_changed_rows_save(
    new_state: Value,
    state: Value,
    order: ExecutionOrderWithInplaceStates,
    views: Mapping[Value, StridedView],
    backend: Backend,
    device: Device,
) -> StateSave | None:
    """Make a save of only the rows of `state` that change; None if the whole state must be saved.

    The result is None if all rows may change, or if the device cannot save the rows or their numbers.

    Args:
        new_state: The value that is written over the state.
        state: The state.
        order: The execution order, with the overwritten values.
        views: The strided view of each value.
        backend: The backend of the device.
        device: The device.
    """
    rows = _find_changed_rows(new_state, order.overwritten_values[new_state], views)
    if rows is None:
        return None
    table, index = rows
    seen = {}
    for view in (table, index):
        if view not in views:
            strided = compute_strides_of_view_node(view.node, views[view.node.inputs[0]])
            if strided is None:
                return None
            seen[view] = strided
    numbers = {**views, **seen}[index].base
    if not numbers.node.is_leaf and numbers in order.overwritten_values.values():
        return None
    saved_value = get_rows(table, index)
    back = set_rows(table, saved_value, index)
    seen.update({saved_value: make_dense_view(saved_value), back: make_dense_view(back)})
    dense = {**views, **seen}[index].is_dense
    for node, position in ((saved_value.node, 1), (back.node, 2)):
        if not backend.supports(node, device).ok or not (dense or backend.reads_strided(node, position)):
            return None
    return (
        StateSave(state, new_state.node, saved_value.node, back.node, seen)
        if _is_saved_losslessly(state, saved_value, backend)
        else None
    )


def _find_changed_rows(
    new_state: Value, state: Value, views: Mapping[Value, StridedView]
) -> tuple[Value, Value] | None:
    """Find the rows of a state that a new state changes; None if the op does not declare changed rows.

    Returns:
        `state` as a table ``[..., rows, width]``, and the numbers of the changed rows.
    """
    writer, declared = new_state.node, op_of(new_state.node)
    changed = declared.overwritten_entries(writer.attrs)
    operands = dict(zip(declared.operand_names, writer.src, strict=False))
    into = find_inplace_operand(new_state)
    if changed is None or into is None or views[into].base != state:  # a node that does not read a state writes all
        return None
    index, axis = operands[changed[0]], changed[1] % len(into.shape)
    assert index is not None, "the operand is declared to say what changes"
    ahead, width = into.shape[:axis], math.prod(into.shape[axis + 1 :])
    table = reshape(into, shape=(*ahead, into.shape[axis], width))
    if not ahead:
        return table, reshape(index, shape=(index.spec.size,))
    if len(index.shape) == 1:  # the same rows everywhere
        return table, broadcast(index, shape=(*ahead, *index.shape))
    return (table, index) if index.shape[:-1] == ahead else None


def _is_saved_losslessly(state: Value, saved_value: Value, backend: Backend) -> bool:
    """Return whether the dtype in which a state is saved can represent every number that the state may have."""
    was, now = (backend.storage_spec(value.spec, find_graph_role(value)).dtype for value in (state, saved_value))
    return was is now or (now is DType.F32 and was in STATE_DTYPES)
