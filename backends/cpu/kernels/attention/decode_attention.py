"""Decode attention of few tokens with online softmax: SIMD lanes are keys, and each thread has heads or keys.

Keys and values are read once for all heads that share them. Several groups of heads read a cache together: memory is
read front to back. If threads split the keys, `merge_partial_results` merges their results.
"""

from __future__ import annotations

from functools import cache

from .....graph.dtypes import DType
from .....graph.lazy_dataclass import dataclass
from ...compilation.compiler import Kernel, Subroutine, kernel, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.dot_tiles import make_dot_tile_intrinsics
from ...simd.permute_lanes import fold_1, fold_2
from ...simd.vectors import (
    LANES,
    MANY_REGISTERS,
    count_vector_registers,
    load,
    load_first_lanes,
    load_long,
    load_scalar,
    mul,
    prefetch_l2,
    splat,
    store,
)
from ...steps.partition import compute_thread_range
from ..vector.block_rows import BLOCK_ELEMENTS
from ..vector.cache_cells import CELLS_BY_DTYPE, CacheRowReaders
from . import quantised_keys
from .partial_results import (
    PARTIAL_VALUES_OFFSET,
    VALUE_COLUMNS,
    VECTOR_BYTES,
    compute_row_partial_result_bytes,
    convert_scores_to_softmax_weights,
    initialise_partial_result,
    merge_partial_result,
    write_normalised_attention_row,
)
from .quantised_keys import TRANSPOSED_BLOCK_BYTES, dot_query_with_16_keys
from .softmax_scores import (
    COMMON_ARGS,
    HEAD_BYTES,
    HEAD_KEY,
    HEAD_MASK,
    HEAD_OUT,
    HEAD_QUERY,
    HEAD_SLOPE,
    HEAD_VALUE,
    MINUS_INFINITY,
    apply_soft_cap_and_mask,
    find_key_range_visible_to_group,
    load_16_padded_mask_values,
    load_sink_score_in_log2,
    max_or_second,
    round_up,
)

ARGS = declare_args(f"{COMMON_ARGS} partial chunks beside splits")
"""The last words: partial results, the number of key splits, groups of heads that walk together."""
CACHE_LINE_BYTES = 64
"""Bytes of a cache line."""
KEYS_PER_VALUE_PASS = 32
"""Keys per head while values are summed."""
KEYS_PER_CHUNK = 256
"""Number of keys of a partial result.

Chunks begin at multiples of this number, so that a result does not depend on the number of threads or sequences.
"""
PREFETCH_KEYS = 32
"""Prefetch distance in keys, to the second cache. Prefetches are spread among the products, which many would delay."""
MAX_ROWS_PER_PASS = 4 if count_vector_registers() == MANY_REGISTERS else 1
"""Rows that use keys and values at once. Each load and each conversion to float32 serves all of them."""


