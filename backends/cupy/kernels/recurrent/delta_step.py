"""Fusion of the delta rule of a few tokens with all instructions that compute its operands, and with its saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ....fusion.dataflow import Dataflow, has_same_elements, require_no_alias
from ....fusion.operands import require_supported
from ....fusion.patterns import match_short_convolution
from ...binding.fused_binding import FusionBinder
from ...binding.launch_builder import LaunchBuilder
from .delta_gates import MAX_PRODUCT_TOKENS, match_gate_products
from .delta_tokens import launch_delta_rule_by_token
from .short_convolution import (
    DeltaRuleInputs,
    OperandsBeforeDeltaRule,
    find_delta_rule_or_activation,
    fuse_delta_net_inputs,
)
from .states import DeltaRuleOperands, bind_states_and_prepare_memory


def _fuse_delta_rule_and_logits(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Compute the delta rule, its inputs, and the matmuls for its decays and learning rates in one launch."""
    return _fuse_delta_rule_and_inputs(launches, flow, number, computes_logits=True)


def _fuse_delta_rule_and_inputs(
    launches: LaunchBuilder, flow: Dataflow, number: int, computes_logits: bool = False
) -> Sequence[int]:
    """Compute the delta rule, the save of its state, and the ops that compute its inputs in one launch.

    Several blocks read the old rows of a channel. The last of them writes the new rows, so that these may lie there.
    """
    require_supported(launches.limits.computes_operands, "the delta rule computes no operands")
    require_supported(launches.limits.has_warpgroups, "its kernels are compiled for devices with warpgroups")
    convolution = match_short_convolution(flow, number)
    rule_number = find_delta_rule_or_activation(flow, convolution.activation)
    call = flow.bound_instruction(rule_number)
    require_supported(call.op == "gated_delta_net" and len(call.dst) == 2, "no delta rule follows")
    require_supported(call.optional_operand(6) is None, "states are in slots")
    state = call.operand(5)
    save_number = flow.find_state_save(state, rule_number)
    saved = None
    if save_number is not None:
        save = flow.bound_instruction(save_number)
        require_supported(
            save.op == "cont" and has_same_elements(save.operand(0), state), "the state is saved otherwise"
        )
        require_supported(save.out.is_dense and has_same_elements(state, call.dst[1]), "the state is copied")
        saved = save.out
    q, k, v, g, beta = (call.operand(i) for i in range(5))
    rule = DeltaRuleOperands(q, k, v, g, beta, call.out, call.attrs["heads"] == "tiled")
    require_supported(0 < rule.sequences * rule.tokens <= MAX_PRODUCT_TOKENS, "tokens are many")

    def launch_rule(launches: LaunchBuilder, sources: OperandsBeforeDeltaRule, inputs: DeltaRuleInputs) -> None:
        require_supported(
            has_same_elements(inputs.g, g) and has_same_elements(inputs.beta, beta), "gates are read in another order"
        )
        for out in (call.out, *call.dst, *([] if saved is None else [saved])):
            require_no_alias(out, [*sources.operands, inputs.next_rows, inputs.saved_rows])
        if saved is not None:
            require_no_alias(saved, [state, call.out])
        before, launches.number = launches.number, rule_number
        carried = bind_states_and_prepare_memory(launches, call, rule.sequences, rule.tokens)
        launches.number = before
        require_supported(not launches.items, "the states are prepared by another launch")
        counters = launches.upload_constant(np.zeros(rule.sequences * inputs.k.shape[-2], np.uint32))
        words = [*sources.make_struct_fields(inputs), counters]  # the kernel resets the counters to zeros
        launch_delta_rule_by_token(
            launches, rule, carried.begin_fields, carried, carried.stored_snapshots, saved, words
        )

    match = {"match_products": match_gate_products} if computes_logits else {}
    numbers = fuse_delta_net_inputs(launches, flow, number, launch=launch_rule, **match)
    for unwritten in {*numbers}.difference((convolution.state_update, convolution.save)):
        readers = flow.find_readers(unwritten)
        require_supported(
            readers is not None and {*readers} <= {*numbers, rule_number}, "something else reads an operand"
        )
    return [*numbers, rule_number, *([] if save_number is None else [save_number])]


FUSED: Mapping[str, Sequence[FusionBinder]] = {"concat": (_fuse_delta_rule_and_logits, _fuse_delta_rule_and_inputs)}
