"""Plans as data: JSON, digest, explanation, difference, memory, goldens, and the command that prints them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import find_devices
from hocket.cli import main
from hocket.graph import BackendError, Graph, HocketError, PlanError, input, to_json, weight
from hocket.graph.layer_folding import find_adjacent_repetitions
from hocket.scheduler import load, plan, plan_for_group
from hocket.scheduler.costs.hardware import DEFAULT_HARDWARE, Hardware
from hocket.scheduler.costs.simulated_devices import parse_simulated_group
from hocket.scheduler.ir.formatting import format_devices
from hocket.scheduler.planning.memory_fit import describe_memory_problem, list_memory_pools
from hocket.scheduler.reports.plan_diff import diff_plans, group_names_that_differ_in_numbers
from hocket.scheduler.serialisation.plan_json import plan_from_json, plan_to_json
from hocket.scheduler.sharding.search.collapse_layers import collapse_repeated_layers_to_two

from ..given.graphs.random_graphs import bindings, seeded_graph
from ..given.models.goldens import GOLDENS, decode_graph, path_of
from ..given.plans.faults import tensor_plan

PLANS = GOLDENS / "plans"


def test_numbers_of_numpy_are_python_numbers_in_a_plan():
    group, hardware = find_devices(["numpy:0", "numpy:1"]), Hardware(machine=np.int64(2))
    shares = [np.int64(1), np.float32(2)]
    asked = plan_for_group(mlp(), group, split_mode="tensor", tensor_split=shares, hardware=hardware)
    assert plan_from_json(plan_to_json(asked)).shares == (1, 2.0)


def mlp(columns=256, rows=64):
    x = input("x", (3, rows))
    up = ops.silu(ops.mul_mat(weight("up", (columns, rows)), x))
    return Graph({"y": ops.add(x, ops.mul_mat(weight("down", (rows, columns)), up))})


# --------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("mode", ["tensor", "layer", "auto"])
@pytest.mark.parametrize("seed", range(8))
def test_a_plan_read_back_is_the_plan_and_runs(seed, mode):
    graph = seeded_graph(seed)
    new_plan = plan(graph, "cpu:0,cpu:1,cpu:2", split_mode=mode)
    again = plan_from_json(plan_to_json(new_plan))
    assert again.digest() == new_plan.digest()
    assert plan_to_json(again) == plan_to_json(new_plan)
    assert again.explain(steps=True) == new_plan.explain(steps=True)
    assert diff_plans(new_plan, again) == ()
    arrays = bindings(graph, np.random.default_rng(seed))
    weights = {v.node.name: arrays[v.node.name] for v in graph.weights}
    inputs = {v.node.name: arrays[v.node.name] for v in graph.inputs}
    want, got = load(new_plan, weights).run(inputs), load(again, weights).run(inputs)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1", "numpy:0"])
@pytest.mark.parametrize("factor", [np.nan, np.inf, -np.inf])
def test_an_attribute_may_be_nan_or_infinite(factor, devices):
    x = input("x", (8, 4))
    result = plan(Graph({"y": ops.scale(x, scale=float(factor))}), devices, split_mode="layer")
    again = plan_from_json(plan_to_json(result))
    assert again.digest() == result.digest()
    ones = np.ones(x.shape, np.float32)
    np.testing.assert_array_equal(load(again, {}).run({"x": ones})["y"], factor * ones)


def test_a_plan_for_simulated_devices_is_read_back():
    simulation = parse_simulated_group("h200:2,nvlink")
    plan = plan_for_group(mlp(), simulation.group, split_mode="tensor", hardware=simulation.hardware)
    again = plan_from_json(plan_to_json(plan))
    assert again.cost == plan.cost
    assert again.digest() == plan.digest()


@pytest.mark.long
def test_the_digest_is_the_same_in_another_process_with_another_hash_seed():
    code = (
        "import sys; from hocket.frontends.models import Step; from hocket.frontends.open_model import open_model;"
        "from hocket.scheduler import plan; graph = open_model(sys.argv[1]).graph(Step(1, 1, 64, 64, 1));"
        "print(plan(graph, 'cpu:0,cpu:1,cpu:2', split_mode='tensor').digest())"
    )
    layouts = set()
    for seed in ("0", "77"):
        done = subprocess.run(
            [sys.executable, "-c", code, path_of("qwen35")],
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            check=True,
        )
        layouts.add(done.stdout)
    assert layouts == {plan(decode_graph("qwen35"), "cpu:0,cpu:1,cpu:2", split_mode="tensor").digest() + "\n"}


def test_the_digest_tells_plans_apart_but_not_their_predictions():
    one, two = (plan(mlp(), "cpu:0,cpu:1", split_mode=mode) for mode in ("tensor", "layer"))
    assert one.digest() != two.digest()
    group = [(device_plan.backend, device_plan.device) for device_plan in one.device_plans]
    fast = replace(DEFAULT_HARDWARE, flops=2 * DEFAULT_HARDWARE.flops, bandwidth=2 * DEFAULT_HARDWARE.bandwidth)
    faster = plan_for_group(mlp(), group, split_mode="tensor", hardware=fast)
    assert faster.sharded_factors == one.sharded_factors
    assert faster.cost != one.cost
    assert faster.digest() == one.digest()


def refusal(text):
    """Why `text` is no plan, or nothing; any other error is a failure."""
    try:
        plan_from_json(text)
    except HocketError as why:
        return str(why)
    return ""


@pytest.mark.long
def test_a_damaged_plan_is_refused_in_one_line():
    document = json.loads(plan_to_json(plan(mlp(), "cpu:0,cpu:1", split_mode="tensor")))
    rng = random.Random(5)
    refused = 0
    for _ in range(300):
        broken = json.loads(json.dumps(document))
        where: object = broken
        while True:
            key = rng.choice(sorted(where)) if isinstance(where, dict) else rng.randrange(len(where))
            if not isinstance(where[key], dict | list) or not where[key] or rng.random() < 0.1:
                break
            where = where[key]
        where[key] = rng.choice([None, -1, 10**30, "x", [], {}, 1.5, True])
        refused += bool(why := refusal(json.dumps(broken)))
        assert "\n" not in why
    assert refused > 150


def test_launches_and_messages_that_take_no_time_are_read_back_and_speeds_of_zero_are_not():
    free = replace(DEFAULT_HARDWARE, launch=0.0, link_latency=0.0, across_latency=0.0)
    plan = plan_for_group(mlp(), find_devices(["cpu:0", "cpu:1"], None), split_mode="tensor", hardware=free)
    text = plan_to_json(plan)
    assert plan_from_json(text).hardware == free
    for speed in ("flops", "bandwidth", "link_bandwidth", "across_bandwidth"):
        document = json.loads(text)
        document["hardware"][speed] = 0
        assert "has a speed of zero" in refusal(json.dumps(document))


def test_a_name_of_two_lines_is_refused_in_one():
    text = plan_to_json(plan(mlp(), "cpu:0"))
    document = json.loads(text)
    buffers = document["programs"][0]["buffers"]
    for buffer in buffers:
        broken = json.loads(text)
        renamed = [[b[0], "two\nlines" if b == buffer else b[1], *b[2:]] for b in buffers]
        broken["programs"][0]["buffers"] = renamed
        assert "\n" not in refusal(json.dumps(broken))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", '{"format": 3}', '{"format": "hocket-plan-1"}', "[" * 99999]
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(PlanError) as why:
        plan_from_json(text)
    assert "\n" not in str(why.value)


def test_a_plan_whose_layout_is_not_that_of_its_programs_is_refused():
    document = json.loads(plan_to_json(plan(mlp(), "cpu:0,cpu:1", split_mode="tensor")))
    document["leaves"]["up"] = "R"
    with pytest.raises(PlanError, match=r"%up is f32\[128,64\] on cpu:0, need f32\[256,64\]"):
        plan_from_json(json.dumps(document))


def exchange(entries):
    """Let the first two entries of a list change places."""
    entries[0], entries[1] = entries[1], entries[0]


TAMPERED = {
    "devices have each other's shards": lambda d: exchange(d["leaves"]["down"]["runs"]),
    "a shard is there twice": lambda d: d["leaves"]["down"]["runs"].__setitem__(1, d["leaves"]["down"]["runs"][0]),
    "two steps are exchanged": lambda d: exchange(d["programs"][0]["instructions"]),
    "an output is a sum still owed": lambda d: d["outputs"].update(z="P"),
    "what undoes a step is not there": lambda d: d["programs"][1]["undo"].clear(),
    "what undoes a step is in another order": lambda d: exchange(d["programs"][0]["undo"]),
    "what undoes a step is said of another": lambda d: d["programs"][0]["undo"][0].__setitem__(0, 0),
}


@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED)
def test_a_plan_that_was_tampered_with_is_refused(tamper):
    document = json.loads(plan_to_json(replace(tensor_plan(), hardware=DEFAULT_HARDWARE)))
    assert not refusal(json.dumps(document))
    tamper(document)
    assert refusal(json.dumps(document))


def test_a_plan_for_a_device_that_is_not_there_is_refused():
    document = json.loads(plan_to_json(plan(mlp(), "cpu:0")))
    document["lanes"][0]["kind"] = "abacus"
    with pytest.raises(BackendError, match="abacus"):
        plan_from_json(json.dumps(document))


# -------------------------------------------------------------------------------------------------------- explanation


def test_the_explanation_names_each_collective_and_the_weight_that_causes_it():
    text = plan(mlp(), "cpu:0,cpu:1", split_mode="tensor").explain()
    assert "1 all_reduce" in text.splitlines()[0]
    assert "is a sum over the devices: %down is cut on axis 1" in text
    assert "%up and 1 more cut on axis 0" in text


def test_the_explanation_lists_instructions_only_when_asked():
    new_plan = plan(mlp(), "cpu:0,cpu:1")
    assert "->" not in new_plan.explain()
    assert new_plan.explain(steps=True).count("mul_mat ") == 2 * len(new_plan.device_plans)


def test_a_layer_split_shows_its_copies():
    text = plan(mlp(), "cpu:0,cpu:1", split_mode="layer").explain()
    assert "copy cpu:0 -> cpu:1" in text
    assert "is made on cpu:0 and read on cpu:1" in text
    assert "  runs that follow each other through 2 devices are 2.09 times as fast as one by one" in text
    assert "follow each other" not in plan(mlp(), "cpu:0,cpu:1", split_mode="tensor").explain()


def test_stages_cover_every_instruction_of_every_device_once():
    for seed in range(6):
        for mode in ("tensor", "layer"):
            new_plan = plan(seeded_graph(seed), "cpu:0,cpu:1,cpu:2", split_mode=mode)
            for device, device_plan in enumerate(new_plan.device_plans):
                work = sum(s.instruction_count for s in new_plan.timeline if s.op == "work" and device in s.devices)
                stage_count = sum(device in s.devices for s in new_plan.timeline if s.op != "work")
                assert work + stage_count == len(device_plan.program.instructions)


def test_the_predicted_time_of_a_plan_is_between_its_busiest_device_and_all_stages_in_turn():
    for mode in ("tensor", "layer"):
        new_plan = plan(mlp(), "cpu:0,cpu:1", split_mode=mode)
        own = [sum(s.seconds for s in new_plan.timeline if d in s.devices) for d in range(2)]
        assert max(own) <= new_plan.cost.total + 1e-12
        assert new_plan.cost.total <= sum(s.seconds for s in new_plan.timeline) + 1e-12


def test_repeats_are_found_and_nothing_is_lost():
    assert list(find_adjacent_repetitions("abcbcbcd")) == [(0, 1, 1), (1, 2, 3), (7, 1, 1)]
    assert list(find_adjacent_repetitions("aaaa")) == [(0, 1, 4)]
    assert list(find_adjacent_repetitions("")) == []


def test_devices_in_a_row_are_listed_together():
    assert format_devices(["cpu:0", "cpu:1", "cpu:2", "cpu:5", "cuda:0"]) == "cpu:0-2 cpu:5 cuda:0"


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen35"])
def test_the_plan_of_a_small_model_is_the_golden_one(name, update_golden):
    simulation = parse_simulated_group("cpu:2")
    plan = plan_for_group(decode_graph(name), simulation.group, split_mode="tensor", hardware=simulation.hardware)
    text, path = plan.explain() + "\n", PLANS / f"{name}.txt"
    if update_golden:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path.name} is missing; run pytest --update-golden and read what it wrote"
    assert text == path.read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------- search


def deep(layers):
    """Layers that differ in nothing, and a last one that gives fewer rows."""
    x = input("x", (4, 64))
    for i in range(layers):
        up = ops.silu(ops.mul_mat(weight(f"up.{i}", (256, 64)), ops.rms_norm(x)))
        x = ops.add(x, ops.mul_mat(weight(f"down.{i}", (64, 256)), up))
    return Graph({"y": ops.mul_mat(weight("out", (128, 64)), x)})


def test_a_collapsed_graph_has_each_repeated_part_twice_and_counts_the_rest():
    small = collapse_repeated_layers_to_two(deep(40))
    assert len(small.graph.weights) < 10
    assert sum(small.node_multiplicity[v.node] or 1 for v in small.graph.weights) == 81
    assert {name for names in small.leaf_copies.values() for name in names} == {v.node.name for v in deep(40).weights}


@pytest.mark.nightly(cases=4)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("hardware", ["h200:8", "cpu:3", "rtx3090:4,ethernet"])
@pytest.mark.parametrize("name", ["deep", "llama", "qwen3moe", "qwen3next", "qwen35moe"])
def test_the_search_finds_the_same_in_the_collapsed_graph_as_in_the_whole(name, hardware, monkeypatch):
    graph, simulation = deep(12) if name == "deep" else decode_graph(name), parse_simulated_group(hardware)
    planned = plan_for_group(graph, simulation.group, split_mode="tensor", hardware=simulation.hardware)
    monkeypatch.setattr(
        "hocket.scheduler.sharding.search.greedy_search.collapse_repeated_layers_to_two", lambda graph: None
    )
    whole = plan_for_group(graph, simulation.group, split_mode="tensor", hardware=simulation.hardware)
    assert planned.sharded_factors == whole.sharded_factors
    assert planned.reasons == whole.reasons
    assert planned.digest() == whole.digest()


# --------------------------------------------------------------------------------------------------------- difference


def test_the_difference_names_layouts_collectives_memory_and_time():
    before = plan_for_group(mlp(), parse_simulated_group("cpu:2").group, split_mode="layer")
    after = plan_for_group(mlp(), parse_simulated_group("cpu:2").group, split_mode="tensor")
    text = "\n".join(diff_plans(before, after))
    for part in (
        "layout: %up: L0 -> S0(128|128)",
        "removed: 1 send",
        "added: 1 all_reduce",
        "memory: cpu:1:",
        "time: ",
    ):
        assert part in text
    assert diff_plans(before, before) == ()


def test_names_of_layers_are_joined_in_one_range():
    assert group_names_that_differ_in_numbers(["blk.0.up", "blk.1.up", "out"]) == ["%blk.*.up (2)", "%out"]


# ------------------------------------------------------------------------------------------------------------- memory


def test_what_fits_is_no_problem():
    assert describe_memory_problem(plan_for_group(mlp(), parse_simulated_group("h200:2").group)) is None


def test_a_plan_that_does_not_fit_comes_with_two_remedies():
    graph = mlp(columns=2**19, rows=2**13)  # two weights of 16 GiB each
    problem = describe_memory_problem(plan_for_group(graph, parse_simulated_group("rtx3090:1").group))
    assert "rtx3090:0: needs 32" in problem
    assert "use 2 such devices with split_mode='tensor', or use a model with fewer bits" in problem


def test_virtual_devices_of_a_machine_share_its_memory():
    new_plan = plan(mlp(), "cpu:0,cpu:1,cpu:2")
    (pool,) = list_memory_pools(new_plan)
    assert pool.is_shared
    assert pool.needed_bytes == sum(new_plan.count_memory_bytes_by_kind().values())
    assert len(list_memory_pools(plan_for_group(mlp(), parse_simulated_group("cpu:3").group, split_mode="tensor"))) == 3


def test_auto_shards_a_model_that_does_not_fit_on_one_device():
    graph = mlp(columns=2**19, rows=2**13)
    assert (
        describe_memory_problem(
            plan_for_group(graph, parse_simulated_group("rtx3090:2,ethernet").group, split_mode="auto")
        )
        is None
    )


# -------------------------------------------------------------------------------------------------------- command line


def test_the_command_prints_a_plan_without_reading_weights(tmp_path, capsys):
    header = tmp_path / "header.gguf"
    header.write_bytes(path_of("qwen3").read_bytes()[:-4096])  # the last weights are missing
    assert main(["plan", str(header), "--simulate", "h200:2,nvlink", "-c", "64"]) == 0
    out = capsys.readouterr().out
    assert "(simulated)" in out
    assert "stage  where" in out


def test_the_command_prints_json_that_diff_reads(tmp_path, capsys):
    path = tmp_path / "plan.json"
    flags = [str(path_of("llama")), "-c", "64", "--devices", "cpu:0,cpu:1"]
    assert main(["plan", *flags, "--split-mode", "tensor", "--json", "-o", str(path)]) == 0
    out = capsys.readouterr().out
    assert out == path.read_text()
    assert plan_from_json(out).device_plans[1].device.index == 1
    assert main(["plan", *flags, "--split-mode", "tensor", "--diff", str(path)]) == 0
    assert capsys.readouterr().out == "the plans do the same\n"
    assert main(["plan", *flags, "--split-mode", "layer", "--diff", str(path)]) == 0
    assert "added: 1 send" in capsys.readouterr().out


def test_the_command_plans_a_graph_in_a_file(tmp_path, capsys):
    path = tmp_path / "graph.json"
    path.write_text(to_json(mlp()))
    assert main(["plan", str(path), "--devices", "cpu:0,cpu:1", "--split-mode", "tensor"]) == 0
    assert "1 all_reduce" in capsys.readouterr().out


def test_the_command_plans_a_prefill(capsys):
    assert main(["plan", str(path_of("llama")), "-c", "64", "--phase", "prefill", "-b", "32"]) == 0
    assert "cpu:0" in capsys.readouterr().out


def test_the_command_fails_where_the_plan_does_not_fit(tmp_path, capsys):
    path = tmp_path / "graph.json"
    path.write_text(to_json(mlp(columns=2**19, rows=2**13)))
    assert main(["plan", str(path), "--simulate", "rtx3090"]) == 1
    assert "does not fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--simulate", "abacus:3"], "h200"),
        (["--diff", "missing.json"], "missing.json"),
        (["--split-mode", "diagonal"], "diagonal"),
    ],
)
def test_wrong_usage_of_the_command_costs_one_line(flags, message, capsys):
    assert main(["plan", str(path_of("llama")), *flags]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_file_that_is_no_plan_costs_one_line(tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff{}")
    assert main(["plan", str(path_of("llama")), "--diff", str(path)]) == 2
    assert "is no plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("lanes", "device_plans"), ("cuts", "sharded_factors"), ("placed", "pinned_nodes")),
        *(("spare", "unused_devices"), ("prices", "instruction_costs"), ("stages", "timeline")),
        ("together", "pipelined_timeline"),
    ],
)
def test_an_old_name_warns_and_gives_the_attribute_with_the_new_name(old: str, new: str):
    x = input("x", (4,))
    tiny_plan = plan(Graph({"y": ops.silu(x)}), "numpy:0")
    with pytest.warns(DeprecationWarning, match=f"Plan.{old} is now called {new}"):
        assert getattr(tiny_plan, old) is getattr(tiny_plan, new)
