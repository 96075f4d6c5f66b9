"""The interface of a driver of CUDA devices, real or emulated, and the plain data of launches.

A program is a list of steps: launches, exchanges of a collective library, and collectives that overlap with launches. A
driver records steps once and then replays them for each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ....graph.dtypes import DType
from ....graph.errors import BackendError
from ....graph.old_names import make_module_getattr
from ...base import Array, Device, Tensor
from .device_limits import KernelLimits

KERNEL_FOLDER = Path(__file__).parent.parent / "kernels"
Dim3 = tuple[int, int, int]
SINGLE_BLOCK_CLUSTER: Dim3 = (1, 1, 1)
"""A cluster of one block."""
CUDA_HEADER, HIP_HEADER = "cuda.cuh", "hip.cuh"
"""Headers with the device instructions for which kernels are compiled."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A CUDA source: a `.cu` file and the template instances that kernels need, which are compiled together, once.

    Args:
        file: A file name in the folder ``kernels`` or its subfolders, or a path.
        names: C++ expressions of the kernels, such as ``unary<Neg>``.
        before: Headers in front of the file that several files share.
        instructions: The header with the device instructions.
        architectures: The architectures for which the source is compiled; empty means all.
        generated: Text between the headers and the file that is generated for a program; it has no file.
    """

    file: str
    names: tuple[str, ...]
    before: tuple[str, ...] = ()
    instructions: str = CUDA_HEADER
    architectures: tuple[str, ...] = ()
    generated: str = ""

    def __getitem__(self, name: str) -> KernelInstance:
        assert name in self.names, f"{name} is not declared in the source of {self.file}"
        return KernelInstance(self, name)

    @property
    def text(self) -> str:
        """The complete C++ text of the source, headers included."""
        *headers, file = ((name, read_kernel_text(name)) for name in self.files)
        generated = [("generated", self.generated)] if self.generated else []
        return "".join(f'#line 1 "{name}"\n{text}' for name, text in (*headers, *generated, file))

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files that make up the complete text. They are in order: headers first."""
        return ("types.cuh", self.instructions, "prelude.cuh", *self.before, self.file)


@cache
def find_kernel_files() -> Mapping[str, Path]:
    """Return the path of each kernel file by its file name, which is unique."""
    return MappingProxyType({path.name: path for path in sorted(KERNEL_FOLDER.rglob("*.cu*"))})


def find_kernel_path(file: str) -> Path:
    """Return the path of a kernel file by its name in the folder ``kernels``; any other name is itself a path."""
    return find_kernel_files().get(file) or Path(file)


@cache
def read_kernel_text(file: str) -> str:
    """Read the text of a kernel file."""
    return find_kernel_path(file).read_text("utf-8")


@dataclass(frozen=True, slots=True)
class KernelInstance:
    """One kernel of a source: a function or a template instance with its C++ name."""

    source: KernelSource
    name: str

    @property
    def single_kernel_source(self) -> KernelSource:
        """A source that requests only this kernel, so that it compiles faster than the complete source."""
        return replace(self.source, names=(self.name,))

    def __str__(self) -> str:
        return f"{self.source.file}: {self.name}"


@dataclass(frozen=True, slots=True)
class AddressSpan:
    """The bytes from `low` to `high` (exclusive) that a kernel may access through one of its arguments, an address.

    `word_index` is the index of this argument among the launch words.
    """

    word_index: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One launch of a GPU kernel: its grid, its block size and its arguments.

    - `words`: the fields of the kernel's argument struct, 64 bits each.
    - `number`: the index of the instruction that the launch computes.
    - `cluster`: the shape of a cluster. Its blocks run at the same time on neighbouring multiprocessors, and read
      each other's shared memory.
    """

    kernel: KernelInstance
    grid: Dim3
    block: Dim3
    shared_bytes: int
    words: tuple[int, ...]
    spans: tuple[AddressSpan, ...]
    number: int
    cluster: Dim3 = SINGLE_BLOCK_CLUSTER


@dataclass(frozen=True, slots=True)
class CollectiveLibraryTransfer:
    """The part of one device in one transfer of a collective library: its operation, addresses and element count.

    `source` and `target` are addresses; `count` is in elements of `dtype`. `op` is one of:

    - ``all_reduce``: sum `source` of all devices into `target` of each device.
    - ``send``: send `source` to device `other`.
    - ``receive``: receive from device `other` into `target`.
    """

    op: str
    source: int
    target: int
    count: int
    dtype: DType
    other: int = -1


class Communicator(Protocol):
    """The communicator of one device in a group of a collective library. All methods raise `BackendError`."""

    def enqueue_transfers(self, transfers: Sequence[CollectiveLibraryTransfer], stream: int) -> None:
        """Enqueue transfers into a stream of the device as one group: none of them waits for another of the group."""

    def find_error(self) -> str | None:
        """Return the message of an asynchronous error of the library; `None` if there is no error."""

    def abort(self) -> None:
        """Abort all present and future transfers of this communicator, without results; it is lost then.

        The call returns only after all recordings that use the communicator are deleted, which may be late.
        """


class CollectiveLibrary(Protocol):
    """The interface of a collective library, such as NCCL."""

    name: str

    def make_unique_id(self) -> Array:
        """Make the unique identifier of a new group, as 64-bit words. One device sends it to all others."""

    def join_group(self, identity: Array, rank: int, size: int, on: Device) -> Communicator:
        """Join a group of devices as one member, and wait until all members have joined.

        Args:
            identity: The words of `make_unique_id`.
            rank: The rank of this member.
            size: The number of members.
            on: The device of this member.

        Raises:
            BackendError: The device cannot join.
        """


@dataclass(frozen=True, slots=True)
class CollectiveLibraryExchange:
    """A step of a program that runs several sends, receives or sums of a library such as NCCL as one group."""

    communicator: Communicator
    transfers: tuple[CollectiveLibraryTransfer, ...]
    number: int


SingleStep = KernelLaunch | CollectiveLibraryExchange


@dataclass(frozen=True, slots=True)
class CollectiveOverlap:
    """A step that runs a collective and, at the same time, launches that do not depend on it.

    Both wait for all earlier steps. All later steps wait for both.
    """

    collective: tuple[SingleStep, ...]
    overlapped: tuple[SingleStep, ...]

    @property
    def number(self) -> int:
        """The index of the collective's instruction."""
        return self.collective[0].number


