"""Selective state space models: Mamba (Gu and Dao, 2023), Mamba-2 (Dao and Gu, 2024) and PLaMo 2's variant.

States ``conv_state.N`` f32[B, taps-1, channels] and ``ssm_state.N`` f32[B, heads, channels, state]. Shapes use B for
sequences, T for new tokens per sequence, and E for the model width.
"""

from __future__ import annotations

import math
from typing import Self

from .... import ops
from ....graph import Value
from ....graph.errors import format_count
from ....graph.lazy_dataclass import dataclass
from ...gguf.hyperparameter_keys import ArchitectureMetadata
from ..inputs.family import FamilyTraits
from ..inputs.graph_builder import RECURRENT_INPUTS, StepGraphBuilder
from ..inputs.weights import ModelWeights
from .feed_forward import Norm, linear, split_columns

PADDING_STEP = 1e4
"""Subtracted from the step size of padding tokens, so that softplus makes it 0 and the state stays."""


@dataclass(frozen=True, slots=True)
class Mamba:
    """A Mamba layer: a selective state space model, in which each channel is a head of its own.

    Step sizes, and the input and output matrices of the state, are computed from the convolved token.
    """

    taps: int
    inner: int
    state: int
    heads: int
    groups: int
    norm: Norm
    norms_without_weights: bool
    """Whether step size, input and output matrices pass a norm without weights, as in Falcon Mamba."""
    required_inputs: frozenset[str] = RECURRENT_INPUTS

    @classmethod
    def from_keys(cls, keys: ArchitectureMetadata, family: FamilyTraits, layer: int) -> Self:
        """Read the sizes of the layer from the metadata.

        Raises:
            ModelError: The heads do not fill the inner size, or the groups do not divide heads and channels.
        """
        inner = keys.read_count("ssm.inner_size")
        heads = inner if cls is Mamba else keys.read_count("ssm.time_step_rank")
        groups = keys.read_count("ssm.group_count") if cls is Mamba2 else 1
        if inner % heads:
            raise keys.make_key_error("ssm.inner_size", f"is {inner}; need a multiple of time_step_rank {heads}")
        if heads % groups or inner % groups:
            raise keys.make_key_error(
                "ssm.group_count",
                f"is {groups}; need a divisor of {format_count(heads, 'head')} and {format_count(inner, 'channel')}",
            )
        eps = keys.read_positive_zero_as_none("attention.layer_norm_rms_epsilon") or keys.read_positive_float32(
            "attention.layer_norm_epsilon"
        )
        bare = keys.read_flag("ssm.dt_b_c_rms", False)
        taps, state = keys.read_count("ssm.conv_kernel", minimum=2), keys.read_count("ssm.state_size")
        return cls(taps, inner, state, heads, groups, Norm(eps), bare)

    def __call__(self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value) -> Value:
        """Return the result f32[B*T, E] of the layer for ``x`` f32[B*T, E].

        Step sizes of padding are 0, so that padding does not change the state.
        """
        block, heads, channels = f"blk.{layer}", self.heads, self.inner // self.heads
        z, inputs, dt, b, c = self.compute_gate_and_scan_operands(weights, frame, layer, x)
        b, c = (frame.rows_to_sequences(y, self.groups, self.state) for y in (b, c))
        shut = ops.scale(frame.valid, scale=PADDING_STEP, bias=-PADDING_STEP)
        inputs = frame.rows_to_sequences(inputs, heads, channels)
        steps = ops.add(frame.rows_to_sequences(dt, heads), shut, name=f"{block}.steps")
        rates = math.prod(weights.tensor_shape(f"{block}.ssm_a")) // heads
        a = weights.get_leaf_ignoring_unit_axes(f"{block}.ssm_a", (heads, rates))
        d = weights.get_leaf_ignoring_unit_axes(f"{block}.ssm_d", (heads, 1))
        old = frame.make_sequence_state(f"ssm_state.{layer}", heads, channels, self.state)
        y, new = ops.ssm_scan(inputs, steps, a, b, c, old, snapshots=frame.snapshot_count, name=f"{block}.ssm_scan")
        frame.set_state(old, new)
        y = ops.swiglu(z, frame.sequences_to_rows(ops.add(y, ops.mul(inputs, d))), name=f"{block}.ssm_gated")
        if weights.has_used_tensor(f"{block}.ssm_norm.weight"):
            y = self.norm(
                weights, f"{block}.ssm_norm", frame.rows_to_sequences(y, self.groups, self.inner // self.groups)
            )
        return linear(weights, f"{block}.ssm_out", frame.sequences_to_rows(y), x.shape[1])

    def compute_gate_and_scan_operands(
        self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value
    ) -> tuple[Value, ...]:
        """Compute the gate and the operands of the selective scan from ``x`` f32[B*T, E].

        Returns:
            The gate f32[B*T, inner], the input f32[B, T, inner] and the step sizes f32[B*T, heads]. Then the input
            and output matrices of the state, each f32[B*T, groups * state].
        """
        x, z = split_columns(linear(weights, f"blk.{layer}.ssm_in", x, 2 * self.inner), self.inner, self.inner)
        return z, *self.convolve_and_project_scan_operands(weights, frame, layer, x, "dt", "b", "c")

    def convolve_and_project_scan_operands(
        self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value, *order: str
    ) -> tuple[Value, ...]:
        """Convolve the input, and project it to the other operands of the scan: step sizes, input and output matrices.

        Args:
            weights: The weights of the model.
            frame: The builder of the graph.
            layer: Number of the layer.
            x: The input, f32[B*T, inner].
            order: The order of the columns of the matrix ``ssm_x``: ``dt`` (step sizes), ``b`` (input), ``c``
                (output).

        Returns:
            The convolved input, the step sizes, the input matrices and the output matrices.
        """
        block, x = f"blk.{layer}", convolve_and_silu(weights, frame, layer, x, self.taps)
        widths = {"dt": weights.tensor_shape(f"{block}.ssm_dt.weight", 2)[1], "b": self.state, "c": self.state}
        columns = split_columns(
            linear(weights, f"{block}.ssm_x", frame.sequences_to_rows(x), sum(widths.values())),
            *(widths[n] for n in order),
        )
        parts = {n: self.apply_norm(weights, f"{block}.ssm_{n}_norm", y) for n, y in zip(order, columns, strict=True)}
        return x, linear(weights, f"{block}.ssm_dt", parts["dt"], self.heads), parts["b"], parts["c"]

    def apply_norm(self, weights: ModelWeights, name: str, x: Value) -> Value:
        if weights.has_used_tensor(f"{name}.weight"):
            return self.norm(weights, name, x)
        return self.norm.apply_without_weights(x) if self.norms_without_weights else x


class Mamba2(Mamba):
    """A Mamba-2 layer, in which each head has one decay.

    The heads of each of the ``groups`` share the input and output matrices of the state.
    """

    __slots__ = ()

    def compute_gate_and_scan_operands(
        self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value
    ) -> tuple[Value, ...]:
        block, shared = f"blk.{layer}", self.groups * self.state
        widths = self.inner, self.inner + 2 * shared, self.heads
        z, x, dt = split_columns(linear(weights, f"{block}.ssm_in", x, sum(widths)), *widths)
        x, b, c = split_columns(convolve_and_silu(weights, frame, layer, x, self.taps), self.inner, shared, shared)
        return z, x, ops.add(dt, weights(f"{block}.ssm_dt.bias", (self.heads,))), b, c


class Plamo2Mamba(Mamba):
    """The Mamba layer of PLaMo 2, a mix of both versions.

    It has heads as in Mamba-2, but computes step sizes and matrices as in Mamba.
    """

    __slots__ = ()

    def compute_gate_and_scan_operands(
        self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value
    ) -> tuple[Value, ...]:
        rows, size = x.shape[0], self.inner // self.heads
        both = linear(weights, f"blk.{layer}.ssm_in", x, 2 * self.inner)
        # The columns of each head: its gate, then its input.
        z, x = split_columns(ops.reshape(both, shape=(rows, self.heads, 2 * size)), size, size)
        z, x = (ops.reshape(y, shape=(rows, self.inner)) for y in (z, x))
        return z, *self.convolve_and_project_scan_operands(weights, frame, layer, x, "b", "c", "dt")


def convolve_and_silu(
    weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value, taps: int, kind: str = ""
) -> Value:
    """Apply a short convolution over tokens and then SiLU to ``x`` f32[B*T, channels]: f32[B, T, channels].

    Args:
        weights: The weights of the model.
        frame: The builder of the graph.
        layer: Number of the layer.
        x: The operand.
        taps: Taps of the convolution.
        kind: A suffix that distinguishes several convolutions of a layer.
    """
    block, channels = f"blk.{layer}", x.shape[-1]
    tokens = frame.prepend_previous_rows(f"conv_state{kind}.{layer}", frame.rows_to_sequences(x, channels), taps - 1)
    kernel = weights.get_leaf_ignoring_unit_axes(f"{block}.ssm_conv1d{kind}.weight", (channels, taps))
    y = ops.ssm_conv(tokens, kernel, name=f"{block}.ssm_conv1d{kind}")
    bias = weights.optional_leaf(f"{block}.ssm_conv1d{kind}.bias", (channels,))
    return ops.silu(y if bias is None else ops.add(y, bias), name=f"{block}.conv_silu{kind}")
