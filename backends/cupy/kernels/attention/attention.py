"""Binds attention: few query rows go key by key, many go in tiles through tensor cores.

With 16-bit KV caches, few rows use tensor cores, too. Sequences are split over blocks along the keys:

1. Choose a variant by the number of rows, the columns and the dtype of keys.
2. Split the keys into parts, so that enough blocks keep the device busy.
3. Compute an online softmax of each part: sums of values, maximum and sum of weights.
4. Combine the parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .....graph.dtypes import DType
from .....graph.spec import Spec
from .....ops.declaration.attributes import float_attribute
from .....ops.reduction.norms import alibi_slopes
from ....operands import Bound, Operand, need
from ...binding.axes import axes_of
from ...binding.launches import Binding, Launches, Word, blocks
from ..elementwise import CELLS, TYPES, as_float
from .kinds import AROUND, CELLS_OF_FEW, FEW, OWN, THREADS, TILED, WARPS, Short, Tiled
from .kinds import SOURCES as SOURCES

MANY = 64
"""Rows per key head from which tiles are worth the split of keys and values into halves."""
BLOCKS, MOST_SPLITS = 512, THREADS
"""Blocks that keep any device busy when blocks share keys; and the most splits: in the end a thread weighs each."""
BLOCKS_OF_TILES = 96
"""Blocks that keep a device busy with warpgroup tiles. One such block fills a multiprocessor.

