"""Builder of step tables, which compiled code replays: kernel calls, the work of each thread, and barriers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field, replace
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ....graph.lazy_dataclass import dataclass
from ....graph.old_names import make_module_getattr
from ...base import Comm, Tensor
from ...fusion.dataflow import Dataflow
from ...fusion.hooks import ResultPanels
from ...fusion.operands import BoundInstruction, MemoryRegion, Operand
from ..compilation.compiler import ALIGNMENT, Kernel
from . import work_queue
from .panel_hooks import KernelWord, PrologueWord, StepHook
from .partition import compute_even_bounds

RUN_STATUS_REGION = MemoryRegion(0, -1, 0)
"""Region that stands for "the run continues".

A step that may stop the run writes the region, and a step that writes a state reads it. So no thread writes a state
after another thread has stopped the run at an earlier instruction; a rollback would not restore that state. Steps with
work queues read the region, too: all threads of a step either take work items or leave the queue untouched.
"""


MIN_SHARED_BYTES = 32 * 1024
"""Minimum bytes that a step moves if several threads share the step."""
MAX_DUPLICATED_BYTES = 16 * 1024
"""Maximum bytes of a step that every thread repeats for itself, because a barrier would take longer."""


@dataclass(frozen=True, slots=True)
class ThreadWork:
    """The work of one thread in a step: kernel arguments, and the operands read and written, except private memory."""

    words: Sequence[int]
    reads: Sequence[Operand]
    writes: Sequence[Operand]


StepWords = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TableStep:
    """One step of a table: a kernel call with the argument words of each thread, None for a thread without work.

    - `is_presplit`: the words of a thread state the part of the thread. Otherwise the kernel splits the work.
    - `has_barrier`: threads wait for each other before the step.
    - `instruction_number`: the instruction of the program to which the step belongs.
    - `kernel_words`: for each thread the positions of words that are addresses of kernels, with these kernels. The
      words are 0 until the table is built.
    - `prologue_word`: the position of the `PrologueWord`; None if the kernel cannot call a prologue, or already does.
    - `may_stop`: whether the step may stop the run.
    """

    kernel: Kernel
    words: Sequence[StepWords | None]
    is_presplit: bool
    has_barrier: bool
    instruction_number: int
    kernel_words: tuple[tuple[tuple[int, Kernel], ...], ...]
    prologue_word: int | None = None
    may_stop: bool = False

    @property
    def kernels(self) -> list[Kernel]:
        """The kernel of the step, and the different kernels that it calls."""
        return [*dict.fromkeys([self.kernel, *(kernel for called in self.kernel_words for _, kernel in called)])]

    def set_kernel_words(self, get_word: Callable[[Kernel], int]) -> None:
        """Write the addresses (`get_word`) of called kernels to the argument words that were left 0 for them."""
        for words, called in zip(self.words, self.kernel_words, strict=True):
            for at, kernel in called:
                if words is not None:
                    words[at] = get_word(kernel)


class TableMemory:
    """Memory that step tables own, such as scratch and constants."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.uint8]] = []

    def allocate_zeroed(self, nbytes: int) -> int:
        """Allocate zeroed memory that is aligned to a cache line, and return its address."""
        raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
        self._arrays.append(raw)
        return int(raw.ctypes.data + -raw.ctypes.data % ALIGNMENT)

    def fill(self, address: int, data: bytes) -> None:
        """Write `data` to allocated memory at `address`."""
        ctypes.memmove(address, data, len(data))


ALL_THREADS = -1
"""A thread number that stands for all threads."""
ThreadRegions = list[tuple[MemoryRegion, int]]


