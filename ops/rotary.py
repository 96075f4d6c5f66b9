"""Rotary position embedding."""

from __future__ import annotations

import math

import numpy as np

from ..graph.node import Attrs
from .op import Array, op
from .samples import Range, grid

ROPE_MODES = ("normal", "neox")


def _rope_needs(
    n_dims: int, d: int, mode: str, ext_factor: float, original_context: int, f: int | None = None, **_: object
) -> str | None:
    if mode not in ROPE_MODES:
        return f"mode is {mode!r}; one of {', '.join(ROPE_MODES)}"
    if n_dims % 2 or not 0 <= n_dims <= d:
        return f"n_dims is {n_dims}; it must be even and at most the head size {d}"
    if ext_factor and original_context <= 0:
        return "original_context must be positive where ext_factor mixes angles (YaRN)"
    if f is not None and f < n_dims // 2:
        return f"factors has {f} entries; {n_dims} rotated dimensions need {n_dims // 2}"
    return None


@op(
    "x[..., t, h, *d], pos[..., t]: i32, factors[*f]? -> [..., t, h, d]",
    linear=("x",),
    inplace="x",
    needs=_rope_needs,
    flops=lambda t, h, d, **_: 3 * t * h * d,
    ranges={"pos": Range(0, 1000), "factors": Range(0.5, 8.0)},
    samples=(
        *grid('x={x}[5,3,16], pos=i32[5], n_dims={n}, mode="{mode}"', x=("f32", "f16"), n=(16, 8), mode=ROPE_MODES),
        "x=f32[2,5,3,16], pos=i32[2,5], factors=f32[8], n_dims=16, base=500000.0",
        "x=f32[5,3,16], pos=i32[5], n_dims=16, freq_scale=0.25, ext_factor=1.0, attn_factor=1.2, original_context=64",
    ),
    errors=(
        ("x=f32[5,3,16], pos=i32[4], n_dims=16", "t is 5"),
        ("x=f32[5,3,16], pos=i32[5], n_dims=18", "at most the head size"),
        ("x=f32[5,3,16], pos=i32[5], factors=f32[3], n_dims=16", "factors has 3"),
        ('x=f32[5,3,16], pos=i32[5], n_dims=16, mode="glm"', "one of normal, neox"),
    ),
)
def rope(
    x: Array,
    pos: Array,
    factors: Array | None = None,
    *,
    n_dims: int,
    mode: str = "normal",
    base: float = 10000.0,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_context: int = 0,
) -> Array:
    """Rotate pairs of the first `n_dims` elements by angles ``pos * base^(-2i/n_dims) * freq_scale / factors[i]``.

    Pairs are neighbours (2i, 2i+1) in mode ``normal`` and halves (i, i + n_dims/2) in mode ``neox``.  `ext_factor` > 0
    mixes in unscaled angles and scales the magnitude (YaRN: Peng et al., 2023).  ggml: ``ROPE``; Su et al., 2021.
    """
    half = n_dims // 2
    attrs: Attrs = {
        "base": base,
        "freq_scale": freq_scale,
        "ext_factor": ext_factor,
        "attn_factor": attn_factor,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "original_context": original_context,
    }
    inverse, magnitude = frequencies(half, attrs)
    if factors is not None:
        inverse = inverse / factors[:half]
    angle = pos[..., None, None] * inverse
    cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude
    low, high = (slice(0, half), slice(half, n_dims)) if mode == "neox" else (slice(0, n_dims, 2), slice(1, n_dims, 2))
    out = x.copy()
    out[..., low] = x[..., low] * cos - x[..., high] * sin
    out[..., high] = x[..., low] * sin + x[..., high] * cos
    return out


def frequencies(half: int, attrs: Attrs) -> tuple[Array, float]:
    """Angle per position of each pair before `factors` divide it, float64 ``[half]``, and the factor on cosine and
    sine; `attrs` are those of `rope`."""
    base, scale, mix = (float(attrs[k]) for k in ("base", "freq_scale", "ext_factor"))  # type: ignore[arg-type]
    magnitude = float(attrs["attn_factor"])  # type: ignore[arg-type]
    inverse = base ** (-np.arange(half) / max(1, half))
    if not mix:
        return inverse * scale, magnitude
    share = mix * _yarn_ramp(half, base, attrs)
    return inverse * (scale * (1 - share) + share), magnitude * (1.0 + 0.1 * math.log(1.0 / scale))


def _yarn_ramp(half: int, base: float, attrs: Attrs) -> Array:
    """Share of the unscaled angle per pair: 1 for fast pairs, 0 for slow ones, linear between."""
    context, fast, slow = (float(attrs[k]) for k in ("original_context", "beta_fast", "beta_slow"))  # type: ignore[arg-type]

    def pair(rotations: float) -> float:
        return half * math.log(context / (rotations * 2 * math.pi)) / math.log(base)

    low = max(0.0, math.floor(pair(fast)))
    high = min(2 * half - 1.0, math.ceil(pair(slow)))
    return 1.0 - np.clip((np.arange(half) - low) / max(0.001, high - low), 0.0, 1.0)
