"""Nodes on one device alone: the user says so, or others cannot."""

from __future__ import annotations

import dataclasses
import json
import random
import re

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import Device, Support, find_device
from hocket.backends.reference.backend import ReferenceBackend
from hocket.frontends.gguf import open_gguf
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Step, load_model
from hocket.graph import Graph, PlanError, input, state, weight
from hocket.graph.graph import assign_names
from hocket.ops import REGISTRY
from hocket.ops.collectives import COLLECTIVES
from hocket.scheduler import Executor, Store, load, plan, plan_for_group
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.ir.layout import Local, Shard
from hocket.scheduler.serialisation.plan_json import plan_from_json, plan_to_json

from ...given.graphs.random_graphs import seeded_graph
from ...given.models.goldens import FLOAT_CACHES, nmse, path_of, single_device_logits, tokens_of
from ...given.plans.faults import SLOW, decoder, placed_plan
from ...given.plans.grouped import devices, equal_to_one, group_of

MODES = ("none", "layer", "tensor", "auto")
PLACES = {
    "a block": ((r"^blk\.1\.", "cpu:2"),),
    "weights of every block": (("ffn_(up|gate)", "cpu:1"), ("ffn_down", "cpu:2")),
    "caches": (("cache_|_state", "cpu:1"),),
    "ends": (("token_embd", "cpu:2"), ("^output", "cpu:1")),
    "everything": (("", "cpu:2"),),
}


# ---------------------------------------------------------------------------------------- placement rules of the user


@pytest.mark.nightly(cases=10)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "qwen35", "qwen3moe"])
def test_a_model_with_placed_parts_gives_the_logits_of_one_device(name, mode, place):
    model = load_model(open_gguf(path_of(name)))
    tokens = tokens_of(name)
    one = single_device_logits(name)
    many = Session(
        model, on=DeviceGroup(devices=devices(3), split_mode=mode, tensor_split=(), place=place, **FLOAT_CACHES)
    )
    half = len(tokens) // 2
    parts = [tokens[:half], *([t] for t in tokens[half:])]
    stepped = np.concatenate([many.evaluate([part], every_position=True)[0] for part in parts])
    assert nmse(stepped, one) <= 1e-10


def test_where_results_are_to_be_exact_a_place_on_the_cpu_means_its_exact_backend():
    model = load_model(open_gguf(path_of("llama")))
    exact = Session(
        model,
        on=DeviceGroup(devices=devices(2), split_mode="tensor", tensor_split=(), place=(("ffn", "cpu:1"),), exact=True),
    )
    assert [str(device) for _, device in exact.group] == ["numpy:0", "numpy:1"]
    assert exact._layout_plan.leaves["blk.0.ffn_up.weight"] == Local((1,))


@pytest.mark.parametrize("mode", MODES)
def test_placed_nodes_and_leaves_are_on_their_device_alone(mode):
    new_plan = plan(decoder(), devices(3), split_mode=mode, place=[("^(gate|up)$", "cpu:2")])
    (its_number,) = (i for i, device_plan in enumerate(new_plan.device_plans) if str(device_plan.device) == "cpu:2")
    assert new_plan.leaves["gate"] == new_plan.leaves["up"] == Local((its_number,))
    for number, device_plan in enumerate(new_plan.device_plans):
        here = {n.name for n in device_plan.graph.nodes} & {"gateed", "uped", "act", "gate", "up"}
        assert len(here) == (5 if number == its_number else 0)
    assert "cpu:2 alone runs" in new_plan.explain()
    assert "place='^(gate|up)$=cpu:2'" in new_plan.explain()


@pytest.mark.parametrize("mode", MODES)
def test_no_value_is_copied_twice_to_a_device(mode):
    place = [("^q$|^act$|^mixed$", "cpu:1"), ("normed", "cpu:2"), ("^new", "cpu:0")]
    new_plan = plan(decoder(), devices(3), split_mode=mode, place=place)
    for device_plan in new_plan.device_plans:
        sent = [(n.attrs["to"], n.inputs[0]) for n in device_plan.graph.nodes if n.op == "send"]
        assert len(sent) == len(set(sent))


