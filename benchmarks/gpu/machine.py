"""Hide the differences between a GPU and its emulation for benchmarks: device information, copies and clocks."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from hocket.backends.base import Device
from hocket.backends.cupy.cuda_driver import CudaDriver
from hocket.backends.cupy.device import hiprtc, nvrtc
from hocket.backends.cupy.device.driver import Driver

Run = Callable[[], None]

SMI_FIELDS = (
    *("name", "driver_version", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("power.draw", "power.limit", "temperature.gpu", "memory.used", "memory.total"),
)


class Machine(Protocol):
    """One device of a driver, for benchmarks."""

    def describe_device(self) -> dict[str, object]:
        """Return the name of the device, and the versions of its driver and its software."""

    def read_state(self) -> dict[str, object]:
        """Return the current clocks, power and temperature; empty if they are unknown."""

    def make_copier(self, into: int, source: int, nbytes: int) -> Run:
        """Return a function that copies between two device addresses, in order with launches."""

    def release_memory(self) -> None:
        """Free the cached device memory that no object uses."""

    def with_driver(self, driver: Driver) -> Machine:
        """Return the same device through another driver."""


class CudaMachine:
    """A CUDA or HIP device through CuPy."""

    def __init__(self, driver: CudaDriver, on: Device, cupy: Any) -> None:
        self.driver, self.on, self.cupy = driver, on, cupy

    def describe_device(self) -> dict[str, object]:
        runtime = self.cupy.cuda.runtime
        known = runtime.getDeviceProperties(self.on.index)
        if self.driver.is_hip:
            built = {"architecture": known["gcnArchName"].decode(), "hiprtc": _format_version(hiprtc.version())}
        else:
            with self.cupy.cuda.Device(self.on.index) as device:
                built = {"capability": device.compute_capability, "nvrtc": _format_version(nvrtc.version())}
        return {
            "gpu": known["name"].decode(),
            "memory_gb": round(known["totalGlobalMem"] / 1e9, 1),
            "multiprocessors": known["multiProcessorCount"],
            "l2_mb": round(known["l2CacheSize"] / 1e6, 1),
            "driver_cuda": runtime.driverGetVersion(),
            "runtime_cuda": runtime.runtimeGetVersion(),
            "cupy": self.cupy.__version__,
            **built,
            **self.read_state(),
        }

    def read_state(self) -> dict[str, object]:
        """Return the answer of nvidia-smi, which changes no setting; empty if it does not answer."""
        if not (program := shutil.which("nvidia-smi")):
            return {}
        command = [program, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader", f"--id={self.on.index}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return {}
        values = [value.strip() for value in done.stdout.strip().split(",")]
        return dict(zip(SMI_FIELDS, values, strict=True)) if len(values) == len(SMI_FIELDS) else {}

    def make_copier(self, into: int, source: int, nbytes: int) -> Run:
        runtime, stream = self.cupy.cuda.runtime, self.driver.stream(self.on)

        def run() -> None:
            with self.cupy.cuda.Device(self.on.index):
                runtime.memcpyAsync(into, source, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)

        return run

    def release_memory(self) -> None:
        """Free the memory pool of CuPy."""
        self.cupy.get_default_memory_pool().free_all_blocks()

    def with_driver(self, driver: Driver) -> Machine:
        assert isinstance(driver, CudaDriver)
        return CudaMachine(driver, self.on, self.cupy)


def _format_version(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


class EmulatedMachine:
    """An emulated device, which is timed by the clock of the host."""

    def __init__(self, driver: Driver, on: Device) -> None:
        self.driver, self.on = driver, on

    def describe_device(self) -> dict[str, object]:
        return {"gpu": f"none: {self.on.description}", "compiler": platform.python_compiler(), "numpy": np.__version__}

    def read_state(self) -> dict[str, object]:
        return {}

    def make_copier(self, into: int, source: int, nbytes: int) -> Run:
        return lambda: ctypes.memmove(into, source, nbytes) and None

    def release_memory(self) -> None:
        """Do nothing; the host frees its memory itself."""

    def with_driver(self, driver: Driver) -> Machine:
        return EmulatedMachine(driver, self.on)


def make_machine(driver: Driver, on: Device, cupy: Any = None) -> Machine:
    """Return the machine of a device; `cupy` replaces the package in tests."""
    if not isinstance(driver, CudaDriver):
        return EmulatedMachine(driver, on)
    if cupy is None:
        import cupy
    return CudaMachine(driver, on, cupy)
