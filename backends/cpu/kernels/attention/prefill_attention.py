"""Prefill attention by vectors: blocks of 32 tokens times tiles of 64 keys, with online softmax. SIMD lanes are tokens.

1. Copy the keys and values of a tile, so that rows are dense and padded.
2. Compute the scores ``K Q^T`` with `rescale_and_add_8x32_product`.
3. Update the softmax state of each token; scores become weights.
4. Add ``P V`` to the results with `rescale_and_add_8x32_product`.
"""

from __future__ import annotations

import math
from functools import cache

from .....graph.dtypes import DType
from ...compilation.compiler import Kernel, Subroutine, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.permute_lanes import transpose_16x16
from ...simd.vectors import (
    LANES,
    add,
    fma,
    load,
    load_first_lanes_or,
    load_long,
    load_scalar,
    mul,
    splat,
    splat_from,
    store,
    sub,
    zeros,
)
from ...steps.panel_hooks import call_hooks
from ...steps.work_queue import reset_queue_after_last_ticket, take_work_item
from ..vector.amx_tiles import TileOperation, skip_tile_configuration
from ..vector.cache_cells import CELLS_BY_DTYPE, CacheRowReaders
from ..vector.elementwise import store_lanes
from .key_blocks import check_block_numbers, find_key_address
from .softmax_scores import (
    COMMON_ARGS,
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
    MINUS_INFINITY,
    apply_soft_cap_and_mask,
    exp2_of_nonpositive,
    load_sink_score_in_log2,
    max_or_second,
    round_up,
)
from .visible_keys import (
    BLOCK_TOKENS,
    MATRIX_ROWS,
    TILE_KEYS,
    find_set_bit_range_rounded_to_eights,
    store_visible_key_bits_per_8_tokens,
)

ARGS = declare_args(f"{COMMON_ARGS} span tickets hooks[*]")
"""The last words: tokens of a unit, the work queue (`work_queue.take_work_item`), and hooks (`panel_hooks`).

Rows of a panel are tokens, and columns are the values of all heads.
"""
HOOKS_WORD = ARGS.first_word_index("hooks")

JOBS_PER_TILE = 8
"""Approximate number of heads times token blocks that use one copy of a tile."""


