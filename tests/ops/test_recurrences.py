"""Recurrences against hand-checked values, other formulations, and themselves in other portions."""

from __future__ import annotations

import math
import tracemalloc
from itertools import pairwise, product

import numpy as np
import pytest

from hocket import ops
from hocket.graph import Graph, Spec, input, parse_case, state
from hocket.scheduler import load, plan

from ..given.arrays import assert_close_to_largest


def run(op, *arrays, **attrs):
    """The reference, with defaults filled in."""
    results = op.run_reference(arrays, op.normalise_attributes(attrs))
    return results[0] if len(results) == 1 else results


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def legal_operands(op, text, rng):
    """Random operands of a case, within the ranges of the op, by name; and its attributes."""
    parts = parse_case(text)
    results = {}
    for name, spec in parts.items():
        if isinstance(spec, Spec):
            legal = op.ranges.get(name)
            results[name] = rng.uniform(legal.low, legal.high, spec.shape) if legal else rng.normal(size=spec.shape)
    return results, {k: v for k, v in parts.items() if not isinstance(v, Spec)}


DELTA = (
    "q=f32[{n}{t},2,8], k=f32[{n}{t},2,8], v=f32[{n}{t},6,5], g=f32[{n}{t},6,{g}], beta=f32[{n}{t},6],"
    " state=f32[{s}6,5,8]"
)
SCAN = (
    "x=f32[{n}{t},6,{e}], dt=f32[{n}{t},6], a=f32[6,{a}], b=f32[{n}{t},3,7], c=f32[{n}{t},3,7], state=f32[{s}6,{e},7]"
)
KEYED = "k=f32[2,{t},3,4], v=f32[2,{t},3,5], "
DELTA_KINDS = [(g, m) for g in (1, 8) for m in ("tiled", "interleaved")]
WITH_POOLS = [
    *((ops.gated_delta_net, DELTA.format(n="2,", s="2,", t="{t}", g=g) + f', heads="{m}"') for g, m in DELTA_KINDS),
    *((ops.ssm_scan, SCAN.format(n="2,", s="2,", t="{t}", e=e, a=a)) for e, a in ((1, 7), (5, 1))),
]
WKV6 = KEYED + "r=f32[2,{t},3,4], bonus=f32[3,4], decay=f32[2,{t},3,4], state=f32[2,3,4,5]"
WKV7 = KEYED + "r=f32[2,{t},3,4], decay=f32[2,{t},3,4], a=f32[2,{t},3,4], b=f32[2,{t},3,4], state=f32[2,3,5,4]"
GLA = KEYED + "q=f32[2,{t},3,4], g=f32[2,{t},3,4], state=f32[2,3,4,5]"
CASES = [
    *WITH_POOLS,
    *((ops.rwkv_wkv6, WKV6), (ops.rwkv_wkv7, WKV7), (ops.gated_linear_attn, GLA + ", scale=0.5")),
]


def part_of(op, operands, start, stop, state):
    """The operands of some tokens: operands with a token axis are sliced."""
    signature = next(iter(op.signatures.values()))
    token_axes = {
        o.name: [d.factors for d in o.dims].index(("t",)) - len(o.dims)
        for o in signature.operands
        if ("t",) in [d.factors for d in o.dims]
    }
    results = {
        n: np.moveaxis(np.moveaxis(x, token_axes[n], 0)[start:stop], 0, token_axes[n]) if n in token_axes else x
        for n, x in operands.items()
    }
    return [{**results, "state": state}.get(name) for name in op.operand_names]


@pytest.mark.parametrize(("op", "text"), CASES, ids=lambda x: x.name if isinstance(x, ops.Op) else "")
def test_token_by_token_equals_all_at_once(op, text, rng):
    operands, attrs = legal_operands(op, text.format(t=7), rng)
    attrs = op.normalise_attributes(attrs)
    whole, final = op.run_reference(part_of(op, operands, 0, 7, operands["state"]), attrs)
    for cuts in ((0, 1, 2, 3, 4, 5, 6, 7), (0, 3, 3, 7)):
        s, outs = operands["state"], []
        for start, stop in pairwise(cuts):
            out, s = op.run_reference(part_of(op, operands, start, stop, s), attrs)
            outs.append(out)
        assert_close_to_largest(np.concatenate(outs, axis=-3), whole)
        assert_close_to_largest(s, final)


@pytest.mark.parametrize(("op", "text"), CASES, ids=lambda x: x.name if isinstance(x, ops.Op) else "")
def test_a_recurrence_is_linear_in_its_input_and_state_together(op, text, rng):
    operands, attrs = legal_operands(op, text.format(t=4), rng)
    (joint,) = op.linear_operands(op.normalise_attributes(attrs))
    parts = {name: rng.normal(size=operands[name].shape) for name in joint.split("+")}

    def at(values):
        return op.run_reference(
            [{**operands, **values}.get(n) for n in op.operand_names], op.normalise_attributes(attrs)
        )

    summed = at({n: operands[n] + 2.0 * x for n, x in parts.items()})
    for got, one, two in zip(summed, at({}), at(parts), strict=True):
        assert_close_to_largest(got, one + 2.0 * two)


