"""Scaled dot-product attention, and its causal mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...graph.attrs import Attr, Attrs
from ...graph.dtypes import CACHE_DTYPES
from ...graph.errors import format_count
from ...graph.node import Node
from ...graph.spec import Spec
from ..declaration.attributes import float_attribute
from ..declaration.broadcasting import tile_to_shape
from ..declaration.op import Array, op
from ..declaration.samples import LegalRange, expand_template
from ..declaration.signature import SignatureMismatch
from ..movement.sharded_tables import require_row_numbers
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
BLOCK_KEYS = 64
"""Keys of a block in a pool of blocks."""
_MASKS: Mapping[str, str] = {"one": "t, *s", "each": "(kv_heads query_heads), t, *s", "tiled": "*m, t, *s"}
_KEYS: Mapping[str, tuple[str, str]] = {
    "none": ("..., *s", ""),
    "blocks": (f"*pool, {BLOCK_KEYS}", ", table[..., *blocks]: i32"),
}
"""The axes of keys before their heads, and the block table, for each value of the attribute `pool`."""


def _choose_signature_key(attrs: Mapping[str, Attr]) -> str:
    """Return the key of the signature for the attributes `mask_heads` and `pool`, such as ``one none``.

    Raises:
        SignatureMismatch: an attribute has no legal value.
    """
    for name, legal, default in (("mask_heads", _MASKS, "one"), ("pool", _KEYS, "none")):
        if (value := attrs.get(name, default)) not in legal:
            raise SignatureMismatch(f"{name} is {value!r}; one of {', '.join(legal)}")
    return " ".join(str(attrs.get(name, default)) for name, default in (("mask_heads", "one"), ("pool", "none")))


def _check_attention(
    mask_heads: str,
    kv_heads: int,
    query_heads: int,
    softcap: float,
    max_bias: float,
    s: int,
    m: int | None = None,
    blocks: int | None = None,
    **_: object,
) -> str | None:
    if blocks is not None and s > BLOCK_KEYS * blocks:
        return f"mask has {format_count(s, 'key')}, but the table has room for {BLOCK_KEYS * blocks}"
    heads = kv_heads * query_heads
    if m is not None and (heads % m if m else heads):
        return f"mask has {format_count(m, 'head')}, which do not divide the {heads} of q"
    for name, value in (("softcap", softcap), ("max_bias", max_bias)):
        if value and not 1e-30 <= value <= 1e30:  # float32 cannot hold its quotients
            return f"{name} is {value}; it must be 0, or a number from 1e-30 to 1e30"
    return None


def _list_unsharded_head_dimensions(attrs: Attrs) -> tuple[str, ...]:
    """Return the head dimensions that a plan may not shard, because the result depends on the number of a head.

    ALiBi slopes and tiled masks depend on it, and a shard would number its heads from 0.
    """
    return ("kv_heads", "query_heads") if attrs["max_bias"] or attrs["mask_heads"] == "tiled" else ()


def _compute_fraction_of_cells_in_window(node: Node) -> float:
    """Compute the fraction of KV cache cells inside the attention window of a token; kernels skip the other cells."""
    mask = node.src[3].node if len(node.src) > 3 and node.src[3] is not None else None
    if mask is None or mask.op != "causal_mask" or not mask.attrs["window"]:
        return 1.0
    return min(1.0, float_attribute(mask.attrs, "window") / max(1.0, float_attribute(mask.attrs, "cells")))


def _count_attention_bytes(sources: Sequence[Spec | None], results: Sequence[Spec], attrs: Attrs) -> int:
    """Count the bytes that attention reads and writes; of a pool of blocks, only the blocks in the table count."""
    if attrs["pool"] == "none":
        return sum(s.nbytes for s in (*sources, *results) if s is not None)
    table = sources[5]
    entries = 0 if table is None else table.size
    blocks = sum(Spec((entries, *pool.shape[1:]), pool.dtype).nbytes for pool in sources[1:3] if pool is not None)
    return blocks + sum(s.nbytes for s in (sources[0], *sources[3:], *results) if s is not None)


def gather_blocks(pool: Array, table: Array, keys: int | None) -> Array:
    """Gather the keys or values of each sequence from a pool of blocks.

    Args:
        pool: the blocks [pool, 64, heads, size].
        table: the blocks of each sequence [..., blocks].
        keys: the first keys that are returned; all if it is None.

    Returns:
        The rows [..., keys, heads, size].

    Raises:
        BackendError: an entry of the table is no number of a block.
    """
    rows = pool[require_row_numbers(table, len(pool), "blocks")]
    cells = table.shape[-1] * pool.shape[1]
    return rows.reshape(*table.shape[:-1], cells, *pool.shape[2:])[..., :keys, :, :]


@op(
    {
        f"{name} {pool}": f"q[..., t, (kv_heads query_heads), *d], k[{keys}, kv_heads, *d]: written,"
        f" v[{keys}, kv_heads, e]: written, mask[~..., {axes}]?, sinks[(kv_heads query_heads)]?{table}"
        " -> [..., t, (kv_heads query_heads), e]: f32"
        for pool, (keys, table) in _KEYS.items()
        for name, axes in _MASKS.items()
    },
    signature_key=_choose_signature_key,
    derived_sizes={"s": lambda s=None, blocks=0, **_: BLOCK_KEYS * blocks if s is None else s},
    ranges={"table": LegalRange(0, "pool")},
    traffic=_count_attention_bytes,
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
            'q=f32[4,3,6,8], k=f32[4,7,2,8], v=f32[4,7,2,5], mask=f16[{b}{m},3,7], sinks=f32[6], mask_heads="{how}",'
            " scale=0.25, max_bias={bias}",
            b=("", "2,"),
            m=(6,),
            how=("each", "tiled"),
            bias=(0.0, 8.0),
        ),
        *expand_template(
            'q=f32[3,6,8], k=f32[7,3,8], v=f32[7,3,5], mask=f32[{m},3,7], sinks=f32[6], scale=0.25, mask_heads="tiled"',
            m=(1, 2, 3),
        ),
        "q=f32[0,4,8], k=f32[5,2,8], v=f32[5,2,8], mask=f32[0,5], scale=1.0",
        *expand_template("q=f32[2,4,64], k={x}[9,2,64], v={x}[9,2,32], scale=0.125", x=QUANTISED_CACHE_NAMES),
        *expand_template(
            "q=f32[2,{t},4,16], k={x}[5,64,2,16], v={x}[5,64,2,24], mask=f32[2,{t},{s}], table=i32[2,2], scale=0.25,"
            ' pool="blocks"',
            t=(1, 3, 17),
            x=("f32", "f16"),
            s=(70, 128),
        ),
        'q=f32[2,3,6,8], k=f32[3,64,2,8], v=f32[3,64,2,5], table=i32[2,1], scale=0.25, max_bias=8.0, pool="blocks"',
        "q=f32[3,4,16], k=f32[4,64,2,16], v=f32[4,64,2,16], mask=f32[2,3,80], sinks=f32[4], table=i32[3], scale=0.25,"
        ' mask_heads="tiled", softcap=5.0, pool="blocks"',
        *expand_template(
            'q=f32[2,2,4,64], k={x}[3,64,2,64], v={x}[3,64,2,32], table=i32[2,2], scale=0.125, pool="blocks"',
            x=QUANTISED_CACHE_NAMES,
        ),
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
        ('q=f32[3,4,8], k=f32[7,2,8], v=f32[7,2,8], pool="pages", scale=1.0', "one of none, blocks"),
        ('q=f32[3,4,8], k=f32[2,64,2,8], v=f32[2,64,2,8], pool="blocks", scale=1.0', "operand table is missing"),
        (
            'q=f32[3,4,8], k=f32[2,32,2,8], v=f32[2,32,2,8], table=i32[1], pool="blocks", scale=1.0',
            "is 32; it must be 64",
        ),
        (
            'q=f32[3,4,8], k=f32[2,64,2,8], v=f32[2,64,2,8], mask=f32[3,65], table=i32[1], pool="blocks", scale=1.0',
            "mask has 65 keys, but the table has room for 64",
        ),
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
    table: Array | None = None,
    *,
    scale: float,
    max_bias: float = 0.0,
    softcap: float = 0.0,
    mask_heads: str = "one",
    pool: str = "none",
) -> Array:
    """Compute multi-head attention, ``softmax(cap(q k scale) + slope mask) v`` for each head.

    `query_heads` neighbouring heads of q share a key/value head. `cap(x)` is ``softcap tanh(x / softcap)`` where
    softcap > 0. A sink adds to the denominator of its head only. A row that is masked completely gives zeros.
    `mask_heads` states the masks of heads: ``one`` mask for all heads, ``each`` head has its own, or ``tiled``: head i
    has mask ``i mod m``. `slope` is one factor for each head: 1, or the slope of ALiBi if `max_bias` > 0 (Press et al.,
    2022). ggml: ``FLASH_ATTN_EXT``; Dao et al., 2022.

    With `pool` ``blocks``, k and v are pools of blocks of 64 keys, which all sequences share. Key s of sequence b is
    key ``s % 64`` of block ``table[b, s // 64]`` (Kwon et al., PagedAttention, 2023). The mask tells the number of
    keys; without a mask, all keys of the table count.
    """
    if table is not None:
        k, v = (gather_blocks(x, table, None if mask is None else mask.shape[-1]) for x in (k, v))
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
