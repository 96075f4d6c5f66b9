"""The compiled lightning indexer on keys as states hold them, against its definition in float64."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket import Graph, input, ops, state
from hocket.backends.cpu.backend import CpuBackend
from hocket.ops import REGISTRY
from hocket.scheduler import plan_for_group

from ...given.models.goldens import nmse


@pytest.mark.parametrize(
    ("dtype", "shape", "threads"),
    [
        *[("f32", (1, 64, 128, 300), 1), ("f16", (9, 7, 40, 70), 3)],
        *[("q8_0", (1, 13, 128, 1000), 3), ("q8_0", (40, 3, 96, 49), 1), ("q5_1", (4, 6, 160, 100), 1)],
    ],
)
def test_the_indexer_reads_keys_as_they_are_stored(dtype, shape, threads):
    """Two sequences share a mask, their keys are columns of one state, and queries are a view of transposed heads."""
    (tokens, heads, size, keys), rng = shape, np.random.default_rng(0)
    cache = state("k", (2 * keys + 1, 3 * size), dtype)
    known = ops.reshape(ops.slice_(cache, axis=0, start=0, stop=2 * keys), shape=(2, keys, 3, size))
    k = ops.reshape(ops.slice_(known, axis=2, start=1, stop=2), shape=(2, keys, size))
    q, weights = input("q", (2, heads, tokens, size)), input("weights", (2, tokens, heads))
    mask = input("mask", (1, tokens, keys))
    y = ops.lightning_indexer(ops.permute(q, axes=(0, 2, 1, 3)), k, weights, mask)
    backend = CpuBackend(threads)
    run = hocket.load(plan_for_group(Graph({"y": y}), [(backend, backend.device(0))]), {})
    run.store.state("k")[...] = rng.standard_normal(run.store.state("k").shape)
    inputs = {v.node.name: rng.standard_normal(v.shape).astype(np.float32) for v in (q, weights, mask)}
    inputs["mask"][rng.random(mask.shape) < 0.3] = -np.inf
    got = run.run(inputs)["y"]
    assert "NumPy" not in {step.kernel for step in run.time_kernels()[0]}
    stored = np.array(run.store.state("k"), np.float64)[: 2 * keys].reshape(2, keys, 3, size)[:, :, 1]
    q64, weights64, mask64 = (inputs[v.node.name].astype(np.float64) for v in (q, weights, mask))
    expected = REGISTRY["lightning_indexer"].reference(q64.transpose(0, 2, 1, 3), stored, weights64, mask64)
    seen = np.isfinite(expected)
    assert np.array_equal(np.isneginf(got), ~seen)
    assert nmse(got[seen], expected[seen]) <= 1e-12


def test_a_product_that_is_nan_reaches_the_scores():
    q, k, weights, mask = (input(n, s) for n, s in (("q", (2, 3, 16)), ("k", (20, 16)), ("w", (2, 3)), ("m", (2, 20))))
    run = hocket.load(hocket.plan(Graph({"y": ops.lightning_indexer(q, k, weights, mask)}), "cpu:0"), {})
    inputs = {v.node.name: np.ones(v.shape, np.float32) for v in (q, k, weights, mask)}
    inputs["k"][5, 15], inputs["k"][18, 0], inputs["k"][19, 1] = np.nan, np.inf, -np.inf
    got = run.run(inputs)["y"]
    assert np.array_equal(np.isnan(got[1]), np.arange(20) == 5)
    assert (got[0, 18], got[0, 19], got[1, 0]) == (np.inf, 1.0, 49.0)
