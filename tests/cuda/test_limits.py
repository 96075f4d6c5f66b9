"""Limits of a device decide which kernels run there, and errors of a driver arrive in one line."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import Device
from hocket.backends.cupy import cuda_driver
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.binding.launch_builder import MAX_DECLARED_SHARED_BYTES, LaunchBuilder
from hocket.backends.cupy.binding.weight_packing import PLANE_LAYOUTS
from hocket.backends.cupy.collectives.hang_watchdog import HangWatchdog
from hocket.backends.cupy.device import nvrtc
from hocket.backends.cupy.device.device_limits import (
    DEFAULT_SHARED_BYTES,
    KIB,
    LARGEST_LIMITS,
    MAX_SHARED_BYTES,
    MULTIPROCESSORS,
    RESERVED_SHARED_BYTES,
    KernelLimits,
    find_kernel_limits,
)
from hocket.backends.cupy.device.driver import KernelLaunch
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.kernel_resources import read_resource_table
from hocket.backends.cupy.kernel_table import SOURCES
from hocket.backends.cupy.kernels.products import packed
from hocket.backends.cupy.kernels.recurrent import gated_delta_net
from hocket.backends.fusion.operands import NoKernelError
from hocket.graph import Graph, input
from hocket.graph.errors import BackendError
from hocket.scheduler import load, plan_for_group

from ..given.devices.devices_meet import CollectiveRig, all_reduce_case, same
from ..given.devices.emulation import needs_compiler
from ..given.fakes.fake_cupy import StreamError, install_fake_cupy
from ..given.fakes.fake_nccl import FakeNccl

CONSUMER = find_kernel_limits("89")
TOKENS = 70


def rule(channels: bool, exact: bool) -> Graph:
    """The delta rule over a prompt, keys of 128."""
    q, k = (input(name, (1, TOKENS, 1, 128)) for name in "qk")
    v, g = input("v", (1, TOKENS, 1, 16)), input("g", (1, TOKENS, 1, 128 if channels else 1))
    beta, state = input("beta", (1, TOKENS, 1)), input("state", (1, 1, 16, 128))
    outputs = ops.gated_delta_net(q, k, v, g, beta, state, exact=exact)
    return Graph({"y": outputs[0]})


def values(graph: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    arrays = {x.node.name: 0.1 * rng.standard_normal(x.shape).astype(np.float32) for x in graph.inputs}
    return {**arrays, "g": -np.abs(arrays["g"])}


class Noting(EmulatedDriver):
    """A driver that records launches."""

    def record(self, steps, on):
        self.launched = list(steps)
        return super().record(steps, on)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(
    ("channels", "exact", "kernel"),
    [(False, True, "delta_scan<128, 32, 16, false, true>"), (True, True, "delta_net<128, true, true, 8, 1>")],
    ids=["by chunks", "token by token instead of by chunks"],
)
def test_a_prompt_runs_where_a_block_has_99_kib(channels, exact, kernel):
    graph = rule(channels, exact)
    driver = Noting(limits=CONSUMER)
    small, large = DriverBackend(driver), DriverBackend(EmulatedDriver())
    (node,) = (n for n in graph.nodes if n.op == "gated_delta_net")
    assert small.supports(node, small.device(0)).ok
    results = [
        load(plan_for_group(graph, [(backend, backend.device(0))]), {}).run(values(graph))["y"]
        for backend in (small, large)
    ]
    assert kernel in {launch.kernel.name for launch in driver.launched}
    assert all(
        launch.shared_bytes + MAX_DECLARED_SHARED_BYTES <= CONSUMER.shared_bytes_per_block for launch in driver.launched
    )
    assert np.square(results[0] - results[1]).sum() < (1e-10 if exact else 1e-4) * np.square(results[1]).sum()


def test_a_launch_that_no_block_has_the_memory_for_is_no_kernel():
    kernel = SOURCES[0][SOURCES[0].names[0]]
    launches = LaunchBuilder(upload_array=lambda array: 0, limits=CONSUMER)
    with pytest.raises(NoKernelError, match=r"takes 110000 bytes of shared memory; a block has 101376 here"):
        launches.add_launch(kernel, 1, 32, (), 110_000)
    LaunchBuilder(upload_array=lambda array: 0).add_launch(kernel, 1, 32, (), 110_000)


def test_an_unknown_device_has_the_limits_of_all():
    assert [find_kernel_limits(n) for n in ("90", "120", "999")] == [
        LARGEST_LIMITS,
        KernelLimits(99 * KIB),
        KernelLimits(DEFAULT_SHARED_BYTES),
    ]
    assert min(MAX_SHARED_BYTES.values()) > DEFAULT_SHARED_BYTES


@pytest.mark.parametrize("arch", MULTIPROCESSORS)
def test_a_multiprocessor_holds_the_largest_block_that_its_architecture_allows(arch):
    assert (
        find_kernel_limits(arch.strip("sm_a")).shared_bytes_per_block + RESERVED_SHARED_BYTES
        <= MULTIPROCESSORS[arch].shared_bytes
    )


# Limits of an H200, from its machine code.
@pytest.mark.parametrize(("threads", "registers", "shared", "blocks"), [
    (512, 62, 5 * 1024, 2),
    (256, 52, 0, 4),
    (128, 151, 25088, 3),
    (128, 80, 1228, 6),
    (256, 58, 83 * 1024, 2),
    (64, 220, 115 * 1024, 1),
    (128, 198, 4096, 2),
    (1024, 80, 0, 0),
])  # fmt: skip
def test_a_multiprocessor_holds_as_many_blocks_as_fit(threads, registers, shared, blocks):
    assert MULTIPROCESSORS["sm_90a"].compute_resident_blocks(threads, registers, shared) == blocks


def test_kernels_that_size_much_memory_declare_little():
    """Check that kernels of variable size leave the shared memory of `Launches.fits` free."""
    chunked = {
        name
        for c in gated_delta_net.CHUNK_VARIANTS
        for name in (c.prepare_name, *map(c.format_scan_name, gated_delta_net.SLICE_ROWS))
    }
    sized = {name: rows for name, rows in read_resource_table().kernels.items() if name.split(": ")[1] in chunked}
    of_attention = tuple(f"attention_{name}.cu" for name in ("tiles", "short", "cells", "warpgroups", "roles"))
    tiles = (*of_attention, "warpgroups.cu: grouped", "clusters.cu", "product_roles.cu")
    sized |= {name: rows for name, rows in read_resource_table().kernels.items() if name.startswith(tiles)}
    assert len(sized) > len(chunked)
    books = {f"warpgroups.cu: grouped_packed<{t.name}>": packed.count_code_book_bytes(t) for t in PLANE_LAYOUTS}
    for name, rows in sized.items():
        declared = max(row.shared_bytes for row in rows.values())
        assert declared <= MAX_DECLARED_SHARED_BYTES + books.get(name, 0), "`choose_tile_shape` adds the code book"


# -------------------------------------------------------------------------------------------------- errors of drivers


@pytest.fixture
def cupy(monkeypatch):
    """Install a stand-in for CuPy, from which the driver of CUDA devices is built."""
    yield install_fake_cupy(monkeypatch, nccl=FakeNccl)
    cuda_driver._compile_and_load_module.cache_clear()


def fails(*_: object) -> None:
    raise StreamError("CUDA_ERROR_INVALID_VALUE:\ninvalid argument")


CUDA_ERROR = "CUDA_ERROR_INVALID_VALUE: invalid argument; if that goes on, start the process anew"


@needs_compiler
def test_memory_that_a_driver_refuses_is_one_line(cupy):
    cupy.cuda.driver.funcSetAttribute = fails
    source = next(s for s in SOURCES if s.file == "rows.cu")
    launch = KernelLaunch(source[source.names[0]], (1, 1, 1), (32, 1, 1), 50 << 10, (), (), 0)
    with pytest.raises(BackendError) as caught:
        cuda_driver.CudaDriver().record([launch], Device("cuda", 0))
    assert str(caught.value) == f"cuda:0 cannot record launches: {CUDA_ERROR}"


@pytest.mark.parametrize(
    ("call", "action", "what"),
    [
        ("getDeviceProperties", lambda driver: driver.device(0), "cuda:0 cannot say what it is"),
        ("memcpyAsync", lambda driver: load_tensors(driver), "cuda:0 cannot copy from the host"),
        (
            "hostRegister",
            lambda driver: driver.map_signal_pad(np.ones(1), True),
            "cuda devices cannot share memory of the host",
        ),
    ],
    ids=["properties", "copies", "pinning"],
)
def test_an_error_of_the_runtime_is_one_line(cupy, call, action, what):
    setattr(cupy.cuda.runtime, call, fails)
    with pytest.raises(BackendError) as caught:
        action(cuda_driver.CudaDriver())
    assert str(caught.value) == f"{what}: {CUDA_ERROR}"


def load_tensors(driver: cuda_driver.CudaDriver) -> None:
    on = Device("cuda", 0)
    driver._get_host_transfers(on).move_to_device(np.ones(4, np.uint8), driver.alloc(16, on).array[:4])


def test_devices_that_reach_each_other_already_still_do(cupy):
    """Another library may have opened their memory: the error 704 is none, and CuPy has cleared it when it raises."""
    two = [Device("cuda", 0), Device("cuda", 1)]
    assert cuda_driver.CudaDriver().enable_peer_access(two)
    assert cuda_driver.CudaDriver().enable_peer_access(two)


@needs_compiler
def test_a_stream_without_waits_of_a_library_is_not_watched(cupy, monkeypatch):
    monkeypatch.setattr(HangWatchdog, "wait_for_stream", fails)
    parts = all_reduce_case(2, (40,))
    rig = CollectiveRig(cuda_driver.CudaBackend(), parts)
    assert all(replay._collectives.transport.library is not None for replay in rig.replays)
    same(rig.run(), [[parts[0][0].source + parts[1][0].source]] * 2)


def test_the_newest_compiler_is_taken(monkeypatch, tmp_path):
    """Check two wheels: the folder of CUDA 12 comes before the one of CUDA 13 in the alphabet."""
    files = ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13", "cu13/lib/libnvrtc.alt.so.13")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    for of_system, newest in (
        (None, "libnvrtc.so.13"),
        ("libnvrtc.so.14", "libnvrtc.so.14"),
        ("libnvrtc.so.11.2", "libnvrtc.so.13"),
    ):
        monkeypatch.setattr(nvrtc, "find_library", lambda name, at=of_system: at)
        assert nvrtc.list_nvrtc_libraries_newest_first()[0].name == newest
        assert len(nvrtc.list_nvrtc_libraries_newest_first()) == 2 + (of_system is not None)
