"""What a device and the host give each other: through pinned memory, on the stream of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ....graph.errors import BackendError
from ...base import Array

HALF = 8 << 20
"""Bytes of pinned memory that are filled while the device still copies as many others."""
ALIGNMENT = 64


@contextmanager
def told(cupy: Any, who: object, doing: str) -> Iterator[None]:
    """Errors of the runtime and of the driver become `BackendError`: who could not do what, and why."""
    try:
        yield
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as why:
        said = " ".join(str(why).split())
        raise BackendError(f"{who} cannot {doing}: {said}; if that goes on, start the process anew") from None


class Staging:
    """The stream of a device, and the pinned memory through which the host reaches it.

    Copies are in order with launches, and a copy to the device is asynchronous: its bytes wait in pinned memory, so the
    caller's array is free at once.  Of the two halves of that memory one is filled until it is full, then the other,
    once the device has copied all that lies there.
    """

    def __init__(self, cupy: Any, kind: str, index: int) -> None:
        self.cupy, self.index, self.name = cupy, index, f"{kind}:{index}"
        with told(cupy, self.name, "make a stream and pinned memory"), cupy.cuda.Device(index):
            # Of no stream but its own must it wait: one of another part of the device may be waiting for this one.
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self._emptied = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
            self._pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(2 * HALF), np.uint8, 2 * HALF)
        self._half, self._taken = 0, 0

    def zeros(self, nbytes: int) -> Any:
        """New memory of the device."""
        with self._at_work("set memory to zero"):
            return self.cupy.zeros(nbytes, np.uint8)

    def put(self, host: Array, array: Any, index: Any = ...) -> None:
        """Assign `host` to an index of an array of the device."""
        with self._at_work("copy from the host"):
            if index is ... and host.shape == array.shape and array.flags.c_contiguous:
                self._send(host, array)
                return
            copy = self.cupy.empty(host.shape, array.dtype)  # the pool gives it to nobody but this stream again
            self._send(host, copy)
            array[index] = copy

    def get(self, array: Any) -> Array:
        """The values of an array of the device, once everything before has run."""
        runtime = self.cupy.cuda.runtime
        with self._at_work("copy to the host"):
            dense = self.cupy.ascontiguousarray(array)
            host = np.empty(array.shape, dense.dtype)
            into = host.reshape(-1).view(np.uint8)
            for start in range(0, into.size, HALF):
                piece = into[start : start + HALF]
                room = self._room(piece.size)
                runtime.memcpyAsync(
                    room.ctypes.data, dense.data.ptr + start, piece.size, runtime.memcpyDeviceToHost, self.stream.ptr
                )
                self.stream.synchronize()
                piece[:] = room
        return host

    @contextmanager
    def _at_work(self, doing: str) -> Iterator[None]:
        """On the device, with its stream."""
        with told(self.cupy, self.name, doing), self.cupy.cuda.Device(self.index), self.stream:
            yield

    def _send(self, host: Array, array: Any) -> None:
        """To an array of the same shape that is dense."""
        runtime, data = self.cupy.cuda.runtime, np.ascontiguousarray(host, array.dtype).reshape(-1).view(np.uint8)
        for start in range(0, data.size, HALF):
            piece = data[start : start + HALF]
            room = self._room(piece.size)
            room[:] = piece
            runtime.memcpyAsync(
                array.data.ptr + start, room.ctypes.data, piece.size, runtime.memcpyHostToDevice, self.stream.ptr
            )

    def _room(self, nbytes: int) -> Array:
        """Pinned memory that no copy uses."""
        if self._taken + nbytes > HALF:
            self._emptied[self._half].record(self.stream)
            self._half, self._taken = 1 - self._half, 0
            self._emptied[self._half].synchronize()
        start = self._half * HALF + self._taken
        self._taken += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._pinned[start : start + nbytes]


class DeviceArray:
    """An array in the memory of a device, as NumPy code sees it: assigning copies there, reading copies back."""

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
