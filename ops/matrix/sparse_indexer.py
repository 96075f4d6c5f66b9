"""Ops of DeepSeek V3.2 and V4: the lightning indexer of sparse attention, and hyper-connections."""

from __future__ import annotations

import math

import numpy as np

from ...graph.dtypes import CACHE_DTYPES
from ..declaration.broadcasting import tile_to_shape
from ..declaration.op import Array, op
from ..declaration.samples import LegalRange, expand_template


@op(
    "q[..., t, *h, *d], k[..., s, *d]: written, weights[..., t, *h], mask[~..., t, s] -> [..., t, s]: f32",
    linear=("weights+mask",),
    infinite=("-mask",),
    is_required=False,
    flops=lambda t, h, d, s, **_: t * s * ((2 * d + 2) * h + 1),
    samples=(
        *expand_template(
            "q=f32[{t},{h},16], k={x}[{s},16], weights=f32[{t},{h}], mask=f16[{t},{s}]",
            t=(1, 5),
            h=(1, 3),
            x=("f32", "f16"),
            s=(1, 7),
        ),
        *expand_template(
            "q=f32[4,3,64], k={x}[9,64], weights=f32[4,3], mask=f16[4,9]",
            x=tuple(str(dtype) for dtype in CACHE_DTYPES if dtype.is_quantised),
        ),
        "q=f32[4,3,2,8], k=f32[4,9,8], weights=f32[4,3,2], mask=f32[2,3,9]",
        "q=f32[0,2,8], k=f32[9,8], weights=f32[0,2], mask=f32[0,9]",
    ),
    errors=(
        ("q=f32[5,3,16], k=f32[7,8], weights=f32[5,3], mask=f16[5,7]", "d is 16"),
        ("q=f32[5,3,16], k=f32[7,16], weights=f32[5,2], mask=f16[5,7]", "h is 3"),
        ("q=f32[5,3,16], k=f32[7,16], weights=f32[5,3]", "operand mask is missing"),
        ("q=f32[3,5,3,16], k=f32[3,7,16], weights=f32[3,5,3], mask=f16[2,5,7]", "do not divide"),
    ),
    signed_zeros=False,
)
def lightning_indexer(q: Array, k: Array, weights: Array, mask: Array) -> Array:
    """Score each key for each query of sparse attention: ``sum_h weights[t, h] relu(q[t, h] . k[s]) + mask[t, s]``.

    All heads share one key. `weights` has the scale factors. ggml: ``LIGHTNING_INDEXER``; DeepSeek-V3.2, 2025.
    """
    products = np.maximum(np.einsum("...thd,...sd->...ths", q, k), 0.0)
    scores = np.einsum("...ths,...th->...ts", products, weights)
    return scores + tile_to_shape(mask, scores.shape)


def _derive_stream_count(mixes: int, **_: int) -> int:
    """Return the number n of residual streams from the length ``n + n + n * n`` of a row of logits.

    A row has the logits of inputs, of outputs and of the mixing matrix.
    """
    return math.isqrt(mixes + 1) - 1


def _check_comb(mixes: int, streams: int, parts: int, n_iter: int, **_: object) -> str | None:
    if (streams + 2) * streams != mixes or not streams:
        return f"a row of mixes holds {mixes} numbers, which is no (n + 2) n"
    if parts < 3:
        return f"scale has {parts} entries; it needs 3"
    return None if n_iter >= 1 else f"n_iter is {n_iter}; it must be at least 1"


