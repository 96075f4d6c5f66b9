"""Binding of attention: few query rows are processed key by key, many rows in tiles on tensor cores.

With 16-bit KV caches, few rows use tensor cores, too. Sequences are split over blocks along the keys:

1. Choose a variant by the number of rows, the columns and the dtype of keys.
2. Split the keys into parts, so that enough blocks keep the device busy.
3. Compute an online softmax of each part: sums of values, maximum and sum of weights.
4. Combine the parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .....graph.dtypes import DType
from .....ops.declaration.attributes import float_attribute
from .....ops.reduction.norms import alibi_slopes
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ...binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ..blocks import BLOCK_TYPE_NAMES
from ..elementwise import CELL_DTYPES, READ_TYPE_NAMES, as_float
from ..moves import gather_key_blocks
from .key_splits import TARGET_BLOCKS, TARGET_MULTIPROCESSORS, TARGET_WARPGROUP_BLOCKS, AttentionShape
from .kinds import (
    ATTENTION_THREADS,
    ATTENTION_WARPS,
    AUXILIARY_SOURCE,
    CELL_ROWS,
    CELL_SOURCES,
    FEW_ROWS_SOURCES,
    MAX_BUNCH_SPLITS,
    MIN_TILED_ROWS,
    PLACING_CELL_SOURCES,
    TILED_SOURCES,
    FewRows16BitTensorCoreVariant,
    KeyTiledVariant,
    Pipelined16BitCacheVariant,
)
from .kinds import SOURCES as SOURCES
from .operand_views import (
    AttentionOperands,
    add_mask_head_axis,
    compute_broadcast_strides,
    is_vector_loadable,
    iterate_one_axis_batches,
    make_view_fields_or_zeros,
    swap_axes,
)

NO_BUNCH_FIELDS: Sequence[LaunchWord] = (1, 0, 0, 0)
"""The fields of `_AttentionBinder._make_bunch_fields` if another launch combines the splits, or there is one split."""
MAX_GRID_SIZE = 65535
MAX_VALUE_COLUMNS = 512
"""The most value columns that a block of few rows adds."""


def _bind_attention(launches: LaunchBuilder, call: BoundInstruction) -> None:
    call = call if call.optional_operand(5) is None else gather_key_blocks(launches, call)
    q = as_float(launches, call.operand(0))
    k, v = (_convert_cache_unless_readable(launches, call.operand(i)) for i in (1, 2))
    if 0 not in call.out.shape:
        bound, mask = _make_attention_binder(launches, call, k, v)
        bound.add_attention_launches((q, k, v, mask, call.out), q.shape[:-3])


def _make_attention_binder(
    launches: LaunchBuilder, call: BoundInstruction, k: Operand, v: Operand
) -> tuple[_AttentionBinder, Operand | None]:
    """Return the binder of an attention instruction with keys `k` and values `v`, and its mask with a head axis."""
    mask, sinks = (None if (o := call.optional_operand(i)) is None else as_float(launches, o) for i in (3, 4))
    one_mask = call.attrs["mask_heads"] == "one"
    *leading, tokens, heads, size = call.operand(0).shape
    keys, groups, width = v.shape[-3:]
    shape = AttentionShape(
        math.prod(leading),
        tokens,
        heads // groups,
        groups,
        keys,
        size,
        width,
        1 if mask is None or one_mask else mask.shape[-3],
    )
    mask = None if mask is None else add_mask_head_axis(mask) if one_mask else swap_axes(mask, -3, -2)
    return _AttentionBinder(launches, call, shape, sinks), mask


def launch_attention_with_heads(launches: LaunchBuilder, call: BoundInstruction, heads: Sequence[LaunchWord]) -> None:
    """Launch the attention of one token; the same blocks first compute its queries and store its new key and value.

    Args:
        launches: Receives the launch.
        call: The attention over 16-bit caches. Its queries are not in memory.
        heads: The fields of three C structs `Head`: for queries, keys and values.

    Raises:
        NoKernelError: The kernel does not support the attention.
    """
    k, v, out = call.operand(1), call.operand(2), call.out
    masks = [o for o in (call.optional_operand(3), call.optional_operand(4)) if o is not None]
    require_supported(0 not in out.shape and call.optional_operand(5) is None, "keys are empty, or in blocks")
    require_supported(all(o.is_float for o in masks), "a mask or sinks are of another type")
    bound, mask = _make_attention_binder(launches, call, k, v)
    bound.launch_cells_with_heads((k, v, mask, out), heads)


def _convert_cache_unless_readable(launches: LaunchBuilder, x: Operand) -> Operand:
    """Return keys or values unchanged if attention kernels can read their dtype, else a float32 copy."""
    blocks = x.dtype in BLOCK_TYPE_NAMES and not x.has_packed_layout
    return x if x.dtype in CELL_DTYPES or blocks else as_float(launches, x)


@dataclass(frozen=True, slots=True)
class _SplitKeyValueHalvesScratch:
    """Scratch for float32 keys and values as tensor cores read them: two 16-bit halves, and a scale for each row."""

    k: Operand
    v: Operand
    k_units: Operand
    v_units: Operand

    @classmethod
    def allocate(cls, launches: LaunchBuilder, kind: KeyTiledVariant, count: int) -> _SplitKeyValueHalvesScratch:
        """Allocate the scratch for `count` rows of keys and of values."""
        k, v = (launches.allocate_scratch((count, n)) for n in (kind.size, kind.width))
        return cls(k, v, launches.allocate_scratch((count,)), launches.allocate_scratch((count,)))

    @property
    def value_and_scale_words(self) -> list[LaunchWord]:
        """The launch words of the split keys and values, and of their scales."""
        return [self.k, self.v, self.k_units, self.v_units]


def _find_common_dtype(keys_and_values: tuple[Operand, Operand]) -> DType | None:
    """Return the dtype of keys and values, or `None` if their dtypes differ."""
    k, v = keys_and_values
    return k.dtype if k.dtype is v.dtype else None


class _AttentionBinder:
    """Adds the launches of one attention instruction to a launch builder."""

    def __init__(
        self, launches: LaunchBuilder, call: BoundInstruction, shape: AttentionShape, sinks: Operand | None
    ) -> None:
        self.launches, self.shape = launches, shape
        scale, cap = (float(float_attribute(call.attrs, n)) for n in ("scale", "softcap"))
        bias = float(float_attribute(call.attrs, "max_bias"))
        slopes = launches.upload_constant(alibi_slopes(shape.query_heads, bias).astype(np.float32)) if bias > 0 else 0
        self._leading_words: list[LaunchWord] = [0, 0] if sinks is None else [sinks, *compute_broadcast_strides(sinks)]
        self._leading_words += [
            slopes,
            shape.tokens,
            shape.heads_per_key_head,
            shape.key_heads,
            shape.key_count,
            shape.key_columns,
            shape.value_columns,
        ]
        self._leading_words += [shape.mask_heads]
        self._trailing_words: list[LaunchWord] = [scale / (cap or 1.0), cap]

    def add_attention_launches(self, operands: AttentionOperands, leading: Sequence[int]) -> None:
        """Add the launches of the attention: a tiled variant if there are many query rows, else another variant."""
        s, cells = self.shape, _find_common_dtype(operands[1:3])
        kinds = (t for t in TILED_SOURCES if t.is_enabled(self.launches.limits))
        tiled = next((t for t in kinds if t.can_process(s.key_columns, s.value_columns, cells)), None)
        if s.rows_per_key_head >= MIN_TILED_ROWS and tiled is not None:
            self._launch_key_tiled(tiled, operands, leading)
        else:
            self._launch_fastest_few_rows_variant(operands, leading)

    def _make_argument_words(
        self, operands: AttentionOperands, splits: int, sums: list[LaunchWord]
    ) -> list[LaunchWord]:
        """Return the fields of the C struct `Args`.

        Args:
            operands: Queries, keys, values, mask and result of one batch.
            splits: Number of splits of the keys.
            sums: The scratch of `_allocate_partial_sums`.
        """
        return [
            *(w for o in operands for w in make_view_fields_or_zeros(o)),
            *self._leading_words,
            splits,
            *self._trailing_words,
            *sums,
        ]

    def _allocate_partial_sums(self, splits: int) -> list[LaunchWord]:
        """Allocate scratch for the partial results of key splits, the parts of the keys that different blocks process.

        They are sums of values, and pairs (maximum, sum) of the online softmax.
        """
        if splits == 1:
            return [0, 0]
        s = self.shape
        count = s.batch * s.tokens * s.query_heads * splits
        return [self.launches.allocate_scratch((count, s.value_columns)), self.launches.allocate_scratch((count, 2))]

    def _make_bunch_fields(self, splits: int, sums: list[LaunchWord]) -> list[LaunchWord]:
        """Return the fields of the C struct `Cells`; they tell `attend_cells` how to add its key splits.

        A key split is a part of the keys that one block processes. Adjacent splits form a bunch. The last block of a
        bunch to finish adds its splits, and the last block of all adds the bunches. Few splits are their own bunches.

        Args:
            splits: Number of splits of the keys.
            sums: The scratch of `_allocate_partial_sums` for these splits.
        """
        s = self.shape
        size = count_blocks(splits, count_blocks(splits, MAX_BUNCH_SPLITS)) if splits > MAX_BUNCH_SPLITS else 1
        bunches = count_blocks(splits, size)
        row_blocks = count_blocks(s.rows_per_key_head, CELL_ROWS) * s.key_heads
        counters = np.zeros(s.batch * row_blocks * (bunches + 1), np.uint32)  # the kernel resets them to zeros
        sums = self._allocate_partial_sums(bunches) if size > 1 else sums
        return [size, *sums, self.launches.upload_constant(counters)]

    def _launch_combine_splits(self, batch: AttentionOperands, words: list[LaunchWord], splits: int) -> None:
        """Launch the kernel that adds the partial results of all key splits; launch nothing for one split."""
        if splits > 1:
            count = batch[4].shape[0] * self.shape.tokens * self.shape.query_heads
            few = count < 2 * TARGET_MULTIPROCESSORS
            kernel = AUXILIARY_SOURCE["attention_combine_few" if few else "attention_combine"]
            self.launches.add_launch(
                kernel, (count, count_blocks(self.shape.value_columns, 32) if few else 1), ATTENTION_THREADS, words
            )

    def _launch_fastest_few_rows_variant(self, operands: AttentionOperands, leading: Sequence[int]) -> None:
        """Launch the fastest variant for few query rows, then the combination of the key splits."""
        s, cells = self.shape, _find_common_dtype(operands[1:3])
        fitting = [f for f in FEW_ROWS_SOURCES if f.can_process(s.key_columns, s.value_columns, cells)]
        if not fitting:
            q, *caches, mask, out = operands
            k, v = (as_float(self.launches, x) for x in caches if x is not None)
            return self._launch_fastest_few_rows_variant((q, k, v, mask, out), leading)
        kind, anyhow = fitting[0], fitting[-1]
        if (fast := self._find_cell_variant(cells)) is None:
            row_blocks = count_blocks(s.rows_per_key_head, kind.choose_rows_per_block(s.rows_per_key_head))
            splits = s.choose_key_splits(row_blocks, 32 * ATTENTION_WARPS)
        else:
            splits = self._choose_cell_splits()
        sums = self._allocate_partial_sums(splits)
        can_combine = fast is not None and splits > 1 and self.launches.limits.computes_operands
        bunches = self._make_bunch_fields(splits, sums) if can_combine else NO_BUNCH_FIELDS
        for batch in iterate_one_axis_batches(leading, operands):
            q, k, v, _, out = batch
            words = self._make_argument_words(batch, splits, sums)
            combines = False
            if fast is not None and is_vector_loadable(k, 8) and is_vector_loadable(v, 8):
                row_blocks = count_blocks(s.rows_per_key_head, CELL_ROWS) * s.key_heads
                combines = can_combine and is_vector_loadable(out, 4)
                kernel, shared = CELL_SOURCES[fast][fast.name], fast.shared_bytes
                more = [is_vector_loadable(q, 8), *(bunches if combines else NO_BUNCH_FIELDS), 0]
            else:
                used = kind if is_vector_loadable(k, 4) and is_vector_loadable(v, 4) else anyhow
                rows, shared, more = used.choose_rows_per_block(s.rows_per_key_head), 0, []
                row_blocks = (
                    count_blocks(s.rows_per_key_head, rows)
                    * s.key_heads
                    * count_blocks(s.value_columns, MAX_VALUE_COLUMNS)
                )
                kernel = FEW_ROWS_SOURCES[used][used.format_kernel_name(rows)]
            require_supported(
                max(row_blocks, out.shape[0]) <= MAX_GRID_SIZE,
                f"{s.rows_per_key_head} rows of {out.shape[0]} batches are too many",
            )
            self.launches.add_launch(
                kernel, (splits, row_blocks, out.shape[0]), ATTENTION_THREADS, [*words, *more], shared_bytes=shared
            )
            if not combines:
                self._launch_combine_splits(batch, words, splits)
        return None

    def launch_cells_with_heads(
        self, operands: tuple[Operand, Operand, Operand | None, Operand], heads: Sequence[LaunchWord]
    ) -> None:
        """Launch the kernel `attend_cells` for one token; its blocks also compute the norm and RoPE of its heads.

        Args:
            operands: Keys, values, mask and result, each with one leading axis of size 1.
            heads: The fields of three C structs `Head`.
        """
        s, (k, v, mask, out) = self.shape, operands
        kind = self._find_cell_variant(_find_common_dtype((k, v)))
        require_supported(kind is not None and len(out.shape) == 4, "other kernels read the caches")
        require_supported(mask is None or len(mask.shape) == 4, "the mask has fewer axes")
        assert kind is not None
        require_supported(
            s.batch == s.tokens == 1 and s.heads_per_key_head <= CELL_ROWS and s.key_columns % 8 == 0,
            "there is more than one token, or a key head has many heads",
        )
        require_supported(
            is_vector_loadable(k, 8) and is_vector_loadable(v, 8) and is_vector_loadable(out, 4),
            "rows are not aligned",
        )
        splits = self._choose_cell_splits()
        sums = self._allocate_partial_sums(splits)
        bunches = NO_BUNCH_FIELDS if splits == 1 else self._make_bunch_fields(splits, sums)
        views = [0, 0, 0, 0, 1, *(w for o in operands for w in make_view_fields_or_zeros(o))]  # queries are dense
        words = [*views, *self._leading_words, splits, *self._trailing_words, *sums, 1, *bunches, *heads]
        kernel = PLACING_CELL_SOURCES[kind][kind.name_with_heads]
        self.launches.add_launch(
            kernel, (splits, s.key_heads), ATTENTION_THREADS, words, shared_bytes=kind.shared_bytes_with_heads
        )

    def _find_cell_variant(self, cells: DType | None) -> FewRows16BitTensorCoreVariant | None:
        """Find the sizes with which the kernel `attend_cells` (few query rows, 16-bit cache) can run, or None.

        `cells` is the dtype of the KV cache.
        """
        s = self.shape
        return next((c for c in CELL_SOURCES if c.can_process(s.key_columns, s.value_columns, cells)), None)

    def _choose_cell_splits(self) -> int:
        """Choose into how many parts `attend_cells` splits the keys, so that enough blocks work."""
        s = self.shape
        return s.choose_balanced_key_splits(count_blocks(s.rows_per_key_head, CELL_ROWS), CELL_ROWS * ATTENTION_WARPS)

    def _launch_key_tiled(self, kind: KeyTiledVariant, operands: AttentionOperands, leading: Sequence[int]) -> None:
        """Launch a variant for many query rows that processes the keys in tiles, with the launches before and after it.

        Launches before it split float32 keys and values into halves, and find the tiles that the mask leaves visible. A
        launch after it combines the key splits.
        """
        s, launches = self.shape, self.launches
        row_tiles, row_blocks, tiles = (
            count_blocks(*n)
            for n in (
                (s.rows_per_key_head, kind.visibility_tile_rows),
                (s.rows_per_key_head, kind.rows),
                (s.key_count, kind.tile),
            )
        )
        splits = s.choose_key_splits(
            row_blocks, 4 * kind.tile, TARGET_WARPGROUP_BLOCKS if kind.uses_warpgroups else TARGET_BLOCKS
        )
        sums = self._allocate_partial_sums(splits)
        copies = (
            None
            if isinstance(kind, Pipelined16BitCacheVariant)
            else _SplitKeyValueHalvesScratch.allocate(launches, kind, s.batch * s.key_heads * tiles * kind.tile)
        )
        seen = (
            None
            if operands[3] is None
            else launches.allocate_scratch((s.batch, s.key_heads, row_tiles, tiles), DType.I32)
        )
        for batch in iterate_one_axis_batches(leading, operands):
            q, k, v, mask, out = batch
            require_supported(
                out.shape[0] * s.key_heads <= MAX_GRID_SIZE, f"{out.shape[0]} batches are too many for a grid"
            )
            require_supported(
                max(row_blocks, tiles) <= MAX_GRID_SIZE,
                f"{s.rows_per_key_head} rows or {s.key_count} keys are too many for a grid",
            )
            if copies is not None:
                self._launch_split_into_halves(k, kind.size, kind.tile, copies.k, copies.k_units)
                self._launch_split_into_halves(v, kind.width, kind.tile, copies.v, copies.v_units)
            words = self._make_argument_words(batch, splits, sums)
            step = [0, 0] if mask is None else self._compute_visibility_strides(mask, row_tiles * tiles)
            halves = [0] * 4 if copies is None else copies.value_and_scale_words
            with_tiles = [*words, *halves, seen or 0, *step, tiles]
            with_tiles += [
                kind.tile,
                kind.visibility_tile_rows,
                is_vector_loadable(q, 8),
                is_vector_loadable(k, 8) and is_vector_loadable(v, 8),
            ]
            if mask is not None:
                masks = (out.shape[0] if step[0] else 1) * (s.key_heads if step[1] else 1)
                launches.add_launch(
                    AUXILIARY_SOURCE["attention_seen"], (tiles, row_tiles, masks), ATTENTION_THREADS, with_tiles
                )
            grid = (row_blocks, out.shape[0] * s.key_heads, splits)
            launches.add_launch(
                TILED_SOURCES[kind][kind.name], grid, kind.threads, with_tiles, shared_bytes=kind.shared_bytes
            )
            self._launch_combine_splits(batch, words, splits)

    def _compute_visibility_strides(self, mask: Operand, tiles: int) -> list[int]:
        """Compute the strides of the table that tells which tiles the mask leaves visible; 0 where masks are equal.

        The strides are between batches and between key heads.
        """
        groups = self.shape.key_heads if self.shape.mask_heads > 1 else 1
        return [tiles * groups if compute_broadcast_strides(mask)[0] else 0, tiles if groups > 1 else 0]

    def _launch_split_into_halves(self, x: Operand, columns: int, tile: int, halves: Operand, units: Operand) -> None:
        """Launch the split of keys or values into two 16-bit halves and a scale per row.

        Args:
            x: The keys or values.
            columns: Columns of a row in scratch, with padding.
            tile: Keys of a tile.
            halves: Receives the halves.
            units: Receives the scales.
        """
        s, lanes = self.shape, 8 if columns <= 64 else 16 if columns <= 128 else 32
        count = x.shape[0] * s.key_heads * count_blocks(s.key_count, tile) * tile
        words = [
            *make_view_fields_or_zeros(x),
            halves,
            units,
            s.key_count,
            s.key_heads,
            x.shape[-1],
            columns,
            count_blocks(s.key_count, tile),
            tile,
            count,
        ]
        words += [lanes, is_vector_loadable(x, 8)]
        self.launches.add_launch(
            AUXILIARY_SOURCE[f"attention_split<{READ_TYPE_NAMES[x.dtype]}>"],
            count_blocks(count, ATTENTION_THREADS // lanes),
            ATTENTION_THREADS,
            words,
        )


BINDINGS: Mapping[str, OpBinder] = {"attention": _bind_attention}
