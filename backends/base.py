"""The protocol of backends, and the program that a backend compiles: a flat list of instructions for one device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..graph.attrs import Attrs
from ..graph.dtypes import DType
from ..graph.errors import BackendError, HocketError, StepError
from ..graph.lazy_dataclass import dataclass
from ..graph.node import Node
from ..graph.old_names import make_module_getattr
from ..graph.spec import Spec
from ..graph.validation import (
    NONE,
    TEXT,
    ArgumentKind,
    did_you_mean,
    format_value,
    integer_between,
    list_of,
    validate_arguments,
    validate_constructor,
)
from .device_name import DeviceName
from .thread_safe_cache import thread_safe_cache

Array: TypeAlias = npt.NDArray[Any]
ALIGNMENT = 64
"""Alignment in bytes of every buffer, value and scratch: a cache line, and the widest vector."""
ENTRY_POINT_GROUP = "hocket.backends"
"""Entry-point group in which packages register backends; the name of an entry is the device kind."""
BUILTIN_BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "hocket.backends.cpu.backend:CpuBackend",
        "cuda": "hocket.backends.cupy.cuda_driver:CudaBackend",
        "cuda-emulated": "hocket.backends.cupy.emulation.emulated_driver:EmulatedBackend",
        "hip": "hocket.backends.cupy.hip_driver:HipBackend",
        "hip-emulated": "hocket.backends.cupy.emulation.emulated_driver:EmulatedHipBackend",
        **{"null": "hocket.backends.null.backend:NullBackend", "numpy": "hocket.backends.numpy.backend:NumpyBackend"},
        "reference": "hocket.backends.reference.backend:ReferenceBackend",
    }
)
"""The backends of this package by device kind, in the notation of entry points; no package metadata is needed."""


@validate_constructor(
    BackendError,
    index=integer_between(-1 << 62, 1 << 62),
    **dict.fromkeys(("kind", "description", "memory_of"), TEXT),
    **dict.fromkeys(("memory", "part", "rank", "multiprocessors"), integer_between(-1 << 62, 1 << 62) | NONE),
)
@dataclass(frozen=True, slots=True)
class Device:
    """A device that runs programs, such as ``cpu:0``.

    - ``cuda:0.1`` is a part of a device. All parts share the memory of that device.
    - ``cuda:0/64.1`` is a part with 64 multiprocessors of its own. The parts of one division run at the same time.
    - ``cpu:0@1`` is a device of the process with number `rank`.

    `memory` is in bytes and counts the whole device; None means unknown. Devices with the same `memory_of` share one
    memory, as all virtual devices of this machine do. A device without `memory_of` shares its memory only with its
    parts.
    """

    kind: str
    index: int
    memory: int | None = None
    description: str = ""
    part: int | None = None
    memory_of: str = ""
    rank: int | None = None
    multiprocessors: int | None = None

    def __str__(self) -> str:
        return str(DeviceName(self.kind, self.index, self.part, self.rank, self.multiprocessors))


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a device can run a node, and the reason if not."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Tensor:
    """The location of a value: number of the buffer, offset in bytes, shape, strides in elements, and dtype."""

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
    """A buffer that a program needs; `kind` is ``arena`` (intermediate values), ``weight``, ``state`` or ``constant``.

    `declared_spec` is the spec of the leaf in the graph. `stored_spec` is the spec in which the backend stores the
    leaf. Both are None for the arena.
    """

    kind: str
    name: str
    nbytes: int
    declared_spec: Spec | None = None
    stored_spec: Spec | None = None


@dataclass(frozen=True, slots=True)
class Instruction:
    """One kernel call: its operands, its results, and the arena bytes that it may overwrite as scratch.

    `node` is its name in messages. `index` is the position of its node in the device's graph; -1 marks a copy that the
    planner added.
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
    """All instructions that one device runs in one run; devices with equal work share one program.

    The first buffer is the arena. The others are the leaves of the graph: weights, states and constants.

    `undo` rolls a failed run back. Each entry has the position of an instruction that saves part of a state, and the
    instruction that restores it. A rollback runs the restoring instructions of all finished saves in reverse order.
    """

    buffers: tuple[BufferSpec, ...]
    instructions: tuple[Instruction, ...]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    undo: tuple[tuple[int, Instruction], ...] = ()
    cache_name: str = field(default="", init=False, compare=False, repr=False)
    """A unique name for cached data about this program; empty for a copy that `replace` made."""

    @property
    def save_positions(self) -> frozenset[int]:
        """The positions of the instructions that only save states for `undo`."""
        return frozenset(at for at, _ in self.undo)

    @property
    def undo_bytes(self) -> int:
        """The arena bytes that hold saved states until the end of a run, so that the run can be rolled back."""
        return sum(t.spec.nbytes for at in self.save_positions for t in self.instructions[at].dst)

    def build_undo_program(self, finished: int | frozenset[int]) -> Program:
        """Build the program that restores the saved states after a failed run.

        `finished` is a count if the first instructions have finished, else the set of the finished positions.
        """
        done = range(finished) if isinstance(finished, int) else finished
        return replace(self, instructions=tuple(back for at, back in reversed(self.undo) if at in done), undo=())

    def nbytes(self, kind: str) -> int:
        """Return the total bytes of all buffers of one kind, such as ``weight``."""
        return sum(b.nbytes for b in self.buffers if b.kind == kind)


