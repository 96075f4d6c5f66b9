"""Whole experts distributed over devices: each answer comes from one device, and one collective combines them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import find_device
from hocket.cli import main
from hocket.frontends.commands.plan import read_step_graph_and_context
from hocket.frontends.models import Batch, Step, load_model
from hocket.graph import BackendError, Graph, Value, input, weight
from hocket.ops.movement.sharded_tables import estimate_busiest_device_entries
from hocket.scheduler import Plan, load, parse_simulated_group, plan_for_group
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.ir.layout import Shard
from hocket.scheduler.sharding.axes import Factor
from hocket.scheduler.sharding.cost import AssignmentCost
from hocket.scheduler.sharding.factor_layouts import TableLookupPartial
from hocket.scheduler.sharding.factors import Factors
from hocket.scheduler.sharding.propagation import propagate_layouts
from hocket.scheduler.sharding.search.greedy_search import group_factors

from ...given.models.goldens import MIXTURES, golden, layers_with_experts, nmse, open_fixture
from ...given.models.large_headers import qwen_80b
from ...given.plans.grouped import devices, everything_that_fits, group_of, reductions, run_of

SLOW = Hardware(flops=1e3, bandwidth=1e3, launch=0, link_latency=1e-9)
"""Devices on which every cut pays."""
COUNTING = Hardware(flops=1e6, bandwidth=1e9, launch=0, link_latency=1e-9)
"""Devices on which only arithmetic takes time."""


def whole_experts(graph: Graph, factors: Factors) -> frozenset[Factor]:
    """The experts of all layers, dealt whole, and nothing else cut."""
    return frozenset(
        f
        for v in graph.weights
        for f in factors.factors_of(v)
        if factors.format_signature_name_of_factor(f) == "experts"
    )


def plan_whole_experts(graph: Graph, n: int, shares: Sequence[float] = (), kind: str = "cpu") -> Plan:
    return plan_for_group(graph, group_of(n, kind), tensor_split=shares, choose=whole_experts)


# ---------------------------------------------------------------------------------------------------------- models


@pytest.mark.nightly(cases=6)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("name", MIXTURES)
def test_distributed_whole_experts_give_the_logits_of_one_device_in_one_batch_and_token_by_token(
    name: str, n: int
) -> None:
    model, tokens = load_model(open_fixture(name)), golden(name)[0][:24]
    batch, step = Step(1, 24, 32, 32, 24), Step(1, 1, 32, 32, 1)
    weights = {v.node.name: model.gguf.tensor(v.node.name).dequantise() for v in model.graph(batch).weights}
    runs = [[load(plan_whole_experts(model.graph(s), k), weights) for s in (batch, step)] for k in (1, n)]
    feed = model.inputs(batch, Batch([tokens], [0], [(0, i) for i in range(24)]))
    one, many = (run[0].run(feed)["logits"] for run in runs)
    assert nmse(many.astype(np.float64), one.astype(np.float64)) <= 1e-10
    for i, token in enumerate(tokens[:12]):
        feed = model.inputs(step, Batch([[token]], [i], [(0, 0)]))
        one, many = (run[1].run(feed)["logits"] for run in runs)
        assert nmse(many.astype(np.float64), one.astype(np.float64)) <= 1e-10


@pytest.mark.nightly(cases=6)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("rows", [1, 24])
@pytest.mark.parametrize("name", MIXTURES)
def test_distributed_whole_experts_need_one_collective_per_layer_to_be_combined(name: str, rows: int, n: int) -> None:
    plan = plan_whole_experts(load_model(open_fixture(name)).graph(Step(1, rows, 32, 32, rows)), n)
    assert reductions(plan) == [("all_reduce", (rows, 64))] * layers_with_experts(name)
    for number, device_plan in enumerate(plan.device_plans):
        local = {node.name: node.specs[0].shape for node in device_plan.graph.nodes if node.op == "weight"}
        own = [len(part) for part in np.array_split(range(8), n)][number]
        assert local["blk.0.ffn_down_exps.weight"] == (own, 64, 16)
        gate = [name for name in local if re.fullmatch(r"blk\.0\.ffn_gate(_up)?_exps\.weight", name)]
        assert local[gate[0]][0] == own


# ---------------------------------------------------------------------------------------------------------- shapes


def mixture(experts: int, used: int, width: int, inner: int, dtype: str = "f32", rows: int = 5) -> Graph:
    """Experts with biases, three tables one after the other, combined by weights and read whole."""
    x, ids = input("x", (rows, 1, width)), input("ids", (rows, used), "i32")

    def product(name: str, y: Value, shape: tuple[int, int], kind: str = "f32") -> Value:
        product = ops.mul_mat_id(weight(name, (experts, *shape), kind), y, ids, name=f"{name}ed")
        return ops.add_id(product, weight(f"{name}.bias", (experts, shape[0])), ids, name=f"{name}.biased")

    gate, up = (product(name, x, (inner, width)) for name in ("gate", "up"))
    down = product("down", ops.swiglu(gate, up, name="act"), (width, inner), dtype)
    y = ops.mul_mat(ops.transpose(down), input("shares", (rows, 1, used)), name="combined")
    return Graph({"y": ops.rms_norm(y, name="y")})


def bindings(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = {v.node.name: rng.normal(size=v.shape) for v in (*graph.weights, *graph.inputs)}
    for v in graph.inputs:
        if v.dtype.is_integer:  # up to the largest table that they number
            tables = [n.inputs[n.inputs.index(v) - 2 if n.op == "mul_mat_id" else 1] for n in graph.users()[v]]
            arrays[v.node.name] = rng.integers(0, min(t.shape[0] for t in tables), v.shape)
    return arrays


def equal(plan: Plan, seed: int = 0) -> None:
    """Check that the plan gives the results of one device."""
    values = bindings(plan.graph, seed)
    one = plan_for_group(plan.graph, [(plan.device_plans[0].backend, plan.device_plans[0].device)], split_mode="none")
    for name, want in run_of(one, values).items():
        np.testing.assert_allclose(run_of(plan, values)[name], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("experts", "n", "shares", "own"),
    [
        (3, 4, (), (1, 1, 1, 0)),
        (512, 3, (), (171, 171, 170)),
        (8, 2, (3, 1), (6, 2)),
        (8, 3, (1, 0, 1), (4, 0, 4)),
        (5, 2, (1, 0), (5, 0)),
        (1, 2, (), (1, 0)),
        (7, 8, (), (1, 1, 1, 1, 1, 1, 1, 0)),
    ],
)
def test_deals_may_be_uneven_and_a_device_may_get_no_expert(experts, n, shares, own):
    graph = mixture(experts, 2, 8, 6)
    plan = plan_whole_experts(graph, n, shares, "reference")
    equal(plan)
    layout = plan.leaves["gate"]
    assert isinstance(layout, Shard)
    assert tuple(map(layout.count_entries, range(n))) == own
    assert reductions(plan) == [("all_reduce", (5, 1, 8))]


def test_a_device_without_columns_of_experts_launches_nothing_for_their_sum(tmp_path):
    """There are more devices than blocks of columns."""
    graph, _ = read_step_graph_and_context(qwen_80b(tmp_path / "model.gguf", layers=1), context=64, tokens=1)
    plan = plan_for_group(graph, parse_simulated_group("h200:24,nvlink").group, split_mode="tensor")
    summed = [
        any("summed" in call.kernel for call in device_plan.predicted_kernel_calls) for device_plan in plan.device_plans
    ]
    assert any(summed)
    assert not all(summed)


def test_all_tables_of_the_same_numbers_are_distributed_equally():
    graph = mixture(6, 2, 8, 6)
    factors = Factors(graph)
    (experts,) = whole_experts(graph, factors)
    assert all(experts in factors.factors_of(v) for v in graph.weights)


def test_tables_of_other_numbers_are_distributed_on_their_own():
    x, one, two = input("x", (3, 1, 8)), input("one", (3, 2), "i32"), input("two", (3, 2), "i32")
    y = ops.mul_mat_id(weight("a", (6, 8, 8)), x, one)
    graph = Graph({"y": ops.mul_mat_id(weight("b", (6, 4, 8)), y, two)})
    factors = Factors(graph)
    assert len(whole_experts(graph, factors)) == 2
    plan = plan_whole_experts(graph, 3, kind="reference")
    assert plan.count_collectives() == 2  # answers of the first experts go to others
    equal(plan)


def test_one_table_by_two_lists_of_numbers_is_one_deal_and_two_routes():
    x, one, two = input("x", (3, 1, 8)), input("one", (3, 2), "i32"), input("two", (3, 2), "i32")
    w = weight("w", (6, 8, 8))
    graph = Graph({"y": ops.mul_mat_id(w, ops.silu(ops.mul_mat_id(w, x, one)), two)})
    plan = plan_whole_experts(graph, 2, kind="reference")
    assert plan.count_collectives() == 2
    equal(plan)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_an_op_that_makes_something_of_zeros_reads_the_sum(activation):
    x, ids = input("x", (3, 1, 8)), input("ids", (3, 2), "i32")
    y = getattr(ops, activation)(ops.mul_mat_id(weight("up", (6, 7, 8)), x, ids))
    plan = plan_whole_experts(Graph({"y": ops.mul_mat_id(weight("down", (6, 8, 7)), y, ids)}), 2, kind="reference")
    assert plan.count_collectives() == (1 if activation == "silu" else 2)
    equal(plan)


def test_a_table_that_is_part_of_one_already_is_not_distributed():
    x, ids = input("x", (3, 1, 8)), input("ids", (3, 2), "i32")
    graph = Graph({"y": ops.mul_mat_id(weight("w", (4, 7, 8)), x, ids, first=2, total=8)})
    assert not Factors(graph).find_factor_roles(graph.outputs["y"].node).indexed_factor
    assert plan_whole_experts(graph, 2, kind="reference").count_collectives() == 0


def test_a_number_that_is_no_expert_is_an_error_on_every_device():
    graph = mixture(6, 2, 8, 6)
    run = load(
        plan_whole_experts(graph, 2), {k: v for k, v in bindings(graph).items() if k not in ("x", "ids", "shares")}
    )
    feed = {v.node.name: bindings(graph)[v.node.name] for v in graph.inputs}
    for wrong in (-1, 6):
        ids = np.array(feed["ids"])
        ids[1, 1] = wrong
        with pytest.raises(BackendError, match=r"names no row|ids of experts run from"):
            run.run({**feed, "ids": ids})


# ---------------------------------------------------------------------------------------------------- random graphs

ACTIVATIONS = (
    ops.silu,
    ops.gelu,
    ops.relu,
    ops.sqr,
    ops.sigmoid,
    ops.tanh,
    lambda v: ops.scale(v, scale=2.0, bias=0.5),
)


def routed_graph(dice: random.Random) -> Graph:
    """Experts after experts: with and without biases, activations, gates, sums, products, lists of their own."""
    rows, used, width = dice.choice([1, 3, 4]), dice.choice([1, 2, 3]), dice.choice([4, 5])
    lists = [input(f"ids.{i}", (rows, used), "i32") for i in range(dice.choice([1, 1, 2]))]
    counts = [dice.choice([2, 3, 5, 8]) for _ in lists]
    tables: dict[tuple[int, int], Value] = {}
    values = [input("x", (rows, dice.choice([1, used]), width))]
    for step in range(dice.randint(2, 7)):
        full = [v for v in values if v.shape[1] == used] or [None]
        y, which = dice.choice(values), dice.randrange(len(lists))
        kind = dice.choice(["product", "product", "product", "bias", "act", "act", "gate", "join", "times"])
        if kind == "product" or full == [None]:
            key = (counts[which], y.shape[2])
            fresh = weight(f"w{step}", (counts[which], width, y.shape[2]))
            w = tables.setdefault(key, fresh) if dice.random() < 0.3 else fresh
            values.append(ops.mul_mat_id(w, y, lists[which]))
        elif kind == "bias":
            values.append(ops.add_id(dice.choice(full), weight(f"b{step}", (counts[which], width)), lists[which]))
        elif kind == "act":
            values.append(dice.choice(ACTIVATIONS)(dice.choice(full)))
        elif kind == "gate":
            values.append(dice.choice([ops.swiglu, ops.swiglu_oai])(dice.choice(full), dice.choice(full)))
        elif kind == "join":
            values.append(ops.add(dice.choice(full), dice.choice(full)))
        else:
            other = dice.choice([dice.choice(full), weight(f"s{step}", (width,)), input(f"r{step}", (rows, used, 1))])
            values.append(ops.mul(dice.choice(full), other))
    outputs = {"last": values[-1], "some": dice.choice(values)}
    if values[-1].shape[1] == used:
        outputs["sum"] = ops.mul_mat(ops.transpose(values[-1]), input("shares", (rows, 1, used)))
    return Graph(outputs)


@pytest.mark.nightly(cases=40)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("seed", range(120))
def test_a_random_routed_graph_distributed_or_sharded_wherever_possible_equals_one_device(seed):
    dice = random.Random(seed)
    graph, n = routed_graph(dice), dice.choice([2, 3, 4, 8])
    shares = [dice.choice([0, 1, 1, 2]) for _ in range(n - 1)] + [1]
    equal(plan_whole_experts(graph, n, shares, "reference"), seed)
    sharded = plan_for_group(
        graph, group_of(n), tensor_split=shares, choose=lambda g, f: everything_that_fits(g, f, random.Random(seed))
    )
    equal(sharded, seed)
    equal(plan_for_group(graph, group_of(n), split_mode="tensor", hardware=SLOW), seed)


# ---------------------------------------------------------------------------------------------------------- choices


def test_experts_with_unsplittable_columns_are_distributed():
    """One block of 256 columns on four devices: inside there is nothing to cut."""
    graph = mixture(8, 2, 16, 256, "q4_K", rows=64)
    for mode in ("tensor", "auto"):
        plan = plan_for_group(graph, group_of(4, "cpu"), split_mode=mode, hardware=COUNTING)
        assert isinstance(plan.leaves["down"], Shard)
        assert plan.leaves["down"].axis == 0
        assert any(re.match(r"cut experts \(8\), as in axis 0 of %\w+", why) for why in plan.reasons)
        assert reductions(plan) == [("all_reduce", (64, 1, 16))]
    assert "is cut on axis 0" in plan.explain()


@pytest.mark.parametrize(("blocks", "axis"), [(8, 2), (5, 0)])
def test_experts_are_sharded_inside_where_that_is_even_and_distributed_where_it_is_not(blocks, axis):
    """Five blocks of columns on four devices: three wait for the fourth half of the time, as with 768 columns in
    blocks of 256 one waits all the time."""
    graph = mixture(64, 4, 64, 32 * blocks, "q8_0", rows=512)
    plan = plan_for_group(graph, group_of(4, "cpu"), split_mode="auto", hardware=COUNTING)
    assert isinstance(plan.leaves["down"], Shard)
    assert plan.leaves["down"].axis == axis


@pytest.mark.long
def test_a_simulated_plan_reports_that_experts_are_distributed(tmp_path, capsys):
    """512 experts on three devices are less uneven than 16 blocks of columns."""
    path = qwen_80b(tmp_path / "model.gguf", layers=4)
    assert (
        main(["plan", path, "--simulate", "cpu:3", "-c", "1024", "--split-mode", "tensor", "--phase", "prefill"]) == 0
    )
    assert "cut experts of 4 layers (512 each), as in axis 0 of %blk.0.ffn_" in capsys.readouterr().out


def test_the_busiest_device_has_more_than_its_share_and_never_more_than_all():
    assert estimate_busiest_device_entries(10, 64, 64) == 10
    assert estimate_busiest_device_entries(1, 64, 512) == 1
    assert estimate_busiest_device_entries(0, 64, 512) == 0
    assert estimate_busiest_device_entries(10, 0, 512) == 0
    rng = np.random.default_rng(0)
    for entries, own, total in ((10, 64, 512), (8, 64, 128), (5120, 64, 512), (64, 2, 8)):
        counts = [np.bincount(rng.integers(0, total // own, entries), minlength=1).max() for _ in range(4000)]
        assert estimate_busiest_device_entries(entries, own, total) == pytest.approx(np.mean(counts), abs=1.0, rel=0.02)


def test_cost_of_distributed_experts_is_the_cost_of_the_busiest_device():
    graph = mixture(64, 4, 128, 128, rows=16)
    factors = Factors(graph)
    costs = AssignmentCost(graph, 4, Hardware(launch=0.0, link_latency=0.0, link_bandwidth=1e30))
    whole, shared = (
        costs.estimate_run_time(propagate_layouts(graph, factors, c))
        for c in (frozenset(), whole_experts(graph, factors))
    )
    assert 1 / 4 < shared.compute / whole.compute < 1 / 2
    node = next(n for n in plan_whole_experts(graph, 4).device_plans[1].graph.nodes if n.name == "gateed")
    assert ops.mul_mat_id.count_flops(node) == pytest.approx(
        2 * estimate_busiest_device_entries(64, 16, 64) * 128 * 128, rel=0.1
    )


def test_what_is_routed_stays_so_until_it_is_combined():
    graph = mixture(8, 2, 8, 6)
    factors = Factors(graph)
    plan = propagate_layouts(graph, factors, whole_experts(graph, factors)).produced_layouts
    kinds = {v.node.name: type(state).__name__ for v, state in plan.items() if not v.node.is_leaf and v.node.name}
    assert kinds == {**dict.fromkeys(kinds, "TableLookupPartial"), "combined": "Partial", "y": "Replicate"}
    assert len({state for state in plan.values() if isinstance(state, TableLookupPartial)}) == 1


def test_a_class_of_experts_is_called_so():
    graph = mixture(8, 2, 8, 6)
    names = list(group_factors(graph, Factors(graph)))
    assert sum(name.startswith("experts (8)") for name in names) == 1


# ------------------------------------------------------------------------------------------------- bytes on devices


def test_of_plans_that_take_about_as_long_the_one_with_fewer_bytes_is_taken():
    """The head pays; to cut the feed-forward before it too costs a meeting, a little more than it saves."""
    x = input("x", (1, 64))
    h = ops.mul_mat(weight("down", (64, 4096)), ops.silu(ops.mul_mat(weight("up", (4096, 64)), x)))
    graph = Graph({"y": ops.mul_mat(weight("head", (1 << 16, 64)), ops.rms_norm(h))})
    close_links = Hardware(flops=1e15, bandwidth=1e9, launch=1e-9, link_latency=1.15e-3, link_bandwidth=1e15)
    plan = plan_for_group(graph, group_of(2, "cpu"), split_mode="auto", hardware=close_links)
    assert any("about as long with" in why for why in plan.reasons)
    assert all(isinstance(plan.leaves[name], Shard) for name in ("head", "up", "down"))
    assert plan.cost.total <= plan_for_group(graph, group_of(1, "cpu"), hardware=close_links).cost.total
    far = Hardware(flops=1e15, bandwidth=1e9, launch=1e-9, link_latency=1.6e-3, link_bandwidth=1e15)
    plan = plan_for_group(graph, group_of(2, "cpu"), split_mode="auto", hardware=far)
    assert isinstance(plan.leaves["head"], Shard)
    assert not isinstance(plan.leaves["up"], Shard)


def test_a_plan_as_fast_as_one_device_does_not_become_slower_to_save_bytes():
    w = weight("w", (64, 64))
    graph = Graph({"y": ops.mul_mat(weight("v", (64, 64)), ops.rms_norm(ops.mul_mat(w, input("x", (1, 64)))))})
    idle = Hardware(flops=1e15, bandwidth=1e15, launch=1e-3, link_latency=1e-6)
    plan = plan_for_group(graph, [find_device(name) for name in devices(2)], split_mode="auto", hardware=idle)
    alone = plan_for_group(graph, [find_device("cpu:0")], hardware=idle)
    assert plan.cost.total <= alone.cost.total
