"""NCCL, or RCCL with the same calls, through CuPy.

The library serves devices without peer access, and large collectives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....graph.dtypes import DType
from ....graph.errors import BackendError
from ...base import Array, Device
from .driver import CollectiveLibraryTransfer, Communicator

NCCL_TYPE_NAMES = {
    DType.F32: "NCCL_FLOAT32",
    DType.BF16: "NCCL_BFLOAT16",
    DType.I8: "NCCL_INT8",
    DType.I32: "NCCL_INT32",
    DType.I64: "NCCL_INT64",
}


MIN_SHARED_DEVICE_VERSION, SHARED_DEVICE_VARIABLE = 23000, "NCCL_MULTI_RANK_GPU_ENABLE"
"""The first version of NCCL that allows several ranks on one device, and the variable that enables it.

Source: NCCL's documentation of environment variables, and src/init.cc of 2.30.
"""
INSTALL_HINTS = {
    "NCCL": "on Linux: pip install nvidia-nccl-cu13, or nvidia-nccl-cu12",
    "RCCL": "a part of ROCm: apt install rccl",
}


def load_nccl(cupy: Any, load: Callable[[], Any], name: str, has_parts: bool = False) -> NcclLibrary | str:
    """Load the collective library NCCL or RCCL through CuPy.

    Args:
        cupy: The module CuPy.
        load: Imports the library from CuPy.
        name: NCCL or RCCL.
        has_parts: Whether it must join parts of one device.

    Returns:
        The library, or the reason why there is none.
    """
    try:
        library = load()
        if not getattr(library, "available", False):
            return f"this CuPy has no {name} ({INSTALL_HINTS[name]})"
        version = int(library.get_version())
    except (ImportError, RuntimeError) as why:
        return f"{name} does not load: {' '.join(str(why).split())}"
    full_name = f"{name} {version // 10000}.{version // 100 % 100}.{version % 100}"
    if has_parts and version < MIN_SHARED_DEVICE_VERSION:
        return f"{full_name} joins no parts of one device (2.30 and later do)"
    if has_parts and os.environ.get(SHARED_DEVICE_VARIABLE) != "1":
        return f"{full_name} joins parts of one device only with {SHARED_DEVICE_VARIABLE}=1"
    return NcclLibrary(cupy, library, full_name)


class NcclLibrary:
    """The loaded NCCL or RCCL library. Each device calls it from its own thread."""

    def __init__(self, cupy: Any, nccl: Any, name: str) -> None:
        self.cupy, self.nccl, self.name = cupy, nccl, name

    def make_unique_id(self) -> Array:
        """Make the unique identifier of a new group. It has one 64-bit word per byte."""
        return np.array(self.nccl.get_unique_id(), np.int64)  # a word per byte: the sign of C's char varies

    def join_group(self, identity: Array, rank: int, size: int, on: Device) -> NcclCommunicator:
        try:
            with self.cupy.cuda.Device(on.index):
                return NcclCommunicator(self, self.nccl.NcclCommunicator(size, tuple(identity.tolist()), rank))
        except self.nccl.NcclError as why:
            raise BackendError(f"{on} cannot join a group of {size} devices with {self.name}: {why}") from None


class NcclCommunicator:
    """The NCCL or RCCL communicator of one device. It must outlive every CUDA graph that contains its calls."""

    def __init__(self, library: NcclLibrary, communicator: Any) -> None:
        self.name, self.nccl, self.communicator = library.name, library.nccl, communicator

    def enqueue_transfers(self, transfers: Sequence[CollectiveLibraryTransfer], stream: int) -> None:
        nccl = self.nccl
        try:
            nccl.groupStart()
            try:
                for t in transfers:
                    self._enqueue_transfer(t, getattr(nccl, NCCL_TYPE_NAMES[t.dtype]), stream)
            finally:
                nccl.groupEnd()
        except nccl.NcclError as why:
            raise BackendError(f"{self.name}: {why}") from None

    def _enqueue_transfer(self, t: CollectiveLibraryTransfer, dtype: int, stream: int) -> None:
        match t.op:
            case "all_reduce":
                self.communicator.allReduce(t.source, t.target, t.count, dtype, self.nccl.NCCL_SUM, stream)
            case "send":
                self.communicator.send(t.source, t.count, dtype, t.other, stream)
            case _:
                assert t.op == "receive"
                self.communicator.recv(t.target, t.count, dtype, t.other, stream)

    def find_error(self) -> str | None:
        try:
            self.communicator.check_async_error()
        except self.nccl.NcclError as why:
            return str(why)
        return None

    def abort(self) -> None:
        self.communicator.abort()


class RecordedGraphWithCommunicators:
    """A recorded CUDA graph that keeps the communicators alive which it uses.

    The graph is deleted before them. A communicator that ends while a graph uses it would wait forever.
    """

    def __init__(self, run: Callable[[], None], communicators: tuple[Communicator, ...]) -> None:
        self.run: Callable[[], None] | None = run
        self.communicators = communicators

    def __call__(self) -> None:
        assert self.run is not None
        self.run()

    def __del__(self) -> None:
        self.run = None