@pytest.mark.parametrize("mode", MODES)
def test_an_output_may_be_called_like_what_the_planner_adds(mode):
    w, x = weight("w", (4, 4)), input("x", (2, 4))
    graph = Graph({f"{k}.{i}": ops.mul_mat(w, x, name="y") for k in ("met", "sent") for i in range(3)})
    new_plan = plan(graph, devices(3), split_mode=mode, place=[("y", "cpu:1")])
    out = load(new_plan, {"w": np.eye(4)}).run({"x": np.ones((2, 4))})
    assert all((out[name] == 1).all() for name in graph.outputs)


def test_the_first_pattern_that_matches_a_node_counts():
    new_plan = plan(decoder(), devices(3), place=[("gateed", "cpu:1"), ("gate|up", "cpu:2")], split_mode="tensor")
    assert [new_plan.leaves[n] for n in ("gate", "up")] == [Local((1,)), Local((2,))]


def test_a_pattern_that_matches_a_weight_places_all_its_readers_through_views():
    w = weight("w", (6, 4))
    graph = Graph({"y": ops.mul_mat(ops.transpose(ops.transpose(w)), input("x", (2, 4)), name="y"), "n": ops.neg(w)})
    new_plan = plan(graph, devices(2), split_mode="tensor", place=[("^w$", "cpu:1")])
    assert new_plan.leaves["w"] == Local((1,))
    assert new_plan.outputs == {"y": Local((1,)), "n": Local((1,))}
    assert not any(not n.is_leaf for n in new_plan.device_plans[0].graph.nodes)


def test_mode_none_keeps_the_devices_that_are_named_and_no_other():
    new_plan = plan(decoder(), devices(4), split_mode="none", place=[("head", "cpu:2")])
    assert [str(device_plan.device) for device_plan in new_plan.device_plans] == ["cpu:0", "cpu:2"]
    assert len(plan(decoder(), devices(4), split_mode="none").device_plans) == 1


def test_a_partial_sum_is_reduced_before_one_device_reads_it():
    group = [find_device(name) for name in devices(3)]
    plan = plan_for_group(decoder(), group, split_mode="tensor", hardware=SLOW, place=[("normed2|^z$", "cpu:1")])
    assert any(n.op == "all_reduce" for n in plan.device_plans[0].graph.nodes)
    assert plan.count_collectives() >= 3


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ([("ffn", "cpu:0")], "place='ffn=cpu:0': no node, weight or state has such a name"),
        ([("gate", "cpu:7")], "place='gate=cpu:7': there is no device 'cpu:7' in the group; it has cpu:0, cpu:1"),
        ([("gate", "gpu")], "there is no device 'gpu:0' in the group"),
        ([("(", "cpu:0")], "not a regular expression: missing ), unterminated subpattern"),
        ([("a{99999999999999999999}", "cpu:0")], "not a regular expression"),
        ([("x", "cpu:0")], None),
    ],
)
def test_a_wrong_place_is_one_line(place, message):
    if message is None:
        place, message = [("^x$", "cpu:0")], "no node, weight or state has such a name"  # x is an input
    for mode in MODES:
        with pytest.raises(PlanError) as caught:
            plan(decoder(), devices(2), split_mode=mode, place=place)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_later_graph_need_not_have_what_was_placed():
    first = plan(decoder(), devices(2), split_mode="tensor", place=[("head", "cpu:1")])
    x = input("x", (3, 8))
    graph = Graph({"y": ops.mul(x, weight("norm", (8,)))})
    assert plan_for_group(graph, group_of(2, "cpu"), like=first, place=[("head", "cpu:1")]).outputs


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_with_placed_nodes_goes_through_json(mode):
    new_plan = plan(decoder(), devices(3), split_mode=mode, place=[("gate", "cpu:2")])
    again = plan_from_json(plan_to_json(new_plan))
    assert again.digest() == new_plan.digest()
    assert again.pinned_nodes == new_plan.pinned_nodes
    assert again.explain(steps=True) == new_plan.explain(steps=True)
    document = json.loads(plan_to_json(new_plan))
    document["placed"][0]["nodes"].append("nobody")
    with pytest.raises(PlanError, match="not a plan in JSON"):
        plan_from_json(json.dumps(document))


