"""The driver of CUDA devices: memory, streams, graphs and modules through CuPy, which is imported when it is used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise, permutations
from typing import Any

import numpy as np

from ...graph.errors import BackendError
from ..base import Array, Device, Tensor
from .backend import DriverBackend
from .cubins import cubin
from .driver import Kernel, Launch, LaunchError, Source

INSTALL = "pip install hocket[cuda13] (or hocket[cuda12], for drivers before 580)"
NEAR_LIMIT = 48 * 1024
"""Bytes of shared memory that a launch may size without asking first."""
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""Number of that CUfunction_attribute."""
PEER_ACCESS_ALREADY_ENABLED, PORTABLE_AND_MAPPED = 704, 3
"""Of the CUDA runtime: an error, and flags of cudaHostRegister."""
SPECIFIC = frozenset(("90", "100", "103", "120"))
"""Compute capabilities whose own instructions need an architecture with the letter a."""


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as why:
        raise BackendError(f"cuda devices need CuPy: {INSTALL} ({why})") from None
    return cupy


class DeviceArray:
    """An array in the memory of a device, as NumPy code sees it: assigning copies there, reading copies back."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype

    def get(self) -> Array:
        host: Array = self.array.get()
        return host

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.get() if dtype is None else self.get().astype(dtype)

    def __getitem__(self, index: Any) -> Array:
        host: Array = self.array[index].get()
        return host

    def __setitem__(self, index: Any, value: Any) -> None:
        host = np.asarray(value)
        with self.array.device:
            if index is ... and host.shape == self.shape and self.array.flags.c_contiguous:
                self.array.set(np.asarray(host, self.dtype, order="C"))  # without a second array on the device
            else:
                self.array[index] = _cupy().asarray(host)


class CudaDriver:
    """The CUDA devices of this machine.

    Copies go through the default stream, launches through one stream a device that waits for it, so that both keep
    their order.
    """

    kind = "cuda"

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}

    def devices(self) -> Sequence[Device]:
        return tuple(map(self.device, range(self._count())))

    def _count(self) -> int:
        """How many devices there are.  Raises `BackendError` if none can be used."""
        runtime = _cupy().cuda.runtime
        try:
            return int(runtime.getDeviceCount())
        except runtime.CUDARuntimeError as why:
            raise BackendError(f"no CUDA device can be used: {why}; cuda-emulated:0 runs anywhere") from None

    def device(self, index: int) -> Device:
        if index >= (count := self._count()):
            raise BackendError(f"there is no device cuda:{index}; this machine has {count}")
        about = _cupy().cuda.runtime.getDeviceProperties(index)
        return Device(self.kind, index, int(about["totalGlobalMem"]), about["name"].decode())

    def alloc(self, nbytes: int, on: Device) -> Any:
        cupy = _cupy()
        try:
            with cupy.cuda.Device(on.index):
                return cupy.zeros(max(nbytes, 16), np.uint8)
        except cupy.cuda.memory.OutOfMemoryError:
            raise BackendError(f"{on} cannot allocate {nbytes} bytes; use a smaller context or model") from None

    def address(self, buffer: Any) -> int:
        return int(buffer.data.ptr)

    def view(self, buffer: Any, tensor: Tensor) -> DeviceArray:
        dtype = tensor.dtype.storage
        strides = [s * dtype.itemsize for s in tensor.strides]
        with buffer.device:
            return DeviceArray(_cupy().ndarray(tensor.shape, dtype, buffer.data + tensor.offset, strides))

    def are_peers(self, devices: Sequence[Device]) -> bool:
        """Device memory is from cudaMalloc, which peer access opens to a device as a whole."""
        cupy = _cupy()
        runtime, pairs = cupy.cuda.runtime, list(permutations([d.index for d in devices], 2))
        if not all(runtime.deviceCanAccessPeer(own, other) for own, other in pairs):
            return False
        for own, other in pairs:
            with cupy.cuda.Device(own):
                try:
                    runtime.deviceEnablePeerAccess(other)
                except runtime.CUDARuntimeError as why:
                    if why.status != PEER_ACCESS_ALREADY_ENABLED:
                        raise BackendError(f"cuda:{own} cannot reach memory of cuda:{other}: {why}") from None
        return True

    def share(self, board: Array, rank: int) -> int:
        """The board is pinned by the first device, for all of them and for as long as it lives."""
        runtime, address = _cupy().cuda.runtime, int(board.ctypes.data)
        if rank == 0:
            runtime.hostRegister(address, board.nbytes, PORTABLE_AND_MAPPED)
            weakref.finalize(board, runtime.hostUnregister, address)
        return int(runtime.pointerGetAttributes(address).devicePointer)

    def prepare(self, kernel: Kernel, on: Device) -> None:
        with _cupy().cuda.Device(on.index):
            _function(kernel, on.index)

    def record(self, launches: Sequence[Launch], on: Device) -> Callable[[], None]:
        """Several launches become a CUDA graph."""
        cupy, stream = _cupy(), self.stream(on)
        with cupy.cuda.Device(on.index):
            if len(launches) == 1:
                replay = self._call(launches[0], on, stream)
            else:
                capturing = cupy.cuda.Stream(non_blocking=True)
                calls = [self._call(launch, on, capturing) for launch in launches]
                with capturing:
                    capturing.begin_capture()
                    for call in calls:
                        call()
                    replay = partial(capturing.end_capture().launch, stream)

        def run() -> None:
            try:
                with cupy.cuda.Device(on.index):
                    replay()
            except cupy.cuda.runtime.CUDARuntimeError as why:
                raise LaunchError(launches[0].number, str(why)) from None

        return run

    def stream(self, on: Device) -> Any:
        """The stream that launches go to."""
        if on.index not in self._streams:
            with (cupy := _cupy()).cuda.Device(on.index):
                self._streams[on.index] = cupy.cuda.Stream()
        return self._streams[on.index]

    def _call(self, launch: Launch, on: Device, stream: Any) -> Callable[[], None]:
        """One launch into a stream; CUDA copies the words when it is made."""
        driver = _cupy().cuda.driver
        function = _function(launch.kernel, on.index)
        if launch.shared_bytes > NEAR_LIMIT:
            driver.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_bytes)
        words = np.array(launch.words, np.uint64)
        parameters = np.array([words.ctypes.data], np.uint64)

        def call(held: Any = (function, words, parameters)) -> None:
            try:
                driver.launchKernel(
                    function.ptr,
                    *launch.grid,
                    *launch.block,
                    launch.shared_bytes,
                    stream.ptr,
                    parameters.ctypes.data,
                    0,
                )
            except driver.CUDADriverError as why:
                raise LaunchError(launch.number, f"{launch.kernel}: {why}") from None

        return call

    def timed(self, runs: Sequence[Callable[[], None]], on: Device) -> list[float]:
        """By events between them in the stream."""
        events, stream = _cupy().cuda, self.stream(on)
        with events.Device(on.index):
            marks = [events.Event() for _ in range(len(runs) + 1)]
            marks[0].record(stream)
            for run, mark in zip(runs, marks[1:], strict=True):
                run()
                mark.record(stream)
            self.synchronise(on)
            return [events.get_elapsed_time(start, end) * 1e-3 for start, end in pairwise(marks)]

    def synchronise(self, on: Device) -> None:
        cupy = _cupy()
        try:
            self.stream(on).synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as why:
            raise BackendError(f"{on}: {why}") from None


@cache
def _module(source: Source, index: int) -> tuple[Any, dict[str, str]]:
    """The code of a source on a device, and what its kernels are called there."""
    cupy = _cupy()
    with cupy.cuda.Device(index) as device:
        capability = device.compute_capability
        image, lowered = cubin(source, f"sm_{capability}{'a' if capability in SPECIFIC else ''}")
        module = cupy.cuda.function.Module()
        module.load(image)
    return module, lowered


def _function(kernel: Kernel, index: int) -> Any:
    module, lowered = _module(kernel.source, index)
    return module.get_function(lowered[kernel.name])


class CudaBackend(DriverBackend):
    """Runs on CUDA devices as ``cuda:0``, ``cuda:1``, ..."""

    def __init__(self) -> None:
        super().__init__(CudaDriver())
