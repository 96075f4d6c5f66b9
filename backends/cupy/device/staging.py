"""Transfers between a device and the host through pinned memory, on the stream of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ....graph.errors import BackendError
from ...base import ALIGNMENT, Array
from .lending import Lending
from .parcels import Parcel

HALF = 8 << 20
"""Bytes of one half of the pinned memory. The host fills a half while the device copies the other half."""


class told:  # noqa: N801  # reads as a verb; a generator takes four times as long, several times per token
    """Convert errors of the CUDA runtime and driver to `BackendError`, with the device and the failed action."""

    __slots__ = ("cupy", "doing", "who")

    def __init__(self, cupy: Any, who: object, doing: str) -> None:
        self.cupy, self.who, self.doing = cupy, who, doing

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, why: BaseException | None, trace: object) -> None:
        if why is None:
            return
        cuda = self.cupy.cuda
        if isinstance(why, (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError)):
            said = " ".join(str(why).split())
            raise BackendError(
                f"{self.who} cannot {self.doing}: {said}; if that goes on, start the process anew"
            ) from None


class Staging:
    """The stream of a device, and pinned memory for copies between host and device.

    Copies keep their order with launches. A copy to the device is asynchronous: its bytes wait in pinned memory, so the
    caller's array is reusable at once. The host fills one half of the pinned memory, then the other half, after the
    device has copied all of its contents.
    """

    def __init__(self, cupy: Any, kind: str, index: int) -> None:
        self.cupy, self.index, self.name = cupy, index, f"{kind}:{index}"
        with told(cupy, self.name, "make a stream and pinned memory"), cupy.cuda.Device(index):
            # It must not wait for the default stream: another part of the device may wait for this stream.
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self._emptied = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
            self._pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(2 * HALF), np.uint8, 2 * HALF)
        self._pinned_at = int(self._pinned.ctypes.data)
        self._half, self._taken = 0, 0
        self._lending = Lending(cupy.cuda.alloc_pinned_memory)

    def zeros(self, nbytes: int) -> Any:
        """Allocate zeroed device memory."""
        with self._at_work("set memory to zero"):
            return self.cupy.zeros(nbytes, np.uint8)

    def put(self, host: Array, array: Any, index: Any = ...) -> None:
        """Assign a host array to an index of a device array.

        Args:
            host: The host array.
            array: The device array.
            index: Its index; by default all of it.
        """
        with self._at_work("copy from the host"):
            if index is ... and host.shape == array.shape and array.flags.c_contiguous:
                self._send(host, array)
                return
            copy = self.cupy.empty(host.shape, array.dtype)  # the pool reuses it on this stream only
            self._send(host, copy)
            array[index] = copy

    def get(self, array: Any) -> Array:
        """Return the values of a device array, after all earlier work."""
        runtime = self.cupy.cuda.runtime
        with self._at_work("copy to the host"):
            dense = self.cupy.ascontiguousarray(array)
            host = np.empty(array.shape, dense.dtype)
            into = host.reshape(-1).view(np.uint8)
            for start in range(0, into.size, HALF):
                piece = into[start : start + HALF]
                room = self._room(piece.size)
                source, at = dense.data.ptr + start, self._pinned_at + room
                runtime.memcpyAsync(at, source, piece.size, runtime.memcpyDeviceToHost, self.stream.ptr)
                self.stream.synchronize()
                piece[:] = self._pinned[room : room + piece.size]
        return host

    def writer(self, parcels: Sequence[tuple[Parcel, int]]) -> Callable[[Sequence[Array]], None]:
        """Return a function that sends batches of host arrays to these device addresses."""
        runtime, stream = self.cupy.cuda.runtime, self.stream.ptr

        def write(arrays: Sequence[Array]) -> None:
            with told(self.cupy, self.name, "copy from the host"), self.cupy.cuda.Device(self.index):
                for parcel, address in parcels:
                    room = self._room(parcel.nbytes)
                    for piece in parcel.pieces:
                        np.ndarray(piece.shape, piece.dtype, self._pinned, room + piece.at)[...] = arrays[piece.number]
                    at = self._pinned_at + room
                    runtime.memcpyAsync(address, at, parcel.nbytes, runtime.memcpyHostToDevice, stream)

        return write

    def reader(self, arrays: Sequence[Any]) -> Callable[[], list[Array]]:
        """Return a function that returns the values of device arrays, after all earlier work, with a single wait."""
        sources = [(int(a.data.ptr), int(a.nbytes), a.shape, a.dtype) for a in arrays]
        is_small = [0 < a.nbytes <= HALF and a.flags.c_contiguous for a in arrays]

        def read() -> list[Array]:
            with told(self.cupy, self.name, "end what was launched"), self.cupy.cuda.Device(self.index):
                hosts = [self._lent(*s) if small else None for s, small in zip(sources, is_small, strict=True)]
                self.stream.synchronize()
            return [self.get(array) if host is None else host for array, host in zip(arrays, hosts, strict=True)]

        return read

    def _lent(self, source: int, nbytes: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
        """Start a copy to a pinned host array and return the array, or `None` if callers hold too many arrays."""
        if (block := self._lending.block(nbytes)) is None:
            return None
        host, runtime = block.lent(shape, dtype), self.cupy.cuda.runtime
        runtime.memcpyAsync(block.address, source, nbytes, runtime.memcpyDeviceToHost, self.stream.ptr)
        return host

    @contextmanager
    def _at_work(self, doing: str) -> Iterator[None]:
        """Select the device and its stream, and convert errors."""
        with told(self.cupy, self.name, doing), self.cupy.cuda.Device(self.index), self.stream:
            yield

    def _send(self, host: Array, array: Any) -> None:
        """Copy a host array to a contiguous device array of the same shape."""
        runtime, data = self.cupy.cuda.runtime, np.ascontiguousarray(host, array.dtype).reshape(-1).view(np.uint8)
        for start in range(0, data.size, HALF):
            piece = data[start : start + HALF]
            room = self._room(piece.size)
            self._pinned[room : room + piece.size] = piece
            target, at = array.data.ptr + start, self._pinned_at + room
            runtime.memcpyAsync(target, at, piece.size, runtime.memcpyHostToDevice, self.stream.ptr)

    def _room(self, nbytes: int) -> int:
        """Return the offset of unused bytes in pinned memory; wait for a half if needed."""
        if self._taken + nbytes > HALF:
            self._emptied[self._half].record(self.stream)
            self._half, self._taken = 1 - self._half, 0
            self._emptied[self._half].synchronize()
        start = self._half * HALF + self._taken
        self._taken += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return start


class DeviceArray:
    """A NumPy-like array in device memory. Assignment copies to the device, and indexing copies to the host."""

    def __init__(self, array: Any, staging: Staging) -> None:
        self.array, self.staging = array, staging
        self.shape, self.dtype = array.shape, array.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        host = self.staging.get(self.array)
        return host if dtype is None else host.astype(dtype)

    def __getitem__(self, index: Any) -> Array:
        return self.staging.get(self.array[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.staging.put(np.asarray(value), self.array, index)
