"""Attention over a pool of blocks on the CPU backend: the same bits as over keys in order, on any threads."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.cpu.backend import CpuBackend
from hocket.graph import BackendError
from hocket.ops.matrix.attention import BLOCK_KEYS

from ...given.devices.key_blocks import HEADS, KEY_HEADS, build_in_order_and_by_blocks

CACHES = ("f32", "f16", "bf16", "q8_0", "q4_0")


def run(graph, threads, inputs, states):
    """Run a graph on compiled kernels alone, with these states, and return its result."""
    backend = CpuBackend(threads)
    loaded = hocket.load(hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]), {})
    for name, rows in states.items():
        loaded.store.state(name)[...] = rows
    result = loaded.run(inputs)["y"]
    assert "NumPy" not in {step.kernel for step in loaded.time_kernels()[0]}
    return result


def compute_in_order_and_by_blocks(tokens, keys, cache, sizes, threads, **attrs):
    return [
        run(graph, threads, *values)
        for graph, *values in build_in_order_and_by_blocks(tokens, keys, cache, sizes, **attrs)
    ]


@pytest.mark.long
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_give_the_bits_of_keys_in_order(cache, tokens, threads):
    want, got = compute_in_order_and_by_blocks(tokens, 300, cache, (64, 32), threads)
    assert np.array_equal(got, want)


@pytest.mark.long
@pytest.mark.parametrize("keys", [40, 64, 65, 513, 1100])
@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("sizes", [(40, 24), (128, 128)])
def test_blocks_give_the_bits_of_keys_in_order_for_any_length(keys, tokens, sizes):
    want, got = compute_in_order_and_by_blocks(tokens, keys, "f16", sizes, 2, softcap=3.0)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("entry", [-1, 4])
def test_an_entry_that_is_no_block_stops_the_run(tokens, threads, entry):
    pool = hocket.input("k", (4, BLOCK_KEYS, KEY_HEADS, 16))
    q, table = hocket.input("q", (2, tokens, HEADS, 16)), hocket.input("table", (2, 3), "i32")
    y = ops.attention(q, pool, pool, table=table, scale=0.25, pool="blocks")
    backend = CpuBackend(threads)
    run = hocket.load(hocket.scheduler.plan_for_group(hocket.Graph({"y": y}), [(backend, backend.device(0))]), {})
    arrays = {"q": np.ones(q.shape, np.float32), "k": np.ones(pool.shape, np.float32)}
    blocks = np.array([[0, 1, 2], [3, 2, 1]], np.int32)
    assert np.array_equal(run.run({**arrays, "table": blocks})["y"], np.ones(q.shape, np.float32))
    blocks[1, 1] = entry
    with pytest.raises(BackendError, match=f"id {entry} names no row of its table"):
        run.run({**arrays, "table": blocks})
