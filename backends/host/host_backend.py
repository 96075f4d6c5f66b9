"""Shared base of all backends in host memory: buffers are byte arrays, views are NumPy arrays."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from ...graph.errors import BackendError
from ...graph.node import Node
from ...graph.spec import Spec
from ...ops.quantisation import dequantise, encode_array
from ..base import Array, Device, Tensor, contiguous_strides, view_host_tensor

ALIGNMENT = 64
HOST_MEMORY = "host"
"""The value of `Device.memory_of` for the memory of this machine."""
ALLOCATION_CHUNK_BYTES = 32 * 1024 * 1024
"""Bytes of one allocation for long-lived buffers.

NumPy asks for large pages for large arrays. With small pages weights are read 7 to 8 % more slowly.
"""


class HostBackend(ABC):
    """Base class of backends with buffers in host memory. Any device index is valid: all devices are virtual."""

    name: str
    _chunk_tail: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
    """The unused rest of the last allocation."""

    def with_threads(self, threads: int) -> Self:
        return self

    def devices(self) -> Sequence[Device]:
        return (self.device(0),)

    def device(self, index: int) -> Device:
        return Device(
            self.name, index, _read_physical_memory_bytes(), f"{os.cpu_count()} processors", memory_of=HOST_MEMORY
        )

    @abstractmethod
    def storage_spec(self, spec: Spec, kind: str = "value") -> Spec:
        """Return the shape and dtype in which the backend stores a value."""

    def reads_strided(self, node: Node, operand: int) -> bool:
        return True

    def alloc(self, nbytes: int, on: Device, lasting: bool = False) -> npt.NDArray[np.uint8]:
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        try:
            if not lasting or size >= ALLOCATION_CHUNK_BYTES:
                return _allocate_zeros(size)[:nbytes]
            if size > self._chunk_tail.nbytes:
                self._chunk_tail = _allocate_zeros(ALLOCATION_CHUNK_BYTES)
        except MemoryError:
            raise BackendError(f"{on} cannot allocate {nbytes} bytes; use a smaller context or model") from None
        taken, self._chunk_tail = self._chunk_tail[:nbytes], self._chunk_tail[size:]
        return taken

    def view(self, buffer: npt.NDArray[np.uint8], tensor: Tensor) -> Array:
        return view_host_tensor(buffer, tensor)

    def load(self, data: Array, declared: Spec, buffer: npt.NDArray[np.uint8]) -> None:
        stored = self.storage_spec(declared, "weight")
        target = view_host_tensor(buffer, Tensor(0, 0, stored.shape, contiguous_strides(stored.shape), stored.dtype))
        plain = data if declared.dtype.is_integer else dequantise(np.atleast_1d(data), declared.dtype)
        target[...] = encode_array(plain.reshape(stored.shape), stored.dtype)

    def as_buffer(self, data: Array, declared: Spec) -> npt.NDArray[np.uint8] | None:
        """Return the bytes of `data` as a buffer without a copy; None if the backend needs another form or layout.

        `data` must be dense, aligned and equal to the stored form of a weight.
        """
        fits = self.storage_spec(declared, "weight") == declared and not declared.dtype.is_quantised and data.nbytes > 0
        if not fits or data.ctypes.data % ALIGNMENT or not data.flags.c_contiguous:
            return None
        return data.reshape(-1).view(np.uint8)


def _allocate_zeros(nbytes: int) -> npt.NDArray[np.uint8]:
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def _read_physical_memory_bytes() -> int | None:
    """Return the bytes of physical memory of this machine; None if the system does not report them."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
