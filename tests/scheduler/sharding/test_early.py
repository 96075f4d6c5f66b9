"""Sums taken once, before several nodes that would each pass them on to a sum of their own."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import find_device
from hocket.graph import Graph, Value, input, weight
from hocket.scheduler import Plan, load, plan_for_group
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.serialisation.plan_json import plan_from_json, plan_to_json
from hocket.scheduler.sharding.axes import Factor
from hocket.scheduler.sharding.factors import Factors

from ...given.plans.grouped import group_of

LATE = Hardware(flops=1e6, bandwidth=1e6, launch=1e-7, link_bandwidth=1e12, link_latency=1e-4)
"""Devices between which every collective takes long, however little it sends."""
NARROW = Hardware(flops=1e5, bandwidth=1e5, launch=1e-7, link_bandwidth=1e6, link_latency=1e-9)
"""Slow devices between which a collective takes as long as its bytes."""
WIDTH, INNER, EXPERTS = 24, 32, 12


def build_partial_sum(name: str = "", width: int = WIDTH, rows: int = 1) -> Value:
    """A product that is a partial sum where its inner axis is sharded."""
    x = input(f"{name}x", (rows, WIDTH))
    inner = ops.silu(ops.mul_mat(weight(f"{name}up", (INNER, WIDTH)), x))
    return ops.mul_mat(weight(f"{name}down", (width, INNER)), inner)


def slice_columns(value: Value, start: int, stop: int) -> Value:
    return ops.slice_(value, axis=1, start=start, stop=stop)


def build_slices(rows: int = 1) -> Graph:
    p = build_partial_sum(rows=rows)
    return Graph({f"y{i}": ops.silu(slice_columns(p, 8 * i, 8 * i + 8)) for i in range(3)})


def build_chains() -> Graph:
    """Slices of a permuted reshape, and one of a slice."""
    p = ops.permute(ops.reshape(build_partial_sum(), shape=(1, 3, 8)), axes=(1, 0, 2))
    parts = [ops.reshape(ops.slice_(p, axis=0, start=i, stop=i + 1), shape=(1, 8)) for i in range(3)]
    halves = [ops.slice_(parts[0], axis=1, start=i, stop=i + 4) for i in (0, 4)]
    return Graph({f"y{i}": ops.silu(part) for i, part in enumerate((*parts[1:], *halves))})


def build_two_shapes() -> Graph:
    """One value, read under two shapes."""
    p = build_partial_sum()
    return Graph({"a": ops.silu(ops.reshape(p, shape=(3, 8))), "b": ops.rms_norm(ops.transpose(p))})


def build_scaled() -> Graph:
    """Linear ops that are no views."""
    p = build_partial_sum()
    return Graph({f"y{i}": ops.silu(ops.scale(p, scale=i + 0.5)) for i in range(3)})


def build_sum_of_two() -> Graph:
    """Slices of a sum of two products that are partial sums both."""
    p = build_partial_sum("a.") + build_partial_sum("b.")
    return Graph({f"y{i}": ops.rms_norm(slice_columns(p, 8 * i, 8 * i + 8)) for i in range(3)})


def build_experts() -> Graph:
    """Results of experts that are dealt whole: each device has zeros elsewhere."""
    experts = weight("experts", (EXPERTS, WIDTH, 16))
    of = ops.reshape(ops.mul_mat_id(experts, input("x", (1, 1, 16)), input("ids", (1, 1), "i32")), shape=(1, WIDTH))
    return Graph({f"y{i}": ops.silu(slice_columns(of, 8 * i, 8 * i + 8)) for i in range(3)})


def shard_inner_axes(
    graph: Graph, devices: int, hardware: Hardware, mode: str = "tensor", shares: tuple[float, ...] = ()
) -> Plan:
    """Plan `graph` with its inner axes and its experts sharded."""

    def choose(graph: Graph, factors: Factors) -> frozenset[Factor]:
        return frozenset(f for v in graph.weights for f in factors.factors_of(v) if f.size in (INNER, EXPERTS))

    group = group_of(devices, "numpy")
    return plan_for_group(graph, group, split_mode=mode, tensor_split=shares, hardware=hardware, choose=choose)


def list_collectives(plan: Plan) -> list[tuple[str, int]]:
    """The collectives of a plan with their numbers of elements."""
    of = [n for n in plan.device_plans[0].graph.nodes if n.op in ("all_reduce", "all_gather", "reduce_scatter")]
    return [(n.op, n.specs[0].size) for n in of]


def equals_one_device(plan: Plan) -> bool:
    """Return whether a plan computes the same numbers as one device."""
    dice = np.random.default_rng(3)
    weights = {v.node.name: dice.normal(size=v.shape) / 4 for v in plan.graph.weights}
    inputs = {
        v.node.name: dice.normal(size=v.shape) if v.dtype.is_float else dice.integers(0, EXPERTS, v.shape)
        for v in plan.graph.inputs
    }
    alone = plan_for_group(plan.graph, [find_device("numpy:0")])
    found, expected = (load(one, weights).run(inputs) for one in (plan, alone))
    return all(np.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)


@pytest.mark.parametrize(
    "build", [build_slices, build_chains, build_two_shapes, build_scaled, build_sum_of_two, build_experts]
)
@pytest.mark.parametrize(("devices", "shares"), [(2, ()), (3, ()), (4, (3, 1, 2, 2))])
def test_one_sum_before_views_serves_all_of_their_readers(
    build: Callable[[], Graph], devices: int, shares: tuple[float, ...]
):
    plan = shard_inner_axes(build(), devices, LATE, shares=shares)
    assert list_collectives(plan) == [("all_reduce", WIDTH)]
    assert equals_one_device(plan)


@pytest.mark.parametrize("build", [build_slices, build_chains, build_scaled])
def test_one_sum_is_taken_where_only_bytes_count(build: Callable[[], Graph]):
    """The slices are all of the value, so one sum moves no more bytes."""
    plan = shard_inner_axes(build(), 2, NARROW)
    assert list_collectives(plan) == [("all_reduce", WIDTH)]
    assert equals_one_device(plan)


@pytest.mark.parametrize("hardware", [LATE, NARROW], ids=["late", "narrow"])
def test_the_sum_of_one_small_slice_is_taken_of_that_alone(hardware: Hardware):
    plan = shard_inner_axes(Graph({"y": ops.silu(slice_columns(build_partial_sum(), 4, 8))}), 2, hardware)
    assert list_collectives(plan) == [("all_reduce", 4)]
    assert equals_one_device(plan)


def test_one_sum_is_scattered_by_rows_for_all_readers():
    plan = shard_inner_axes(build_slices(rows=12), 2, NARROW)
    assert list_collectives(plan) == [("reduce_scatter", 6 * WIDTH)]
    assert equals_one_device(plan)


def build_small_slices(width: int) -> Graph:
    p = build_partial_sum(width=width)
    return Graph({"a": ops.silu(slice_columns(p, 0, 2)), "b": ops.rms_norm(slice_columns(p, 4, 6))})


@pytest.mark.parametrize(("hardware", "sizes"), [(LATE, [240]), (NARROW, [2, 2])])
def test_latency_and_bytes_decide_between_one_large_sum_and_two_small_ones(hardware: Hardware, sizes: list[int]):
    plan = shard_inner_axes(build_small_slices(240), 2, hardware)
    assert list_collectives(plan) == [("all_reduce", size) for size in sizes]
    assert equals_one_device(plan)


def test_the_sum_is_taken_of_the_part_that_is_read():
    """All readers are behind one slice, which is a tenth of the value."""
    part = slice_columns(build_partial_sum(width=240), 24, 48)
    graph = Graph({f"y{i}": ops.silu(slice_columns(part, 8 * i, 8 * i + 8)) for i in range(3)})
    plan = shard_inner_axes(graph, 2, LATE)
    assert list_collectives(plan) == [("all_reduce", 24)]
    assert equals_one_device(plan)


def test_a_slice_that_is_passed_on_needs_no_sum_of_its_own():
    """Of two slices one is added to another partial sum, and the sum of these two is taken."""
    p, q = build_partial_sum("a."), build_partial_sum("b.", 8)
    graph = Graph({"a": ops.silu(slice_columns(p, 0, 8)), "b": ops.silu(slice_columns(p, 8, 16) + q)})
    plan = shard_inner_axes(graph, 2, NARROW)
    assert list_collectives(plan) == [("all_reduce", 8)] * 2
    assert equals_one_device(plan)


def test_a_plan_with_an_early_sum_is_read_from_json_and_takes_no_more_memory():
    plan, chain = (
        shard_inner_axes(build_slices(), 2, LATE),
        shard_inner_axes(Graph({"y": ops.silu(build_partial_sum())}), 2, LATE),
    )
    assert plan_from_json(plan_to_json(plan)).digest() == plan.digest()
    assert plan.count_memory_bytes_by_kind()["weight"] == chain.count_memory_bytes_by_kind()["weight"]
    assert plan.cost.collective_count == 1
    assert "1 all_reduce" in plan.explain()


def test_sums_are_taken_early_within_the_stages_of_layers():
    x: Value = input("x", (1, WIDTH))
    for i in range(4):
        inner = ops.silu(ops.mul_mat(weight(f"{i}.up", (INNER, WIDTH)), x))
        p = ops.mul_mat(weight(f"{i}.down", (WIDTH, INNER)), inner)
        parts = [ops.rms_norm(slice_columns(p, 8 * k, 8 * k + 8)) for k in range(3)]
        x = x + ops.concat(ops.concat(parts[0], parts[1], axis=1), parts[2], axis=1)
    plan = shard_inner_axes(Graph({"y": x}), 4, LATE, mode="layer,tensor")
    assert [size for op, size in list_collectives(plan) if op == "all_reduce"] == [WIDTH] * 2
    assert equals_one_device(plan)


def build_random_forks(seed: int) -> Graph:
    """Random chains of views and linear ops between partial sums and readers that need them whole."""
    dice = random.Random(seed)
    values = [build_partial_sum(f"{i}.") for i in range(dice.randint(1, 3))]
    outputs: dict[str, Value] = {}
    for number in range(dice.randint(4, 12)):
        value = dice.choice(values)
        rows, wide = value.shape
        kind = dice.randrange(6)
        if kind == 0 and wide > 2:
            start = dice.randrange(wide - 1)
            values.append(slice_columns(value, start, dice.randint(start + 1, wide)))
        elif kind == 1:
            values.append(ops.reshape(value, shape=(wide, rows)))
        elif kind == 2:
            values.append(ops.transpose(value))
        elif kind == 3:
            values.append(ops.scale(value, scale=dice.uniform(0.5, 2)))
        elif kind == 4 and (others := [v for v in values if v.shape == value.shape and v != value]):
            values.append(value + dice.choice(others))
        else:
            outputs[f"y{number}"] = dice.choice([ops.silu, ops.rms_norm])(value)
    return Graph({**outputs, "last": ops.silu(values[-1]), "first": ops.silu(values[0])})


@pytest.mark.parametrize("seed", range(40))
def test_random_forks_of_sums_give_the_numbers_of_one_device(seed: int):
    """The verifier accepts each plan, as `plan_for` asks it."""
    dice = random.Random(seed)
    devices, hardware = dice.choice([2, 3, 4]), dice.choice([LATE, NARROW])
    assert equals_one_device(shard_inner_axes(build_random_forks(seed), devices, hardware))