DriverStep = SingleStep | CollectiveOverlap
StartRead = Callable[[], Callable[[], Sequence[Array]]]
"""A function that starts copies to host arrays; the function that it returns waits for the copies and returns them."""


def flatten_steps(steps: Iterable[DriverStep]) -> list[SingleStep]:
    """Return all launches and exchanges of the steps as one list. Each collective precedes its overlapped launches."""
    singles: list[SingleStep] = []
    for step in steps:
        singles += (*step.collective, *step.overlapped) if isinstance(step, CollectiveOverlap) else (step,)
    return singles


def format_step_name(step: SingleStep) -> str:
    """Return the name of a step in reports: the kernel of a launch, or ``exchange``."""
    return step.kernel.name if isinstance(step, KernelLaunch) else "exchange"


def as_host_array(view: Any) -> Array:
    """Return `view` itself if it is a host array, else a copy of it on the host."""
    return view if isinstance(view, np.ndarray) else np.array(view)


def has_shared_multiprocessors(devices: Sequence[Device]) -> bool:
    """Return whether some of `devices` are parts of one physical device that share its multiprocessors.

    Parts of one division, such as ``cuda:0/64.0`` and ``cuda:0/64.1``, have multiprocessors of their own.
    """
    counts: dict[int, list[int | None]] = {}
    for device in devices:
        counts.setdefault(device.index, []).append(device.multiprocessors)
    return any(len(own) > 1 and (None in own or len(set(own)) > 1) for own in counts.values())


class LaunchError(BackendError):
    """The error that the launch of instruction `number` failed."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


class Driver(Protocol):
    """The driver interface for devices of one kind: memory, streams, kernels and recorded launches.

    A device can be divided into device parts. Each device or part has its own stream.
    """

    kind: str
    can_overlap_collectives: bool
    """Whether a `CollectiveOverlap` runs at the same time as the launches that overlap with it."""

    def devices(self) -> Sequence[Device]:
        """Return the present devices. Raises `BackendError` with an install hint if there can be none."""

    def device(self, index: int) -> Device:
        """Return the device with this index. Raises `BackendError` with a hint if it does not exist."""

    def limits(self, on: Device) -> KernelLimits:
        """Return the resource limits of kernels on a device."""

    def count_multiprocessors(self, on: Device) -> int:
        """Count the multiprocessors of a device."""

    def require_multiprocessors(self, on: Device) -> None:
        """Raise `BackendError` unless the device part `on` can have multiprocessors of its own (a green context)."""

    def alloc(self, nbytes: int, on: Device) -> Any:
        """Allocate a zeroed buffer, aligned to at least 16 bytes. Raises `BackendError` if memory is exhausted."""

    def address(self, buffer: Any) -> int:
        """Return the device address of a buffer."""

    def view(self, buffer: Any, tensor: Tensor) -> Any:
        """Return a view of `tensor` in `buffer`, without a copy, for indexing, assignment and copies to the host."""

    def make_writer(self, buffers: Sequence[Any], tensors: Sequence[Tensor]) -> Callable[[Sequence[Array]], None]:
        """Return a function that writes one host array to each of these tensors; see `SupportsBatchedWrites`."""

    def make_reader(self, buffers: Sequence[Any], tensors: Sequence[Tensor]) -> StartRead:
        """Return a function that starts to copy these tensors to new host arrays, after all earlier work of the stream.

        The copies are ordered before all later work of the stream.
        """

    def enable_peer_access(self, devices: Sequence[Device]) -> bool:
        """Enable access of kernels of each device to the memory of all others; return `False` if that is impossible."""

    def find_collective_library(self, devices: Sequence[Device]) -> CollectiveLibrary | str:
        """Return a collective library that can join these devices, or else the reason why there is none."""

    def map_signal_pad(self, board: Array, is_first: bool) -> int:
        """Map the group's signal pad for devices, and return its device address, equal on all devices of the process.

        Args:
            board: The signal pad: page-aligned host memory.
            is_first: Whether no other device has mapped the memory before.
        """

    def prepare_kernel(self, kernel: KernelInstance, on: Device) -> None:
        """Prepare a kernel: compile and load it ahead of time. Raises `BackendError` if it does not compile."""

    def record(self, steps: Sequence[DriverStep], on: Device) -> Callable[[], None]:
        """Record steps and return a function that replays them in order on each call.

        Raises:
            BackendError: A kernel does not compile. The returned function raises `LaunchError`.
        """

    def is_idle(self, on: Device) -> bool:
        """Return whether the stream of a device is idle: all launches have ended or failed."""

    def find_device_loss(self, on: Device) -> str:
        """Return the error that all calls of a device give from now on; see `CanLoseDevices.find_device_loss`."""

    def run_timed(self, runs: Sequence[Callable[[], None]], on: Device) -> list[float]:
        """Run recorded runs one after the other, and return the device seconds of each.

        If the device was idle before a run, the time of the run includes its launch by the host.
        """

    def synchronise(self, on: Device) -> None:
        """Wait until all launches on a device have ended. Raises `BackendError` if one failed."""


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), Source="KernelSource")
