"""Plans in the disk cache: a plan that is read back is the one that was saved, and no other entry is ever used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hocket
from hocket.backends.base import find_devices
from hocket.backends.cpu.backend import CpuBackend
from hocket.scheduler import Executor, Plan, Store, plan_cache, plan_with_cache
from hocket.scheduler.planning import planner
from hocket.scheduler.planning.workload import Workload
from hocket.scheduler.serialisation.plan_json import plan_to_json

from ...given.graphs.random_graphs import seeded_graph

PLANNED_GROUPS = {"alone": ["cpu:0"], "three": ["cpu:0", "cpu:1", "numpy:0"], "alike": ["cpu:0", "cpu:1"]}


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that are made, not read."""
    built: list[Plan] = []

    def record_plan(*args, **named):
        built.append(real(*args, **named))
        return built[-1]

    real = planner.plan_for_group
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(planner, "plan_for_group", record_plan)
    return built


def files(folder: Path) -> list[Path]:
    return sorted((folder / "plans").iterdir())


@pytest.mark.parametrize("mode", ["auto", "tensor", "layer"])
@pytest.mark.parametrize("devices", PLANNED_GROUPS)
def test_what_is_read_back_is_what_was_planned(plans, devices, mode):
    graph, group = seeded_graph(3), find_devices(PLANNED_GROUPS[devices])
    first = plan_with_cache(graph, group, split_mode=mode)
    again = plan_with_cache(seeded_graph(3), group, split_mode=mode)
    assert len(plans) == 1
    assert plan_to_json(again) == plan_to_json(first)
    assert again.explain(steps=True) == first.explain(steps=True)
    like = [plan_with_cache(graph, group, like=plan) for plan in (first, again)]
    assert len(plans) == 2
    assert plan_to_json(like[0]) == plan_to_json(like[1])


def test_it_runs(plans):
    w = np.linspace(-1, 1, 32 * 64, dtype=np.float32).reshape(64, 32)
    x = np.ones((2, 32), np.float32)
    graph = hocket.Graph({"y": hocket.ops.mul_mat(hocket.weight("w", (64, 32)), hocket.input("x", (2, 32)))})
    group = find_devices(["numpy:0", "numpy:1"])
    for _ in range(2):
        plan = plan_with_cache(graph, group, split_mode="tensor")
        store = Store(plan.group)
        store.bind("w", w, graph.weights[0].spec, plan.leaves["w"])
        np.testing.assert_allclose(Executor(plan, store).run({"x": x})["y"], x @ w.T, rtol=1e-5, atol=1e-5)
    assert len(plans) == 1


def test_a_plan_for_one_use_is_not_taken_for_another_in_the_same_words(plans):
    group, graphs = find_devices(["cpu:0", "cpu:1"]), [seeded_graph(seed) for seed in (3, 4)]

    def use(graph, part):
        return Workload(lambda sequences, tokens: graph, (part,), prompt_tokens=64, new_tokens=8)

    uses = [use(graphs[0], 64), use(graphs[0], 64), use(graphs[0], 32), use(graphs[1], 64)]
    assert len({str(each) for each in uses}) == 1
    for each, planned in zip(uses, (1, 1, 2, 3), strict=True):
        plan_with_cache(graphs[0], group, use=each)
        assert len(plans) == planned


def test_what_is_damaged_foreign_or_of_another_form_is_planned_anew(plans, tmp_path):
    group, options = find_devices(["cpu:0"]), ({}, {"place": [(".", "cpu:0")]})
    texts = [plan_to_json(plan_with_cache(seeded_graph(4), group, **chosen)) for chosen in options]
    one, other = files(tmp_path)
    whole = one.read_bytes()
    for wrong in (b"", whole[:-1], whole[:40] + b"?" + whole[41:], other.read_bytes()):
        one.write_bytes(wrong)
        before = len(plans)
        assert [plan_to_json(plan_with_cache(seeded_graph(4), group, **chosen)) for chosen in options] == texts
        assert len(plans) == before + 1
        assert one.read_bytes() == whole
    plan_cache.write_cached(one, b'{"lanes": 3}')
    assert [plan_to_json(plan_with_cache(seeded_graph(4), group, **chosen)) for chosen in options] == texts


def test_a_process_lists_the_sources_of_the_planner_once():
    first = plan_cache._list_planner_source_file_versions()
    assert len(first) > 100
    assert plan_cache._list_planner_source_file_versions() is first


def test_another_graph_group_or_option_has_another_plan(plans, tmp_path, monkeypatch):
    graph = seeded_graph(5)
    plan_with_cache(graph, find_devices(["cpu:0"]))
    plan_with_cache(graph, find_devices(["cpu:1"]))
    plan_with_cache(graph, find_devices(["cpu:0"], threads=3))
    plan_with_cache(graph, find_devices(["cpu:0", "cpu:1"]))
    plan_with_cache(graph, find_devices(["cpu:0", "cpu:1"]), tensor_split=(3, 1))
    plan_with_cache(seeded_graph(6), find_devices(["cpu:0"]))
    monkeypatch.setattr(plan_cache, "_list_planner_source_file_versions", lambda: ["another"])
    plan_with_cache(graph, find_devices(["cpu:0"]))
    assert len(plans) == len(files(tmp_path)) == 7


class Foreign(CpuBackend):
    """A backend of another package, with unknown source."""


def test_plans_for_backends_of_others_are_not_cached(plans, tmp_path):
    backend = Foreign()
    for _ in range(2):
        plan_with_cache(seeded_graph(5), [(backend, backend.device(0))])
    assert len(plans) == 2
    assert not (tmp_path / "plans").exists()


def test_a_folder_that_cannot_be_written_costs_time_only(plans, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        plan_with_cache(seeded_graph(5), find_devices(["cpu:0"]))
    assert len(plans) == 2
