"""Scaled dot-product attention, and its causal mask."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...graph.attrs import Attrs
from ...graph.dtypes import CACHE_DTYPES
from ...graph.node import Node
from ..declaration.attributes import float_attribute
from ..declaration.broadcasting import tile_to_shape
from ..declaration.op import Array, op
from ..declaration.samples import LegalRange, expand_template
from ..reduction.norms import alibi_slopes, softmax_rows


@op(
    "pos[..., t]: i32 -> [..., t, cells]: f32",
    flops=lambda t, cells, **_: 2 * t * cells,
    ranges={"pos": LegalRange(0, 8)},
    check=lambda cells, window, **_: "cells and window must not be negative" if min(cells, window) < 0 else None,
    samples=("pos=i32[5], cells=8", "pos=i32[2,3], cells=9, window=3", "pos=i32[0], cells=4"),
    errors=(
        ("pos=f32[5], cells=8", "pos is f32"),
        ("pos=i32[5]", "cells is missing"),
        ("pos=i32[2], cells=-1", "negative"),
    ),
)
def causal_mask(pos: Array, *, cells: int, window: int = 0) -> Array:
    """Build the causal attention mask: 0 where a token may attend to a KV cache cell, else -inf.

    The token at position `pos` may attend to cell s if ``pos - window < s <= pos``. Cell s of a sequence has position
    s. `window` counts the token itself; 0 means no window. ggml: no op, llama.cpp fills its KQ mask on the host.
    """
    distance = pos[..., None].astype(np.int64) - np.arange(cells)
    seen = (distance >= 0) & ((distance < window) if window else True)
    return np.where(seen, 0.0, -np.inf)


QUANTISED_CACHE_NAMES = tuple(str(dtype) for dtype in CACHE_DTYPES if dtype.is_quantised)
_MASKS: Mapping[str, str] = {"one": "t, *s", "each": "(kv_heads query_heads), t, *s", "tiled": "*m, t, *s"}


def _check_attention(
    mask_heads: str, kv_heads: int, query_heads: int, softcap: float, max_bias: float, m: int | None = None, **_: object
) -> str | None:
    heads = kv_heads * query_heads
    if m is not None and (heads % m if m else heads):
        return f"mask has {m} heads, which do not divide the {heads} of q"
    for name, value in (("softcap", softcap), ("max_bias", max_bias)):
        if value and not 1e-30 <= value <= 1e30:  # float32 cannot hold its quotients
            return f"{name} is {value}; it must be 0, or a number from 1e-30 to 1e30"
    return None


def _list_unsharded_head_dimensions(attrs: Attrs) -> tuple[str, ...]:
    """Return the head dimensions that may not be sharded.

    All of them are returned if the result depends on the number of a head, else none. ALiBi slopes and tiled masks
    depend on it, and a shard would number its heads from 0.
    """
    return ("kv_heads", "query_heads") if attrs["max_bias"] or attrs["mask_heads"] == "tiled" else ()


def _compute_fraction_of_cells_in_window(node: Node) -> float:
    """Compute the fraction of KV cache cells inside the attention window of a token; kernels skip the other cells."""
    mask = node.src[3].node if len(node.src) > 3 and node.src[3] is not None else None
    if mask is None or mask.op != "causal_mask" or not mask.attrs["window"]:
        return 1.0
    return min(1.0, float_attribute(mask.attrs, "window") / max(1.0, float_attribute(mask.attrs, "cells")))


@op(
    {
        name: "q[..., t, (kv_heads query_heads), *d], k[..., *s, kv_heads, *d]: written,"
        f" v[..., *s, kv_heads, e]: written, mask[~..., {axes}]?, sinks[(kv_heads query_heads)]?"
        " -> [..., t, (kv_heads query_heads), e]: f32"
        for name, axes in _MASKS.items()
    },
    signature_key="mask_heads",
    linear=("v",),
    check=_check_attention,
    unsharded_dimensions=_list_unsharded_head_dimensions,
    infinite=("-mask",),
    flops=lambda t, kv_heads, query_heads, s, d, e, **_: t * kv_heads * query_heads * s * (2 * d + 2 * e + 5),
    active_fraction=_compute_fraction_of_cells_in_window,
    samples=(
        *expand_template(
            "q=f32[{t},4,16], k={x}[9,{h},16], v={x}[9,{h},16], scale=0.25", t=(1, 3), h=(1, 2, 4), x=("f32", "f16")
        ),
        "q=f32[2,3,4,16], k=f32[2,9,2,16], v=f32[2,9,2,24], mask=f32[2,3,9], scale=0.25",
        "q=f32[2,3,4,16], k=f32[2,9,2,16], v=f32[2,9,2,16], mask=f16[3,9], scale=0.25, max_bias=8.0",
        "q=f32[3,4,16], k=f32[9,2,16], v=f32[9,2,16], mask=f32[3,9], sinks=f32[4], scale=0.25, softcap=5.0",
        "q=f32[2,96,8], k=f32[5,12,8], v=f32[5,12,8], sinks=f32[96], scale=0.25",
        *expand_template(
            'q=f32[4,3,6,8], k=f32[4,7,2,8], v=f32[4,7,2,5], mask=f16[{b}{m},3,7], mask_heads="{how}", scale=0.25,'
            " max_bias={bias}",
            b=("", "2,"),
            m=(6,),
            how=("each", "tiled"),
            bias=(0.0, 8.0),
        ),
        *expand_template(
            'q=f32[3,6,8], k=f32[7,3,8], v=f32[7,3,5], mask=f32[{m},3,7], mask_heads="tiled", scale=0.25', m=(1, 2, 3)
        ),
        "q=f32[0,4,8], k=f32[5,2,8], v=f32[5,2,8], mask=f32[0,5], scale=1.0",
        *expand_template("q=f32[2,4,64], k={x}[9,2,64], v={x}[9,2,32], scale=0.125", x=QUANTISED_CACHE_NAMES),
    ),
    errors=(
        ("q=f32[3,4,16], k=f32[9,3,16], v=f32[9,3,16], scale=1.0", "no product"),
        ("q=f32[3,4,16], k=f32[9,2,8], v=f32[9,2,16], scale=1.0", "d is 16"),
        ("q=f32[3,4,16], k=f32[9,2,16], v=f32[8,2,16], scale=1.0", "s is 9"),
        ("q=f32[3,4,16], k=f32[9,2,16], v=f32[9,2,16]", "scale is missing"),
        ("q=f32[3,4,16], k=f32[9,2,16], v=f32[9,2,16], scale=1.0, softcap=-1.0", "softcap is -1.0; it must be 0"),
        ("q=f32[3,4,16], k=f32[9,2,16], v=f32[9,2,16], scale=1.0, max_bias=1e-300", "max_bias is 1e-300; it must be 0"),
        ("q=f32[3,4,256], k=iq3_s[9,2,256], v=f32[9,2,32], scale=1.0", "k is iq3_s"),
        (
            'q=f32[3,4,8], k=f32[7,2,8], v=f32[7,2,8], mask=f32[3,3,7], mask_heads="tiled", scale=1.0',
            "mask has 3 heads",
        ),
        ('q=f32[3,4,8], k=f32[7,2,8], v=f32[7,2,8], mask=f32[2,3,7], mask_heads="each", scale=1.0', "no product"),
        ('q=f32[3,4,8], k=f32[7,2,8], v=f32[7,2,8], mask_heads="all", scale=1.0', "one of one, each, tiled"),
    ),
    signed_zeros=False,
    nan_for_infinity=("k", "v"),
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
    mask_heads: str = "one",
) -> Array:
    """Compute multi-head attention, ``softmax(cap(q k scale) + slope mask) v`` for each head.

    `query_heads` neighbouring heads of q share a key/value head. `cap(x)` is ``softcap tanh(x / softcap)`` where
    softcap > 0. A sink adds to the denominator of its head only. A row that is masked completely gives zeros.
    `mask_heads` states the masks of heads: ``one`` mask for all heads, ``each`` head has its own, or ``tiled``: head i
    has mask ``i mod m``. Slopes are 1 unless `max_bias` > 0 (ALiBi: Press et al., 2022). ggml: ``FLASH_ATTN_EXT``; Dao
    et al., 2022.
    """
    heads = q.shape[-2]
    shared = heads // k.shape[-2] if k.shape[-2] else 1
    k, v = np.repeat(k, shared, axis=-2), np.repeat(v, shared, axis=-2)
    scores = np.einsum("...thd,...shd->...hts", q, k) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if mask is not None:
        mask = mask[..., None, :, :] if mask_heads == "one" else mask
        slopes = alibi_slopes(heads, max_bias)[:, None, None]
        scores = scores + slopes * tile_to_shape(mask, scores.shape)
    p = softmax_rows(scores, None if sinks is None else sinks[:, None, None])
    return np.einsum("...hts,...she->...the", p, v)
