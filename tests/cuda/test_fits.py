"""The resources of kernels fit devices of each kind, for every launch of the kit's quick cases and of models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import pytest

from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.cuda_driver import CudaDriver, SimulatedGpuDriver
from hocket.backends.cupy.device import nvrtc
from hocket.backends.cupy.device.device_limits import DEFAULT_SHARED_BYTES, HIP_LIMITS, KernelLimits, find_kernel_limits
from hocket.backends.cupy.device.driver import KernelInstance, KernelLaunch
from hocket.backends.cupy.kernel_resources import ARCHITECTURES, ResourceRow, read_resource_table
from hocket.backends.cupy.kernel_table import BINDINGS, SOURCES
from hocket.backends.cupy.program_binding import bind_program_at_placeholders
from hocket.conformance.checks.case_graph import build_case_graph, build_verified_device_plan
from hocket.conformance.generate_cases import select_quick_cases
from hocket.frontends.models import Step
from hocket.frontends.open_model import open_model
from hocket.graph import DType, Graph, input, weight
from hocket.ops import REGISTRY, mul_mat

from ..given.devices.tools import needs
from ..given.models.goldens import INDEX, path_of

GRID = (2**31 - 1, 65535, 65535)
OF_A_WARP = 256
"""Registers that a warp gets at a time."""


@dataclass(frozen=True)
class Kind:
    """A kind of device: the architecture of its code, block limits, multiprocessors and registers per block."""

    arch: str
    limits: KernelLimits
    processors: int
    registers: int | None = 1 << 16


PROCESSORS = {"sm_80": 108, "sm_86": 82, "sm_89": 128, "sm_90a": 132, "sm_100": 148, "sm_120": 170}
KINDS = {
    **{arch: Kind(arch, find_kernel_limits(arch.strip("sm_a")), n) for arch, n in PROCESSORS.items()},
    # Declared shared memory is the same there; the compiler distributes registers by the threads of a block.
    "gfx942": Kind("sm_90a", HIP_LIMITS, 304, None),
}


@cache
def compile_resources(kernel: KernelInstance, arch: str) -> nvrtc.KernelResources:
    """Compile a kernel with a generated prologue, which the table of resources does not have."""
    needs(nvrtc.load_nvrtc)
    return nvrtc.compile(replace(kernel.source, names=(kernel.name,)), arch).resources[kernel.name]


def lacking(launch: KernelLaunch, row: ResourceRow | nvrtc.KernelResources, kind: Kind) -> Iterator[str]:
    """Yield the resources that a launch exceeds."""
    threads = prod(launch.block)
    if threads > row.threads:
        yield f"{threads} threads of {row.threads}"
    registers = -(-threads // 32) * -(-32 * row.registers // OF_A_WARP) * OF_A_WARP
    if kind.registers is not None and registers > kind.registers:
        yield f"{registers} registers of {kind.registers}"
    shared = row.shared_bytes + launch.shared_bytes
    limit = (
        kind.limits.shared_bytes_per_block if launch.shared_bytes > DEFAULT_SHARED_BYTES else DEFAULT_SHARED_BYTES
    )  # else the driver asks for no more
    if shared > limit:
        yield f"{shared} bytes of shared memory of {limit}"
    if any(size > limit for size, limit in zip(launch.grid, GRID, strict=True)):
        yield f"{launch.grid} blocks"


class Fitting:
    """A driver that collects the launches that do not fit."""

    def __init__(self) -> None:
        self.table = read_resource_table().kernels
        self.backends = {
            kind.limits: DriverBackend(SimulatedGpuDriver(CudaDriver, kind.limits)) for kind in KINDS.values()
        }
        self.launches = 0
        self.found: set[str] = set()

    def add(self, what: object, graph: Graph) -> None:
        """Add each launch of a graph, on each kind of device with kernels for it."""
        for limits, backend in self.backends.items():
            (on,) = backend.devices()
            if not all(backend.supports(node, on).ok for node in graph.nodes if node.op in BINDINGS):
                continue
            program = build_verified_device_plan(graph, backend, on).program
            for kind in (kind for kind in KINDS.values() if kind.limits == limits):
                for step in bind_program_at_placeholders(program, limits, kind.processors)[1]:
                    assert isinstance(step, KernelLaunch)
                    self.launches += 1
                    self.found |= {
                        f"{what} on {kind}: {step.kernel} has {why}"
                        for why in lacking(step, self.find_resources(step.kernel, kind.arch), kind)
                    }

    def find_resources(self, kernel: KernelInstance, arch: str) -> ResourceRow | nvrtc.KernelResources:
        return compile_resources(kernel, arch) if kernel.source.generated else self.table[str(kernel)][arch]


@pytest.mark.nightly(cases=14)
@pytest.mark.long
@pytest.mark.parametrize("name", sorted(BINDINGS, reverse=True))
def test_launches_of_the_kit_fit_every_kind_of_device(name):
    fitting = Fitting()
    for case in select_quick_cases(REGISTRY[name]):
        fitting.add(case, build_case_graph(case).graph)
    assert fitting.launches
    assert sorted(fitting.found) == []


DAILY_QUANTISED = ("qwen3-q4_k_m", "qwen3-iq4_xs")
"""The models that run each day, of all that differ only in the types of their weights."""


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.nightly(cases=0)] * (n.startswith("qwen3-") and n not in DAILY_QUANTISED))
        for n in sorted(INDEX)
    ],
)
def test_launches_of_models_fit_every_kind_of_device(name):
    model, fitting = open_model(path_of(name), header_only=True), Fitting()
    for tokens in (1, 7, 200):
        for cells in (DType.F16, DType.F32):
            step = Step(1, tokens, 256, 256, tokens, keys=cells, values=cells)
            fitting.add(step, model.graph(step))
    assert fitting.launches > 100
    assert sorted(fitting.found) == []


@pytest.mark.parametrize(("columns", "threads"), [(64, 32), (130, 64), (4100, 1024)])
def test_a_row_of_halves_is_split_by_a_thread_for_four_columns(columns, threads):
    graph = Graph({"y": mul_mat(weight("w", (64, columns), DType.F16), input("x", (70, columns)))})
    backend = DriverBackend(SimulatedGpuDriver(CudaDriver, find_kernel_limits("90")))
    program = build_verified_device_plan(graph, backend, *backend.devices()).program
    steps = bind_program_at_placeholders(program, find_kernel_limits("90"), PROCESSORS["sm_90a"])[1]
    (split,) = (step for step in steps if isinstance(step, KernelLaunch) and step.kernel.name.startswith("split_rows"))
    assert split.block == (threads, 1, 1)


def test_every_kind_of_device_is_one_that_kernels_are_compiled_for():
    assert tuple(PROCESSORS) == ARCHITECTURES


ROW = ResourceRow(registers=100, shared_bytes=1024, instructions=0, loop=0, products=0, loads={}, threads=512, warps=16)


@pytest.mark.parametrize(
    ("grid", "threads", "shared", "registers", "why"),
    [
        ((1, 1, 1), 512, 0, 100, []),
        ((1, 1, 1), 544, 0, 100, ["544 threads of 512"]),
        ((1, 1, 1), 512, 0, 129, ["69632 registers of 65536"]),
        ((1, 1, 1), 512, 47 << 10, 100, []),
        ((1, 1, 1), 512, 48 << 10, 100, ["50176 bytes of shared memory of 49152"]),
        ((1, 1, 1), 512, 98 << 10, 100, []),
        ((1, 1, 1), 512, (98 << 10) + 16, 100, ["101392 bytes of shared memory of 101376"]),
        ((1, 1 << 16, 1), 512, 0, 100, ["(1, 65536, 1) blocks"]),
    ],
)
def test_what_does_not_fit_is_found(grid, threads, shared, registers, why):
    kernel = SOURCES[0][SOURCES[0].names[0]]
    launch = KernelLaunch(kernel, grid, (threads, 1, 1), shared, (), (), 0)
    assert list(lacking(launch, ROW._replace(registers=registers), KINDS["sm_89"])) == why
