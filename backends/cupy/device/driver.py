"""What a CUDA device does for the backend, whether it is one or is emulated; and launches, which are plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from ....graph.dtypes import DType
from ....graph.errors import BackendError
from ...base import Array, Device, Tensor
from .limits import Limits

KERNELS = Path(__file__).parent.parent / "kernels"
Three = tuple[int, int, int]
ALONE: Three = (1, 1, 1)
"""A cluster of one block."""
CUDA, HIP = "cuda.cuh", "hip.cuh"
"""Files with the instructions of the devices that kernels are compiled for."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file of kernels, and those instantiations of it that bindings ask for: they are compiled together, once.

    `file` is a name in the folder ``kernels``, whose rooms it does not say, or a path; `names` are C++ expressions such
    as ``unary<Neg>``; `before` are files that others share with it.  `instructions` is the file of those of the devices
    it is compiled for, `architectures` which they are, if not all.
    """

    file: str
    names: tuple[str, ...]
    before: tuple[str, ...] = ()
    instructions: str = CUDA
    architectures: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Kernel:
        assert name in self.names, f"{name} is not declared in the source of {self.file}"
        return Kernel(self, name)

    @property
    def text(self) -> str:
        """C++ that needs no header."""
        return "".join(f'#line 1 "{name}"\n{text_of(name)}' for name in self.files)

    @property
    def files(self) -> tuple[str, ...]:
        """What the text is made of, in order."""
        return ("types.cuh", self.instructions, "prelude.cuh", *self.before, self.file)


@cache
def places() -> Mapping[str, Path]:
    """Where each of our files of kernels lies, by its name, which no other has."""
    return MappingProxyType({path.name: path for path in sorted(KERNELS.rglob("*.cu*"))})


def place_of(file: str) -> Path:
    """Where one of our files of kernels lies; what has another name is a path."""
    return places().get(file) or Path(file)


@cache
def text_of(file: str) -> str:
    """The text of a file of kernels."""
    return place_of(file).read_text("utf-8")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One instantiation of a source."""

    source: Source
    name: str

    @property
    def alone(self) -> Source:
        """Its source without the others, which compiles faster."""
        return replace(self.source, names=(self.name,))

    def __str__(self) -> str:
        return f"{self.source.file}: {self.name}"


@dataclass(frozen=True, slots=True)
class Span:
    """A word of a launch that is an address, and the bytes that the kernel may touch through it."""

    word: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: its words are the fields of the kernel's struct, 64 bits each; `number` is that of the instruction it
    belongs to.  So many blocks as `cluster` says run at the same time on neighbours, and reach each other's shared
    memory."""

    kernel: Kernel
    grid: Three
    block: Three
    shared_bytes: int
    words: tuple[int, ...]
    spans: tuple[Span, ...]
    number: int
    cluster: Three = ALONE


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a device gives to and takes of a library of collectives: ``all_reduce`` sums `source` of all devices into
    everybody's `target`, ``send`` gives `source` to device `other`, whose ``receive`` takes it into `target`.

    `source` and `target` are addresses, `count` is in elements of `dtype`.
    """

    op: str
    source: int
    target: int
    count: int
    dtype: DType
    other: int = -1


class Ring(Protocol):
    """One device's end of the communicator of a library of collectives.  Calls raise `BackendError`."""

    def transfer(self, transfers: Sequence[Transfer], stream: int) -> None:
        """Put transfers into a stream of the device, as one group: none waits for another."""

    def trouble(self) -> str | None:
        """What went wrong since, if anything."""

    def abort(self) -> None:
        """End all that waits for other devices, now and later, without a result; the communicator is lost.  It may
        return late: once nothing is recorded any more that uses it."""


class Library(Protocol):
    """A library of collectives, such as NCCL."""

    name: str

    def identity(self) -> Array:
        """What one device of a group tells all others, so that they find each other: some words of 64 bits."""

    def join(self, identity: Array, rank: int, size: int, on: Device) -> Ring:
        """Become member `rank` of a group; it waits until all have called.  Raises `BackendError`."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Transfers between launches."""

    ring: Ring
    transfers: tuple[Transfer, ...]
    number: int


