"""Hints state the effect of planning with the flag that they name."""

from __future__ import annotations

import re
from itertools import takewhile

import pytest

from hocket import ops
from hocket.backends.base import find_device
from hocket.graph import Graph, input, weight
from hocket.ops.collectives import COLLECTIVES, POINT_TO_POINT_OPS
from hocket.scheduler import plan, plan_for_group
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.reports.placement_hints import suggest_weights_for_single_device

from ...given.models.goldens import decode_graph

FAST = Hardware(link_latency=1e-6)
"""Fast links, so that small models are sharded for any placement: a hint does not predict other splits."""


def lookup(name="words", rows=500):
    """Build a lookup table, two layers, and a weight with the name of the table in its own."""
    x = ops.get_rows(weight(name, (rows, 64)), input("number", (3,), "i32"))
    for i in range(2):
        up = ops.silu(ops.mul_mat(weight(f"up.{i}", (256, 64)), x))
        x = ops.add(x, ops.mul_mat(weight(f"down.{i}", (64, 256)), up))
    return Graph({"y": ops.mul_mat(weight(f"{name}.last", (128, 64)), x)})


def weights(plan):
    return {
        str(device_plan.device): device_plan.count_memory_bytes_by_kind()["weight"] for device_plan in plan.device_plans
    }


def costs_by_node(plan):
    """The predicted seconds of each node, for each device."""
    pairs = zip(
        (device_plan.program.instructions for device_plan in plan.device_plans), plan.instruction_costs, strict=True
    )
    return [{i.node: prices.get_cost(at).seconds for at, i in enumerate(p)} for p, prices in pairs]


def seconds_in_order_of(plan, placed, to):
    """The seconds of `placed` if each device keeps the order of `plan`, and waits where `to` computes a node for it."""
    costs, parts = costs_by_node(placed), []
    for own, device_plan in zip(costs, plan.device_plans, strict=True):
        parts.append([0.0])
        for i in device_plan.program.instructions:
            seconds = own.get(i.node, costs[to].get(i.node, 0.0)) + own.get(f"{i.node}.from.{to}", 0.0)
            if i.op in COLLECTIVES and i.op not in POINT_TO_POINT_OPS:
                parts[-1] += [seconds, 0.0]
            else:
                parts[-1][-1] += seconds
    return sum(map(max, zip(*parts, strict=True)))


def seconds_before_message(plan, to):
    """The seconds of work of the busiest receiver before its first message."""
    before = []
    for device, (costs, device_plan) in enumerate(zip(costs_by_node(plan), plan.device_plans, strict=True)):
        nodes = [i.node for i in takewhile(lambda i: i.op != "receive", device_plan.program.instructions)]
        before += [sum(costs[node] for node in nodes)] if device != to else []
    return max(before)


@pytest.mark.nightly(cases=3)
@pytest.mark.parametrize("devices", ["cpu:0,cpu:1", "cpu:0,numpy:0,cpu:1"])
@pytest.mark.parametrize(
    "name", ["lookup", "llama", *(pytest.param(n, marks=pytest.mark.long()) for n in ("qwen3moe", "gemma3"))]
)
def test_a_hint_says_what_planning_so_gives(name, devices):
    graph, group = lookup() if name == "lookup" else decode_graph(name), [find_device(d) for d in devices.split(",")]
    plan = plan_for_group(graph, group, split_mode="tensor", hardware=FAST)
    advice = {hint.placement_rule: hint for hint in suggest_weights_for_single_device(plan).values()}
    assert advice
    for place, hint in advice.items():
        pins = [tuple(place.rsplit("=", 1))]
        placed = plan_for_group(graph, group, split_mode="tensor", hardware=FAST, place=pins)
        before, after = weights(plan), weights(placed)
        assert dict(hint.saved_bytes_by_device) == {d: before[d] - after[d] for d in before if before[d] != after[d]}
        to, margin = devices.split(",").index(hint.placement_rule.rsplit("=", 1)[1]), 0.02 * abs(hint.extra_seconds)
        in_order = seconds_in_order_of(plan, placed, to) - seconds_in_order_of(plan, plan, to)
        assert in_order == pytest.approx(hint.extra_seconds, abs=margin)
        # Receivers may compute something else until the message arrives, so the plan takes less time by that at most.
        slower = placed.cost.total - plan.cost.total
        assert hint.extra_seconds - margin - seconds_before_message(placed, to) <= slower <= hint.extra_seconds + margin


def test_a_hint_stands_behind_the_reason_of_each_stage_that_reads_the_weight():
    lines = plan(lookup(), "cpu:0,cpu:1", split_mode="tensor").explain().splitlines()
    hint_lines = [line for line in lines if "hint: place='^words$=cpu:0' saves 125.0 KiB on cpu:1, costs " in line]
    assert hint_lines
    assert all(re.match(r" +[01] ", line) for line in hint_lines)


def test_no_hint_where_it_saves_little_or_nothing():
    assert not suggest_weights_for_single_device(plan(lookup(), "cpu:0"))
    assert not suggest_weights_for_single_device(plan(lookup(rows=2), "cpu:0,cpu:1", split_mode="tensor"))
    assert not suggest_weights_for_single_device(plan(lookup(), "cpu:0,cpu:1", split_mode="layer"))


def test_a_name_that_cannot_be_typed_gives_no_hint():
    assert not suggest_weights_for_single_device(plan(lookup("words\n"), "cpu:0,cpu:1", split_mode="tensor"))
    assert not suggest_weights_for_single_device(plan(lookup("w" * 100), "cpu:0,cpu:1", split_mode="tensor"))
