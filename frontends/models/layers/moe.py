"""Mixture of experts (MoE): a router selects a few of many FFNs for each token, and their results are summed by weight.

Steps: router scores, probabilities, selection of experts, weights, experts, weighted sum, shared expert. Shazeer et
al., The sparsely-gated mixture-of-experts layer, 2017; graph: llama.cpp ``build_moe_ffn``. Shapes use n for tokens,
and E for the model width.
"""

from __future__ import annotations

import math
from dataclasses import field, replace

from .... import ops
from ....graph import DType, Value
from ....graph.lazy_dataclass import dataclass
from ...gguf.hyperparameter_keys import ArchitectureMetadata
from ..inputs.family import FamilyTraits
from ..inputs.weights import ModelWeights
from .feed_forward import Activation, Norm, apply_feed_forward, linear, matmul

GATINGS = ("softmax", "sigmoid", "chosen", "root")
"""Functions that ``expert_gating_func`` numbers from 1: softmax, sigmoid, softmax over the chosen, root of softplus."""
MIN_WEIGHT_SUM = 2.0**-14
"""Minimum divisor of routing weights in llama.cpp: the smallest normal number of f16."""


@dataclass(frozen=True, slots=True)
class ExpertLayerHyperparameters:
    """The mixture-of-experts hyperparameters of one layer, in which each token uses only some of ``count`` experts.

    - ``gating``: the function that turns router scores into routing weights.
    - ``has_normalised_weights``: whether the weights of the selected experts are divided by their sum.
    - ``scale``: factor of these weights.
    - ``groups``, ``groups_used``: only experts of the best groups are selected. Groups are ranked by the sum of their
      two best weights.

    A shared expert, which all tokens use, is added if the file has it.
    """

    count: int
    experts_per_token: int
    gating: str = "softmax"
    has_normalised_weights: bool = True
    scale: float = 1.0
    activation: Activation = field(default=Activation())
    shared_activation: Activation = field(default=Activation())
    norm: Norm = field(default=Norm(0.0))
    groups: int = 1
    groups_used: int = 1
    family: FamilyTraits = field(default=FamilyTraits())
    group_size: int = 1
    group_scale: float = 1.0

    @classmethod
    def from_keys(
        cls, keys: ArchitectureMetadata, family: FamilyTraits, layer: int, blocks: int, unit: Activation, norm: Norm
    ) -> ExpertLayerHyperparameters:
        """Read the hyperparameters of the experts of a block from the metadata.

        Args:
            keys: The metadata.
            family: The traits of the architecture.
            layer: Number of the block.
            blocks: Number of all blocks.
            unit: The activation of the experts.
            norm: The norm of projected results.

        Raises:
            ModelError: A value is missing or invalid.
        """
        count, used = keys.read_count("expert_count"), keys.read_per_block_counts("expert_used_count", blocks)[layer]
        if not 1 <= used <= count:
            raise keys.make_key_error("expert_used_count", f"is {used}; need 1 to expert_count {count}")
        groups = keys.read_count_or_default("expert_group_count", 1)
        groups_used = keys.read_count_or_default("expert_group_used_count", 1)
        if groups > 1 and (count % groups or groups_used >= groups):
            raise keys.make_key_error(
                "expert_group_count", f"is {groups}; need a divisor of {count} above the {groups_used} used"
            )
        normalised = family.normalises_routing
        if normalised is None:
            normalised = keys.read_flag("expert_weights_norm", False)
        normalised = keys.read_flag("norm_topk_prob", normalised)
        both = keys.has("swiglu_clamp_shexp") or "one limit" not in family.special_routing
        limits = "swiglu_clamp_exp", "swiglu_clamp_shexp" if both else "swiglu_clamp_exp"
        routed, shared = (
            replace(unit, limit=keys.read_per_block_limits_or_zero(name, blocks)[layer]) for name in limits
        )
        gating, scale = _read_gating(keys, family), keys.read_positive_zero_as_none("expert_weights_scale") or 1.0
        size, factor = (
            keys.read_count_or_default("experts_per_group", 1),
            keys.read_positive_zero_as_none("expert_group_scale") or 1.0,
        )
        return cls(
            count, used, gating, normalised, scale, routed, shared, norm, groups, groups_used, family, size, factor
        )


