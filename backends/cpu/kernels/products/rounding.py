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
from ....operands import Operand
from ...compiler import kernel, part
from ...simd.bf16 import store_rounded
from ...simd.halves import both_and_second, largest_magnitudes, of_first, of_second, store_pair, totals
from ...simd.terms import store_ordered_terms
from ...simd.tiles import ITS_BITS, ONE_AND_A_HALF, RECORD, SCALES, STARTS, SUMS
from ...simd.vectors import (
    add_int,
    and_int,
    bits_to_float,
    div,
    float_to_bits,
    load,
    mul,
    mul_int,
    round_small,
    splat,
    splat_int,
    store_small,
    to_float,
    where_less,
    word,
    zeros,
)
from ...steps import Share, Steps
from ...words import words
from ..packing import share
from .formats import COLUMNS
from .grouped import even_bounds

ONE, STEP, START = np.float32(1), np.float32(1 / 127), np.float32(-ONE_AND_A_HALF)
SHORT = 0xFFFFFFFC
"""Mask that keeps 22 bits of a scale. Then three times a scale, and `START_FACTOR` times it, is exact in float32."""
SMALLEST, RAISE = np.float32(1e-38), np.float32(2.0**64)
"""Scales below `MIN_SCALE` are multiplied by `SCALE_RAISE_FACTOR` before their reciprocal, which would overflow."""

TILED, SPLIT = -1, -2
TERMS = {TILED: 1, SPLIT: 3}
"""bfloat16 terms of each number in tiles, by kind of rounding."""
TALL, LINE = 32, 2 * COLUMNS
"""Rows of activation tiles, and bytes of one row of a block in one term."""
store_split, IN_SPLIT = store_ordered_terms(TERMS[SPLIT]), TERMS[SPLIT]


@part
def round_block(x, record, zero):
    """Quantise 32 values to 8-bit codes, scales and sums (`tiles.RECORD`).

    If a value is NaN, the scale of its half is NaN. If a value exceeds 3e33, products of its half are NaN.
    """
    low, high = load(x), load(x + 64)
    scales = mul(largest_magnitudes(low, high), splat(STEP))
    scales = bits_to_float(and_int(float_to_bits(scales), splat_int(SHORT)))
    raised = where_less(scales, splat(SMALLEST), splat(RAISE), splat(ONE))
    inverse = where_less(zeros(), scales, div(splat(ONE), mul(scales, raised)), zeros())
    i = round_small(mul(mul(low, of_first(raised)), of_first(inverse)))
    j = round_small(mul(mul(high, of_second(raised)), of_second(inverse)))
    store_small(record, i)
    store_small(record + 16, j)
    sums = totals(i, j)
    store_pair(record + SCALES, scales)
    store_pair(record + STARTS, mul(scales, splat(START)))
    if zero:
        store_pair(record + SUMS, bits_to_float(add_int(mul_int(sums, splat_int(-zero)), splat_int(ITS_BITS))))
    else:
        store_pair(record + SUMS, both_and_second(mul(to_float(sums), scales)))


ARGS = words("source step rows columns rounding[*]")
ROUNDING = ARGS.start("rounding")
"""First word of `QuantisedTarget.rounding_words`."""


@kernel
def round_rows(a, thread, threads):
    """Quantise rows that are `step` bytes apart."""
    source, step, rows, columns = ARGS.source(a), ARGS.step(a), ARGS.rows(a), ARGS.columns(a)
    lo, hi = share(rows, thread, threads)
    for i in range(lo, hi):
        round_row(a, ROUNDING, i, source + i * step, columns)
    return 0