@pytest.mark.parametrize(("op", "text"), WITH_POOLS, ids=lambda x: x.name if isinstance(x, ops.Op) else "")
@pytest.mark.parametrize("tokens", [0, 1, 3, 5])
def test_snapshot_s_is_the_state_after_a_prefix(op, text, tokens, rng):
    operands, attrs = legal_operands(op, text.format(t=tokens), rng)
    out, snapshots = op.run_reference(
        part_of(op, operands, 0, tokens, operands["state"]), op.normalise_attributes({**attrs, "snapshots": 3})
    )
    assert snapshots.shape == (2, 3, *operands["state"].shape[1:])
    for s in range(3):
        prefix = (
            op.run_reference(part_of(op, operands, 0, tokens - s, operands["state"]), op.normalise_attributes(attrs))
            if s <= tokens
            else None
        )
        if s == 0:
            assert_close_to_largest(out, prefix[0])
        assert_close_to_largest(snapshots[:, s], prefix[1] if s == 0 or s < tokens else np.zeros_like(snapshots[:, s]))


@pytest.mark.parametrize(("op", "text"), WITH_POOLS, ids=lambda x: x.name if isinstance(x, ops.Op) else "")
@pytest.mark.parametrize("snapshots", [1, 3])
@pytest.mark.parametrize("tokens", [0, 2, 4])
def test_a_pool_is_gather_then_run_then_scatter(op, text, snapshots, tokens, rng):
    operands, attrs = legal_operands(op, text.format(t=tokens), rng)
    pool = rng.normal(size=(9, *operands["state"].shape[1:]))
    slots_in, slots_out = np.array([4, 7]), rng.permutation(9)[: 2 * snapshots].reshape(2, snapshots)
    attrs["snapshots"] = snapshots
    plain = op.run_reference(part_of(op, operands, 0, tokens, pool[slots_in]), op.normalise_attributes(attrs))
    operands["slots_in"] = slots_in
    read = op.run_reference(part_of(op, operands, 0, tokens, pool), op.normalise_attributes({**attrs, "pool": "read"}))
    for got, want in zip(read, plain, strict=True):
        assert_close_to_largest(got, want)
    operands["slots_out"] = slots_out[:, 0] if snapshots == 1 else slots_out
    out, new = op.run_reference(
        part_of(op, operands, 0, tokens, pool), op.normalise_attributes({**attrs, "pool": "update"})
    )
    want = pool.copy()
    for s in range(snapshots):
        if s < max(tokens, 1):
            want[slots_out[:, s]] = plain[1] if snapshots == 1 else plain[1][:, s]
    assert_close_to_largest(out, plain[0])
    assert_close_to_largest(new, want)


def test_sequences_of_a_pool_may_swap_rows(rng):
    """All reads come before all writes, in the reference and in the kernel, which writes into the pool itself."""
    operands, _ = legal_operands(ops.gated_delta_net, DELTA.format(n="2,", s="4,", t=3, g=1), rng)
    operands = {n: x.astype(np.float32) for n, x in operands.items()}
    leaves = {n: input(n, x.shape) for n, x in operands.items() if n != "state"}
    pool, reads, writes = state("pool", (4, 6, 5, 8)), input("in", (2,), "i32"), input("out", (2,), "i32")
    out, new = ops.gated_delta_net(**leaves, state=pool, slots_in=reads, slots_out=writes, pool="update")
    graph = Graph({"o": out}, {pool: new})
    program = load(plan(graph, "cpu:0"), {})
    slots = {"in": np.array([1, 2]), "out": np.array([2, 1])}
    want = {**operands, "pool": np.zeros((4, 6, 5, 8)), **slots}
    for _ in range(3):  # the pool of one run is the pool of the next
        got = program.run({n: operands[n] for n in leaves} | slots)["o"]
        outputs, states = ops.evaluate(graph, want)
        np.testing.assert_allclose(got, outputs["o"], rtol=1e-4, atol=1e-5)
        want["pool"] = states["pool"]
    assert np.any(states["pool"][1]), "the second and third runs began with what the first wrote"


