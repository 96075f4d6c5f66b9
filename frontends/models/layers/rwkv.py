"""RWKV 6 and 7: recurrent layers that mix each token with the previous one and keep a decaying matrix per head.

The matrix has a decay per channel. Peng et al., Eagle and Finch, 2024, and RWKV-7 Goose, 2025. States:
``shift_state.N`` and, for the FFN, ``shift_state_ffn.N`` f32[B, 1, E]; ``wkv_state.N`` f32[B, heads, size, size].
Shapes use B for sequences, T for new tokens per sequence, and E for the model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Self

from .... import ops
from ....graph import Value
from ....graph.lazy_dataclass import dataclass
from ...gguf.hyperparameter_keys import ArchitectureMetadata
from ..decoder import Decoder
from ..hyperparameters import Layer
from ..inputs.family import FamilyTraits
from ..inputs.graph_builder import RECURRENT_INPUTS, StepGraphBuilder
from ..inputs.weights import ModelWeights
from .feed_forward import linear, matmul

HEAD_EPS = 64e-5
"""The eps of the norm of each head of RWKV."""
MIN_LOG_DECAY = -math.exp(-0.5)
"""The lowest log decay of RWKV 7, ``-exp(-0.5)``."""
FIRST_LAYER_VALUES = "first values"
"""The key in `StepGraphBuilder.shared_values` of the values of the first layer of RWKV 7, which other layers read."""


@dataclass(frozen=True, slots=True)
class RwkvTimeMixBase:
    """The base class of the time mix (recurrent token mixer) of RWKV 6 and 7: head sizes, head norm and state."""

    heads: int
    size: int
    taps: int = 2
    required_inputs: frozenset[str] = RECURRENT_INPUTS

    @classmethod
    def from_keys(cls, keys: ArchitectureMetadata, family: FamilyTraits, layer: int) -> Self:
        """Read the head sizes of the layer from the metadata.

        Raises:
            ModelError: The heads do not fill the model width.
        """
        size, width = keys.read_count("wkv.head_size"), keys.read_count("embedding_length")
        if width % size:
            raise keys.make_key_error("wkv.head_size", f"is {size}; need a divisor of embedding_length {width}")
        return cls(width // size, size)

    def run_recurrence(
        self, frame: StepGraphBuilder, layer: int, rule: Callable[..., tuple[Value, Value]], *operands: Value
    ) -> Value:
        old = frame.make_sequence_state(f"wkv_state.{layer}", self.heads, self.size, self.size)
        return frame.run_recurrence_and_set_state(partial(rule, name=f"blk.{layer}.wkv"), operands, old)

    def split_heads(self, frame: StepGraphBuilder, x: Value) -> Value:
        """Split the columns of ``x`` f32[B*T, E] into heads: f32[B, T, heads, size]."""
        return frame.rows_to_sequences(x, self.heads, self.size)

    def norm_and_join_heads(self, weights: ModelWeights, frame: StepGraphBuilder, name: str, y: Value) -> Value:
        """Normalise each head of ``y``, if the file has the weights of this norm, and join the heads: f32[B*T, E]."""
        if not weights.has_used_tensor(f"{name}.weight"):
            return frame.sequences_to_rows(y)
        width = (self.heads * self.size,)
        y = ops.mul(frame.sequences_to_rows(ops.norm(y, eps=HEAD_EPS)), weights(f"{name}.weight", width))
        return ops.add(y, weights(f"{name}.bias", width))


class Rwkv6TimeMix(RwkvTimeMixBase):
    """The time mix (recurrent token mixer) of RWKV 6: a token shift, then a matrix state per head that decays.

    Models made from Qwen have no bonus for the present token. Their rule is gated linear attention with keys times (1 -
    decay), and groups of heads share keys and values.
    """

    __slots__ = ()

    def __call__(self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value) -> Value:
        """Return the time mix of ``x`` f32[B*T, E]: f32[B*T, E]."""
        name, width, valid = f"blk.{layer}.time_mix", x.shape[1], frame.token_validity_mask
        back = compute_token_shift_difference(frame, f"shift_state.{layer}", x)
        w, k, v, r, g = self.compute_data_dependent_token_mixes(weights, name, x, back)
        w = ops.add(
            project_low_rank(weights, f"{name}_decay_w", w, width, ops.tanh), weights(f"{name}_decay.weight", (width,))
        )
        decay = ops.exp(ops.neg(ops.mul(self.split_heads(frame, ops.exp(w)), valid)), name=f"blk.{layer}.decay")
        k, v = (
            self.project_and_repeat_heads(weights, frame, f"{name}_{kind}", y) for kind, y in (("key", k), ("value", v))
        )
        r = self.split_heads(frame, linear(weights, f"{name}_receptance", r, width))
        gate = matmul(weights, f"{name}_gate", g, width)
        if not weights.has_used_tensor(f"{name}_first.weight"):
            rule = partial(ops.gated_linear_attn, scale=self.size**-0.5)
            y = self.run_recurrence(frame, layer, rule, ops.sub(k, ops.mul(k, decay)), v, r, decay)
            return matmul(weights, f"{name}_output", ops.mul(frame.sequences_to_rows(y), ops.sigmoid(gate)), width)
        bonus = weights(f"{name}_first.weight", (self.heads, self.size))

        def wkv(k: Value, v: Value, r: Value, decay: Value, old: Value, name: str) -> tuple[Value, Value]:
            return ops.rwkv_wkv6(k, v, r, bonus, decay, old, name=name)

        y = self.run_recurrence(frame, layer, wkv, ops.mul(k, valid), v, r, decay)
        y = ops.mul(self.norm_and_join_heads(weights, frame, f"{name}_ln", y), ops.silu(gate))
        return matmul(weights, f"{name}_output", y, width)

    def compute_data_dependent_token_mixes(
        self, weights: ModelWeights, name: str, x: Value, token_shift: Value
    ) -> list[Value]:
        """Mix each token with the previous one in five ways, with shares that depend on both tokens.

        The mixes are for decay, key, value, receptance and gate.

        Args:
            weights: The weights of the model.
            name: The prefix of weight names.
            x: The tokens, f32[B*T, E].
            token_shift: The previous token minus the token, for each row of ``x``.
        """
        rows, width = x.shape
        mixed = ops.add(ops.mul(token_shift, weights.get_leaf_ignoring_unit_axes(f"{name}_lerp_x.weight", (width,))), x)
        rank = weights.tensor_shape(f"{name}_w1.weight")[0] // 5
        short = ops.reshape(ops.tanh(matmul(weights, f"{name}_w1", mixed, 5 * rank)), shape=(rows, 5, rank))
        own = ops.mul_mat(weights(f"{name}_w2.weight", (5, width, rank)), ops.permute(short, axes=(1, 0, 2)))
        return mix_with_previous_tokens(weights, f"{name}_lerp", "wkvrg", x, token_shift, own)

    def project_and_repeat_heads(self, weights: ModelWeights, frame: StepGraphBuilder, name: str, x: Value) -> Value:
        """Project ``x`` to keys or values f32[B, T, heads, size], and repeat the heads that a group of heads shares."""
        count, (sequences, tokens) = weights.tensor_shape(f"{name}.weight")[0] // self.size, frame.pos.shape
        y = linear(weights, name, x, count * self.size)
        if count != self.heads:
            y = ops.reshape(y, shape=(x.shape[0], count, 1, self.size))
            y = ops.repeat(y, shape=(x.shape[0], count, self.heads // max(count, 1), self.size))
        return ops.reshape(y, shape=(sequences, tokens, self.heads, self.size))


class Rwkv7TimeMix(RwkvTimeMixBase):
    """The time mix (recurrent token mixer) of RWKV 7: a token shift, then a generalised delta rule per head.

    Values are mixed with the values of the first layer. The old value of a key is removed from the state before the
    new one is written.
    """

    __slots__ = ()

    def __call__(self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value) -> Value:
        """Return the time mix of ``x`` f32[B*T, E]: f32[B*T, E]."""
        name, width, valid = f"blk.{layer}.time_mix", x.shape[1], frame.token_validity_mask
        back = compute_token_shift_difference(frame, f"shift_state.{layer}", x)
        gates = weights.has_used_tensor(f"{name}_g1.weight")
        r, w, k, v, a, *g = mix_with_previous_tokens(weights, f"{name}_lerp", "rwkvag" if gates else "rwkva", x, back)
        fading = ops.sigmoid(project_low_rank(weights, f"{name}_w", w, width, ops.tanh))
        decay = ops.exp(
            ops.mul(ops.scale(self.split_heads(frame, fading), scale=MIN_LOG_DECAY), valid), name=f"blk.{layer}.decay"
        )
        r, k = (matmul(weights, f"{name}_{kind}", y, width) for kind, y in (("receptance", r), ("key", k)))
        v = self.compute_values_mixed_with_first_layer(weights, frame, name, v)
        rate = ops.sigmoid(project_low_rank(weights, f"{name}_a", a, width))
        taken = ops.l2_norm(self.split_heads(frame, ops.mul(k, weights(f"{name}_k_k.weight", (width,)))), eps=1e-12)
        slower = ops.mul(k, weights(f"{name}_k_a.weight", (width,)))
        k = self.split_heads(frame, ops.add(k, ops.sub(ops.mul(slower, rate), slower)))
        r, v = self.split_heads(frame, r), self.split_heads(frame, v)
        scaled_key = ops.mul(taken, self.split_heads(frame, rate))
        operands = r, decay, ops.mul(k, valid), v, ops.neg(taken), ops.mul(scaled_key, valid)
        y = self.norm_and_join_heads(
            weights, frame, f"{name}_ln", self.run_recurrence(frame, layer, ops.rwkv_wkv7, *operands)
        )
        share = ops.reshape(weights(f"{name}_r_k.weight", (width,)), shape=(self.heads, self.size))
        y = ops.add(y, frame.sequences_to_rows(ops.mul(v, ops.sum_rows(ops.mul(ops.mul(k, r), share)))))
        y = ops.mul(y, project_low_rank(weights, f"{name}_g", g[0], width, ops.sigmoid)) if gates else y
        return matmul(weights, f"{name}_output", y, width)

    def compute_values_mixed_with_first_layer(
        self, weights: ModelWeights, frame: StepGraphBuilder, name: str, x: Value
    ) -> Value:
        """Compute the values f32[B*T, E], mixed with the values of the first layer by a gate.

        The values of the first layer itself are stored for the other layers.
        """
        v = matmul(weights, f"{name}_value", x, x.shape[1])
        if (first := frame.shared_values.setdefault(FIRST_LAYER_VALUES, v)) is v:
            return v
        return ops.add(
            v, ops.mul(ops.sub(first, v), ops.sigmoid(project_low_rank(weights, f"{name}_v", x, x.shape[1])))
        )


class RwkvDecoder(Decoder):
    """The decoder of RWKV, in which the FFN of a block also reads the previous token.

    The residual is halved after every `span` blocks.
    """

    def run_block(self, i: int, layer: Layer, x: Value) -> Value:
        block, frame = f"blk.{i}", self.frame
        mixed = self.run_mixers_and_sum_results(
            i, layer, x, self.apply_block_norm_if_present(i, self.family.attn_norm, x)
        )
        x = ops.add(x, mixed, name=f"{block}.attn_residual")
        h = self.apply_block_norm_if_present(i, self.family.ffn_norm, x)
        back = compute_token_shift_difference(frame, f"shift_state_ffn.{i}", h)
        if self.is_last_block(i):
            x, h, back = map(frame.select_output_rows_unless_mtp, (x, h, back))
        x = ops.add(x, self.run_channel_mix(f"{block}.channel_mix", h, back), name=f"{block}.ffn_residual")
        return x if (i + 1) % self.hyper.span else ops.scale(x, scale=0.5)

    def run_channel_mix(self, name: str, x: Value, token_shift: Value) -> Value:
        """Return the channel mix (the FFN of RWKV) for the rows ``x`` f32[n, E].

        ``token_shift`` f32[n, E] is the previous token minus the token, for each row.
        """
        weights, width = self.weights, x.shape[1]
        gates = weights.has_used_tensor(f"{name}_receptance.weight")
        k, *r = mix_with_previous_tokens(weights, f"{name}_lerp", "kr" if gates else "k", x, token_shift)
        inner = ops.sqr(ops.relu(matmul(weights, f"{name}_key", k, weights.tensor_shape(f"{name}_key.weight")[0])))
        y = matmul(weights, f"{name}_value", inner, width)
        return ops.mul(y, ops.sigmoid(matmul(weights, f"{name}_receptance", r[0], width))) if gates else y


def compute_token_shift_difference(frame: StepGraphBuilder, name: str, x: Value) -> Value:
    """Return the previous token's row minus the token's row, for each row of ``x`` f32[B*T, E] (RWKV token shift).

    The state ``name`` holds the last row of the previous run, and receives the last row of this one.
    """
    both = frame.prepend_previous_rows(name, frame.rows_to_sequences(x, x.shape[1]), 1)
    return ops.sub(frame.sequences_to_rows(ops.slice_(both, axis=1, start=0, stop=frame.step.tokens)), x)


def mix_with_previous_tokens(
    weights: ModelWeights,
    name: str,
    kinds: str,
    x: Value,
    token_shift: Value,
    data_dependent_shares: Value | None = None,
) -> list[Value]:
    """Mix each token with the previous one: return ``x + share * token_shift`` for each of ``kinds``.

    Args:
        weights: The weights of the model.
        name: The prefix of the shares, which are one tensor or one tensor per kind.
        kinds: A letter per result.
        x: The tokens, f32[n, E].
        token_shift: The previous token minus the token, f32[n, E].
        data_dependent_shares: Values that are added to the shares of the file, f32[kinds, n, E].
    """
    rows, width = x.shape
    if weights.has_used_tensor(f"{name}_fused.weight"):
        whole = weights.get_leaf_ignoring_unit_axes(f"{name}_fused.weight", (len(kinds), width))
        shares = [ops.slice_(whole, axis=0, start=i, stop=i + 1) for i in range(len(kinds))]
    else:
        shares = [weights.get_leaf_ignoring_unit_axes(f"{name}_{kind}.weight", (1, width)) for kind in kinds]
    if data_dependent_shares is None:
        return [ops.add(ops.mul(token_shift, share), x) for share in shares]
    parts = (
        ops.reshape(ops.slice_(data_dependent_shares, axis=0, start=i, stop=i + 1), shape=(rows, width))
        for i in range(len(kinds))
    )
    return [ops.add(ops.mul(ops.add(y, share), token_shift), x) for y, share in zip(parts, shares, strict=True)]


def project_low_rank(
    weights: ModelWeights, name: str, x: Value, width: int, inner: Callable[[Value], Value] = lambda y: y
) -> Value:
    """Multiply ``x`` f32[n, E] by two low-rank matrices with a function between them.

    The bias is added if there is one.

    Args:
        weights: The weights of the model.
        name: The prefix of weight names.
        x: The operand.
        width: Columns of the result f32[n, width].
        inner: The function between the matrices.
    """
    y = inner(matmul(weights, f"{name}1", x, weights.tensor_shape(f"{name}1.weight")[0]))
    y, bias = matmul(weights, f"{name}2", y, width), weights.optional_leaf(f"{name}0.weight", (width,))
    return y if bias is None else ops.add(y, bias)