def _read_gating(keys: ArchitectureMetadata, family: FamilyTraits) -> str:
    name, _, default = family.gating.partition(" ")
    if name != "key":
        return name
    number = keys.read_count_or_default("expert_gating_func", 1 + GATINGS.index(default or "softmax"))
    if number > len(GATINGS):
        raise keys.make_key_error("expert_gating_func", f"is {number}; need one of 1 to {len(GATINGS)}")
    return GATINGS[number - 1]


def run_expert_layer(
    weights: ModelWeights, block: str, x: Value, experts: ExpertLayerHyperparameters, router: Value | None = None
) -> Value:
    """Return the weighted sum of the experts that the router selects, plus the shared expert: f32[n, E] to f32[n, E].

    Args:
        weights: The weights of the model.
        block: The prefix of weight names.
        x: The operand of the experts.
        experts: The experts of the block.
        router: The operand of the router; by default ``x``.
    """
    scores = linear(weights, f"{block}.ffn_gate_inp", x if router is None else router, experts.count)
    y = run_experts_between_projections(weights, block, x, experts, scores)
    if experts.family.special_routing == "chunks":
        y = ops.add(
            y, ops.scale(run_group_shared_experts(weights, block, y, experts, scores), scale=experts.group_scale)
        )
    if weights.has_used_tensor(f"{block}.ffn_down_shexp.weight"):
        y = ops.add(y, run_shared_expert(weights, block, x, experts), name=f"{block}.ffn_moe_shared")
        if experts.family.special_routing == "halved":
            y = ops.scale(y, scale=0.5)
    return y


def run_experts_between_projections(
    weights: ModelWeights, block: str, x: Value, experts: ExpertLayerHyperparameters, scores: Value
) -> Value:
    """Run the routed experts; if they are narrower than the model, project ``x`` to their width before and back after.

    The file has the two projections then. The operand ``x`` and the result are f32[n, E].
    """
    for down, norm, up in (
        ("ffn_routed_down", "ffn_routed_norm", "ffn_routed_up"),
        ("ffn_latent_down", "", "ffn_latent_up"),
    ):
        if weights.has_used_tensor(f"{block}.{down}.weight"):
            y = matmul(weights, f"{block}.{down}", x, weights.tensor_shape(f"{block}.{down}.weight")[0])
            y = run_routed_experts(weights, block, y, experts, scores)
            if norm and weights.has_used_tensor(f"{block}.{norm}.weight"):
                y = experts.norm(weights, f"{block}.{norm}", y)
            return matmul(weights, f"{block}.{up}", y, x.shape[-1])
    return run_routed_experts(weights, block, x, experts, scores)


def run_routed_experts(
    weights: ModelWeights, block: str, x: Value, experts: ExpertLayerHyperparameters, scores: Value
) -> Value:
    """Return the weighted sum of the experts that the router scores select for each token: f32[n, E] to f32[n, E].

    Args:
        weights: The weights of the model.
        block: The prefix of weight names.
        x: The operand of the experts.
        experts: The experts of the block.
        scores: The router scores, f32[n, count].
    """
    ids, shares = route_tokens(weights, block, scores, experts)
    if experts.family.special_routing == "weighted input":
        rows, width = x.shape
        used = ops.reshape(shares, shape=(rows, experts.experts_per_token, 1))
        repeated = ops.repeat(ops.reshape(x, shape=(rows, 1, width)), shape=(rows, experts.experts_per_token, width))
        y = run_selected_experts(weights, block, ops.mul(repeated, used), ids, experts)
        return ops.reshape(ops.sum_rows(ops.transpose(y)), shape=(rows, width))
    x = ops.reshape(x, shape=(x.shape[0], 1, x.shape[1]))
    return sum_weighted_expert_results(
        run_selected_experts(weights, block, x, ids, experts), shares, name=f"{block}.ffn_moe"
    )


