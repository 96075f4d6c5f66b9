"""Helpers for tests of emulated CUDA devices: requirements on the machine, and kernels with planted faults."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from hocket.backends.base import Device
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.device.device_limits import HIP_LIMITS, LARGEST_LIMITS
from hocket.backends.cupy.device.driver import CUDA_HEADER, HIP_HEADER, KernelLaunch, KernelSource, read_kernel_text
from hocket.backends.cupy.emulation.compile_host import CHECK_OPTIONS, load_emulated_library
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.graph.errors import BackendError

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")


BARRIER = re.compile(r"__sync(threads|warp)\(\);")


def barriers(file: str) -> list[int]:
    """The lines of a file of kernels that hold one."""
    text = read_kernel_text(file).splitlines()
    return [number for number, line in enumerate(text, 1) if BARRIER.search(line)]


@dataclass(frozen=True)
class EditedSource(KernelSource):
    """A source with a text that a test has written or changed."""

    body: str = ""

    @property
    def text(self) -> str:
        return self.body


def replace_in_source(source: KernelSource, good: str, bad: str) -> EditedSource:
    """The source where `good`, which is there once, is `bad`; where it is not there, the test fails at once."""
    if (count := source.text.count(good)) != 1:
        pytest.fail(f"{count} times in {source.file}: {good}")
    return EditedSource(
        source.file, source.names, instructions=source.instructions, body=source.text.replace(good, bad)
    )


def replace_and_compile(
    source: KernelSource, good: str, bad: str, options: tuple[str, ...] = CHECK_OPTIONS
) -> EditedSource:
    """The same, if it compiles; else the test fails at once: nothing that catches errors takes that for a mistake that
    was found. The driver that launches it compiles with the same `options`, so that it is compiled once."""
    edited_source = replace_in_source(source, good, bad)
    try:
        load_emulated_library(edited_source, options)
    except BackendError as why:
        pytest.fail(str(why))
    return edited_source


def with_fault(
    launch: KernelLaunch, file: str, good: str, bad: str, options: tuple[str, ...] = CHECK_OPTIONS
) -> KernelLaunch:
    """The launch with a mistake in its kernel, if that sees the file."""
    if file not in launch.kernel.source.files:
        return launch
    edited_source = replace_and_compile(launch.kernel.single_kernel_source, good, bad, options)
    return replace(launch, kernel=edited_source[launch.kernel.name])


class FaultyDriver(EmulatedDriver):
    """Launches the kernels that see one file with a mistake in them."""

    def __init__(self, file: str, good: str, bad: str, instructions: str = CUDA_HEADER) -> None:
        super().__init__(limits=HIP_LIMITS if instructions == HIP_HEADER else LARGEST_LIMITS, instructions=instructions)
        self.edit = file, good, bad

    def record(self, launches: Sequence[KernelLaunch], on: Device) -> Callable[[], None]:
        kernels = (
            self._with_emulated_instruction_header(launch.kernel.source)[launch.kernel.name] for launch in launches
        )
        own = [replace(launch, kernel=kernel) for launch, kernel in zip(launches, kernels, strict=True)]
        return super().record([with_fault(launch, *self.edit) for launch in own], on)


WRONG_RESULTS = "the results are wrong"
PAST_END, IN_FLIGHT = (
    r"touches memory that is not its own: \d+ bytes past the end",
    "ends with copies to shared memory in flight",
)
"""Messages of the emulation."""


def finding(file: str, good: str, bad: str, is_right: Callable[[DriverBackend], bool]) -> str:
    """How a mistake in a kernel is found: `WRONG_RESULTS`, or the message of the emulation that stops it; empty
    if it is not found."""
    try:
        return "" if is_right(DriverBackend(FaultyDriver(file, good, bad))) else WRONG_RESULTS
    except BackendError as why:
        return str(why)
