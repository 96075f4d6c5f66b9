"""The driver of CUDA devices: memory, graphs and modules through CuPy, which is imported when it is used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, permutations
from typing import Any

import numpy as np

from ...graph.errors import BackendError
from ..abilities import Predicted
from ..base import Array, Device, Tensor
from ..once import once
from .backend import DriverBackend
from .device import staging
from .device.cubins import cubin
from .device.driver import (
    Beside,
    Exchange,
    Kernel,
    Launch,
    LaunchError,
    Library,
    Ring,
    Single,
    Source,
    Step,
    has_parts,
    one_by_one,
)
from .device.early import early, launch_with, library_for, library_of
from .device.limits import EVERYWHERE, Limits, limits_of
from .device.nccl import nccl
from .device.parcels import parcels_of
from .device.staging import DeviceArray, Staging, told
from .predicted_speeds import load_predicted_speeds

INSTALL = "pip install hocket[cuda13] (or hocket[cuda12], for drivers before 580)"
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""Number of that CUfunction_attribute."""
PEER_ACCESS_ALREADY_ENABLED, NOT_READY, PORTABLE_AND_MAPPED = 704, 600, 3
"""Of the CUDA runtime: an error, the state of a stream, and flags of cudaHostRegister."""
FIRST = -1
"""Priority of a stream whose blocks begin before those of others, which have 0."""
SPECIFIC = frozenset(("90", "100", "103", "120"))
"""Compute capabilities whose own instructions need an architecture with the letter a."""


def _cupy() -> Any:
    import cupy

    return cupy


