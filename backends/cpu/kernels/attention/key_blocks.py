"""Addresses of keys and values, which are rows in order, or rows of the blocks that a block table names."""

from __future__ import annotations

from .....ops.matrix.attention import BLOCK_KEYS
from ...compilation.compiler import subroutine
from ...simd.vectors import load_int, load_long
from ..packed.weight_packing import INVALID_ROW
from .softmax_scores import HEAD_TABLE


@subroutine
def find_key_address(head, column, s, step):
    """Find the address of key `s` or value `s` of a head.

    Further keys follow it, `step` bytes apart, up to the end of its block.

    Args:
        head: address of the head in the head table.
        column: `HEAD_KEY` or `HEAD_VALUE`.
        s: number of the key.
        step: bytes from key to key.
    """
    first, table = load_long(head + column), load_long(head + HEAD_TABLE)
    if table == 0:
        return first + s * step
    return first + (load_int(table + s // BLOCK_KEYS * 4) * BLOCK_KEYS + s % BLOCK_KEYS) * step


@subroutine
def check_block_numbers(head, low, high, pool):
    """Check the block table of a head for the keys `low` to `high`.

    The result is 0, or the status that stops the run, if an entry is no number of one of the `pool` blocks.
    """
    table = load_long(head + HEAD_TABLE)
    if table != 0:
        for i in range(low // BLOCK_KEYS, (high + BLOCK_KEYS - 1) // BLOCK_KEYS):
            block = load_int(table + 4 * i)
            if block < 0 or block >= pool:
                return INVALID_ROW | block << 8
    return 0
