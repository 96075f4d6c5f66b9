"""Matmuls with float weights of any strides, and triangular systems."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from .....graph.dtypes import DType
from ....operands import Bound, Operand, need
from ...binding.axes import Axes, axes_of, expanded
from ...binding.launches import Binding, Launches, Word, blocks
from ...device.driver import Source
from ..elementwise import MOST_ELEMENTS, TYPES, as_float

WEIGHTS = (DType.F32, DType.F16, DType.BF16)
SOURCE = Source(
    "products.cu",
    (
        *(f"{kernel}<{TYPES[w]}>" for kernel in ("matvec", "across", "matmul") for w in WEIGHTS),
        *("add_parts", "solve_triangular"),
    ),
)
SOURCES = (SOURCE,)
FEW, ROWS = 16, 4
"""The most rows of x that are multiplied one by one, and the number of rows of one launch block."""
FEW_COLUMNS, THREADS = 64, 128
"""The most columns of w that one thread adds where rows of w are adjacent in memory; and threads of a block."""
HIGH, WIDE, DEPTH = 64, 128, 16
"""Rows of x, rows of w, and columns per step of a tile."""
BUSY, MOST_SPLITS, SHORTEST = 192, 16, 8 * DEPTH
"""Blocks that keep any device busy; the most blocks that share the sums of a tile; the fewest columns of each."""
MOST_MATRICES = 65535


def matrix_heads(x: Operand) -> Operand:
    """Return the start of each matrix of `x`: all axes but the last two."""
    return replace(x, tensor=replace(x.tensor, shape=x.shape[:-2], strides=x.strides[:-2]))


def grouped_axes(w: Operand, x: Operand, out: Operand) -> Axes:
    """Build the leading axes of a matmul. Each matrix of `w` serves adjacent matrices of `x`."""
    heads = [matrix_heads(o) for o in (w, x, out)]
    return axes_of(*expanded(x.shape[:-2], heads, divides=0))


def launch_any(launches: Launches, w: Operand, x: Operand, out: Operand) -> None:
    """Multiply operands with any strides.

    Args:
        launches: Receives the launches.
        w: Weights [..., n, k].
        x: Activations [..., m, k].
        out: Results [..., m, n].
    """
    if w.dtype not in WEIGHTS:
        w = as_float(launches, w)
    m, k = x.shape[-2:]
    n = w.shape[-2]
    axes = grouped_axes(w, x, out)
    need(axes.count <= MOST_MATRICES, f"{axes.count} matrices are too many for one launch")
    tiles = blocks(n, WIDE), blocks(m, HIGH)
    # 16-bit weights come here because of strides of w or x. Scratch must not depend on strides.
    alone = m <= FEW or w.dtype is not DType.F32
    splits, run = (1, k) if alone else _shared_out(k, math.prod(tiles) * axes.count)
    parts: Word = launches.scratch((axes.count, splits, m, n)) if splits > 1 else 0
    words: list[Word] = [m, n, k, *w.strides[-2:], *x.strides[-2:], run, splits, parts, *axes.words]
    words += [word for i, o in enumerate((w, x, out)) for word in axes.walk(i, o)]
    if m <= FEW:
        kernel, rows = ("across", THREADS) if k <= FEW_COLUMNS and w.strides[-2] == 1 else ("matvec", THREADS // 32)
        grid = (blocks(n, rows), blocks(m, ROWS), axes.count)
        return launches.add(SOURCE[f"{kernel}<{TYPES[w.dtype]}>"], grid, THREADS, words)
    launches.add(SOURCE[f"matmul<{TYPES[w.dtype]}>"], (*tiles, axes.count * splits), 256, words)
    if splits > 1:
        added: list[Word] = [m * n, splits, parts, *axes.words, *axes.walk(2, out)]
        launches.add(SOURCE["add_parts"], (blocks(m * n, 256), axes.count), 256, added)
    return None


def _shared_out(k: int, tiles: int) -> tuple[int, int]:
    """Choose the number of blocks that share the sum over k, and the columns of each block."""
    splits = max(1, min(MOST_SPLITS, round(BUSY / max(1, tiles)), k // SHORTEST))
    run = blocks(blocks(k, splits), DEPTH) * DEPTH
    return max(1, blocks(k, run)) if run else 1, run


def _solve_tri(launches: Launches, call: Bound) -> None:
    a, b, out = as_float(launches, call.operand(0)), as_float(launches, call.operand(1)), call.out
    n, m = out.shape[-2:]
    axes = axes_of(out.shape[:-2], [matrix_heads(o) for o in (a, b, out)])
    count = axes.count * m
    need(count < MOST_ELEMENTS, f"{count} columns are too many for one launch")
    words: list[Word] = [count, n, m, *a.strides[-2:], *b.strides[-2:], *axes.words]
    words += [word for i, o in enumerate((a, b, out)) for word in axes.walk(i, o)]
    launches.add(SOURCE["solve_triangular"], blocks(count, 64), 64, words)


BINDINGS: Mapping[str, Binding] = {"solve_tri": _solve_tri}