@pytest.mark.parametrize("seed", range(3000, 3040))
def test_a_random_graph_placed_at_random_equals_one_device(seed):
    graph, dice = seeded_graph(seed), random.Random(seed)
    n = dice.choice([2, 3, 4])
    group, place = group_of(n), []
    for name in assign_names(graph).values():
        if dice.random() < 0.3:
            place.append((f"^{''.join(c if c.isalnum() else '.' for c in name)}$", f"reference:{dice.randrange(n)}"))
    leaves = {v.node.name for v in graph.inputs}
    place = [p for p in place if not any(name.startswith(("x", "leaf")) and name in leaves for name in [p[0][1:-1]])]
    equal_to_one(
        graph,
        group,
        seed,
        mode=dice.choice(["layer", "tensor", "none", "cut"]),
        place=_select_matching_patterns(graph, place),
    )


def _select_matching_patterns(graph, place):
    """Patterns that match something a device can compute or hold."""
    import re

    called = [name for node, name in assign_names(graph).items() if node.op not in ("input", "constant")]
    return [(p, d) for p, d in place if any(re.search(p, name) for name in called)]


# ----------------------------------------------------------------------------------------------- abilities of devices


class Limited(ReferenceBackend):
    """The references, with nodes that some devices refuse."""

    def __init__(self, refuses):
        self.refuses = refuses

    def supports(self, node, on):
        refused = self.refuses(node, on.index)
        return Support(not refused, f"{node.op} is not for device {on.index}" if refused else "")


def limited_group(n, refuses):
    backend = Limited(refuses)
    return [(backend, Device("reference", i)) for i in range(n)]


NEEDED = COLLECTIVES | {"cont"}
"""Ops that the planner itself inserts, and expects of every device."""


@pytest.mark.parametrize("seed", range(4000, 4080))
def test_a_random_graph_on_devices_that_lack_random_ops_equals_one_device(seed):
    graph, dice = seeded_graph(seed), random.Random(seed)
    n, known = dice.choice([2, 3, 4]), sorted(set(REGISTRY) - NEEDED)
    able = {op: set(dice.sample(range(n), dice.randint(1, n))) for op in known}
    plan = equal_to_one(
        graph,
        limited_group(n, lambda node, d: node.op in able and d not in able[node.op]),
        seed,
        mode=dice.choice(["layer", "tensor", "none", "auto", "cut"]),
    )
    for number, device_plan in enumerate(plan.device_plans):
        device = device_plan.device.index
        for node in device_plan.graph.nodes:
            refused = node.op in able and device not in able[node.op] and not REGISTRY[node.op].is_view
            assert node.is_leaf or not refused, f"{node!r} on {number}"


@pytest.mark.parametrize("seed", range(5000, 5040))
def test_support_is_asked_of_the_shapes_that_a_device_would_get(seed):
    """Device 1 runs only whole shapes of some axis lengths, the last device everything."""
    graph, dice = seeded_graph(seed), random.Random(seed)
    odd = {size for size in range(40) if dice.random() < 0.3}

    def refuses(node, device):
        return device < 2 and node.op not in NEEDED and any(s.shape and s.shape[-1] in odd for s in node.specs)

    equal_to_one(graph, limited_group(3, refuses), seed, mode="cut")


def test_a_node_that_a_device_cannot_run_says_so_in_the_plan():
    group = limited_group(2, lambda node, d: d == 1 and node.op == "swiglu")
    for mode in ("tensor", "layer"):
        plan = plan_for_group(decoder(), group, split_mode=mode, tensor_split=(0, 1) if mode == "layer" else ())
        (where,) = (p for p in plan.pinned_nodes if "act" in p.nodes)
        assert where.device == 0
        assert "reference:1 cannot run swiglu: swiglu is not for device 1" in where.because
        assert where.because in plan.explain()


def test_in_mode_none_a_node_runs_elsewhere_if_the_first_device_cannot():
    plan = plan_for_group(decoder(), limited_group(3, lambda node, d: d < 2 and node.op == "swiglu"), split_mode="none")
    assert [device_plan.device.index for device_plan in plan.device_plans] == [0, 2]


def test_a_placed_node_runs_where_it_can_and_the_plan_says_why():
    group = limited_group(2, lambda node, d: d == 1 and node.op == "swiglu")
    plan = plan_for_group(decoder(), group, split_mode="tensor", place=[("^(gate|up|act)", "reference:1")])
    (where,) = (p for p in plan.pinned_nodes if "act" in p.nodes)
    assert where.device == 0
    assert where.because.startswith("place='^(gate|up|act)=reference:1', but reference:1 cannot run swiglu")