@dataclass(frozen=True, slots=True)
class SharedCollectiveBuffers:
    """Memory that several processes share, in which compiled collectives sum float32 values.

    `signal_pad` is like `Comm.signal_pad`. `float_buffers` [2, devices, n] has two buffers for each device, used in
    turn.
    """

    signal_pad: npt.NDArray[np.int64]
    float_buffers: npt.NDArray[np.float32]


class Comm(Protocol):
    """The communicator of one device of a group. All members call the same methods in the same order.

    Methods raise `BackendError` if a member is late, has failed, or calls with another `sequence` number.
    """

    rank: int
    size: int
    plan_device_count: int  # devices of the whole plan, numbered in messages; above `size` if there are several groups
    spans_processes: bool
    """Whether the members belong to several processes, so that an address of one member is invalid for another."""
    timeout: float  # seconds
    signal_pad: npt.NDArray[np.int64] | None
    """The signal pad: ``16 + 8 * size`` words that begin as zeros, shared by the members of one process.

    Compiled collectives use the signal pad. It is None if the members share no memory, or if some members are not
    compiled. The word `FAILURE_WORD` is set when a member fails, in any process. Members count their runs in
    `view_run_numbers`.
    """
    shared_buffers: SharedCollectiveBuffers | None
    """Shared buffers of members in several processes of one machine; else None."""
    devices: Sequence[Device]
    """The devices of the members; known if there is a signal pad or if there are shared buffers."""
    transfer_dtype: DType
    """The dtype in which large float32 sums may be sent between devices with separate memories: `F32` or `BF16`.

    Rounding to `BF16` changes a value by up to 2**-8 of the value. With N devices the error of a sum is at most ``(N +
    1) * 2**-8`` of the sum of absolute values. The sum is equal on all devices.
    """

    def all_reduce(self, source: Array, into: Array, scratch: Array, sequence: int) -> None:
        """Write the sum of all sources into `into`, which may be `source`; `scratch` has the shape of `source`."""

    def all_gather(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        """Copy slices of the sources of all devices into `into`. An all-to-all uses this method, too.

        Args:
            source: The array of this device.
            into: The array that receives the slices.
            parts: For each device d the pairs (index into `into`, index into the source of device d). A device leaves
                out the slices that it does not need.
            sequence: Number of the collective, equal on all members.
        """

    def reduce_scatter(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        """Sum slices of the sources of all devices, and write the sums to `into`.

        Args:
            source: The array of this device.
            into: The array that receives the sums.
            parts: Pairs (index into `into`, index into any source).
            sequence: Number of the collective, equal on all members.
        """

    def send(self, source: Array, to: int, sequence: int) -> None:
        """Send the present contents of `source` to device `to`, which receives messages in the order of sending.

        The call waits while too many messages are pending.
        """

    def receive(self, into: Array, source: int, sequence: int) -> None:
        """Wait for the message `sequence` of device `source`, and copy the message into `into`."""


@runtime_checkable
class DividesMultiprocessors(Protocol):
    """A backend that can give parts of a device multiprocessors of their own, as ``cuda:0/64.0``."""

    def require_multiprocessors(self, on: Device) -> None:
        """Raise `BackendError` unless the part `on` can have `Device.multiprocessors` multiprocessors of its own."""


class Backend(Protocol):
    """A backend: it describes devices of one kind, allocates memory on them, and compiles programs for them."""

    name: str

    def with_threads(self, threads: int) -> Backend:
        """Return a backend with `threads` threads per device. A backend without a thread count returns itself."""

    def devices(self) -> Sequence[Device]:
        """Return the devices that exist now. `device` may accept further indices, which are virtual devices."""

    def device(self, index: int) -> Device:
        """Return device number `index`. Raises `BackendError` with a remedy if the device does not exist."""

    def supports(self, node: Node, on: Device) -> Support:
        """Return whether the device can run `node`, and the reason if not."""

    def storage_spec(self, spec: Spec, kind: str = "value") -> Spec:
        """Return the shape and dtype in which the backend stores a value of `spec`.

        Args:
            spec: The spec in the graph.
            kind: ``value``, or the op of a leaf such as ``weight``. An updated state counts as ``state``, too.
        """

    def scratch(self, node: Node) -> int:
        """Return the bytes of scratch memory that `node` needs."""

    def reads_strided(self, node: Node, operand: int) -> bool:
        """Return whether the kernel of `node` can read operand number `operand` with any strides."""

    def alloc(self, nbytes: int, on: Device, lasting: bool = False) -> Any:
        """Allocate a zeroed buffer on a device. Raises `BackendError` if there is not enough memory.

        Args:
            nbytes: Size in bytes.
            on: The device.
            lasting: Whether the buffer lives as long as the weights and states.
        """

    def view(self, buffer: Any, tensor: Tensor) -> Any:
        """Return the array of `tensor` within `buffer`, without a copy; it can be indexed, assigned and copied."""

    def load(self, data: Array, declared: Spec, buffer: Any) -> None:
        """Copy a weight into its buffer, in the stored form. Quantised `data` are rows of block bytes, as in a file."""

    def compile(self, program: Program, buffers: Sequence[Any], on: Device, comm: Comm) -> Callable[[], None]:
        """Compile `program` for a device, and return a function that runs the program once.

        Args:
            program: The instructions.
            buffers: Buffers in the order of ``program.buffers``.
            on: The device.
            comm: Communicator for the collectives of the program.

        Raises:
            StepError: By the returned function, if an instruction fails. All earlier instructions have finished, and no
                later instruction has begun.
        """


def run_calls(program: Program, on: Device, calls: Iterable[tuple[int, Callable[[], object]]]) -> None:
    """Call the functions of a run in order; turn an error into a `StepError` that names the failed instruction."""
    at = 0
    try:
        for number, call in calls:
            at = number
            call()
    except BaseException as why:  # an interrupt, too, leaves an instruction half done
        if not program.instructions:
            raise
        message = str(why) if isinstance(why, HocketError) else " ".join(f"{type(why).__name__}: {why}".split())
        raise StepError(program.instructions[at].node, str(on), at, message) from why


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense row-major array of `shape`."""
    return _compute_dense_strides(tuple(shape))


@lru_cache(maxsize=1 << 14)  # a plan asks again for every layer and device
def _compute_dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def view_host_tensor(buffer: npt.NDArray[np.uint8], tensor: Tensor) -> Array:
    """Return a view of `tensor` as a NumPy array in a host buffer. A quantised dtype gives rows of block bytes."""
    shape, strides = compute_storage_layout(tensor)
    return np.ndarray(shape, tensor.dtype.storage, buffer=buffer.data, offset=tensor.offset, strides=strides)


def compute_storage_layout(tensor: Tensor) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape and the strides, in bytes, of an array of `tensor`; quantised rows are rows of block bytes."""
    dtype, shape, strides = tensor.dtype, tensor.shape, [tensor.dtype.count_bytes(s) for s in tensor.strides]
    if dtype.is_quantised:
        shape, strides = (*shape[:-1], dtype.count_bytes(shape[-1])), [*strides[:-1], 1]
    return shape, strides


@thread_safe_cache
def find_backends_by_device_kind() -> Mapping[str, str]:
    """Return all registered backends by device kind, of this package and of other packages; read once per process.

    Reading the metadata of all packages takes 15 to 50 ms. Raises `BackendError` if two packages register one kind.
    """
    from importlib.metadata import entry_points  # 15 ms that our own backends need not pay

    entries = dict(BUILTIN_BACKENDS)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        other = entries.setdefault(entry.name, entry.value)
        if other != entry.value:
            raise BackendError(f"backend {entry.name!r} is registered as {other} and as {entry.value}; remove one")
    return entries


@validate_arguments(BackendError, kind=TEXT)
def load_backend(kind: str) -> Backend:
    """Load the backend of a device kind. Raises `BackendError` with the known kinds or the import error."""
    known = BUILTIN_BACKENDS if kind in BUILTIN_BACKENDS else find_backends_by_device_kind()
    if kind not in known:
        hint = did_you_mean(kind, known, min_ratio=0.7) or f"; known kinds: {', '.join(sorted(known))}"
        raise BackendError(f"there is no backend for device kind {format_value(kind)}{hint}")
    module, _, name = known[kind].partition(":")
    try:
        return cast(Backend, getattr(import_module(module), name)())
    except (ImportError, AttributeError) as why:
        raise BackendError(f"backend {kind!r} does not load: {why}") from None


@validate_arguments(BackendError, name=TEXT)
def find_device(name: str) -> tuple[Backend, Device]:
    """Return the backend and the device for a name such as ``cpu:0``, ``cpu``, ``cuda:0.1`` or ``cpu:0@1``.

    A name without an index means the first device. A device of another process has the properties of the same device in
    this process. Raises `BackendError` for an invalid name, a missing device or an impossible division.
    """
    called = DeviceName.parse(name)
    backend = load_backend(called.kind)
    device = replace(
        backend.device(called.index), part=called.part, rank=called.rank, multiprocessors=called.multiprocessors
    )
    if device.multiprocessors is not None:
        if not isinstance(backend, DividesMultiprocessors):
            raise BackendError(
                f"device {device}: {called.kind} devices are not divided by multiprocessors; name the part as "
                f"{called.kind}:{called.index}.{called.part}"
            )
        backend.require_multiprocessors(device)
    return backend, device


THREADS_KIND = integer_between(1, 1 << 16) | NONE
BACKEND_KIND = ArgumentKind("a backend", lambda v: hasattr(v, "compile"))


@validate_arguments(BackendError, names=list_of(TEXT, "a sequence of texts"), threads=THREADS_KIND)
def find_devices(names: Sequence[str], threads: int | None = None) -> list[tuple[Backend, Device]]:
    """Return the backend and device for each name; the devices share the processors. Raises `BackendError`."""
    count = compute_threads_per_device(len(names), threads)
    return [(backend.with_threads(count), device) for backend, device in map(find_device, names)]


def compute_threads_per_device(devices: int, asked: int | None = None) -> int:
    """Return the thread count of each of `devices` devices: `asked`, or an equal share of the processors."""
    return asked or max(1, (os.cpu_count() or 1) // max(1, devices))


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(
        globals(),
        find="find_device",
        group_of="find_devices",
        load="load_backend",
        registered="find_backends_by_device_kind",
    )
