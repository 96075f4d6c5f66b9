"""The backend for devices of AMD: kernels in emulated waves of 64 lanes, its driver over stand-ins for CuPy, RCCL."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import Device
from hocket.backends.cupy import cuda_driver, hip_driver
from hocket.backends.cupy.collectives.transport import choose_transport
from hocket.backends.cupy.device import hiprtc
from hocket.backends.cupy.device.device_limits import DEFAULT_SHARED_BYTES, HIP_LIMITS
from hocket.backends.cupy.device.driver import HIP_HEADER, KernelLaunch, KernelSource
from hocket.backends.cupy.emulation.emulated_driver import EmulatedHipBackend
from hocket.backends.cupy.kernel_table import BINDINGS, SOURCES
from hocket.cli import main
from hocket.conformance import Outcome, run_case
from hocket.conformance.generate_cases import select_quick_cases
from hocket.graph import Graph, input, state, weight
from hocket.graph.errors import BackendError
from hocket.ops import REGISTRY
from hocket.ops.collectives import COLLECTIVES
from hocket.scheduler import load, plan, plan_for_group
from hocket.scheduler.costs.simulated_devices import parse_simulated_group

from ..given.devices.devices_meet import CASES, CollectiveRig, same, through_the_host
from ..given.devices.emulation import needs_compiler
from ..given.devices.tools import needs
from ..given.fakes.fake_cupy import fake_cupy
from ..given.fakes.fake_nccl import FakeNccl
from ..given.plans.grouped import everything_that_fits, weights_of


@pytest.mark.nightly(cases=20)
@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("name", sorted(BINDINGS))
def test_every_kernel_does_in_waves_of_64_lanes_what_its_op_means(name):
    """Ten cases of the quick run, which ``hocket check --backend hip-emulated`` makes whole."""
    cases = select_quick_cases(REGISTRY[name])
    check_cases(EmulatedHipBackend(), cases[:: max(1, len(cases) // 10)])


def check_cases(backend, cases):
    """One may have no reference, or more of something than a kernel takes, but none may lack a kernel."""
    for case in cases:
        result = run_case(case, backend, backend.device(0))
        is_large = result.outcome is Outcome.UNSUPPORTED and " are too " in result.why
        assert is_large or result.outcome in (Outcome.PASS, Outcome.NO_REFERENCE), f"{case}: {result.why}"


@pytest.mark.long
@needs_compiler
def test_emulated_devices_run_collectives_through_memory_of_the_host():
    x, up, down = input("x", (3, 32)), weight("up", (64, 32)), weight("down", (32, 64))
    graph, backend = Graph({"y": ops.mul_mat(down, ops.silu(ops.mul_mat(up, x)))}), EmulatedHipBackend()
    group = [(backend, backend.device(index)) for index in range(2)]
    rng = np.random.default_rng(0)
    values = {v.node.name: rng.standard_normal(v.shape).astype(np.float32) for v in (x, up, down)}
    sharded = plan_for_group(graph, group, choose=lambda g, f: everything_that_fits(g, f, random.Random(0)))
    assert any(i.op in COLLECTIVES for i in sharded.device_plans[0].program.instructions)
    two, one = (load(each_plan, weights_of(graph, values)) for each_plan in (sharded, plan(graph, ("reference:0",))))
    inputs = {"x": values["x"]}
    np.testing.assert_allclose(two.run(inputs)["y"], one.run(inputs)["y"], rtol=1e-4, atol=1e-4)
    assert backend.describe_transport([device for _, device in group]).startswith("through memory of the host")


# ------------------------------------------------------------------------------------------------ the driver of devices


def fake_compile(source, arch, compiler):
    """In place of machine code the number of the source."""
    assert (source.instructions, arch, compiler) == (HIP_HEADER, "gfx90a:sramecc+:xnack-", hiprtc)
    (number,) = (i for i, s in enumerate(SOURCES) if (s.file, s.names) == (source.file, source.names))
    return str(number), {name: name for name in source.names}


@pytest.fixture
def cupy(monkeypatch):
    """A stand-in for CuPy for ROCm, and for RCCL."""
    fake = fake_cupy(SOURCES, nccl=FakeNccl, is_hip=True)
    monkeypatch.setattr(cuda_driver, "_cupy", lambda: fake)
    monkeypatch.setattr(cuda_driver, "_nccl", lambda: fake.cuda.nccl)
    monkeypatch.setattr(hip_driver, "load_or_compile_cubin", fake_compile)
    monkeypatch.setattr(
        cuda_driver, "find_early_launch_library", lambda *_: pytest.fail("launches are asked to begin early")
    )
    cuda_driver._compile_and_load_module.cache_clear()
    yield fake
    cuda_driver._compile_and_load_module.cache_clear()


@pytest.mark.long(cases=1)
@needs_compiler
@pytest.mark.parametrize("name", ["add", "get_rows", "softmax", "mul_mat", "argsort", "gated_delta_net"])
def test_the_driver_makes_the_launches_of_the_emulated_one(name, cupy):
    cases = select_quick_cases(REGISTRY[name])
    check_cases(hip_driver.HipBackend(), cases[:: max(1, len(cases) // 6)])


@needs_compiler
def test_launches_of_a_program_follow_each_other_and_their_faults_are_reported(cupy):
    """A graph is captured nowhere, which the stand-in would refuse."""
    backend = hip_driver.HipBackend()
    table, old_state = weight("table", (4, 2), "f16"), state("kept", (3, 2))
    new = ops.add(old_state, ops.get_rows(table, input("ids", (3,), "i32"), name="rows"))
    graph = Graph({"y": ops.scale(new, scale=2.0)}, updates={old_state: new})
    values = {"table": np.arange(8, dtype=np.float16).reshape(4, 2)}
    run = load(plan_for_group(graph, [(backend, backend.device(0))]), values)
    assert run.run({"ids": [0, 1, 2]})["y"].tolist() == [[0, 2], [4, 6], [8, 10]]
    with pytest.raises(BackendError, match="%rows on hip:0: id -1 names no row"):
        run.run({"ids": [0, -1, 2]})
    assert run.run({"ids": [0, 0, 0]})["y"].tolist() == [[0, 4], [4, 8], [8, 12]]


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("case", ["a few", "all_gather", "send"])
def test_devices_run_collectives_with_rccl(case, cupy, monkeypatch):
    parts = CASES[case](2)
    expected, rig = through_the_host(monkeypatch, parts), CollectiveRig(hip_driver.HipBackend(), parts)
    for _ in range(2):
        same(rig.run(), expected)
    assert cupy.cuda.nccl.calls


def test_the_transport_of_devices_is_reported(cupy):
    driver, two = hip_driver.HipDriver(), [Device("hip", index) for index in range(2)]
    assert choose_transport(two, driver).description == "with RCCL 2.27.3: they do not reach each other's memory"
    parts = [Device("hip", 0, part=part) for part in range(2)]
    assert choose_transport(parts, driver).description.endswith("and RCCL joins no parts of one device")


@needs_compiler
def test_a_block_has_64_kib_of_memory_without_asking(cupy):
    driver, on = hip_driver.HipDriver(), Device("hip", 0)
    assert driver.limits(on) == HIP_LIMITS
    kernel = SOURCES[0][SOURCES[0].names[0]]
    driver.record([KernelLaunch(kernel, (1, 1, 1), (32, 1, 1), DEFAULT_SHARED_BYTES + 1024, (), (), 0)], on)


# ----------------------------------------------------------------------------------------------------------- messages


def test_what_has_not_run_on_a_device_is_listed_so(cupy, capsys):
    assert main(["devices"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hip:")]
    assert len(lines) == 4
    assert all("no GPU; has not run on a real device yet; meets others with RCCL" in line for line in lines)


def missing():
    raise ImportError("No module named 'cupy'")


@pytest.mark.parametrize(
    ("module", "driver", "message"),
    [
        (
            lambda: fake_cupy(()),
            hip_driver.HipDriver,
            "hip devices need another CuPy than this one for CUDA: run python -m pip install",
        ),
        (
            lambda: fake_cupy((), is_hip=True),
            cuda_driver.CudaDriver,
            "cuda devices need another CuPy than this one for ROCm",
        ),
        (missing, hip_driver.HipDriver, "hip devices need CuPy: run python -m pip install -e"),
    ],
    ids=["for CUDA", "for ROCm", "none"],
)
def test_without_cupy_for_these_devices_there_are_none(module, driver, message, monkeypatch):
    monkeypatch.setattr(cuda_driver, "_cupy", module)
    with pytest.raises(BackendError) as caught:
        driver().devices()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------- machine code


class Cupy:
    """A stand-in for CuPy that describes one device."""

    def __init__(self, arch):
        self.cuda = fake_cupy((), is_hip=True).cuda
        self.cuda.runtime.getDeviceProperties = lambda index: {"gcnArchName": arch}


@pytest.fixture
def gfx90a(monkeypatch, tmp_path):
    needs(hiprtc.load_hiprtc)
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda_driver, "_cupy", lambda: Cupy(b"gfx90a:sramecc+:xnack-"))


def test_a_source_is_compiled_for_the_device_and_cached(gfx90a, monkeypatch):
    source = KernelSource("rotary.cu", ("timesteps",), ("cells.cuh", "heads.cuh"))
    image, lowered = hip_driver.HipDriver().compile_source(source, 0)
    assert image.startswith(b"\x7fELF")
    assert lowered["timesteps"].encode() in image
    monkeypatch.setattr(hiprtc, "compile", lambda *_: pytest.fail("it is compiled again"))
    assert hip_driver.HipDriver().compile_source(source, 0) == (image, lowered)


def test_a_kernel_without_a_name_is_an_error(gfx90a, monkeypatch):
    source = KernelSource("rotary.cu", ("timesteps",), ("cells.cuh", "heads.cuh"))
    monkeypatch.setattr(hip_driver, "load_or_compile_cubin", lambda *_: (b"", {}))
    with pytest.raises(BackendError, match=r"does not say what timesteps of rotary\.cu is called; install ROCm 7"):
        hip_driver.HipDriver().compile_source(source, 0)


# ---------------------------------------------------------------------------------------------------------- planning


def test_plans_are_built_for_absent_devices_of_amd():
    x = input("x", (1, 64))
    graph = Graph({"y": ops.rms_norm(ops.mul_mat(weight("w", (64, 64), "q8_0"), x))})
    simulation = parse_simulated_group("mi300x:8")
    hardware = simulation.hardware_for(graph)
    assert hardware.bandwidth < simulation.hardware.bandwidth == 5.3e12
    assert hardware.source.startswith("estimate for mi300x")
    plan = plan_for_group(graph, simulation.group, hardware=simulation.hardware_for(graph))
    assert plan.device_plans[0].count_memory_bytes_by_kind()["weight"] == 64 * 64 // 32 * 34
    (backend, device), *_ = simulation.group
    assert "few<" in " ".join(called.kernel for called in backend.list_kernels(plan.device_plans[0].program, device))