def test_a_node_that_no_device_can_run_is_named_with_every_reason():
    with pytest.raises(PlanError) as caught:
        plan_for_group(decoder(), limited_group(2, lambda node, d: node.op in ("swiglu", "silu")), split_mode="tensor")
    message = str(caught.value)
    assert "%act = swiglu(%gateed" in message
    assert "cannot run on reference:0: swiglu is not for device 0; nor on reference:1: swiglu is not for" in message


@pytest.mark.parametrize("seed", range(4000, 4010))
def test_a_new_capability_never_makes_a_graph_fail(seed):
    graph, dice = seeded_graph(seed), random.Random(seed)
    able = {op: set(dice.sample(range(3), dice.randint(1, 3))) for op in sorted(set(REGISTRY) - NEEDED)}
    for _ in range(4):
        plan_for_group(
            graph, limited_group(3, lambda node, d: node.op in able and d not in able[node.op]), split_mode="tensor"
        )
        able[dice.choice(sorted(able))].add(dice.randrange(3))


# ------------------------------------------------------------------------------------------------------------ the rest


def test_a_state_that_is_placed_stays_there_over_plans():
    def graph(tokens):
        cache = state("cache", (16, 8))
        rows = ops.mul_mat(weight("k", (8, 4)), input("x", (tokens, 4)), name="rows")
        new = ops.set_rows(cache, rows, input("ids", (tokens,), "i32"), name="new")
        return Graph({"y": ops.mul_mat(new, ops.silu(rows), name="y")}, {cache: new})

    for mode in MODES:
        place = [("cache", "cpu:1"), ("^y$", "cpu:2")]
        group = group_of(3, "cpu")
        first = plan_for_group(graph(4), group, split_mode=mode, place=place)
        second = plan_for_group(graph(1), first.group, like=first, place=place)
        assert second.leaves["cache"] == first.leaves["cache"]
        assert isinstance(first.leaves["cache"], Local)
        store = Store(first.group)
        k = weight("k", (8, 4))
        store.bind("k", np.ones((8, 4), np.float32), k.spec, first.leaves["k"])
        Executor(first, store).run({"x": np.ones((4, 4)), "ids": [0, 1, 2, 3]})
        out = Executor(second, store).run({"x": np.ones((1, 4)), "ids": [4]})["y"]
        assert np.count_nonzero(out) == 5


def test_a_plan_like_another_follows_its_tensor_split():
    first = plan(decoder(), devices(2), split_mode="tensor", tensor_split=(3, 1))
    again = plan_for_group(
        decoder(), plan_from_json(plan_to_json(first)).group, like=plan_from_json(plan_to_json(first))
    )
    assert again.leaves == first.leaves


def test_planning_with_places_twice_gives_the_same_plan():
    def once():
        return plan(decoder(), devices(3), split_mode="tensor", place=[("gate|norm", "cpu:2")]).digest()

    assert once() == once()


def test_auto_with_placed_nodes_is_no_slower_than_one_device_with_them():
    slow = Hardware(link_latency=1.0)
    group = [find_device(name) for name in devices(3)]
    options = {"place": [("gateed", "cpu:2")], "hardware": slow}
    planned = plan_for_group(decoder(), group, split_mode="auto", **options)
    assert planned.cost.total <= plan_for_group(decoder(), group, split_mode="none", **options).cost.total


def test_a_plan_says_where_its_nodes_are_placed_in_full():
    graph = load_model(open_gguf(path_of("llama"))).graph(Step(1, 1, 256, 512, 1))
    new_plan = plan(graph, devices(2), split_mode="layer", place=[("ffn", "cpu:1")])
    names = [name for p in new_plan.pinned_nodes for name in p.nodes]
    assert sorted(names) == sorted(name for node, name in assign_names(graph).items() if not node.is_leaf)
    assert dataclasses.replace(new_plan, pinned_nodes=()).digest() == new_plan.digest()


def test_a_stage_names_placed_and_sharded_nodes_apart():
    plan = placed_plan()
    text = plan.explain()
    for kind, words in ((Local, "placed here"), (Shard, "cut on axis")):
        leaves = re.findall(rf"%([\w.]+)(?: and \d+ more)? {words}", text)
        assert leaves
        assert all(isinstance(plan.leaves[name], kind) for name in leaves)
