"""Chains of instructions with one kernel: the bits of single kernels, fused only if no other node reads in between."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.cpu.execution import program_binding
from hocket.graph.dtypes import DType

from ...given.random_rows import random_rows

RNG = np.random.default_rng(11)
Values = Mapping[str, np.ndarray]


def load_on(graph: hocket.Graph, values: Values, backend: str | int):
    """Load a graph on the CPU backend with this thread count, or on another backend."""
    chosen = CpuBackend(backend) if isinstance(backend, int) else hocket.backends.find_device(backend)[0]
    return hocket.load(hocket.scheduler.plan_for_group(graph, [(chosen, chosen.device(0))]), values)


def random_array(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# ---------------------------------------------------------------------------------------------------- rotations

MULTI = {"sections": (3, 2, 2, 1), "base": 5e4}
ROTATIONS = {
    "normal": {"mode": "normal"},
    "neox": {"mode": "neox", "offset": 6},
    "yarn": {"mode": "neox", "freq_scale": 0.25, "ext_factor": 1.0, "attn_factor": 1.2, "original_context": 64},
    "mrope": {"mode": "mrope", **MULTI},
    "imrope": {"mode": "imrope", **MULTI},
    "vision": {"mode": "vision", "sections": (9, 8, 7, 12)},
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("attrs", ROTATIONS.values(), ids=ROTATIONS)
def test_every_rotation_is_compiled_and_computes_what_numpy_does(attrs: dict, factors: bool, threads: int):
    multi = "sections" in attrs
    x, pos = hocket.input("x", (2, 41, 3, 72)), hocket.input("pos", (2, *([4] * multi), 41), "i32")
    divisors = hocket.weight("f", (40,)) if factors else None
    n_dims = 36 if attrs["mode"] == "vision" else 66
    y = (ops.rope_multi if multi else ops.rope)(x, pos, divisors, n_dims=n_dims, **attrs)
    graph, values = hocket.Graph({"y": y}), {"f": RNG.uniform(1, 8, 40).astype(np.float32)} if factors else {}
    inputs = {"x": random_array(*x.shape), "pos": RNG.integers(0, 999, pos.shape).astype(np.int32)}
    run = load_on(graph, values, threads)
    assert "NumPy" not in run.list_kernel_names()
    expected = load_on(graph, values, "numpy:0").run(inputs)["y"]
    np.testing.assert_allclose(run.run(inputs)["y"], expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("mode", ["normal", "neox"])
@pytest.mark.parametrize("pairs", [1, 7, 16, 17, 40])
def test_a_rotation_in_place_leaves_what_does_not_turn(mode: str, pairs: int):
    x, pos = hocket.input("x", (5, 3, 90)), hocket.input("pos", (5,), "i32")
    graph = hocket.Graph({"y": ops.rope(ops.neg(x), pos, n_dims=2 * pairs, offset=4, mode=mode)})
    inputs = {"x": random_array(5, 3, 90), "pos": np.arange(5, dtype=np.int32)}
    got, expected = (load_on(graph, {}, b).run(inputs)["y"] for b in (1, "numpy:0"))
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)
    assert np.array_equal(got[..., :4], -inputs["x"][..., :4])
    assert np.array_equal(got[..., 4 + 2 * pairs :], -inputs["x"][..., 4 + 2 * pairs :])


def head(shape: tuple[int, int, int], n_dims: int, mode: str, seen: str = "") -> hocket.Graph:
    """Build the ops on a head of queries; `seen` names the value that another node reads, too."""
    rows, heads, size = shape
    x = ops.mul_mat(hocket.weight("w", (heads * size, 32), "q8_0"), hocket.input("x", (rows, 32)))
    x = ops.reshape(x, shape=(1, *shape))
    normed = ops.rms_norm(x, eps=1e-6)
    scaled = ops.mul(normed, hocket.weight("scale", (size,)))
    y = ops.rope(scaled, hocket.input("pos", (1, rows), "i32"), n_dims=n_dims, mode=mode)
    others = {"x": x, "normed": normed, "scaled": scaled}
    return hocket.Graph({"y": y, **({"seen": ops.neg(others[seen])} if seen else {})})


@pytest.mark.long
@pytest.mark.parametrize("seen", ["", "x", "normed", "scaled"])
@pytest.mark.parametrize("mode", ["normal", "neox"])
@pytest.mark.parametrize(("shape", "n_dims"), [((1, 4, 64), 64), ((1, 3, 48), 32), ((37, 2, 80), 66), ((9, 5, 16), 6)])
def test_a_head_is_normed_and_rotated_to_the_same_bits_by_one_kernel(
    shape: tuple[int, int, int], n_dims: int, mode: str, seen: str, monkeypatch
):
    graph = head(shape, n_dims, mode, seen)
    values = {"w": random_rows(DType.Q8_0, shape[1] * shape[2], 32, RNG), "scale": random_array(shape[2])}
    inputs = {"x": random_array(shape[0], 32), "pos": RNG.integers(0, 99, (1, shape[0])).astype(np.int32)}
    runs = [load_on(graph, values, threads) for threads in (1, 2, 3)]
    monkeypatch.setattr(program_binding, "FUSED", {})
    single = load_on(graph, values, 1).run(inputs)
    for run in runs:
        one = any(name.startswith("rope.scale_and_rotate") for name in run.list_kernel_names())
        assert one == (seen in ("", "x"))
        outputs = run.run(inputs)
        assert all(np.array_equal(outputs[name], single[name]) for name in single)


# --------------------------------------------------------------------------------------------------- delta layers


SIZE, CHANNELS = 32, 8 * 32


def delta_layer(sequences: int, tokens: int, seen: str = "") -> hocket.Graph:
    """A short convolution with its state, the norms of two heads each of queries and keys, and the delta rule.

    `seen` is the value that something else reads, too.
    """
    shape = (sequences, tokens)
    new = ops.neg(hocket.input("x", (*shape, CHANNELS)))
    ids, old = hocket.input("rows", (sequences, 3), "i32"), hocket.state("conv", (sequences, 3, CHANNELS))
    both = ops.concat(old, new, axis=1)
    mixed = ops.ssm_conv(both, hocket.weight("w", (CHANNELS, 4)))
    active = ops.silu(mixed)

    def heads(start: int, count: int) -> hocket.Value:
        part = ops.slice_(active, axis=-1, start=start * SIZE, stop=(start + count) * SIZE)
        return ops.reshape(part, shape=(*shape, count, SIZE))

    q, k = (ops.l2_norm(heads(start, 2), eps=1e-5) for start in (0, 2))
    g, beta, state = (
        hocket.input("g", (*shape, 4, 1)),
        hocket.input("beta", (*shape, 4)),
        hocket.state("delta", (sequences, 4, SIZE, SIZE)),
    )
    y, after = ops.gated_delta_net(q, k, heads(4, 4), g, beta, state)
    others = {"new": new, "both": both, "mixed": mixed, "active": active}
    outputs = {"y": y, **({"seen": ops.neg(others[seen])} if seen else {})}
    return hocket.Graph(outputs, {old: ops.get_rows(both, ids), state: after})


def run_twice(graph: hocket.Graph, threads: int) -> tuple[list[bytes], list[str]]:
    """Return the outputs and states of two runs in a row, and the kernels."""
    rng = np.random.default_rng(3)
    run = load_on(graph, {"w": rng.standard_normal((CHANNELS, 4)).astype(np.float32)}, threads)
    found, specs = [], {v.node.name: v.spec for v in graph.inputs}
    for _ in range(2):
        inputs = {n: rng.standard_normal(s.shape).astype(np.float32) for n, s in specs.items()}
        inputs["rows"] = rng.integers(0, specs["x"].shape[1] + 3, specs["rows"].shape).astype(np.int32)
        inputs["g"] = -np.abs(inputs["g"])
        found += [a.tobytes() for a in run.run(inputs).values()]
        found += [np.asarray(run.store.state(name)[...]).tobytes() for name in ("conv", "delta")]
    return found, run.list_kernel_names()


@pytest.mark.parametrize("seen", ["", "new", "both", "mixed", "active"])
@pytest.mark.parametrize("tokens", [1, 2, 8, 29])
@pytest.mark.parametrize("sequences", [1, 3])
def test_a_delta_layer_computes_the_same_bits_with_and_without_fused_kernels(
    sequences: int, tokens: int, seen: str, monkeypatch
):
    graph = delta_layer(sequences, tokens, seen)
    fused = {threads: run_twice(graph, threads) for threads in (1, 2, 5)}
    monkeypatch.setattr(program_binding, "FUSED", {})
    alone, single = run_twice(graph, 1)
    assert all(found == alone for found, _ in fused.values())
    for _, names in fused.values():
        one = "short_convolution.heads.l2_norm_added" in names
        assert one == (seen in ("", "new")), "the fused kernel keeps none of the other values"
        copies, alone_copies = (sum(n.startswith("rows.copy.") for n in some) for some in (names, single))
        assert copies == alone_copies - (2 if one else 1)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_that_is_none_leaves_the_state_of_a_convolution_as_it_was(threads: int):
    run = load_on(delta_layer(2, 40, "new"), {"w": random_array(CHANNELS, 4)}, threads)
    inputs = {"x": random_array(2, 40, CHANNELS), "g": -np.ones((2, 40, 4, 1)), "beta": np.ones((2, 40, 4))}
    assert "short_convolution.heads.l2_norm_added" in run.list_kernel_names()
    run.run({**inputs, "rows": np.array([[40, 41, 42], [0, 1, 2]])})
    before = [np.asarray(run.store.state(name)[...]).copy() for name in ("conv", "delta")]
    for bad in (-1, 43):
        with pytest.raises(hocket.BackendError, match=f"id {bad} names no row"):
            run.run({**inputs, "rows": np.array([[40, 41, 42], [0, 1, bad]])})
        after = [np.asarray(run.store.state(name)[...]) for name in ("conv", "delta")]
        assert all(np.array_equal(a, b) for a, b in zip(after, before, strict=True))
