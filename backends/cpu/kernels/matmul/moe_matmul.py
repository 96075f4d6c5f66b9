"""MoE products with packed or float weights: sort slots by expert, then multiply all rows of an expert at once."""

from __future__ import annotations

import math

import numpy as np

from ....fusion.operands import BoundInstruction, Operand
from ...compilation.compiler import kernel, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.vectors import load_int, store_int
from ...steps.step_table import StepTableBuilder
from ..packed.activation_quantisation import TERMS_BY_KIND
from ..packed.weight_packing import INVALID_ROW
from . import amx_moe
from .amx_matmul import choose_activation_rounding_kind
from .packed_matmul import bind_matmul_of_any_weight_type, has_matmul_kernel
from .tile_loops import ExpertSlots

ARGS = declare_args("ids count experts starts own every")


@kernel
def sort_expert_slots(a, thread, threads):
    """Sort `count` slots by expert; a slot is a pair of a token and one of its experts.

    `ids` (int32) holds the expert of each slot, one of `every` experts. The device has `experts` experts, from number
    `own` on. An invalid id stops the run. `starts` receives these numbers, in this order:

    - for each expert of the device, the number of slots before it,
    - the number of slots before the experts of other devices,
    - `count`,
    - the slots, sorted by expert.
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
            return INVALID_ROW | chosen << 8
        after = starts + 4 * (to_local_expert_index(chosen, own, experts) + 1)
        store_int(after, load_int(after) + 1)
    for e in range(experts + 1):
        store_int(starts + 4 * (e + 1), load_int(starts + 4 * (e + 1)) + load_int(starts + 4 * e))
    slots = starts + 4 * (experts + 2)
    for i in range(count):  # starts[e] becomes the end of expert e ...
        at = starts + 4 * to_local_expert_index(load_int(ids + 4 * i), own, experts)
        store_int(slots + 4 * load_int(at), i)
        store_int(at, load_int(at) + 1)
    for e in range(experts + 1, 0, -1):  # ... which is the start of expert e + 1
        store_int(starts + 4 * e, load_int(starts + 4 * (e - 1)))
    store_int(starts, 0)
    return 0


@subroutine
def to_local_expert_index(chosen, own, experts):
    """Return the index of expert `chosen` on this device, or `experts` if another device has the expert.

    The device has `experts` experts, from number `own` on.
    """
    return chosen - own if own <= chosen and chosen < own + experts else experts


def _bind_mul_mat_id(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    if not has_matmul_kernel(call):
        return False
    if choose_activation_rounding_kind(call) in TERMS_BY_KIND:
        amx_moe.bind_amx_moe_matmul(steps, call, find_or_add_sorted_expert_slots(steps, call))
    else:
        bind_matmul_of_any_weight_type(steps, call, find_or_add_sorted_expert_slots(steps, call))
    return True


def find_or_add_sorted_expert_slots(steps: StepTableBuilder, call: BoundInstruction) -> ExpertSlots:
    """Return the slots (pairs of a token and an expert) of an MoE matmul, sorted by expert.

    The step that sorts them is added unless an earlier step did.
    """
    x, ids, experts = call.operand(1), call.operand(2), call.operand(0).shape[0]
    return ExpertSlots(_find_or_add_sorted_slot_memory(steps, call, ids, experts), experts, ids.shape[-1], x.shape[-2])


def _find_or_add_sorted_slot_memory(
    steps: StepTableBuilder, call: BoundInstruction, ids: Operand, experts: int
) -> Operand:
    """Return the memory with the slots (pairs of a token and an expert) sorted by expert.

    The step that sorts them is added unless an earlier step did.
    """
    own, every = (int(np.asarray(call.attrs[name])) for name in ("first", "total"))
    key = ("slots", ids.tensor, own, experts)
    if (sorted_before := steps.find_derived_operands(key)) is not None:
        return sorted_before[0]
    count = math.prod(ids.shape)
    slots = steps.scratch("slots", 4 * (experts + 2 + count))
    address, every = slots.address, every or experts
    words = ARGS(ids=ids.address, count=count, experts=experts, starts=address, own=own, every=every)
    steps.add(sort_expert_slots, words, reads=[ids], writes=[slots], stops=True)
    steps.register_derived_operands(key, [slots], [ids])
    return slots


BINDINGS = {"mul_mat_id": _bind_mul_mat_id}
