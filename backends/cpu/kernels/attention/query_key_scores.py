"""Scores of keys in decode attention: the products of queries with 16 keys, by the type of the keys."""

from __future__ import annotations

from .....graph.dtypes import DType
from .....graph.lazy_dataclass import dataclass
from ...compilation.compiler import Subroutine, subroutine
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
from ..vector.block_rows import BLOCK_ELEMENTS
from ..vector.cache_cells import CELLS_BY_DTYPE, CacheRowReaders
from . import quantised_keys
from .key_blocks import find_key_address
from .partial_results import VECTOR_BYTES
from .quantised_keys import TRANSPOSED_BLOCK_BYTES, dot_query_with_16_keys
from .softmax_scores import (
    COMMON_ARGS,
    HEAD_BYTES,
    HEAD_KEY,
    HEAD_MASK,
    HEAD_SLOPE,
    apply_soft_cap_and_mask,
    load_16_padded_mask_values,
    max_or_second,
    round_up,
)

ARGS = declare_args(f"{COMMON_ARGS} partial chunks beside splits hooks[*]")
"""The last words: partial results, the number of key splits, groups of heads that walk together, hooks."""
CACHE_LINE_BYTES = 64
"""Bytes of a cache line."""
PREFETCH_KEYS = 32
"""Prefetch distance in keys, to the second cache. Prefetches are spread among the products, which many would delay."""
MAX_ROWS_PER_PASS = 4 if count_vector_registers() == MANY_REGISTERS else 1
"""Rows that use keys and values at once. Each load and each conversion to float32 serves all of them."""


def _make_dot_queries_with_16_keys(cells: CacheRowReaders, count: int) -> Subroutine:
    """Make the subroutine that computes the dot products of `count` queries with the 16 keys at the address `key`.

    If fewer than 16 keys exist, `last` is the index of the last one, which replaces the missing keys. The subroutine
    stores each dot product as four partial sums at `to`, and the caller adds them.
    """
    load_16, load_first, row_bytes = cells.load_16, cells.load_first, cells.row_bytes
    line = CACHE_LINE_BYTES // cells.nbytes * (BLOCK_ELEMENTS if cells.expand_range else 1)
    tile = make_dot_tile_intrinsics(count, 1)
    row_addresses, zero_sums, spill = tile.row_addresses, tile.zero_sums, tile.spill
    add_inner, fold_four = tile.add_inner_product, tile.fold_four_tiles

    def multiply_keys(queries, pitch, key, step, last, size, to, ahead):
        x = row_addresses(queries, pitch, count)  # each key is converted to float32 once for all of them
        for i in range(0, LANES, 4):
            j, k = key + min(i, last) * step, key + min(i + 1, last) * step  # the last key repeats
            l, m = key + min(i + 2, last) * step, key + min(i + 3, last) * step
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


@subroutine
def prefetch_rows_to_l2(rows, step, count, nbytes):
    """Prefetch `count` rows to the L2 cache; a row has `nbytes` bytes, and rows begin `step` bytes apart."""
    for r in range(count):
        for c in range(0, nbytes, CACHE_LINE_BYTES):
            prefetch_l2(rows + r * step + c)


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


def make_float_key_operations(cells: CacheRowReaders) -> QueryKeyOperations:
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
        key, pitch, rows = (
            find_key_address(heads, HEAD_KEY, s, step),
            4 * round_up(size, LANES),
            ARGS.tokens(a) * shared,
        )
        row, last, ahead = 0, keys - 1 - s, 0
        if s + PREFETCH_KEYS < high:
            ahead = find_key_address(heads, HEAD_KEY, s + PREFETCH_KEYS, step) - key
        while row < rows:
            count, query = min(MAX_ROWS_PER_PASS, rows - row), queries + row * pitch
            if count == 4:
                multiply_4(query, pitch, key, step, last, size, memory, ahead)
            elif count == 3:
                multiply_3(query, pitch, key, step, last, size, memory, ahead)
            elif count == 2:
                multiply_2(query, pitch, key, step, last, size, memory, ahead)
            else:
                multiply_1(query, pitch, key, step, last, size, memory, ahead)
            for i in range(count):
                to, highest = scores + (row + i) * reach, lanes + (row + i) * VECTOR_BYTES
                finish_row_scores(a, heads, row + i, s, count, memory + i * VECTOR_BYTES, to, highest)
            row, ahead = row + count, 0

    return QueryKeyOperations(
        subroutine(prepare_query), subroutine(query_bytes), subroutine(scratch_bytes), subroutine(store_scores)
    )


def make_quantised_key_operations(dtype: DType) -> QueryKeyOperations:
    """Make the subroutines that multiply queries with quantised keys, by integer dot products."""
    transpose_keys, span = quantised_keys.make_transpose_16_quantised_keys(dtype), CELLS_BY_DTYPE[dtype].row_bytes

    @subroutine
    def query_bytes(size):
        return round_up(size + size // BLOCK_ELEMENTS * 8, 64)

    def scratch_bytes(size):
        return (size // BLOCK_ELEMENTS + 1) * (TRANSPOSED_BLOCK_BYTES + 32)

    def store_scores(a, heads, s, high, queries, memory, scores, reach, lanes):
        shared, keys, size, step = ARGS.shared(a), ARGS.keys(a), ARGS.size(a), ARGS.k_step(a)
        factor, cap, pitch = ARGS.factor(a), ARGS.cap(a), query_bytes(size)
        transpose_keys(find_key_address(heads, HEAD_KEY, s, step), step, keys - 1 - s, size, memory)
        if s + PREFETCH_KEYS < high:
            soon = find_key_address(heads, HEAD_KEY, s + PREFETCH_KEYS, step)
            prefetch_rows_to_l2(soon, step, min(LANES, high - s - PREFETCH_KEYS), span(size))
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
