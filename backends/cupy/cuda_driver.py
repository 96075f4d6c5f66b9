"""The driver of CUDA devices: memory, CUDA graphs and modules through CuPy, which is imported at first use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, permutations
from typing import Any

import numpy as np

from ...graph.errors import BackendError, format_install_command
from ..base import Array, Device, Tensor, compute_storage_layout
from ..capabilities import KernelEfficiencies
from ..thread_safe_cache import thread_safe_cache
from .backend import DriverBackend
from .device import host_transfers
from .device.batched_copies import coalesce_copies
from .device.cubin_cache import load_or_compile_cubin
from .device.dependent_launch import (
    compute_early_launch_flags,
    find_attribute_launch_library,
    find_early_launch_library,
    launch_with_attributes,
)
from .device.device_limits import DEFAULT_SHARED_BYTES, KernelLimits, find_kernel_limits
from .device.driver import (
    CollectiveLibrary,
    CollectiveLibraryExchange,
    CollectiveOverlap,
    DriverStep,
    KernelInstance,
    KernelLaunch,
    KernelSource,
    LaunchError,
    SingleStep,
    StartRead,
    flatten_steps,
    has_shared_multiprocessors,
)
from .device.green_contexts import make_green_stream, require_divided_multiprocessors
from .device.host_transfers import DeviceArray, HostTransfers, convert_cuda_errors
from .device.nccl import RecordedGraphWithCommunicators, load_nccl
from .kernel_efficiency import read_kernel_efficiencies

CUPY_INSTALL_HINT = f"{format_install_command('cuda13')} (cuda12 for drivers before 580)"
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""The number of this CUfunction_attribute."""
PEER_ACCESS_ALREADY_ENABLED, NOT_READY, PORTABLE_AND_MAPPED = 704, 600, 3
"""Numbers of the CUDA runtime: an error code, a stream status, and flags of cudaHostRegister."""
HIGH_PRIORITY = -1
"""Stream priority. Blocks of such a stream begin before blocks of streams with priority 0."""
SUFFIX_A_CAPABILITIES = frozenset(("90", "100", "103", "120"))
"""Compute capabilities that compile for an architecture with suffix "a", which has additional instructions."""


def _cupy() -> Any:
    import cupy

    return cupy


def _nccl() -> Any:
    from cupy.cuda import nccl

    return nccl


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """A buffer in device memory, together with the object that copies between its device and the host."""

    array: Any
    transfers: HostTransfers


