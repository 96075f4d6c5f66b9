"""Faults in the saves that undo a step, planted one by one: the verifier of plans names each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from hocket.graph import DType
from hocket.scheduler import Plan

from ...given.plans.faults import (
    PlannedFault,
    at_offset,
    move_tensor,
    require_named,
    step,
    steps_exchanged,
    tensor_plan,
    with_program_changes,
    with_undo_changes,
    without_step,
)


def saved_late() -> Plan:
    """A state is saved once it was overwritten."""
    plan = steps_exchanged(0, "cache.k.save", "new.cache.k")
    return with_undo_changes(plan, 0, lambda undo: _renumber(undo, 1))


def _renumber(undo, by: int) -> None:
    first = min(undo)
    entries = [(n + by * (n == first), back) for n, back in undo.items()]
    undo.clear()
    undo.update(entries)


def backwards(plan: Plan, device: int, name: str, change) -> Plan:
    """One of the instructions that undo a step is changed."""
    undo = [(n, change(i) if i.node == name else i) for n, i in plan.device_plans[device].program.undo]
    return with_program_changes(plan, device, undo=tuple(undo))


def saves(name: str, device: int = 0):
    return next(i for i in tensor_plan().device_plans[device].program.instructions if i.node == f"{name}.save")


def overwritten(name: str, by: str) -> Plan:
    """Return a plan in which a later step overwrites the saved bytes, or the row numbers."""
    tensor = saves(name).dst[0]
    return step(tensor_plan(), 0, by, lambda i: at_offset(i, tensor.offset))


def renumbered_rows() -> Plan:
    """A later step writes over the input that numbers the rows."""
    return step(tensor_plan(), 0, "downed", lambda i: at_offset(i, saves("cache.k").src[1].offset))


def as_int8(tensor):
    """Return the memory of `tensor`, float32, as int8, which is the dtype of scratch."""
    return replace(tensor, shape=(4 * math.prod(tensor.shape),), strides=(1,), dtype=DType.I8)


def saved_short(rows: int) -> Plan:
    """A save keeps fewer rows than are set."""

    def short(tensor):
        return replace(tensor, shape=(rows, *tensor.shape[1:]))

    plan = step(
        tensor_plan(),
        0,
        "cache.k.save",
        lambda i: replace(i, src=(i.src[0], short(i.src[1])), dst=(short(i.dst[0]),)),
    )
    return backwards(
        plan,
        0,
        "cache.k.undo",
        lambda i: replace(i, src=(i.src[0], short(i.src[1]), short(i.src[2]))),
    )


def saved_twice() -> Plan:
    """Once before the step that overwrites it, and once after."""
    program = tensor_plan().device_plans[0].program
    at = [i.node for i in program.instructions].index("mask")
    again = (*program.instructions[:at], saves("cache.k"), *program.instructions[at:])
    return with_program_changes(tensor_plan(), 0, instructions=again, undo=(*program.undo, (at, program.undo[0][1])))


UNDOING: Mapping[str, PlannedFault] = {
    "a state is overwritten and not saved": (
        r"\(%new\.cache\.k\): overwrites state %cache\.k, which was not saved before",
        lambda: without_step(tensor_plan(), 0, "cache.k.save"),
    ),
    "a state is saved when it is overwritten already": (
        r"\(%cache\.k\.save, a save\): %cache\.k holds %new\.cache\.k.* not its value",
        saved_late,
    ),
    "what is saved is never put back": (
        r"\(%new\.cache\.k\): overwrites state %cache\.k, which was not saved before",
        lambda: with_undo_changes(tensor_plan(), 0, lambda undo: undo.pop(min(undo))),
    ),
    "what is saved of a state is overwritten by a later step": (
        r"\(%mask\): overwrites the saved value of %cache\.k",
        lambda: overwritten("cache.k", "mask"),
    ),
    "the last step overwrites what is saved of a state": (
        r"\(%logits\): overwrites the saved value of %cache\.v",
        lambda: overwritten("cache.v", "logits"),
    ),
    "the numbers of saved rows are overwritten": (
        r"\(%downed\): overwrites %ids: i32\[3\], which is needed to undo the run",
        renumbered_rows,
    ),
    "another state is put back": (
        r"%cache\.k\.undo does not restore the saved value to its location",
        lambda: backwards(
            tensor_plan(),
            0,
            "cache.k.undo",
            lambda i: replace(i, src=(saves("cache.v").src[0], *i.src[1:]), dst=(saves("cache.v").src[0],)),
        ),
    ),
    "what is saved of another state is put back": (
        r"%cache\.k\.undo does not restore the saved value to its location",
        lambda: backwards(
            tensor_plan(), 0, "cache.k.undo", lambda i: replace(i, src=(i.src[0], saves("cache.v").dst[0], i.src[2]))
        ),
    ),
    "rows are put back under other numbers": (
        r"%cache\.k\.undo does not restore the saved value to its location",
        lambda: backwards(
            tensor_plan(), 0, "cache.k.undo", lambda i: replace(i, src=(*i.src[:2], move_tensor(i.src[2], 4)))
        ),
    ),
    "fewer rows are saved than are set": (
        r"\(%new\.cache\.k\): overwrites more of state %cache\.k than the rows that were saved",
        lambda: saved_short(2),
    ),
    "other rows are saved than are set": (
        r"\(%cache\.k\.save, a save\): the row numbers of the save are not in memory",
        lambda: step(
            backwards(
                tensor_plan(), 0, "cache.k.undo", lambda i: replace(i, src=(*i.src[:2], move_tensor(i.src[2], 4)))
            ),
            0,
            "cache.k.save",
            lambda i: replace(i, src=(i.src[0], move_tensor(i.src[1], 4))),
        ),
    ),
    "two states are saved in one place": (
        r"\(%cache\.v\.save, a save\): overwrites the saved value of %cache\.k",
        lambda: step(
            backwards(
                tensor_plan(),
                0,
                "cache.v.undo",
                lambda i: replace(i, src=(i.src[0], saves("cache.k").dst[0], i.src[2])),
            ),
            0,
            "cache.v.save",
            lambda i: replace(i, dst=(saves("cache.k").dst[0],)),
        ),
    ),
    "a state is saved in the memory of another": (
        r"%cache\.k\.undo does not restore the saved value to its location",
        lambda: step(
            tensor_plan(),
            0,
            "cache.k.save",
            lambda i: replace(i, dst=(replace(i.dst[0], buffer=saves("cache.v").src[0].buffer, offset=0),)),
        ),
    ),
    "saves are put back in the order in which they were made": (
        r"steps \[7, 5\] are not restored in reverse order",
        lambda: with_program_changes(tensor_plan(), 0, undo=tensor_plan().device_plans[0].program.undo[::-1]),
    ),
    "a step that computes is said to be a save": (
        r"a save\): rms_norm cannot save a state",
        lambda: with_undo_changes(tensor_plan(), 0, lambda undo: undo.update({0: next(iter(undo.values()))})),
    ),
    "something is put back that no step saves": (
        r"steps \[5, 7, 999\] are not restored in reverse order",
        lambda: with_undo_changes(tensor_plan(), 0, lambda undo: undo.update({999: next(iter(undo.values()))})),
    ),
    "what undoes a step computes something else": (
        "get_rows cannot save a state, or cont cannot restore it",
        lambda: backwards(tensor_plan(), 0, "cache.k.undo", lambda i: replace(i, op="cont")),
    ),
    "what undoes a step has scratch where rows are saved": (
        r"set_rows: its scratch is i8\[48\] at 0\+192, need 0 bytes",
        lambda: backwards(
            tensor_plan(), 0, "cache.k.undo", lambda i: replace(i, scratch=as_int8(saves("cache.v").dst[0]))
        ),
    ),
    "a state is saved twice": (
        r"\(%cache\.k\.save, a save\): overwrites the saved value of %cache\.k",
        lambda: saved_twice(),
    ),
}


@pytest.mark.parametrize("fault", UNDOING)
def test_the_verifier_names_the_fault(fault):
    require_named(*UNDOING[fault])
