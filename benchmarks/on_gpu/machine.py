"""What differs between a GPU and its emulation when one measures: events, copies on the device, what there is to say of
it."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from hocket.backends.base import Device
from hocket.backends.cupy.cuda import CudaDriver
from hocket.backends.cupy.device import hiprtc, nvrtc
from hocket.backends.cupy.device.driver import Driver

Run = Callable[[], None]

SMI_FIELDS = (
    *("name", "driver_version", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("power.draw", "power.limit", "temperature.gpu", "memory.used", "memory.total"),
)


class Machine(Protocol):
    """One device of a driver, with a clock."""

    def about(self) -> dict[str, object]:
        """The device, its driver and the versions of what runs it."""

    def state(self) -> dict[str, object]:
        """Clocks, power and temperature just now; empty where nobody can tell."""

    def copier(self, into: int, source: int, nbytes: int) -> Run:
        """What copies between two addresses of the device, in order with launches."""

    def release(self) -> None:
        """Give memory back to the device that nobody holds any more."""

    def over(self, driver: Driver) -> Machine:
        """The same device through another driver."""


class CudaMachine:
    """A device of CUDA through CuPy."""

    def __init__(self, driver: CudaDriver, on: Device, cupy: Any) -> None:
        self.driver, self.on, self.cupy = driver, on, cupy

    def about(self) -> dict[str, object]:
        runtime = self.cupy.cuda.runtime
        known = runtime.getDeviceProperties(self.on.index)
        if self.driver.is_hip:
            built = {"architecture": known["gcnArchName"].decode(), "hiprtc": _number(hiprtc.version())}
        else:
            with self.cupy.cuda.Device(self.on.index) as device:
                built = {"capability": device.compute_capability, "nvrtc": _number(nvrtc.version())}
        return {
            "gpu": known["name"].decode(),
            "memory_gb": round(known["totalGlobalMem"] / 1e9, 1),
            "multiprocessors": known["multiProcessorCount"],
            "l2_mb": round(known["l2CacheSize"] / 1e6, 1),
            "driver_cuda": runtime.driverGetVersion(),
            "runtime_cuda": runtime.runtimeGetVersion(),
            "cupy": self.cupy.__version__,
            **built,
            **self.state(),
        }

    def state(self) -> dict[str, object]:
        """As nvidia-smi says, which is asked and never told anything."""
        if not (program := shutil.which("nvidia-smi")):
            return {}
        command = [program, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader", f"--id={self.on.index}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        values = [value.strip() for value in done.stdout.strip().split(",")]
        return dict(zip(SMI_FIELDS, values, strict=True)) if len(values) == len(SMI_FIELDS) else {}

    def copier(self, into: int, source: int, nbytes: int) -> Run:
        runtime, stream = self.cupy.cuda.runtime, self.driver.stream(self.on)

        def run() -> None:
            with self.cupy.cuda.Device(self.on.index):
                runtime.memcpyAsync(into, source, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)

        return run

    def release(self) -> None:
        self.cupy.get_default_memory_pool().free_all_blocks()

    def over(self, driver: Driver) -> Machine:
        assert isinstance(driver, CudaDriver)
        return CudaMachine(driver, self.on, self.cupy)


def _number(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


class EmulatedMachine:
    """A device of another kind, timed by the clock of the host."""

    def __init__(self, driver: Driver, on: Device) -> None:
        self.driver, self.on = driver, on

    def about(self) -> dict[str, object]:
        return {"gpu": f"none: {self.on.description}", "compiler": platform.python_compiler(), "numpy": np.__version__}

    def state(self) -> dict[str, object]:
        return {}

    def copier(self, into: int, source: int, nbytes: int) -> Run:
        return lambda: ctypes.memmove(into, source, nbytes) and None

    def release(self) -> None:
        """Memory of the host needs no help."""

    def over(self, driver: Driver) -> Machine:
        return EmulatedMachine(driver, self.on)


def machine_for(driver: Driver, on: Device, cupy: Any = None) -> Machine:
    """The machine of a device; `cupy` stands in for the package."""
    if not isinstance(driver, CudaDriver):
        return EmulatedMachine(driver, on)
    if cupy is None:
        import cupy
    return CudaMachine(driver, on, cupy)
