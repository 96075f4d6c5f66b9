"""Selective state space models: Mamba (Gu and Dao, 2023), Mamba-2 (Dao and Gu, 2024) and PLaMo 2's kind of it.

States ``conv_state.N`` f32[B, taps-1, channels] and ``ssm_state.N`` f32[B, heads, channels, state].
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import ops
from ...graph import Value
from .blocks import Norm, linear, parts
from .family import Family
from .frame import RECURRENT, Frame
from .keys import Keys
from .weights import Weights

SHUT = 1e4
"""A step size so far below zero that softplus gives none at all."""


@dataclass(frozen=True, slots=True)
class Mamba:
    """A layer whose channels have a state each, with steps, inputs and outputs that follow from the convolved token."""

    taps: int
    inner: int
    state: int
    rank: int
    norm: Norm
    normalised: bool = False
    """Whether steps, inputs and outputs are normalised without weights, as Falcon Mamba does."""

    @property
    def needs(self) -> frozenset[str]:
        return RECURRENT

    @classmethod
    def from_keys(cls, keys: Keys, family: Family, layer: int) -> Mamba:
        return cls(
            keys.count("ssm.conv_kernel", least=2),
            keys.count("ssm.inner_size"),
            keys.count("ssm.state_size"),
            keys.count("ssm.time_step_rank"),
            Norm(keys.eps("attention.layer_norm_rms_epsilon")),
            keys.has("ssm.dt_b_c_rms") and keys.flags("ssm.dt_b_c_rms", 1)[0],
        )

    def __call__(self, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
        block, width = f"blk.{layer}", x.shape[-1]
        x, z = parts(linear(weights, f"{block}.ssm_in", x, 2 * self.inner), self.inner, self.inner)
        x = convolved(weights, frame, layer, x, self.taps)
        rows = frame.rows(x)
        made = ops.mul_mat(weights(f"{block}.ssm_x.weight", (self.rank + 2 * self.state, self.inner)), rows)
        dt, b, c = parts(made, self.rank, self.state, self.state)
        if weights.has(f"{block}.ssm_dt_norm.weight"):
            dt, b, c = (
                self.norm(weights, f"{block}.ssm_{name}_norm", y) for name, y in (("dt", dt), ("b", b), ("c", c))
            )
        elif self.normalised:
            dt, b, c = (self.norm.plain(y) for y in (dt, b, c))
        y = scanned(
            weights,
            frame,
            layer,
            x=frame.split(x, self.inner, 1),
            dt=linear(weights, f"{block}.ssm_dt", dt, self.inner),
            a=weights(f"{block}.ssm_a", (self.inner, self.state)),
            b=frame.split(b, 1, self.state),
            c=frame.split(c, 1, self.state),
            d=ops.reshape(weights(f"{block}.ssm_d", (self.inner,)), shape=(self.inner, 1)),
        )
        y = ops.swiglu(z, frame.rows(y), name=f"{block}.ssm_gated")
        return linear(weights, f"{block}.ssm_out", y, width)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A layer whose heads have one decay each; ``groups`` of heads share inputs and outputs of the state."""

    taps: int
    inner: int
    state: int
    heads: int
    groups: int
    norm: Norm

    @property
    def needs(self) -> frozenset[str]:
        return RECURRENT

    @classmethod
    def from_keys(cls, keys: Keys, family: Family, layer: int) -> Mamba2:
        """ModelError if heads do not fill the inner size or groups do not divide."""
        inner, heads, groups = (keys.count(f"ssm.{k}") for k in ("inner_size", "time_step_rank", "group_count"))
        if inner % heads:
            raise keys.error("ssm.inner_size", f"is {inner}; need a multiple of time_step_rank {heads}")
        if heads % groups or inner % groups:
            raise keys.error("ssm.group_count", f"is {groups}; need a divisor of {heads} heads and {inner} channels")
        eps = keys.optional("attention.layer_norm_rms_epsilon") or keys.positive("attention.layer_norm_epsilon")
        taps, state = keys.count("ssm.conv_kernel", least=2), keys.count("ssm.state_size")
        return cls(taps, inner, state, heads, groups, Norm(eps))

    def __call__(self, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
        block, width, shared = f"blk.{layer}", x.shape[-1], self.groups * self.state
        made = linear(weights, f"{block}.ssm_in", x, 2 * self.inner + 2 * shared + self.heads)
        z, x, dt = parts(made, self.inner, self.inner + 2 * shared, self.heads)
        x, b, c = parts(convolved(weights, frame, layer, x, self.taps), self.inner, shared, shared)
        bias = weights(f"{block}.ssm_dt.bias", (self.heads,))
        y = scanned(
            weights,
            frame,
            layer,
            x=frame.split(x, self.heads, self.inner // self.heads),
            dt=ops.add(dt, bias),
            a=weights(f"{block}.ssm_a", (self.heads, 1)),
            b=frame.split(b, self.groups, self.state),
            c=frame.split(c, self.groups, self.state),
            d=weights(f"{block}.ssm_d", (self.heads, 1)),
        )
        y = ops.swiglu(z, frame.rows(y), name=f"{block}.ssm_gated")
        if weights.has(f"{block}.ssm_norm.weight"):
            y = self.norm(weights, f"{block}.ssm_norm", frame.split(y, self.groups, self.inner // self.groups))
            y = frame.rows(y)
        return linear(weights, f"{block}.ssm_out", y, width)


@dataclass(frozen=True, slots=True)
class Plamo2:
    """Mamba-2's heads with steps, inputs and outputs that follow from the convolved token, all normalised."""

    taps: int
    inner: int
    state: int
    heads: int
    norm: Norm

    @property
    def needs(self) -> frozenset[str]:
        return RECURRENT

    @classmethod
    def from_keys(cls, keys: Keys, family: Family, layer: int) -> Plamo2:
        """ModelError if heads do not fill the inner size."""
        inner, heads = keys.count("ssm.inner_size"), keys.count("ssm.time_step_rank")
        if inner % heads:
            raise keys.error("ssm.inner_size", f"is {inner}; need a multiple of time_step_rank {heads}")
        taps, state = keys.count("ssm.conv_kernel", least=2), keys.count("ssm.state_size")
        return cls(taps, inner, state, heads, Norm(keys.eps("attention.layer_norm_rms_epsilon")))

    def __call__(self, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
        block, width, rows, size = f"blk.{layer}", x.shape[-1], x.shape[0], self.inner // self.heads
        both = linear(weights, f"{block}.ssm_in", x, 2 * self.inner)
        # Each head has its gate and then its input.
        z, x = parts(ops.reshape(both, shape=(rows, self.heads, 2 * size)), size, size)
        x = convolved(weights, frame, layer, ops.reshape(x, shape=(rows, self.inner)), self.taps)
        short = weights.shape(f"{block}.ssm_dt.weight")[1]
        made = linear(weights, f"{block}.ssm_x", frame.rows(x), 2 * self.state + short)
        b, c, dt = parts(made, self.state, self.state, short)
        b, c, dt = (self.norm(weights, f"{block}.ssm_{name}_norm", y) for name, y in (("b", b), ("c", c), ("dt", dt)))
        y = scanned(
            weights,
            frame,
            layer,
            x=frame.split(x, self.heads, size),
            dt=linear(weights, f"{block}.ssm_dt", dt, self.heads),
            a=ops.reshape(weights(f"{block}.ssm_a", (self.heads,)), shape=(self.heads, 1)),
            b=frame.split(b, 1, self.state),
            c=frame.split(c, 1, self.state),
            d=ops.reshape(weights(f"{block}.ssm_d", (self.heads,)), shape=(self.heads, 1)),
        )
        y = ops.swiglu(ops.reshape(z, shape=(rows, self.inner)), frame.rows(y), name=f"{block}.ssm_gated")
        return linear(weights, f"{block}.ssm_out", y, width)


def convolved(weights: Weights, frame: Frame, layer: int, x: Value, taps: int) -> Value:
    """``x`` f32[B*T, channels] behind a short convolution and SiLU: f32[B, T, channels]."""
    block, channels = f"blk.{layer}", x.shape[-1]
    tokens = frame.preceded(f"conv_state.{layer}", frame.split(x, channels), taps - 1)
    y = ops.ssm_conv(tokens, weights(f"{block}.ssm_conv1d.weight", (channels, taps)), name=f"{block}.ssm_conv1d")
    bias = weights.optional(f"{block}.ssm_conv1d.bias", (channels,))
    return ops.silu(y if bias is None else ops.add(y, bias), name=f"{block}.conv_silu")


def scanned(
    weights: Weights, frame: Frame, layer: int, *, x: Value, dt: Value, a: Value, b: Value, c: Value, d: Value
) -> Value:
    """The scan, plus each channel times its ``d``: f32[B, T, heads, channels].  ``dt`` is f32[B*T, heads]; steps of
    padding are none, so that the state stays."""
    _, _, heads, channels = x.shape
    block, shut = f"blk.{layer}", ops.scale(frame.valid, scale=SHUT, bias=-SHUT)
    steps = ops.add(frame.split(dt, heads), shut, name=f"{block}.steps")
    old = frame.state(f"ssm_state.{layer}", heads, channels, b.shape[-1])
    y, new = ops.ssm_scan(x, steps, a, b, c, old, name=f"{block}.ssm_scan")
    frame.update(old, new)
    return ops.add(y, ops.mul(x, d))
