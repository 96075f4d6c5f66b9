"""Launches that may begin while the ones before them run: which do, how the driver is told, and that kernels wait."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest

from hocket import ops
from hocket.backends.cupy import cuda_driver
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.device import dependent_launch, disassembly, nvrtc
from hocket.backends.cupy.device.driver import (
    CollectiveLibraryExchange,
    KernelLaunch,
    find_kernel_files,
    read_kernel_text,
)
from hocket.backends.cupy.kernel_table import SOURCES
from hocket.backends.cupy.kernels.products import dense, packed, tiled
from hocket.backends.cupy.trial_binding import compute_scratch_bytes_at_placeholders
from hocket.graph import DType, Graph, input, weight
from hocket.graph.errors import BackendError
from hocket.scheduler import load, plan_for_group

from ..given.devices.emulation import needs_compiler
from ..given.devices.tools import needs
from ..given.fakes.fake_cupy import EarlyLibrary, install_fake_cupy

ASKING_FIRST = {
    *("packed_few.cu: few", "packed_few.cu: summed", "dense.cu: few", "rows.cu: scaled_norm"),
    *("rotary.cu: place_head", "rotary.cu: place_heads", "short_convolution.cu: delta_inputs"),
    *("short_convolution.cu: gated_norm", "gated_delta_net.cu: delta_net", "attention_cells.cu: attend_cells"),
    "attention_around.cu: attention_combine_few",
}
"""Kernels that ask for weights, or see where operands are, before they wait."""


@pytest.fixture
def cupy(monkeypatch):
    """A stand-in for CuPy, on a device and with a driver that begin launches early."""
    fake = install_fake_cupy(monkeypatch)
    fake.cuda.runtime.driverGetVersion = lambda: dependent_launch.MIN_EARLY_DRIVER_VERSION
    yield fake
    cuda_driver._compile_and_load_module.cache_clear()


def run_three(driver):
    """Three launches in a graph, since no product computes rows of 20 columns; the result is right."""
    backend = DriverBackend(driver)
    graph = Graph({"y": ops.neg(ops.mul_mat(weight("w", (8, 20), DType.F32), ops.exp(input("x", (1, 20)))))})
    w, x = np.ones((8, 20), np.float32), np.zeros((1, 20), np.float32)
    run = load(plan_for_group(graph, [(backend, backend.device(0))]), {"w": w})
    for _ in range(2):
        assert (run.run({"x": x})["y"] == -20).all()


def run_clusters(backend, monkeypatch):
    """Run a product with weight rows that two blocks of a cluster share."""
    compute_scratch_bytes_at_placeholders.cache_clear()
    monkeypatch.setattr(tiled, "choose_tile_shape", lambda *_, **__: (tiled.CLUSTER_TILE, 1))
    graph = Graph({"y": ops.mul_mat(weight("w", (256, 64), DType.BF16), input("x", (9, 64)))})
    run = load(plan_for_group(graph, [(backend, backend.device(0))]), {"w": np.full((256, 64), 0x3F80, np.uint16)})
    assert (run.run({"x": np.ones((9, 64), np.float32)})["y"] == 64).all()
    compute_scratch_bytes_at_placeholders.cache_clear()


@needs_compiler
def test_all_launches_of_a_graph_but_its_first_begin_early(cupy, monkeypatch):
    library = EarlyLibrary(cupy)
    monkeypatch.setattr(dependent_launch, "open_driver_library", lambda: library)
    run_three(cuda_driver.CudaDriver())
    assert library.launched == ["few<float, 1>", "unary<function::neg>"]


@needs_compiler
@pytest.mark.parametrize("what", ["device", "driver", "library", "asked"])
def test_launches_begin_in_turn_where_they_cannot_begin_early(what, cupy, monkeypatch):
    library = EarlyLibrary(cupy)
    monkeypatch.setattr(dependent_launch, "open_driver_library", lambda: None if what == "library" else library)
    driver = cuda_driver.CudaDriver(begins_early=what != "asked")
    if what == "device":
        monkeypatch.setattr(driver, "_capability", lambda index: "89")
    if what == "driver":
        cupy.cuda.runtime.driverGetVersion = lambda: dependent_launch.MIN_EARLY_DRIVER_VERSION - 10
    run_three(driver)
    assert not library.launched


@needs_compiler
def test_a_launch_that_the_driver_refuses_is_named(cupy, monkeypatch):
    library = EarlyLibrary(cupy, status=801)
    monkeypatch.setattr(dependent_launch, "open_driver_library", lambda: library)
    with pytest.raises(BackendError, match=r"dense.cu: few<float, 1>: 801"):
        run_three(cuda_driver.CudaDriver())


def test_a_launch_behind_an_exchange_begins_late():
    launch = KernelLaunch(SOURCES[0][SOURCES[0].names[0]], (1, 1, 1), (32, 1, 1), 0, (), (), 0)
    exchange = CollectiveLibraryExchange(None, (), 0)
    steps = [launch, launch, exchange, launch, launch, exchange, exchange]
    assert dependent_launch.compute_early_launch_flags(steps) == [False, True, False, False, True, False, False]
    assert dependent_launch.compute_early_launch_flags([]) == []


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("is_first", [False, True])
def test_clusters_are_launched_early_or_not(is_first, cupy, monkeypatch):
    library = EarlyLibrary(cupy)
    monkeypatch.setattr(dependent_launch, "open_driver_library", lambda: library)
    driver = cuda_driver.CudaDriver(begins_early=not is_first)
    run_clusters(DriverBackend(driver), monkeypatch)
    expected = {"clustered<bf16_bits, 2>": (1, 2, 1)}
    assert library.clusters == expected
    assert library.launched == ([] if is_first else ["clustered<bf16_bits, 2>"])


@needs_compiler
def test_clusters_need_the_library_of_the_driver(cupy, monkeypatch):
    monkeypatch.setattr(dependent_launch, "open_driver_library", lambda: None)
    with pytest.raises(BackendError, match=r"clustered<bf16_bits, 2> cannot be launched in clusters without libcuda"):
        run_clusters(DriverBackend(cuda_driver.CudaDriver()), monkeypatch)


def test_driver_attributes_have_the_layout_of_its_header():
    """cuda.h of CUDA 13: CUlaunchConfig, CUlaunchAttribute."""
    assert (ctypes.sizeof(dependent_launch.LaunchConfig), ctypes.sizeof(dependent_launch.LaunchAttribute)) == (56, 72)
    fields = {
        name: getattr(dependent_launch.LaunchConfig, name).offset for name, _ in dependent_launch.LaunchConfig._fields_
    }
    assert fields == {"grid": 0, "block": 12, "shared_bytes": 24, "stream": 32, "attributes": 40, "count": 48}
    assert dependent_launch.LaunchAttribute.value.offset == 8


# ------------------------------------------------------------------------------------------------------------ kernels

HEAD = re.compile(r"__global__ [^;{}]*?\b(\w+)\(const __grid_constant__ [^)]*\) \{\s*(?://.*\s*)?([^;]*;)")


def test_every_kernel_waits_for_earlier_launches_before_all_else():
    found = {}
    for file in (name for name in find_kernel_files() if name.endswith(".cu")):
        heads = HEAD.findall(read_kernel_text(file))
        assert len(heads) == read_kernel_text(file).count("__global__"), file
        found |= {f"{file}: {name}": first for name, first in heads}
    late = {name for name, first in found.items() if first != "wait_for_earlier();"}
    assert late == ASKING_FIRST
    assert all("wait_for_earlier();" in read_kernel_text(name.partition(":")[0]) for name in late)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "name", "asks"),
    [
        (packed.GEMV_SOURCE_BY_DTYPE[DType.Q4_K], "few<Q4_K, 1>", "LDG.E.EF.128"),
        (packed.GEMV_SOURCE_BY_DTYPE[DType.Q8_0], "few<Q8_0, 4>", "LDG.E.EF.128"),
        (dense.SOURCES[0], dense.SOURCES[0].names[0], "CCTL.E.PF2"),
    ],
)
def test_machine_code_asks_for_weights_before_it_waits(source, name, asks):
    needs(nvrtc.load_nvrtc, disassembly.find_nvdisasm)
    code = disassembly.run_disassembler(nvrtc.compile(source[name].single_kernel_source, "sm_90a").image)
    order = [word for line in code.splitlines() for word in (asks, "ACQBULK", "PREEXIT") if f" {word} " in line]
    asked = order.index(asks)
    assert "PREEXIT" in order[:asked], "the launches before choose its experts"
    assert order[asked:].index("ACQBULK") < order[asked:].index("PREEXIT")
    before = disassembly.run_disassembler(nvrtc.compile(source[name].single_kernel_source, "sm_89").image)
    assert not {"ACQBULK", "PREEXIT"} & set(before.split())