def _nccl() -> Any:
    from cupy.cuda import nccl

    return nccl


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a device, and how the host reaches it."""

    array: Any
    staging: Staging


class CudaDriver:
    """The CUDA devices of this machine.

    Launches and copies of a device, or of a part of one, go through one stream, so that they keep their order.
    `begins_early`: launches of a graph begin while the ones before them run, where the device and its driver can do so.
    """

    kind = "cuda"
    install = INSTALL
    library_name = "NCCL"
    is_hip, overlaps = False, True
    """Whether CuPy is built for the devices of AMD, and whether what is beside a collective runs at the same time."""

    def __init__(self, begins_early: bool = True) -> None:
        self.begins_early = begins_early
        self._staged: dict[str, Staging] = {}
        self._limits: dict[int, Limits] = {}

    @property
    def cupy(self) -> Any:
        """CuPy for these devices.  Raises `BackendError`."""
        try:
            cupy = _cupy()
        except ImportError as why:
            raise BackendError(f"{self.kind} devices need CuPy: {self.install} ({why})") from None
        if bool(cupy.cuda.runtime.is_hip) is not self.is_hip:
            others = "CUDA" if self.is_hip else "ROCm"
            raise BackendError(f"{self.kind} devices need another CuPy than this one for {others}: {self.install}")
        return cupy

    def devices(self) -> Sequence[Device]:
        return tuple(map(self.device, range(self._count())))

    def _count(self) -> int:
        """How many devices there are.  Raises `BackendError` if none can be used."""
        runtime = self.cupy.cuda.runtime
        try:
            return int(runtime.getDeviceCount())
        except runtime.CUDARuntimeError as why:
            raise BackendError(
                f"no {self.kind.upper()} device can be used: {why}; {self.kind}-emulated:0 runs anywhere"
            ) from None

    def device(self, index: int) -> Device:
        if index >= (count := self._count()):
            raise BackendError(f"there is no device {self.kind}:{index}; this machine has {count}")
        about = self.about(index)
        return Device(self.kind, index, int(about["totalGlobalMem"]), about["name"].decode())

    def about(self, index: int) -> Mapping[str, Any]:
        """What a device says of itself."""
        with told(self.cupy, f"{self.kind}:{index}", "say what it is"):
            properties: Mapping[str, Any] = self.cupy.cuda.runtime.getDeviceProperties(index)
        return properties

    def limits(self, on: Device) -> Limits:
        if on.index not in self._limits:
            self._limits[on.index] = self._limits_of(on.index)
        return self._limits[on.index]

    def _limits_of(self, index: int) -> Limits:
        return limits_of(self._capability(index))

    def _capability(self, index: int) -> str:
        with self.cupy.cuda.Device(index) as device:
            return str(device.compute_capability)

    def processors(self, on: Device) -> int:
        return int(self.about(on.index)["multiProcessorCount"])

    def alloc(self, nbytes: int, on: Device) -> Any:
        cupy = self.cupy
        try:
            reached = self._staging(on)
            return Memory(reached.zeros(max(nbytes, 16)), reached)
        except cupy.cuda.memory.OutOfMemoryError:
            raise BackendError(f"{on} cannot allocate {nbytes} bytes; use a smaller context or model") from None

    def _staging(self, on: Device) -> Staging:
        if str(on) not in self._staged:
            self._staged.setdefault(str(on), Staging(self.cupy, self.kind, on.index))  # of two threads' one stays
        return self._staged[str(on)]

    def address(self, buffer: Memory) -> int:
        return int(buffer.array.data.ptr)

    def view(self, buffer: Memory, tensor: Tensor) -> DeviceArray:
        dtype, whole = tensor.dtype.storage, buffer.array
        strides = [s * dtype.itemsize for s in tensor.strides]
        with whole.device:
            array = self.cupy.ndarray(tensor.shape, dtype, whole.data + tensor.offset, strides)
        return DeviceArray(array, buffer.staging)

    def writer(self, buffers: Sequence[Memory], tensors: Sequence[Tensor]) -> Callable[[Sequence[Array]], None]:
        parcels = [*parcels_of(tensors, staging.HALF)]
        inside = {piece.number for parcel in parcels for piece in parcel.pieces}
        others = {n: self.view(buffers[t.buffer], t) for n, t in enumerate(tensors) if n not in inside}
        if not parcels:
            return partial(_assign, others)
        first = buffers[parcels[0].buffer].staging
        write = first.writer([(p, self.address(buffers[p.buffer]) + p.offset) for p in parcels])
        if not others:
            return write

        def both(arrays: Sequence[Array]) -> None:
            write(arrays)
            _assign(others, arrays)

        return both

    def reader(self, buffers: Sequence[Memory], tensors: Sequence[Tensor]) -> Callable[[], Sequence[Array]]:
        views = [self.view(buffers[t.buffer], t) for t in tensors]
        return views[0].staging.reader([view.array for view in views]) if views else list

    def are_peers(self, devices: Sequence[Device]) -> bool:
        """Device memory is from cudaMalloc, which peer access opens to a device as a whole.

        Parts of one device are none, though they share its memory: a kernel that waits for another of the same device
        may keep it from starting, as streams share queues and some launches want the device to be idle.
        """
        if has_parts(devices):
            return False
        cupy = self.cupy
        runtime, pairs = cupy.cuda.runtime, list(permutations((d.index for d in devices), 2))
        if not all(runtime.deviceCanAccessPeer(own, other) for own, other in pairs):
            return False
        for own, other in pairs:
            with cupy.cuda.Device(own):
                try:
                    runtime.deviceEnablePeerAccess(other)
                except runtime.CUDARuntimeError as why:  # CuPy clears the last error before it raises
                    if why.status != PEER_ACCESS_ALREADY_ENABLED:
                        raise BackendError(f"cuda:{own} cannot reach memory of cuda:{other}: {why}") from None
        return True

    def library(self, devices: Sequence[Device]) -> Library | str:
        if has_parts(devices):
            return f"{self.library_name} joins no parts of one device"
        return nccl(self.cupy, _nccl, self.library_name)

    def share(self, board: Array, is_first: bool) -> int:
        """The board is pinned by the first device, for all of them and for as long as it lives."""
        runtime, address = self.cupy.cuda.runtime, int(board.ctypes.data)
        with told(self.cupy, f"{self.kind} devices", "share memory of the host"):
            if is_first:
                runtime.hostRegister(address, board.nbytes, PORTABLE_AND_MAPPED)
                weakref.finalize(board, runtime.hostUnregister, address)
            return int(runtime.pointerGetAttributes(address).devicePointer)

    def prepare(self, kernel: Kernel, on: Device) -> None:
        with told(self.cupy, on, f"load {kernel}"), self.cupy.cuda.Device(on.index):
            self._function(kernel, on.index)

    def record(self, steps: Sequence[Step], on: Device) -> Callable[[], None]:
        cupy = self.cupy
        with told(cupy, on, "record launches"), cupy.cuda.Device(on.index):
            replay = self._replay(steps, on)

        def run() -> None:
            try:
                with cupy.cuda.Device(on.index):
                    replay()
            except cupy.cuda.runtime.CUDARuntimeError as why:
                raise LaunchError(steps[0].number, str(why)) from None

        return Recorded(run, tuple(step.ring for step in one_by_one(steps) if isinstance(step, Exchange)))

    def _replay(self, steps: Sequence[Step], on: Device) -> Callable[[], None]:
        """All but a single launch becomes a CUDA graph; exchanges do so on all devices, or on none, as NCCL asks."""
        stream = self.stream(on)
        if len(steps) == 1 and isinstance(steps[0], Launch):
            return self._call(steps[0], on, stream)
        cuda = self.cupy.cuda
        capturing, side = cuda.Stream(non_blocking=True), cuda.Stream(non_blocking=True, priority=FIRST)
        capability, release = int(self._capability(on.index)), cuda.runtime.driverGetVersion()
        may_be_early = self.begins_early and library_for(capability, release) is not None
        calls = [*self._calls(steps, on, capturing, side, may_be_early)]
        with capturing:
            capturing.begin_capture()
            try:
                for call in calls:
                    call()
            except BaseException:
                with suppress(cuda.runtime.CUDARuntimeError):  # as the side may not have come back
                    capturing.end_capture()  # or streams and threads go on as if what they do were captured
                raise
            return partial(capturing.end_capture().launch, stream)

    def _calls(
        self, steps: Sequence[Step], on: Device, stream: Any, side: Any, may_be_early: bool
    ) -> Iterator[Callable[[], None]]:
        """Steps into a stream, of those beside each other the collective into the one at its `side`.

        What waits there for another device is one block.  It keeps its place on a multiprocessor while it waits, and
        launches beside it share the other places: they wait for no collective, so they end and make room on all
        devices, and everybody comes.  Its priority lets it begin before the blocks that a large launch has not begun
        yet.  No launch of a collective begins early there, as its blocks would keep places to wait in.
        """
        for step, is_early in zip(steps, early(steps), strict=True):
            if not isinstance(step, Beside):
                yield self._call(step, on, stream, may_be_early and is_early)
                continue
            fork, join = (self.cupy.cuda.Event(disable_timing=True) for _ in range(2))
            yield partial(fork.record, stream)
            yield partial(side.wait_event, fork)
            yield from (self._call(single, on, side) for single in step.meeting)
            yield partial(join.record, side)
            yield from self._calls(step.meanwhile, on, stream, side, may_be_early)
            yield partial(stream.wait_event, join)

    def stream(self, on: Device) -> Any:
        """The stream that launches and copies go to."""
        return self._staging(on).stream

    def _call(self, step: Single, on: Device, stream: Any, is_early: bool = False) -> Callable[[], None]:
        """One step into a stream, where it may begin early; the words of a launch are copied when it is made."""
        if isinstance(step, Exchange):
            return partial(step.ring.transfer, step.transfers, stream.ptr)
        driver, launch, function = self.cupy.cuda.driver, step, self._function(step.kernel, on.index)
        self._allow(function, launch.shared_bytes)
        library = library_of(launch, is_early)
        words = np.array(launch.words, np.uint64)
        parameters = np.array([words.ctypes.data], np.uint64)

        def call(held: Any = (function, words, parameters)) -> None:
            try:
                if library is None:
                    sizes = *launch.grid, *launch.block, launch.shared_bytes
                    driver.launchKernel(function.ptr, *sizes, stream.ptr, parameters.ctypes.data, 0)
                elif status := launch_with(library, function.ptr, launch, stream.ptr, parameters.ctypes.data, is_early):
                    raise driver.CUDADriverError(status)
            except driver.CUDADriverError as why:
                raise LaunchError(launch.number, f"{launch.kernel}: {why}") from None

        return call

    def _function(self, kernel: Kernel, index: int) -> Any:
        module, lowered = _module(self, kernel.source, index)
        return module.get_function(lowered[kernel.name])

    def _allow(self, function: Any, shared_bytes: int) -> None:
        """Let launches of a kernel size so much shared memory."""
        if shared_bytes > EVERYWHERE:
            self.cupy.cuda.driver.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)

    def compiled(self, source: Source, index: int) -> tuple[bytes, Mapping[str, str]]:
        """The code of a source for a device, and what its kernels are called there.  Raises `BackendError`."""
        capability = self._capability(index)
        return cubin(source, f"sm_{capability}{'a' if capability in SPECIFIC else ''}")

    def is_done(self, on: Device) -> bool:
        return int(self.cupy.cuda.runtime.streamQuery(self.stream(on).ptr)) != NOT_READY  # but done, or failed

    def timed(self, runs: Sequence[Callable[[], None]], on: Device) -> list[float]:
        """By events between them in the stream."""
        events, stream = self.cupy.cuda, self.stream(on)
        with told(self.cupy, on, "time launches"), events.Device(on.index):
            marks = [events.Event() for _ in range(len(runs) + 1)]
            marks[0].record(stream)
            for run, mark in zip(runs, marks[1:], strict=True):
                run()
                mark.record(stream)
            self.synchronise(on)
            return [events.get_elapsed_time(start, end) * 1e-3 for start, end in pairwise(marks)]

    def synchronise(self, on: Device) -> None:
        with told(self.cupy, on, "end what was launched"):
            self.stream(on).synchronize()


def _assign(views: Mapping[int, DeviceArray], arrays: Sequence[Array]) -> None:
    """To each view the array of its number."""
    for number, view in views.items():
        view[...] = arrays[number]


class Recorded:
    """A graph and the communicators in it, which wait for ever in their end if the graph is still there."""

    def __init__(self, run: Callable[[], None], rings: tuple[Ring, ...]) -> None:
        self.run: Callable[[], None] | None = run
        self.rings = rings

    def __call__(self) -> None:
        assert self.run is not None
        self.run()

    def __del__(self) -> None:
        self.run = None


@once
def _module(driver: CudaDriver, source: Source, index: int) -> tuple[Any, Mapping[str, str]]:
    """The code of a source on a device, and what its kernels are called there."""
    cupy = driver.cupy
    with cupy.cuda.Device(index):
        image, lowered = driver.compiled(source, index)
        module = cupy.cuda.function.Module()
        module.load(image)
    return module, lowered


class Absent(CudaDriver):
    """Devices that need not be there, as far as plans ask for them."""

    def __init__(self, of: type[CudaDriver], limits: Limits) -> None:
        super().__init__()
        self.kind, self.overlaps, self._of_all = of.kind, of.overlaps, limits

    def devices(self) -> Sequence[Device]:
        return (Device(self.kind, 0),)

    def limits(self, on: Device) -> Limits:
        return self._of_all


class AbsentBackend(DriverBackend):
    """What plans ask of devices that need not be there."""

    def overlaps(self, devices: Sequence[Device]) -> bool:
        """They are taken to reach each other's memory, or to have a library."""
        return self.driver.overlaps


class CudaBackend(DriverBackend):
    """Runs on CUDA devices as ``cuda:0``, ``cuda:1``, ..."""

    def __init__(self) -> None:
        super().__init__(CudaDriver())

    def absent(self, model: str) -> DriverBackend:
        """What plans ask of devices that need not be there; `model` is their compute capability, as ``90``."""
        return AbsentBackend(Absent(CudaDriver, limits_of(model)))

    def predicted(self, kind: str) -> Predicted | None:
        """What kernels reach on such a GPU, by a model of its time."""
        return load_predicted_speeds().get(kind)
