"""Prefill attention by AMX tiles: tiles of 64 keys times blocks of 32 tokens, with online softmax.

SIMD lanes are tokens. Scores ``K Q^T`` and results ``V^T P^T`` are products of matrices (`amx_matrices`): keys are
rows, values are columns, and the weights of a pair of keys are adjacent. A job is a block of tokens of one head and a
tile. The tile unit computes its scores, vector code its weights, the tile unit its results. While vector code computes
the weights of one job, the tile unit computes the scores of the next job and the results of the job before. Its
products are spread over the rows of weights.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from .....graph.dtypes import DType
from ...compilation.compiler import Kernel, Subroutine, subroutine
from ...simd.amx import TILE_MEMORY_BYTES
from ...simd.permute_lanes import transpose_16x16
from ...simd.vectors import (
    LANES,
    add,
    count_leading_zeros,
    count_trailing_zeros,
    div,
    greater_bitmask,
    load,
    load_long,
    load_scalar,
    mul,
    splat,
    store,
    store_long,
    sub,
    where_less,
    zeros,
)
from ..vector.amx_tiles import select_amx_tile_operations
from ..vector.elementwise import store_lanes
from .amx_matrices import (
    CLEAR_SUMS,
    LOAD_SUMS,
    MATRIX_BYTES,
    MATRIX_SIZE,
    QUERY_TERMS,
    ROW_BYTES,
    STEP_BYTES,
    STORE_SUMS,
    TERM_BYTES,
    WEIGHT_TERMS,
    append_dummy_step_for_preloading,
    convert_query_lanes_to_bf16_matrix,
    count_bf16_terms,
    make_append_matmul_steps,
    make_convert_rows_to_bf16_matrices,
    make_load_amx_sums_and_terms,
    make_run_amx_steps,
    make_transpose_padded_rows_to_bf16,
    store_weight_terms,
)
from .amx_matrices import TILE as GROUP
from .key_blocks import find_key_address
from .prefill_attention import (
    ARGS,
    load_mask_tile_with_token_lanes,
    make_prefill_kernel_over_token_spans,
    scale_and_copy_padded_rows,
    store_32_floats,
)
from .softmax_scores import (
    FLOAT_ONE,
    FLOAT_ZERO,
    HEAD_BYTES,
    HEAD_KEY,
    HEAD_MASK,
    HEAD_OUT,
    HEAD_QUERY,
    HEAD_SLOPE,
    HEAD_VALUE,
    MIN_SCORE,
    apply_soft_cap_and_mask,
    exp2_of_nonpositive,
    load_sink_score_in_log2,
    max_or_second,
)
from .visible_keys import BLOCK_TOKENS, TILE_KEYS, store_visible_key_bits_per_8_tokens

JOBS_PER_TILE = 24
"""Approximate number of jobs of a unit per tile."""
TILE_HALVES = TILE_KEYS // MATRIX_SIZE
QUERY_BYTES, WEIGHT_BYTES = QUERY_TERMS * TERM_BYTES, WEIGHT_TERMS * TERM_BYTES
"""Bytes of a matrix of queries, and of a matrix of weights."""
JOB_QUERIES, JOB_RESULTS, JOB_STATE, JOB_MASK, JOB_HEAD, JOB_FIRST, JOB_LAST = range(0, 56, 8)
JOB_BYTES = 64
"""Bytes of a job: addresses of queries, results, softmax state, mask (or 0) and head; range of visible tile halves."""
MAX_STEPS = 8
"""Largest number of steps of a product."""
BEGUN_OFFSET, STATE_BYTES = 256, 320
"""Offset of the word that says whether results exist, behind the softmax state; bytes of a state."""
RESCALE_SLACK = np.float32(8)
"""Largest excess, in powers of two, of a score over the reference score of the weights."""


def compute_prefill_scratch_bytes_per_thread(rows: int, size: int, width: int) -> int:
    """Return the scratch bytes per thread for `rows` pairs (head, token), key size `size` and value size `width`."""
    deep, wide = max(1, math.ceil(size / MATRIX_SIZE)), math.ceil(width / MATRIX_SIZE)
    matrices, weights = TILE_HALVES * (deep + wide + 2) + deep + 2, 2 * TILE_HALVES * WEIGHT_BYTES
    lists = TILE_HALVES * (MAX_STEPS * (deep + wide) + 1) * STEP_BYTES + 64
    job = QUERY_BYTES * deep + MATRIX_BYTES * (wide + TILE_HALVES) + STATE_BYTES + JOB_BYTES
    return TILE_MEMORY_BYTES + MATRIX_BYTES * matrices + weights + lists + rows // BLOCK_TOKENS * job


@subroutine
def count_32x32_matrices(n):
    """Return how many 32 x 32 matrices cover `n` rows or columns."""
    return (n + MATRIX_SIZE - 1) // MATRIX_SIZE


@subroutine
def compute_thread_scratch_addresses(a, thread):
    """Return the addresses of the parts of a thread's scratch, in this order:

    - tile registers, keys and values of a tile, scores and weights of two jobs,
    - scratch matrices, bits of visible keys, AMX steps,
    - arrays with one entry for each job: queries, results, masks and softmax states.
    """
    deep, wide = max(1, count_32x32_matrices(ARGS.size(a))), count_32x32_matrices(ARGS.width(a))
    jobs = ARGS.shared(a) * ARGS.span(a) // BLOCK_TOKENS
    mine = ARGS.scratch(a) + thread * ARGS.scratch_bytes(a)
    keys = mine + TILE_MEMORY_BYTES
    values = keys + TILE_HALVES * deep * MATRIX_BYTES
    scores = values + TILE_HALVES * wide * MATRIX_BYTES
    weights = scores + 2 * TILE_HALVES * MATRIX_BYTES
    between = weights + 2 * TILE_HALVES * WEIGHT_BYTES
    bits = between + (deep + 2) * MATRIX_BYTES
    steps = bits + 64
    queries = steps + TILE_HALVES * (MAX_STEPS * (deep + wide) + 1) * STEP_BYTES
    results = queries + jobs * deep * QUERY_BYTES
    hidden = results + jobs * wide * MATRIX_BYTES
    states = hidden + jobs * TILE_HALVES * MATRIX_BYTES
    return mine, keys, values, scores, weights, between, bits, steps, queries, results, hidden, states


@subroutine
def load_queries_and_init_with_sink(a, heads, start, end, place):
    """Load queries of tokens `start` to `end` as matrices into the scratch; start softmax with the attention sink."""
    _, _, _, _, _, between, _, _, queries, _, _, states = place
    step, size, deep = ARGS.q_step(a), ARGS.size(a), max(1, count_32x32_matrices(ARGS.size(a)))
    lanes = between + deep * MATRIX_BYTES
    for first in range(start, end, BLOCK_TOKENS):
        for h in range(ARGS.shared(a)):
            head = heads + h * HEAD_BYTES
            rows, pace, sink = load_long(head + HEAD_QUERY) + first * step, step, load_sink_score_in_log2(head)
            if end - first < BLOCK_TOKENS or size != deep * MATRIX_SIZE:
                scale_and_copy_padded_rows(
                    rows, step, end - first, size, FLOAT_ONE, between, BLOCK_TOKENS, deep * MATRIX_SIZE, zeros()
                )
                rows, pace = between, deep * ROW_BYTES
            for c in range(0, deep * ROW_BYTES, ROW_BYTES):
                for r in range(2):
                    at, to = rows + r * LANES * pace + c, lanes + 64 * r
                    transpose_16x16(at, pace, to, ROW_BYTES)
                    transpose_16x16(at + 64, pace, to + LANES * ROW_BYTES, ROW_BYTES)
                convert_query_lanes_to_bf16_matrix(lanes, ARGS.factor(a), queries)
                queries += QUERY_BYTES
            top = splat(max(sink, MIN_SCORE))
            store_32_floats(states, top, top)
            sink_weight = exp2_of_nonpositive(sub(splat(sink), top))
            store_32_floats(states + 128, sink_weight, sink_weight)
            store_long(states + BEGUN_OFFSET, 0)
            states += STATE_BYTES


def _make_convert_kv_tile_to_matrices(k: DType, v: DType) -> Subroutine:
    """Make the subroutine that converts the keys and values of a tile to matrices of bfloat16 terms."""
    load_keys = make_convert_rows_to_bf16_matrices(k, TILE_KEYS)
    load_values = make_transpose_padded_rows_to_bf16(v, TILE_KEYS)

    def load_tile(a, heads, s, place):
        left = ARGS.keys(a) - s
        deep = max(1, count_32x32_matrices(ARGS.size(a)))
        wide = count_32x32_matrices(ARGS.width(a))
        step = ARGS.k_step(a)
        load_keys(find_key_address(heads, HEAD_KEY, s, step), step, left, ARGS.size(a), place[1], deep)
        step = ARGS.v_step(a)
        values = find_key_address(heads, HEAD_VALUE, s, step)
        load_values(values, step, left, ARGS.width(a), place[2], wide, place[5])

    return subroutine(load_tile)


@subroutine
def find_range_of_visible_halves(union):
    """Find the 32-key halves of a 64-key tile with visible keys (bits of `union`); return the range (first, end)."""
    return count_trailing_zeros(union) // MATRIX_SIZE, (
        TILE_KEYS - count_leading_zeros(union) + MATRIX_SIZE - 1
    ) // MATRIX_SIZE


def _make_append_score_steps(k: DType) -> Subroutine:
    """Make the subroutine that appends the products of `keys` and a job's queries to a list of AMX steps.

    A step multiplies two matrix terms. The subroutine is ``(end, job, keys, scores, deep)``: it appends at `end`, and
    returns the new end. `deep` is the number of 32-column matrices along the head size.
    """
    list_steps = make_append_matmul_steps(count_bf16_terms(k), QUERY_TERMS)

    def list_scores(end, job, keys, scores, deep):
        queries = load_long(job + JOB_QUERIES)
        for half in range(load_long(job + JOB_FIRST), load_long(job + JOB_LAST)):
            for d in range(deep):
                a, b, first = keys + (half * deep + d) * MATRIX_BYTES, queries + d * QUERY_BYTES, d == 0
                last = d == deep - 1
                end = list_steps(
                    end, a, b, scores + half * MATRIX_BYTES, CLEAR_SUMS if first else 0, STORE_SUMS if last else 0
                )
        return end

    return subroutine(list_scores)


def _make_append_result_steps(v: DType) -> Subroutine:
    """Make the subroutine ``(end, job, values, weights, wide)`` that appends AMX products of values and weights."""
    list_steps = make_append_matmul_steps(count_bf16_terms(v), WEIGHT_TERMS)

    def list_results(end, job, values, weights, wide):
        result, low, high = load_long(job + JOB_RESULTS), load_long(job + JOB_FIRST), load_long(job + JOB_LAST)
        begun = load_long(job + JOB_STATE) + BEGUN_OFFSET
        begin = LOAD_SUMS if load_long(begun) else CLEAR_SUMS
        store_long(begun, 1)
        for w in range(wide):
            for half in range(low, high):
                a, b = values + (w * TILE_HALVES + half) * MATRIX_BYTES, weights + half * WEIGHT_BYTES
                first, last = half == low, half == high - 1
                end = list_steps(end, a, b, result + w * MATRIX_BYTES, begin if first else 0, STORE_SUMS if last else 0)
        return end

    return subroutine(list_results)


@subroutine
def apply_soft_cap_and_mask_to_keys(scores, n, lane_mask, cap, slope):
    """Apply the soft cap `cap` and the mask at `lane_mask`, times the ALiBi `slope`, to scores of `n` keys in place."""
    for r in range(0, n * ROW_BYTES, ROW_BYTES):
        h = g = zeros()
        if lane_mask != 0:
            h, g = load(lane_mask + r), load(lane_mask + r + 64)
        store_32_floats(
            scores + r,
            apply_soft_cap_and_mask(load(scores + r), h, cap, slope),
            apply_soft_cap_and_mask(load(scores + r + 64), g, cap, slope),
        )


@subroutine
def update_max_score_of_32_tokens(scores, n, x, y):
    """Return the maximum of `x`, `y` (32 tokens) and their scores of `n` keys; 4 chains of maxima hide the latency."""
    x1 = x2 = x3 = x
    y1 = y2 = y3 = y
    for r in range(scores, scores + n * ROW_BYTES, 4 * ROW_BYTES):
        x, y = max_or_second(load(r), x), max_or_second(load(r + 64), y)
        x1, y1 = max_or_second(load(r + ROW_BYTES), x1), max_or_second(load(r + ROW_BYTES + 64), y1)
        x2, y2 = max_or_second(load(r + 2 * ROW_BYTES), x2), max_or_second(load(r + 2 * ROW_BYTES + 64), y2)
        x3, y3 = max_or_second(load(r + 3 * ROW_BYTES), x3), max_or_second(load(r + 3 * ROW_BYTES + 64), y3)
    return max_or_second(max_or_second(x, x1), max_or_second(x2, x3)), max_or_second(
        max_or_second(y, y1), max_or_second(y2, y3)
    )


@subroutine
def rescale_softmax_state(state, x, y, result, rows):
    """Store the new maximal scores `x`, `y` of 32 tokens, and rescale their weight sums and `rows` rows of results."""
    h, g = exp2_of_nonpositive(sub(load(state), x)), exp2_of_nonpositive(sub(load(state + 64), y))
    store_32_floats(state, x, y)
    store_32_floats(state + 128, mul(load(state + 128), h), mul(load(state + 192), g))
    for r in range(result, result + rows * ROW_BYTES, ROW_BYTES):
        store_32_floats(r, mul(load(r), h), mul(load(r + 64), g))


@subroutine
def store_softmax_weights_of_two_keys(scores, x, y, to, sums, more):
    """Store softmax weights of two keys for 32 tokens as pairs at `to`; add them to `sums` and `more`."""
    u, v = exp2_of_nonpositive(sub(load(scores), x)), exp2_of_nonpositive(sub(load(scores + ROW_BYTES), x))
    store_weight_terms(to, TERM_BYTES, u, v)
    sums = add(sums, add(u, v))
    u, v = exp2_of_nonpositive(sub(load(scores + 64), y)), exp2_of_nonpositive(sub(load(scores + ROW_BYTES + 64), y))
    store_weight_terms(to + GROUP, TERM_BYTES, u, v)
    return sums, add(more, add(u, v))


@cache
def _make_compute_weights_during_amx_steps() -> Subroutine:
    """Make the subroutine that converts a job's scores to softmax weights, and runs AMX steps of other jobs meanwhile.

    The subroutine is ``(a, mine, job, scores, weights, at, end)``; it runs the AMX steps from address `at` to `end`. A
    job is 32 tokens of one head and a tile of keys. An AMX step is a product of two 32 x 32 matrices of bfloat16.
    """
    run_steps = make_run_amx_steps()

    def compute_weights(a, mine, job, scores, weights, at, end):
        state, lane_mask, cap = load_long(job + JOB_STATE), load_long(job + JOB_MASK), ARGS.cap(a)
        first, last = load_long(job + JOB_FIRST), load_long(job + JOB_LAST)
        stop = min(at + STEP_BYTES, end)
        run_steps(mine, at, stop)
        if cap > FLOAT_ZERO or lane_mask != 0:
            slope = load_scalar(load_long(job + JOB_HEAD) + HEAD_SLOPE)
            apply_soft_cap_and_mask_to_keys(
                scores + first * MATRIX_BYTES,
                (last - first) * MATRIX_SIZE,
                lane_mask and lane_mask + first * MATRIX_BYTES,
                cap,
                slope,
            )
        x, y = load(state), load(state + 64)
        u, v = update_max_score_of_32_tokens(scores + first * MATRIX_BYTES, (last - first) * MATRIX_SIZE, x, y)
        if greater_bitmask(u, add(x, splat(RESCALE_SLACK))) | greater_bitmask(v, add(y, splat(RESCALE_SLACK))):
            x, y = u, v
            rows = load_long(state + BEGUN_OFFSET) * count_32x32_matrices(ARGS.width(a)) * MATRIX_SIZE
            rescale_softmax_state(state, x, y, load_long(job + JOB_RESULTS), rows)
        sums, more = load(state + 128), load(state + 192)
        pace, due, whole = (end - stop) // STEP_BYTES, 0, (last - first) * LANES * STEP_BYTES
        for half in range(first, last):
            to, rows = weights + half * WEIGHT_BYTES, scores + half * MATRIX_BYTES
            for r in range(rows, rows + MATRIX_BYTES, 2 * ROW_BYTES):
                due += pace * STEP_BYTES
                while due >= whole:
                    run_steps(mine, stop, stop + STEP_BYTES)
                    stop, due = stop + STEP_BYTES, due - whole
                sums, more = store_softmax_weights_of_two_keys(r, x, y, to, sums, more)
                to += 64
        store_32_floats(state + 128, sums, more)

    return subroutine(compute_weights)


def _make_run_jobs_in_pipeline(k: DType, v: DType) -> Subroutine:
    """Make the pipeline of jobs: round i computes scores of job i, weights of job i - 1, and results of job i - 2.

    A job is the attention of 32 tokens of one head to a tile of keys.
    """
    run_steps = make_run_amx_steps()
    begin_steps = make_load_amx_sums_and_terms()
    compute_weights = _make_compute_weights_during_amx_steps()
    list_scores, list_results = _make_append_score_steps(k), _make_append_result_steps(v)

    def attend_jobs(a, jobs, count, place):
        mine, keys, values, scores, weights, _, _, steps, _, _, _, _ = place
        deep, wide = max(1, count_32x32_matrices(ARGS.size(a))), count_32x32_matrices(ARGS.width(a))
        for i in range(count + 2):
            end, job, even, odd = steps, jobs + i * JOB_BYTES, i % 2 * TILE_HALVES, (i + 1) % 2 * TILE_HALVES
            if i < count:
                end = list_scores(end, job, keys, scores + even * MATRIX_BYTES, deep)
            if i >= 2:
                end = list_results(end, job - 2 * JOB_BYTES, values, weights + even * WEIGHT_BYTES, wide)
            if end > steps:
                append_dummy_step_for_preloading(end)
                begin_steps(mine, steps)
            if 0 < i <= count:
                compute_weights(
                    a, mine, job - JOB_BYTES, scores + odd * MATRIX_BYTES, weights + odd * WEIGHT_BYTES, steps, end
                )
            else:
                run_steps(mine, steps, end)

    return subroutine(attend_jobs)


def _make_attend_to_tile_unless_hidden(k: DType, v: DType) -> Subroutine:
    """Make the subroutine that adds a tile of keys to the attention of tokens of a head group, if a token sees it."""
    load_tile, attend_jobs = _make_convert_kv_tile_to_matrices(k, v), _make_run_jobs_in_pipeline(k, v)

    def attend_all(a, heads, start, end, s, place):
        shared, keys, step = ARGS.shared(a), ARGS.keys(a), ARGS.mask_step(a)
        _, _, _, _, _, between, bits, _, queries, results, masks, states = place
        deep, wide = max(1, count_32x32_matrices(ARGS.size(a))), count_32x32_matrices(ARGS.width(a))
        jobs = states + shared * ARGS.span(a) // BLOCK_TOKENS * STATE_BYTES
        job = jobs
        for first in range(start, end, BLOCK_TOKENS):
            known, union, lane_mask, count = 0, 0, 0, min(BLOCK_TOKENS, end - first)
            for h in range(shared):
                head = heads + h * HEAD_BYTES
                mask = load_long(head + HEAD_MASK) + first * step
                if mask != known:
                    union, plain = store_visible_key_bits_per_8_tokens(mask, step, count, s, keys, bits)
                    known, lane_mask = mask, 0
                    if union != 0 and not plain:
                        lane_mask = masks
                        load_mask_tile_with_token_lanes(mask + 4 * s, step, count, keys - s, between, lane_mask)
                if union != 0:
                    low, high = find_range_of_visible_halves(union)
                    store_long(job + JOB_QUERIES, queries)
                    store_long(job + JOB_RESULTS, results)
                    store_long(job + JOB_STATE, states)
                    store_long(job + JOB_MASK, lane_mask)
                    store_long(job + JOB_HEAD, head)
                    store_long(job + JOB_FIRST, low)
                    store_long(job + JOB_LAST, high)
                    job += JOB_BYTES
                queries += deep * QUERY_BYTES
                results += wide * MATRIX_BYTES
                states += STATE_BYTES
                masks += TILE_HALVES * MATRIX_BYTES
        if job != jobs:
            load_tile(a, heads, s, place)
            attend_jobs(a, jobs, (job - jobs) // JOB_BYTES, place)

    return subroutine(attend_all)


@subroutine
def normalise_and_store_results(a, heads, start, end, place):
    """Store the attention of tokens `start` to `end` in a head group: weighted sums of values over sums of weights."""
    _, _, _, _, _, between, _, _, _, results, _, states = place
    width, step = ARGS.width(a), ARGS.out_step(a)
    for first in range(start, end, BLOCK_TOKENS):
        for h in range(ARGS.shared(a)):
            if load_long(states + BEGUN_OFFSET) == 0:
                for r in range(0, count_32x32_matrices(width) * MATRIX_BYTES, ROW_BYTES):
                    store_32_floats(results + r, zeros(), zeros())
            for group in range(0, BLOCK_TOKENS, LANES):
                weight = load(states + 128 + 4 * group)
                f = where_less(zeros(), weight, div(splat(FLOAT_ONE), weight), mul(weight, zeros()))  # NaN stays
                target = load_long(heads + h * HEAD_BYTES + HEAD_OUT) + (first + group) * step
                for c in range(0, width, LANES):
                    for r in range(LANES):
                        store(between + 64 * r, mul(load(results + (c + r) * ROW_BYTES + 4 * group), f))
                    if end - first >= BLOCK_TOKENS and c + LANES <= width:
                        transpose_16x16(between, 64, target + 4 * c, step)
                    else:
                        transpose_16x16(between, 64, between + MATRIX_BYTES, 64)
                        for t in range(min(LANES, end - first - group)):
                            store_lanes(target + t * step, c, width, load(between + MATRIX_BYTES + 64 * t))
            states += STATE_BYTES
            results += count_32x32_matrices(width) * MATRIX_BYTES


@cache
def make_prefill_attention_kernel(k: DType, v: DType) -> Kernel:
    """Make the prefill attention kernel that multiplies in AMX tiles, for keys of type `k` and values of type `v`."""
    unit, name = select_amx_tile_operations(), f"amx_attention.attend.{k}.{v}"
    return make_prefill_kernel_over_token_spans(
        name,
        compute_thread_scratch_addresses,
        load_queries_and_init_with_sink,
        _make_attend_to_tile_unless_hidden(k, v),
        normalise_and_store_results,
        unit.configure,
        unit.release,
    )