def compute_decode_scratch_bytes(rows: int, keys: int, size: int, width: int) -> int:
    """Return the scratch bytes of a thread in decode attention.

    The scratch holds scores, highest scores and results. The memory after them has three uses, one after the other:
    expanded values, queries and products, or quantised queries and keys.
    """
    floats = 4 * MAX_ROWS_PER_PASS * VECTOR_BYTES + rows * 4 * (-(-size // LANES) * LANES)
    blocks = quantised_keys.compute_bytes_of_16_transposed_keys(
        size
    ) + rows * quantised_keys.compute_quantised_query_bytes(size)
    scores = rows * 4 * (min(KEYS_PER_CHUNK, -(-keys // LANES) * LANES) + LANES)
    scores += (rows + 1) * compute_row_partial_result_bytes(width)
    return scores + max(4 * KEYS_PER_VALUE_PASS * VALUE_COLUMNS, floats, blocks)


def _make_dot_queries_with_16_keys(cells: CacheRowReaders, count: int) -> Subroutine:
    """Make the subroutine that computes the dot products of `count` queries with 16 keys, from key number `s` on.

    It stores each dot product as four partial sums at `to`; the caller adds them.
    """
    load_16, load_first, row_bytes = cells.load_16, cells.load_first, cells.row_bytes
    line = CACHE_LINE_BYTES // cells.nbytes * (BLOCK_ELEMENTS if cells.expand_range else 1)
    tile = make_dot_tile_intrinsics(count, 1)
    row_addresses, zero_sums, spill = tile.row_addresses, tile.zero_sums, tile.spill
    add_inner, fold_four = tile.add_inner_product, tile.fold_four_tiles

    def multiply_keys(queries, pitch, key, step, s, keys, size, to, ahead):
        x = row_addresses(queries, pitch, count)  # each key is converted to float32 once for all of them
        for i in range(s, s + LANES, 4):
            j, k = key + min(i, keys - 1) * step, key + min(i + 1, keys - 1) * step  # the last key repeats
            l, m = key + min(i + 2, keys - 1) * step, key + min(i + 3, keys - 1) * step
            a, b, c, d = zero_sums(), zero_sums(), zero_sums(), zero_sums()
            for col in range(0, size - LANES + 1, LANES):  # a, b, c, d += key[col] * query[col]
                if col % line == 0:  # prefetch later keys
                    soon = ahead + row_bytes(col)
                    prefetch_l2(j + soon)
                    prefetch_l2(k + soon)
                    prefetch_l2(l + soon)
                    prefetch_l2(m + soon)
                a, b = add_inner(a, load_16(j, col), x, 4 * col), add_inner(b, load_16(k, col), x, 4 * col)
                c, d = add_inner(c, load_16(l, col), x, 4 * col), add_inner(d, load_16(m, col), x, 4 * col)
            if size % LANES > 0:
                col = size - size % LANES
                a = add_inner(a, load_first(j, col, size), x, 4 * col)
                b = add_inner(b, load_first(k, col, size), x, 4 * col)
                c = add_inner(c, load_first(l, col, size), x, 4 * col)
                d = add_inner(d, load_first(m, col, size), x, 4 * col)
            spill(to, fold_four(a, b, c, d))
            to += count * VECTOR_BYTES

    return subroutine(multiply_keys)


def _make_add_weighted_value_columns(cells: CacheRowReaders, count: int, lines: int) -> Subroutine:
    """Make the subroutine that adds weighted values of `n` keys to 64 columns of the results of `count` rows.

    ``states[row, c] += sum over n keys of weight[row, key] * value[key, c]``.
    """
    load_16, load_first, tile = cells.load_16, cells.load_first, make_dot_tile_intrinsics(count, VALUE_COLUMNS // LANES)
    row_addresses, add_outer = tile.row_addresses, tile.add_outer_product
    load_rows, store_rows = tile.load_rows, tile.store_rows
    nbytes = cells.nbytes

    def add_value_columns(scores, reach, value, pace, n, states, pitch, col, width, ahead):
        weights, to = row_addresses(scores, reach, count), row_addresses(states, pitch, count)
        acc, row, ahead = load_rows(to), value, ahead + nbytes * col
        if width - col >= VALUE_COLUMNS:
            for r in range(n):
                k, l, m, o = load_16(row, col), load_16(row, col + 16), load_16(row, col + 32), load_16(row, col + 48)
                acc = add_outer(acc, k, l, m, o, weights, 4 * r)  # acc[row, c] += weight[row, r] * value[r, c]
                for line in range(lines):  # prefetch later values
                    prefetch_l2(row + ahead + line * CACHE_LINE_BYTES)
                row += pace
        else:
            for r in range(n):
                k, l = load_first(row, col, width), load_first(row, col + 16, width)
                m, o = load_first(row, col + 32, width), load_first(row, col + 48, width)
                acc = add_outer(acc, k, l, m, o, weights, 4 * r)
                row += pace
        store_rows(to, acc, VALUE_COLUMNS)

    return subroutine(add_value_columns)


@subroutine
def prefetch_rows_to_l2(rows, step, count, nbytes):
    """Prefetch `count` rows to the L2 cache; a row has `nbytes` bytes, and rows begin `step` bytes apart."""
    for r in range(count):
        for c in range(0, nbytes, CACHE_LINE_BYTES):
            prefetch_l2(rows + r * step + c)


@subroutine
def merge_and_write_group_results(a, unit, scratch):
    """Merge the partial results of a group of heads, and write the attention results: weighted means of values.

    `scratch` has room for one partial result.
    """
    tokens, shared, count, width = ARGS.tokens(a), ARGS.shared(a), ARGS.chunks(a), ARGS.width(a)
    span = PARTIAL_VALUES_OFFSET + 4 * round_up(width, VALUE_COLUMNS)
    for t in range(tokens):
        for h in range(shared):
            head = ARGS.heads(a) + (unit * shared + h) * HEAD_BYTES
            state = ARGS.partial(a) + ((unit * tokens + t) * shared + h) * count * span
            if count > 1:
                parts, state = state, scratch
                initialise_partial_result(state, span)
                for i in range(count):
                    merge_partial_result(state, parts + i * span, width)
            write_normalised_attention_row(
                state, load_sink_score_in_log2(head), load_long(head + HEAD_OUT) + t * ARGS.out_step(a), width
            )


def _choose_f32_operations_for_expanded_values(cells: CacheRowReaders) -> CacheRowReaders:
    """Return the operations with which heads read value rows: float32 operations if the values are expanded first."""
    return cells if cells.expand_range is None else CELLS_BY_DTYPE[DType.F32]


@dataclass(frozen=True, slots=True)
class QueryKeyOperations:
    """The subroutines that multiply queries with keys of one type.

    - ``prepare_query(query, size, to)`` writes a query of `size` numbers in the form that `store_scores` reads.
    - ``query_bytes(size)`` is the size of this form, ``scratch_bytes(size)`` the size of the scratch `memory`.
    - ``store_scores(a, heads, s, high, queries, memory, scores, reach, lanes)`` writes the scores of all rows for 16
      keys from key `s` on. Score rows are `reach` bytes apart. `lanes` has the highest score of each row and SIMD lane.
    """

    prepare_query: Subroutine
    query_bytes: Subroutine
    scratch_bytes: Subroutine
    store_scores: Subroutine


def _make_float_key_operations(cells: CacheRowReaders) -> QueryKeyOperations:
    """Make the subroutines that multiply queries with float keys."""
    multiply_1, multiply_2, multiply_3, multiply_4 = (
        _make_dot_queries_with_16_keys(cells, count) for count in range(1, 5)
    )

    @subroutine
    def finish_row_scores(a, heads, row, s, count, products, to, lanes):
        """Store the scores of a row from its products, which are `count` vectors apart."""
        shared, keys, apart = ARGS.shared(a), ARGS.keys(a), count * VECTOR_BYTES
        head = heads + row % shared * HEAD_BYTES
        mask = load_16_padded_mask_values(load_long(head + HEAD_MASK) + row // shared * ARGS.mask_step(a), s, keys)
        first = fold_2(load(products), load(products + apart))
        x = fold_1(first, fold_2(load(products + 2 * apart), load(products + 3 * apart)))
        x = apply_soft_cap_and_mask(mul(x, splat(ARGS.factor(a))), mask, ARGS.cap(a), load_scalar(head + HEAD_SLOPE))
        store(lanes, max_or_second(x, load(lanes)))
        store(to, x)

    def prepare_query(query, size, to):
        for c in range(0, size, LANES):
            store(to + 4 * c, load_first_lanes(query + 4 * c, size - c))

    def query_bytes(size):
        return 4 * round_up(size, LANES)

    def scratch_bytes(size):
        return 4 * MAX_ROWS_PER_PASS * VECTOR_BYTES

    def store_scores(a, heads, s, high, queries, memory, scores, reach, lanes):
        shared, keys, size, step = ARGS.shared(a), ARGS.keys(a), ARGS.size(a), ARGS.k_step(a)
        key, pitch, rows = load_long(heads + HEAD_KEY), 4 * round_up(size, LANES), ARGS.tokens(a) * shared
        row, ahead = 0, PREFETCH_KEYS * step if s + PREFETCH_KEYS < high else 0
        while row < rows:
            count, query = min(MAX_ROWS_PER_PASS, rows - row), queries + row * pitch
            if count == 4:
                multiply_4(query, pitch, key, step, s, keys, size, memory, ahead)
            elif count == 3:
                multiply_3(query, pitch, key, step, s, keys, size, memory, ahead)
            elif count == 2:
                multiply_2(query, pitch, key, step, s, keys, size, memory, ahead)
            else:
                multiply_1(query, pitch, key, step, s, keys, size, memory, ahead)
            for i in range(count):
                to, highest = scores + (row + i) * reach, lanes + (row + i) * VECTOR_BYTES
                finish_row_scores(a, heads, row + i, s, count, memory + i * VECTOR_BYTES, to, highest)
            row, ahead = row + count, 0

    return QueryKeyOperations(
        subroutine(prepare_query), subroutine(query_bytes), subroutine(scratch_bytes), subroutine(store_scores)
    )


def _make_quantised_key_operations(dtype: DType) -> QueryKeyOperations:
    """Make the subroutines that multiply queries with quantised keys, by integer dot products."""
    transpose_keys, span = quantised_keys.make_transpose_16_quantised_keys(dtype), CELLS_BY_DTYPE[dtype].row_bytes

    @subroutine
    def query_bytes(size):
        return round_up(size + size // BLOCK_ELEMENTS * 8, 64)

    def scratch_bytes(size):
        return (size // BLOCK_ELEMENTS + 1) * (TRANSPOSED_BLOCK_BYTES + 32)

    def store_scores(a, heads, s, high, queries, memory, scores, reach, lanes):
        shared, keys, size, step = ARGS.shared(a), ARGS.keys(a), ARGS.size(a), ARGS.k_step(a)
        factor, cap, key, pitch = ARGS.factor(a), ARGS.cap(a), load_long(heads + HEAD_KEY) + s * step, query_bytes(size)
        transpose_keys(key, step, keys - 1 - s, size, memory)
        prefetch_rows_to_l2(key + PREFETCH_KEYS * step, step, min(LANES, high - s - PREFETCH_KEYS), span(size))
        for t in range(ARGS.tokens(a)):
            for h in range(shared):
                head, row = heads + h * HEAD_BYTES, t * shared + h
                mask = load_16_padded_mask_values(load_long(head + HEAD_MASK) + t * ARGS.mask_step(a), s, keys)
                x = mul(dot_query_with_16_keys(queries + row * pitch, memory, size), splat(factor))
                x = apply_soft_cap_and_mask(x, mask, cap, load_scalar(head + HEAD_SLOPE))
                store(lanes + row * VECTOR_BYTES, max_or_second(x, load(lanes + row * VECTOR_BYTES)))
                store(scores + row * reach, x)

    return QueryKeyOperations(
        quantised_keys.make_quantise_query_to_int8_blocks(dtype),
        query_bytes,
        subroutine(scratch_bytes),
        subroutine(store_scores),
    )


def _make_compute_scores_and_maxima(keys: QueryKeyOperations) -> Subroutine:
    """Make the subroutine that computes the scores of all rows of a work unit for keys `low` to `high`.

    At `lanes` it stores the highest score of each SIMD lane.
    """
    prepare_query, store_scores = keys.prepare_query, keys.store_scores
    query_bytes, scratch_bytes = keys.query_bytes, keys.scratch_bytes

    def score_keys(a, heads, low, high, scores, reach, lanes, memory):
        tokens, shared, size, beside = ARGS.tokens(a), ARGS.shared(a), ARGS.size(a), ARGS.beside(a)
        rows, pitch, queries = tokens * shared, query_bytes(size), memory + scratch_bytes(size)
        for row in range(beside * rows):
            g, t, h = row // rows, row % rows // shared, row % shared
            query = load_long(heads + (g * shared + h) * HEAD_BYTES + HEAD_QUERY) + t * ARGS.q_step(a)
            prepare_query(query, size, queries + row * pitch)
            store(lanes + row * VECTOR_BYTES, splat(MINUS_INFINITY))
        for s in range(low, high, LANES):
            for g in range(beside):
                row, group = g * rows, heads + g * shared * HEAD_BYTES
                to = scores + row * reach + 4 * (s - low)
                store_scores(a, group, s, high, queries + row * pitch, memory, to, reach, lanes + row * VECTOR_BYTES)

    return subroutine(score_keys)


def _make_locate_or_expand_values(cells: CacheRowReaders) -> Subroutine:
    """Make the subroutine that locates 64 columns of `n` cached values as floats; it first expands quantised values.

    It returns four numbers: the address, the bytes from value to value, the first column, and the end column.
    """
    if cells.expand_range is None:
        return subroutine(lambda values, step, n, ahead, c, width, scratch: (values, step, c, width))
    expand_range, span = cells.expand_range, cells.row_bytes

    def locate_expanded(values, step, n, ahead, c, width, scratch):
        end = min(width, c + VALUE_COLUMNS)
        for r in range(n):
            expand_range(values + r * step, c, end, scratch + 4 * r * VALUE_COLUMNS)
            prefetch_rows_to_l2(values + r * step + ahead + span(c), step, 1, span(end - c))
        return scratch, 4 * VALUE_COLUMNS, 0, end - c

    return subroutine(locate_expanded)


def _make_add_weighted_values(cells: CacheRowReaders) -> Subroutine:
    """Make the subroutine that adds the weighted values of a range of keys to the results of a work unit."""
    lines = 0 if cells.expand_range else cells.nbytes * VALUE_COLUMNS // CACHE_LINE_BYTES
    read_cells = _choose_f32_operations_for_expanded_values(cells)
    add_1, add_2, add_3, add_4 = (_make_add_weighted_value_columns(read_cells, count, lines) for count in range(1, 5))
    locate_values = _make_locate_or_expand_values(cells)

    @subroutine
    def add_value_pass(a, value, left, scores, reach, states, pitch, memory):
        step, width, rows = ARGS.v_step(a), ARGS.width(a), ARGS.tokens(a) * ARGS.shared(a)
        n = min(KEYS_PER_VALUE_PASS, left)
        soon = PREFETCH_KEYS * step if left > PREFETCH_KEYS else 0
        for c in range(0, width, VALUE_COLUMNS):
            at, pace, col, end = locate_values(value, step, n, soon, c, width, memory)
            row, ahead = 0, soon
            while row < rows:
                several, p = min(MAX_ROWS_PER_PASS, rows - row), scores + row * reach
                to = states + row * pitch + PARTIAL_VALUES_OFFSET + 4 * c
                if several == 4:
                    add_4(p, reach, at, pace, n, to, pitch, col, end, ahead)
                elif several == 3:
                    add_3(p, reach, at, pace, n, to, pitch, col, end, ahead)
                elif several == 2:
                    add_2(p, reach, at, pace, n, to, pitch, col, end, ahead)
                else:
                    add_1(p, reach, at, pace, n, to, pitch, col, end, ahead)
                row, ahead = row + several, 0

    def add_values(a, heads, low, high, scores, reach, states, pitch, memory):
        shared, rows, step = ARGS.shared(a), ARGS.tokens(a) * ARGS.shared(a), ARGS.v_step(a)
        for s in range(low, high, KEYS_PER_VALUE_PASS):
            for g in range(ARGS.beside(a)):
                value, row = load_long(heads + g * shared * HEAD_BYTES + HEAD_VALUE) + s * step, g * rows
                p, to = scores + row * reach + 4 * (s - low), states + row * pitch
                add_value_pass(a, value, high - s, p, reach, to, pitch, memory)

    return subroutine(add_values)


@cache
def make_few_token_attention_kernel(k: DType, v: DType) -> Kernel:
    """Make the attention kernel for few tokens, for keys of type `k` and values of type `v`.

    A work unit is the attention of some groups of heads to one split (part) of the keys; `beside` counts these groups.
    """
    score_keys = _make_compute_scores_and_maxima(
        _make_quantised_key_operations(k)
        if k in quantised_keys.BLOCK_TRANSPOSERS
        else _make_float_key_operations(CELLS_BY_DTYPE[k])
    )
    add_values = _make_add_weighted_values(CELLS_BY_DTYPE[v])

    def body(a, thread, threads):
        tokens, keys, width, chunks = ARGS.tokens(a), ARGS.keys(a), ARGS.width(a), ARGS.chunks(a)
        beside = ARGS.beside(a)
        splits = ARGS.splits(a)
        span = PARTIAL_VALUES_OFFSET + 4 * round_up(width, VALUE_COLUMNS)
        heads_of, pitch = beside * ARGS.shared(a), chunks * span
        rows, reach = tokens * heads_of, 4 * min(KEYS_PER_CHUNK, round_up(keys, LANES))
        scores = ARGS.scratch(a) + thread * ARGS.scratch_bytes(a)
        lanes = scores + rows * reach
        fresh = lanes + rows * VECTOR_BYTES  # the results of a chunk before they are merged
        memory = fresh + rows * span
        lo, hi = compute_thread_range(ARGS.units(a) // beside * splits, thread, threads)
        for unit in range(lo, hi):
            walk, split = unit // splits, unit % splits
            heads = ARGS.heads(a) + walk * heads_of * HEAD_BYTES
            states = ARGS.partial(a) + walk * rows * pitch
            start, end = find_key_range_visible_to_group(heads, heads_of, tokens, ARGS.mask_step(a), keys)
            for r in range(rows * chunks):
                if r % chunks % splits == split:
                    initialise_partial_result(states + r * span, span)
            first = max(start // LANES * LANES, split * KEYS_PER_CHUNK)
            chunk = split
            while chunk * KEYS_PER_CHUNK < end:
                low, high = max(start // LANES * LANES, chunk * KEYS_PER_CHUNK), min(end, (chunk + 1) * KEYS_PER_CHUNK)
                if low < high:
                    to, apart = states + chunk % chunks * span, pitch
                    if chunks == 1 and low > first:
                        to, apart = fresh, span
                        for r in range(rows):
                            initialise_partial_result(fresh + r * span, span)
                    score_keys(a, heads, low, high, scores, reach, lanes, memory)
                    for r in range(rows):
                        convert_scores_to_softmax_weights(
                            scores + r * reach, high - low, lanes + r * VECTOR_BYTES, to + r * apart, width
                        )
                    add_values(a, heads, low, high, scores, reach, to, apart, memory)
                    if to == fresh:
                        for r in range(rows):
                            merge_partial_result(states + r * pitch, fresh + r * span, width)
                chunk += splits
            if splits == 1:
                for group in range(walk * beside, walk * beside + beside):
                    merge_and_write_group_results(a, group, scores)
        return 0

    return Kernel(f"decode_attention.attend.{k}.{v}", body)


@kernel
def merge_partial_results(a, thread, threads):
    """Merge the partial results of all groups of heads if threads have split the keys; write the attention results."""
    lo, hi = compute_thread_range(ARGS.units(a), thread, threads)
    for unit in range(lo, hi):
        merge_and_write_group_results(a, unit, ARGS.scratch(a) + thread * ARGS.scratch_bytes(a))
    return 0
