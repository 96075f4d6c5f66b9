"""Parts of one device: devices of their own that share its memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from hocket import ops
from hocket.backends import find_device
from hocket.backends.base import Device
from hocket.backends.cupy import cuda_driver
from hocket.cli import main
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.graph import Graph, input, weight
from hocket.graph.errors import BackendError, PlanError
from hocket.scheduler import load, plan, plan_for_group
from hocket.scheduler.planning.memory_fit import describe_memory_problem, list_memory_pools
from hocket.scheduler.serialisation.plan_json import plan_from_json, plan_to_json

from ...given.devices.devices_meet import CASES, CollectiveRig, all_reduce_case, same, through_the_host
from ...given.devices.emulation import needs_compiler
from ...given.fakes.fake_cupy import install_fake_cupy
from ...given.models.goldens import path_of


@pytest.fixture
def backend(monkeypatch):
    """Real devices, over a stand-in for CuPy, of 1 GiB each."""
    install_fake_cupy(monkeypatch)
    yield cuda_driver.CudaBackend()
    cuda_driver._compile_and_load_module.cache_clear()


def mlp(rows=8, columns=12):
    hidden = ops.relu(ops.mul_mat(weight("up", (columns, rows)), input("x", (5, rows))))
    return Graph({"y": ops.mul_mat(weight("down", (rows, columns)), hidden)})


def parts_of(backend, count):
    whole = backend.device(0)
    return [(backend, Device(whole.kind, 0, whole.memory, whole.description, part)) for part in range(count)]


def test_a_part_is_named_after_its_device():
    assert str(Device("cuda", 1)) == "cuda:1"
    assert str(Device("cuda", 1, part=0)) == "cuda:1.0"
    assert [str(find_device(name)[1]) for name in ("cpu", "cpu:3", "cpu:0.1")] == ["cpu:0", "cpu:3", "cpu:0.1"]


@pytest.mark.parametrize("name", ["cpu:.1", "cpu:0.", "cpu:0.x", "cpu:0.1.2", "cpu:-1", "cpu:0.-1"])
def test_what_is_no_name_of_a_part_is_one_line(name):
    with pytest.raises(BackendError, match=r"after the colon comes a number, as in cpu:0, or cpu:0\.1 for a part"):
        find_device(name)


def test_a_device_named_twice_gets_a_hint_about_parts():
    with pytest.raises(
        PlanError, match=r"name each once, and at least one; parts of one device are named as cuda:0\.0"
    ):
        plan(mlp(), ("cpu:0", "cpu:0"))


def test_parts_share_the_memory_of_their_device(backend):
    plan = plan_for_group(mlp(), [*parts_of(backend, 2), (backend, backend.device(1))], split_mode="tensor")
    shared, own = list_memory_pools(plan)
    assert [str(lane.device) for lane in shared.device_plans] == ["cuda:0.0", "cuda:0.1"]
    assert shared.memory_bytes == own.memory_bytes == 1 << 30
    assert shared.needed_bytes == sum(sum(lane.count_memory_bytes_by_kind().values()) for lane in plan.device_plans[:2])


def test_what_does_not_fit_on_two_parts_does_not_fit(backend):
    """Cut in two, each of 0.75 GiB."""
    graph = mlp(2**13, 3 * 2**14)
    plan = plan_for_group(graph, parts_of(backend, 2), split_mode="tensor")
    assert "cuda:0.0, cuda:0.1: needs 3" in describe_memory_problem(plan)
    four = [(backend, backend.device(index)) for index in range(4)]
    assert describe_memory_problem(plan_for_group(graph, four, split_mode="tensor")) is None


def test_a_plan_for_parts_comes_back_from_json(monkeypatch):
    new_plan = plan(mlp(), ("cpu:0.0", "cpu:0.1", "cpu:1"), split_mode="tensor")
    back = plan_from_json(plan_to_json(new_plan))
    assert [str(lane.device) for lane in back.device_plans] == ["cpu:0.0", "cpu:0.1", "cpu:1"]
    assert plan_to_json(back) == plan_to_json(new_plan)


def test_parts_run_side_by_side_on_the_processor():
    run = load(
        plan(mlp(), ("cpu:0.0", "cpu:0.1"), split_mode="tensor"), {"up": np.ones((12, 8)), "down": np.ones((8, 12))}
    )
    assert (run.run({"x": np.ones((5, 8))})["y"] == 96).all()


@needs_compiler
@pytest.mark.parametrize("case", ["a few", "many in place", "all_gather", "reduce_scatter", "all_to_all", "send"])
def test_parts_of_one_gpu_run_collectives_through_the_host(case, backend, monkeypatch):
    """A kernel that waits for one of the same GPU may keep it from starting."""
    parts = CASES[case](2)
    rig = CollectiveRig(backend, parts, devices=[device for _, device in parts_of(backend, 2)])
    for _ in range(2):
        same(rig.run(), through_the_host(monkeypatch, parts))
    assert not backend.driver.enable_peer_access(rig.group.devices)
    assert not any(replay._collectives.transport.has_device_collectives for replay in rig.replays)
    assert backend.driver.stream(rig.group.devices[0]) is not backend.driver.stream(rig.group.devices[1])
    del rig
    gc.collect()


@needs_compiler
def test_a_part_that_never_comes_is_named(backend):
    rig = CollectiveRig(backend, all_reduce_case(2, (40,)), devices=[device for _, device in parts_of(backend, 2)])
    right = rig.run()
    with pytest.raises(BackendError, match=r"on cuda:0\.0: collective 10 on device 0 of 2: device 1 did not arrive"):
        rig.run_without(1)
    same(rig.run(), right)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("division", ["", "/2"])
def test_a_model_on_two_parts_of_a_device_gives_the_bits_of_two_devices(division):
    path = path_of("qwen3")

    def logits(*devices):
        session = Session(open_model(path), on=DeviceGroup(devices=devices, split_mode="tensor"), context=64)
        return [session.evaluate([part])[0].tobytes() for part in ([3, 4, 5], [6])]

    parts = (f"cuda-emulated:0{division}.{part}" for part in (0, 1))
    assert logits(*parts) == logits("cuda-emulated:0", "cuda-emulated:1")


def test_the_command_takes_parts_and_names_their_transport(capsys, monkeypatch, backend):
    monkeypatch.setattr(cuda_driver, "CudaBackend", lambda: backend)
    model = str(path_of("qwen3"))
    assert main(["plan", model, "--devices", "cuda:0.0,cuda:0.1", "--split-mode", "tensor", "-c", "64"]) == 0
    out = capsys.readouterr().out
    assert " steps on cuda:0.0-1; " in out
    assert "\n  cuda:0.0-1 meet through memory of the host: kernels of parts of one device must not wait" in out
    assert main(["devices"]) == 0
    assert "no GPU; meets others over each other's memory\n" in capsys.readouterr().out
