"""MoE products with packed or float weights: sort slots by expert, then multiply all rows of an expert at once."""

from __future__ import annotations

import math

import numpy as np

from ....operands import Bound, Operand
from ...compiler import kernel, part
from ...simd.vectors import load_int, store_int
from ...steps import Steps
from ...words import words
from ..packing import NO_ROW
from . import tiled_experts
from .grouped import Slots
from .products import bind_product, is_compiled
from .rounding import TERMS
from .tiled import kind_of

ARGS = words("ids count experts starts own every")


@kernel
def sort_slots(a, thread, threads):
    """Sort `count` slots by expert. `ids` (int32) holds one of `every` experts per slot.

    The device has `experts` experts, from number `own` on. `starts` receives the slots before each expert, the slots
    before the remote experts, and the slots in all. The sorted slots follow. An invalid id stops the run.
    """
    ids, count, experts, starts = ARGS.ids(a), ARGS.count(a), ARGS.experts(a), ARGS.starts(a)
    own, every = ARGS.own(a), ARGS.every(a)
    if thread != 0:
        return 0
    for e in range(experts + 2):
        store_int(starts + 4 * e, 0)
    for i in range(count):
        chosen = load_int(ids + 4 * i)
        if chosen < 0 or chosen >= every:
            return NO_ROW | chosen << 8
        after = starts + 4 * (here(chosen, own, experts) + 1)
        store_int(after, load_int(after) + 1)
    for e in range(experts + 1):
        store_int(starts + 4 * (e + 1), load_int(starts + 4 * (e + 1)) + load_int(starts + 4 * e))
    slots = starts + 4 * (experts + 2)
    for i in range(count):  # starts[e] becomes the end of expert e ...
        at = starts + 4 * here(load_int(ids + 4 * i), own, experts)
        store_int(slots + 4 * load_int(at), i)
        store_int(at, load_int(at) + 1)
    for e in range(experts + 1, 0, -1):  # ... which is the start of expert e + 1
        store_int(starts + 4 * e, load_int(starts + 4 * (e - 1)))
    store_int(starts, 0)
    return 0


@part
def here(chosen, own, experts):
    """Return the index of an expert on this device; `experts` for an expert of another device."""
    return chosen - own if own <= chosen and chosen < own + experts else experts


def _mul_mat_id(steps: Steps, call: Bound) -> bool:
    if not is_compiled(call):
        return False
    if kind_of(call) in TERMS:
        tiled_experts.bind(steps, call, sorted_slots(steps, call))
    else:
        bind_product(steps, call, sorted_slots(steps, call))
    return True


def sorted_slots(steps: Steps, call: Bound) -> Slots:
    """Return the slots of an MoE product, sorted by expert. Add a sorting step unless an earlier step did it."""
    x, ids, experts = call.operand(1), call.operand(2), call.operand(0).shape[0]
    return Slots(_sorted(steps, call, ids, experts), experts, ids.shape[-1], x.shape[-2])


def _sorted(steps: Steps, call: Bound, ids: Operand, experts: int) -> Operand:
    """Return the sorted slots. Add a sorting step unless an earlier step has sorted these ids."""
    own, every = (int(np.asarray(call.attrs[name])) for name in ("first", "total"))
    key = ("slots", ids.tensor, own, experts)
    if (sorted_before := steps.known(key)) is not None:
        return sorted_before[0]
    count = math.prod(ids.shape)
    slots = steps.scratch("slots", 4 * (experts + 2 + count))
    address, every = slots.address, every or experts
    words = ARGS(ids=ids.address, count=count, experts=experts, starts=address, own=own, every=every)
    steps.add(sort_slots, words, reads=[ids], writes=[slots], stops=True)
    steps.remember(key, [slots], [ids])
    return slots


BINDINGS = {"mul_mat_id": _mul_mat_id}