def run_group_shared_experts(
    weights: ModelWeights, block: str, x: Value, experts: ExpertLayerHyperparameters, scores: Value
) -> Value:
    """Return the weighted sum f32[n, E] of small experts that groups of experts share (Grove MoE, Inclusion AI, 2025).

    Each selected group adds its small expert. The operand ``x`` f32[n, E] is the result of the usual experts. As in
    llama.cpp ``grovemoe.cpp``, the number of a group is also used as the number of an expert to look up the routing
    weight.
    """
    rows, count = scores.shape
    used = min(experts.experts_per_token, count // experts.group_size)
    probabilities = ops.softmax(ops.reshape(scores, shape=(rows, 1, count)))
    ids = ops.top_k(ops.sigmoid(scores), k=used)
    if experts.group_size > 1:
        group = ops.floor(ops.scale(ops.cast(ids, dtype=DType.F32), scale=1.0 / experts.group_size))
        ids = ops.cast(group, dtype=DType.I32)
    table = ops.reshape(probabilities, shape=(rows, count, 1))
    shares = ops.reshape(ops.get_rows(table, ids), shape=(rows, 1, used))
    shares = ops.div(shares, ops.clamp(ops.sum_rows(shares), min=MIN_WEIGHT_SUM, max=math.inf))
    inputs = ops.reshape(x, shape=(rows, 1, x.shape[1]))
    return sum_weighted_expert_results(
        run_selected_experts(weights, block, inputs, ids, experts, "chexps", "chunk"), shares, name=f"{block}.ffn_chunk"
    )


def route_tokens(
    weights: ModelWeights, block: str, scores: Value, experts: ExpertLayerHyperparameters
) -> tuple[Value, Value]:
    """Select experts for each token by their router ``scores``; return the experts and their routing weights.

    The experts are i32[n, used], and the weights f32[n, 1, used].
    """
    rows, count, used = scores.shape[0], experts.count, experts.experts_per_token
    row = ops.reshape(scores, shape=(rows, 1, count))
    match experts.gating:
        case "softmax":
            probabilities = ops.softmax(row, name=f"{block}.ffn_moe_probs")
        case "sigmoid":
            probabilities = ops.sigmoid(row, name=f"{block}.ffn_moe_probs")
        case "root":
            probabilities = ops.sqrt(ops.softplus(row), name=f"{block}.ffn_moe_probs")
        case _:
            probabilities = row
    choice = ops.reshape(compute_selection_scores(weights, block, row, probabilities, experts), shape=(rows, count))
    ids = ops.top_k(choice, k=used, name=f"{block}.ffn_moe_ids")
    table = ops.reshape(probabilities, shape=(rows, count, 1))
    shares = ops.reshape(ops.get_rows(table, ids), shape=(rows, 1, used))
    if experts.gating == "chosen":
        shares = ops.softmax(shares)
    if experts.has_normalised_weights:
        total = ops.clamp(ops.sum_rows(shares), min=MIN_WEIGHT_SUM, max=math.inf)
        shares = ops.div(shares, total, name=f"{block}.ffn_moe_shares")
    if experts.scale != 1.0:
        shares = ops.scale(shares, scale=experts.scale, name=f"{block}.ffn_moe_scaled")
    return ids, shares


def compute_selection_scores(
    weights: ModelWeights, block: str, scores: Value, probabilities: Value, experts: ExpertLayerHyperparameters
) -> Value:
    """Compute the scores for the selection of experts, f32[n, 1, count].

    These are the probabilities plus a bias, if the file has one, and -inf outside the best groups of experts.
    """
    if experts.family.special_routing == "weighted input":
        return scores
    choice = ops.sigmoid(scores) if experts.family.special_routing == "chunks" else probabilities
    for name in (f"{block}.exp_probs_b.bias", f"{block}.exp_probs_b.weight"):
        if (bias := weights.optional_leaf(name, (experts.count,))) is not None:
            choice = ops.add(choice, bias)
    return mask_unselected_groups(choice, experts) if experts.groups > 1 else choice


def mask_unselected_groups(choice: Value, experts: ExpertLayerHyperparameters) -> Value:
    """Set the selection scores ``choice`` f32[n, 1, count] to -inf for all experts outside the best groups.

    The score of a group is the sum of the two highest scores of its experts. DeepSeek-AI, DeepSeek-V3, 2024.
    """
    rows, groups = choice.shape[0], experts.groups
    size = experts.count // groups
    table = ops.reshape(choice, shape=(rows, groups, size))
    best = ops.top_k(table, k=min(2, size))
    two = ops.get_rows(ops.reshape(table, shape=(rows, groups, size, 1)), best)
    sums = ops.reshape(ops.sum_rows(ops.reshape(two, shape=(rows, groups, best.shape[-1]))), shape=(rows, groups))
    chosen = ops.top_k(sums, k=experts.groups_used)
    masked_scores = ops.set_rows(ops.fill(table, value=-math.inf), ops.get_rows(table, chosen), chosen)
    return ops.reshape(masked_scores, shape=choice.shape)


def run_selected_experts(
    weights: ModelWeights,
    block: str,
    x: Value,
    ids: Value,
    experts: ExpertLayerHyperparameters,
    suffix: str = "exps",
    name: str = "moe",
) -> Value:
    """Return the FFN result of each selected expert for each token, f32[n, used, E].

    The results are not yet weighted or summed.

    Args:
        weights: The weights of the model.
        block: The prefix of weight names.
        x: The operands, f32[n, 1 or used, E].
        ids: The selected experts, i32[n, used].
        experts: The experts of the block.
        suffix: The end of weight names.
        name: A part of the name of the activation.
    """
    width = x.shape[-1]
    count, _, features = weights.tensor_shape(f"{block}.ffn_down_{suffix}.weight", 3)[:3]

    def product(kind: str, y: Value, n: int) -> Value:
        tensor = f"{block}.ffn_{kind}_{suffix}"
        w = weights(f"{tensor}.weight", (count, n, y.shape[-1]))
        z = ops.mul_mat_id(w, y, ids, name=tensor)
        scale = weights.optional_leaf(f"{tensor}.scale", (count,))
        bias = weights.optional_leaf(f"{tensor}.bias", (count, n))
        if scale is not None:
            rows = ops.reshape(ops.get_rows(ops.reshape(scale, shape=(count, 1)), _flatten(ids)), shape=(*ids.shape, 1))
            z = ops.mul(z, rows)
        return z if bias is None else ops.add_id(z, bias, ids)

    glu, unit = f"{block}.ffn_{name}_glu", experts.activation
    if weights.has_used_tensor(f"{block}.ffn_gate_up_{suffix}.weight"):
        inner = unit.apply_to_fused_gate_up(product("gate_up", x, 2 * features), glu)
    elif weights.has_used_tensor(f"{block}.ffn_gate_{suffix}.weight"):
        inner = unit.apply_gated(product("gate", x, features), product("up", x, features), glu)
    else:
        inner = unit.apply(product("up", x, features), glu)
    return product("down", inner, width)


def _flatten(ids: Value) -> Value:
    return ops.reshape(ids, shape=(ids.spec.size,))


def sum_weighted_expert_results(expert_results: Value, shares: Value, *, name: str) -> Value:
    """Return the sum f32[n, E] of expert results f32[n, used, E], weighted by ``shares`` f32[n, 1, used].

    The sum is a matmul, so that the weighted results [n, used, E] need no memory. If experts are on several devices,
    each device sums its own results first, and only one partial sum [n, E] per device is exchanged.
    """
    rows, _, width = expert_results.shape
    return ops.reshape(ops.mul_mat(ops.transpose(expert_results), shares, name=name), shape=(rows, width))


def run_shared_expert(weights: ModelWeights, block: str, x: Value, experts: ExpertLayerHyperparameters) -> Value:
    """Return the FFN result of the shared expert, which all tokens use: f32[n, E] to f32[n, E].

    In some families it is multiplied by a sigmoid gate of the token.
    """
    width = x.shape[-1]
    y = apply_feed_forward(weights, block, x, experts.shared_activation, experts.norm, "_shexp")
    if not experts.family.shared_gate:
        return y
    row = ops.reshape(weights(f"{block}.ffn_gate_inp_shexp.weight", (width,)), shape=(1, width))
    return ops.mul(y, ops.sigmoid(ops.mul_mat(row, x)), name=f"{block}.ffn_shexp_gated")
