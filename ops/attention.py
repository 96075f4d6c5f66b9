"""Attention, its mask, and rotary position embedding."""

from __future__ import annotations

import math

import numpy as np

from .elementwise import tiled
from .norms import alibi_slopes, softmax_rows
from .op import Array, op
from .samples import Range, grid


@op(
    "pos[..., t]: i32 -> [..., t, cells]: f32",
    flops=lambda t, cells, **_: 2 * t * cells,
    ranges={"pos": Range(0, 8)},
    needs=lambda cells, window, **_: "cells and window must not be negative" if min(cells, window) < 0 else None,
    samples=("pos=i32[5], cells=8", "pos=i32[2,3], cells=9, window=3", "pos=i32[0], cells=4"),
    errors=(
        ("pos=f32[5], cells=8", "pos is f32"),
        ("pos=i32[5]", "cells is missing"),
        ("pos=i32[2], cells=-1", "negative"),
    ),
)
def causal_mask(pos: Array, *, cells: int, window: int = 0) -> Array:
    """0 where the token at position `pos` may see cache cell s (``pos - window < s <= pos``), -inf elsewhere.

    Cell s of a sequence holds position s.  `window` 0 means unlimited; otherwise the token itself counts.
    """
    distance = pos[..., None].astype(np.int64) - np.arange(cells)
    seen = (distance >= 0) & ((distance < window) if window else True)
    return np.where(seen, 0.0, -np.inf)


@op(
    "q[..., t, (h g), *d], k[..., *s, h, *d], v[..., *s, h, e], mask[~..., t, *s]?, sinks[(h g)]?"
    " -> [..., t, (h g), e]: f32",
    flops=lambda t, h, g, s, d, e, **_: t * h * g * s * (2 * d + 2 * e + 5),
    samples=(
        *grid("q=f32[{t},4,16], k={x}[9,{h},16], v={x}[9,{h},16], scale=0.25", t=(1, 3), h=(1, 2, 4), x=("f32", "f16")),
        "q=f32[2,3,4,16], k=f32[2,9,2,16], v=f32[2,9,2,24], mask=f32[2,3,9], scale=0.25",
        "q=f32[2,3,4,16], k=f32[2,9,2,16], v=f32[2,9,2,16], mask=f16[3,9], scale=0.25, max_bias=8.0",
        "q=f32[3,4,16], k=f32[9,2,16], v=f32[9,2,16], mask=f32[3,9], sinks=f32[4], scale=0.25, softcap=5.0",
    ),
    errors=(
        ("q=f32[3,4,16], k=f32[9,3,16], v=f32[9,3,16], scale=1.0", "no product"),
        ("q=f32[3,4,16], k=f32[9,2,8], v=f32[9,2,16], scale=1.0", "d is 16"),
        ("q=f32[3,4,16], k=f32[9,2,16], v=f32[8,2,16], scale=1.0", "s is 9"),
        ("q=f32[3,4,16], k=f32[9,2,16], v=f32[9,2,16]", "scale is missing"),
    ),
)
def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    sinks: Array | None = None,
    *,
    scale: float,
    max_bias: float = 0.0,
    softcap: float = 0.0,
) -> Array:
    """``softmax(cap(q k scale) + slope mask) v`` per head; `g` neighbouring query heads share a key/value head.

    `cap(x)` is ``softcap tanh(x / softcap)`` where softcap > 0.  A sink joins the sum of its head but adds nothing.
    A row that is masked entirely gives zeros.  ggml: ``FLASH_ATTN_EXT``; Dao et al., 2022.
    """
    heads = q.shape[-2]
    shared = heads // k.shape[-2] if k.shape[-2] else 1
    k, v = np.repeat(k, shared, axis=-2), np.repeat(v, shared, axis=-2)
    scores = np.einsum("...thd,...shd->...hts", q, k) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if mask is not None:
        slopes = alibi_slopes(heads, max_bias)[:, None, None]
        scores = scores + slopes * tiled(mask, (*q.shape[:-3], *mask.shape[-2:]))[..., None, :, :]
    p = softmax_rows(scores, None if sinks is None else sinks[:, None, None])
    return np.einsum("...hts,...she->...the", p, v)


ROPE_MODES = ("normal", "neox")


def _rope_needs(n_dims: int, d: int, mode: str, f: int | None = None, **_: object) -> str | None:
    if mode not in ROPE_MODES:
        return f"mode is {mode!r}; one of {', '.join(ROPE_MODES)}"
    if n_dims % 2 or not 0 <= n_dims <= d:
        return f"n_dims is {n_dims}; it must be even and at most the head size {d}"
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
    cos, sin = rope_angles(
        pos, half, factors, base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow, original_context
    )
    cos, sin = cos[..., None, :], sin[..., None, :]
    low, high = (slice(0, half), slice(half, n_dims)) if mode == "neox" else (slice(0, n_dims, 2), slice(1, n_dims, 2))
    out = x.copy()
    out[..., low] = x[..., low] * cos - x[..., high] * sin
    out[..., high] = x[..., low] * sin + x[..., high] * cos
    return out


def rope_angles(
    pos: Array,
    half: int,
    factors: Array | None,
    base: float,
    freq_scale: float,
    ext_factor: float,
    attn_factor: float,
    beta_fast: float,
    beta_slow: float,
    original_context: int,
) -> tuple[Array, Array]:
    """Cosines and sines ``[..., half]`` of the rotation at each position, magnitude included."""
    i = np.arange(half)
    inverse = base ** (-i / half) if half else np.zeros(0)
    if factors is not None:
        inverse = inverse / factors[:half]
    angle = pos[..., None] * inverse
    if ext_factor:
        mix = ext_factor * _yarn_ramp(half, base, beta_fast, beta_slow, original_context)
        angle = angle * (freq_scale * (1 - mix) + mix)
        attn_factor = attn_factor * (1.0 + 0.1 * math.log(1.0 / freq_scale))
    else:
        angle = angle * freq_scale
    return np.cos(angle) * attn_factor, np.sin(angle) * attn_factor


def _yarn_ramp(half: int, base: float, beta_fast: float, beta_slow: float, original_context: int) -> Array:
    """Share of the unscaled angle per pair: 1 for fast pairs, 0 for slow ones, linear between."""

    def pair(rotations: float) -> float:
        return 2 * half * math.log(original_context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(0.0, math.floor(pair(beta_fast)))
    high = min(2 * half - 1.0, math.ceil(pair(beta_slow)))
    return 1.0 - np.clip((np.arange(half) - low) / max(0.001, high - low), 0.0, 1.0)
