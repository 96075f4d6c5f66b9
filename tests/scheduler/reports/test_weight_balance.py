"""The report of `explain` about uneven weights: it adds up, and it is in the plan."""

from __future__ import annotations

import pytest

from hocket import ops
from hocket.backends.base import find_devices
from hocket.graph import Graph, input, weight
from hocket.scheduler import plan, plan_for_group
from hocket.scheduler.ir.formatting import format_bytes
from hocket.scheduler.ir.layout import Local, Replicate, Shard
from hocket.scheduler.reports.weight_balance import BALANCE_TOLERANCE, find_weight_imbalance

from ...given.models.goldens import decode_graph


def layer(rows=60, heads=3):
    """A table that is looked up, heads, and a norm."""
    x = ops.get_rows(weight("table", (rows, 12)), input("numbers", (4,), "i32"))
    x = ops.mul(ops.rms_norm(x, eps=1e-6), weight("norm", (12,)))
    wide = ops.reshape(ops.mul_mat(weight("into", (heads * 400, 12)), x), shape=(4, heads, 400))
    wide = ops.reshape(ops.softmax(wide), shape=(4, heads * 400))
    return Graph({"y": ops.mul_mat(weight("out", (12, heads * 400)), wide)})


def by_heads(graph, factors):
    """The factor of the heads, as the caller's choice: so small a graph is not worth it."""
    (heads,) = factors.axes_of(graph.weights[0])[1][0][:1]
    return {heads}


def plan_sharded(graph, **options):
    group = find_devices(["cpu:0", "cpu:1"], 1)
    return plan_for_group(graph, group, split_mode="tensor", choose=lambda g, f: frozenset(by_heads(g, f)), **options)


@pytest.mark.nightly(cases=7)
@pytest.mark.parametrize(
    ("split_mode", "devices"), [("tensor", 2), ("tensor", 3), ("tensor", 4), ("layer", 3), ("layer,tensor", 4)]
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen35", "qwen3moe"])
def test_each_device_has_its_share_or_a_reason_is_reported_to_the_byte(name, split_mode, devices):
    new_plan = plan(decode_graph(name), ",".join(f"cpu:{i}" for i in range(devices)), split_mode=split_mode)
    weight_bytes = [device_plan.count_memory_bytes_by_kind()["weight"] for device_plan in new_plan.device_plans]
    reported, share = (
        find_weight_imbalance(new_plan),
        plan(new_plan.graph, "cpu:0").count_memory_bytes_by_kind()["weight"] / devices,
    )
    if reported is None:
        assert all(abs(n - share) <= BALANCE_TOLERANCE * share for n in weight_bytes)
        return
    assert list(reported.stored_bytes) == weight_bytes
    assert list(reported.share_bytes) == pytest.approx([share] * devices)
    fullest = max(weight_bytes)
    assert sum(cause.excess_bytes for cause in reported.causes) == pytest.approx(fullest - share)
    own = {
        b.name: b.nbytes
        for b in new_plan.device_plans[weight_bytes.index(fullest)].program.buffers
        if b.kind == "weight"
    }
    for cause in reported.causes:
        assert cause.nbytes == sum(own.get(name, 0) for name in cause.weights)
        layouts = {type(new_plan.leaves[name]) for name in cause.weights}
        begins = "whole on each device: " if layouts == {Replicate} else "cut along axis " if layouts == {Shard} else ""
        assert cause.reason.startswith(begins or "whole on ")
        assert begins or layouts == {Local}
    text = new_plan.explain()
    assert all(line in text for line in reported.format_lines())
    assert all(f"{format_bytes(n)} of weights" in reported.format_lines()[0] for n in weight_bytes)


def test_reasons_are_those_of_the_plan():
    lines = plan_sharded(layer()).explain().splitlines()
    at = next(i for i, line in enumerate(lines) if "an even share" in line)
    assert lines[at].startswith("cpu:0 holds 77.9 KiB of weights, 35% more than an even share, 57.7 KiB; cpu:1 holds ")
    assert [" ".join(line.split()) for line in lines[at + 1 : at + 5]] == [
        "+9.4 KiB %out (37.5 KiB) cut along axis 1, 3 pieces on 2 devices: 2 and 1",
        "+9.4 KiB %into (37.5 KiB) cut along axis 0, 3 pieces on 2 devices: 2 and 1",
        "+1.4 KiB %table (2.8 KiB) whole on each device: get_rows reads it whole",
        "+24 B %norm (48 B) whole on each device: a cut along axis 0 would cut %into twice",
    ]


def test_shares_that_were_asked_for_count_as_even():
    text = plan_sharded(layer(heads=4), tensor_split=(3, 1)).explain()
    assert "cpu:0 holds 115.4 KiB of weights, 1% more than the share asked for, 114.6 KiB; cpu:1 holds 40.4 KiB" in text


def test_nothing_is_reported_where_there_is_nothing_to_share():
    assert find_weight_imbalance(plan(layer(), "cpu:0")) is None
    assert (
        find_weight_imbalance(plan(Graph({"y": ops.silu(input("x", (8,)))}), "cpu:0,cpu:1", split_mode="tensor"))
        is None
    )
