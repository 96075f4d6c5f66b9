"""Quantisation of activations for products: as a step of its own, or in the kernel that computes them.

- Packed weights read 8-bit codes in blocks of 16 with one scale each.
- AMX tiles read bfloat16, 32 rows by 32 columns at a time. With a packed weight there is one term; with another weight
there are three terms, which hold float32.

The kind of rounding is one number: the zero point of the weight's codes, `TILED_KIND` or `SPLIT_KIND`.

With one scale for 32 values prompts were 12 to 17 % faster (Emerald Rapids). The perplexity of SmolLM2 was then 0.5 %
above exact products instead of 0.1 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from .....graph.dtypes import DType
from ....base import Tensor
from ....fusion.operands import Operand
from ...compilation.compiler import kernel, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.bf16_pairs import store_two_vectors_as_bf16
from ...simd.bf16_terms import make_split_and_store_ordered_bf16_terms
from ...simd.dot_tiles import (
    ONE_AND_A_HALF,
    ONE_AND_A_HALF_BITS,
    RECORD_BYTES,
    SCALES_OFFSET,
    STARTS_OFFSET,
    SUMS_OFFSET,
)
from ...simd.fold_halves import (
    add_upper_half_to_lower,
    reduce_two_to_max_magnitude,
    reduce_two_to_sum,
    splat_number_of_lower_half,
    splat_number_of_upper_half,
    store_one_number_of_each_half,
)
from ...simd.vectors import (
    add_int,
    and_int,
    bits_to_float,
    div,
    float_to_bits,
    load,
    load_argument_word,
    mul,
    mul_int,
    round_small_floats_to_int,
    splat,
    splat_int,
    store_u8_lanes,
    to_float,
    where_less,
    zeros,
)
from ...steps.panel_hooks import RANGE_BITS, RANGE_MASK, StepHook
from ...steps.partition import compute_even_bounds, compute_thread_range
from ...steps.step_table import StepTableBuilder, ThreadWork
from .format_table import BLOCK_COLUMNS

FLOAT_ONE, CODE_STEP, START_FACTOR = np.float32(1), np.float32(1 / 127), np.float32(-ONE_AND_A_HALF)
SCALE_MASK = 0xFFFFFFFC
"""Mask that keeps 22 bits of a scale. Then three times a scale, and `START_FACTOR` times it, is exact in float32."""
MIN_SCALE, SCALE_RAISE_FACTOR = np.float32(1e-38), np.float32(2.0**64)
"""Scales below `MIN_SCALE` are multiplied by `SCALE_RAISE_FACTOR` before their reciprocal, which would overflow."""

TILED_KIND, SPLIT_KIND = -1, -2
TERMS_BY_KIND = {TILED_KIND: 1, SPLIT_KIND: 3}
"""bfloat16 terms of each number in tiles, by kind of rounding."""
PANEL_ROWS, TILE_ROW_BYTES = 32, 2 * BLOCK_COLUMNS
"""Rows of activation tiles, and bytes of one row of a block in one term."""
store_split_terms, SPLIT_TERMS = (
    make_split_and_store_ordered_bf16_terms(TERMS_BY_KIND[SPLIT_KIND]),
    TERMS_BY_KIND[SPLIT_KIND],
)


@subroutine
def quantise_activation_block_to_int8(x, record, zero):
    """Quantise 32 activations to 8-bit codes, and store codes, scales and sums in a record of `RECORD_BYTES` bytes.

    `zero` is the zero point of the weight codes. If a value is NaN, the scale of its half is NaN. If a value exceeds
    3e33, products of its half are NaN.
    """
    low, high = load(x), load(x + 64)
    scales = mul(reduce_two_to_max_magnitude(low, high), splat(CODE_STEP))
    scales = bits_to_float(and_int(float_to_bits(scales), splat_int(SCALE_MASK)))
    raised = where_less(scales, splat(MIN_SCALE), splat(SCALE_RAISE_FACTOR), splat(FLOAT_ONE))
    inverse = where_less(zeros(), scales, div(splat(FLOAT_ONE), mul(scales, raised)), zeros())
    i = round_small_floats_to_int(
        mul(mul(low, splat_number_of_lower_half(raised)), splat_number_of_lower_half(inverse))
    )
    j = round_small_floats_to_int(
        mul(mul(high, splat_number_of_upper_half(raised)), splat_number_of_upper_half(inverse))
    )
    store_u8_lanes(record, i)
    store_u8_lanes(record + 16, j)
    sums = reduce_two_to_sum(i, j)
    store_one_number_of_each_half(record + SCALES_OFFSET, scales)
    store_one_number_of_each_half(record + STARTS_OFFSET, mul(scales, splat(START_FACTOR)))
    if zero:
        store_one_number_of_each_half(
            record + SUMS_OFFSET,
            bits_to_float(add_int(mul_int(sums, splat_int(-zero)), splat_int(ONE_AND_A_HALF_BITS))),
        )
    else:
        store_one_number_of_each_half(record + SUMS_OFFSET, add_upper_half_to_lower(mul(to_float(sums), scales)))


ARGS = declare_args("source step rows columns rounding[*]")
ROUNDING_WORD = ARGS.first_word_index("rounding")
"""First word of `ThreadResultTarget.rounding_words`."""


@kernel
def quantise_activation_rows(a, thread, threads):
    """Quantise all activation rows to each form that the kernel arguments list; rows are `step` bytes apart."""
    source, step, rows, columns = ARGS.source(a), ARGS.step(a), ARGS.rows(a), ARGS.columns(a)
    lo, hi = compute_thread_range(rows, thread, threads)
    for i in range(lo, hi):
        quantise_row_to_targets(a, ROUNDING_WORD, i, source + i * step, columns)
    return 0


PANEL_ARGS = declare_args("source step rounding[*]")
PANEL_ROUNDING_WORD = PANEL_ARGS.first_word_index("rounding")


@kernel
def quantise_activation_panel(a, rows, columns):
    """Quantise a panel (some rows by some columns) of activations to each form that the kernel arguments list.

    It is a hook: the kernel that computes the activations calls it for each panel (`panel_hooks`).
    """
    source, step = PANEL_ARGS.source(a), PANEL_ARGS.step(a)
    first_row, first_block = rows >> RANGE_BITS, (columns >> RANGE_BITS) // BLOCK_COLUMNS
    for i in range(first_row, first_row + (rows & RANGE_MASK)):
        for b in range(first_block, first_block + (columns & RANGE_MASK) // BLOCK_COLUMNS):
            x = source + i * step + 4 * BLOCK_COLUMNS * b
            quantise_block_to_targets(a, PANEL_ROUNDING_WORD, i, b, x)
    return 0


@subroutine
def quantise_row_to_targets(a, at, i, y, n):
    """Quantise row number `i`, `n` float32 numbers at `y`, to every quantised form that later matmuls read.

    Word `at` of the kernel arguments `a` is the first of `ThreadResultTarget.rounding_words`, which list these forms.
    """
    for b in range(n // BLOCK_COLUMNS):
        quantise_block_to_targets(a, at, i, b, y + 4 * BLOCK_COLUMNS * b)


@subroutine
def quantise_block_to_targets(a, at, i, b, x):
    """Quantise block `b` of row `i`, 32 float32 numbers at `x`, to every quantised form that later matmuls read.

    Word `at` of the kernel arguments `a` is the first of `ThreadResultTarget.rounding_words`, which list these forms.
    """
    for k in range(load_argument_word(a, at)):
        to, pitch, kind = (
            load_argument_word(a, at + 1 + 3 * k),
            load_argument_word(a, at + 2 + 3 * k),
            load_argument_word(a, at + 3 + 3 * k),
        )
        if kind == TILED_KIND:
            store_two_vectors_as_bf16(
                to + i // PANEL_ROWS * pitch + (b * PANEL_ROWS + i % PANEL_ROWS) * TILE_ROW_BYTES,
                load(x),
                load(x + 64),
            )
        elif kind == SPLIT_KIND:
            terms = to + i // PANEL_ROWS * pitch + (b * SPLIT_TERMS * PANEL_ROWS + i % PANEL_ROWS) * TILE_ROW_BYTES
            store_split_terms(terms, PANEL_ROWS * TILE_ROW_BYTES, load(x), load(x + 64))
        else:
            quantise_activation_block_to_int8(x, to + i * pitch + b * RECORD_BYTES, kind)


# ----------------------------------------------------------------------------------------------------- binding


def compute_quantised_activation_bytes(rows: int, columns: int, kind: int) -> int:
    """Return the bytes of activations in a kind of rounding: 8-bit records or bfloat16 tiles, for each 32 columns.

    Tiles are for 32 rows at a time.
    """
    if kind in TERMS_BY_KIND:
        return -(-rows // PANEL_ROWS) * (columns // BLOCK_COLUMNS) * TERMS_BY_KIND[kind] * PANEL_ROWS * TILE_ROW_BYTES
    return rows * (columns // BLOCK_COLUMNS) * RECORD_BYTES


def find_or_add_quantised_activations(
    steps: StepTableBuilder, x: Operand, kind: int, *, for_all: bool
) -> Sequence[Operand]:
    """Return the quantised activations of each thread; add the step that computes them unless an earlier step did.

    If all threads share the matmul that reads them (`for_all`), one of three methods is used:

    - Each thread quantises its columns of `x`.
    - Each thread quantises all rows for itself, if the rows are few.
    - Threads share the rows.
    """
    key = ("rounded", x.tensor, kind)
    if (records := steps.find_derived_operands(key)) is not None:
        return records
    rows, columns, name = math.prod(x.shape[:-1]), x.shape[-1], f"rounded {kind}"
    nbytes, own = compute_quantised_activation_bytes(rows, columns, kind), steps.find_per_thread_values(x)
    bounds = steps.find_column_bounds_written_since_barrier([x])
    if bounds is not None and (rows > 1 or any(b % BLOCK_COLUMNS for b in bounds)):
        bounds = None
    if own is not None or (for_all and bounds is None and steps.is_cheap_to_repeat_per_thread([x])):
        records = steps.take_private_memory(name, nbytes)
        parts = [
            _make_quantise_columns_work(o, to, rows, kind, 0, columns)
            for o, to in zip(own or [x] * len(records), records, strict=True)
        ]
        steps.add_per_thread(quantise_activation_rows, parts)
    elif rows == 1 and for_all:
        records = [steps.scratch(name, nbytes)] * steps.threads
        bounds = bounds or compute_even_bounds(columns, BLOCK_COLUMNS, steps.threads)
        steps.add_per_thread(
            quantise_activation_rows,
            [_make_quantise_columns_work(x, records[0], 1, kind, *pair) for pair in pairwise(bounds)],
        )
    else:
        records = [steps.scratch(name, nbytes)] * steps.threads
        share = _make_quantise_columns_work(x, records[0], rows, kind, 0, columns)
        steps.add(quantise_activation_rows, share.words, reads=share.reads, writes=share.writes)
    steps.register_derived_operands(key, records, [x])
    return records


def _make_quantise_columns_work(x: Operand, to: Operand, rows: int, kind: int, first: int, last: int) -> ThreadWork:
    """Make the work of one thread: quantise columns `first` to `last` of the rows of `x` to `to`.

    With several rows, the range must be all columns.
    """
    source, skipped = (
        x.slice_axis(len(x.shape) - 1, first, last - first),
        compute_quantised_activation_bytes(1, first, kind),
    )
    target = to.slice_axis(0, skipped, compute_quantised_activation_bytes(rows, last - first, kind))
    rounding = (1, target.address, compute_quantised_activation_bytes(1, last - first, kind), kind)
    words = ARGS(
        source=source.address, step=source.row_stride_bytes, rows=rows, columns=last - first, rounding=rounding
    )
    return ThreadWork(words, [source], [target])


# ------------------------------------------------------------------------------------------ quantised by its producer


@dataclass(frozen=True, slots=True)
class ThreadResultTarget:
    """The memory to which one thread writes result rows, as float32 and in quantised forms.

    Attributes:
        float_rows: float32 rows. If no op reads them, all rows use the memory of one row.
        writes: Operands that the thread writes.
        thread_stride_bytes: Bytes from the single row of a thread to the row of the next thread; 0 if all rows are
            stored.
        rounding_words: The number of quantised forms; then for each form its address, row stride in bytes, and kind of
            rounding. For tiles the stride is from 32 rows to the next 32.
    """

    float_rows: Operand
    writes: Sequence[Operand]
    thread_stride_bytes: int = 0
    rounding_words: Sequence[int] = (0,)

    @property
    def float_row_step_bytes(self) -> int:
        """Bytes from float32 row to float32 row. The value is 0 if float32 rows are not stored."""
        return self.float_rows.row_stride_bytes if self.float_rows in self.writes else 0


@dataclass(frozen=True, slots=True)
class ResultReadForms:
    """The forms in which later ops read a result: float32, or quantised for matmuls.

    Attributes:
        value: The result.
        quantised_tensors: The tensors that matmuls read quantised, each with its kind of rounding.
        needs_floats: Whether other ops read float32.
        is_shared_by_threads: Whether threads share one of the matmuls.
    """

    value: Operand
    quantised_tensors: Sequence[tuple[Tensor, int]]
    needs_floats: bool
    is_shared_by_threads: bool

    @property
    def rows(self) -> int:
        """Rows of the result."""
        return math.prod(self.value.shape[:-1])

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.value.shape[-1]

    @property
    def rounding_kinds(self) -> Sequence[int]:
        """The distinct quantised forms (kinds of rounding) in which matmuls read the result."""
        return list(dict.fromkeys(kind for _, kind in self.quantised_tensors))

    def make_quantised_row_memory_per_thread(
        self, steps: StepTableBuilder, *, shared: bool, place: str = "at once"
    ) -> Sequence[Sequence[Operand]]:
        """Make the memory of the quantised rows of each thread: one operand of float32 words for each quantised form.

        With `shared` all threads have the same memory, otherwise each thread has its own. The memory does not overlap
        an operand from which the result is computed. `place` tells several results of one step apart.
        """
        records = []
        for kind in self.rounding_kinds:
            nbytes = compute_quantised_activation_bytes(self.rows, self.columns, kind)
            width = compute_quantised_activation_bytes(1, self.columns, kind) // 4
            own = steps.take_private_memory(f"rounded {kind} {place}", nbytes, shared=shared)
            records.append([_view_as_float_operand(o, (nbytes // 4 // width, width), (width, 1)) for o in own])
        steps.invalidate_values_in_regions([self.value.region])
        return [[own[thread] for own in records] for thread in range(steps.threads)]

    def make_thread_target(
        self, floats: Operand | None, scratch_row: Operand, records: Sequence[Operand]
    ) -> ThreadResultTarget:
        """Make the description of where one thread writes its float32 rows and its quantised rows.

        Args:
            floats: All rows as float32. None if only quantised rows are read.
            scratch_row: Memory of one row, which all rows use without `floats`.
            records: Quantised rows for each kind of rounding.
        """
        rounding = [len(records)]
        for record, kind in zip(records, self.rounding_kinds, strict=True):
            rounding += [record.address, compute_quantised_activation_bytes(1, self.columns, kind), kind]
        if floats is None:
            return ThreadResultTarget(scratch_row, records, 4 * self.columns, rounding)
        return ThreadResultTarget(floats, [floats, *records], 0, rounding)

    def make_target_per_thread(
        self, steps: StepTableBuilder, records: Sequence[Sequence[Operand]], bounds: Sequence[int]
    ) -> list[ThreadResultTarget | None]:
        """Make the description of where each thread writes its columns, ``bounds[i]`` to ``bounds[i + 1]``.

        An entry is None for a thread without columns.
        """
        targets: list[ThreadResultTarget | None] = []
        axis, places = len(self.value.shape) - 1, self.view_thread_row_as_result_rows(steps)
        for place, own, (first, last) in zip(places, records, pairwise(bounds), strict=False):
            some = [
                self._slice_quantised_columns(o, kind, first, last)
                for o, kind in zip(own, self.rounding_kinds, strict=True)
            ]
            floats = self.value.slice_axis(axis, first, last - first) if self.needs_floats else None
            targets.append(
                self.make_thread_target(floats, place.slice_axis(axis, first, last - first), some)
                if first < last
                else None
            )
        return targets

    def _slice_quantised_columns(self, record: Operand, kind: int, first: int, last: int) -> Operand:
        """Return the part of quantised rows with columns `first` to `last`."""
        skipped, width = (compute_quantised_activation_bytes(1, n, kind) // 4 for n in (first, last - first))
        return record.slice_axis(1, skipped, width)

    def view_thread_row_as_result_rows(self, steps: StepTableBuilder) -> Sequence[Operand]:
        """Make scratch memory of one float32 row for each thread, viewed as all rows of the result.

        The stride from row to row is 0, so that all rows use this memory one after the other.
        """
        shape, nbytes = self.value.shape, 4 * self.columns
        memory = steps.scratch(f"row of {nbytes}", nbytes * steps.threads)
        strides = (*(0 for _ in shape[1:]), 1)
        return [
            _view_as_float_operand(memory.slice_axis(0, nbytes * t, nbytes), shape, strides)
            for t in range(steps.threads)
        ]

    def make_quantising_hook(self, records: Sequence[Operand]) -> StepHook:
        """Make the hook (epilogue kernel) that quantises each panel of the result to `records`, for all threads."""
        target = self.make_thread_target(self.value, self.value, records)
        words = PANEL_ARGS(source=self.value.address, step=self.value.row_stride_bytes, rounding=target.rounding_words)

        def slice_columns(first: int, last: int) -> tuple[list[Operand], list[Operand]]:
            kinds = zip(records, self.rounding_kinds, strict=True)
            return [], [self._slice_quantised_columns(o, kind, first, last) for o, kind in kinds]

        return StepHook(quantise_activation_panel, words, BLOCK_COLUMNS, slice_columns)

    def register_quantised_rows(self, steps: StepTableBuilder, records: Sequence[Sequence[Operand]]) -> None:
        """Register the quantised rows of the result, so that later matmuls read them instead of quantising again."""
        for tensor, kind in self.quantised_tensors:
            at = self.rounding_kinds.index(kind)
            steps.register_derived_operands(("rounded", tensor, kind), [own[at] for own in records], [self.value])


def _view_as_float_operand(memory: Operand, shape: tuple[int, ...], strides: tuple[int, ...]) -> Operand:
    """Return the operand `memory` as float32 with another shape and other strides."""
    tensor = replace(memory.tensor, shape=shape, strides=strides, dtype=DType.F32)
    return Operand(memory.address, tensor)