def test_a_pool_is_updated_in_place_without_allocating():
    case = "q=f32[2,1,4,128], k=f32[2,1,4,128], v=f32[2,1,4,128], g=f32[2,1,4,1], beta=f32[2,1,4]"
    leaves = {n: input(n, s.shape) for n, s in parse_case(case).items()}
    pool, slots = state("pool", (16, 4, 128, 128)), input("slots", (2,), "i32")
    out, new = ops.gated_delta_net(**leaves, state=pool, slots_in=slots, slots_out=slots, pool="update")
    built = plan(Graph({"o": out}, {pool: new}), "cpu:0")
    program = load(built, {})
    bound = {n: np.full(v.shape, 0.1, np.float32) for n, v in leaves.items()} | {"slots": np.array([3, 5])}
    program.run(bound)
    tracemalloc.start()
    program.run(bound)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The buffers of NumPy have about 64 KiB for any size.
    assert peak < 128 * 1024, f"a state of one sequence is 256 KiB, but a run allocates {peak} bytes"


def test_traffic_of_a_pool_is_that_of_its_rows():
    small = DELTA.format(n="2,", s="{s}", t=1, g=1)
    sizes = []
    for slots in (9, 900):
        leaves = {n: input(n, s.shape) for n, s in parse_case(small.format(s=f"{slots},")).items()}
        i, o = input("i", (2,), "i32"), input("o", (2,), "i32")
        node = ops.gated_delta_net(**leaves, slots_in=i, slots_out=o, pool="update")[0].node
        sizes.append(ops.gated_delta_net.count_bytes(node))
    leaves = {n: input(n, s.shape) for n, s in parse_case(small.format(s="2,")).items()}
    plain = ops.gated_delta_net.count_bytes(ops.gated_delta_net(**leaves)[0].node)
    assert sizes == [plain + 16, plain + 16]


# ---------------------------------------------------------------------------------------------- the delta rule


def test_gated_delta_net_by_hand():
    """One head, keys and values of size one: S = e^g S; S += beta (v - S k) k; o = S q."""

    def one(x):
        return np.array(x).reshape(-1, 1, 1)

    half = math.log(0.5)
    out, new = run(ops.gated_delta_net, one([2.0, 1.0]), one([1.0, 2.0]), one([3.0, 1.0]), one([half, 0.0]),
                   np.array([[0.5], [1.0]]), one(4.0))  # fmt: skip
    assert_close_to_largest(
        out.ravel(), [5.0, -5.5]
    )  # S: 4 -> 2 -> 2 + 0.5 (3 - 2) = 2.5 -> 2.5 + (1 - 2.5 * 2) 2 = -5.5
    assert_close_to_largest(new, one(-5.5))


def compute_in_chunks(q, k, v, g, beta, s):
    """All tokens of one head at once: solve for the deltas, then two products.  S is [value, key], g per token."""
    total = np.cumsum(g)
    decay = np.tril(np.exp(np.minimum(total[:, None] - total, 0.0)))
    lower = np.tril(beta[:, None] * (k @ k.T) * decay, -1)
    right = beta[:, None] * (v - np.exp(total)[:, None] * (k @ s.T))
    delta = np.linalg.solve(np.eye(len(g)) + lower, right)
    out = np.exp(total)[:, None] * (q @ s.T) + (q @ k.T * decay) @ delta
    new = np.exp(total[-1]) * s + delta.T @ (k * np.exp(total[-1] - total)[:, None])
    return out / math.sqrt(q.shape[-1]), new


@pytest.mark.parametrize("heads", ["tiled", "interleaved"])
def test_the_delta_rule_equals_its_chunked_form(heads, rng):
    operands, _ = legal_operands(ops.gated_delta_net, DELTA.format(n="", s="", t=33, g=1), rng)
    q, k, v, g, beta, s = operands.values()
    out, new = run(ops.gated_delta_net, q, k, v, g, beta, s, heads=heads)
    for j in range(6):
        i = j % 2 if heads == "tiled" else j // 3
        want, state = compute_in_chunks(q[:, i], k[:, i], v[:, j], g[:, j, 0], beta[:, j], s[j])
        assert_close_to_largest(out[:, j], want)
        assert_close_to_largest(new[j], state)


def test_tiled_and_interleaved_heads_differ_by_a_permutation(rng):
    operands, _ = legal_operands(ops.gated_delta_net, DELTA.format(n="2,", s="2,", t=5, g=8), rng)
    q, k, v, g, beta, s = operands.values()
    order = np.arange(6).reshape(3, 2).T.ravel()  # value head (r, h) in the place of (h, r)
    tiled = run(ops.gated_delta_net, q, k, v, g, beta, s)
    moved = (v[..., order, :], g[..., order, :], beta[..., order], s[:, order])
    out, new = run(ops.gated_delta_net, q, k, *moved, heads="interleaved")
    assert_close_to_largest(out, tiled[0][..., order, :])
    assert_close_to_largest(new, tiled[1][:, order])


