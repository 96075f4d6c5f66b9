"""Decode attention of few tokens with online softmax: SIMD lanes are keys, and each thread has heads or keys.

Keys and values are read once for all heads that share them. Several groups of heads read a cache together: memory is
read front to back. If threads split the keys, `merge_partial_results` merges their results.
"""

from __future__ import annotations

from functools import cache

from .....graph.dtypes import DType
from ...compilation.compiler import Kernel, Subroutine, kernel, subroutine
from ...simd.dot_tiles import make_dot_tile_intrinsics
from ...simd.vectors import (
    LANES,
    load_long,
    prefetch_l2,
    splat,
    store,
)
from ...steps.panel_hooks import call_hooks
from ...steps.partition import compute_thread_range
from ..vector.cache_cells import CELLS_BY_DTYPE, CacheRowReaders
from . import quantised_keys
from .key_blocks import check_block_numbers, find_key_address
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
from .query_key_scores import (
    ARGS,
    CACHE_LINE_BYTES,
    MAX_ROWS_PER_PASS,
    PREFETCH_KEYS,
    QueryKeyOperations,
    make_float_key_operations,
    make_quantised_key_operations,
    prefetch_rows_to_l2,
)
from .softmax_scores import (
    HEAD_BYTES,
    HEAD_OUT,
    HEAD_QUERY,
    HEAD_VALUE,
    MINUS_INFINITY,
    find_key_range_visible_to_group,
    load_sink_score_in_log2,
    round_up,
)

KEYS_PER_VALUE_PASS = 32
"""Keys per head while values are summed."""
KEYS_PER_CHUNK = 256
"""Number of keys of a partial result.

Chunks begin at multiples of this number, so that a result does not depend on the number of threads or sequences.
"""
HOOKS_WORD = ARGS.first_word_index("hooks")


def compute_decode_scratch_bytes(rows: int, keys: int, size: int, width: int) -> int:
    """Return the scratch bytes of a thread in decode attention.

    The scratch holds scores, highest scores and results. The memory after them has three uses, one after the other:
    expanded values, queries and products, or quantised queries and keys.

    Args:
        rows: Pairs of a head and a token that the thread computes together.
        keys: Keys of a sequence.
        size: Elements of a key.
        width: Elements of a value.
    """
    floats = 4 * MAX_ROWS_PER_PASS * VECTOR_BYTES + rows * 4 * (-(-size // LANES) * LANES)
    blocks = quantised_keys.compute_bytes_of_16_transposed_keys(
        size
    ) + rows * quantised_keys.compute_quantised_query_bytes(size)
    scores = rows * 4 * (min(KEYS_PER_CHUNK, -(-keys // LANES) * LANES) + LANES)
    scores += (rows + 1) * compute_row_partial_result_bytes(width)
    return scores + max(4 * KEYS_PER_VALUE_PASS * VALUE_COLUMNS, floats, blocks)


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


def _choose_value_row_readers(cells: CacheRowReaders) -> CacheRowReaders:
    """Choose how heads read value rows: as float32 if quantised values are expanded first, else in their own type."""
    return cells if cells.expand_range is None else CELLS_BY_DTYPE[DType.F32]


def _make_compute_scores_and_maxima(keys: QueryKeyOperations) -> Subroutine:
    """Make the subroutine that computes the attention scores of some heads and tokens for keys `low` to `high`.

    At `lanes` it stores the highest score of each row and SIMD lane, which the softmax needs.
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
    """Make the subroutine that adds the weighted values of a range of keys to the results of some heads and tokens."""
    lines = 0 if cells.expand_range else cells.nbytes * VALUE_COLUMNS // CACHE_LINE_BYTES
    read_cells = _choose_value_row_readers(cells)
    add_1, add_2, add_3, add_4 = (_make_add_weighted_value_columns(read_cells, count, lines) for count in range(1, 5))
    locate_values = _make_locate_or_expand_values(cells)

    @subroutine
    def add_value_pass(a, value, n, soon, scores, reach, states, pitch, memory):
        step, width, rows = ARGS.v_step(a), ARGS.width(a), ARGS.tokens(a) * ARGS.shared(a)
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
        shared, rows, step, s = ARGS.shared(a), ARGS.tokens(a) * ARGS.shared(a), ARGS.v_step(a), low
        while s < high:
            n = min(KEYS_PER_VALUE_PASS - s % KEYS_PER_VALUE_PASS, high - s)  # the rows of a pass are in one block
            for g in range(ARGS.beside(a)):
                head, row, soon = heads + g * shared * HEAD_BYTES, g * rows, 0
                value = find_key_address(head, HEAD_VALUE, s, step)
                if high - s > PREFETCH_KEYS:
                    soon = find_key_address(head, HEAD_VALUE, s + PREFETCH_KEYS, step) - value
                p, to = scores + row * reach + 4 * (s - low), states + row * pitch
                add_value_pass(a, value, n, soon, p, reach, to, pitch, memory)
            s += n

    return subroutine(add_values)


@cache
def make_few_token_attention_kernel(k: DType, v: DType) -> Kernel:
    """Make the attention kernel for few tokens, for keys of type `k` and values of type `v`.

    A thread takes one split (part) of the keys and `beside` head groups at a time, and reads this part front to back.
    """
    score_keys = _make_compute_scores_and_maxima(
        make_quantised_key_operations(k)
        if k in quantised_keys.BLOCK_TRANSPOSERS
        else make_float_key_operations(CELLS_BY_DTYPE[k])
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
            status = check_block_numbers(heads, start, end, ARGS.pool(a))
            if status != 0:
                return status
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
                call_hooks(a, HOOKS_WORD, 0, tokens, walk * heads_of * width, heads_of * width)
        return 0

    return Kernel(f"decode_attention.attend.{k}.{v}", body)


@kernel
def merge_partial_results(a, thread, threads):
    """Merge the partial results of all groups of heads if threads have split the keys; write the attention results."""
    lo, hi = compute_thread_range(ARGS.units(a), thread, threads)
    for unit in range(lo, hi):
        merge_and_write_group_results(a, unit, ARGS.scratch(a) + thread * ARGS.scratch_bytes(a))
        columns = ARGS.shared(a) * ARGS.width(a)
        call_hooks(a, HOOKS_WORD, 0, ARGS.tokens(a), unit * columns, columns)
    return 0
