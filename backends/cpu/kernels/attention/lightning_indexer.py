"""The lightning indexer of sparse attention (DeepSeek-V3.2, 2025): one score for each token and key, over all heads.

1. Expand the keys of a work unit to columns of float32. SIMD lanes are 16 keys.
2. Multiply the queries of all heads of a token with the keys, by register tiles.
3. Add up the positive products times the weights of the heads, then add the mask.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from .....graph.dtypes import FLOAT_DTYPES, DType
from ....fusion.operands import BoundInstruction
from ...compilation.compiler import Kernel, Subroutine, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.dot_tiles import DotTileIntrinsics, make_dot_tile_intrinsics
from ...simd.permute_lanes import transpose_16x16
from ...simd.vectors import (
    LANES,
    MANY_REGISTERS,
    add,
    clamp_min,
    count_vector_registers,
    fma,
    load,
    load_long,
    splat_from,
    store,
    zeros,
)
from ...steps.partition import compute_thread_range
from ...steps.step_table import StepTableBuilder
from ..vector.cache_cells import CELLS_BY_DTYPE, CacheRowReaders
from ..vector.elementwise import store_lanes
from .bind_attention import compute_addresses_of_index_combinations
from .partial_results import VECTOR_BYTES
from .softmax_scores import round_up

ARGS = declare_args(
    "table products tokens heads size keys unit_keys unit_tokens"
    " q_step q_head_step k_step weights_step mask_step out_step scratch scratch_bytes"
)
TABLE_WORDS = 5
"""Addresses of a sequence: queries, keys, weights, mask, scores."""
EXPANDED_BYTES = 96 * 1024
"""Approximate bytes of the expanded keys of a work unit. They fill a part of the second cache."""
UNITS_PER_THREAD = 4
"""Fewest work units of a thread, if there are enough keys and tokens."""
MIN_UNIT_TOKENS = 8
"""Fewest tokens of a work unit; each unit expands its keys."""
TILE_HEADS, TILE_GROUPS = (8, 3) if count_vector_registers() == MANY_REGISTERS else (6, 1)
"""Heads, and groups of 16 keys, of a register tile."""


def _make_expand_16_keys(cells: CacheRowReaders) -> Subroutine:
    """Make the subroutine ``(keys, step, left, size, tile, to)`` that expands 16 keys to columns of float32.

    Keys are `step` bytes apart; the last of `left` keys replaces missing keys. `tile` is scratch of 16 vectors.
    """
    load_first = cells.load_first

    def expand_keys(keys, step, left, size, tile, to):
        for c in range(0, size, LANES):
            for i in range(LANES):
                store(tile + VECTOR_BYTES * i, load_first(keys + min(i, left - 1) * step, c, size))
            transpose_16x16(tile, VECTOR_BYTES, to + VECTOR_BYTES * c, VECTOR_BYTES)

    return subroutine(expand_keys)


def _make_add_key_column(tile: DotTileIntrinsics, groups: int) -> Subroutine:
    """Make the subroutine ``(acc, p, span, r, at)`` that adds the products of one column of the keys of a tile.

    The column of each further group of keys is `span` bytes behind the column at `p`.
    """
    add_outer_product = tile.add_outer_product

    def add_column(acc, p, span, r, at):
        return add_outer_product(acc, load(p), r, at)

    def add_column_of_three(acc, p, span, r, at):
        return add_outer_product(acc, load(p), load(p + span), load(p + 2 * span), r, at)

    return subroutine(add_column if groups == 1 else add_column_of_three)


@cache
def make_lightning_indexer_kernel(k: DType, mask: DType) -> Kernel:
    """Make the kernel ``out[t, s] = sum over h of weights[t, h] * max(q[t, h] . k[s], 0) + mask[t, s]``.

    A work unit is `unit_keys` keys of a sequence, for `unit_tokens` tokens. NaN stays NaN.
    """
    tile = make_dot_tile_intrinsics(TILE_HEADS, TILE_GROUPS)
    row_addresses, zero_sums, spill = tile.row_addresses, tile.zero_sums, tile.spill
    expand, add_column = _make_expand_16_keys(CELLS_BY_DTYPE[k]), _make_add_key_column(tile, TILE_GROUPS)
    load_mask, tile_heads, tile_groups = CELLS_BY_DTYPE[mask].load_first, TILE_HEADS, TILE_GROUPS

    @subroutine
    def score_token(a, q, first_key, count, expanded, span, sums, weights, mask_row, out):
        """Store the scores of `count` keys, from number `first_key` on, for the token with its queries at `q`."""
        heads, keys, size = ARGS.heads(a), ARGS.keys(a), ARGS.size(a)
        for group in range(0, (count + LANES - 1) // LANES, tile_groups):
            columns, products = expanded + group * span, sums
            for h in range(0, heads, tile_heads):
                r = row_addresses(q + h * ARGS.q_head_step(a), ARGS.q_head_step(a), heads - h)
                acc = zero_sums()
                for c in range(size):
                    acc = add_column(acc, columns + VECTOR_BYTES * c, span, r, 4 * c)
                spill(products, acc)
                products += tile_heads * tile_groups * VECTOR_BYTES
            for g in range(tile_groups):
                s = first_key + (group + g) * LANES
                if s < keys:
                    total = zeros()
                    for h in range(heads):
                        product = clamp_min(load(sums + (h * tile_groups + g) * VECTOR_BYTES), zeros())
                        total = fma(product, splat_from(weights + 4 * h), total)
                    store_lanes(out, s, keys, add(total, load_mask(mask_row, s, keys)))

    def body(a, thread, threads):
        keys, tokens, unit_keys, unit_tokens = ARGS.keys(a), ARGS.tokens(a), ARGS.unit_keys(a), ARGS.unit_tokens(a)
        span = VECTOR_BYTES * round_up(ARGS.size(a), LANES)
        key_parts, token_parts = (keys + unit_keys - 1) // unit_keys, (tokens + unit_tokens - 1) // unit_tokens
        tile = ARGS.scratch(a) + thread * ARGS.scratch_bytes(a)
        sums = tile + LANES * VECTOR_BYTES
        expanded = sums + round_up(ARGS.heads(a), tile_heads) * tile_groups * VECTOR_BYTES
        low, high = compute_thread_range(ARGS.products(a) * key_parts * token_parts, thread, threads)
        for unit in range(low, high):
            part = unit // token_parts
            at, first_key = ARGS.table(a) + part // key_parts * 8 * TABLE_WORDS, part % key_parts * unit_keys
            first_token, count = unit % token_parts * unit_tokens, min(unit_keys, keys - first_key)
            for i in range(0, count, LANES):
                key = load_long(at + 8) + (first_key + i) * ARGS.k_step(a)
                expand(key, ARGS.k_step(a), count - i, ARGS.size(a), tile, expanded + i // LANES * span)
            for t in range(first_token, min(tokens, first_token + unit_tokens)):
                q, weights = load_long(at) + t * ARGS.q_step(a), load_long(at + 16) + t * ARGS.weights_step(a)
                mask_row, out = load_long(at + 24) + t * ARGS.mask_step(a), load_long(at + 32) + t * ARGS.out_step(a)
                score_token(a, q, first_key, count, expanded, span, sums, weights, mask_row, out)
        return 0

    return Kernel(f"lightning_indexer.{k}.{mask}", body)


def _bind_lightning_indexer(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of a lightning indexer. Return False if the kernel cannot read the operands.

    Queries and weights are float32, and masks are floats. Keys have a type of `CELLS_BY_DTYPE`.
    """
    q, k, weights, mask, out = (*(call.operand(i) for i in range(4)), call.out)
    if not (q.is_float and weights.is_float and out.is_float and k.dtype in CELLS_BY_DTYPE):
        return False
    operands = (q, k, weights, mask, out)
    if mask.dtype not in FLOAT_DTYPES or k.has_packed_layout or not all(x.is_dense_along(-1) for x in operands):
        return False
    *leading, tokens, heads, size = q.shape
    keys = out.shape[-1]
    if not (out.size and heads and size):
        return False
    missing = len(leading) - (len(mask.shape) - 2)
    outer = [(i, np.arange(n)) for i, n in enumerate(leading)]
    axes = [outer, outer, outer, [(i - missing, index) for i, index in outer[missing:]], outer]
    columns = (compute_addresses_of_index_combinations(x, own) for x, own in zip(operands, axes, strict=True))
    table = np.stack(np.broadcast_arrays(*columns), -1).astype(np.int64)
    products, tile_keys = math.prod(leading), LANES * TILE_GROUPS
    tile_bytes = tile_keys * 4 * -(-size // LANES) * LANES
    units = UNITS_PER_THREAD * steps.threads if steps.is_step_shared_by_threads(operands[:4], [out]) else 1
    unit_tiles = max(1, min(EXPANDED_BYTES // tile_bytes, -(-keys * products // (units * tile_keys))))
    key_parts = products * -(-keys // (unit_tiles * tile_keys))
    unit_tokens = min(tokens, max(MIN_UNIT_TOKENS, -(-tokens * key_parts // units)))
    scratch_bytes = VECTOR_BYTES * (LANES + -(-heads // TILE_HEADS) * TILE_HEADS * TILE_GROUPS)
    scratch_bytes += unit_tiles * tile_bytes
    scratch = steps.scratch(f"indexer {scratch_bytes}", scratch_bytes * steps.threads)
    words = ARGS(
        table=steps.constant(table).address,
        products=products,
        tokens=tokens,
        heads=heads,
        size=size,
        keys=keys,
        unit_keys=unit_tiles * tile_keys,
        unit_tokens=unit_tokens,
        q_step=4 * q.strides[-3],
        q_head_step=4 * q.strides[-2],
        k_step=k.dtype.count_bytes(k.strides[-2]),
        weights_step=4 * weights.strides[-2],
        mask_step=mask.dtype.count_bytes(mask.strides[-2]),
        out_step=4 * out.strides[-2],
        scratch=scratch.address,
        scratch_bytes=scratch_bytes,
    )
    steps.add(make_lightning_indexer_kernel(k.dtype, mask.dtype), words, reads=operands[:4], writes=[out])
    return True


BINDINGS = {"lightning_indexer": _bind_lightning_indexer}
