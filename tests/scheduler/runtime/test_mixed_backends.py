"""Devices of several backends in one plan: they round differently, and still compute one thing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import Device, find_device
from hocket.backends.null.backend import NullBackend
from hocket.backends.reference.backend import ReferenceBackend
from hocket.distributed.thread_group import ThreadGroup
from hocket.frontends.gguf import open_gguf
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import load_model
from hocket.graph import DType, Graph, Spec, input, weight
from hocket.scheduler import load, plan, plan_for_group

from ...given.graphs.random_graphs import seeded_graph
from ...given.models.goldens import FLOAT_CACHES, nmse, path_of, tokens_of
from ...given.plans.faults import SLOW, decoder
from ...given.plans.grouped import devices, equal_to_one
from ...given.waits import WAIT_SECONDS

MODES = ("none", "layer", "tensor", "auto")


class Narrow(ReferenceBackend):
    """A third party's devices, which keep floats in half the bits."""

    name = "narrow"

    def storage_spec(self, spec, kind=""):
        return Spec(spec.shape, spec.dtype if spec.dtype.is_integer else DType.F32)


MIXED = ("cpu:0", "reference:0", "cpu:1")


@pytest.mark.nightly(cases=4)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "qwen35", "qwen3moe"])
def test_a_model_on_mixed_backends_gives_the_logits_of_one_device(name, mode):
    model = load_model(open_gguf(path_of(name)))
    tokens = tokens_of(name)
    one = Session(model, on=DeviceGroup(devices=("reference:0",), **FLOAT_CACHES)).evaluate(
        [tokens], every_position=True
    )[0]
    many = Session(model, on=DeviceGroup(devices=MIXED, split_mode=mode, **FLOAT_CACHES))
    parts = [tokens[: len(tokens) // 2], *([t] for t in tokens[len(tokens) // 2 :])]
    stepped = np.concatenate([many.evaluate([part], every_position=True)[0] for part in parts])
    assert nmse(stepped, one) <= 1e-10


@pytest.mark.parametrize("mode", ["tensor", "auto"])
def test_of_mixed_backends_one_device_makes_a_discrete_choice(mode):
    scores = ops.mul_mat(weight("router", (6, 4)), input("x", (2, 4)), name="scores")
    chosen = ops.get_rows(weight("table", (6, 3)), ops.reshape(ops.top_k(scores, k=2, name="chosen"), shape=(4,)))
    graph = Graph({"y": chosen, "s": scores})
    mixed_plan = plan(graph, MIXED, split_mode=mode)
    having = [
        device_plan for device_plan in mixed_plan.device_plans if any(n.op == "top_k" for n in device_plan.graph.nodes)
    ]
    assert len(having) == 1
    if mode == "tensor":
        assert "backends are mixed and round differently" in mixed_plan.explain()
    same_backend_plan = plan(graph, devices(3), split_mode="tensor")
    assert all(any(n.op == "top_k" for n in device_plan.graph.nodes) for device_plan in same_backend_plan.device_plans)


def test_a_tie_for_one_backend_is_no_tie_for_another_and_the_group_still_agrees():
    """In float32 both scores are 1, in float64 the second is larger; every device must read the same rows."""
    x, w = input("x", (1, 2)), weight("w", (2, 2))
    ids = ops.reshape(ops.top_k(ops.mul_mat(w, x), k=1), shape=(1,))
    rows = ops.get_rows(weight("table", (2, 8)), ids)
    graph = Graph({"y": ops.mul_mat(weight("out", (8, 8)), rows)})
    data = {"w": [[1, 0], [1, 1e-3]], "table": [[1] * 8, [2] * 8], "out": np.eye(8)}
    plan = plan_for_group(graph, [find_device(n) for n in ("cpu:0", "reference:0")], split_mode="tensor", hardware=SLOW)
    out = load(plan, data).run({"x": [[1, 1e-6]]})["y"]
    assert len(np.unique(out)) == 1


@pytest.mark.parametrize("seed", range(6000, 6030))
def test_a_random_graph_on_mixed_backends_equals_one_device(seed):
    graph, dice = seeded_graph(seed), random.Random(seed)
    group = [find_device("reference:0"), (Narrow(), Device("narrow", 0)), find_device("reference:1")]
    mode = dice.choice(["layer", "tensor", "cut"])
    plan = equal_to_one(graph, group, seed, mode=mode, tolerance=1e-2 if _rounds(graph) else 1e-5)
    assert len({type(device_plan.backend) for device_plan in plan.device_plans}) == 2


def _rounds(graph):
    """A cast to few bits takes a number of float32 and the same of float64 to neighbours."""
    return any(n.op == "cast" for n in graph.nodes)


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_real_and_null_devices_are_planned_together(mode):
    null = NullBackend()
    plan = plan_for_group(decoder(), [find_device("cpu:0"), (null, null.device(0))], split_mode=mode)
    assert {device_plan.backend.name for device_plan in plan.device_plans} == {"cpu", "null"}


def _run_threads(group, run):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(run, range(len(group))))


def test_backends_that_keep_other_dtypes_agree_in_every_collective():
    """Check that sent values are rounded to the narrowest dtype in the group, so that all compute the same numbers."""
    rng, dtypes = np.random.default_rng(0), (np.float32, np.float64, np.float32)
    sources = [rng.standard_normal((4, 6)).astype(d) for d in dtypes]
    want = (sources[0] + sources[1].astype(np.float32)) + sources[2]
    threads = ThreadGroup(3, WAIT_SECONDS)

    def reduce(rank):
        into = np.empty((4, 6), dtypes[rank])
        threads.member(rank).all_reduce(sources[rank].copy(), into, np.empty_like(into), 0)
        return into

    def scatter(rank):
        into = np.empty((4, 6), dtypes[rank])
        threads.member(rank).reduce_scatter(sources[rank], into, [(slice(None), slice(None))], 1)
        return into

    for out in (*_run_threads(dtypes, reduce), *_run_threads(dtypes, scatter)):
        np.testing.assert_array_equal(out, want)

    def gather(rank):
        into = np.empty((12, 6), dtypes[rank])
        parts = [[(slice(4 * d, 4 * d + 4), slice(None))] for d in range(3)]
        threads.member(rank).all_gather(sources[rank], into, parts, 2)
        return into

    for out in _run_threads(dtypes, gather):
        np.testing.assert_array_equal(out, np.concatenate(sources).astype(np.float32))