def test_a_decay_per_channel_that_is_equal_is_a_decay_per_head(rng):
    operands, _ = legal_operands(ops.gated_delta_net, DELTA.format(n="", s="", t=5, g=1), rng)
    q, k, v, g, beta, s = operands.values()
    per_head = run(ops.gated_delta_net, q, k, v, g, beta, s)
    per_channel = run(ops.gated_delta_net, q, k, v, np.repeat(g, 8, axis=-1), beta, s)
    for got, want in zip(per_channel, per_head, strict=True):
        assert_close_to_largest(got, want)


def test_gated_delta_net_equals_rwkv_7_with_its_parameters(rng):
    """S diag(w) + (S a) b^T + v k^T with w = e^g, a = -beta e^g k, b = k and value beta v is the gated delta rule."""
    operands, _ = legal_operands(ops.gated_delta_net, DELTA.format(n="", s="", t=9, g=8).replace(",2,8]", ",6,8]"), rng)
    q, k, v, g, beta, s = operands.values()
    strength = beta[..., None]
    want = run(ops.gated_delta_net, q, k, v, g, beta, s)
    got = run(ops.rwkv_wkv7, q / math.sqrt(8), np.exp(g), k, strength * v, -strength * np.exp(g) * k, k, s)
    assert_close_to_largest(got[0], want[0])
    assert_close_to_largest(got[1], want[1])


# ------------------------------------------------------------------------------------------- other recurrences


def test_rwkv_6_is_a_sum_over_earlier_tokens(rng):
    operands, _ = legal_operands(ops.rwkv_wkv6, WKV6.format(t=6), rng)
    k, v, r, bonus, decay, s = operands.values()
    out, new = run(ops.rwkv_wkv6, *operands.values())
    for b, t, h in product(range(2), range(6), range(3)):
        want = r[b, t, h] * np.prod(decay[b, :t, h], axis=0) @ s[b, h]
        want = want + (r[b, t, h] * bonus[h] @ k[b, t, h]) * v[b, t, h]
        for i in range(t):
            want = want + (r[b, t, h] * np.prod(decay[b, i + 1 : t, h], axis=0) @ k[b, i, h]) * v[b, i, h]
        assert_close_to_largest(out[b, t, h], want)
    left = np.stack([np.prod(decay[:, i + 1 :], axis=1) for i in range(6)], axis=1)
    assert_close_to_largest(new, np.prod(decay, axis=1)[..., None] * s + np.einsum("bthd,bthd,bthe->bhde", left, k, v))


def test_gated_linear_attention_is_a_sum_over_earlier_tokens(rng):
    operands, _ = legal_operands(ops.gated_linear_attn, GLA.format(t=6), rng)
    k, v, q, g, s = operands.values()
    out, new = run(ops.gated_linear_attn, *operands.values(), scale=0.5)
    for b, t, h in product(range(2), range(6), range(3)):
        want = q[b, t, h] * np.prod(g[b, : t + 1, h], axis=0) @ s[b, h]
        for i in range(t + 1):
            want = want + (q[b, t, h] * np.prod(g[b, i + 1 : t + 1, h], axis=0) @ k[b, i, h]) * v[b, i, h]
        assert_close_to_largest(out[b, t, h], 0.5 * want)
    assert new.shape == s.shape


def test_rwkv_7_element_by_element(rng):
    operands, _ = legal_operands(ops.rwkv_wkv7, WKV7.format(t=3), rng)
    k, v, r, decay, a, b, s = operands.values()
    out, new = run(ops.rwkv_wkv7, r, decay, k, v, a, b, s)
    s = s.copy()
    for n, t, h in product(range(2), range(3), range(3)):
        for i in range(5):
            read = sum(a[n, t, h, j] * s[n, h, i, j] for j in range(4))
            for j in range(4):
                s[n, h, i, j] = s[n, h, i, j] * decay[n, t, h, j] + v[n, t, h, i] * k[n, t, h, j] + read * b[n, t, h, j]
            assert_close_to_largest(out[n, t, h, i], sum(s[n, h, i, j] * r[n, t, h, j] for j in range(4)))
    assert_close_to_largest(new, s)


@pytest.mark.parametrize(("e", "a_size"), [(1, 7), (5, 1)], ids=["mamba-1", "mamba-2"])
def test_ssm_scan_element_by_element(e, a_size, rng):
    operands, _ = legal_operands(ops.ssm_scan, SCAN.format(n="", s="", t=4, e=e, a=a_size), rng)
    x, dt, a, b, c, s = operands.values()
    out, new = run(ops.ssm_scan, *operands.values())
    s = s.copy()
    for t, h, i in product(range(4), range(6), range(e)):
        size, y = math.log1p(math.exp(dt[t, h])), 0.0
        for j in range(7):
            s[h, i, j] = s[h, i, j] * math.exp(size * a[h, j % a_size]) + b[t, h // 2, j] * x[t, h, i] * size
            y += s[h, i, j] * c[t, h // 2, j]
        assert_close_to_largest(out[t, h, i], y)
    assert_close_to_largest(new, s)
