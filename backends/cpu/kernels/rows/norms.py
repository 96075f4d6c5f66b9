"""Norms of rows, and fused norms with factors and quantisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from ....fusion.dataflow import Dataflow, require_no_alias
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ....fusion.patterns import match_scaled_norm
from ...compilation.compiler import kernel, subroutine
from ...simd.vectors import LANES, add, fma, lane_sum, mul, splat, sqrt_scalar, zeros
from ...steps.column_split import find_continued_column_split
from ...steps.partition import compute_thread_range
from ...steps.step_table import FusedBinding, FusionMatcher, StepTableBuilder, ThreadWork
from ..matmul.packed_matmul import find_result_read_forms, make_memory_for_redundant_results
from ..packed.activation_quantisation import ThreadResultTarget, quantise_row_to_targets
from ..vector.elementwise import (
    load_lanes,
    make_row_args,
    store_lanes,
)
from ..vector.row_loops import ELEMENT_STRIDE_WORDS, make_row_loop_args

FLOAT_ONE = np.float32(1)


@subroutine
def compute_sum_of_squares(x, n):
    """Return the sum of squares of the `n` float32 at address `x`."""
    first, second = zeros(), zeros()
    c = 0
    while c + 2 * LANES <= n:
        v, w = load_lanes(x, c, n, 4), load_lanes(x, c + LANES, n, 4)
        first, second = fma(v, v, first), fma(w, w, second)
        c += 2 * LANES
    while c < n:
        v = load_lanes(x, c, n, 4)
        first = fma(v, v, first)
        c += LANES
    return lane_sum(add(first, second))


@subroutine
def compute_rms_norm_factor(square_sum, n, eps):
    """Return the factor of RMS norm: ``1 / sqrt(square_sum / n + eps)``."""
    return FLOAT_ONE / sqrt_scalar(square_sum / np.float32(n) + eps)


@subroutine
def compute_l2_norm_factor_with_limit(square_sum, n, eps):
    """Return the factor of L2 norm with a lower limit: ``1 / max(sqrt(square_sum), eps)``, the definition of ggml."""
    return FLOAT_ONE / max(sqrt_scalar(square_sum), eps)


@subroutine
def compute_l2_norm_factor_with_added_eps(square_sum, n, eps):
    """Return the factor of L2 norm with added eps: ``1 / sqrt(square_sum + eps)``."""
    return FLOAT_ONE / sqrt_scalar(square_sum + eps)


NORM_FACTORS = {
    "rms_norm": compute_rms_norm_factor,
    "l2_norm": compute_l2_norm_factor_with_limit,
    "l2_norm_added": compute_l2_norm_factor_with_added_eps,
}


SCALED_NORM_ARGS = make_row_args("x w y", "eps:f32 between rounding[*]")
"""`between`: bytes from thread to thread of the result; `rounding`: `ThreadResultTarget.rounding_words`."""
ROUNDING_WORD = SCALED_NORM_ARGS.first_word_index("rounding")


@kernel
def scaled_rms_norm(a, thread, threads):
    """Compute ``y = rms_norm(x) * w`` for each row, and quantise y for the matmuls that read it."""
    n, step, eps = SCALED_NORM_ARGS.columns(a), SCALED_NORM_ARGS.w_step(a), SCALED_NORM_ARGS.eps(a)
    lo, hi = compute_thread_range(SCALED_NORM_ARGS.rows(a), thread, threads)
    for i in range(lo, hi):
        x, w = SCALED_NORM_ARGS.x(a, i), SCALED_NORM_ARGS.w(a, i)
        y = SCALED_NORM_ARGS.y(a, i) + thread * SCALED_NORM_ARGS.between(a)
        f = splat(compute_rms_norm_factor(compute_sum_of_squares(x, n), n, eps))
        for c in range(0, n, LANES):
            store_lanes(y, c, n, mul(mul(load_lanes(x, c, n, 4), f), load_lanes(w, c, n, step)))
        quantise_row_to_targets(a, ROUNDING_WORD, i, y, n)
    return 0


def select_norm_factor_name(call: BoundInstruction) -> str:
    """Return the key of `NORM_FACTORS` for an RMS norm or L2 norm: the formula of its factor."""
    return "l2_norm_added" if call.op == "l2_norm" and not call.attrs["clamp"] else call.op


def _fuse_scaled_norm_before_matmul(flow: Dataflow, number: int) -> FusedBinding:
    """Fuse an RMS norm with the multiplication by its weights, if a matmul reads the product."""
    chain = match_scaled_norm(flow, number)
    norm, product = map(flow.bound_instruction, chain)
    readers = flow.find_readers(chain.factor) or ()
    require_supported(
        any(flow.bound_instruction(n).op in ("mul_mat", "mul_mat_id") for n in readers), "no matmul reads the product"
    )
    x, factors, y = norm.operand(0), product.operand(1), product.out
    require_supported(
        norm.out.shape == y.shape and x.is_float and factors.is_float, "rows are not multiplied by float32 factors"
    )
    whole = _make_scaled_rms_norm_work(norm, x, factors, y)
    require_supported(whole is not None, "operands have no rows")
    assert whole is not None
    require_no_alias(y, [factors], [x])
    bind = partial(_add_scaled_rms_norm, norm=norm, product=product, whole=whole)
    return FusedBinding(chain, bind, is_repeated=True)


def _add_scaled_rms_norm(
    steps: StepTableBuilder, norm: BoundInstruction, product: BoundInstruction, whole: ThreadWork
) -> None:
    """Add the step of an RMS norm with weights, which also quantises its result for packed matmuls.

    If only matmuls read the result, each thread computes all of it for itself.
    """
    x, factors, y = norm.operand(0), product.operand(1), product.out
    if (column_split := find_continued_column_split(steps, [x], y, whole_rows=True)) is not None:
        slices = zip(*(column_split.slice_by_thread(o) for o in (x, factors, y)), strict=True)
        shares = [None if None in each else _make_scaled_rms_norm_work(norm, *each) for each in slices]
        steps.add_by_columns(scaled_rms_norm, shares, [y], column_split.column_bounds)
    elif _add_quantised_scaled_rms_norm(steps, norm, product, factors):
        pass
    elif (own := make_memory_for_redundant_results(steps, product)) is not None:
        steps.add_per_thread(scaled_rms_norm, [_make_scaled_rms_norm_work(norm, x, factors, to) for to in own])
        steps.register_per_thread_values(own, y)
    else:
        steps.add(scaled_rms_norm, whole.words, reads=whole.reads, writes=whole.writes)


def _add_quantised_scaled_rms_norm(
    steps: StepTableBuilder, norm: BoundInstruction, product: BoundInstruction, factors: Operand
) -> bool:
    """Add the step of an RMS norm with weights that also quantises its result; return False if a plain norm is better.

    A plain norm is better if all readers use float32, or if a separate quantisation step is faster.
    """
    consumers, x, y = find_result_read_forms(steps, product), norm.operand(0), product.out
    each = steps.threads > 1 and consumers.is_shared_by_threads and steps.is_cheap_to_repeat_per_thread([y])
    shares_columns = steps.threads > 1 and consumers.is_shared_by_threads and consumers.rows == 1 and not each
    if not consumers.quantised_tensors or shares_columns:
        return False
    own = make_memory_for_redundant_results(steps, product) if each and consumers.needs_floats else None
    if each and consumers.needs_floats and own is None and any(y.region.overlaps(o.region) for o in (x, factors)):
        return False  # a thread would overwrite operands of other threads
    records, passing = (
        consumers.make_quantised_row_memory_per_thread(steps, shared=not each),
        consumers.view_thread_row_as_result_rows(steps),
    )
    alone: Sequence[Operand | None] = [y if consumers.needs_floats else None, *[None] * (steps.threads - 1)]
    targets = [consumers.make_thread_target(*operands) for operands in zip(own or alone, passing, records, strict=True)]
    shares = [_make_scaled_rms_norm_work(norm, x, factors, to.float_rows, to) for to in targets]
    if each:
        steps.add_per_thread(scaled_rms_norm, shares)
    elif (whole := shares[0]) is not None:
        moved = x.tensor.spec.nbytes + y.tensor.spec.nbytes
        steps.add(scaled_rms_norm, whole.words, reads=whole.reads, writes=whole.writes, nbytes=moved)
    if own is not None:
        steps.register_per_thread_values(own, y)
    consumers.register_quantised_rows(steps, records)
    return True


def _make_scaled_rms_norm_work(
    norm: BoundInstruction, x: Operand, factors: Operand, y: Operand, to: ThreadResultTarget | None = None
) -> ThreadWork | None:
    """Make the argument words and accesses of one thread for the kernel `scaled_rms_norm`.

    The result is None if the kernel cannot loop over the rows.
    """
    walk, to = make_row_loop_args(y.shape, [x, factors, y], whole_rows=True), to or ThreadResultTarget(y, [y])
    if walk is None or walk[ELEMENT_STRIDE_WORDS][::2] != [4, 4]:
        return None
    words = SCALED_NORM_ARGS(
        walk=walk, eps=norm.float_attribute_bits("eps"), between=to.thread_stride_bytes, rounding=to.rounding_words
    )
    return ThreadWork(words, [x, factors], to.writes)


FUSED: Mapping[str, tuple[FusionMatcher, ...]] = {"rms_norm": (_fuse_scaled_norm_before_matmul,)}
