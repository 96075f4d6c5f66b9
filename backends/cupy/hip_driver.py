"""The driver of AMD devices through CuPy for ROCm: hiprtc compiles the CUDA kernels, RCCL runs collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...graph.errors import BackendError, format_install_command
from ..base import Device
from ..capabilities import KernelEfficiencies
from .backend import DriverBackend
from .cuda_driver import CudaDriver, PlanOnlyGpuBackend, SimulatedGpuDriver
from .device import hiprtc
from .device.cubin_cache import load_or_compile_cubin
from .device.device_limits import HIP_LIMITS, KernelLimits
from .device.driver import DriverStep, KernelSource, flatten_steps
from .kernel_efficiency import read_kernel_efficiencies

UNTESTED_NOTE = "has not run on a real device yet"


class HipDriver(CudaDriver):
    """The driver of this machine's AMD devices."""

    kind = "hip"
    install = f"{format_install_command('rocm')}, beside ROCm 7; {UNTESTED_NOTE}"
    library_name = "RCCL"
    is_hip, can_overlap_collectives = True, False

    def device(self, index: int) -> Device:
        device = super().device(index)
        return replace(device, description=f"{device.description}; {UNTESTED_NOTE}")

    def _read_limits(self, index: int) -> KernelLimits:
        return KernelLimits(int(self.read_device_properties(index)["sharedMemPerBlock"]))

    def require_multiprocessors(self, on: Device) -> None:
        raise BackendError(
            f"device {on}: hip devices are not divided by multiprocessors; name the part as hip:{on.index}.{on.part}"
        )

    def enable_peer_access(self, devices: Sequence[Device]) -> bool:
        """Return `False`: during a kernel, memory from hipMalloc is not coherent between devices."""
        return False

    def _make_replay_function(self, steps: Sequence[DriverStep], on: Device) -> Callable[[], None]:
        """Return a function that replays the steps one after the other: CuPy captures no graphs on AMD devices."""
        calls = [self._make_step_call(step, on, self.stream(on)) for step in flatten_steps(steps)]

        def replay() -> None:
            for call in calls:
                call()

        return replay

    def _allow_dynamic_shared_bytes(self, function: Any, shared_bytes: int) -> None:
        """Do nothing: a launch can use all shared memory, and HIP has no such attribute."""

    def compile_source(self, source: KernelSource, index: int) -> tuple[bytes, Mapping[str, str]]:
        arch = self.read_device_properties(index)["gcnArchName"].decode()
        image, lowered = load_or_compile_cubin(hiprtc.prepend_hip_header(source), arch, hiprtc)
        for name in source.names:
            if name not in lowered:
                raise BackendError(f"hiprtc does not say what {name} of {source.file} is called; install ROCm 7")
        return image, lowered


class HipBackend(DriverBackend):
    """The backend of AMD devices: ``hip:0``, ``hip:1`` and so on."""

    def __init__(self) -> None:
        super().__init__(HipDriver())

    def make_simulated_backend(self, model: str) -> DriverBackend:
        """Make a simulated backend for plans on devices of architecture `model`, such as ``gfx942``."""
        return PlanOnlyGpuBackend(SimulatedGpuDriver(HipDriver, HIP_LIMITS))

    def read_kernel_efficiencies(self) -> KernelEfficiencies:
        """Return the efficiencies of the same kernels on NVIDIA GPUs, an estimate for AMD devices."""
        return read_kernel_efficiencies()
