"""Short memory: shares by the memory of devices, and the host, which takes weights that do not fit elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import Device, find_device
from hocket.backends.numpy.backend import NumpyBackend
from hocket.cli import main
from hocket.frontends.commands.plan import make_requested_and_session_plans
from hocket.frontends.gguf import open_gguf
from hocket.frontends.inference import device_group
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import load_model
from hocket.graph import BackendError, Graph, input, weight
from hocket.scheduler import HostOffload, load, plan, plan_for_group
from hocket.scheduler.planning.memory_fit import compute_missing_bytes, describe_memory_problem
from hocket.scheduler.serialisation.plan_json import plan_from_json, plan_to_json

from ...given.models.goldens import FLOAT_CACHES, nmse, path_of, tokens_of
from ...given.models.large_headers import llama_405b

MODES = ("none", "layer", "tensor", "auto")


class Small(NumpyBackend):
    """Two devices with little memory."""

    name = "small"

    def __init__(self, *memory):
        self.memory = memory

    def devices(self):
        return tuple(map(self.device, range(len(self.memory))))

    def device(self, index):
        if index >= len(self.memory):
            raise BackendError(f"there is no small:{index}")
        return Device("small", index, self.memory[index])


def small_group(*memory):
    backend = Small(*memory)
    return [(backend, device) for device in backend.devices()]


HOST = HostOffload(*find_device("numpy:0"))


def tower(layers=16, width=32):
    """Equal layers, one after the other, each of 4 KiB."""
    x = input("x", (1, width))
    for i in range(layers):
        x = ops.silu(ops.mul_mat(weight(f"w.{i}", (width, width)), x, name=f"h.{i}"), name=f"x.{i}")
    return Graph({"y": x})


def weight_pages(plan):
    return {
        str(device_plan.device): device_plan.count_memory_bytes_by_kind()["weight"] >> 12
        for device_plan in plan.device_plans
    }


@pytest.mark.parametrize("mode", ["none", "layer", "auto"])
def test_weights_that_do_not_fit_stay_on_the_host(mode):
    graph = tower()
    new_plan = plan_for_group(graph, small_group(45_000), split_mode=mode, host=HOST)
    assert weight_pages(new_plan) == {"small:0": 10, "numpy:0": 6}
    assert not compute_missing_bytes(new_plan)
    assert "weights that do not fit stay on numpy:0" in new_plan.explain()
    data = {v.node.name: np.random.default_rng(1).standard_normal(v.shape) for v in graph.weights}
    feed = {"x": np.ones((1, 32))}
    want = load(plan(graph, "numpy:0"), data).run(feed)["y"]
    np.testing.assert_array_equal(load(new_plan, data).run(feed)["y"], want)


def test_the_host_takes_no_more_than_it_must_of_several_devices():
    plan = plan_for_group(tower(), small_group(33_500, 21_000), split_mode="layer", host=HOST)
    assert weight_pages(plan) == {"small:0": 8, "small:1": 5, "numpy:0": 3}


def test_a_layer_split_follows_the_memory_of_devices():
    plan = plan_for_group(tower(), small_group(150_000, 50_000), split_mode="layer")
    assert weight_pages(plan) == {"small:0": 12, "small:1": 4}
    asked = plan_for_group(tower(), small_group(150_000, 50_000), split_mode="layer", tensor_split=(1, 1))
    assert weight_pages(asked) == {"small:0": 8, "small:1": 8}


def test_what_fits_does_without_the_host():
    for mode in MODES:
        plan = plan_for_group(tower(), small_group(1 << 20), split_mode=mode, host=HOST)
        assert [str(device_plan.device) for device_plan in plan.device_plans] == ["small:0"]


def test_shards_are_not_moved_to_the_host():
    plan = plan_for_group(tower(), small_group(20_000, 20_000), split_mode="tensor", host=HOST)
    assert describe_memory_problem(plan)


def test_weights_that_exceed_devices_and_host_are_reported_for_the_devices():
    tiny = Small(10_000)
    poor = HostOffload(tiny, Device("host", 0, 20_000))
    plan = plan_for_group(tower(), small_group(30_000), split_mode="none", host=poor)
    assert [str(device_plan.device) for device_plan in plan.device_plans] == ["small:0"]
    problem = describe_memory_problem(plan)
    assert problem
    assert "small:0: needs" in problem


def test_a_simulated_host_takes_what_does_not_fit_at_its_own_speed():

    graph = Graph(
        {
            "y": ops.mul_mat(
                weight("b", (100_000, 100_000), "f16"),
                ops.mul_mat(weight("a", (100_000, 100_000), "f16"), input("x", (1, 100_000))),
            )
        }
    )
    asked, plan = make_requested_and_session_plans(graph, DeviceGroup(split_mode="auto"), "rtx3090:1")
    assert describe_memory_problem(asked)
    assert [str(device_plan.device) for device_plan in plan.device_plans] == ["rtx3090:0", "cpu:0"]
    assert plan.host is not None
    assert plan.host.bandwidth < plan.hardware.bandwidth
    assert plan.cost.total > 20e9 / 20e9 / 2  # the host reads its 20 GB of weights from its own memory
    assert plan_from_json(plan_to_json(plan)).cost == plan.cost


@pytest.mark.long
def test_the_command_says_what_does_not_fit_and_plans_with_the_host(tmp_path, capsys):
    path = llama_405b(tmp_path / "model.gguf", layers=15)
    assert main(["plan", path, "--simulate", "rtx3090:1", "-c", "1024"]) == 1
    out, err = capsys.readouterr()
    assert "weights that do not fit stay on cpu:0" in out
    assert "use 2 such devices" in err
    assert "in this plan the rest is on cpu:0" in err


@pytest.fixture(scope="module")
def logits_and_memory_bytes_of_one_device():
    one = Session(load_model(open_gguf(path_of("qwen35"))), on=DeviceGroup(**FLOAT_CACHES))
    logits = one.evaluate([tokens_of("qwen35")], every_position=True)[0]
    return logits, sum(one._layout_plan.count_memory_bytes_by_kind().values())


@pytest.mark.long
@pytest.mark.parametrize("mode", ["none", "layer", "auto"])
def test_a_session_uses_the_host_for_what_does_not_fit(mode, monkeypatch, logits_and_memory_bytes_of_one_device):
    model = load_model(open_gguf(path_of("qwen35")))
    tokens = tokens_of("qwen35")
    want, total = logits_and_memory_bytes_of_one_device
    small = Small(int(total * 0.6))
    known = {"small:0": (small, small.device(0))}
    monkeypatch.setattr(device_group, "find_device", lambda name: known.get(name) or find_device(name))
    many = Session(model, on=DeviceGroup(devices=("small:0",), split_mode=mode, **FLOAT_CACHES))
    assert [str(device) for _, device in many.group] == ["small:0", "cpu:0"]
    parts = [tokens[:5], *([t] for t in tokens[5:])]
    stepped = np.concatenate([many.evaluate([part], every_position=True)[0] for part in parts])
    assert nmse(stepped, want) <= 1e-10
