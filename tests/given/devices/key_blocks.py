"""Attention over states of keys and values: in order, and by a block table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import hocket
from hocket import ops
from hocket.backends.base import Backend, Device
from hocket.ops.matrix.attention import BLOCK_KEYS
from hocket.scheduler import load, plan_for_group

SEQUENCES, HEADS, KEY_HEADS = 3, 6, 2
AttentionRun = tuple[hocket.Graph, dict[str, npt.NDArray[np.generic]], dict[str, npt.NDArray[np.float32]]]
"""A graph, its inputs, and its states."""


def build_in_order_and_by_blocks(
    tokens: int, keys: int, cache: str, sizes: tuple[int, int], sequences: int = SEQUENCES, **attrs: float
) -> tuple[AttentionRun, AttentionRun]:
    """Build attention over keys in order, and over the same keys in shuffled blocks of a larger pool."""
    rng = np.random.default_rng(tokens + keys)
    blocks = -(-keys // BLOCK_KEYS)
    pool = sequences * blocks + 2
    table = rng.permutation(pool)[: sequences * blocks].reshape(sequences, blocks).astype(np.int32)
    lengths = rng.integers(tokens, keys + 1, sequences)
    pos = lengths[:, None] - tokens + np.arange(tokens)
    mask = np.where(np.arange(keys) <= pos[..., None], 0.0, -np.inf).astype(np.float32)
    inputs = {"q": rng.standard_normal((sequences, tokens, HEADS, sizes[0])).astype(np.float32), "mask": mask}
    q, masks = hocket.input("q", inputs["q"].shape), hocket.input("mask", mask.shape)
    in_order, by_blocks, leaves, pools = {}, {}, [], []
    for name, size in zip(("k", "v"), sizes, strict=True):
        rows = rng.standard_normal((pool * BLOCK_KEYS, KEY_HEADS * size)).astype(np.float32)
        by_blocks[name] = rows
        cells = rows.reshape(pool, BLOCK_KEYS, -1)[table].reshape(sequences, blocks * BLOCK_KEYS, -1)[:, :keys]
        in_order[name] = np.ascontiguousarray(cells).reshape(sequences * keys, -1)
        shape = (sequences, keys, KEY_HEADS, size)
        leaves.append(ops.reshape(hocket.state(name, in_order[name].shape, cache), shape=shape))
        shape = (pool, BLOCK_KEYS, KEY_HEADS, size)
        pools.append(ops.reshape(hocket.state(name, rows.shape, cache), shape=shape))
    y = ops.attention(q, *leaves, masks, scale=0.25, **attrs)
    tables = hocket.input("table", table.shape, "i32")
    z = ops.attention(q, *pools, masks, table=tables, scale=0.25, pool="blocks", **attrs)
    return (
        (hocket.Graph({"y": y}), inputs, in_order),
        (hocket.Graph({"y": z}), {**inputs, "table": table}, by_blocks),
    )


def run_over_empty_cache(device: tuple[Backend, Device], cache: str, size: int, tokens: int) -> None:
    """Run attention of one head over a state of eight keys and values of zeros."""
    k, v = (ops.reshape(hocket.state(n, (8, size), cache), shape=(8, 1, size)) for n in "kv")
    graph = hocket.Graph({"y": ops.attention(hocket.input("q", (tokens, 1, size)), k, v, scale=1.0)})
    load(plan_for_group(graph, [device]), {}).run({"q": np.zeros((tokens, 1, size), np.float32)})
