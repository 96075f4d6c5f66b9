"""The driver of the CUDA emulator: devices in host memory, and launches on CPU threads in turn."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ....graph.errors import BackendError
from ...base import Array, Device, Tensor, view_host_tensor
from ...host.host_backend import HOST_MEMORY
from ..backend import DriverBackend
from ..device.batched_copies import coalesce_copies
from ..device.device_limits import HIP_LIMITS, LARGEST_LIMITS, KernelLimits
from ..device.driver import (
    CUDA_HEADER,
    HIP_HEADER,
    CollectiveLibrary,
    DriverStep,
    KernelInstance,
    KernelLaunch,
    KernelSource,
    LaunchError,
    StartRead,
    flatten_steps,
)
from .compile_host import load_emulated_library, require_gxx_path
from .guard_pages import (
    Bytes,
    GuardedMemoryPool,
    address_of,
    allocate_bytes_before_guard_zone,
    guard_operands,
    redirect_words_to_guarded,
)

MIN_UNCOPIED_BYTES = 1 << 20
"""Bytes from which an operand is used in place: a copy would take longer than the launch."""
MIN_PARALLEL_THREADS = 1 << 14
"""Threads of a launch from which several CPU threads share it."""
EMULATED_MULTIPROCESSORS = 2
"""The multiprocessor count that kernels see. It is small, so that a thread block has much work."""
FAULT_STATUS = 1
"""`FaultReport.status` of an access out of bounds."""
GARBAGE_BYTE = 0x5A
"""The content of padding."""


class LaunchShape(ctypes.Structure):
    """The C struct ``emulation::Launch`` of block.h: grid, block, cluster, order and argument words of a launch."""

    _fields_ = (
        ("grid", ctypes.c_int64 * 3),
        ("block", ctypes.c_int64 * 3),
        ("cluster", ctypes.c_int64 * 3),
        *((name, ctypes.c_int64) for name in ("shared_bytes", "words", "order", "workers")),
        ("arguments", ctypes.c_void_p),
    )


def make_launch_shape(
    launch: KernelLaunch, words: npt.NDArray[np.uint64], order: int = 0, workers: int = 1
) -> LaunchShape:
    """Make the C struct that describes a launch. It has the address of `words`, so `words` must outlive it.

    Args:
        launch: The launch.
        words: Its argument words.
        order: Order of threads and blocks; see `EmulatedDriver`.
        workers: CPU threads that share the launch.
    """
    sizes = launch.grid, launch.block, launch.cluster, launch.shared_bytes
    return LaunchShape(*sizes, len(words), order, workers, words.ctypes.data)


class FaultReport(ctypes.Structure):
    """The C struct ``emulation::Report``: the first fault of a launch. `status` 0 means no fault."""

    _fields_ = (
        ("status", ctypes.c_int64),
        ("block", ctypes.c_int64 * 3),
        ("thread", ctypes.c_int64 * 3),
        ("address", ctypes.c_uint64),
        ("text", ctypes.c_char * 200),
    )


class EmulatedDriver:
    """The driver of any number of emulated CUDA devices, which all run on the CPU of this machine.

    During a launch, every operand is in memory between guard pages.

    Args:
        order: Order of the threads and blocks of a launch: 0 forward, 1 backward, larger numbers shuffled. `None` takes
            another order in every run, so that results of a kernel with a race differ.
        limits: Limits of a device.
        instructions: Source file with the instructions of the devices. With ``hip.cuh``, waves have 64 lanes.
    """

    kind = "cuda-emulated"
    can_overlap_collectives = True
    description = "CUDA kernels emulated on the processor"

    def __init__(
        self, order: int | None = None, limits: KernelLimits = LARGEST_LIMITS, instructions: str = CUDA_HEADER
    ) -> None:
        self.order, self.instructions, self._limits = order, instructions, limits

    def devices(self) -> Sequence[Device]:
        return (self.device(0),)

    def device(self, index: int) -> Device:
        require_gxx_path()
        return Device(self.kind, index, None, self.description, memory_of=HOST_MEMORY)

    def limits(self, on: Device) -> KernelLimits:
        return self._limits

    def count_multiprocessors(self, on: Device) -> int:
        return on.multiprocessors or EMULATED_MULTIPROCESSORS

    def require_multiprocessors(self, on: Device) -> None:
        """Do nothing: emulated devices have any number of multiprocessors."""

    def alloc(self, nbytes: int, on: Device) -> Bytes:
        try:
            return allocate_bytes_before_guard_zone(nbytes)
        except MemoryError:
            raise BackendError(f"{on} cannot allocate {nbytes} bytes; use a smaller context or model") from None

    def address(self, buffer: Bytes) -> int:
        return address_of(buffer)

    def view(self, buffer: Bytes, tensor: Tensor) -> Array:
        return view_host_tensor(buffer, tensor)

    def make_writer(self, buffers: Sequence[Bytes], tensors: Sequence[Tensor]) -> Callable[[Sequence[Array]], None]:
        """Return a function that writes host arrays into the buffers.

        It also writes garbage into the padding between the arrays, as a device may do.
        """
        views = [self.view(buffers[t.buffer], t) for t in tensors]
        batches = [(buffers[p.buffer], p) for p in coalesce_copies(tensors, sys.maxsize)]

        def write(arrays: Sequence[Array]) -> None:
            for buffer, batch in batches:
                buffer[batch.offset : batch.offset + batch.nbytes] = GARBAGE_BYTE
            for view, array in zip(views, arrays, strict=True):
                view[...] = array

        return write

    def make_reader(self, buffers: Sequence[Bytes], tensors: Sequence[Tensor]) -> StartRead:
        views = [self.view(buffers[t.buffer], t) for t in tensors]

        def start() -> Callable[[], Sequence[Array]]:
            arrays = [np.array(view) for view in views]
            return lambda: arrays

        return start

    def enable_peer_access(self, devices: Sequence[Device]) -> bool:
        return True

    def find_collective_library(self, devices: Sequence[Device]) -> CollectiveLibrary | str:
        return "emulated devices need no library"

    def map_signal_pad(self, board: Array, is_first: bool) -> int:
        return int(board.ctypes.data)

    def prepare_kernel(self, kernel: KernelInstance, on: Device) -> None:
        load_emulated_library(self._with_emulated_instruction_header(kernel.source))

    def _with_emulated_instruction_header(self, source: KernelSource) -> KernelSource:
        """Return a kernel source that includes the header of the emulated platform, ``cuda.cuh`` or ``hip.cuh``."""
        return source if source.instructions == self.instructions else replace(source, instructions=self.instructions)

    def record(self, steps: Sequence[DriverStep], on: Device) -> Callable[[], None]:
        pool = GuardedMemoryPool()
        singles = flatten_steps(steps)
        launches = [step for step in singles if isinstance(step, KernelLaunch)]
        assert len(launches) == len(singles), "there is no library"
        ready = [
            _EmulatedLaunch(
                launch, load_emulated_library(self._with_emulated_instruction_header(launch.kernel.source)), pool
            )
            for launch in launches
        ]
        runs = 0

        def run() -> None:
            nonlocal runs
            order = runs % 4 if self.order is None else self.order
            runs += 1
            for step in ready:
                step.run(order, 0xFF if runs % 2 else 0x5A)

        return run

    def is_idle(self, on: Device) -> bool:
        return True

    def find_device_loss(self, on: Device) -> str:
        return ""

    def run_timed(self, runs: Sequence[Callable[[], None]], on: Device) -> list[float]:
        """Run recorded runs one after the other, and return the seconds of each by the host clock."""
        marks = [time.perf_counter()]
        for run in runs:
            run()
            marks.append(time.perf_counter())
        return [end - start for start, end in pairwise(marks)]

    def synchronise(self, on: Device) -> None:
        """Do nothing, because emulated launches have already ended when they return."""


class _EmulatedLaunch:
    """One launch on emulated devices, with its compiled function and its guarded operands."""

    def __init__(self, launch: KernelLaunch, code: ctypes.CDLL, pool: GuardedMemoryPool) -> None:
        self.launch = launch
        self.function = code[f"launch_{launch.kernel.source.names.index(launch.kernel.name)}"]
        self.function.restype = None
        self.guarded_operands = guard_operands([s for s in launch.spans if s.high - s.low < MIN_UNCOPIED_BYTES], pool)
        self.words = np.array(redirect_words_to_guarded(launch, self.guarded_operands), np.uint64)
        threads = int(np.prod(launch.grid)) * int(np.prod(launch.block))
        self.shape = make_launch_shape(
            launch, self.words, workers=min(4, os.cpu_count() or 1) if threads >= MIN_PARALLEL_THREADS else 1
        )

    def run(self, order: int, pattern: int) -> None:
        """Run the launch once; raise an error for a fault, or for a store outside of an operand.

        Args:
            order: Order of threads and blocks; see `EmulatedDriver`.
            pattern: Byte that fills the margins of operands, which must be unchanged after the run.

        Raises:
            LaunchError: The emulator found a fault. The message describes the first one.
        """
        report = FaultReport()
        self.shape.order = order
        for operand in self.guarded_operands:
            operand.copy_in(pattern)
        self.function(ctypes.byref(self.shape), ctypes.byref(report))
        if report.status:
            raise LaunchError(self.launch.number, self._format_report(report))
        for operand in self.guarded_operands:
            if not operand.has_intact_margins(pattern):
                raise LaunchError(
                    self.launch.number,
                    f"{self.launch.kernel}: writes next to {self._format_indices_of_words_with_operand(operand.low)}",
                )
            operand.copy_back()

    def _format_report(self, report: FaultReport) -> str:
        message = report.text.decode()
        if report.status == FAULT_STATUS and report.address:
            message += self._describe_nearest_operand(report.address)
        block, thread = (", ".join(map(str, at)) for at in (report.block, report.thread))
        return f"{self.launch.kernel}, block ({block}), thread ({thread}): {message}"

    def _describe_nearest_operand(self, address: int) -> str:
        """Return the end of a message about an illegal address: its distance from the nearest operand."""
        spans = [(o.guarded_address, o.guarded_address + o.high - o.low, o.low) for o in self.guarded_operands]
        spans += [(s.low, s.high, s.low) for s in self.launch.spans if s.high - s.low >= MIN_UNCOPIED_BYTES]
        nearest = min(spans, key=lambda s: max(s[0] - address, address - s[1], 0), default=None)
        if nearest is None or max(nearest[0] - address, address - nearest[1]) > 1 << 20:
            return f", at {address:#x}"
        low, high, name = nearest
        if address >= high:
            return f": {address - high} bytes past the end of {self._format_indices_of_words_with_operand(name)}"
        return f": {low - address} bytes before {self._format_indices_of_words_with_operand(name)}"

    def _format_indices_of_words_with_operand(self, low: int) -> str:
        """Format the index of each launch word that is the address of an operand around `low`, for a message."""
        return "word " + " and ".join(str(s.word_index) for s in self.launch.spans if s.low <= low < s.high)


class EmulatedBackend(DriverBackend):
    """The backend of emulated CUDA devices on the CPU: ``cuda-emulated:0`` and any number of virtual devices."""

    def __init__(self, order: int | None = None) -> None:
        super().__init__(EmulatedDriver(order))


class EmulatedHipDriver(EmulatedDriver):
    """The driver of emulated AMD devices: waves of 64 lanes, and no peer memory, as on real devices."""

    kind = "hip-emulated"
    description = "HIP kernels emulated on the processor, in waves of 64 lanes"

    def __init__(self, order: int | None = None) -> None:
        super().__init__(order, HIP_LIMITS, HIP_HEADER)

    def enable_peer_access(self, devices: Sequence[Device]) -> bool:
        return False


class EmulatedHipBackend(DriverBackend):
    """The backend of emulated AMD devices on the CPU: ``hip-emulated:0`` and any number of virtual devices."""

    def __init__(self, order: int | None = None) -> None:
        super().__init__(EmulatedHipDriver(order))
