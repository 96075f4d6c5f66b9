"""Partial results of attention: of a row and some of the keys. They are merged in the order of the keys.

A partial result has the highest score, then the sum of weights, then the weighted values from `PARTIAL_VALUES_OFFSET`
on. A weight is 2 to the power of a score minus the highest score.
"""

from __future__ import annotations

from ...compilation.compiler import subroutine
from ...simd.vectors import (
    LANES,
    add,
    fma,
    lane_max_without_nan,
    lane_sum,
    load,
    load_scalar,
    mul,
    splat,
    store,
    store_scalar,
    sub,
    zeros,
)
from ..vector.elementwise import store_lanes
from .softmax_scores import FLOAT_ONE, FLOAT_ZERO, MIN_SCORE, exp2_of_nonpositive, exp2_of_nonpositive_scalar

VECTOR_BYTES = 4 * LANES
VALUE_COLUMNS = 64
"""Elements of a value that are summed at once."""
PARTIAL_SUM_OFFSET, PARTIAL_VALUES_OFFSET = 4, 64
"""Offsets into a partial result: first the highest score, then the sum of weights, then the weighted values."""


def compute_row_partial_result_bytes(width: int) -> int:
    """Return the bytes of the attention result of one query over some of the keys, for values of `width` elements.

    Such a partial result has the highest score, the sum of weights and the weighted sum of values.
    """
    return PARTIAL_VALUES_OFFSET + 4 * (-(-width // VALUE_COLUMNS) * VALUE_COLUMNS)


@subroutine
def convert_scores_to_softmax_weights(scores, n, lanes, state, width):
    """Replace the scores of a row by softmax weights, and update the partial result of the row (online softmax).

    Args:
        scores: address of the scores.
        n: count of scores.
        lanes: address of a vector with the highest score of each SIMD lane.
        state: address of the partial result.
        width: elements of a value.
    """
    before = load_scalar(state)
    top = max(lane_max_without_nan(load(lanes)), before)
    highest, sums = splat(top), zeros()
    for s in range(0, n, LANES):
        p = exp2_of_nonpositive(sub(load(scores + 4 * s), highest))
        store(scores + 4 * s, p)
        sums = add(sums, p)
    fewer = exp2_of_nonpositive_scalar(before - top)
    store_scalar(state, top)
    store_scalar(state + PARTIAL_SUM_OFFSET, fewer * load_scalar(state + PARTIAL_SUM_OFFSET) + lane_sum(sums))
    if fewer < FLOAT_ONE:
        for c in range(PARTIAL_VALUES_OFFSET, PARTIAL_VALUES_OFFSET + 4 * width, 4 * LANES):
            store(state + c, mul(load(state + c), splat(fewer)))


@subroutine
def initialise_partial_result(state, span):
    """Initialise the attention result of a query over no keys: zero sums, and the lowest number as highest score.

    Args:
        state: address of the partial result.
        span: bytes of the partial result.
    """
    for c in range(0, span, VECTOR_BYTES):
        store(state + c, zeros())
    store_scalar(state, MIN_SCORE)


@subroutine
def merge_partial_result(state, part, width):
    """Merge the attention result of a query over some keys into the result of the same query over the keys before.

    Args:
        state: address of the partial result that is updated.
        part: address of the partial result of the later keys.
        width: elements of a value.
    """
    if load_scalar(part + PARTIAL_SUM_OFFSET) == FLOAT_ZERO:
        return
    before, after = load_scalar(state), load_scalar(part)
    top = max(before, after)
    f, g = exp2_of_nonpositive_scalar(before - top), exp2_of_nonpositive_scalar(after - top)
    store_scalar(state, top)
    weight = f * load_scalar(state + PARTIAL_SUM_OFFSET) + g * load_scalar(part + PARTIAL_SUM_OFFSET)
    store_scalar(state + PARTIAL_SUM_OFFSET, weight)
    for c in range(PARTIAL_VALUES_OFFSET, PARTIAL_VALUES_OFFSET + 4 * width, VECTOR_BYTES):
        store(state + c, fma(load(part + c), splat(g), mul(load(state + c), splat(f))))


@subroutine
def write_normalised_attention_row(state, sink, out, width):
    """Write the attention result of a row, the weighted mean of its values, from its merged partial result.

    Args:
        state: address of the merged partial result.
        sink: score of the attention sink.
        out: address of the result.
        width: elements of a value.
    """
    top = max(load_scalar(state), max(sink, MIN_SCORE))
    f = exp2_of_nonpositive_scalar(load_scalar(state) - top)
    weight = f * load_scalar(state + PARTIAL_SUM_OFFSET) + exp2_of_nonpositive_scalar(sink - top)
    scale = splat(f * (FLOAT_ONE / weight) if weight != FLOAT_ZERO else FLOAT_ZERO)  # NaN stays NaN
    for c in range(0, width, LANES):
        store_lanes(out, c, width, mul(load(state + PARTIAL_VALUES_OFFSET + 4 * c), scale))
