"""Kernels with a planted fault and an access log: results may be right although accesses are unordered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hocket.backends.base import Device
from hocket.backends.cupy.device.driver import KernelLaunch
from hocket.backends.cupy.emulation.access_log import AccessLogDriver
from hocket.backends.cupy.emulation.compile_host import ACCESS_LOG_OPTIONS

from .emulation import with_fault


class RacyDriver(AccessLogDriver):
    """Notes the accesses of kernels that see a file in which `bad` stands for `good`."""

    def __init__(self, file: str, good: str, bad: str) -> None:
        super().__init__()
        self.edit = file, good, bad

    def record(self, steps: Sequence[KernelLaunch], on: Device) -> Callable[[], None]:
        return super().record([with_fault(step, *self.edit, ACCESS_LOG_OPTIONS) for step in steps], on)