@op(
    "mixes[..., *mixes], scale[*parts], base[*mixes] -> [..., streams, streams]: f32",
    derived_sizes={"streams": _derive_stream_count},
    is_required=False,
    check=_check_comb,
    flops=lambda streams, n_iter, **_: streams * streams * (4 + 4 * n_iter),
    ranges={"mixes": LegalRange(-2.0, 2.0), "scale": LegalRange(-0.5, 0.5), "base": LegalRange(-0.25, 0.25)},
    samples=(
        *expand_template("mixes=f32[{t},24], scale=f32[3], base=f32[24], n_iter={i}", t=(0, 1, 17), i=(1, 4, 20)),
        *expand_template("mixes=f32[2,3,{m}], scale=f32[4], base=f32[{m}], n_iter=3, eps=0.01", m=(3, 8, 15)),
    ),
    errors=(
        ("mixes=f32[5,23], scale=f32[3], base=f32[23], n_iter=2", "no (n + 2) n"),
        ("mixes=f32[5,24], scale=f32[2], base=f32[24], n_iter=2", "scale has 2"),
        ("mixes=f32[5,24], scale=f32[3], base=f32[23], n_iter=2", "mixes is 24"),
        ("mixes=f32[5,24], scale=f32[3], base=f32[24], n_iter=0", "at least 1"),
    ),
    signed_zeros=False,
)
def dsv4_hc_comb(mixes: Array, scale: Array, base: Array, *, n_iter: int, eps: float = 1e-6) -> Array:
    """Compute nearly doubly stochastic mixing matrices [..., from, to] of n residual streams (hyper-connections).

    The last n² entries of a row of `mixes` are the logits of its matrix.

    1. ``softmax(mixes scale[2] + base)`` over `to`, plus eps.
    2. Divide by the sums over `from`, plus eps.
    3. Repeat ``n_iter - 1`` times: divide by the sums over `to`, then over `from`, each plus eps.

    Sinkhorn and Knopp, 1967. ggml: ``DSV4_HC_COMB``, with n = 4; Xie et al., mHC: manifold-constrained
    hyper-connections, 2025.
    """
    n = _derive_stream_count(mixes.shape[-1])
    logits = (mixes[..., 2 * n :] * scale[2] + base[2 * n :]).reshape(*mixes.shape[:-1], n, n)
    comb = np.exp(logits - logits.max(axis=-1, keepdims=True))
    comb = comb / comb.sum(axis=-1, keepdims=True) + eps
    for i in range(n_iter):
        if i:
            comb = comb / (comb.sum(axis=-1, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)
    return comb


@op(
    {
        "False": "x[..., +n, d], weights[..., +n] -> [..., d]: f32",
        "True": "x[..., +n, d], weights[..., +n, d] -> [..., d]: f32",
    },
    signature_key="gated",
    linear=lambda attrs: ("x",) if attrs["gated"] else ("x", "weights"),
    is_required=False,
    flops=lambda n, d, **_: 2 * n * d,
    samples=(
        *expand_template("x=f32[{t},{n},{d}], weights=f32[{t},{n}]", t=(0, 1, 17), n=(1, 4, 5), d=(1, 31)),
        *expand_template("x=f32[{t},4,31], weights=f32[{t},4,31], gated=true, scale=0.25", t=(1, 17)),
        "x=f32[2,3,4,8], weights=f32[2,3,4], scale=2.0",
    ),
    errors=(
        ("x=f32[5,4,8], weights=f32[5,3]", "n is 4"),
        ("x=f32[5,4,8], weights=f32[5,4,8]", "n is 4"),
        ("x=f32[5,4,8], weights=f32[5,4,7], gated=true", "d is 8"),
    ),
    signed_zeros=False,
)
def dsv4_hc_pre(x: Array, weights: Array, *, gated: bool = False, scale: float = 1.0) -> Array:
    """Mix n residual streams into the input of a layer (hyper-connections): ``scale sum_h x[h] weights[h]``.

    With `gated`, weights are logits of sigmoids, one for each element of each stream. ggml: ``DSV4_HC_PRE``.
    """
    if not gated:
        return scale * np.einsum("...nd,...n->...d", x, weights)
    e = np.exp(-np.abs(weights))
    return scale * np.einsum("...nd,...nd->...d", x, np.where(weights >= 0, 1.0, e) / (1.0 + e))


@op(
    "x[..., d], residual[..., *n, d], post[..., *n], comb[..., *n, *n]? -> [..., n, d]: f32",
    linear=("x+residual",),
    inplace="residual",
    is_required=False,
    flops=lambda n, d, **_: 2 * n * d * (n + 1),
    samples=(
        *expand_template(
            "x=f32[{t},{d}], residual=f32[{t},{n},{d}], post=f32[{t},{n}]", t=(0, 1, 17), d=(1, 31), n=(4,)
        ),
        *expand_template(
            "x=f32[{t},31], residual=f32[{t},{n},31], post=f32[{t},{n}], comb=f32[{t},{n},{n}]", t=(1, 17), n=(1, 4, 5)
        ),
        "x=f32[2,3,8], residual=f32[2,3,4,8], post=f32[2,3,4], comb=f32[2,3,4,4]",
    ),
    errors=(
        ("x=f32[5,8], residual=f32[5,4,8], post=f32[5,3]", "n is 4"),
        ("x=f32[5,8], residual=f32[5,4,8], post=f32[5,4], comb=f32[5,4,3]", "n is 4"),
        ("x=f32[5,8], residual=f32[5,4,9], post=f32[5,4]", "d is 8"),
    ),
    signed_zeros=False,
)
def dsv4_hc_post(x: Array, residual: Array, post: Array, comb: Array | None = None) -> Array:
    """Update the residual streams after a layer: ``out[to] = x post[to] + sum_from residual[from] comb[from, to]``.

    `x` is the output of the layer. Without `comb`, streams do not mix. ggml: ``DSV4_HC_POST``.
    """
    mixed = residual if comb is None else np.einsum("...fd,...ft->...td", residual, comb)
    return x[..., None, :] * post[..., :, None] + mixed
