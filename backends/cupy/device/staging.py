"""What a device and the host give each other: through pinned memory, on the stream of the device."""

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
"""Bytes of pinned memory that are filled while the device still copies as many others."""


class told:  # noqa: N801  # is read as a verb; a generator would take four times as long, several times a token
    """Errors of the runtime and of the driver become `BackendError`: who could not do what, and why."""

    __slots__ = ("cupy", "doing", "who")

    def __init__(self, cupy: Any, who: object, doing: str) -> None:
        self.cupy, self.who, self.doing = cupy, who, doing

    def __enter__(self) -> None:
        """There is nothing to prepare."""

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
        self._pinned_at = int(self._pinned.ctypes.data)
        self._half, self._taken = 0, 0
        self._lending = Lending(cupy.cuda.alloc_pinned_memory)

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
                source, at = dense.data.ptr + start, self._pinned_at + room
                runtime.memcpyAsync(at, source, piece.size, runtime.memcpyDeviceToHost, self.stream.ptr)
                self.stream.synchronize()
                piece[:] = self._pinned[room : room + piece.size]
        return host

    def writer(self, parcels: Sequence[tuple[Parcel, int]]) -> Callable[[Sequence[Array]], None]:
        """What sends parcels to these addresses of the device, with the arrays of the host that it is given."""
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
        """What gives the values of arrays of the device, once everything before has run, after a single wait."""
        sources = [(int(a.data.ptr), int(a.nbytes), a.shape, a.dtype) for a in arrays]
        is_small = [0 < a.nbytes <= HALF and a.flags.c_contiguous for a in arrays]

        def read() -> list[Array]:
            with told(self.cupy, self.name, "end what was launched"), self.cupy.cuda.Device(self.index):
                hosts = [self._lent(*s) if small else None for s, small in zip(sources, is_small, strict=True)]
                self.stream.synchronize()
            return [self.get(array) if host is None else host for array, host in zip(arrays, hosts, strict=True)]

        return read

    def _lent(self, source: int, nbytes: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
        """Where values will be once the stream has come so far; None where too many are still held."""
        if (block := self._lending.block(nbytes)) is None:
            return None
        host, runtime = block.lent(shape, dtype), self.cupy.cuda.runtime
        runtime.memcpyAsync(block.address, source, nbytes, runtime.memcpyDeviceToHost, self.stream.ptr)
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
            self._pinned[room : room + piece.size] = piece
            target, at = array.data.ptr + start, self._pinned_at + room
            runtime.memcpyAsync(target, at, piece.size, runtime.memcpyHostToDevice, self.stream.ptr)

    def _room(self, nbytes: int) -> int:
        """Where so many bytes of pinned memory begin that no copy uses."""
        if self._taken + nbytes > HALF:
            self._emptied[self._half].record(self.stream)
            self._half, self._taken = 1 - self._half, 0
            self._emptied[self._half].synchronize()
        start = self._half * HALF + self._taken
        self._taken += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return start


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