Single = Launch | Exchange


@dataclass(frozen=True, slots=True)
class Beside:
    """A collective, and what a device launches `meanwhile`: neither waits for the other, both wait for all steps before
    them, and all steps behind wait for both."""

    meeting: tuple[Single, ...]
    meanwhile: tuple[Single, ...]

    @property
    def number(self) -> int:
        return self.meeting[0].number


Step = Single | Beside


def one_by_one(steps: Iterable[Step]) -> list[Single]:
    """The same steps with nothing beside anything."""
    singles: list[Single] = []
    for step in steps:
        singles += (*step.meeting, *step.meanwhile) if isinstance(step, Beside) else (step,)
    return singles


def has_parts(devices: Sequence[Device]) -> bool:
    """Whether some of them are parts of one device."""
    return len({device.index for device in devices}) < len(devices)


class LaunchError(BackendError):
    """A launch failed; `number` is that of its instruction."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


class Driver(Protocol):
    """Devices of one kind, and parts of them: each of these has a stream of its own."""

    kind: str
    overlaps: bool
    """Whether steps that are `Beside` each other may run at the same time."""

    def devices(self) -> Sequence[Device]:
        """The devices that are there.  Raises `BackendError` if there can be none, saying what to install."""

    def device(self, index: int) -> Device:
        """Device number `index`.  Raises `BackendError` if it does not exist, saying what to install or choose."""

    def limits(self, on: Device) -> Limits:
        """What kernels may ask of a device."""

    def processors(self, on: Device) -> int:
        """How many multiprocessors a device has."""

    def alloc(self, nbytes: int, on: Device) -> Any:
        """A zeroed buffer, aligned to 16 bytes at least.  Raises `BackendError` when memory is out."""

    def address(self, buffer: Any) -> int:
        """Where a buffer begins on its device."""

    def view(self, buffer: Any, tensor: Tensor) -> Any:
        """The array of `tensor` within `buffer`, in place: it can be indexed, assigned and copied to the host."""

    def writer(self, buffers: Sequence[Any], tensors: Sequence[Tensor]) -> Callable[[Sequence[Array]], None]:
        """What assigns an array of the host to each of these tensors of a program with those buffers; see `Carries`."""

    def reader(self, buffers: Sequence[Any], tensors: Sequence[Tensor]) -> Callable[[], Sequence[Array]]:
        """What gives these tensors, once everything before has run, as host arrays of their own."""

    def are_peers(self, devices: Sequence[Device]) -> bool:
        """Whether kernels of each of these devices can read and write memory of all of them, from now on."""

    def library(self, devices: Sequence[Device]) -> Library | str:
        """The library of collectives that can join these devices, or why there is none."""

    def share(self, board: Array, is_first: bool) -> int:
        """Where kernels of all devices of this process find memory of the host, which begins a page; `is_first`: no
        other device has asked before."""

    def prepare(self, kernel: Kernel, on: Device) -> None:
        """Compile a kernel ahead of time.  Raises `BackendError` if it does not."""

    def record(self, steps: Sequence[Step], on: Device) -> Callable[[], None]:
        """What makes these steps, in order, each time it is called.

        Raises `BackendError` if a kernel does not compile; the call raises `LaunchError`.
        """

    def is_done(self, on: Device) -> bool:
        """Whether everything that was launched is done, or has failed."""

    def timed(self, runs: Sequence[Callable[[], None]], on: Device) -> list[float]:
        """Make `runs`, which `record` gave, one after the other; the seconds that each takes on the device.  One that
        the device ends before the host has made the next takes as long as that."""

    def synchronise(self, on: Device) -> None:
        """Wait until everything that was launched is done.  Raises `BackendError` if something failed."""
