"""Matmuls with float weights of any strides, and triangular systems."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from .....graph.dtypes import DType
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ...binding.iteration_axes import IterationAxes, build_merged_tiling_iteration_axes, split_tiled_axes_for_broadcast
from ...binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ...device.driver import KernelSource
from ..elementwise import CUDA_TYPE_NAMES, MAX_ELEMENTS, as_float

WEIGHT_DTYPES = (DType.F32, DType.F16, DType.BF16)
SOURCE = KernelSource(
    "products.cu",
    (
        *(f"{kernel}<{CUDA_TYPE_NAMES[w]}>" for kernel in ("matvec", "across", "matmul") for w in WEIGHT_DTYPES),
        *("add_parts", "solve_triangular"),
    ),
)
SOURCES = (SOURCE,)
MAX_MATVEC_ROWS, MATVEC_ROWS = 16, 4
"""Maximum rows of x that are multiplied one by one, and the number of rows of one launch block."""
MAX_THREAD_COLUMNS, MATVEC_THREADS = 64, 128
"""Maximum columns of w that one thread adds where rows of w are adjacent in memory; and threads of a block."""
TILE_X_ROWS, TILE_W_ROWS, TILE_COLUMNS = 64, 128, 16
"""Rows of x, rows of w, and columns per step of a tile."""
TARGET_BLOCKS, MAX_K_SPLITS, MIN_K_PER_BLOCK = 192, 16, 8 * TILE_COLUMNS
"""Blocks that keep any device busy; the most blocks that share the sums of a tile; the fewest columns of each."""
MAX_MATRICES = 65535


def as_matrix_starts(x: Operand) -> Operand:
    """Return a view of the first element of each matrix of `x`; its axes are all axes of `x` except the last two."""
    return replace(x, tensor=replace(x.tensor, shape=x.shape[:-2], strides=x.strides[:-2]))


def build_matmul_batch_axes(w: Operand, x: Operand, out: Operand) -> IterationAxes:
    """Build the axes over which a batched matmul iterates, without the axes m, n and k of the matrices.

    If `w` has fewer matrices than `x` along an axis, adjacent matrices of `x` share a matrix of `w`.

    Args:
        w: Weights [..., n, k].
        x: Activations [..., m, k].
        out: Results [..., m, n].
    """
    heads = [as_matrix_starts(o) for o in (w, x, out)]
    return build_merged_tiling_iteration_axes(*split_tiled_axes_for_broadcast(x.shape[:-2], heads, tiled_index=0))


def launch_strided_matmul(launches: LaunchBuilder, w: Operand, x: Operand, out: Operand) -> None:
    """Launch a matmul of float operands with any strides.

    Args:
        launches: Receives the launches.
        w: Weights [..., n, k].
        x: Activations [..., m, k].
        out: Results [..., m, n].
    """
    if w.dtype not in WEIGHT_DTYPES:
        w = as_float(launches, w)
    m, k = x.shape[-2:]
    n = w.shape[-2]
    axes = build_matmul_batch_axes(w, x, out)
    require_supported(axes.element_count <= MAX_MATRICES, f"{axes.element_count} matrices are too many for one launch")
    tiles = count_blocks(n, TILE_W_ROWS), count_blocks(m, TILE_X_ROWS)
    # 16-bit weights come here because of strides of w or x. Scratch must not depend on strides.
    alone = m <= MAX_MATVEC_ROWS or w.dtype is not DType.F32
    splits, run = (1, k) if alone else _choose_k_split(k, math.prod(tiles) * axes.element_count)
    parts: LaunchWord = launches.allocate_scratch((axes.element_count, splits, m, n)) if splits > 1 else 0
    words: list[LaunchWord] = [m, n, k, *w.strides[-2:], *x.strides[-2:], run, splits, parts, *axes.axes_struct_fields]
    words += [word for i, o in enumerate((w, x, out)) for word in axes.make_address_and_stride_fields(i, o)]
    if m <= MAX_MATVEC_ROWS:
        kernel, rows = (
            ("across", MATVEC_THREADS)
            if k <= MAX_THREAD_COLUMNS and w.strides[-2] == 1
            else ("matvec", MATVEC_THREADS // 32)
        )
        grid = (count_blocks(n, rows), count_blocks(m, MATVEC_ROWS), axes.element_count)
        return launches.add_launch(SOURCE[f"{kernel}<{CUDA_TYPE_NAMES[w.dtype]}>"], grid, MATVEC_THREADS, words)
    launches.add_launch(
        SOURCE[f"matmul<{CUDA_TYPE_NAMES[w.dtype]}>"], (*tiles, axes.element_count * splits), 256, words
    )
    if splits > 1:
        added: list[LaunchWord] = [
            m * n,
            splits,
            parts,
            *axes.axes_struct_fields,
            *axes.make_address_and_stride_fields(2, out),
        ]
        launches.add_launch(SOURCE["add_parts"], (count_blocks(m * n, 256), axes.element_count), 256, added)
    return None


def _bind_out_prod(launches: LaunchBuilder, call: BoundInstruction) -> None:
    """Bind the product ``b.T @ a`` as the matmul of the transposed operands."""
    a, b = call.operand(0), as_float(launches, call.operand(1))
    a = as_float(launches, a) if a.dtype.is_quantised else a
    launch_strided_matmul(launches, _transpose(a), _transpose(b), call.out)


def _transpose(x: Operand) -> Operand:
    """Return a view of `x` in which the last two axes are exchanged."""
    shape, strides = ((*axes[:-2], axes[-1], axes[-2]) for axes in (x.shape, x.strides))
    return replace(x, tensor=replace(x.tensor, shape=shape, strides=strides))


def _choose_k_split(k: int, tiles: int) -> tuple[int, int]:
    """Choose the split-K of a matmul: how many blocks share the sum over k, and how many columns each block gets.

    Args:
        k: Columns of the operands.
        tiles: Result tiles of all matrices.
    """
    splits = max(1, min(MAX_K_SPLITS, round(TARGET_BLOCKS / max(1, tiles)), k // MIN_K_PER_BLOCK))
    run = count_blocks(count_blocks(k, splits), TILE_COLUMNS) * TILE_COLUMNS
    return max(1, count_blocks(k, run)) if run else 1, run


def _bind_solve_tri(launches: LaunchBuilder, call: BoundInstruction) -> None:
    a, b, out = as_float(launches, call.operand(0)), as_float(launches, call.operand(1)), call.out
    n, m = out.shape[-2:]
    axes = build_merged_tiling_iteration_axes(out.shape[:-2], [as_matrix_starts(o) for o in (a, b, out)])
    count = axes.element_count * m
    require_supported(count < MAX_ELEMENTS, f"{count} columns are too many for one launch")
    words: list[LaunchWord] = [count, n, m, *a.strides[-2:], *b.strides[-2:], *axes.axes_struct_fields]
    words += [word for i, o in enumerate((a, b, out)) for word in axes.make_address_and_stride_fields(i, o)]
    launches.add_launch(SOURCE["solve_triangular"], count_blocks(count, 64), 64, words)


BINDINGS: Mapping[str, OpBinder] = {"out_prod": _bind_out_prod, "solve_tri": _bind_solve_tri}
