"""Recurrences: causal depthwise convolution and the gated delta net."""

from __future__ import annotations

import math

import numpy as np

from .op import Array, op
from .samples import Range, grid


@op(
    "x[..., *s, c], w[c, *taps] -> [..., t, c]: f32",
    linear=("x", "w"),
    where={"t": lambda s, taps, **_: s - taps + 1},
    needs=lambda s, taps, **_: f"x has {s} rows, fewer than the {taps} taps of w" if s < taps else None,
    flops=lambda t, c, taps, **_: 2 * t * c * taps,
    samples=grid("x=f32[{x},12], w=f32[12,{k}]", x=("4", "7", "2,9"), k=(1, 4)),
    errors=(("x=f32[3,12], w=f32[12,4]", "fewer than the 4 taps"), ("x=f32[7,12], w=f32[11,4]", "c is 12")),
)
def ssm_conv(x: Array, w: Array) -> Array:
    """Causal depthwise convolution, ``out[t, c] = sum_j w[c, j] x[t + j, c]``.  ggml: ``SSM_CONV``.

    The first ``taps - 1`` rows of `x` are the saved ones of earlier tokens.
    """
    taps = w.shape[-1]
    length = x.shape[-2] - taps + 1
    out = np.zeros((*x.shape[:-2], length, x.shape[-1]))
    for j in range(taps):
        out += x[..., j : j + length, :] * w[:, j]
    return out


_DELTA = (
    "q[..., *t, h, *d], k[..., *t, h, *d], v[..., *t, {hv}, e], g[..., *t, {hv}, 1|*d], beta[..., *t, {hv}],"
    " state[..., {hv}, e, *d] -> [..., t, {hv}, e]: f32, [..., {hv}, e, d]: f32"
)
_DELTA_CASE = (
    "q=f32[{t},{h},{d}], k=f32[{t},{h},{d}], v=f32[{t},4,{e}], g=f32[{t},4,{g}], beta=f32[{t},4], state=f32[4,{e},{d}]"
    ', heads="{m}"'
)


@op(
    {"tiled": _DELTA.format(hv="(r h)"), "interleaved": _DELTA.format(hv="(h r)")},
    form="heads",
    inplace=((1, "state"),),
    flops=lambda t, h, r, d, e, **_: t * h * r * e * (7 * d + 3),
    ranges={"g": Range(-4.0, -1e-4), "beta": Range(0.0, 1.0), "q": Range(-0.3, 0.3), "k": Range(-0.3, 0.3)},
    samples=(
        *grid(_DELTA_CASE, t=(1, 5), h=(2, 4), d=(16,), e=(16,), g=(1, 16), m=("tiled", "interleaved")),
        *grid(_DELTA_CASE, t=(0, 3), h=(2,), d=(8,), e=(12,), g=(1,), m=("tiled",)),
        "q=f32[2,3,2,8], k=f32[2,3,2,8], v=f32[2,3,4,8], g=f32[2,3,4,1], beta=f32[2,3,4], state=f32[2,4,8,8]",
    ),
    errors=(
        ("q=f32[3,2,8], k=f32[3,2,8], v=f32[3,3,8], g=f32[3,3,1], beta=f32[3,3], state=f32[3,8,8]", "no product"),
        ("q=f32[3,2,8], k=f32[3,2,8], v=f32[3,4,8], g=f32[3,4,4], beta=f32[3,4], state=f32[4,8,8]", "d is 8"),
        ("q=f32[3,2,8], k=f32[3,2,8], v=f32[3,4,8], g=f32[3,4,1], beta=f32[3,4]", "operand state is missing"),
        (
            'q=f32[3,2,8], k=f32[3,2,8], v=f32[3,4,8], g=f32[3,4,1], beta=f32[3,4], state=f32[4,8,8], heads="odd"',
            "one of tiled, interleaved",
        ),
    ),
)
def gated_delta_net(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, *, heads: str = "tiled"
) -> tuple[Array, Array]:
    """The gated delta rule over all tokens; returns the outputs and the state after the last token.

    Per token and value head: ``S *= exp(g)``; ``S += beta (v - S k) k^T``; ``o = S q / sqrt(d)``.  `S` is kept as
    [value, key], `g` is a log decay per head, or per key channel (KDA).  Value head j reads key head ``j mod h``
    (tiled) or ``j div r`` (interleaved).  q and k come in normalised.  ggml: ``GATED_DELTA_NET``; Yang et al., 2024.
    """
    repeat = v.shape[-2] // q.shape[-2] if q.shape[-2] else 1

    def spread(x: Array) -> Array:
        return np.tile(x, (repeat, 1)) if heads == "tiled" else np.repeat(x, repeat, axis=-2)

    q, k = spread(q), spread(k)
    out = np.empty(v.shape, np.result_type(v, state))
    s = np.array(state)
    for t in range(v.shape[-3]):
        at = (..., t, slice(None), slice(None))
        s = s * np.exp(g[at])[..., None, :]
        delta = (v[at] - np.einsum("...ed,...d->...e", s, k[at])) * beta[..., t, :, None]
        s = s + delta[..., :, None] * k[at][..., None, :]
        out[at] = np.einsum("...ed,...d->...e", s, q[at])
    return out / math.sqrt(q.shape[-1]), s
