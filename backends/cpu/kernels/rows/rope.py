"""Rotary embedding: cosines and sines once for all tensors with the same positions, then the rotations.

A pair is two elements of a row that are rotated together by one angle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from .....graph.dtypes import DType
from .....ops.matrix.rope import compute_rope_frequencies, map_pairs_to_positions_and_frequencies
from ....fusion.dataflow import Dataflow, require_no_alias
from ....fusion.operands import BoundInstruction, Operand, float32_bits, require_supported
from ....fusion.patterns import match_normed_rope
from ...compilation.compiler import Kernel, Subroutine, kernel, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.permute_lanes import evens, first_pairs, last_pairs, odds
from ...simd.vectors import LANES, add, load_double, load_int, load_long, load_scalar, mul, splat, store_scalar, sub
from ...steps.column_split import find_continued_column_split
from ...steps.partition import compute_thread_range as share_of
from ...steps.step_table import FusedBinding, FusionMatcher, StepTableBuilder, ThreadWork
from ..vector.elementwise import (
    add_copy_step,
    load_lanes,
    make_row_args,
    store_lanes,
)
from ..vector.row_loops import ELEMENT_STRIDE_WORDS, make_row_loop_args
from .norms import compute_rms_norm_factor, compute_sum_of_squares

ANGLE_ARGS = declare_args(
    "positions count run run_bytes position_bytes further frequency divisors pairs magnitude:f32 cosines sines"
)


@kernel
def compute_cos_and_sin_tables(a, thread, threads):
    """Compute the tables of cosines and sines [count, pairs] for `count` int32 positions.

    Kernel arguments:

    - `run` adjacent positions form a run; `run_bytes` is the bytes from run to run.
    - `position_bytes` is the bytes from position to position.
    - `further` (int64) has for each pair the bytes from the first position to its own.
    - `frequency` (float64) has the frequency of each pair, which is divided by `divisors` (float32; 0 for none).
    """
    run, run_bytes = ANGLE_ARGS.run(a), ANGLE_ARGS.run_bytes(a)
    position_bytes, further = ANGLE_ARGS.position_bytes(a), ANGLE_ARGS.further(a)
    frequency, divisors = ANGLE_ARGS.frequency(a), ANGLE_ARGS.divisors(a)
    pairs, magnitude, cosines = ANGLE_ARGS.pairs(a), ANGLE_ARGS.magnitude(a), ANGLE_ARGS.cosines(a)
    sines = ANGLE_ARGS.sines(a)
    lo, hi = share_of(ANGLE_ARGS.count(a), thread, threads)
    for i in range(lo, hi):
        position = ANGLE_ARGS.positions(a) + i // run * run_bytes + i % run * position_bytes
        for k in range(pairs):
            speed = load_double(frequency + 8 * k)
            if divisors != 0:
                speed /= load_scalar(divisors + 4 * k)
            angle = load_int(position + load_long(further + 8 * k)) * speed
            at = 4 * (i * pairs + k)
            store_scalar(cosines + at, math.cos(angle) * magnitude)
            store_scalar(sines + at, math.sin(angle) * magnitude)
    return 0


@cache
def make_rotate_row_pairs(neighbours: bool) -> Subroutine:
    """Make the subroutine ``(x, y, offset, pairs, cosines, sines)`` that rotates the pairs of a row by RoPE.

    For each pair (l, h): ``y[l] = x[l] cos - x[h] sin, y[h] = x[l] sin + x[h] cos``. y may be x. A pair is two adjacent
    elements (`neighbours`), or elements `pairs` apart, from element `offset` on.
    """

    def body(x, y, offset, pairs, cosines, sines):
        x, y = x + 4 * offset, y + 4 * offset
        for k in range(0, pairs, LANES):
            cos, sin = load_lanes(cosines, k, pairs, 4), load_lanes(sines, k, pairs, 4)
            if neighbours:
                first, second = load_lanes(x, 2 * k, 2 * pairs, 4), load_lanes(x, 2 * k + LANES, 2 * pairs, 4)
                low, high = evens(first, second), odds(first, second)
            else:
                low, high = load_lanes(x, k, pairs, 4), load_lanes(x + 4 * pairs, k, pairs, 4)
            left, right = sub(mul(low, cos), mul(high, sin)), add(mul(low, sin), mul(high, cos))
            if neighbours:
                store_lanes(y, 2 * k, 2 * pairs, first_pairs(left, right))
                store_lanes(y, 2 * k + LANES, 2 * pairs, last_pairs(left, right))
            else:
                store_lanes(y, k, pairs, left)
                store_lanes(y + 4 * pairs, k, pairs, right)

    return subroutine(body)


@subroutine
def copy_float_row(x, y, n):
    """Copy `n` float32 of a row from `x` to `y`."""
    for c in range(0, n, LANES):
        store_lanes(y, c, n, load_lanes(x, c, n, 4))


ROTATION_ARGS = make_row_args("x y", "cosines sines pairs offset rows_of_position rows_per_head first")


@cache
def make_rope_kernel(neighbours: bool) -> Kernel:
    """Make the RoPE kernel, which rotates the pairs of each row from element `offset` on.

    A pair is two adjacent elements (`neighbours`), or elements `pairs` apart. A head may be split into `rows_per_head`
    rows; `first` is the number of the thread's first row.
    """
    rotate_row = make_rotate_row_pairs(neighbours)

    def body(a, thread, threads):
        n, cosines, sines = ROTATION_ARGS.columns(a), ROTATION_ARGS.cosines(a), ROTATION_ARGS.sines(a)
        pairs, offset = ROTATION_ARGS.pairs(a), ROTATION_ARGS.offset(a)
        rows, first = ROTATION_ARGS.rows_of_position(a), ROTATION_ARGS.first(a)
        rows_per_head = ROTATION_ARGS.rows_per_head(a)
        lo, hi = share_of(ROTATION_ARGS.rows(a), thread, threads)
        for i in range(lo, hi):
            x, y = ROTATION_ARGS.x(a, i), ROTATION_ARGS.y(a, i)
            at = 4 * pairs * ((first + i) // rows * rows_per_head + (first + i) % rows_per_head)
            if x != y:
                past = offset + 2 * pairs
                copy_float_row(x, y, offset)
                copy_float_row(x + 4 * past, y + 4 * past, n - past)
            rotate_row(x, y, offset, pairs, cosines + at, sines + at)
        return 0

    return Kernel(f"rope.rotate.{'neighbours' if neighbours else 'halves'}", body)


SCALED_ROTATION_ARGS = make_row_args("x w y", "eps:f32 cosines sines pairs offset rows_of_position first")


@cache
def make_norm_and_rope_kernel(neighbours: bool) -> Kernel:
    """Make the fused kernel of RMS norm and RoPE: ``y = rotate(rms_norm(x) * w)``, from element `offset` on.

    A pair is two adjacent elements (`neighbours`), or elements `pairs` apart. `first` is the number of the thread's
    first row.
    """
    rotate_row = make_rotate_row_pairs(neighbours)

    def body(a, thread, threads):
        n, step, eps = SCALED_ROTATION_ARGS.columns(a), SCALED_ROTATION_ARGS.w_step(a), SCALED_ROTATION_ARGS.eps(a)
        cosines, sines = SCALED_ROTATION_ARGS.cosines(a), SCALED_ROTATION_ARGS.sines(a)
        pairs, offset = SCALED_ROTATION_ARGS.pairs(a), SCALED_ROTATION_ARGS.offset(a)
        rows, first = SCALED_ROTATION_ARGS.rows_of_position(a), SCALED_ROTATION_ARGS.first(a)
        lo, hi = share_of(SCALED_ROTATION_ARGS.rows(a), thread, threads)
        for i in range(lo, hi):
            x, w, y = SCALED_ROTATION_ARGS.x(a, i), SCALED_ROTATION_ARGS.w(a, i), SCALED_ROTATION_ARGS.y(a, i)
            f = splat(compute_rms_norm_factor(compute_sum_of_squares(x, n), n, eps))
            for c in range(0, n, LANES):
                store_lanes(y, c, n, mul(mul(load_lanes(x, c, n, 4), f), load_lanes(w, c, n, step)))
            at = 4 * pairs * ((first + i) // rows)
            rotate_row(y, y, offset, pairs, cosines + at, sines + at)
        return 0

    return Kernel(f"rope.scale_and_rotate.{'neighbours' if neighbours else 'halves'}", body)


@dataclass(frozen=True, slots=True)
class RopePairsAndTables:
    """The rotation of a `rope`: its pairs of elements, and the tables of their cosines and sines.

    Attributes:
        uses_neighbours: Whether a pair is two adjacent elements; otherwise they are `pair_count` elements apart.
        pair_count: Pairs of a row.
        first_element: The first rotated element of a row.
        cosines: Cosines [positions, pairs].
        sines: Sines [positions, pairs].
    """

    uses_neighbours: bool
    pair_count: int
    first_element: int
    cosines: Operand
    sines: Operand


def _bind_rope(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the steps of a `rope` or `rope_multi`; return False if kernels cannot compute it."""
    x, y = call.operand(0), call.out
    if not x.is_float or _make_rotation_loop_args(x, y) is None:
        return False
    if not _read_int_attribute(call, "n_dims"):
        return add_copy_step(steps, x, y)
    if not can_read_positions_and_factors(call):
        return False
    turning = find_or_add_pairs_and_tables(steps, call)
    size, pairs, neighbours = y.shape[-1], turning.pair_count, turning.uses_neighbours
    if neighbours and turning.first_element == 0 and 2 * pairs == size and x.is_dense and y.is_dense:
        size = math.gcd(
            size, *(steps.find_column_bounds_written_since_barrier([x]) or ())
        )  # each cut keeps pairs of neighbours
    rows_per_head = y.shape[-1] // size
    column_split = (
        find_continued_column_split(
            steps, [_split_head_rows(x, rows_per_head)], _split_head_rows(y, rows_per_head), whole_rows=True
        )
        if size % 2 == 0
        else None
    )

    def make_thread_work(x: Operand, y: Operand, rows_per_head: int, first: int) -> ThreadWork:
        walk = _make_rotation_loop_args(x, y)
        assert walk is not None
        words = ROTATION_ARGS(
            walk=walk,
            cosines=turning.cosines.address,
            sines=turning.sines.address,
            pairs=pairs // rows_per_head,
            offset=turning.first_element,
            rows_of_position=call.out.shape[-2] * rows_per_head,
            rows_per_head=rows_per_head,
            first=first,
        )
        return ThreadWork(words, [x, turning.cosines, turning.sines], [y])

    if column_split is None:
        whole = make_thread_work(x, y, 1, 0)
        steps.add(make_rope_kernel(neighbours), whole.words, reads=whole.reads, writes=whole.writes)
    else:
        mine = zip(
            column_split.slice_by_thread(_split_head_rows(x, rows_per_head)),
            column_split.slice_by_thread(_split_head_rows(y, rows_per_head)),
            column_split.axis_bounds,
            strict=False,
        )
        shares = [make_thread_work(x, y, rows_per_head, first) if x and y else None for x, y, first in mine]
        steps.add_by_columns(make_rope_kernel(neighbours), shares, [y], column_split.column_bounds)
    return True