@dataclass(slots=True)
class StepTableBuilder:
    """Builder of step tables: it appends steps, puts barriers between steps, and allocates memory for the tables.

    The builder puts a barrier before a step in which a thread accesses bytes that another thread may still write, or
    writes bytes that another thread may still read. Each method for steps splits the work so that barriers are rare:

    - `add`: all threads share a step that moves many bytes; the kernel splits the step. The first thread does a small
      step alone.
    - `add_units`: as `add`, but it is known which columns each thread accesses.
    - `add_queued`: threads take work items from a queue, for a step that takes long.
    - `add_per_thread`: each thread has its own part. After a matmul that was split by columns, each thread continues
      with the columns that it wrote (`find_column_bounds_written_since_barrier`). Each thread computes for itself the
      values that all threads need next (`take_private_memory`).
    """

    threads: int
    comm: Comm | None = None
    instruction_number: int = 0
    hooks: Sequence[StepHook] = ()
    """The hooks of the next step, for kernels that call hooks."""
    steps: list[TableStep] = field(default_factory=list)
    table_memory: TableMemory = field(default_factory=TableMemory)
    _written_regions: ThreadRegions = field(default_factory=list)
    _read_regions: ThreadRegions = field(default_factory=list)
    _column_bounds: dict[MemoryRegion, Sequence[int]] = field(default_factory=dict)
    _derived_operands: dict[Hashable, tuple[Sequence[Operand], list[MemoryRegion]]] = field(default_factory=dict)
    _scratch: dict[tuple[str, int], Operand] = field(default_factory=dict)
    _constants: dict[bytes, Operand] = field(default_factory=dict)
    _last_private_buffer: int = -1

    def add(
        self,
        kernel: Kernel,
        words: Sequence[int],
        *,
        reads: Sequence[Operand],
        writes: Sequence[Operand],
        nbytes: int | None = None,
        stops: bool = False,
    ) -> None:
        """Append one kernel call as a step: all threads share it if it moves many bytes, else the first thread runs it.

        Args:
            kernel: The kernel.
            words: Argument words of the kernel.
            reads: All operands, except private memory.
            writes: All results, except private memory.
            nbytes: Bytes that the step moves; by default all bytes of `reads` and `writes`.
            stops: Whether the step may stop the run.
        """
        part, moved = (
            ThreadWork(words, reads, writes),
            _count_bytes_without_scratch(reads, writes) if nbytes is None else nbytes,
        )
        self._append(kernel, {ALL_THREADS if self.threads > 1 and moved >= MIN_SHARED_BYTES else 0: part}, stops)

    def is_step_shared_by_threads(self, reads: Sequence[Operand], writes: Sequence[Operand]) -> bool:
        """Return whether `add` would split a step with these operands and results over all threads."""
        return self.threads > 1 and _count_bytes_without_scratch(reads, writes) >= MIN_SHARED_BYTES

    def add_units(
        self,
        kernel: Kernel,
        words: Sequence[int],
        unit_count: int,
        *,
        reads: Sequence[Operand],
        writes: Sequence[Operand],
        of_units: Sequence[Operand],
        stops: bool = False,
    ) -> None:
        """Append a step in which the kernel gives each thread a contiguous range of `unit_count` units.

        The kernel splits the units as `compute_thread_range` does. So each thread accesses its own columns of some
        operands, and needs no barrier after a step that split them in the same way. Later steps can continue with the
        columns that each thread wrote.

        Args:
            kernel: The kernel.
            words: Argument words of the kernel.
            unit_count: The number of units.
            reads: All operands, except private memory.
            writes: All results, except private memory.
            of_units: Operands and results that are one row of `unit_count` equal parts, in which unit i accesses only
                part i.
            stops: Whether the step may stop the run.
        """
        rows = {o.region: o for o in of_units if o.is_dense and not o.has_packed_layout and o.size % unit_count == 0}
        if not rows or not self.is_step_shared_by_threads(reads, writes):
            self.add(kernel, words, reads=reads, writes=writes, stops=stops)
            return
        parts: dict[int, ThreadWork] = {}
        units = compute_even_bounds(unit_count, 1, self.threads)
        for thread, (first, last) in enumerate(pairwise(units)):
            own = {region: _slice_row(o, first, last, unit_count) for region, o in rows.items()}
            read, written = ([own.get(o.region, o) for o in some] for some in (reads, writes))
            parts[thread] = ThreadWork(words, read, written)
        self._append(kernel, parts, stops, is_presplit=False)
        for out in writes:
            if out.region in rows:
                self._column_bounds[out.region] = [unit * (out.size // unit_count) for unit in units]

    def add_per_thread(self, kernel: Kernel, parts: Sequence[ThreadWork | None], *, stops: bool = False) -> None:
        """Append a step in which each thread does its own part of the work; None for a thread without work.

        `stops` says whether the step may stop the run.
        """
        self._append(kernel, {thread: part for thread, part in enumerate(parts) if part is not None}, stops)

    def add_queued(self, kernel: Kernel, make_work: Callable[[int], ThreadWork], *, stops: bool = False) -> None:
        """Append a step with work items that the threads take from a queue.

        ``make_work(queue_address)`` returns the work, which is the same for all threads. `stops` says whether the step
        may stop the run.
        """
        self._append(
            kernel,
            {ALL_THREADS: make_work(self.allocate_memory(work_queue.QUEUE_BYTES).address)},
            stops,
            uses_queue=True,
        )

    def add_by_columns(
        self, kernel: Kernel, parts: Sequence[ThreadWork | None], results: Sequence[Operand], bounds: Sequence[int]
    ) -> None:
        """Append a step in which thread i writes the columns ``bounds[i]`` to ``bounds[i + 1]`` of the results.

        Args:
            kernel: The kernel.
            parts: The work of each thread; None for a thread without work.
            results: The results.
            bounds: Column bounds, one more than threads.
        """
        self.add_per_thread(kernel, parts)
        if self.threads > 1:
            self._column_bounds |= {o.region: bounds for o in results if bounds[-1] in (o.shape[-1], o.size)}

    def find_column_bounds_written_since_barrier(self, operands: Sequence[Operand]) -> Sequence[int] | None:
        """Return the column bounds of the first operand that threads wrote by columns since a barrier, or None."""
        bounds = (self._column_bounds.get(o.region) for o in operands)
        return next((b for b in bounds if b is not None), None)

    def is_cheap_to_repeat_per_thread(self, reads: Sequence[Operand]) -> bool:
        """Return whether operands are so small that repeating a computation in every thread beats a barrier."""
        return sum(o.tensor.spec.nbytes for o in reads) <= MAX_DUPLICATED_BYTES

    def _needs_barrier(self, read: ThreadRegions, written: ThreadRegions) -> bool:
        return any(
            (thread != other or thread == ALL_THREADS) and region.overlaps(before)
            for mine, theirs in (
                (read, self._written_regions),
                (written, self._written_regions),
                (written, self._read_regions),
            )
            for before, other in theirs
            for region, thread in mine
        )

    def _append(
        self,
        kernel: Kernel,
        parts: Mapping[int, ThreadWork],
        stops: bool,
        *,
        uses_queue: bool = False,
        is_presplit: bool = True,
    ) -> None:
        read, written = _find_thread_accesses(parts, stops, uses_queue)
        needs_barrier = self.threads > 1 and self._needs_barrier(read, written)
        if needs_barrier:
            self._written_regions, self._read_regions, self._column_bounds = [], [], {}
        self._written_regions += written
        self._read_regions += read
        if ALL_THREADS in parts:
            work_by_thread: list[ThreadWork | None] = [parts[ALL_THREADS]] * self.threads
        else:
            work_by_thread = [parts.get(thread) for thread in range(self.threads)]
        is_presplit = is_presplit and ALL_THREADS not in parts
        self.steps.append(
            _make_table_step(kernel, work_by_thread, is_presplit, needs_barrier, self.instruction_number, stops)
        )
        self.invalidate_values_in_regions([region for region, _ in written])

    def take_steps(self) -> list[TableStep]:
        """Return the steps that were appended so far, and begin another table."""
        taken, self.steps = self.steps, []
        self._written_regions, self._read_regions, self._column_bounds = [], [], {}
        return taken

    def allocate_memory(self, nbytes: int) -> Operand:
        """Allocate memory that lives as long as the tables. It is aligned to a cache line."""
        self._last_private_buffer -= 1
        return Operand(
            self.table_memory.allocate_zeroed(nbytes), Tensor(self._last_private_buffer, 0, (nbytes,), (1,), DType.I8)
        )

    def scratch(self, purpose: str, nbytes: int) -> Operand:
        """Return scratch memory of `nbytes` bytes for `purpose`; all steps of that purpose overwrite it."""
        memory = self._scratch.get((purpose, nbytes))
        if memory is None:
            memory = self._scratch[purpose, nbytes] = self.allocate_memory(nbytes)
        return memory

    def constant(self, array: npt.NDArray[Any]) -> Operand:
        """Return memory that holds the contents of `array` as long as the tables live; equal bytes share one memory."""
        data = array.tobytes()
        if data not in self._constants:
            self._constants[data] = memory = self.allocate_memory(len(data))
            self.table_memory.fill(memory.address, data)
        return self._constants[data]

    def take_private_memory(self, purpose: str, nbytes: int, *, shared: bool = False) -> Sequence[Operand]:
        """Return memory for each thread that only this thread accesses, or one memory for all threads if `shared`.

        The memory overlaps no operand of `register_derived_operands`. `purpose` identifies it for reuse.
        """
        registered_buffers = {o.tensor.buffer for known, _ in self._derived_operands.values() for o in known}
        for number in count():
            whose = ["all"] * self.threads if shared else [f"thread {t}" for t in range(self.threads)]
            memory = [self.scratch(f"{purpose} {number} of {who}", nbytes) for who in whose]
            if not any(o.tensor.buffer in registered_buffers for o in memory):
                return memory
        raise AssertionError("never")

    def find_derived_operands(self, key: Hashable) -> Sequence[Operand] | None:
        """Return the operands that an earlier step registered under `key`; None if their contents are outdated."""
        known = self._derived_operands.get(key)
        return None if known is None else known[0]

    def register_derived_operands(self, key: Hashable, operands: Sequence[Operand], sources: Sequence[Operand]) -> None:
        """Register operands computed from `sources`, such as quantised activations, so that later steps reuse them.

        `find_derived_operands` returns them until a step overwrites `operands` or `sources`.
        """
        self._derived_operands[key] = (operands, [o.region for o in (*operands, *sources)])

    def register_per_thread_values(self, operands: Sequence[Operand], value: Operand) -> None:
        """Register each thread's own copy of `value` for later steps; the memory of `value` itself is not written."""
        self.invalidate_values_in_regions([value.region])
        self.register_derived_operands(("own", value.region), operands, [value])

    def find_per_thread_values(self, value: Operand) -> Sequence[Operand] | None:
        """Return each thread's own copy of `value` that an earlier step registered, or None."""
        own = self.find_derived_operands(("own", value.region))
        return None if own is None else [view_with_layout_of(o, value) for o in own]

    def invalidate_values_in_regions(self, written: Sequence[MemoryRegion]) -> None:
        """Forget registered operands and column bounds that overlap the written regions."""
        for region in [r for r in self._column_bounds if any(w.overlaps(r) for w in written)]:
            del self._column_bounds[region]
        gone = [
            k
            for k, (_, regions) in self._derived_operands.items()
            if any(w.overlaps(r) for w in written for r in regions)
        ]
        for key in gone:
            del self._derived_operands[key]


def _make_table_step(
    kernel: Kernel,
    work_by_thread: Sequence[ThreadWork | None],
    is_presplit: bool,
    has_barrier: bool,
    instruction_number: int,
    may_stop: bool,
) -> TableStep:
    words = [None if part is None else np.array(part.words, np.int64) for part in work_by_thread]
    listed = [() if part is None else part.words for part in work_by_thread]
    called = tuple(
        tuple((at, word.kernel) for at, word in enumerate(some) if isinstance(word, KernelWord)) for some in listed
    )
    places = {at for some in listed for at, word in enumerate(some) if isinstance(word, PrologueWord)}
    return TableStep(
        kernel, words, is_presplit, has_barrier, instruction_number, called, max(places, default=None), may_stop
    )


def view_with_layout_of(memory: Operand, value: Operand) -> Operand:
    """Return `memory` as an operand with the shape, strides and dtype of `value`."""
    t = value.tensor
    return Operand(memory.address, replace(memory.tensor, shape=t.shape, strides=t.strides, dtype=t.dtype))


def _slice_row(row: Operand, first: int, last: int, unit_count: int) -> Operand:
    """Return units `first` to `last` of a dense operand that is one row of `unit_count` units."""
    each = row.size // unit_count
    flat = replace(row, tensor=replace(row.tensor, shape=(row.size,), strides=(1,)))
    return flat.slice_axis(0, first * each, (last - first) * each)


def _count_bytes_without_scratch(reads: Sequence[Operand], writes: Sequence[Operand]) -> int:
    """Return the number of bytes of all operands and results, except scratch."""
    return sum(o.region.high - o.region.low for o in (*reads, *writes) if o.tensor.buffer >= 0)


def _find_thread_accesses(
    parts: Mapping[int, ThreadWork], stops: bool, uses_queue: bool
) -> tuple[ThreadRegions, ThreadRegions]:
    """Return two lists of (region, thread number): the memory that threads read, and the memory that threads write."""
    read = [(o.region, thread) for thread, part in parts.items() for o in part.reads]
    written = [(o.region, thread) for thread, part in parts.items() for o in part.writes]
    for thread, part in parts.items():
        if stops or uses_queue or any(o.declared_spec is not None for o in part.writes):
            read.append((RUN_STATUS_REGION, thread))
        if stops:
            written.append((RUN_STATUS_REGION, thread))
    return read, written


InstructionBinder = Callable[[StepTableBuilder, BoundInstruction], bool]
"""A function that appends the steps of one instruction, and returns False if no kernel fits.

NumPy computes an instruction that no kernel fits.
"""


@dataclass(frozen=True, slots=True)
class FusedBinding:
    """A fusion: the numbers of its instructions, and the function that appends their steps, which always succeeds.

    `panels` are the panels of the last instruction's result, if its kernel can call hooks for them.
    `is_repeated`: whether each thread may compute the whole result for itself.
    """

    instruction_numbers: Sequence[int]
    bind: Callable[[StepTableBuilder], None]
    panels: ResultPanels | None = None
    is_repeated: bool = False


FusionMatcher = Callable[[Dataflow, int], FusedBinding]
"""A function that finds the fusion that begins with an instruction; it raises `NoKernelError` if no kernel fits.

Intermediate values that only the fused instructions read are not written.
"""


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), Steps="StepTableBuilder", Chain="FusedBinding")
