"""Mixtures of experts: a router sends each token to a few of many feed-forwards and adds up what they answer.

Shazeer et al., The sparsely-gated mixture-of-experts layer, 2017; graph: llama.cpp ``build_moe_ffn``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ... import ops
from ...graph import Value
from . import blocks
from .blocks import linear
from .keys import Keys
from .weights import Weights

SOFTMAX = 1
"""What ``expert_gating_func`` says where a softmax over all experts weighs them; 0 is unset."""
SMALLEST_SUM = 2.0**-14
"""What llama.cpp divides routing weights by at least: the smallest normal number of f16."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Each token is answered by ``used`` of ``count`` experts of ``features`` columns, and by a shared one of
    ``shared`` columns unless that is 0.  Routing weights are a softmax over all experts; those of the chosen ones are
    divided by their sum if ``normalised``, and multiplied by ``scale``."""

    count: int
    used: int
    features: int
    shared: int = 0
    normalised: bool = True
    scale: float = 1.0

    @classmethod
    def from_keys(cls, keys: Keys, features: int, shared: int = 0) -> Experts:
        """The experts of a model; ModelError if the metadata make no sense or ask for another kind of routing."""
        count, used = keys.count("expert_count"), keys.count("expert_used_count")
        if used > count:
            raise keys.error("expert_used_count", f"is {used}; need at most expert_count {count}")
        if (gating := keys.count("expert_gating_func", 0, least=0)) not in (0, SOFTMAX):
            raise keys.error("expert_gating_func", f"is {gating}; need {SOFTMAX}, a softmax")
        if (groups := keys.count("expert_group_count", 1, least=0)) > 1:
            raise keys.error("expert_group_count", f"is {groups}; only experts that are not grouped can be run")
        normalised = keys.flags("expert_weights_norm", 1)[0] if keys.has("expert_weights_norm") else True
        return cls(count, used, features, shared, normalised, keys.optional("expert_weights_scale") or 1.0)


def feed_forward(weights: Weights, block: str, x: Value, inner: int | Experts) -> Value:
    """What follows the mixer of a block, f32[n, E] to f32[n, E]: experts, or SwiGLU of so many columns."""
    if isinstance(inner, Experts):
        return mixture(weights, block, x, inner)
    return blocks.feed_forward(weights, block, x, inner)


def mixture(weights: Weights, block: str, x: Value, experts: Experts) -> Value:
    """The weighted sum of the chosen experts, plus the shared one: f32[n, E] to f32[n, E]."""
    ids, shares = route(weights, block, x, experts)
    y = combined(answers(weights, block, x, ids, experts), shares, name=f"{block}.ffn_moe")
    if not experts.shared:
        return y
    return ops.add(y, shared_answer(weights, block, x, experts.shared), name=f"{block}.ffn_moe_shared")


def route(weights: Weights, block: str, x: Value, experts: Experts) -> tuple[Value, Value]:
    """Which experts answer a token, i32[n, used], and how much each counts, f32[n, 1, used]."""
    rows, count, used = x.shape[0], experts.count, experts.used
    scores = linear(weights, f"{block}.ffn_gate_inp", x, count)
    probabilities = ops.softmax(ops.reshape(scores, shape=(rows, 1, count)), name=f"{block}.ffn_moe_probs")
    table = ops.reshape(probabilities, shape=(rows, count, 1))
    ids = ops.top_k(ops.reshape(probabilities, shape=(rows, count)), k=used, name=f"{block}.ffn_moe_ids")
    shares = ops.reshape(ops.get_rows(table, ids), shape=(rows, 1, used))
    if experts.normalised:
        total = ops.clamp(ops.sum_rows(shares), min=SMALLEST_SUM, max=math.inf)
        shares = ops.div(shares, total, name=f"{block}.ffn_moe_shares")
    if experts.scale != 1.0:
        shares = ops.scale(shares, scale=experts.scale, name=f"{block}.ffn_moe_scaled")
    return ids, shares


def answers(weights: Weights, block: str, x: Value, ids: Value, experts: Experts) -> Value:
    """SwiGLU of the chosen experts for each token, f32[n, E] to f32[n, used, E]; gate and up may be one tensor."""
    rows, width = x.shape
    x = ops.reshape(x, shape=(rows, 1, width))

    def product(name: str, y: Value, features: int) -> Value:
        w = weights(f"{block}.{name}.weight", (experts.count, features, y.shape[-1]))
        return ops.mul_mat_id(w, y, ids, name=f"{block}.{name}")

    fused = f"{block}.ffn_gate_up_exps.weight"
    if weights.optional(fused, (experts.count, 2 * experts.features, width)) is not None:
        both = product("ffn_gate_up_exps", x, 2 * experts.features)
        inner = ops.glu(both, kind="swiglu", name=f"{block}.ffn_moe_glu")
    else:
        gate, up = (product(name, x, experts.features) for name in ("ffn_gate_exps", "ffn_up_exps"))
        inner = ops.swiglu(gate, up, name=f"{block}.ffn_moe_glu")
    return product("ffn_down_exps", inner, width)


def combined(answer: Value, shares: Value, *, name: str) -> Value:
    """Answers f32[n, used, E] weighed by ``shares`` f32[n, 1, used] and added up, f32[n, E].

    A product with the weights, so that no [n, used, E] is written again, and linear in the answers: where experts are
    cut across devices, their partial sums meet as one [n, E].
    """
    rows, _, width = answer.shape
    return ops.reshape(ops.mul_mat(ops.transpose(answer), shares, name=name), shape=(rows, width))


def shared_answer(weights: Weights, block: str, x: Value, features: int) -> Value:
    """SwiGLU of the expert that answers every token, times a sigmoid of the token: f32[n, E] to f32[n, E]."""
    width = x.shape[-1]
    row = ops.reshape(weights(f"{block}.ffn_gate_inp_shexp.weight", (width,)), shape=(1, width))
    y = blocks.feed_forward(weights, block, x, features, "_shexp")
    return ops.mul(y, ops.sigmoid(ops.mul_mat(row, x)), name=f"{block}.ffn_shexp_gated")
