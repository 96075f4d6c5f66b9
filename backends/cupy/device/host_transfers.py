"""Transfers between a device and the host through pinned memory, on the stream of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import numpy as np

from ....graph.errors import BackendError
from ...base import ALIGNMENT, Array, Device
from .batched_copies import CoalescedCopy
from .driver import StartRead
from .pinned_arrays import PinnedPool

STAGING_HALF_BYTES = 8 << 20
"""Bytes of one half of the pinned memory. The host fills a half while the device copies the other half."""


class convert_cuda_errors:  # noqa: N801  # reads as a verb; a generator takes four times as long, several times per token
    """A context manager that converts errors of the CUDA runtime and driver to `BackendError`.

    Its message names the device `who` and the action `doing` that failed.
    """

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
            message = " ".join(str(why).split())
            raise BackendError(
                f"{self.who} cannot {self.doing}: {message}; if that goes on, start the process anew"
            ) from None


class HostTransfers:
    """Copies between the host and one device through pinned memory, on the device's stream.

    Copies keep their order with launches. A copy to the device is asynchronous: its bytes wait in pinned memory, so the
    caller's array is reusable at once. The pinned memory has two halves. The host fills one half while the device
    copies the other.

    Args:
        cupy: The module CuPy.
        on: The device.
        make_stream: Makes the stream of the device, which is current then.
    """

    def __init__(self, cupy: Any, on: Device, make_stream: Callable[[], Any]) -> None:
        self.cupy, self.index, self.name = cupy, on.index, str(on)
        with convert_cuda_errors(cupy, self.name, "make a stream and pinned memory"), cupy.cuda.Device(on.index):
            self.stream = make_stream()
            self._half_events = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
            self._pinned = np.frombuffer(
                cupy.cuda.alloc_pinned_memory(2 * STAGING_HALF_BYTES), np.uint8, 2 * STAGING_HALF_BYTES
            )
        self._pinned_address = int(self._pinned.ctypes.data)
        self._current_half, self._used_bytes = 0, 0
        self._pinned_pool = PinnedPool(cupy.cuda.alloc_pinned_memory)

    def allocate_zeroed_device_memory(self, nbytes: int) -> Any:
        """Allocate zeroed device memory of `nbytes` bytes."""
        with self._use_stream_and_convert_errors("set memory to zero"):
            return self.cupy.zeros(nbytes, np.uint8)

    def move_to_device(self, host: Array, array: Any, index: Any = ...) -> None:
        """Copy a host array to a device array, or to the part of it that `index` selects.

        Args:
            host: The host array.
            array: The device array.
            index: The index in the device array; by default all of it.
        """
        with self._use_stream_and_convert_errors("copy from the host"):
            if index is ... and host.shape == array.shape and array.flags.c_contiguous:
                self._move_dense_to_device_in_parts(host, array)
                return
            copy = self.cupy.empty(host.shape, array.dtype)  # the pool reuses it on this stream only
            self._move_dense_to_device_in_parts(host, copy)
            array[index] = copy

    def move_to_host(self, array: Any) -> Array:
        """Copy a device array to a new host array. The copy follows all earlier work of the stream."""
        runtime = self.cupy.cuda.runtime
        with self._use_stream_and_convert_errors("copy to the host"):
            dense = self.cupy.ascontiguousarray(array)
            host = np.empty(array.shape, dense.dtype)
            into = host.reshape(-1).view(np.uint8)
            for start in range(0, into.size, STAGING_HALF_BYTES):
                part = into[start : start + STAGING_HALF_BYTES]
                room = self._reserve_pinned_offset(part.size)
                source, at = dense.data.ptr + start, self._pinned_address + room
                runtime.memcpyAsync(at, source, part.size, runtime.memcpyDeviceToHost, self.stream.ptr)
                self.stream.synchronize()
                part[:] = self._pinned[room : room + part.size]
        return host

    def make_writer(self, batches: Sequence[tuple[CoalescedCopy, int]]) -> Callable[[Sequence[Array]], None]:
        """Return a function that copies host arrays to these device addresses, one copy per batch."""
        runtime, stream = self.cupy.cuda.runtime, self.stream.ptr

        def write(arrays: Sequence[Array]) -> None:
            with convert_cuda_errors(self.cupy, self.name, "copy from the host"), self.cupy.cuda.Device(self.index):
                for batch, address in batches:
                    room = self._reserve_pinned_offset(batch.nbytes)
                    for array in batch.arrays:
                        np.ndarray(array.shape, array.dtype, self._pinned, room + array.offset)[...] = arrays[
                            array.number
                        ]
                    at = self._pinned_address + room
                    runtime.memcpyAsync(address, at, batch.nbytes, runtime.memcpyHostToDevice, stream)

        return write

    def make_reader(self, arrays: Sequence[Any]) -> StartRead:
        """Return a function that starts to copy device arrays to the host after all earlier work; see `StartRead`.

        All copies end with one event, so that the host waits once, and not for later work of the stream. An array
        without pinned memory is copied before the function returns.
        """
        sources = [(int(a.data.ptr), int(a.nbytes), a.shape, a.dtype) for a in arrays]
        is_small = [0 < a.nbytes <= STAGING_HALF_BYTES and a.flags.c_contiguous for a in arrays]

        events = cycle([self.cupy.cuda.Event(disable_timing=True) for _ in range(2)])
        """Two reads may be on their way; the event of an older one is then recorded again, later."""

        def start() -> Callable[[], Sequence[Array]]:
            event = next(events)
            with self._convert_end_errors(), self.cupy.cuda.Device(self.index):
                hosts = [
                    self._start_pinned_read(*s) if small else None for s, small in zip(sources, is_small, strict=True)
                ]
                event.record(self.stream)
            results = [
                self.move_to_host(array) if host is None else host for array, host in zip(arrays, hosts, strict=True)
            ]

            def wait() -> Sequence[Array]:
                with self._convert_end_errors():
                    event.synchronize()
                return results

            return wait

        return start

    def _convert_end_errors(self) -> convert_cuda_errors:
        return convert_cuda_errors(self.cupy, self.name, "end what was launched")

    def _start_pinned_read(
        self, source: int, nbytes: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Array | None:
        """Start an asynchronous copy from the device to a host array in pinned memory, and return this array.

        The result is `None` if the callers still hold too many pinned arrays.

        Args:
            source: Device address.
            nbytes: Bytes to copy.
            shape: Shape of the host array.
            dtype: Dtype of the host array.
        """
        if (block := self._pinned_pool.find_or_allocate_block(nbytes)) is None:
            return None
        host, runtime = block.lend_array(shape, dtype), self.cupy.cuda.runtime
        runtime.memcpyAsync(block.address, source, nbytes, runtime.memcpyDeviceToHost, self.stream.ptr)
        return host

    @contextmanager
    def _use_stream_and_convert_errors(self, doing: str) -> Iterator[None]:
        """Make the device and its stream current in a context, and convert CUDA errors in it to `BackendError`.

        `doing` names the action in messages.
        """
        with convert_cuda_errors(self.cupy, self.name, doing), self.cupy.cuda.Device(self.index), self.stream:
            yield

    def _move_dense_to_device_in_parts(self, host: Array, array: Any) -> None:
        """Copy a host array to a contiguous device array of the same shape, in parts of half of the pinned memory."""
        runtime, data = self.cupy.cuda.runtime, np.ascontiguousarray(host, array.dtype).reshape(-1).view(np.uint8)
        for start in range(0, data.size, STAGING_HALF_BYTES):
            part = data[start : start + STAGING_HALF_BYTES]
            room = self._reserve_pinned_offset(part.size)
            self._pinned[room : room + part.size] = part
            target, at = array.data.ptr + start, self._pinned_address + room
            runtime.memcpyAsync(target, at, part.size, runtime.memcpyHostToDevice, self.stream.ptr)

    def _reserve_pinned_offset(self, nbytes: int) -> int:
        """Reserve bytes in the current half of the pinned memory and return their offset.

        If the half is full, the other half becomes the current one, after a wait for the copies from it.
        """
        if self._used_bytes + nbytes > STAGING_HALF_BYTES:
            self._half_events[self._current_half].record(self.stream)
            self._current_half, self._used_bytes = 1 - self._current_half, 0
            self._half_events[self._current_half].synchronize()
        start = self._current_half * STAGING_HALF_BYTES + self._used_bytes
        self._used_bytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return start


class DeviceArray:
    """A NumPy-like array in device memory. Assignment copies to the device, and indexing copies to the host."""

    def __init__(self, array: Any, staging: HostTransfers) -> None:
        self.array, self.transfers = array, staging
        self.shape, self.dtype = array.shape, array.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        host = self.transfers.move_to_host(self.array)
        return host if dtype is None else host.astype(dtype)

    def __getitem__(self, index: Any) -> Array:
        return self.transfers.move_to_host(self.array[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.transfers.move_to_device(np.asarray(value), self.array, index)
