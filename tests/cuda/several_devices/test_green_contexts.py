"""Parts of one device with multiprocessors of their own: names, calls of the driver, collectives, faults and waits."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import threading
from dataclasses import replace

import numpy as np
import pytest

from hocket import ops
from hocket.backends import find_device
from hocket.backends.base import Device
from hocket.backends.cupy import cuda_driver
from hocket.backends.cupy.collectives.transport import choose_transport
from hocket.backends.cupy.device import dependent_launch, green_contexts
from hocket.backends.cupy.device.driver import has_shared_multiprocessors
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.hip_driver import HipBackend
from hocket.backends.device_name import DeviceName
from hocket.benchmarks.gpu.device_parts import collectives, multiprocessors
from hocket.benchmarks.gpu.harness import BenchmarkDevice, NothingToMeasure
from hocket.benchmarks.gpu.machine import make_machine
from hocket.graph import Graph, input, weight
from hocket.graph.errors import BackendError
from hocket.scheduler import plan_for_group
from hocket.scheduler.planning.memory_fit import list_memory_pools
from hocket.scheduler.serialisation.plan_json import plan_from_json, plan_to_json

from ...given.devices.devices_meet import CASES, CollectiveRig, all_reduce_case, same, through_the_host
from ...given.devices.emulation import needs_compiler
from ...given.fakes.fake_cupy import Stream, install_fake_cupy
from ...given.fakes.fake_green_contexts import give_green_contexts
from ...given.fakes.fake_nccl import FakeNccl

DIVISION = ["cuDeviceGet", "cuDeviceGetDevResource", "cuDevSmResourceSplitByCount"]
CREATION = [*DIVISION, "cuDeviceGet", "cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxStreamCreate"]


@pytest.fixture
def cupy(monkeypatch):
    """A stand-in for CuPy with four devices."""
    yield install_fake_cupy(monkeypatch, nccl=FakeNccl)
    cuda_driver._compile_and_load_module.cache_clear()
    green_contexts.make_green_context.cache_clear()


def make_sum_plan(group):
    """A plan of two products over a group, with a sum."""
    hidden = ops.relu(ops.mul_mat(weight("up", (12, 8)), input("x", (5, 8))))
    return plan_for_group(Graph({"y": ops.mul_mat(weight("down", (8, 12)), hidden)}), group, split_mode="tensor")


def parts_of(count, multiprocessors=64):
    return [Device("cuda", 0, 1 << 30, "no GPU", part, multiprocessors=multiprocessors) for part in range(count)]


# -------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["cuda:0/64.0", "cuda:1/8.15", "toy-kind:3/4.2@1"])
def test_a_name_with_multiprocessors_is_read_and_written(name):
    assert str(DeviceName.parse(name)) == name


@pytest.mark.parametrize("name", ["cuda:0/64", "cuda:0/.1", "cuda:0/0.1", "cuda:0/x.1", "cuda:0/-8.1", "cuda:0/8/8.1"])
def test_a_name_without_its_part_or_its_multiprocessors_is_one_line(name):
    with pytest.raises(BackendError, match=r"after the / comes the multiprocessors of each part.* as in cuda:0/64\.1"):
        find_device(name)


def test_devices_without_multiprocessors_are_not_divided_by_them():
    with pytest.raises(BackendError, match=r"^device cpu:0/2\.1: cpu devices are not divided by multiprocessors; name"):
        find_device("cpu:0/2.1")
    with pytest.raises(BackendError, match=r"^device hip:0/64\.1: hip devices are not divided .* as hip:0\.1$"):
        HipBackend().require_multiprocessors(Device("hip", 0, part=1, multiprocessors=64))


def test_parts_of_one_division_share_no_multiprocessors():
    two, other = parts_of(2), Device("cuda", 1)
    assert not has_shared_multiprocessors([*two, other])
    assert has_shared_multiprocessors([two[0], parts_of(2, 32)[1]]), "their groups overlap"
    assert has_shared_multiprocessors([two[0], Device("cuda", 0)])
    assert has_shared_multiprocessors([replace(part, multiprocessors=None) for part in two])


def test_a_plan_for_divided_devices_comes_back_from_json():
    group = [find_device(f"cuda-emulated:0/2.{part}") for part in range(2)]
    plan = make_sum_plan(group)
    back = plan_from_json(plan_to_json(plan))
    assert [str(lane.device) for lane in back.device_plans] == ["cuda-emulated:0/2.0", "cuda-emulated:0/2.1"]
    assert plan_to_json(back) == plan_to_json(plan)


# ---------------------------------------------------------------------------------------------- calls of the driver


def test_a_part_takes_these_calls_and_its_context_is_created_once(cupy, monkeypatch):
    library, driver = give_green_contexts(monkeypatch, cupy), cuda_driver.CudaDriver()
    first, second = parts_of(2)
    streams = [driver.stream(first), driver.stream(second)]
    assert library.calls == 2 * CREATION
    assert [library.contexts[library.context_of(s)] for s in streams] == [range(64), range(64, 128)]
    side = driver._make_stream(first, cuda_driver.HIGH_PRIORITY)
    assert library.calls == [*2 * CREATION, "cuGreenCtxStreamCreate"]
    assert library.context_of(side) == library.context_of(streams[0])
    assert library.priorities == [0, 0, -1]
    del side
    gc.collect()
    assert library.calls[-1] == "cuStreamDestroy_v2"
    assert len(library.streams) == 2
    assert driver.count_multiprocessors(first) == 64


def test_threads_make_one_context_for_a_part(cupy, monkeypatch):
    library, driver, device = give_green_contexts(monkeypatch, cupy), cuda_driver.CudaDriver(), parts_of(1)[0]
    threads = [threading.Thread(target=driver.stream, args=[device]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(library.contexts) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:0/64.2", r"there is no device cuda:0/64\.2: 132 multiprocessors make 2 parts of 64"),
        ("cuda:0/133.0", r"there is no device cuda:0/133\.0: 132 multiprocessors make 0 parts of 133"),
        ("cuda:0/132.0", r"there is no device cuda:0/132\.0: 132 multiprocessors make 0 parts of 132"),
        ("cuda:0/16.7", r"there is no device cuda:0/16\.7: 132 multiprocessors make 7 parts of 16"),
        ("cuda:0/60.1", r"the driver makes parts of 64 multiprocessors for 60; name parts as cuda:0/64\.0"),
    ],
)
def test_a_division_that_the_device_does_not_have_is_one_line(name, message, cupy, monkeypatch):
    library = give_green_contexts(monkeypatch, cupy)
    with pytest.raises(BackendError, match=message) as caught:
        find_device(name)
    assert "\n" not in str(caught.value)
    assert not library.contexts
    assert not find_device("cuda:0/64.1")[1].rank
    assert not library.contexts, "a name alone creates nothing"


@pytest.mark.parametrize("version", [12020, 12040])
def test_an_old_driver_is_one_line(version, cupy, monkeypatch):
    give_green_contexts(monkeypatch, cupy)
    cupy.cuda.runtime.driverGetVersion = lambda: version
    message = (
        rf"cuda:0/64\.1: .* need a driver for CUDA 12\.5 or later, and this one is for 12\.{version % 100 // 10}; "
    )
    with pytest.raises(BackendError, match=message + r"name the part as cuda:0\.1$"):
        find_device("cuda:0/64.1")


def test_a_missing_driver_is_one_line(cupy, monkeypatch):
    give_green_contexts(monkeypatch, cupy)
    monkeypatch.setattr(green_contexts, "open_driver_library", lambda: None)
    with pytest.raises(BackendError, match=r"cuda:0/64\.1: the library of the CUDA driver is missing"):
        find_device("cuda:0/64.1")


@pytest.mark.parametrize("refused", dict.fromkeys(CREATION))
def test_a_call_that_the_driver_refuses_is_one_line(refused, cupy, monkeypatch):
    give_green_contexts(monkeypatch, cupy, refused=refused)
    with pytest.raises(BackendError, match=r"^cuda:0/64\.1 cannot (divide|make).*: 801; if that goes on") as caught:
        cuda_driver.CudaDriver().stream(find_device("cuda:0/64.1")[1])
    assert "\n" not in str(caught.value)


def test_the_resource_has_the_layout_of_the_header():
    """cuda.h of CUDA 13.0: CUdevResource and its flags."""
    own = green_contexts.DeviceResource
    assert ctypes.sizeof(own) == 144
    assert [getattr(own, name).offset for name in ("kind", "count", "smallest", "alignment")] == [0, 96, 100, 104]
    flags = green_contexts.MULTIPROCESSOR_RESOURCE, green_contexts.DEFAULT_STREAM, green_contexts.NON_BLOCKING
    assert flags == (1, 1, 1)


# --------------------------------------------------------------------------------------------- collectives and graphs


@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_divided_parts_run_collectives_in_one_graph_over_their_common_memory(case, cupy, monkeypatch):
    library = give_green_contexts(monkeypatch, cupy)
    backend, parts = cuda_driver.CudaBackend(), CASES[case](2)
    rig = CollectiveRig(backend, parts, devices=parts_of(2))
    expected = through_the_host(monkeypatch, parts)
    for _ in range(2):
        same(rig.run(), expected)
    assert all(replay._collectives.transport.has_peer_access for replay in rig.replays)
    assert all(len(replay._calls) == 1 for replay in rig.replays)
    assert not cupy.cuda.runtime.enabled, "a device reaches its own memory"
    own = [library.context_of(backend.driver.stream(device)) for device in rig.group.devices]
    assert len(set(own)) == 2


@needs_compiler
def test_every_stream_of_a_recording_is_of_the_part_of_its_device(cupy, monkeypatch):
    """A launch that were captured in another stream would run on all multiprocessors."""
    library, used = give_green_contexts(monkeypatch, cupy), []
    begin = Stream.begin_capture
    monkeypatch.setattr(
        Stream, "begin_capture", lambda stream: (used.append(library.context_of(stream)), begin(stream))
    )
    rig = CollectiveRig(cuda_driver.CudaBackend(), CASES["all_gather"](2), devices=parts_of(2))
    rig.run()
    assert sorted(set(used)) == sorted(library.contexts)


@needs_compiler
@pytest.mark.parametrize("reporting_rank", [0, 1])
def test_a_part_that_never_comes_is_named_within_its_patience(reporting_rank, cupy, monkeypatch):
    give_green_contexts(monkeypatch, cupy)
    rig = CollectiveRig(cuda_driver.CudaBackend(), all_reduce_case(2, (40,)), devices=parts_of(2))
    right, absent = rig.run(), 1 - reporting_rank
    named = rf"collective 10 on device {reporting_rank} of 2: device {absent} did not arrive"
    with pytest.raises(BackendError, match=rf"on cuda:0/64\.{reporting_rank}: {named}"):
        rig.run_without(absent, reporting_rank=reporting_rank)
    same(rig.run(), right)


@needs_compiler
def test_a_part_that_fails_ends_the_wait_of_the_other(cupy, monkeypatch):
    give_green_contexts(monkeypatch, cupy)
    rig = CollectiveRig(cuda_driver.CudaBackend(), all_reduce_case(2, (40,)), devices=parts_of(2))
    right = rig.run()

    def fail_on_one_rank(rank):
        if rank == 1:
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        rig.run(ahead=fail_on_one_rank)
    assert "another device failed" in str(dict(rig.failures)[0])
    same(rig.run(), right)


def test_parts_have_one_memory_of_the_size_of_the_device(cupy, monkeypatch):
    give_green_contexts(monkeypatch, cupy)
    backend = cuda_driver.CudaBackend()
    plan = make_sum_plan([(backend, device) for device in parts_of(2)])
    (pool,) = list_memory_pools(plan)
    assert pool.memory_bytes == 1 << 30


# --------------------------------------------------------------------------------------------------------------- NCCL


@pytest.mark.parametrize(
    ("version", "variable", "message"),
    [
        (22703, "1", r"NCCL 2\.27\.3 joins no parts of one device \(2\.30 and later do\)"),
        (23002, "0", r"NCCL 2\.30\.2 joins parts of one device only with NCCL_MULTI_RANK_GPU_ENABLE=1"),
        (23002, "1", ""),
    ],
)
def test_nccl_joins_parts_of_a_device_where_its_version_does(version, variable, message, cupy, monkeypatch):
    give_green_contexts(monkeypatch, cupy)
    monkeypatch.setattr(FakeNccl, "get_version", lambda self: version)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", variable)
    driver = cuda_driver.CudaDriver()
    found = driver.find_collective_library(parts_of(2))
    assert re.match(message, found) if message else found.name == "NCCL 2.30.2"
    shared = [replace(part, multiprocessors=None) for part in parts_of(2)]
    assert driver.find_collective_library(shared) == "NCCL joins no parts of one device"
    assert choose_transport(parts_of(2), driver).has_peer_access
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == variable


# ---------------------------------------------------------------------------------------------------------- emulation


@needs_compiler
def test_emulated_parts_exchange_over_their_memory_only_if_they_are_divided():
    divided = [find_device(f"cuda-emulated:0/4.{part}") for part in range(2)]
    shared = [find_device(f"cuda-emulated:0.{part}") for part in range(2)]
    (backend, one), (_, other) = divided
    assert backend.describe_transport([one, other]) == "over each other's memory"
    assert "on multiprocessors that they share" in backend.describe_transport([device for _, device in shared])
    assert backend.driver.count_multiprocessors(one) == 4
    assert np.unique([str(device) for _, device in divided]).size == 2
    assert dependent_launch.MIN_EARLY_DRIVER_VERSION < green_contexts.MIN_GREEN_DRIVER_VERSION


# ---------------------------------------------------------------------------------------------------------- benchmark


@needs_compiler
def test_the_benchmark_counts_wrong_results_and_runs_that_do_not_end_with_an_error(monkeypatch):
    driver = EmulatedDriver(0)
    parts = [find_device(f"cuda-emulated:0/2.{part}")[1] for part in range(2)]
    calls = collectives.make_collective_calls(2, np.random.default_rng(0))
    wrong = {title: collectives.check_collective(driver, parts, own, 2)["wrong"] for title, own in calls.items()}
    assert wrong == dict.fromkeys(calls, 0)
    (gathered,), other = calls["all_gather"]
    planted = replace(gathered, expected=gathered.expected + 1)
    assert collectives.check_collective(driver, parts, [[planted], other], 2)["wrong"] == 2
    monkeypatch.setattr(collectives, "ABSENCE_TIMEOUT_SECONDS", 0.2)
    row = collectives.check_absent_device(driver, parts, is_lost=False)
    assert row["right"]
    assert "device 1 did not arrive within 0.2 s" in str(row["message"])
    monkeypatch.setattr(collectives, "MAX_FAULT_SECONDS", 0.0)
    assert not collectives.check_absent_device(driver, parts, is_lost=False)["right"]


def test_a_device_that_cannot_be_divided_is_left_out(cupy):
    driver = cuda_driver.CudaDriver()
    bench = BenchmarkDevice(driver, make_machine(driver, driver.device(0), cupy), driver.device(0), tiny=True)
    with pytest.raises(NothingToMeasure, match=r"cuda:0/8\.1: the library of the CUDA driver is missing"):
        multiprocessors.divide_device(bench, 2)
