"""Collectives of the devices of one process run in compiled code."""

from __future__ import annotations

import numpy as np
import pytest

from hocket import ops
from hocket.distributed.thread_group import ThreadGroupMember
from hocket.graph import Graph, input, weight
from hocket.scheduler import load, plan_for_group
from hocket.scheduler.costs.hardware import Hardware

from ...given.plans.grouped import group_of

QUICK = Hardware(flops=1e12, bandwidth=1e9, launch=1e-6, link_bandwidth=1e12, link_latency=1e-9)
"""Devices between which a collective takes hardly any time."""


@pytest.fixture(autouse=True)
def _compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_fallback(*_: object) -> None:
        raise AssertionError("a collective left compiled code")

    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        monkeypatch.setattr(ThreadGroupMember, name, refuse_fallback)


def compare(graph: Graph, shares: tuple[float, ...], collectives: list[str], **values: object) -> None:
    """Check that several devices give the results of one, and run these `collectives`."""
    dice = np.random.default_rng(3)
    weights = {v.node.name: dice.normal(size=v.shape).astype(np.float32) for v in graph.weights}
    feed = {v.node.name: dice.normal(size=v.shape).astype(np.float32) for v in graph.inputs}
    plan = plan_for_group(graph, group_of(len(shares), "cpu"), tensor_split=shares, **values)
    assert [n.op for n in plan.device_plans[0].graph.nodes if n.op.startswith(("all_", "reduce_sc"))] == collectives
    (want,) = load(plan_for_group(graph, group_of(1, "cpu")), weights).run(feed).values()
    run = load(plan, weights)
    for _ in range(3):
        (got,) = run.run(feed).values()
        assert np.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shares", [(1, 1), (3, 1, 2), (1, 0, 1)])
@pytest.mark.parametrize("rows", [1, 5])
def test_columns_of_rows_are_gathered(rows: int, shares: tuple[float, ...]):
    w = weight("w", (50, 24))
    graph = Graph({"y": ops.rms_norm(ops.mul_mat(w, input("x", (rows, 24))))})
    compare(graph, shares, ["all_gather"], choose=lambda g, f: frozenset(f.axes_of(w)[0][0]))


@pytest.mark.parametrize("shares", [(1, 1), (3, 1, 2), (1, 0, 1)])
def test_rows_of_sums_are_scattered_and_gathered(shares: tuple[float, ...]):
    x = input("x", (24, 20))
    for i in range(3):
        y = ops.silu(ops.mul_mat(weight(f"{i}.up", (64, 20)), ops.rms_norm(x)))
        x = x + ops.mul_mat(weight(f"{i}.down", (20, 64)), y)
    graph = Graph({"y": ops.mul_mat(weight("output", (40, 20)), ops.rms_norm(x))})
    compare(graph, shares, ["reduce_scatter", "all_gather"] * 3, split_mode="tensor", hardware=QUICK)
