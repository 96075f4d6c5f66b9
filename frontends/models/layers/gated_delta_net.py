"""Gated delta nets: linear attention with the delta rule, with a decay per head or per key channel.

1. Project the tokens to q, k, v, an output gate, and the operands of decay and learning rate.
2. Apply a short convolution and SiLU to q, k and v, and normalise q and k to length 1.
3. Apply the delta rule to the state of each head.
4. Normalise the result, multiply it by the gate, and project it.

Yang, Kautz and Hatamizadeh, Gated delta networks, 2024; Kimi team, Kimi Linear, 2025.

States: ``conv_state.N`` f32[B, taps-1, channels], for Kimi ``conv_state_q.N``, ``conv_state_k.N`` and
``conv_state_v.N``; ``delta_state.N`` f32[B, heads, value, key].
"""

from __future__ import annotations

from .... import ops
from ....graph import Value
from ....graph.lazy_dataclass import dataclass
from ...gguf.hyperparameter_keys import ArchitectureMetadata
from ..inputs.family import FamilyTraits
from ..inputs.graph_builder import RECURRENT_INPUTS, StepGraphBuilder
from ..inputs.weights import ModelWeights
from .feed_forward import OUTPUT_GATES, Norm, linear, matmul, split_columns
from .mamba import convolve_and_silu


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """A gated delta net layer, as in Qwen3-Next and Qwen3.5: linear attention with the delta rule and a decay per head.

    The result is multiplied by an output gate: SiLU or sigmoid of another projection.
    """

    taps: int
    key_heads: int
    value_heads: int
    size: int
    norm: Norm
    gate: str = "silu"
    required_inputs: frozenset[str] = RECURRENT_INPUTS

    @classmethod
    def from_keys(cls, keys: ArchitectureMetadata, family: FamilyTraits, layer: int) -> GatedDeltaNet:
        """Read the sizes of the layer from the metadata.

        Raises:
            ModelError: Value heads are no multiple of key heads, or do not fill the inner size.
        """
        size, key_heads = keys.read_count("ssm.state_size"), keys.read_count("ssm.group_count")
        value_heads, inner = keys.read_count("ssm.time_step_rank"), keys.read_count("ssm.inner_size")
        if value_heads % key_heads:
            raise keys.make_key_error(
                "ssm.time_step_rank", f"is {value_heads}; need a multiple of group_count {key_heads}"
            )
        if inner != value_heads * size:
            raise keys.make_key_error(
                "ssm.inner_size", f"is {inner}; need time_step_rank * state_size {value_heads * size}"
            )
        # One tap would need no state, and no such model exists.
        taps, eps = (
            keys.read_count("ssm.conv_kernel", minimum=2),
            keys.read_positive_float32("attention.layer_norm_rms_epsilon"),
        )
        return cls(taps, key_heads, value_heads, size, Norm(eps), family.delta_gate)

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v, which pass one convolution side by side."""
        return self.key_heads * self.size, self.key_heads * self.size, self.value_heads * self.size

    def __call__(self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value) -> Value:
        """Return the result f32[B*T, E] of the layer for ``x`` f32[B*T, E].

        In files with ``ssm_ba``, the value heads of a key head are neighbours.
        """
        block, heads = f"blk.{layer}", self.value_heads
        by_key_head = weights.has_used_tensor(f"{block}.ssm_ba.weight")
        qkv, z, alpha, beta = (
            self.project_qkv_gate_and_rates_by_key_head if by_key_head else self.project_qkv_gate_and_rates
        )(weights, block, x)
        mixed = split_columns(convolve_and_silu(weights, frame, layer, qkv, self.taps), *self.qkv_widths)
        q, k, v = (frame.rows_to_sequences(y, y.shape[-1] // self.size, self.size) for y in mixed)
        steps = ops.softplus(ops.add(alpha, weights(f"{block}.ssm_dt.bias", (heads,))))
        # The file holds -exp(A_log).
        decay = frame.rows_to_sequences(ops.mul(steps, weights(f"{block}.ssm_a", (heads,))), heads)
        decay = frame.rows_to_sequences(ops.mul(decay, frame.valid, name=f"{block}.decay"), heads, 1)
        kinds = "interleaved" if by_key_head else "tiled"
        o = apply_delta_rule(frame, layer, q, k, v, decay, beta, self.norm.eps, kinds)
        z = frame.rows_to_sequences(z, heads, self.size)
        o = ops.mul(self.norm(weights, f"{block}.ssm_norm", o), OUTPUT_GATES[self.gate](z), name=f"{block}.ssm_gated")
        return linear(weights, f"{block}.ssm_out", frame.sequences_to_rows(o), x.shape[-1])

    def project_qkv_gate_and_rates(self, weights: ModelWeights, block: str, x: Value) -> list[Value]:
        """Project ``x`` to q, k and v side by side, the output gate, and the operands of decay and learning rate.

        Shapes: f32[B*T, channels], f32[B*T, heads * size], and twice f32[B*T, heads].
        """
        heads, inner = self.value_heads, self.qkv_widths[2]
        widths = {"attn_qkv": sum(self.qkv_widths), "attn_gate": inner, "ssm_alpha": heads, "ssm_beta": heads}
        return [linear(weights, f"{block}.{name}", x, n) for name, n in widths.items()]

    def project_qkv_gate_and_rates_by_key_head(self, weights: ModelWeights, block: str, x: Value) -> list[Value]:
        """Return the results of `project_qkv_gate_and_rates` for a file that stores the rows of each key head together.

        One matrix gives the operands of decay and learning rate. Early files also have one matrix for q, k, v and the
        gate.
        """
        rows, repeat, size = x.shape[0], self.value_heads // self.key_heads, self.size

        def columns(name: str, *widths: int) -> list[Value]:
            """Return parts with the given columns per key head, each for all key heads: f32[B*T, key_heads * width]."""
            both = linear(weights, f"{block}.{name}", x, self.key_heads * sum(widths))
            both = ops.reshape(both, shape=(rows, self.key_heads, sum(widths)))
            return [ops.reshape(part, shape=(rows, part.spec.size // rows)) for part in split_columns(both, *widths)]

        beta, alpha = columns("ssm_ba", repeat, repeat)
        if weights.has_used_tensor(f"{block}.attn_qkv.weight"):
            qkv = linear(weights, f"{block}.attn_qkv", x, sum(self.qkv_widths))
            z = linear(weights, f"{block}.attn_gate", x, self.qkv_widths[2])
        else:
            q, k, v, z = columns("ssm_in", size, size, repeat * size, repeat * size)
            qkv = ops.concat(ops.concat(q, k, axis=-1), v, axis=-1)
        return [qkv, z, alpha, beta]


@dataclass(frozen=True, slots=True)
class KimiDeltaAttention:
    """A Kimi delta attention layer: linear attention with the delta rule, in which each key channel has its own decay.

    - ``floor``: the lowest log decay; 0 if the decay has no bound.
    - ``sign``: the sign of the operand of the sigmoid that gives a bounded decay.
    """

    taps: int
    heads: int
    size: int
    floor: float
    sign: float
    norm: Norm
    l2_eps: float
    required_inputs: frozenset[str] = RECURRENT_INPUTS

    @classmethod
    def from_keys(cls, keys: ArchitectureMetadata, family: FamilyTraits, layer: int) -> KimiDeltaAttention:
        heads = max(keys.read_per_block_counts("attention.head_count", keys.read_block_count_limited_by_tensor_count()))
        if family.bounded_decay > 0.0 and not keys.read_flag("kda.safe_gate", True):
            raise keys.make_key_error(
                "kda.safe_gate", "is false; hocket computes bounded gates alone for this architecture"
            )
        floor = keys.read_float32_or_default("kda.gate_lower_bound", 0.0) if family.bounded_decay else 0.0
        taps, eps = (
            keys.read_count("ssm.conv_kernel", minimum=2),
            keys.read_required_epsilon("attention.layer_norm_rms_epsilon"),
        )
        size, l2_eps = keys.read_count("kda.head_dim"), family.l2_eps or eps
        return cls(taps, heads, size, floor, family.bounded_decay, Norm(eps), l2_eps)

    def __call__(self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value) -> Value:
        """Return the delta attention of ``x`` f32[B*T, E]: f32[B*T, E]."""
        block, heads, size = f"blk.{layer}", self.heads, self.size
        projections = ((kind, matmul(weights, f"{block}.attn_{kind}", x, heads * size)) for kind in "qkv")
        mixed = (convolve_and_silu(weights, frame, layer, y, self.taps, f"_{kind}") for kind, y in projections)
        q, k, v = (frame.rows_to_sequences(y, heads, size) for y in mixed)
        beta, decay = matmul(weights, f"{block}.ssm_beta", x, heads), self.compute_log_decay(weights, frame, block, x)
        o = apply_delta_rule(frame, layer, q, k, v, decay, beta, self.l2_eps)
        gate = frame.rows_to_sequences(self.project_full_or_low_rank(weights, block, "ssm_g", x), heads, size)
        y = ops.mul(self.norm(weights, f"{block}.ssm_norm", o), ops.sigmoid(gate), name=f"{block}.ssm_gated")
        return matmul(weights, f"{block}.attn_output", frame.sequences_to_rows(y), x.shape[-1])

    def compute_log_decay(self, weights: ModelWeights, frame: StepGraphBuilder, block: str, x: Value) -> Value:
        """Compute the log decay of each key channel from ``x`` f32[B*T, E]: f32[B, T, heads, size], 0 for padding."""
        g = ops.add(
            self.project_full_or_low_rank(weights, block, "ssm_f", x),
            weights(f"{block}.ssm_dt.bias", (self.heads * self.size,)),
        )
        a = weights.get_leaf_ignoring_unit_axes(f"{block}.ssm_a", (self.heads, 1))
        if self.floor:
            g = ops.scale(ops.mul(frame.rows_to_sequences(g, self.heads, self.size), a), scale=self.sign)
            g = ops.scale(ops.sigmoid(g), scale=self.floor)
        else:
            g = ops.mul(frame.rows_to_sequences(ops.softplus(g), self.heads, self.size), a)
        return ops.mul(g, frame.token_validity_mask, name=f"{block}.decay")

    def project_full_or_low_rank(self, weights: ModelWeights, block: str, name: str, x: Value) -> Value:
        """Multiply ``x`` f32[B*T, E] by a weight matrix, which the file has in full or as two low-rank factors.

        The result is f32[B*T, heads * size].
        """
        width = self.heads * self.size
        if weights.has_used_tensor(f"{block}.{name}.weight"):
            return matmul(weights, f"{block}.{name}", x, width)
        y = matmul(weights, f"{block}.{name}_a", x, weights.tensor_shape(f"{block}.{name}_a.weight")[0])
        return (
            matmul(weights, f"{block}.{name}_b", y, width) if weights.has_used_tensor(f"{block}.{name}_b.weight") else y
        )


def apply_delta_rule(
    frame: StepGraphBuilder,
    layer: int,
    q: Value,
    k: Value,
    v: Value,
    decay: Value,
    beta: Value,
    eps: float,
    heads: str = "tiled",
) -> Value:
    """Apply the gated delta rule to queries, keys and values, and update its state: f32[B, T, heads, size].

    Args:
        frame: The builder of the graph.
        layer: Number of the layer.
        q: Queries; their heads are normalised to length 1.
        k: Keys; their heads are normalised to length 1.
        v: Values, f32[B, T, heads, size].
        decay: Log decays f32[B, T, heads, 1 or size].
        beta: Operands of the learning rates, f32[B*T, heads]; the rate of padding is 0.
        eps: The eps of the L2 norms.
        heads: ``tiled`` or ``interleaved``: the order of value heads per key head.
    """
    block, (_, _, count, size) = f"blk.{layer}", v.shape
    q, k = ops.l2_norm(q, eps=eps, name=f"{block}.q_l2"), ops.l2_norm(k, eps=eps, name=f"{block}.k_l2")
    beta = ops.mul(frame.rows_to_sequences(ops.sigmoid(beta), count), frame.valid, name=f"{block}.beta")
    old = frame.make_sequence_state(f"delta_state.{layer}", count, size, size)
    o, new = ops.gated_delta_net(
        q, k, v, decay, beta, old, heads=heads, snapshots=frame.snapshot_count, name=f"{block}.delta_net"
    )
    frame.set_state(old, new)
    return o