@part
def round_row(a, at, i, y, n):
    """Quantise the `n` columns of row `i`, which begins at `y`, for each target.

    `at` is the first of `QuantisedTarget.rounding_words` in `a`.
    """
    for b in range(n // COLUMNS):
        round_one(a, at, i, b, y + 4 * COLUMNS * b)


@part
def round_one(a, at, i, b, x):
    """Quantise block `b` of row `i`, which begins at `x`, for each target (`quantise_row`)."""
    for k in range(word(a, at)):
        to, pitch, kind = word(a, at + 1 + 3 * k), word(a, at + 2 + 3 * k), word(a, at + 3 + 3 * k)
        if kind == TILED:
            store_rounded(to + i // TALL * pitch + (b * TALL + i % TALL) * LINE, load(x), load(x + 64))
        elif kind == SPLIT:
            terms = to + i // TALL * pitch + (b * IN_SPLIT * TALL + i % TALL) * LINE
            store_split(terms, TALL * LINE, load(x), load(x + 64))
        else:
            round_block(x, to + i * pitch + b * RECORD, kind)


# ----------------------------------------------------------------------------------------------------- binding


def rounded_bytes(rows: int, columns: int, kind: int) -> int:
    """Return the bytes of records [rows, columns / 32] or tiles [rows / 32, columns / 32]."""
    if kind in TERMS:
        return -(-rows // TALL) * (columns // COLUMNS) * TERMS[kind] * TALL * LINE
    return rows * (columns // COLUMNS) * RECORD


def rounded(steps: Steps, x: Operand, kind: int, *, for_all: bool) -> Sequence[Operand]:
    """Return the quantised activations of each thread. Add a step unless an earlier step has quantised them.

    If all threads share the product (`for_all`), there are three methods:

    - Each thread quantises its columns of `x`.
    - Each thread quantises all rows for itself, if they are few.
    - Threads share the rows.
    """
    key = ("rounded", x.tensor, kind)
    if (records := steps.known(key)) is not None:
        return records
    rows, columns, name = math.prod(x.shape[:-1]), x.shape[-1], f"rounded {kind}"
    nbytes, own, bounds = rounded_bytes(rows, columns, kind), steps.stand_ins(x), steps.columns_of([x])
    if bounds is not None and (rows > 1 or any(b % COLUMNS for b in bounds)):
        bounds = None
    if own is not None or (for_all and bounds is None and steps.is_repeated([x])):
        records = steps.copies(name, nbytes)
        parts = [
            _rounding(o, to, rows, kind, 0, columns) for o, to in zip(own or [x] * len(records), records, strict=True)
        ]
        steps.deal(round_rows, parts)
    elif rows == 1 and for_all:
        records = [steps.scratch(name, nbytes)] * steps.threads
        bounds = bounds or even_bounds(columns, COLUMNS, steps.threads)
        steps.deal(round_rows, [_rounding(x, records[0], 1, kind, *pair) for pair in pairwise(bounds)])
    else:
        records = [steps.scratch(name, nbytes)] * steps.threads
        share = _rounding(x, records[0], rows, kind, 0, columns)
        steps.add(round_rows, share.words, reads=share.reads, writes=share.writes)
    steps.remember(key, records, [x])
    return records


def _rounding(x: Operand, to: Operand, rows: int, kind: int, first: int, last: int) -> Share:
    """Make the work that quantises columns `first` to `last` of `x`. A column range is allowed for one row only."""
    source, skipped = x.part(len(x.shape) - 1, first, last - first), rounded_bytes(1, first, kind)
    target = to.part(0, skipped, rounded_bytes(rows, last - first, kind))
    rounding = (1, target.address, rounded_bytes(1, last - first, kind), kind)
    words = ARGS(source=source.address, step=source.row_step, rows=rows, columns=last - first, rounding=rounding)
    return Share(words, [source], [target])


# ------------------------------------------------------------------------------------------ quantised by its producer


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of result rows of one thread.

    Attributes:
        float_rows: float32 rows. If no op reads them, all rows use the memory of one row.
        writes: Operands that the thread writes.
        thread_stride_bytes: Bytes from thread to thread of this one row; 0 if all rows are stored.
        rounding_words: The number of targets; for each target its address, row stride in bytes, and kind. For tiles the
            stride is from 32 rows to the next 32.
    """

    floats: Operand
    writes: Sequence[Operand]
    between: int = 0
    rounding: Sequence[int] = (0,)

    @property
    def step(self) -> int:
        """Bytes from row to row of float32; 0 if float32 rows are not stored."""
        return self.floats.row_step if self.floats in self.writes else 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The forms in which later ops read a result.

    Attributes:
        value: The result.
        quantised_tensors: Tensors that packed products read quantised, each with its kind of rounding.
        needs_floats: Whether other ops read float32.
        is_shared_by_threads: Whether threads share one of the products.
    """

    value: Operand
    rounded: Sequence[tuple[Tensor, int]]
    floats: bool
    for_all: bool

    @property
    def rows(self) -> int:
        """Rows of the result."""
        return math.prod(self.value.shape[:-1])

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.value.shape[-1]

    @property
    def kinds(self) -> Sequence[int]:
        """The distinct kinds of rounding."""
        return list(dict.fromkeys(kind for _, kind in self.rounded))

    def records(self, steps: Steps, *, shared: bool) -> Sequence[Sequence[Operand]]:
        """Return for each thread one float32 operand per kind for the quantised rows: shared memory, or its own.

        The memory does not overlap a source of the result.
        """
        records = []
        for kind in self.kinds:
            nbytes, width = rounded_bytes(self.rows, self.columns, kind), rounded_bytes(1, self.columns, kind) // 4
            own = steps.copies(f"rounded {kind} at once", nbytes, shared=shared)
            records.append([_laid(o, (nbytes // 4 // width, width), (width, 1)) for o in own])
        steps.forget([self.value.region])
        return [[own[thread] for own in records] for thread in range(steps.threads)]

    def target(self, floats: Operand | None, passing: Operand, records: Sequence[Operand]) -> Target:
        """Make the target of one thread. Without `floats` all rows use the one row of `passing`."""
        rounding = [len(records)]
        for record, kind in zip(records, self.kinds, strict=True):
            rounding += [record.address, rounded_bytes(1, self.columns, kind), kind]
        if floats is None:
            return Target(passing, records, 4 * self.columns, rounding)
        return Target(floats, [floats, *records], 0, rounding)

    def targets(self, steps: Steps, records: Sequence[Sequence[Operand]], bounds: Sequence[int]) -> list[Target | None]:
        """Make the target of each thread for columns ``bounds[i]`` to ``bounds[i + 1]``; None for an empty range."""
        targets: list[Target | None] = []
        axis, places = len(self.value.shape) - 1, self.passing(steps)
        for place, own, (first, last) in zip(places, records, pairwise(bounds), strict=False):
            some = [self._columns_of(o, kind, first, last) for o, kind in zip(own, self.kinds, strict=True)]
            floats = self.value.part(axis, first, last - first) if self.floats else None
            targets.append(self.target(floats, place.part(axis, first, last - first), some) if first < last else None)
        return targets

    def _columns_of(self, record: Operand, kind: int, first: int, last: int) -> Operand:
        """Return the part of quantised rows that holds columns `first` to `last`."""
        skipped, width = (rounded_bytes(1, n, kind) // 4 for n in (first, last - first))
        return record.part(1, skipped, width)

    def passing(self, steps: Steps) -> Sequence[Operand]:
        """Return for each thread the memory of one row, shaped like all rows (row stride 0)."""
        shape, nbytes = self.value.shape, 4 * self.columns
        memory = steps.scratch(f"row of {nbytes}", nbytes * steps.threads)
        strides = (*(0 for _ in shape[1:]), 1)
        return [_laid(memory.part(0, nbytes * t, nbytes), shape, strides) for t in range(steps.threads)]

    def remember(self, steps: Steps, records: Sequence[Sequence[Operand]]) -> None:
        """Register the quantised rows, so that products find them."""
        for tensor, kind in self.rounded:
            at = self.kinds.index(kind)
            steps.remember(("rounded", tensor, kind), [own[at] for own in records], [self.value])


def _laid(memory: Operand, shape: tuple[int, ...], strides: tuple[int, ...]) -> Operand:
    """Return the memory as a float32 operand with this shape and these strides."""
    tensor = replace(memory.tensor, shape=shape, strides=strides, dtype=DType.F32)
    return Operand(memory.address, tensor)