class CudaDriver:
    """The driver of this machine's CUDA devices.

    Each device, or part of a device, has one stream for all its launches and copies, which keeps their order. With
    `begins_early`, launches in a CUDA graph begin while the previous launch runs, if the device and its driver support
    that.
    """

    kind = "cuda"
    install = CUPY_INSTALL_HINT
    library_name = "NCCL"
    is_hip, can_overlap_collectives = False, True
    """`is_hip`: CuPy is built for AMD devices. `can_overlap_collectives`: launches can run during a collective."""

    def __init__(self, begins_early: bool = True) -> None:
        self.begins_early = begins_early
        self._transfers_by_device: dict[str, HostTransfers] = {}
        self._limits: dict[int, KernelLimits] = {}

    @property
    def cupy(self) -> Any:
        """The module CuPy. Raises `BackendError` if it is missing, or if it was built for devices of another kind."""
        try:
            cupy = _cupy()
        except ImportError as why:
            raise BackendError(f"{self.kind} devices need CuPy: {self.install} ({why})") from None
        if bool(cupy.cuda.runtime.is_hip) is not self.is_hip:
            others = "CUDA" if self.is_hip else "ROCm"
            raise BackendError(f"{self.kind} devices need another CuPy than this one for {others}: {self.install}")
        return cupy

    def devices(self) -> Sequence[Device]:
        return tuple(map(self.device, range(self._count_usable_devices())))

    def _count_usable_devices(self) -> int:
        """Count the devices of this machine. Raises `BackendError` if no device is usable."""
        runtime = self.cupy.cuda.runtime
        try:
            return int(runtime.getDeviceCount())
        except runtime.CUDARuntimeError as why:
            raise BackendError(
                f"no {self.kind.upper()} device can be used: {why}; {self.kind}-emulated:0 runs anywhere"
            ) from None

    def device(self, index: int) -> Device:
        if index >= (count := self._count_usable_devices()):
            raise BackendError(f"there is no device {self.kind}:{index}; this machine has {count}")
        about = self.read_device_properties(index)
        return Device(self.kind, index, int(about["totalGlobalMem"]), about["name"].decode())

    def read_device_properties(self, index: int) -> Mapping[str, Any]:
        """Read the properties of a device from the CUDA runtime."""
        with convert_cuda_errors(self.cupy, f"{self.kind}:{index}", "say what it is"):
            properties: Mapping[str, Any] = self.cupy.cuda.runtime.getDeviceProperties(index)
        return properties

    def limits(self, on: Device) -> KernelLimits:
        if on.index not in self._limits:
            self._limits[on.index] = self._read_limits(on.index)
        return self._limits[on.index]

    def _read_limits(self, index: int) -> KernelLimits:
        return find_kernel_limits(self._capability(index))

    def _capability(self, index: int) -> str:
        with self.cupy.cuda.Device(index) as device:
            return str(device.compute_capability)

    def count_multiprocessors(self, on: Device) -> int:
        return on.multiprocessors or int(self.read_device_properties(on.index)["multiProcessorCount"])

    def require_multiprocessors(self, on: Device) -> None:
        with convert_cuda_errors(self.cupy, on, "divide its multiprocessors"):
            require_divided_multiprocessors(self.cupy, on)

    def alloc(self, nbytes: int, on: Device) -> Any:
        cupy = self.cupy
        try:
            reached = self._get_host_transfers(on)
            return DeviceBuffer(reached.allocate_zeroed_device_memory(max(nbytes, 16)), reached)
        except cupy.cuda.memory.OutOfMemoryError:
            raise BackendError(f"{on} cannot allocate {nbytes} bytes; use a smaller context or model") from None

    def _get_host_transfers(self, on: Device) -> HostTransfers:
        if str(on) not in self._transfers_by_device:
            transfers = HostTransfers(self.cupy, on, partial(self._make_stream, on))
            self._transfers_by_device.setdefault(str(on), transfers)  # one thread wins the race
        return self._transfers_by_device[str(on)]

    def _make_stream(self, on: Device, priority: int = 0) -> Any:
        """Make a stream of the current device; the stream of a device part uses only the part's multiprocessors.

        The stream does not wait for the default stream: another part of the device may wait for this stream.
        """
        if on.multiprocessors is not None:
            return make_green_stream(self.cupy, on, priority)
        return self.cupy.cuda.Stream(non_blocking=True, priority=priority)

    def address(self, buffer: DeviceBuffer) -> int:
        return int(buffer.array.data.ptr)

    def view(self, buffer: DeviceBuffer, tensor: Tensor) -> DeviceArray:
        whole, (shape, strides) = buffer.array, compute_storage_layout(tensor)
        with whole.device:
            array = self.cupy.ndarray(shape, tensor.dtype.storage, whole.data + tensor.offset, strides)
        return DeviceArray(array, buffer.transfers)

    def make_writer(
        self, buffers: Sequence[DeviceBuffer], tensors: Sequence[Tensor]
    ) -> Callable[[Sequence[Array]], None]:
        batches = [*coalesce_copies(tensors, host_transfers.STAGING_HALF_BYTES)]
        inside = {array.number for batch in batches for array in batch.arrays}
        others = {n: self.view(buffers[t.buffer], t) for n, t in enumerate(tensors) if n not in inside}
        if not batches:
            return partial(_copy_arrays_to_views, others)
        first = buffers[batches[0].buffer].transfers
        write = first.make_writer([(p, self.address(buffers[p.buffer]) + p.offset) for p in batches])
        if not others:
            return write

        def write_batches_and_views(arrays: Sequence[Array]) -> None:
            write(arrays)
            _copy_arrays_to_views(others, arrays)

        return write_batches_and_views

    def make_reader(self, buffers: Sequence[DeviceBuffer], tensors: Sequence[Tensor]) -> StartRead:
        views = [self.view(buffers[t.buffer], t) for t in tensors]
        return views[0].transfers.make_reader([view.array for view in views]) if views else lambda: list

    def enable_peer_access(self, devices: Sequence[Device]) -> bool:
        """Enable access of each device to the memory of all others; return `False` if that is impossible.

        Peer access covers all memory of a device, because buffers come from cudaMalloc. Parts of one device have one
        memory. They count as peers if each has multiprocessors of its own. Otherwise a kernel that waits for another
        part may block that part's launch, because streams share queues and some launches need an idle device.
        """
        if has_shared_multiprocessors(devices):
            return False
        cupy = self.cupy
        runtime, pairs = cupy.cuda.runtime, list(permutations(dict.fromkeys(d.index for d in devices), 2))
        if not all(runtime.deviceCanAccessPeer(own, other) for own, other in pairs):
            return False
        for own, other in pairs:
            with cupy.cuda.Device(own):
                try:
                    runtime.deviceEnablePeerAccess(other)
                except runtime.CUDARuntimeError as why:  # CuPy has cleared the last error already
                    if why.status != PEER_ACCESS_ALREADY_ENABLED:
                        raise BackendError(f"cuda:{own} cannot reach memory of cuda:{other}: {why}") from None
        return True

    def find_collective_library(self, devices: Sequence[Device]) -> CollectiveLibrary | str:
        if has_shared_multiprocessors(devices):
            return f"{self.library_name} joins no parts of one device"
        has_parts = len({device.index for device in devices}) < len(devices)
        return load_nccl(self.cupy, _nccl, self.library_name, has_parts)

    def map_signal_pad(self, board: Array, is_first: bool) -> int:
        """Map the group's signal pad into the devices' address space, and return its address there.

        The first device pins the memory for all.
        """
        runtime, address = self.cupy.cuda.runtime, int(board.ctypes.data)
        with convert_cuda_errors(self.cupy, f"{self.kind} devices", "share memory of the host"):
            if is_first:
                runtime.hostRegister(address, board.nbytes, PORTABLE_AND_MAPPED)
                weakref.finalize(board, runtime.hostUnregister, address)
            return int(runtime.pointerGetAttributes(address).devicePointer)

    def prepare_kernel(self, kernel: KernelInstance, on: Device) -> None:
        with convert_cuda_errors(self.cupy, on, f"load {kernel}"), self.cupy.cuda.Device(on.index):
            self._load_function(kernel, on.index)

    def record(self, steps: Sequence[DriverStep], on: Device) -> Callable[[], None]:
        cupy = self.cupy
        with convert_cuda_errors(cupy, on, "record launches"), cupy.cuda.Device(on.index):
            replay = self._make_replay_function(steps, on)

        def run() -> None:
            try:
                with cupy.cuda.Device(on.index):
                    replay()
            except cupy.cuda.runtime.CUDARuntimeError as why:
                raise LaunchError(steps[0].number, str(why)) from None

        return RecordedGraphWithCommunicators(
            run,
            tuple(step.communicator for step in flatten_steps(steps) if isinstance(step, CollectiveLibraryExchange)),
        )

    def _make_replay_function(self, steps: Sequence[DriverStep], on: Device) -> Callable[[], None]:
        """Return a function that replays the steps.

        A single launch is replayed directly, anything else as a CUDA graph. A single library exchange is also a graph:
        NCCL needs exchanges in graphs on all devices or on none.
        """
        stream = self.stream(on)
        if len(steps) == 1 and isinstance(steps[0], KernelLaunch):
            return self._make_step_call(steps[0], on, stream)
        cuda = self.cupy.cuda
        capturing, side = self._make_stream(on), self._make_stream(on, HIGH_PRIORITY)
        capability, release = int(self._capability(on.index)), cuda.runtime.driverGetVersion()
        may_be_early = self.begins_early and find_early_launch_library(capability, release) is not None
        calls = [*self._make_step_calls(steps, on, capturing, side, may_be_early)]
        with capturing:
            capturing.begin_capture()
            try:
                for call in calls:
                    call()
            except BaseException:
                with suppress(cuda.runtime.CUDARuntimeError):  # the side stream may not be joined yet
                    capturing.end_capture()  # otherwise this thread stays in capture mode
                raise
            return partial(capturing.end_capture().launch, stream)

    def _make_step_calls(
        self, steps: Sequence[DriverStep], on: Device, stream: Any, side: Any, may_be_early: bool
    ) -> Iterator[Callable[[], None]]:
        """Yield one call for each step, which puts the step into `stream`; overlapped collectives go into `side`.

        A collective that waits for another device is one block, so overlapped launches have all other slots of the
        multiprocessors. They wait for no collective, so they end, and every device arrives. `side` has a high priority:
        a collective starts before the pending blocks of a large launch. Launches of a collective never begin early,
        because their blocks would occupy slots while they wait.
        """
        for step, is_early in zip(steps, compute_early_launch_flags(steps), strict=True):
            if not isinstance(step, CollectiveOverlap):
                yield self._make_step_call(step, on, stream, may_be_early and is_early)
                continue
            fork, join = (self.cupy.cuda.Event(disable_timing=True) for _ in range(2))
            yield partial(fork.record, stream)
            yield partial(side.wait_event, fork)
            yield from (self._make_step_call(single, on, side) for single in step.collective)
            yield partial(join.record, side)
            yield from self._make_step_calls(step.overlapped, on, stream, side, may_be_early)
            yield partial(stream.wait_event, join)

    def stream(self, on: Device) -> Any:
        """Return the stream of a device's launches and copies."""
        return self._get_host_transfers(on).stream

    def _make_step_call(self, step: SingleStep, on: Device, stream: Any, is_early: bool = False) -> Callable[[], None]:
        """Return a call that puts one launch or exchange into a stream. The arguments of a launch are copied now."""
        if isinstance(step, CollectiveLibraryExchange):
            return partial(step.communicator.enqueue_transfers, step.transfers, stream.ptr)
        driver, launch, function = self.cupy.cuda.driver, step, self._load_function(step.kernel, on.index)
        self._allow_dynamic_shared_bytes(function, launch.shared_bytes)
        library = find_attribute_launch_library(launch, is_early)
        words = np.array(launch.words, np.uint64)
        parameters = np.array([words.ctypes.data], np.uint64)

        def call(references: Any = (function, words, parameters)) -> None:
            try:
                if library is None:
                    sizes = *launch.grid, *launch.block, launch.shared_bytes
                    driver.launchKernel(function.ptr, *sizes, stream.ptr, parameters.ctypes.data, 0)
                elif status := launch_with_attributes(
                    library, function.ptr, launch, stream.ptr, parameters.ctypes.data, is_early
                ):
                    raise driver.CUDADriverError(status)
            except driver.CUDADriverError as why:
                raise LaunchError(launch.number, f"{launch.kernel}: {why}") from None

        return call

    def _load_function(self, kernel: KernelInstance, index: int) -> Any:
        module, lowered = _compile_and_load_module(self, kernel.source, index)
        return module.get_function(lowered[kernel.name])

    def _allow_dynamic_shared_bytes(self, function: Any, shared_bytes: int) -> None:
        """Allow launches of a kernel with `shared_bytes` bytes of dynamic shared memory."""
        if shared_bytes > DEFAULT_SHARED_BYTES:
            self.cupy.cuda.driver.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)

    def compile_source(self, source: KernelSource, index: int) -> tuple[bytes, Mapping[str, str]]:
        """Compile a source for a device. Raises `BackendError` if it does not compile.

        Returns:
            The machine code, and the mangled name of each kernel.
        """
        capability = self._capability(index)
        return load_or_compile_cubin(source, f"sm_{capability}{'a' if capability in SUFFIX_A_CAPABILITIES else ''}")

    def is_idle(self, on: Device) -> bool:
        return self._query_stream(on) != NOT_READY  # done, or failed

    def find_device_loss(self, on: Device) -> str:
        self._query_stream(on)  # an error that does not stay comes once
        status = self._query_stream(on)
        return "" if status in (0, NOT_READY) else str(self.cupy.cuda.runtime.CUDARuntimeError(status))

    def _query_stream(self, on: Device) -> int:
        return int(self.cupy.cuda.runtime.streamQuery(self.stream(on).ptr))

    def run_timed(self, runs: Sequence[Callable[[], None]], on: Device) -> list[float]:
        """Run recorded runs one after the other, and return the device seconds of each, measured by CUDA events."""
        events, stream = self.cupy.cuda, self.stream(on)
        with convert_cuda_errors(self.cupy, on, "time launches"), events.Device(on.index):
            marks = [events.Event() for _ in range(len(runs) + 1)]
            marks[0].record(stream)
            for run, mark in zip(runs, marks[1:], strict=True):
                run()
                mark.record(stream)
            self.synchronise(on)
            return [events.get_elapsed_time(start, end) * 1e-3 for start, end in pairwise(marks)]

    def synchronise(self, on: Device) -> None:
        with convert_cuda_errors(self.cupy, on, "end what was launched"):
            self.stream(on).synchronize()


