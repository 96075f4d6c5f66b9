"""The driver of AMD devices through CuPy for ROCm: hiprtc compiles the CUDA kernels, RCCL runs collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...graph.errors import BackendError
from ..abilities import Predicted
from ..base import Device
from .backend import DriverBackend
from .cuda import Absent, AbsentBackend, CudaDriver
from .device import hiprtc
from .device.cubins import cubin
from .device.driver import Source, Step, one_by_one
from .device.limits import OF_HIP, Limits

UNPROVEN = "has not run on a real device yet"


class HipDriver(CudaDriver):
    """The AMD devices of this machine."""

    kind = "hip"
    install = f"pip install hocket[rocm], beside ROCm 7; {UNPROVEN}"
    library_name = "RCCL"
    is_hip, overlaps = True, False

    def device(self, index: int) -> Device:
        device = super().device(index)
        return replace(device, description=f"{device.description}; {UNPROVEN}")

    def _limits_of(self, index: int) -> Limits:
        return Limits(int(self.about(index)["sharedMemPerBlock"]))

    def are_peers(self, devices: Sequence[Device]) -> bool:
        """Return `False`: memory from hipMalloc is coherent between devices only between kernels."""
        return False

    def _replay(self, steps: Sequence[Step], on: Device) -> Callable[[], None]:
        """Return a function that runs the steps one after the other: CuPy captures no graphs on AMD devices."""
        calls = [self._call(step, on, self.stream(on)) for step in one_by_one(steps)]

        def replay() -> None:
            for call in calls:
                call()

        return replay

    def _allow(self, function: Any, shared_bytes: int) -> None:
        """Do nothing: a launch can use all shared memory, and HIP has no such attribute."""

    def compiled(self, source: Source, index: int) -> tuple[bytes, Mapping[str, str]]:
        arch = self.about(index)["gcnArchName"].decode()
        image, lowered = cubin(hiprtc.written(source), arch, hiprtc)
        for name in source.names:
            if name not in lowered:
                raise BackendError(f"hiprtc does not say what {name} of {source.file} is called; install ROCm 7")
        return image, lowered


class HipBackend(DriverBackend):
    """Runs on AMD devices as ``hip:0``, ``hip:1`` and so on."""

    def __init__(self) -> None:
        super().__init__(HipDriver())

    def absent(self, model: str) -> DriverBackend:
        """Return a backend for plans over devices of architecture `model`, such as ``gfx942``, that may be absent."""
        return AbsentBackend(Absent(HipDriver, OF_HIP))

    def predicted(self, kind: str) -> Predicted | None:
        """Return `None`: there is no time model of these GPUs."""
        return None
