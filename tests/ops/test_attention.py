"""Attention, rotations, routed experts and indexers against hand-checked values and other formulations."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from hocket import ops
from hocket.graph import BackendError, Graph, input
from hocket.scheduler import load, plan

from ..given.arrays import assert_close_to_largest


def run(op, *arrays, **attrs):
    """The reference, with defaults filled in."""
    results = op.run_reference(arrays, op.normalise_attributes(attrs))
    return results[0] if len(results) == 1 else results


@pytest.fixture
def rng():
    return np.random.default_rng(1)


# ----------------------------------------------------------------------------------------------------- experts


def test_mul_mat_id_by_hand():
    w = np.array([[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]])
    x = np.array([[[1.0, 1.0]], [[1.0, 10.0]]])
    assert_close_to_largest(run(ops.mul_mat_id, w, x, np.array([[2, 0], [1, 1]])), [[[11.0], [3.0]], [[43.0], [43.0]]])


def test_slot_i_of_mul_mat_id_reads_row_i_modulo_the_rows(rng):
    w, x, ids = rng.normal(size=(5, 4, 7)), rng.normal(size=(3, 2, 7)), rng.integers(0, 5, (3, 6))
    want = [[w[ids[t, i]] @ x[t, i % 2] for i in range(6)] for t in range(3)]
    assert_close_to_largest(run(ops.mul_mat_id, w, x, ids), want)


def test_add_id_by_hand():
    got = run(ops.add_id, np.zeros((2, 2, 1)), np.array([[10.0], [20.0], [30.0]]), np.array([[0, 2], [1, 1]]))
    assert_close_to_largest(got, [[[10.0], [30.0]], [[20.0], [20.0]]])


def load_expert_product(experts, n, k, tokens, used, device):
    w, x = input("w", (experts, n, k)), input("x", (tokens, 1, k))
    ids = input("ids", (tokens, used), "i32")
    return load(plan(Graph({"y": ops.mul_mat_id(w, x, ids)}), device), {})


@pytest.mark.parametrize("device", ["cpu:0", "reference:0"])
def test_experts_that_are_not_chosen_are_not_read(device, rng):
    w = rng.normal(size=(4, 3, 8)).astype(np.float32)
    w[2] = np.nan
    x, ids = rng.normal(size=(5, 1, 8)).astype(np.float32), rng.choice([0, 1, 3], (5, 2))
    got = load_expert_product(4, 3, 8, 5, 2, device).run({"w": w, "x": x, "ids": ids})["y"]
    assert np.isfinite(got).all()


@pytest.mark.parametrize("device", ["cpu:0", "reference:0"])
@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_expert_that_does_not_exist_is_refused(device, wrong):
    bound = {"w": np.zeros((4, 3, 8)), "x": np.zeros((2, 1, 8)), "ids": np.array([[0, 1], [wrong, 2]])}
    with pytest.raises(BackendError, match=r"ids of experts run from|names no row"):
        load_expert_product(4, 3, 8, 2, 2, device).run(bound)
    with pytest.raises(BackendError, match="but there are 0 to 3 only"):
        run(ops.add_id, np.zeros((1, 1, 2)), np.zeros((4, 2)), np.array([[wrong]]))


@pytest.mark.parametrize("tokens", [255, 257, 700])
def test_more_rows_than_a_block_of_one_expert(tokens, rng):
    w = rng.normal(size=(2, 3, 8)).astype(np.float32)
    x, ids = rng.normal(size=(tokens, 1, 8)).astype(np.float32), np.zeros((tokens, 1), np.int64)
    ids[-1] = 1
    got = load_expert_product(2, 3, 8, tokens, 1, "cpu:0").run({"w": w, "x": x, "ids": ids})["y"]
    np.testing.assert_allclose(got, run(ops.mul_mat_id, w, x, ids), rtol=1e-4, atol=1e-4)


def test_traffic_of_experts_counts_those_that_can_be_used():
    w, x = input("w", (64, 8, 32), "q8_0"), input("x", (2, 1, 32))
    node = ops.mul_mat_id(w, x, input("ids", (2, 3), "i32")).node
    assert ops.mul_mat_id.count_bytes(node) == 6 * 8 * 34 + 2 * 32 * 4 + 6 * 4 + 2 * 3 * 8 * 4
    assert ops.mul_mat_id.count_flops(node) == 2 * 6 * 8 * 32


# -------------------------------------------------------------------------------------------------------- rope

YARN = {"ext_factor": 0.7, "freq_scale": 0.25, "attn_factor": 1.3, "original_context": 64, "base": 1000.0}


def rotate_by_loops(x, pos, sections, n_dims, mode, offset=0, factors=None, base=10000.0):
    """One pair at a time, as the comments of ggml.h describe it."""
    out, half = x.copy(), n_dims if mode == "vision" else n_dims // 2
    names = [plane for plane, count in enumerate(sections) for _ in range(count)]
    for t, h, i in product(range(x.shape[0]), range(x.shape[1]), range(half)):
        sector = i % len(names)
        plane = names[sector]
        if mode == "imrope":
            plane = sector % 3 if sector < 3 * sections[sector % 3] else 3
        exponent = sector - names.index(plane) if mode == "vision" else i
        angle = pos[plane, t] * base ** (-2 * exponent / n_dims) / (1.0 if factors is None else factors[i])
        a, b = x[t, h, offset + i], x[t, h, offset + half + i]
        out[t, h, offset + i] = a * math.cos(angle) - b * math.sin(angle)
        out[t, h, offset + half + i] = a * math.sin(angle) + b * math.cos(angle)
    return out


@pytest.mark.parametrize("mode", ["mrope", "imrope"])
@pytest.mark.parametrize("sections", [(11, 11, 10, 0), (3, 3, 2, 0), (4, 2, 1, 1), (1, 0, 1, 1)])
@pytest.mark.parametrize("offset", [0, 6])
def test_rope_multi_pair_by_pair(mode, sections, offset, rng):
    x, pos, factors = rng.normal(size=(5, 2, 70)), rng.integers(0, 50, (4, 5)), rng.uniform(0.5, 2, 32)
    got = run(ops.rope_multi, x, pos, factors, n_dims=64, sections=sections, mode=mode, offset=offset)
    assert_close_to_largest(got, rotate_by_loops(x, pos, sections, 64, mode, offset, factors))


@pytest.mark.parametrize("sections", [(4, 4, 0, 0), (2, 3, 2, 1)])
def test_vision_rope_pair_by_pair(sections, rng):
    x, pos, factors = rng.normal(size=(5, 2, 16)), rng.integers(0, 50, (4, 5)), rng.uniform(0.5, 2, 8)
    got = run(ops.rope_multi, x, pos, factors, n_dims=8, sections=sections, mode="vision")
    assert_close_to_largest(got, rotate_by_loops(x, pos, sections, 8, "vision", factors=factors))


@pytest.mark.parametrize("mode", ["mrope", "imrope"])
def test_planes_that_are_equal_make_rope_multi_plain_neox(mode, rng):
    x, pos, factors = rng.normal(size=(2, 5, 3, 24)), rng.integers(0, 90, (2, 5)), rng.uniform(0.5, 2, 8)
    four = np.repeat(pos[:, None], 4, axis=1)
    common = {"n_dims": 16, "offset": 4, **YARN}
    got = run(ops.rope_multi, x, four, factors, sections=(3, 3, 2, 0), mode=mode, **common)
    assert_close_to_largest(got, run(ops.rope, x, pos, factors, mode="neox", **common))


def test_vision_sections_are_two_neox_ropes(rng):
    """With sections (n, n, 0, 0) the first quarter pairs with the third by rows, the second with the fourth."""
    x, pos = rng.normal(size=(5, 2, 16)), rng.integers(0, 50, (4, 5))
    got = run(ops.rope_multi, x, pos, n_dims=8, sections=(4, 4, 0, 0), mode="vision")
    for plane, start in enumerate((0, 4)):
        part = [*range(start, start + 4), *range(start + 8, start + 12)]
        assert_close_to_largest(got[..., part], run(ops.rope, x[..., part], pos[plane], n_dims=8, mode="neox"))


@pytest.mark.parametrize("mode", ["normal", "neox"])
def test_an_offset_turns_a_window(mode, rng):
    x, pos = rng.normal(size=(5, 2, 20)), rng.integers(0, 50, 5)
    got = run(ops.rope, x, pos, n_dims=8, mode=mode, offset=6, **YARN)
    want = x.copy()
    want[..., 6:14] = run(ops.rope, x[..., 6:14], pos, n_dims=8, mode=mode, **YARN)
    assert_close_to_largest(got, want)


def test_rope_keeps_lengths_and_sees_only_distances(rng):
    q, k = rng.normal(size=(1, 1, 16)), rng.normal(size=(1, 1, 16))

    def score(*at):
        a, b = (
            run(ops.rope_multi, x, np.full((4, 1), p), n_dims=16, sections=(3, 3, 2, 0))
            for x, p in zip((q, k), at, strict=True)
        )
        return np.sum(a * b)

    assert_close_to_largest(score(7, 3), score(104, 100))
    assert_close_to_largest(score(9, 9), np.sum(q * k))


# --------------------------------------------------------------------------------------------------- attention


def attended_by_loops(q, k, v, mask, sinks, scale, slopes, mask_heads):
    tokens, heads, _ = q.shape
    out = np.zeros((tokens, heads, v.shape[-1]))
    for t, h in product(range(tokens), range(heads)):
        kv = h // (heads // k.shape[1])
        m = mask[h % mask.shape[0]] if mask_heads == "tiled" else mask
        e = [math.exp(scale * q[t, h] @ k[s, kv] + slopes[h] * m[t, s]) for s in range(k.shape[0])]
        out[t, h] = sum(w * v[s, kv] for s, w in enumerate(e)) / (sum(e) + math.exp(sinks[h]))
    return out


@pytest.mark.parametrize("masks", [1, 2, 3, 6])
@pytest.mark.parametrize("bias", [0.0, 4.0])
def test_attention_with_a_mask_per_head(masks, bias, rng):
    q, k, v = (rng.normal(size=s) for s in ((3, 6, 8), (7, 2, 8), (7, 2, 5)))
    mask, sinks = rng.normal(size=(masks, 3, 7)), rng.normal(size=6)
    slopes = [2 ** (-bias * (i + 1) / 4) if i < 4 else 2 ** (-bias / 2 * (2 * (i - 4) + 1) / 4) for i in range(6)]
    slopes = slopes if bias else [1.0] * 6
    attrs = {"scale": 0.3, "max_bias": bias}
    got = run(ops.attention, q, k, v, mask, sinks, mask_heads="tiled", **attrs)
    assert_close_to_largest(got, attended_by_loops(q, k, v, mask, sinks, 0.3, slopes, "tiled"))
    if masks == 6:
        assert_close_to_largest(got, run(ops.attention, q, k, v, mask, sinks, mask_heads="each", **attrs))
    if masks == 1:
        assert_close_to_largest(got, run(ops.attention, q, k, v, mask[0], sinks, **attrs))


def test_a_query_that_sees_nothing_attends_to_nothing(rng):
    q, k, v = (rng.normal(size=s) for s in ((2, 2, 4), (3, 1, 4), (3, 1, 6)))
    mask = np.array([[-np.inf] * 3, [0.0, -np.inf, -np.inf]])
    got = run(ops.attention, q, k, v, mask, scale=1.0)
    assert_close_to_largest(got[0], np.zeros((2, 6)))
    assert_close_to_largest(got[1], np.tile(v[0], (2, 1)))


def test_heads_with_slopes_or_tiled_masks_stay_on_one_device():
    assert ops.attention.unsharded_dimensions({"max_bias": 0.0, "mask_heads": "each"}) == ()
    assert ops.attention.unsharded_dimensions({"max_bias": 8.0, "mask_heads": "one"}) == ("kv_heads", "query_heads")
    assert ops.attention.unsharded_dimensions({"max_bias": 0.0, "mask_heads": "tiled"}) == ("kv_heads", "query_heads")


# ---------------------------------------------------------------------------------------------------- DeepSeek


def test_the_lightning_indexer_score_by_score(rng):
    q, k = rng.normal(size=(2, 3, 4, 8)), rng.normal(size=(2, 5, 8))
    weights, mask = rng.normal(size=(2, 3, 4)), rng.normal(size=(1, 3, 5))
    mask[0, 1, 2] = -np.inf
    got = run(ops.lightning_indexer, q, k, weights, mask)
    for b, t, s in product(range(2), range(3), range(5)):
        want = sum(max(q[b, t, h] @ k[b, s], 0.0) * weights[b, t, h] for h in range(4)) + mask[0, t, s]
        assert got[b, t, s] == pytest.approx(want, abs=1e-12)


def test_hyper_connections_by_hand():
    """Two streams, one pass: softmax over `to`, then columns divided by their sums over `from`."""
    mixes = np.array([[9.0, 9.0, 9.0, 9.0, 0.0, math.log(3.0), 0.0, 0.0]])
    got = run(ops.dsv4_hc_comb, mixes, np.array([7.0, 7.0, 1.0]), np.zeros(8), n_iter=1, eps=0.0)
    assert_close_to_largest(got, [[[1 / 3, 3 / 5], [2 / 3, 2 / 5]]])
    residual, comb = np.array([[[1.0], [10.0]]]), np.array([[[1.0, 2.0], [3.0, 4.0]]])
    assert_close_to_largest(
        run(ops.dsv4_hc_post, np.array([[5.0]]), residual, np.array([[1.0, 2.0]]), comb), [[[36.0], [52.0]]]
    )
    assert_close_to_largest(
        run(ops.dsv4_hc_post, np.array([[5.0]]), residual, np.array([[1.0, 2.0]])), [[[6.0], [20.0]]]
    )
    assert_close_to_largest(run(ops.dsv4_hc_pre, residual, np.array([[2.0, 3.0]])), [[32.0]])
    assert_close_to_largest(run(ops.dsv4_hc_pre, residual, np.zeros((1, 2, 1)), gated=True, scale=4.0), [[22.0]])


def test_streams_mix_doubly_stochastically_after_many_iterations(rng):
    got = run(
        ops.dsv4_hc_comb, rng.normal(size=(7, 24)), rng.normal(size=3), rng.normal(size=24), n_iter=200, eps=1e-14
    )
    np.testing.assert_allclose(got.sum(-1), 1.0, atol=1e-10)
    np.testing.assert_allclose(got.sum(-2), 1.0, atol=1e-10)


def test_hyper_connections_element_by_element(rng):
    mixes, scale, base, eps = rng.normal(size=(3, 24)), rng.normal(size=3), rng.normal(size=24), 0.01
    got = run(ops.dsv4_hc_comb, mixes, scale, base, n_iter=3, eps=eps)
    for t in range(3):
        m = [[math.exp(mixes[t, 8 + i * 4 + j] * scale[2] + base[8 + i * 4 + j]) for j in range(4)] for i in range(4)]
        m = [[x / sum(row) + eps for x in row] for row in m]
        for i in range(3):
            if i:
                m = [[x / (sum(row) + eps) for x in row] for row in m]
            sums = [sum(row[j] for row in m) + eps for j in range(4)]
            m = [[x / s for x, s in zip(row, sums, strict=True)] for row in m]
        assert_close_to_largest(got[t], m)
