"""Rows of sums distributed over the devices, which work on their own rows instead of on all."""

from __future__ import annotations

import numpy as np
import pytest

from hocket import ops
from hocket.graph import Graph, Value, input, weight
from hocket.scheduler import Plan, load, plan_for_group
from hocket.scheduler.costs.hardware import Hardware

from ...given.plans.grouped import group_of

QUICK = Hardware(flops=1e12, bandwidth=1e9, launch=1e-6, link_bandwidth=1e12, link_latency=1e-9)
"""Devices between which a collective takes hardly any time."""
LATE = Hardware(flops=1e9, bandwidth=1e9, launch=1e-6, link_bandwidth=1e12, link_latency=2e-4)
"""Devices between which every collective takes long, however little it sends."""
WIDTH, INNER, LAYERS = 16, 64, 4


def decoder(rows: int) -> Graph:
    """Residual layers of a gated unit, as decoders have them."""
    x: Value = input("x", (rows, WIDTH))
    for i in range(LAYERS):
        up, gate = (weight(f"{i}.{name}", (INNER, WIDTH)) for name in ("up", "gate"))
        y = ops.rms_norm(x) * weight(f"{i}.norm", (WIDTH,))
        inner = ops.swiglu(ops.mul_mat(gate, y), ops.mul_mat(up, y))
        x = x + ops.mul_mat(weight(f"{i}.down", (WIDTH, INNER)), inner)
    return Graph({"y": ops.mul_mat(weight("output", (40, WIDTH)), ops.rms_norm(x))})


def collectives_of(plan: Plan) -> list[str]:
    return [n.op for n in plan.device_plans[0].graph.nodes if n.op in ("all_reduce", "all_gather", "reduce_scatter")]


def plan_sharded(rows: int, devices: int, hardware: Hardware, shares: tuple[float, ...] = ()) -> Plan:
    group = group_of(devices, "numpy")
    return plan_for_group(decoder(rows), group, split_mode="tensor", tensor_split=shares, hardware=hardware)


def result(plan: Plan) -> np.ndarray:
    dice = np.random.default_rng(5)
    weights = {v.node.name: dice.normal(size=v.shape) for v in plan.graph.weights}
    return load(plan, weights).run({v.node.name: dice.normal(size=v.shape) for v in plan.graph.inputs})["y"]


@pytest.mark.parametrize(("devices", "shares"), [(2, ()), (3, ()), (4, (3, 1, 2, 2))])
def test_rows_of_sums_are_distributed_where_that_is_faster(devices: int, shares: tuple[float, ...]):
    plan, alone = plan_sharded(24, devices, QUICK, shares), plan_sharded(24, 1, QUICK)
    assert collectives_of(plan) == ["reduce_scatter", "all_gather"] * LAYERS
    assert np.allclose(result(plan), result(alone), rtol=1e-5, atol=1e-5)
    assert "a sum over the devices, of which each keeps its own rows" in plan.explain()


@pytest.mark.parametrize(("rows", "hardware"), [(1, QUICK), (3, QUICK), (24, LATE)])
def test_sums_are_whole_where_devices_would_have_no_row_or_a_late_collective(rows: int, hardware: Hardware):
    plan = plan_sharded(rows, 4, hardware)
    assert collectives_of(plan) == ["all_reduce"] * LAYERS


def test_rows_are_distributed_within_the_stages_of_layers():
    group = group_of(4, "numpy")
    plan = plan_for_group(decoder(24), group, split_mode="layer,tensor", hardware=QUICK)
    assert "reduce_scatter" in collectives_of(plan)
    assert np.allclose(result(plan), result(plan_sharded(24, 1, QUICK)), rtol=1e-5, atol=1e-5)


def test_another_step_over_the_same_weights_deals_its_own_rows():
    first = plan_sharded(1, 3, QUICK)
    longer = plan_for_group(decoder(24), group_of(3, "numpy"), like=first, hardware=QUICK)
    assert "reduce_scatter" in collectives_of(longer)
    assert longer.leaves == first.leaves
    assert np.allclose(result(longer), result(plan_sharded(24, 1, QUICK)), rtol=1e-5, atol=1e-5)