On an H200, 512 tokens of 16 heads on 4 of 256 take 181 microseconds over 8,192 cells in 128 blocks, 245 in 512.
"""
PROCESSORS = 132
"""Multiprocessors of the GPU for which the work of few rows is balanced."""
MOST_GRID = 65535
MOST_WIDTH = 512
"""The most value columns that a block of few rows adds."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of an attention instruction.

    `heads_per_key_head` query heads share one of `key_heads`. `key_count` keys have `key_columns` columns, and values
    have `value_columns`. The mask has `mask_heads` heads.
    """

    batch: int
    tokens: int
    shared: int
    groups: int
    keys: int
    size: int
    width: int
    mask_heads: int

    @property
    def rows(self) -> int:
        """Query rows of a key head."""
        return self.tokens * self.shared

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.shared * self.groups

    def splits(self, row_blocks: int, keys: int, most: int = BLOCKS) -> int:
        """Choose the number of blocks that share the keys.

        Args:
            row_blocks: Blocks along the rows.
            keys: Keys that a block processes at once.
            most: Blocks that keep the device busy.
        """
        wanted = blocks(most, max(1, self.batch * self.groups * row_blocks))
        return max(1, min(MOST_SPLITS, wanted, blocks(self.keys, keys)))

    def even_splits(self, row_blocks: int, keys: int) -> int:
        """Choose the number of splits that leaves the fewest multiprocessors idle at the end.

        The smallest candidate gives each multiprocessor two blocks, the largest has twice as many splits.
        """
        count = max(1, self.batch * self.groups * row_blocks)
        least = max(1, 2 * PROCESSORS // count)
        least, most = (max(1, min(MOST_SPLITS, n * least, blocks(self.keys, keys))) for n in (1, 2))

        def idle(splits: int) -> float:
            waves = splits * count / PROCESSORS
            return round(math.ceil(waves) / waves, 2)

        return min(range(least, most + 1), key=idle)


def rounding(q: Sequence[int], k: Spec, v: Spec) -> float | None:
    """Return the relative rounding error of queries and weights in the dtype of a 16-bit cache, or `None`.

    Only variants for many rows round them.

    Args:
        q: Shape of the queries [..., tokens, heads, columns].
        k: Spec of the keys.
        v: Spec of the values.
    """
    shared = q[-2] // k.shape[-2] if k.shape[-2] else 0
    many = q[-3] * shared >= MANY and k.dtype is v.dtype
    is_short = many and any(isinstance(t, Short) and t.takes(k.shape[-1], v.shape[-1], k.dtype) for t in TILED)
    return {DType.F16: 2.0**-11, DType.BF16: 2.0**-8}[k.dtype] if is_short else None


Operands = tuple[Operand, Operand, Operand, Operand | None, Operand]
"""q [n, t, h, d], k [n, s, h, d], v [n, s, h, e], mask [n, t, m, s] and out [n, t, h, e]."""


def _attention(launches: Launches, call: Bound) -> None:
    q, k, v = as_float(launches, call.operand(0)), call.operand(1), call.operand(2)
    if k.dtype is not v.dtype or k.dtype not in CELLS:
        k, v = as_float(launches, k), as_float(launches, v)
    mask, sinks = (None if (o := call.optional(i)) is None else as_float(launches, o) for i in (3, 4))
    one_mask = call.attrs["mask_heads"] == "one"
    *leading, tokens, heads, size = q.shape
    if 0 in call.out.shape:
        return
    keys, groups, width = v.shape[-3:]
    shape = Shape(
        math.prod(leading),
        tokens,
        heads // groups,
        groups,
        keys,
        size,
        width,
        1 if mask is None or one_mask else mask.shape[-3],
    )
    mask = None if mask is None else _with_heads(mask) if one_mask else _swapped(mask, -3, -2)
    bound = _Attention(launches, call, shape, sinks)
    bound.add((q, k, v, mask, call.out), leading)


def _with_heads(mask: Operand) -> Operand:
    """Return a mask [..., t, s] as [..., t, 1, s]."""
    t = mask.tensor
    return replace(
        mask,
        tensor=replace(t, shape=(*t.shape[:-1], 1, t.shape[-1]), strides=(*t.strides[:-1], 0, t.strides[-1])),
    )


def _swapped(x: Operand, one: int, other: int) -> Operand:
    shape, strides = list(x.shape), list(x.strides)
    for axes in (shape, strides):
        axes[one], axes[other] = axes[other], axes[one]
    return replace(x, tensor=replace(x.tensor, shape=tuple(shape), strides=tuple(strides)))


def _batches(leading: Sequence[int], operands: Operands) -> Iterator[Operands]:
    """Yield operands with one leading axis, as often as their leading axes need."""
    there = [o for o in operands if o is not None]
    heads = [replace(o, tensor=replace(o.tensor, shape=o.shape[:-3], strides=o.strides[:-3])) for o in there]
    axes = axes_of(leading, heads)
    sizes = axes.sizes or (1,)
    for index in np.ndindex(sizes[:-1]):
        variants = iter(
            _batch(o, sizes[-1], s[-1] if s else 0, sum(i * n for i, n in zip(index, s, strict=False)))
            for o, s in zip(there, axes.steps, strict=True)
        )
        q, k, v, mask, out = (None if o is None else next(variants) for o in operands)
        assert q is not None
        assert k is not None
        assert v is not None
        assert out is not None
        yield q, k, v, mask, out


def _batch(x: Operand, count: int, step: int, skipped: int) -> Operand:
    """Return one batch of an operand, with `count` entries along its leading axis, `step` elements apart."""
    t, skipped = x.tensor, x.dtype.bytes_of(skipped)
    tensor = replace(t, offset=t.offset + skipped, shape=(count, *t.shape[-3:]), strides=(step, *t.strides[-3:]))
    return replace(x, address=x.address + skipped, tensor=tensor)


def _view(x: Operand | None) -> list[Word]:
    """Return the fields of a `View`."""
    return [0] * 5 if x is None else [x, *_steps(x)]


def _steps(x: Operand) -> list[int]:
    """Return the strides of an operand, 0 along axes with one entry."""
    return [0 if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True)]


def _in_vectors(x: Operand, columns: int) -> bool:
    """Return whether `columns` columns of any row can be loaded at once."""
    *steps, last = _steps(x)
    nbytes = min(16, x.dtype.bytes_of(columns))
    aligned = x.address % nbytes == 0 and all(x.dtype.bytes_of(s) % nbytes == 0 for s in steps)
    return last == 1 and x.shape[-1] % columns == 0 and aligned


@dataclass(frozen=True, slots=True)
class _Halves:
    """Scratch for keys and values as two halves each, with one scale per row."""

    k: Operand
    v: Operand
    k_units: Operand
    v_units: Operand

    @classmethod
    def of(cls, launches: Launches, kind: Tiled, count: int) -> _Halves:
        """Allocate the scratch for `count` rows."""
        k, v = (launches.scratch((count, n)) for n in (kind.size, kind.width))
        return cls(k, v, launches.scratch((count,)), launches.scratch((count,)))

    @property
    def words(self) -> list[Word]:
        """The fields of the split keys and values."""
        return [self.k, self.v, self.k_units, self.v_units]


class _Attention:
    """Adds the launches of one instruction."""

    def __init__(self, launches: Launches, call: Bound, shape: Shape, sinks: Operand | None) -> None:
        self.launches, self.shape = launches, shape
        scale, cap = (float(float_attribute(call.attrs, n)) for n in ("scale", "softcap"))
        bias = float(float_attribute(call.attrs, "max_bias"))
        slopes = launches.constant(alibi_slopes(shape.heads, bias).astype(np.float32)) if bias > 0 else 0
        self._ahead: list[Word] = [0, 0] if sinks is None else [sinks, *_steps(sinks)]
        self._ahead += [slopes, shape.tokens, shape.shared, shape.groups, shape.keys, shape.size, shape.width]
        self._ahead += [shape.mask_heads]
        self._behind: list[Word] = [scale / (cap or 1.0), cap]

    def add(self, operands: Operands, leading: Sequence[int]) -> None:
        """Add the launches of the tiled variant for many rows, or of a variant for few rows."""
        s, cells = self.shape, operands[1].dtype
        has_warpgroups = self.launches.limits.has_warpgroups
        kinds = (t for t in TILED if has_warpgroups or not t.by_warpgroups)
        tiled = next((t for t in kinds if t.takes(s.size, s.width, cells)), None)
        if s.rows >= MANY and tiled is not None:
            self._tiles(tiled, operands, leading)
        else:
            self._few(operands, leading)

    def _words(self, operands: Operands, splits: int, sums: list[Word]) -> list[Word]:
        """Return the fields of `Args`."""
        return [*(w for o in operands for w in _view(o)), *self._ahead, splits, *self._behind, *sums]

    def _sums(self, splits: int) -> list[Word]:
        """Allocate scratch for the partial results of splits."""
        if splits == 1:
            return [0, 0]
        s = self.shape
        count = s.batch * s.tokens * s.heads * splits
        return [self.launches.scratch((count, s.width)), self.launches.scratch((count, 2))]

    def _combine(self, batch: Operands, words: list[Word], splits: int) -> None:
        """Launch the combination of the splits, if there are several."""
        if splits > 1:
            count = batch[4].shape[0] * self.shape.tokens * self.shape.heads
            few = count < 2 * PROCESSORS
            kernel = AROUND["attention_combine_few" if few else "attention_combine"]
            self.launches.add(kernel, (count, blocks(self.shape.width, 32) if few else 1), THREADS, words)

    def _few(self, operands: Operands, leading: Sequence[int]) -> None:
        """Launch a variant for few rows, and combine the splits of the keys."""
        s = self.shape
        cells = operands[1].dtype
        fitting = [f for f in FEW if f.takes(s.size, s.width, cells)]
        kind, anyhow = fitting[0], fitting[-1]
        fast = next((c for c in CELLS_OF_FEW if c.takes(s.size, s.width, cells)), None)
        if fast is None:
            splits = s.splits(blocks(s.rows, kind.together(s.rows)), 32 * WARPS)
        else:
            splits = s.even_splits(blocks(s.rows, OWN), OWN * WARPS)
        sums = self._sums(splits)
        for batch in _batches(leading, operands):
            q, k, v, _, out = batch
            words = self._words(batch, splits, sums)
            if fast is not None and _in_vectors(k, 8) and _in_vectors(v, 8):
                row_blocks = blocks(s.rows, OWN) * s.groups
                kernel, shared, more = CELLS_OF_FEW[fast][fast.name], fast.shared_bytes, [_in_vectors(q, 8)]
            else:
                used = kind if _in_vectors(k, 4) and _in_vectors(v, 4) else anyhow
                rows, shared, more = used.together(s.rows), 0, []
                row_blocks = blocks(s.rows, rows) * s.groups * blocks(s.width, MOST_WIDTH)
                kernel = FEW[used][used.name(rows)]
            need(max(row_blocks, out.shape[0]) <= MOST_GRID, f"{s.rows} rows of {out.shape[0]} batches are too many")
            self.launches.add(kernel, (splits, row_blocks, out.shape[0]), THREADS, [*words, *more], shared_bytes=shared)
            self._combine(batch, words, splits)

    def _tiles(self, kind: Tiled, operands: Operands, leading: Sequence[int]) -> None:
        """Launch a tiled variant for many rows.

        Before it, split float32 keys and values into halves, and find the tiles that the mask leaves visible. After it,
        combine the splits of the keys.
        """
        s, launches = self.shape, self.launches
        row_tiles, row_blocks, tiles = (
            blocks(*n) for n in ((s.rows, kind.seen_rows), (s.rows, kind.rows), (s.keys, kind.tile))
        )
        splits = s.splits(row_blocks, 4 * kind.tile, BLOCKS_OF_TILES if kind.by_warpgroups else BLOCKS)
        sums = self._sums(splits)
        copies = None if isinstance(kind, Short) else _Halves.of(launches, kind, s.batch * s.groups * tiles * kind.tile)
        seen = None if operands[3] is None else launches.scratch((s.batch, s.groups, row_tiles, tiles), DType.I32)
        for batch in _batches(leading, operands):
            q, k, v, mask, out = batch
            need(out.shape[0] * s.groups <= MOST_GRID, f"{out.shape[0]} batches are too many for a grid")
            need(max(row_blocks, tiles) <= MOST_GRID, f"{s.rows} rows or {s.keys} keys are too many for a grid")
            if copies is not None:
                self._split(k, kind.size, kind.tile, copies.k, copies.k_units)
                self._split(v, kind.width, kind.tile, copies.v, copies.v_units)
            words = self._words(batch, splits, sums)
            step = [0, 0] if mask is None else self._seen_steps(mask, row_tiles * tiles)
            with_tiles = [*words, *([0] * 4 if copies is None else copies.words), seen or 0, *step, tiles]
            with_tiles += [kind.tile, kind.seen_rows, _in_vectors(q, 8), _in_vectors(k, 8) and _in_vectors(v, 8)]
            if mask is not None:
                masks = (out.shape[0] if step[0] else 1) * (s.groups if step[1] else 1)
                launches.add(AROUND["attention_seen"], (tiles, row_tiles, masks), THREADS, with_tiles)
            grid = (row_blocks, out.shape[0] * s.groups, splits)
            launches.add(TILED[kind][kind.name], grid, kind.threads, with_tiles, shared_bytes=kind.shared_bytes)
            self._combine(batch, words, splits)

    def _seen_steps(self, mask: Operand, tiles: int) -> list[int]:
        """Return the strides of visible tiles between batches and between key heads, 0 where masks are equal."""
        groups = self.shape.groups if self.shape.mask_heads > 1 else 1
        return [tiles * groups if _steps(mask)[0] else 0, tiles if groups > 1 else 0]

    def _split(self, x: Operand, columns: int, tile: int, halves: Operand, units: Operand) -> None:
        """Launch the split of keys or values into halves and their scales. `columns` includes padding."""
        s, lanes = self.shape, 8 if columns <= 64 else 16 if columns <= 128 else 32
        count = x.shape[0] * s.groups * blocks(s.keys, tile) * tile
        words = [*_view(x), halves, units, s.keys, s.groups, x.shape[-1], columns, blocks(s.keys, tile), tile, count]
        words += [lanes, _in_vectors(x, 8)]
        self.launches.add(AROUND[f"attention_split<{TYPES[x.dtype]}>"], blocks(count, THREADS // lanes), THREADS, words)


BINDINGS: Mapping[str, Binding] = {"attention": _attention}