def _copy_arrays_to_views(views: Mapping[int, DeviceArray], arrays: Sequence[Array]) -> None:
    """Copy to each view the host array that has the same number: ``arrays[number]`` to ``views[number]``."""
    for number, view in views.items():
        view[...] = arrays[number]


@thread_safe_cache
def _compile_and_load_module(driver: CudaDriver, source: KernelSource, index: int) -> tuple[Any, Mapping[str, str]]:
    """Compile a source and load it as a module on a device; return the module and the mangled kernel names."""
    cupy = driver.cupy
    with cupy.cuda.Device(index):
        image, lowered = driver.compile_source(source, index)
        module = cupy.cuda.function.Module()
        module.load(image)
    return module, lowered


class SimulatedGpuDriver(CudaDriver):
    """A driver that tells the planner the limits of a simulated device, and cannot run anything."""

    def __init__(self, of: type[CudaDriver], limits: KernelLimits) -> None:
        super().__init__()
        self.kind, self.can_overlap_collectives, self._of_all = of.kind, of.can_overlap_collectives, limits

    def devices(self) -> Sequence[Device]:
        return (Device(self.kind, 0),)

    def limits(self, on: Device) -> KernelLimits:
        return self._of_all


class PlanOnlyGpuBackend(DriverBackend):
    """A backend for plans on simulated devices: it chooses kernels and dtypes, but cannot run anything."""

    def can_overlap_collectives(self, devices: Sequence[Device]) -> bool:
        """Return whether kernels can run during collectives; peer access or a collective library is assumed."""
        return self.driver.can_overlap_collectives


class CudaBackend(DriverBackend):
    """The backend of CUDA devices: ``cuda:0``, ``cuda:1`` and so on."""

    def __init__(self) -> None:
        super().__init__(CudaDriver())

    def make_simulated_backend(self, model: str) -> DriverBackend:
        """Make a simulated backend for plans on devices of compute capability `model`, such as ``90``."""
        return PlanOnlyGpuBackend(SimulatedGpuDriver(CudaDriver, find_kernel_limits(model)))

    def read_kernel_efficiencies(self) -> KernelEfficiencies:
        """Return the measured efficiencies of kernel families."""
        return read_kernel_efficiencies()
