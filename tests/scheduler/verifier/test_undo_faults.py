"""Faults in what a step saves to be taken back, planted one by one: the verifier of plans finds every one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from hocket.graph import PlanError
from hocket.scheduler import Plan
from hocket.scheduler.verifier.plan import plan_faults, verify_plan

from ...given.plans.faults import at_offset, kept, moved, programmed, step, steps_exchanged, tensor_plan, without_step

Fault = Callable[[], Plan]


def unsaved(name: str) -> Plan:
    """A state is overwritten without a save."""
    plan = tensor_plan()
    at = [i.node for i in plan.lanes[0].program.instructions].index(f"{name}.save")
    undo = [(n - (n > at), back) for n, back in plan.lanes[0].program.undo if n != at]
    return programmed(without_step(plan, 0, f"{name}.save"), 0, undo=tuple(undo))


def saved_late() -> Plan:
    """A state is saved once it was overwritten."""
    plan = steps_exchanged(0, "cache.k.save", "new.cache.k")
    return kept(plan, 0, lambda undo: _renumber(undo, 1))


def _renumber(undo, by: int) -> None:
    first = min(undo)
    entries = [(n + by * (n == first), back) for n, back in undo.items()]
    undo.clear()
    undo.update(entries)


def backwards(plan: Plan, device: int, name: str, change) -> Plan:
    """One of the instructions that undo a step is changed."""
    undo = [(n, change(i) if i.node == name else i) for n, i in plan.lanes[device].program.undo]
    return programmed(plan, device, undo=tuple(undo))


def saves(name: str, device: int = 0):
    return next(i for i in tensor_plan().lanes[device].program.instructions if i.node == f"{name}.save")


def overwritten(name: str, by: str) -> Plan:
    """A later step writes over what was saved, or over the numbers of rows."""
    tensor = saves(name).dst[0]
    return step(tensor_plan(), 0, by, lambda i: at_offset(i, tensor.offset))


def renumbered_rows() -> Plan:
    """A later step writes over the input that numbers the rows."""
    return step(tensor_plan(), 0, "act", lambda i: at_offset(i, saves("cache.k").src[1].offset))


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
    program = tensor_plan().lanes[0].program
    at = [i.node for i in program.instructions].index("mask")
    again = (*program.instructions[:at], saves("cache.k"), *program.instructions[at:])
    return programmed(tensor_plan(), 0, instructions=again, undo=(*program.undo, (at, program.undo[0][1])))


UNDOING: Mapping[str, Fault] = {
    "a state is overwritten and not saved": lambda: unsaved("cache.k"),
    "a state is saved when it is overwritten already": saved_late,
    "what is saved is never put back": lambda: kept(tensor_plan(), 0, lambda undo: undo.pop(min(undo))),
    "what is saved of a state is overwritten by a later step": lambda: overwritten("cache.k", "mask"),
    "the last step overwrites what is saved of a state": lambda: overwritten("cache.v", "logits"),
    "the numbers of saved rows are overwritten": renumbered_rows,
    "another state is put back": lambda: backwards(
        tensor_plan(),
        0,
        "cache.k.undo",
        lambda i: replace(i, src=(saves("cache.v").src[0], *i.src[1:]), dst=(saves("cache.v").src[0],)),
    ),
    "what is saved of another state is put back": lambda: backwards(
        tensor_plan(), 0, "cache.k.undo", lambda i: replace(i, src=(i.src[0], saves("cache.v").dst[0], i.src[2]))
    ),
    "rows are put back under other numbers": lambda: backwards(
        tensor_plan(), 0, "cache.k.undo", lambda i: replace(i, src=(*i.src[:2], moved(i.src[2], 4)))
    ),
    "fewer rows are saved than are set": lambda: saved_short(2),
    "other rows are saved than are set": lambda: step(
        backwards(tensor_plan(), 0, "cache.k.undo", lambda i: replace(i, src=(*i.src[:2], moved(i.src[2], 4)))),
        0,
        "cache.k.save",
        lambda i: replace(i, src=(i.src[0], moved(i.src[1], 4))),
    ),
    "two states are saved in one place": lambda: step(
        backwards(
            tensor_plan(), 0, "cache.v.undo", lambda i: replace(i, src=(i.src[0], saves("cache.k").dst[0], i.src[2]))
        ),
        0,
        "cache.v.save",
        lambda i: replace(i, dst=(saves("cache.k").dst[0],)),
    ),
    "a state is saved in the memory of another": lambda: step(
        tensor_plan(),
        0,
        "cache.k.save",
        lambda i: replace(i, dst=(replace(i.dst[0], buffer=saves("cache.v").src[0].buffer, offset=0),)),
    ),
    "saves are put back in the order in which they were made": lambda: programmed(
        tensor_plan(), 0, undo=tensor_plan().lanes[0].program.undo[::-1]
    ),
    "a step that computes is said to be a save": lambda: kept(
        tensor_plan(), 0, lambda undo: undo.update({0: next(iter(undo.values()))})
    ),
    "something is put back that no step saves": lambda: kept(
        tensor_plan(), 0, lambda undo: undo.update({999: next(iter(undo.values()))})
    ),
    "what undoes a step computes something else": lambda: backwards(
        tensor_plan(), 0, "cache.k.undo", lambda i: replace(i, op="cont")
    ),
    "what undoes a step has its scratch where rows are saved": lambda: backwards(
        tensor_plan(), 0, "cache.k.undo", lambda i: replace(i, scratch=saves("cache.v").dst[0])
    ),
    "a state is saved twice": lambda: saved_twice(),
}


@pytest.mark.parametrize("fault", UNDOING)
def test_the_verifier_finds_that(fault):
    broken = UNDOING[fault]()
    assert list(plan_faults(broken))
    with pytest.raises(PlanError):
        verify_plan(broken)
