"""Hints say what planning with the flag that they name would give."""

from __future__ import annotations

import re

import pytest

from hocket import ops
from hocket.backends.base import find
from hocket.graph import Graph, input, weight
from hocket.scheduler import plan, plan_for
from hocket.scheduler.machines.hardware import Hardware
from hocket.scheduler.telling.hints import hints

from ..given.models.goldens import decode_graph

FAST = Hardware(link_latency=1e-6)
"""So that small models are cut whatever is placed: a hint does not foresee other cuts."""


def lookup(name="words", rows=500):
    """A table that is looked up, two layers, and a weight whose name has that of the table in it."""
    x = ops.get_rows(weight(name, (rows, 64)), input("number", (3,), "i32"))
    for i in range(2):
        up = ops.silu(ops.mul_mat(weight(f"up.{i}", (256, 64)), x))
        x = ops.add(x, ops.mul_mat(weight(f"down.{i}", (64, 256)), up))
    return Graph({"y": ops.mul_mat(weight(f"{name}.last", (128, 64)), x)})


def weights(made):
    return {str(lane.device): lane.memory()["weight"] for lane in made.lanes}


@pytest.mark.parametrize("devices", ["cpu:0,cpu:1", "cpu:0,numpy:0,cpu:1"])
@pytest.mark.parametrize(
    "name", ["lookup", "llama", *(pytest.param(n, marks=pytest.mark.long()) for n in ("qwen3moe", "gemma3"))]
)
def test_a_hint_says_what_planning_so_gives(name, devices):
    graph, group = lookup() if name == "lookup" else decode_graph(name), [find(d) for d in devices.split(",")]
    made = plan_for(graph, group, split_mode="tensor", hardware=FAST)
    advice = {hint.place: hint for hint in hints(made).values()}
    assert advice
    for place, hint in advice.items():
        pins = [tuple(place.rsplit("=", 1))]
        placed = plan_for(graph, group, split_mode="tensor", hardware=FAST, place=pins)
        before, after = weights(made), weights(placed)
        assert dict(hint.saved) == {d: before[d] - after[d] for d in before if before[d] != after[d]}
        # A hint adds up all nodes, but the receiver may compute something else until the last message arrives.
        last = max(at for at, stage in enumerate(placed.stages) if stage.op == "send")
        hidden = sum(stage.seconds for stage in placed.stages[: last + 1])
        slower, margin = placed.cost.total - made.cost.total, 0.02 * abs(hint.seconds)
        assert hint.seconds - hidden - margin <= slower <= hint.seconds + margin


def test_a_hint_stands_behind_the_reason_of_each_stage_that_reads_the_weight():
    lines = plan(lookup(), "cpu:0,cpu:1", split_mode="tensor").explain().splitlines()
    said = [line for line in lines if "hint: --place '^words$=cpu:0' saves 125.0 KiB on cpu:1, costs " in line]
    assert said
    assert all(re.match(r" +[01] ", line) for line in said)


def test_no_hint_where_it_saves_little_or_nothing():
    assert not hints(plan(lookup(), "cpu:0"))
    assert not hints(plan(lookup(rows=2), "cpu:0,cpu:1", split_mode="tensor"))
    assert not hints(plan(lookup(), "cpu:0,cpu:1", split_mode="layer"))


def test_a_name_that_cannot_be_typed_gives_no_hint():
    assert not hints(plan(lookup("words\n"), "cpu:0,cpu:1", split_mode="tensor"))
    assert not hints(plan(lookup("w" * 100), "cpu:0,cpu:1", split_mode="tensor"))
