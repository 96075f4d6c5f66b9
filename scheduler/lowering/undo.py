"""What a step overwrites in its states, and how that is put back if the step fails.

Before a node writes over a state, what it will change is saved: the rows that one of its operands numbers, where the op
declares that it changes no others, else the whole state.  What is saved stays in the arena, and the numbers of the rows
stay where they are, until the step has ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...backends.base import Backend, Device
from ...graph.dtypes import STATE_DTYPES, DType
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...ops import broadcast, cont, get_rows, op_of, reshape, set_rows
from ...ops.registry import find_inplace_operand, find_storage_kind
from .order import Schedule
from .strides import Strided, through_view, whole


@dataclass(frozen=True, slots=True)
class Save:
    """Run `keep` before `writer` writes over `state` (None: before the copies at the end); `back` undoes that.

    `views` are the values of the two that the graph does not have.
    """

    state: Value
    make_writer: Node | None
    keep: Node
    back: Node
    views: Mapping[Value, Strided]


def saves(order: Schedule, views: Mapping[Value, Strided], backend: Backend, on: Device) -> tuple[Save, ...]:
    """A save for every state that the step changes."""
    changes: list[Save] = []
    whole: set[Value] = set()  # of these the first save holds all, whatever is written later
    for result, state in order.donated.items():
        if state.spec.size and state not in whole:
            save = _of_rows(result, state, order, views, backend, on)
            whole |= {state} if save is None else set()
            changes.append(save or _of_all(result.node, state, order.over[result]))
    return (*changes, *(_of_all(None, state) for state in order.copied if state.spec.size))


def _of_all(writer: Node | None, state: Value, victim: Value | None = None) -> Save:
    """A save of all that lies in the memory of `state`: of `victim`, if a result lies there already."""
    kept = cont(state if victim is None else victim)
    back = cont(kept)
    return Save(state, writer, kept.node, back.node, {kept: whole(kept), back: whole(back)})


def _of_rows(
    new: Value, state: Value, order: Schedule, views: Mapping[Value, Strided], backend: Backend, on: Device
) -> Save | None:
    """A save of the rows in which `new` differs from what lies in the memory of `state` before; None if that may be
    all, or rows or their numbers cannot be kept."""
    rows = _rows(new, order.over[new], views)
    if rows is None:
        return None
    table, index = rows
    seen = {}
    for view in (table, index):
        if view not in views:
            strided = through_view(view.node, views[view.node.inputs[0]])
            if strided is None:
                return None
            seen[view] = strided
    numbers = {**views, **seen}[index].base
    if not numbers.node.is_leaf and numbers in order.over.values():
        return None
    kept = get_rows(table, index)
    back = set_rows(table, kept, index)
    seen.update({kept: whole(kept), back: whole(back)})
    dense = {**views, **seen}[index].is_dense
    for node, position in ((kept.node, 1), (back.node, 2)):
        if not backend.supports(node, on).ok or not (dense or backend.reads_strided(node, position)):
            return None
    return Save(state, new.node, kept.node, back.node, seen) if _exact(state, kept, backend) else None


def _rows(new: Value, state: Value, views: Mapping[Value, Strided]) -> tuple[Value, Value] | None:
    """`state` as a table ``[..., rows, width]``, and the numbers of the rows in which `new` differs from it."""
    writer, declared = new.node, op_of(new.node)
    changed = declared.overwritten_entries(writer.attrs)
    operands = dict(zip(declared.operand_names, writer.src, strict=False))
    into = find_inplace_operand(new)
    if changed is None or into is None or views[into].base != state:  # a state that it does not read it writes whole
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


def _exact(state: Value, kept: Value, backend: Backend) -> bool:
    """Whether rows of `state` come back with the same bits from where they are kept."""
    was, now = (backend.stored(value.spec, find_storage_kind(value)).dtype for value in (state, kept))
    return was is now or (now is DType.F32 and was in STATE_DTYPES)
