"""What a backend, or what it compiles, may be able to do besides: `isinstance` asks whether it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ..graph.lazy_dataclass import dataclass
from ..graph.node import Node
from ..graph.spec import Spec
from .base import Array, Backend, Device, Program, Tensor


@runtime_checkable
class Tolerant(Protocol):
    """A backend with kernels of coarser arithmetic than float32."""

    def tolerance(self, node: Node) -> float | None:
        """The relative error of one operation of `node`, as 2**-8 where 8 bits are kept; None for float32's."""


@runtime_checkable
class Rounds(Protocol):
    """A backend that rounds activations for the sake of weights of fewer bits, unless it is told not to."""

    def exactly(self) -> Backend:
        """The same devices, on which every product is one of float32."""


@runtime_checkable
class Graded(Protocol):
    """A backend that can say without being asked for each node which of its devices are able to run the same."""

    def grade(self, on: Device) -> Hashable:
        """Equal for devices that are able to run the same nodes."""


def grade_of(backend: Backend, on: Device) -> Hashable:
    """Equal for devices that are able to run the same nodes: each its own, where the backend does not say."""
    return id(backend), backend.grade(on) if isinstance(backend, Graded) else str(on)


@runtime_checkable
class Meets(Protocol):
    """A backend whose devices can meet in several ways."""

    def meeting(self, devices: Sequence[Device]) -> str:
        """How these devices meet, and why so: what follows "they meet"."""


@runtime_checkable
class Settled(Protocol):
    """A backend whose answers to a planner follow from its source, its settings and the device: plans can be kept."""

    def settings(self) -> str:
        """What was chosen when it was made, as the number of threads."""


@runtime_checkable
class Packs(Protocol):
    """A backend that packs quantised weights, in memory of this machine, which may be mapped from a file."""

    def packing(self) -> str:
        """What names how it packs: where it is the same, so are the bytes of a weight."""


@runtime_checkable
class Divides(Protocol):
    """A backend that can load a large weight a piece at a time, so that little of what it reads is in memory beside
    what it keeps."""

    def pieces(self, data: Array, declared: Spec, buffer: Any) -> Iterable[tuple[Array, Spec, Any]]:
        """What to `load` in turn, each its part of the buffer, in place of the whole: the same bytes are there then."""


@runtime_checkable
class Shares(Protocol):
    """A backend that can read a weight in the memory of the caller."""

    def buffer_over(self, data: Array, declared: Spec) -> Any | None:
        """The memory of `data` as a buffer; None where the backend keeps a weight of `declared` in another form."""


@runtime_checkable
class Threaded(Protocol):
    """A backend that runs kernels on threads of this machine."""

    threads: int
    """Threads of each device."""


@runtime_checkable
class Carries(Protocol):
    """A backend with memory that the host reaches by copies, of which one with much takes less than many."""

    def writer(self, buffers: Sequence[Any], tensors: Sequence[Tensor]) -> Callable[[Sequence[Array]], None]:
        """What assigns an array to each of these tensors of a program with those buffers, before what is run later; the
        caller's arrays are free at once.  It may write between them, where no multiple of `ALIGNMENT` is."""


@runtime_checkable
class Gives(Protocol):
    """A compiled program that can bring results with its end."""

    def giving(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Array]]:
        """What runs it, and gives what these tensors of it then hold, as host arrays of their own."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A kernel in a run: which instructions of the program it computed, by position, and when it began and ended, in
    seconds of `time.monotonic`.  Waiting for others counts to the kernel that had to wait."""

    kernel: str
    numbers: tuple[int, ...]
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@runtime_checkable
class Measures(Protocol):
    """A compiled program that can tell what a run does."""

    def kernels(self) -> list[str]:
        """The names of the kernels that a run calls, in order; another name where something else stands in for one."""

    def measured(self) -> Iterable[Timed]:
        """Run once, failing as a plain run does: when each of these kernels ran, which may be read after the next run
        has begun."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a kernel is written: a file of a package and a line, as ``hocket/cli.py:12``; and `text`, which is
    empty where it is long."""

    place: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Called:
    """A kernel that a program calls, and the instructions that it computes, by position."""

    kernel: str
    source: Source
    numbers: tuple[int, ...]


STAND_IN = "NumPy"
"""The name of the kernel of an instruction for which a backend has no compiled kernel, so that NumPy computes it."""


@runtime_checkable
class Foretells(Protocol):
    """A backend that can say what a program will call before there is memory for it."""

    def foretold(self, program: Program, on: Device) -> Sequence[Called]:
        """The kernels in the order in which they run.  What is known only when devices meet is left out."""


@runtime_checkable
class Gathers(Protocol):
    """A backend that runs instructions together where their memory allows it, and so has a say in how that is dealt."""

    def gathered(self, program: Program, on: Device) -> Sequence[Sequence[int]]:
        """The instructions by position, in the order in which they would run; those that run together are one entry."""


@runtime_checkable
class Overlaps(Protocol):
    """A backend whose devices may compute while they meet."""

    def overlaps(self, devices: Sequence[Device]) -> bool:
        """Whether devices that meet each other go on with what need not wait for a collective (`beside`)."""


def overlaps(group: Sequence[tuple[Backend, Device]]) -> bool:
    """Whether the devices of a group compute while they meet; where they are of several backends, they meet through
    memory of the host, where everybody waits at once."""
    first = group[0][0]
    is_one = all(type(backend) is type(first) for backend, _ in group)
    return is_one and isinstance(first, Overlaps) and first.overlaps([device for _, device in group])


@dataclass(frozen=True, slots=True)
class Reached:
    """What kernels should reach, by dtype of the weights or by op: bytes/s with few tokens, FLOP/s with many, for ops
    whose time that sets; and what sets the time of each, as ``memory``, where that is known."""

    bandwidth: Mapping[str, float]
    flops: Mapping[str, float]
    vector_limits: Mapping[str, str]
    prompt_limits: Mapping[str, str]


OTHERS = "others"
"""Stands for ops that read no weights and are not named."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What is known of a kind of device beside its data sheet: of products with weights by dtype of these, and of other
    ops by name."""

    products: Reached
    ops: Reached


@runtime_checkable
class Simulates(Protocol):
    """A backend that plans can be made for where its devices are missing."""

    def absent(self, model: str) -> Backend:
        """What plans ask of a backend, for devices of that model, of which there need be none; nothing runs on them."""

    def predicted(self, kind: str) -> Predicted | None:
        """What is known of devices of a kind beside their data sheet."""
