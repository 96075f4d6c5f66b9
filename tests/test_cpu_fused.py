"""Chains of instructions with one kernel: the bits of the single ones, and only where nobody else reads between."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.numpy import replay
from hocket.backends.numpy.cpu import CpuBackend

RNG = np.random.default_rng(11)
Values = Mapping[str, np.ndarray]


def loaded(graph: hocket.Graph, values: Values, backend: str | int):
    """On the CPU backend with so many threads, or on another."""
    chosen = CpuBackend(backend) if isinstance(backend, int) else hocket.backends.find(backend)[0]
    return hocket.load(hocket.scheduler.plan_for(graph, [(chosen, chosen.device(0))]), values)


def kernels(run: object) -> list[str]:
    """The kernels of the newest program, in order; what runs in Python is one of them."""
    newest = [r for r in gc.get_objects() if type(r) is replay.Replay][-1]
    segments = [(w.steps if type(w) is replay.Segment else [None]) for _, w in newest.work]
    return ["Python" if step is None else step.kernel.name for steps in segments for step in steps]


def drawn(*shape: int) -> np.ndarray:
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
    inputs = {"x": drawn(*x.shape), "pos": RNG.integers(0, 999, pos.shape).astype(np.int32)}
    run = loaded(graph, values, threads)
    assert not {"Python"} & {*kernels(run)}
    wanted = loaded(graph, values, "numpy:0").run(inputs)["y"]
    np.testing.assert_allclose(run.run(inputs)["y"], wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("mode", ["normal", "neox"])
@pytest.mark.parametrize("pairs", [1, 7, 16, 17, 40])
def test_a_rotation_in_place_leaves_what_does_not_turn(mode: str, pairs: int):
    x, pos = hocket.input("x", (5, 3, 90)), hocket.input("pos", (5,), "i32")
    graph = hocket.Graph({"y": ops.rope(ops.neg(x), pos, n_dims=2 * pairs, offset=4, mode=mode)})
    inputs = {"x": drawn(5, 3, 90), "pos": np.arange(5, dtype=np.int32)}
    got, wanted = (loaded(graph, {}, b).run(inputs)["y"] for b in (1, "numpy:0"))
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)
    assert np.array_equal(got[..., :4], -inputs["x"][..., :4])
    assert np.array_equal(got[..., 4 + 2 * pairs :], -inputs["x"][..., 4 + 2 * pairs :])