def choose_tokens_per_work_unit(jobs: int, units: int, shared: int, tokens: int, threads: int) -> int:
    """Choose the number of tokens of an attention work unit.

    The number is a multiple of `BLOCK_TOKENS` and equal for all units. At most `jobs` pairs of a head and a block of
    tokens use one copy of a key tile. Units are smaller if there would be too few for all threads.
    """
    blocks = math.ceil(tokens / BLOCK_TOKENS)
    fewest = math.ceil(4 * threads / max(1, units)) if threads > 1 else 1
    spans = max(math.ceil(blocks / max(1, jobs // shared)), min(blocks, fewest))
    return math.ceil(blocks / spans) * BLOCK_TOKENS


def compute_prefill_scratch_bytes_per_thread(rows: int, size: int, width: int) -> int:
    """Return the scratch bytes of a thread in prefill attention.

    A work unit has `rows` pairs of a head and a token. Keys have `size` elements, values have `width` elements.
    """
    deep, wide = math.ceil(size / LANES) * LANES, math.ceil(width / BLOCK_TOKENS) * BLOCK_TOKENS
    return 4 * (TILE_KEYS * (deep + wide + 2 * BLOCK_TOKENS) + 16 + BLOCK_TOKENS + rows * (deep + wide + 2))


@subroutine
def scale_and_copy_padded_rows(source, step, rows, size, factor, to, count, wide, otherwise):
    """Multiply rows by a factor and copy them to dense rows, padded to `count` rows and `wide` columns.

    The source has `rows` rows of `size` numbers, `step` bytes apart. The result has `count` rows of `wide` numbers.
    Missing numbers become ``factor * otherwise``.
    """
    for r in range(count):
        for c in range(0, wide, LANES):
            left, at = size - c, source + r * step + 4 * c
            if r >= rows or left <= 0:
                value = otherwise
            elif left >= LANES:
                value = load(at)
            else:
                value = load_first_lanes_or(at, left, otherwise)
            store(to + 4 * (r * wide + c), mul(value, splat(factor)))


@subroutine
def rescale_and_add_8x32_product(a, row, column, b, step, n, to, pace, fades):
    """Add a matrix product to 8 rows of 32 columns: ``to[j] = fades[j] * to[j] + sum over i of a[j, i] * b[i]``.

    Args:
        a: address of the 8 x `n` factors.
        row, column: bytes between rows and between columns of `a`.
        b: address of `n` rows of 32 float32, `step` bytes apart.
        to: address of the 8 rows of results, `pace` bytes apart.
        fades: address of the 8 factors of the old results; 0 means that the old results are overwritten.
    """
    p0, p1, p2, p3, p4, p5, p6, p7 = zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
    q0, q1, q2, q3, q4, q5, q6, q7 = p0, p1, p2, p3, p4, p5, p6, p7
    if fades != 0:
        p0, q0 = load_32_scaled_floats(to, fades)
        p1, q1 = load_32_scaled_floats(to + pace, fades + 4)
        p2, q2 = load_32_scaled_floats(to + 2 * pace, fades + 8)
        p3, q3 = load_32_scaled_floats(to + 3 * pace, fades + 12)
        p4, q4 = load_32_scaled_floats(to + 4 * pace, fades + 16)
        p5, q5 = load_32_scaled_floats(to + 5 * pace, fades + 20)
        p6, q6 = load_32_scaled_floats(to + 6 * pace, fades + 24)
        p7, q7 = load_32_scaled_floats(to + 7 * pace, fades + 28)
    for _ in range(n):
        x, y = load(b), load(b + 64)  # p[j] += a[j, i] * b[i, :16], q[j] += a[j, i] * b[i, 16:]
        u, v = splat_from(a), splat_from(a + row)
        p0, q0, p1, q1 = fma(x, u, p0), fma(y, u, q0), fma(x, v, p1), fma(y, v, q1)
        u, v = splat_from(a + 2 * row), splat_from(a + 3 * row)
        p2, q2, p3, q3 = fma(x, u, p2), fma(y, u, q2), fma(x, v, p3), fma(y, v, q3)
        u, v = splat_from(a + 4 * row), splat_from(a + 5 * row)
        p4, q4, p5, q5 = fma(x, u, p4), fma(y, u, q4), fma(x, v, p5), fma(y, v, q5)
        u, v = splat_from(a + 6 * row), splat_from(a + 7 * row)
        p6, q6, p7, q7 = fma(x, u, p6), fma(y, u, q6), fma(x, v, p7), fma(y, v, q7)
        a += column
        b += step
    store_32_floats(to, p0, q0)
    store_32_floats(to + pace, p1, q1)
    store_32_floats(to + 2 * pace, p2, q2)
    store_32_floats(to + 3 * pace, p3, q3)
    store_32_floats(to + 4 * pace, p4, q4)
    store_32_floats(to + 5 * pace, p5, q5)
    store_32_floats(to + 6 * pace, p6, q6)
    store_32_floats(to + 7 * pace, p7, q7)


@subroutine
def load_32_scaled_floats(rows, factor_address):
    """Load 32 float32, multiply them by the float32 at `factor_address`, and return them as two vectors."""
    f = splat_from(factor_address)
    return mul(load(rows), f), mul(load(rows + 64), f)


@subroutine
def store_32_floats(to, x, y):
    """Store the vectors `x` and `y` as a row of 32 float32 at `to`."""
    store(to, x)
    store(to + 64, y)


@subroutine
def convert_tile_scores_to_softmax_weights(scores, lane_mask, low, high, cap, slope, state, fades):
    """Replace the scores of a tile by softmax weights, and update the online softmax state of each token.

    The state has the highest score and the sum of weights of each token. `fades` receives the factors that rescale
    earlier sums. `lane_mask` is the mask with tokens as lanes, or 0.
    """
    before, other = load(state), load(state + 64)
    x, y, h, g = before, other, zeros(), zeros()
    for r in range(4 * BLOCK_TOKENS * low, 4 * BLOCK_TOKENS * high, 4 * BLOCK_TOKENS):
        u, v = load(scores + r), load(scores + r + 64)
        if cap > FLOAT_ZERO or lane_mask != 0:
            if lane_mask != 0:
                h, g = load(lane_mask + r), load(lane_mask + r + 64)
            u, v = apply_soft_cap_and_mask(u, h, cap, slope), apply_soft_cap_and_mask(v, g, cap, slope)
            store_32_floats(scores + r, u, v)
        x, y = max_or_second(u, x), max_or_second(v, y)
    store_32_floats(state, x, y)
    h, g = exp2_of_nonpositive(sub(before, x)), exp2_of_nonpositive(sub(other, y))
    store_32_floats(fades, h, g)
    sums, more = mul(load(state + 128), h), mul(load(state + 192), g)
    for r in range(4 * BLOCK_TOKENS * low, 4 * BLOCK_TOKENS * high, 4 * BLOCK_TOKENS):
        u, v = exp2_of_nonpositive(sub(load(scores + r), x)), exp2_of_nonpositive(sub(load(scores + r + 64), y))
        store_32_floats(scores + r, u, v)
        sums, more = add(sums, u), add(more, v)
    store_32_floats(state + 128, sums, more)


@subroutine
def compute_thread_scratch_addresses(a, thread):
    """Return the addresses of the parts of a thread's scratch, in this order:

    1. keys, values, scores and mask of a tile,
    2. bits of visible keys,
    3. factors that rescale earlier sums (`fades`),
    4. queries, softmax states and results of each block of tokens and each head.
    """
    deep, wide = round_up(ARGS.size(a), LANES), round_up(ARGS.width(a), BLOCK_TOKENS)
    rows = ARGS.shared(a) * ARGS.span(a)
    keys = ARGS.scratch(a) + thread * ARGS.scratch_bytes(a)
    values = keys + 4 * TILE_KEYS * deep
    p = values + 4 * TILE_KEYS * wide
    hidden = p + 4 * TILE_KEYS * BLOCK_TOKENS
    bits = hidden + 4 * TILE_KEYS * BLOCK_TOKENS
    fades = bits + 64
    queries = fades + 4 * BLOCK_TOKENS
    states = queries + 4 * rows * deep
    return keys, values, p, hidden, bits, fades, queries, states, states + 8 * rows


@subroutine
def load_query_lanes_and_init_softmax(a, heads, start, end, place):
    """Load the scaled queries of tokens `start` to `end` in a head group, and initialise softmax states and results.

    Lanes are tokens. A softmax state begins with the score of the attention sink, a result with 0. `heads` is the
    address of the first head in the head table, `place` the scratch layout.
    """
    keys, _, _, _, _, _, queries, states, results = place
    step, size, deep = ARGS.q_step(a), ARGS.size(a), round_up(ARGS.size(a), LANES)
    for first in range(start, end, BLOCK_TOKENS):
        for h in range(ARGS.shared(a)):
            head = heads + h * HEAD_BYTES
            query, sink = load_long(head + HEAD_QUERY) + first * step, load_sink_score_in_log2(head)
            scale_and_copy_padded_rows(
                query, step, end - first, size, ARGS.factor(a), keys, BLOCK_TOKENS, deep, zeros()
            )
            for c in range(0, deep, LANES):
                to = queries + 4 * BLOCK_TOKENS * c
                transpose_16x16(keys + 4 * c, 4 * deep, to, 4 * BLOCK_TOKENS)
                transpose_16x16(keys + 4 * (LANES * deep + c), 4 * deep, to + 64, 4 * BLOCK_TOKENS)
            top = splat(max(sink, MIN_SCORE))
            store_32_floats(states, top, top)
            sink_weight = exp2_of_nonpositive(sub(splat(sink), top))
            store_32_floats(states + 128, sink_weight, sink_weight)
            for c in range(0, 4 * BLOCK_TOKENS * round_up(ARGS.width(a), BLOCK_TOKENS), 64):
                store(results + c, zeros())
            queries += 4 * BLOCK_TOKENS * deep
            states += 8 * BLOCK_TOKENS
            results += 4 * BLOCK_TOKENS * round_up(ARGS.width(a), BLOCK_TOKENS)


def _make_copy_rows_as_padded_f32(cells: CacheRowReaders) -> Subroutine:
    """Make the subroutine ``(source, step, rows, size, to, wide)`` that copies tile rows to zero-padded float32."""
    load_first = cells.load_first

    def copy_tile_rows(source, step, rows, size, to, wide):
        for r in range(TILE_KEYS):
            for c in range(0, wide, LANES):
                row = source + r * step
                store(to + 4 * (r * wide + c), load_first(row, c, size) if r < rows and c < size else zeros())

    return subroutine(copy_tile_rows)


def _make_zero_padded_kv_tile_copy(k: DType, v: DType) -> Subroutine:
    """Make the subroutine that copies the keys and values of a tile to dense, zero-padded float32 rows."""
    copy_keys = _make_copy_rows_as_padded_f32(CELLS_BY_DTYPE[k])
    copy_values = _make_copy_rows_as_padded_f32(CELLS_BY_DTYPE[v])

    def copy_tile(a, heads, s, place):
        keys, values, left = place[0], place[1], ARGS.keys(a) - s
        size, width, pace = ARGS.size(a), ARGS.width(a), ARGS.k_step(a)
        copy_keys(find_key_address(heads, HEAD_KEY, s, pace), pace, left, size, keys, round_up(size, LANES))
        pace, wide = ARGS.v_step(a), round_up(width, BLOCK_TOKENS)
        copy_values(find_key_address(heads, HEAD_VALUE, s, pace), pace, left, width, values, wide)

    return subroutine(copy_tile)


@subroutine
def load_mask_tile_with_token_lanes(mask, step, count, left, scratch, lane_mask):
    """Load the mask of a key tile, padded with -inf, and transpose it to `lane_mask`, in which lanes are tokens.

    `mask` has `count` rows (tokens), `step` bytes apart, with `left` keys from the first key of the tile on.
    """
    scale_and_copy_padded_rows(
        mask, step, count, left, FLOAT_ONE, scratch, BLOCK_TOKENS, TILE_KEYS, splat(MINUS_INFINITY)
    )
    for r in range(0, TILE_KEYS, LANES):
        transpose_16x16(scratch + 4 * r, 4 * TILE_KEYS, lane_mask + 4 * BLOCK_TOKENS * r, 4 * BLOCK_TOKENS)
        transpose_16x16(
            scratch + 4 * (LANES * TILE_KEYS + r),
            4 * TILE_KEYS,
            lane_mask + 4 * BLOCK_TOKENS * r + 64,
            4 * BLOCK_TOKENS,
        )


@subroutine
def attend_token_block_to_tile(a, count, union, lane_mask, slope, queries, state, result, place):
    """Add a tile of keys to the attention of a block of tokens of one head: compute scores, weights and results.

    The block has `count` tokens; the bits of `union` are the keys that any of them sees. `lane_mask` is the address of
    the mask with tokens as lanes, or 0 without a mask. `slope` is the ALiBi slope of the head. `queries`, `state` and
    `result` are addresses of the queries, softmax states and results of the block.
    """
    keys, values, p, _, bits, fades, _, _, _ = place
    size, wide = ARGS.size(a), round_up(ARGS.width(a), BLOCK_TOKENS)
    low, high = find_set_bit_range_rounded_to_eights(union)
    row = 4 * round_up(size, LANES)
    for r in range(low, high, MATRIX_ROWS):
        rescale_and_add_8x32_product(
            keys + r * row, row, 4, queries, 4 * BLOCK_TOKENS, size, p + 4 * BLOCK_TOKENS * r, 4 * BLOCK_TOKENS, 0
        )
    convert_tile_scores_to_softmax_weights(p, lane_mask, low, high, ARGS.cap(a), slope, state, fades)
    for t in range(0, count, MATRIX_ROWS):
        low, high = find_set_bit_range_rounded_to_eights(load_long(bits + t))
        at, to = values + 4 * low * wide, result + 4 * t * wide
        for c in range(0, 4 * wide, 4 * BLOCK_TOKENS):
            weights = p + 4 * (BLOCK_TOKENS * low + t)
            rescale_and_add_8x32_product(
                weights, 4, 4 * BLOCK_TOKENS, at + c, 4 * wide, high - low, to + c, 4 * wide, fades + 4 * t
            )


def _make_attend_to_tile_unless_hidden(k: DType, v: DType) -> Subroutine:
    """Make the subroutine that adds a tile of keys to the attention of the tokens of a head group.

    The mask is applied. A tile that it hides from all tokens is skipped.
    """
    copy_tile = _make_zero_padded_kv_tile_copy(k, v)

    def attend_all(a, heads, start, end, s, place):
        shared, keys, step = ARGS.shared(a), ARGS.keys(a), ARGS.mask_step(a)
        _, _, _, lane_mask, bits, _, queries, states, results = place
        deep, wide = round_up(ARGS.size(a), LANES), round_up(ARGS.width(a), BLOCK_TOKENS)
        ready = False
        for first in range(start, end, BLOCK_TOKENS):
            known, union, plain, count = 0, 0, False, min(BLOCK_TOKENS, end - first)
            for h in range(shared):
                head = heads + h * HEAD_BYTES
                mask = load_long(head + HEAD_MASK) + first * step
                if mask != known:
                    union, plain = store_visible_key_bits_per_8_tokens(mask, step, count, s, keys, bits)
                    known = mask
                    if union != 0 and not plain:
                        load_mask_tile_with_token_lanes(mask + 4 * s, step, count, keys - s, place[2], lane_mask)
                if union != 0:
                    if not ready:
                        copy_tile(a, heads, s, place)
                        ready = True
                    slope = load_scalar(head + HEAD_SLOPE)
                    attend_token_block_to_tile(
                        a, count, union, 0 if plain else lane_mask, slope, queries, states, results, place
                    )
                queries += 4 * BLOCK_TOKENS * deep
                states += 8 * BLOCK_TOKENS
                results += 4 * BLOCK_TOKENS * wide

    return subroutine(attend_all)


@subroutine
def normalise_and_store_results(a, heads, start, end, place):
    """Store the attention of tokens `start` to `end` in a head group: weighted sums of values over sums of weights."""
    width, states, results = ARGS.width(a), place[7], place[8]
    wide = round_up(width, BLOCK_TOKENS)
    for first in range(start, end, BLOCK_TOKENS):
        for h in range(ARGS.shared(a)):
            target = load_long(heads + h * HEAD_BYTES + HEAD_OUT) + first * ARGS.out_step(a)
            for t in range(min(BLOCK_TOKENS, end - first)):
                weight = load_scalar(states + 128 + 4 * t)
                f = splat(FLOAT_ONE / weight if weight != FLOAT_ZERO else FLOAT_ZERO)  # NaN stays NaN
                for c in range(0, width, LANES):
                    x = mul(load(results + 4 * (t * wide + c)), f)
                    store_lanes(target + t * ARGS.out_step(a), c, width, x)
            states += 8 * BLOCK_TOKENS
            results += 4 * BLOCK_TOKENS * wide


def make_prefill_kernel_over_token_spans(
    name: str,
    locate_scratch: Subroutine,
    load_unit: Subroutine,
    attend_tile: Subroutine,
    store_unit: Subroutine,
    begin: TileOperation,
    end: TileOperation,
) -> Kernel:
    """Make a prefill attention kernel from subroutines; a work unit is a span of tokens in a group of heads.

    The last span is processed first. `place` is the scratch layout.

    Args:
        name: The name of the kernel.
        locate_scratch: ``(a, thread)`` returns the scratch layout; its first address is `memory`.
        load_unit: ``(a, heads, start, stop, place)`` loads the queries of tokens `start` to `stop`.
        attend_tile: ``(a, heads, start, stop, s, place)`` adds the tile of keys from key `s` on to their attention.
        store_unit: ``(a, heads, start, stop, place)`` stores the results.
        begin: Called with ``(memory)`` first.
        end: Called with ``(memory)`` last.
    """

    def body(a, thread, threads):
        tokens, units, span, place = ARGS.tokens(a), ARGS.units(a), ARGS.span(a), locate_scratch(a, thread)
        tickets, spans = ARGS.tickets(a), (tokens + span - 1) // span
        item, mine, status = 0, take_work_item(tickets, 0), 0
        begin(place[0])
        for number in range(spans):
            start = (spans - 1 - number) * span
            stop = min(tokens, start + span)
            for unit in range(units):
                if item == mine:
                    heads = ARGS.heads(a) + unit * ARGS.shared(a) * HEAD_BYTES
                    load_unit(a, heads, start, stop, place)
                    if status == 0:
                        status = check_block_numbers(heads, 0, ARGS.keys(a), ARGS.pool(a))
                    if status == 0:
                        for s in range(0, ARGS.keys(a), TILE_KEYS):
                            attend_tile(a, heads, start, stop, s, place)
                    store_unit(a, heads, start, stop, place)
                    if status == 0:
                        columns = ARGS.shared(a) * ARGS.width(a)
                        call_hooks(a, HOOKS_WORD, start, stop - start, unit * columns, columns)
                    mine = take_work_item(tickets, item + 1)
                item += 1
        reset_queue_after_last_ticket(tickets, mine, item, threads)
        end(place[0])
        return status

    return Kernel(name, body)


@cache
def make_prefill_attention_kernel(k: DType, v: DType) -> Kernel:
    """Make the prefill attention kernel that multiplies in vectors, for keys of type `k` and values of type `v`."""
    name = f"prefill_attention.attend.{k}.{v}"
    return make_prefill_kernel_over_token_spans(
        name,
        compute_thread_scratch_addresses,
        load_query_lanes_and_init_softmax,
        _make_attend_to_tile_unless_hidden(k, v),
        normalise_and_store_results,
        skip_tile_configuration,
        skip_tile_configuration,
    )
