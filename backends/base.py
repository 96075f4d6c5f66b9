"""What a backend is, and the program it is given: plain data, one flat list of instructions for one device."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ..graph.attrs import Attrs
from ..graph.dtypes import DType
from ..graph.errors import BackendError, HocketError, StepError
from ..graph.lazy_dataclass import dataclass
from ..graph.node import Node
from ..graph.spec import Spec
from ..graph.validation import NONE, TEXT, did_you_mean, format_value, integer_between, list_of, validate_arguments
from .once import once

Array: TypeAlias = npt.NDArray[Any]
ALIGNMENT = 64
"""Bytes: every buffer, value and scratch begins at a multiple of a cache line, which is the widest vector, too."""
GROUP = "hocket.backends"
"""The entry-point group in which packages register backends; an entry's name is the device kind."""
OWN: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "hocket.backends.cpu.backend:CpuBackend",
        "cuda": "hocket.backends.cupy.cuda:CudaBackend",
        "cuda-emulated": "hocket.backends.cupy.emulation.emulated_driver:EmulatedBackend",
        "hip": "hocket.backends.cupy.hip:HipBackend",
        "hip-emulated": "hocket.backends.cupy.emulation.emulated_driver:EmulatedHipBackend",
        "null": "hocket.backends.null.backend:NullBackend",
        "numpy": "hocket.backends.numpy.backend:NumpyBackend",
        "reference": "hocket.backends.reference.backend:ReferenceBackend",
    }
)
"""Our own backends by device kind, as entry points name theirs: those of packages need not be looked at for them."""


KIND = re.compile(r"\w[\w.-]*", re.ASCII)
"""The kind of a device, which is the name of an entry point."""


@dataclass(frozen=True, slots=True)
class DeviceName:
    """The name of a device: ``cpu:0``, a part of it as ``cuda:0.1``, one of process 1 as ``cpu:0@1``."""

    kind: str
    index: int
    part: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        part, rank = "" if self.part is None else f".{self.part}", "" if self.rank is None else f"@{self.rank}"
        return f"{self.kind}:{self.index}{part}{rank}"

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """Read a name; the index is 0 if the name has none.  Raises `BackendError`."""
        if not text:
            raise BackendError("the name of a device is empty; need a kind and a number, as in cpu:0")
        here, at, rank = text.partition("@")
        kind, _, numbers = here.partition(":")
        index, dot, part = numbers.partition(".")
        if not KIND.fullmatch(kind):
            raise BackendError(
                f"device {format_value(text)}: a kind is letters, digits, '_', '-' and '.', "
                "and a number follows, as in cpu:0"
            )
        if at and not _is_number(rank):
            raise BackendError(
                f"device {format_value(text)}: after the @ comes the number of a process, as in {kind}:0@1"
            )
        if (numbers and not _is_number(index)) or (dot and not _is_number(part)):
            raise BackendError(
                f"device {format_value(text)}: after the colon comes a number, as in {kind}:0, or {kind}:0.1 for a part"
            )
        return cls(kind, int(index or 0), int(part) if dot else None, int(rank) if at else None)


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) < 10


@dataclass(frozen=True, slots=True)
class Device:
    """One thing that runs programs: ``cpu:0``; or a part of one, ``cuda:0.1``, which shares its memory with the others;
    or ``cpu:0@1``, one of the process that is number `rank` of several.

    `memory` is in bytes and of the whole, None where unknown.  Devices with the same `memory_of` share one memory, as
    all virtual ones of this machine do; one that names none shares its memory with its own parts only.
    """

    kind: str
    index: int
    memory: int | None = None
    description: str = ""
    part: int | None = None
    memory_of: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        return str(DeviceName(self.kind, self.index, self.part, self.rank))


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a device can run a node, and why (not)."""

    ok: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a value lies: a buffer of the program, the byte where it starts, its strides in elements."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType

    @property
    def spec(self) -> Spec:
        return Spec(self.shape, self.dtype)

    def __str__(self) -> str:
        dense = "" if self.strides == contiguous_strides(self.shape) else f" strides {list(self.strides)}"
        return f"{self.spec} at {self.buffer}+{self.offset}{dense}"


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Memory a program needs: ``arena`` (intermediate values), ``weight``, ``state`` or ``constant``.

    `declared` is the spec in the graph, `stored` the one the backend keeps it in; both None for the arena.
    """

    kind: str
    name: str
    nbytes: int
    declared: Spec | None = None
    stored: Spec | None = None


@dataclass(frozen=True, slots=True)
class Instruction:
    """One kernel call: what it reads, what it writes, the arena bytes it may scribble on meanwhile.

    `node` is the name that messages give the step; `index` is where the node stands that the step computes, among the
    nodes of the device's graph: -1 where none does, for the copies that the planner adds.
    """

    op: str
    src: tuple[Tensor | None, ...]
    dst: tuple[Tensor, ...]
    attrs: Attrs
    scratch: Tensor | None
    node: str
    index: int = -1


