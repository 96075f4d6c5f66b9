"""Products of many activation rows with expanded blocks of weight rows."""

from __future__ import annotations

from dataclasses import dataclass

from ...compilation.compiler import Subroutine, subroutine
from ...simd.dot_tiles import make_dot_tile_intrinsics
from .tile_loops import ARGS, GROUP_ROWS, prefetch_section_and_advance


@dataclass(frozen=True, slots=True)
class BlockTiling:
    """The subroutines and tile sizes with which a matmul multiplies expanded blocks of weight rows.

    A block is `block_columns` columns of a group of 16 weight rows. In subroutine arguments, `stride` is the bytes of a
    weight row, and `left` is the number of rows that exist from the group on.

    Attributes:
        block_columns: Columns of a block.
        record_bytes: Bytes of an activation row for the columns of a block.
        block_bytes: Bytes of an expanded block.
        blocks_per_pass: Largest number of blocks that are expanded at a time.
        rows_per_chunk: Activation rows that use the expanded blocks before the next blocks are expanded.
        tile_rows, tile_groups: Activation rows and weight groups of a tile.
        expand_blocks: ``(to, group, stride, left, columns, first, count)`` expands blocks `first` to `first` + `count`.
        add_block: ``(acc, p, r, at) -> acc`` adds the products of the block at `p` and byte `at` of the rows `r`. The
            block of the next group is `expanded_group_bytes` behind `p`.
    """

    block_columns: int
    record_bytes: int
    block_bytes: int
    blocks_per_pass: int
    rows_per_chunk: int
    tile_rows: int
    tile_groups: int
    expand_blocks: Subroutine
    add_block: Subroutine

    @property
    def expanded_group_bytes(self) -> int:
        """Bytes of the blocks of one group that are expanded together."""
        return self.blocks_per_pass * self.block_bytes

    @property
    def scratch_bytes_per_thread(self) -> int:
        """Scratch bytes per thread, for the expanded blocks of a tile and the float32 sums of all tiles of a chunk."""
        tiles = -(-self.rows_per_chunk // self.tile_rows)
        return self.tile_groups * (self.expanded_group_bytes + tiles * self.tile_rows * GROUP_ROWS * 4)


def make_expand_and_multiply(blocks: BlockTiling) -> Subroutine:
    """Make the subroutine that expands a tile of weight groups, and multiplies it with a chunk of activation rows.

    The subroutine is ``(a, expanded, matrix, group, chunk, stop, coming)``. It processes the rows of slots `chunk` to
    `stop`; a slot is a pair of a token and one of its experts. Meanwhile it prefetches the groups at `coming` to the
    second cache.
    """
    tile = make_dot_tile_intrinsics(blocks.tile_rows, blocks.tile_groups)
    select_rows, zeros, store_rows = tile.row_addresses_by_slot, tile.zero_sums, tile.store_rows
    spill, reload = tile.spill, tile.reload
    expand, add = blocks.expand_blocks, blocks.add_block
    width, record, size, wide = blocks.block_columns, blocks.record_bytes, blocks.block_bytes, blocks.blocks_per_pass
    span = blocks.expanded_group_bytes
    tall, tile_groups = blocks.tile_rows, blocks.tile_groups

    def multiply_expanded(a, expanded, matrix, group, chunk, stop, coming):
        stride, columns, x, pitch = ARGS.stride(a), ARGS.columns(a), ARGS.x(a), ARGS.pitch(a)
        used, shared, slots = ARGS.used(a), ARGS.shared(a), ARGS.starts(a) + 4 * (ARGS.experts(a) + 2)
        left, y, step = ARGS.rows(a) - group * GROUP_ROWS, ARGS.y(a) + group * GROUP_ROWS * 4, ARGS.step(a)
        n = (columns + width - 1) // width
        tiles = (stop - chunk + tall - 1) // tall * ((n + wide - 1) // wide)
        for first in range(0, max(1, n), wide):
            count, sums = min(wide, n - first), expanded + tile_groups * span
            for g in range(min(tile_groups, (left + GROUP_ROWS - 1) // GROUP_ROWS)):
                at = matrix + (group + g) * GROUP_ROWS * stride
                expand(expanded + g * span, at, stride, left - g * GROUP_ROWS, columns, first, count)
            for i in range(chunk, stop, tall):
                r = select_rows(slots + 4 * i, stop - i, used, shared, x + first * record, pitch)
                coming = prefetch_section_and_advance(coming, tile_groups * GROUP_ROWS * stride, tiles)
                acc = reload(sums) if first > 0 else zeros()
                for b in range(count):
                    acc = add(acc, expanded + b * size, r, b * record)
                if first + wide < n:
                    spill(sums, acc)
                else:
                    store_rows(select_rows(slots + 4 * i, stop - i, 1, 1, y, step), acc, left)
                sums += tall * tile_groups * GROUP_ROWS * 4

    return subroutine(multiply_expanded)