def _make_rotation_loop_args(x: Operand, y: Operand) -> list[int] | None:
    """Make the argument words with which the RoPE kernel loops over rows of `x` and `y`: sizes, addresses and strides.

    The result is None if the rows are not dense, or if the loop has too many axes (`make_row_loop_args`).
    """
    walk = make_row_loop_args(y.shape, [x, y], whole_rows=True)
    return None if walk is None or walk[ELEMENT_STRIDE_WORDS] != [4, 4] else walk


def _split_head_rows(x: Operand, rows_per_head: int) -> Operand:
    """Split each row (head) of a dense operand into `rows_per_head` rows."""
    if rows_per_head == 1:
        return x
    size = x.shape[-1] // rows_per_head
    shape = (math.prod(x.shape) // size, size)
    return replace(x, tensor=replace(x.tensor, shape=shape, strides=(size, 1)))


def _read_int_attribute(call: BoundInstruction, name: str) -> int:
    """Return an integer attribute of an instruction."""
    return int(np.asarray(call.attrs[name]))


def can_read_positions_and_factors(call: BoundInstruction) -> bool:
    """Return whether kernels can read the positions and factors of a `rope` or `rope_multi`."""
    pos, factors, multi = call.operand(1), call.optional_operand(2), call.op == "rope_multi"
    if factors is not None and not (factors.is_float and factors.is_dense):
        return False
    return pos.dtype is DType.I32 and (pos.is_dense or len(pos.shape) <= 2 + multi)


def find_or_add_pairs_and_tables(steps: StepTableBuilder, call: BoundInstruction) -> RopePairsAndTables:
    """Return the pairs of a `rope` or `rope_multi`, and the tables of their cosines and sines.

    The step that computes the tables is added unless an earlier step did. The instruction must satisfy
    `can_read_positions_and_factors`.
    """
    pos, factors, multi = call.operand(1), call.optional_operand(2), call.op == "rope_multi"
    half, mode = _read_int_attribute(call, "n_dims") // 2, str(call.attrs["mode"])
    pairs = 2 * half if mode == "vision" else half
    kind = tuple((k, v) for k, v in call.attrs.items() if k not in ("mode" if not multi else "", "offset"))
    key = ("turns", pos.tensor, None if factors is None else factors.tensor, kind)
    angle_tables = steps.find_derived_operands(key)
    if angle_tables is None:
        plane, index = (
            map_pairs_to_positions_and_frequencies(pairs, _read_sections_attribute(call), mode)
            if multi
            else (np.zeros(pairs, np.int64), None)
        )
        angle_tables = _add_cos_and_sin_step(steps, call, compute_rope_frequencies(half, call.attrs, index), plane)
        steps.register_derived_operands(key, angle_tables, [pos] if factors is None else [pos, factors])
    return RopePairsAndTables(
        mode == "normal", pairs, _read_int_attribute(call, "offset"), angle_tables[0], angle_tables[1]
    )


def _read_sections_attribute(call: BoundInstruction) -> tuple[int, ...]:
    return cast("tuple[int, ...]", call.attrs["sections"])


def _add_cos_and_sin_step(
    steps: StepTableBuilder,
    call: BoundInstruction,
    frequencies: tuple[npt.NDArray[Any], float],
    plane: npt.NDArray[Any],
) -> Sequence[Operand]:
    """Add the step that computes the cosines and sines of RoPE for all positions; return both tables.

    Args:
        steps: The steps of the program.
        call: The `rope` or `rope_multi`.
        frequencies: The frequency of each pair, and the magnitude of the rotation.
        plane: For each pair, the number of the row of positions that it uses (`rope_multi` has several rows).
    """
    (inverse, magnitude), pos, factors = frequencies, call.operand(1), call.optional_operand(2)
    *outer, position_stride = pos.strides
    between = 4 * outer.pop() if call.op == "rope_multi" else 0
    run, count = pos.shape[-1], pos.shape[-1] * math.prod(pos.shape[: len(outer)])
    cosines, sines = (steps.allocate_memory(4 * count * len(plane)) for _ in range(2))
    further, speeds = steps.constant(between * plane.astype(np.int64)), steps.constant(np.asarray(inverse, np.float64))
    words = ANGLE_ARGS(
        positions=pos.address,
        count=count,
        run=run,
        run_bytes=4 * outer[-1] if outer else 0,
        position_bytes=4 * position_stride,
        further=further.address,
        frequency=speeds.address,
        divisors=0 if factors is None else factors.address,
        pairs=len(plane),
        magnitude=float32_bits(magnitude),
        cosines=cosines.address,
        sines=sines.address,
    )
    reads = [pos] if factors is None else [pos, factors]
    steps.add(compute_cos_and_sin_tables, words, reads=reads, writes=[cosines, sines])
    return cosines, sines


def _fuse_norm_and_rotation(flow: Dataflow, number: int) -> FusedBinding:
    """Fuse the RMS norm of each head, the multiplication by its weights, and the rotation (RoPE)."""
    chain = match_normed_rope(flow, number)
    norm, product, rope = map(flow.bound_instruction, chain)
    x, factors, y = norm.operand(0), product.operand(1), rope.out
    require_supported(
        rope.op == "rope" and _read_int_attribute(rope, "n_dims") and can_read_positions_and_factors(rope),
        "the rotation has no kernel",
    )
    require_supported(norm.out.shape == product.out.shape == y.shape and x.is_float and factors.is_float, "rows differ")
    require_supported(_make_norm_rotation_loop_args(x, factors, y) is not None, "operands have no rows")
    require_no_alias(y, [factors], [x])
    return FusedBinding(chain, partial(_add_norm_and_rotation, norm=norm, product=product, rope=rope))


def _add_norm_and_rotation(
    steps: StepTableBuilder, norm: BoundInstruction, product: BoundInstruction, rope: BoundInstruction
) -> None:
    """Add the step of an RMS norm with weights, followed by the rotation (RoPE)."""
    x, factors, y, turning = norm.operand(0), product.operand(1), rope.out, find_or_add_pairs_and_tables(steps, rope)

    def make_thread_work(x: Operand, factors: Operand, y: Operand, first: int) -> ThreadWork:
        walk = _make_norm_rotation_loop_args(x, factors, y)
        assert walk is not None
        words = SCALED_ROTATION_ARGS(
            walk=walk,
            eps=norm.float_attribute_bits("eps"),
            cosines=turning.cosines.address,
            sines=turning.sines.address,
            pairs=turning.pair_count,
            offset=turning.first_element,
            rows_of_position=rope.out.shape[-2],
            first=first,
        )
        return ThreadWork(words, [x, factors, turning.cosines, turning.sines], [y])

    kernel = make_norm_and_rope_kernel(turning.uses_neighbours)
    if (column_split := find_continued_column_split(steps, [x], y, whole_rows=True)) is not None:
        slices = zip(
            *(column_split.slice_by_thread(o) for o in (x, factors, y)), column_split.axis_bounds, strict=False
        )
        shares = [make_thread_work(x, w, y, first) if x and w and y else None for x, w, y, first in slices]
        steps.add_by_columns(kernel, shares, [y], column_split.column_bounds)
    else:
        whole = make_thread_work(x, factors, y, 0)
        steps.add(kernel, whole.words, reads=whole.reads, writes=whole.writes)


def _make_norm_rotation_loop_args(x: Operand, factors: Operand, y: Operand) -> list[int] | None:
    """Make the argument words with which the fused norm and RoPE kernel loops over rows: sizes, addresses and strides.

    The result is None if rows of `x` or `y` are not dense, or if the loop has too many axes (`make_row_loop_args`).
    """
    walk = make_row_loop_args(y.shape, [x, factors, y], whole_rows=True)
    return None if walk is None or walk[ELEMENT_STRIDE_WORDS][::2] != [4, 4] else walk


FUSED: Mapping[str, tuple[FusionMatcher, ...]] = {"rms_norm": (_fuse_norm_and_rotation,)}
BINDINGS = {"rope": _bind_rope, "rope_multi": _bind_rope}