@dataclass(frozen=True, slots=True)
class Program:
    """Everything one device does in one run; devices that do the same have one program.

    The first buffer is the arena, the others are leaves of the graph, each once.
    `undo` takes a run back that failed.  Each entry is the position of an instruction that saves what later ones
    overwrite in a state, and the instruction that puts it back; those whose save has finished are run in reverse.
    """

    buffers: tuple[BufferSpec, ...]
    instructions: tuple[Instruction, ...]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    undo: tuple[tuple[int, Instruction], ...] = ()
    kept: str = field(default="", init=False, compare=False, repr=False)
    """A name of its own, under which more may be kept of it; what `replace` makes of it has none."""

    @property
    def saves(self) -> frozenset[int]:
        """Positions of the instructions that compute nothing of the graph, but save what `undo` puts back."""
        return frozenset(at for at, _ in self.undo)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the arena that are kept until the end for `undo`."""
        return sum(t.spec.nbytes for at in self.saves for t in self.instructions[at].dst)

    def undoing(self, finished: int | frozenset[int]) -> Program:
        """What takes a run back of which so many instructions had finished, or those at these positions."""
        done = range(finished) if isinstance(finished, int) else finished
        return replace(self, instructions=tuple(back for at, back in reversed(self.undo) if at in done), undo=())

    def nbytes(self, kind: str) -> int:
        """Bytes of all buffers of one kind."""
        return sum(b.nbytes for b in self.buffers if b.kind == kind)


@dataclass(frozen=True, slots=True)
class Slabs:
    """Memory of several processes in which compiled code sums float32: a `board` of words, like `Comm.board`, and in
    `floats`, ``[2, devices, n]``, two slabs for each device, used in turn."""

    board: npt.NDArray[np.int64]
    floats: npt.NDArray[np.float32]


class Comm(Protocol):
    """One device's end of a group.  All members call the same operations in the same order.

    Raises `BackendError` when a member does not come in time, has failed, or brings another `sequence` number.
    """

    rank: int
    size: int
    everybody: int  # devices that letters are numbered among: more than `size` where there are several such groups
    is_apart: bool
    """Whether members are in several processes, where no address of another means anything."""
    timeout: float  # seconds
    board: npt.NDArray[np.int64] | None
    """Memory that the members of a process share for collectives of compiled code, ``16 + 8 * size`` words that begin
    as zeros; None where they share none, or where not all of them are compiled.  Word `BOARD_FAILED` is set when a
    member fails, wherever it is; a member that counts its runs does so in `runs_of`."""
    slabs: Slabs | None
    """What members in several processes of one machine share instead; None where they share none."""
    devices: Sequence[Device]
    """The members' devices; they are known where there is a board, or are slabs."""
    wire: DType
    """What large sums of float32 may be sent in between devices with memories of their own: `F32`, or `BF16`, each of
    whose roundings takes up to 2**-8 of a value.  With N devices a sum is then off by at most ``(N + 1) * 2**-8`` of
    the sum of absolute values, and is the same on all of them."""

    def all_reduce(self, source: Array, into: Array, scratch: Array, sequence: int) -> None:
        """Write the sum of all sources into `into` (which may be `source`); `scratch` has the shape of `source`."""

    def all_gather(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        """Copy from every device's source into `into`; ``parts[d]`` are pairs (index into `into`, index into the
        source of device d).  What a device does not need it leaves out: this is the all-to-all, too."""

    def reduce_scatter(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        """Write the sums of parts of all sources into `into`: pairs (index into `into`, index into any source)."""

    def send(self, source: Array, to: int, sequence: int) -> None:
        """Send what `source` holds now to device `to`, which takes what this one sends in the same order; wait while it
        has taken none of several letters."""

    def receive(self, into: Array, source: int, sequence: int) -> None:
        """Copy what device `source` sends under `sequence`, once it has."""


class Backend(Protocol):
    """Code that runs programs on devices of one kind."""

    name: str

    def with_threads(self, threads: int) -> Backend:
        """The backend with so many threads for each device; itself, if that is not for it to choose."""

    def devices(self) -> Sequence[Device]:
        """The devices that are there now (a kind that allows virtual ones accepts further numbers)."""

    def device(self, index: int) -> Device:
        """Device number `index`.  Raises `BackendError` if it does not exist, saying what to install or choose."""

    def supports(self, node: Node, on: Device) -> Support:
        """Whether `node` can run there."""

    def stored(self, spec: Spec, kind: str = "value") -> Spec:
        """The shape and dtype in which a value of `spec` is kept in memory; `kind` is the op of a leaf, ``state`` also
        for one of which entries were replaced, or ``value``."""

    def scratch(self, node: Node) -> int:
        """Bytes of temporary memory that `node` needs while it runs."""

    def reads_strided(self, node: Node, operand: int) -> bool:
        """Whether the kernel of `node` can read that operand with any strides."""

    def alloc(self, nbytes: int, on: Device, lasting: bool = False) -> Any:
        """A zeroed buffer; a `lasting` one is kept as long as those beside it, as weights and states are.  Raises
        `BackendError` when memory is out."""

    def view(self, buffer: Any, tensor: Tensor) -> Any:
        """The array of `tensor` within `buffer`, in place: it can be indexed, assigned and copied to the host."""

    def load(self, data: Array, declared: Spec, buffer: Any) -> None:
        """Put a weight into its buffer; `data` holds it as a file does (blocks of bytes for quantised types)."""

    def compile(self, program: Program, buffers: Sequence[Any], on: Device, comm: Comm) -> Callable[[], None]:
        """A function that runs `program` once on those buffers, given in the order of ``program.buffers``; its
        collectives meet the other devices through `comm`.

        Where an instruction fails it raises `StepError`: all before it have finished, none behind it has begun.
        """


def run_calls(program: Program, on: Device, calls: Iterable[tuple[int, Callable[[], object]]]) -> None:
    """Make the calls of a program on device `on` in order, each given with the number of its instruction.  One that
    fails is a `StepError`."""
    at = 0
    try:
        for number, call in calls:
            at = number
            call()
    except BaseException as why:  # an interrupt, too, leaves a step half done
        said = str(why) if isinstance(why, HocketError) else " ".join(f"{type(why).__name__}: {why}".split())
        raise StepError(program.instructions[at].node, str(on), at, said) from why


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a dense row-major array."""
    return _dense_strides(tuple(shape))


@lru_cache(maxsize=1 << 14)  # a plan asks again for every layer and device
def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def host_view(buffer: npt.NDArray[np.uint8], tensor: Tensor) -> Array:
    """`tensor` as a NumPy array within host memory; of a quantised dtype the bytes of its blocks, in rows."""
    dtype, shape, strides = tensor.dtype, tensor.shape, [tensor.dtype.bytes_of(s) for s in tensor.strides]
    if dtype.is_quantised:
        shape, strides = (*shape[:-1], dtype.bytes_of(shape[-1])), [*strides[:-1], 1]
    return np.ndarray(shape, dtype.storage, buffer=buffer.data, offset=tensor.offset, strides=strides)


@once
def registered() -> Mapping[str, str]:
    """Backends by device kind, ours and those of packages, as this process finds them first: reading the metadata of
    all packages takes 15 to 50 ms.  Raises `BackendError` if two packages claim one kind."""
    from importlib.metadata import entry_points  # 15 ms that our own backends need not pay

    entries = dict(OWN)
    for entry in entry_points(group=GROUP):
        other = entries.setdefault(entry.name, entry.value)
        if other != entry.value:
            raise BackendError(f"backend {entry.name!r} is registered as {other} and as {entry.value}; remove one")
    return entries


@validate_arguments(BackendError, kind=TEXT)
def load(kind: str) -> Backend:
    """The backend for a device kind.  Raises `BackendError` with the known kinds, or why it does not load."""
    known = OWN if kind in OWN else registered()
    if kind not in known:
        hint = did_you_mean(kind, known, min_ratio=0.7) or f"; known kinds: {', '.join(sorted(known))}"
        raise BackendError(f"there is no backend for device kind {format_value(kind)}{hint}")
    module, _, name = known[kind].partition(":")
    try:
        return cast(Backend, getattr(import_module(module), name)())
    except (ImportError, AttributeError) as why:
        raise BackendError(f"backend {kind!r} does not load: {why}") from None


@validate_arguments(BackendError, name=TEXT)
def find(name: str) -> tuple[Backend, Device]:
    """Backend and device of a name like ``cpu:0`` (or ``cpu``, its first), of a part, as ``cuda:0.1``, or of one of
    several processes, as ``cpu:0@1``: what is known of that device is then what is known of one like it here.

    Raises `BackendError`.
    """
    called = DeviceName.parse(name)
    backend = load(called.kind)
    return backend, replace(backend.device(called.index), part=called.part, rank=called.rank)


THREADS = integer_between(1, 1 << 16) | NONE


@validate_arguments(BackendError, names=list_of(TEXT, "a sequence of texts"), threads=THREADS)
def group_of(names: Sequence[str], threads: int | None = None) -> list[tuple[Backend, Device]]:
    """Backends and devices by name, each with so many threads; without a number they share the processors.

    Raises `BackendError`.
    """
    count = threads_for(len(names), threads)
    return [(backend.with_threads(count), device) for backend, device in map(find, names)]


def threads_for(devices: int, asked: int | None = None) -> int:
    """The threads of each of so many devices of this machine: those asked for, or their share of the processors."""
    return asked or max(1, (os.cpu_count() or 1) // max(1, devices))
