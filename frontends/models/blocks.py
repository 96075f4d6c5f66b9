"""What all families have in common: embedding, normalised and linear layers, the feed-forward, the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ... import ops
from ...graph import DType, Value
from .weights import Weights


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over the last axis: root mean square or, with ``centred``, layer norm; ``bare`` if it has no
    weights."""

    eps: float
    centred: bool = False
    bare: bool = False

    def __call__(self, weights: Weights, name: str, x: Value) -> Value:
        """``x`` normalised, times the weight ``name`` plus its bias if the file has one; same shape as ``x``.

        The weight holds the last axis, or as many of the last axes as it has.
        """
        if self.bare:
            return self.plain(x, name=name)
        tensor = f"{name}.weight"
        axes = len(weights.shape(tensor))
        y = ops.mul(self.plain(x), weights(tensor, x.shape[-axes:]), name=name)
        bias = weights.optional(f"{name}.bias", x.shape[-axes:])
        return y if bias is None else ops.add(y, bias)

    def plain(self, x: Value, name: str = "") -> Value:
        """``x`` normalised, without weights."""
        return ops.norm(x, eps=self.eps, name=name) if self.centred else ops.rms_norm(x, eps=self.eps, name=name)


def norm(weights: Weights, name: str, x: Value, eps: float) -> Value:
    """RMSNorm over the last axis times the weight ``name``; same shape as ``x``."""
    return Norm(eps)(weights, name, x)


def linear(weights: Weights, name: str, x: Value, features: int, *, bias_first: bool = False) -> Value:
    """``x`` f32[n, k] times the matrix ``name`` [features, k], times its scale and plus its bias where the file has
    them (the bias first in feed-forwards): f32[n, features]."""
    y = ops.mul_mat(weights(f"{name}.weight", (features, x.shape[-1])), x, name=name)
    scale, bias = weights.optional(f"{name}.scale", (1,)), weights.optional(f"{name}.bias", (features,))
    if bias is not None and bias_first:
        y = ops.add(y, bias)
    if scale is not None:
        y = ops.mul(y, scale)
    return y if bias is None or bias_first else ops.add(y, bias)


def product(weights: Weights, name: str, x: Value, features: int) -> Value:
    """``x`` f32[n, k] times the matrix ``name`` alone, without scale or bias: f32[n, features].  A matrix of one row
    may be a vector."""
    shape = weights.shape(f"{name}.weight")
    matrix = weights(f"{name}.weight", shape if len(shape) == 1 else (features, x.shape[-1]))
    if len(shape) == 1:
        matrix = ops.reshape(matrix, shape=(features, x.shape[-1]))
    return ops.mul_mat(matrix, x, name=name)


def parts(x: Value, *widths: int) -> list[Value]:
    """The last axis of ``x`` cut into so many columns each."""
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    return [ops.slice_(x, axis=-1, start=end - n, stop=end) for end, n in zip(ends, widths, strict=True)]


def halved(x: Value) -> Value:
    """``x`` rounded to half precision, as f32."""
    return ops.cast(ops.cast(x, dtype=DType.F16), dtype=DType.F32)


def halved_gelu(x: Value, name: str = "") -> Value:
    """GELU in half precision: llama.cpp looks it up in a table of all f16, whose rounding shows in the logits of
    families that have no gate beside it."""
    return halved(ops.gelu(halved(x), name=name))


def half_geglu(gate: Value, up: Value, name: str = "") -> Value:
    return ops.mul(halved_gelu(gate), up, name=name)


def squared_relu(x: Value, name: str = "") -> Value:
    return ops.sqr(ops.relu(x), name=name)


PLAIN: Mapping[str, Callable[..., Value]] = MappingProxyType(
    {"silu": ops.silu, "gelu": halved_gelu, "relu": ops.relu, "relu2": squared_relu}
)


@dataclass(frozen=True, slots=True)
class Situ:
    """``beta tanh(gate / beta) sigmoid(gate) * linear tanh(up / linear)``; the second factor is ``up`` if linear is 0.
    Kimi K3."""

    beta: float
    linear: float

    def __call__(self, gate: Value, up: Value, name: str = "") -> Value:
        opened = ops.mul(bent(gate, self.beta), ops.sigmoid(gate))
        return ops.mul(opened, bent(up, self.linear) if self.linear else up, name=name)


def bent(x: Value, most: float) -> Value:
    return ops.scale(ops.tanh(ops.scale(x, scale=1.0 / most)), scale=most)


Unit = str | Situ
GATED: Mapping[str, Callable[..., Value]] = MappingProxyType(
    {"silu": ops.swiglu, "gelu": ops.geglu, "relu": ops.reglu, "oai": ops.swiglu_oai, "half gelu": half_geglu}
)
KINDS = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu", "oai": "swiglu_oai"}


def feed_forward(
    weights: Weights,
    block: str,
    x: Value,
    suffix: str = "",
    *,
    unit: Unit = "silu",
    limit: float = 0.0,
    first: bool = False,
) -> Value:
    """Linear layers around an activation, f32[n, E] to f32[n, E]; ``suffix`` tells such layers of a block apart.

    Its form follows from the tensors: gate and up as two, gate and up in one of twice the columns that down takes, or
    up alone (Shazeer, GLU variants, 2020).
    """
    width = x.shape[-1]
    down, name = f"{block}.ffn_down{suffix}", f"{block}.ffn_glu{suffix}"
    features = weights.shape(f"{down}.weight")[-1]
    if weights.has(f"{block}.ffn_gate{suffix}.weight"):
        gate = linear(weights, f"{block}.ffn_gate{suffix}", x, features, bias_first=True)
        up = linear(weights, f"{block}.ffn_up{suffix}", x, features, bias_first=True)
        inner = gated(gate, up, unit, limit, first, name=name)
    elif weights.shape(f"{block}.ffn_up{suffix}.weight")[0] == 2 * features:
        both = linear(weights, f"{block}.ffn_up{suffix}", x, 2 * features, bias_first=True)
        inner = ops.glu(both, kind=KINDS[str(unit)], name=name)
    else:
        inner = PLAIN[str(unit)](linear(weights, f"{block}.ffn_up{suffix}", x, features, bias_first=True), name=name)
        divisors = weights.optional(f"{block}.ffn.act.scales", (features,))
        inner = inner if divisors is None else ops.div(inner, divisors)
    return linear(weights, down, inner, width, bias_first=True)


def gated(gate: Value, up: Value, unit: Unit, limit: float, first: bool, *, name: str) -> Value:
    """The gated unit of two factors, clamped by ``limit`` unless that is 0: with ``first`` the gate before its
    activation."""
    if not isinstance(unit, str):
        return unit(gate, up, name=name)
    if not limit or unit != "silu":
        return GATED[unit](gate, up, name=name)
    return ops.swiglu_clamp(gate, up, limit=limit, name=name) if first else clamped(gate, up, limit, name=name)


def clamped(gate: Value, up: Value, limit: float, *, name: str) -> Value:
    """SwiGLU whose two factors are kept below ``limit``, the second above its negative too."""
    bounded = ops.clamp(ops.silu(gate), min=-3.0e38, max=limit)
    return ops.mul(bounded, ops.clamp(up, min=-limit, max=limit), name=name)


def capped(x: Value, most: float) -> Value:
    """``x`` bent so that it stays within ``most`` of 0, in its shape."""
    return ops.scale(ops.tanh(ops.scale(x, scale=1.0 / most)), scale=most, name="logits_capped")
