"""Prefill matmuls on tensor cores, in 16-bit terms; see ``tiled.cu``.

1. Split x into 16-bit terms: x = t0 + t1, or one term. For float16 weights, scale each row of x first.
2. Choose a tile shape that fills the device, by threads, warpgroups or clusters.
3. Multiply each tile of a table. Blocks may share the columns of a tile; their partial results are added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .....graph.dtypes import DType
from ....fusion.operands import Operand
from ...binding.launch_builder import LaunchBuilder, LaunchWord, compute_row_stride, count_blocks
from ...binding.weight_packing import PLANE_LAYOUTS, UNIT_ROWS
from ...device.device_limits import UnmeasuredKernelCandidate
from ...device.driver import KernelInstance, KernelSource
from ..elementwise import CUDA_TYPE_NAMES
from .packed import count_code_book_bytes, list_format_headers


@dataclass(frozen=True, slots=True)
class TileShape:
    """The shape of a matmul tile: the weight rows and entries (rows of x) of a block, and of each of its warps."""

    rows: int
    entries: int
    warp_rows: int
    warp_entries: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.rows // self.warp_rows) * (self.entries // self.warp_entries)

    def __str__(self) -> str:
        return f"Sizes<{self.rows}, {self.entries}, {self.warp_rows}, {self.warp_entries}>"


SMALL_TILE, LARGE_TILE, TALL_TILE = TileShape(64, 64, 32, 32), TileShape(128, 128, 64, 32), TileShape(256, 128, 64, 64)
"""Tiles of plain warps. Packed weights use the large one."""
WARPGROUP_TILE = TileShape(256, 128, 256, 16)
"""The tile of warpgroups. It replaces the tall tile, and the large tile of packed weights."""
CLUSTER_TILE = TileShape(128, 256, 16, 256)
"""The tile of clusters of warpgroup blocks, for 16-bit weights. The blocks of a cluster share entries."""
CLUSTER_SIZES = (4, 2, 1)
"""Possible blocks of a cluster. For eight blocks with rows, at most one block may be without rows."""
FULL_DEVICE_TILES, COLUMN_SPLITS, MIN_SPLIT_COLUMNS = 96, (1, 2, 4, 8), 512
"""Number of tiles that fill a device; possible numbers of blocks that share columns; and the fewest columns of each."""
MIN_BF16_ENTRIES, MIN_BF16_TILES = 128, 32
"""Entries of a matrix, and large tiles, from which packed weights use bfloat16 tensor cores, not ``packed.cu``.

By a model of an H200, one large tile takes as long as 130 of them. Products of bytes take time proportional to
their work.
"""
MIN_UNPACKED_ENTRIES, MAX_UNPACKED_BYTES = 512, 512 << 20
"""Entries from which a packed matrix is unpacked once for clusters, and the most bytes of the unpacked matrix.

On an H100, 2,048 entries of 9216 x 2560 take 329 microseconds unpacked tile by tile, 201 as bfloat16.
"""
ROLE_THREADS, MULTIPROCESSOR_GROUP = 384, 16
"""Threads of a block of `multiply_by_roles`, and the multiprocessors that can share the blocks of a cluster."""
STAGE_COLUMNS = 64
"""Rows of terms are padded with zeros to a multiple of these columns."""
FLOAT_DTYPES = (DType.F16, DType.BF16)


def _list_tiled_headers(dtype: DType | None) -> tuple[str, ...]:
    return ("columns.cuh", "routes.cuh", *list_format_headers(dtype))


def _make_tiled_source(dtype: DType | None, *names: str) -> KernelSource:
    return KernelSource("tiled.cu", names, _list_tiled_headers(dtype))


def _make_warpgroup_source(dtype: DType, *names: str) -> KernelSource:
    before = (*_list_tiled_headers(dtype), "tiled.cu", "wgmma.cuh")
    return KernelSource("warpgroups.cu", names, before, architectures=("sm_90a",))


def _make_cluster_source(t: DType) -> KernelSource:
    names = (f"{kernel}<{CUDA_TYPE_NAMES[t]}, {terms}>" for terms in (1, 2) for kernel in ("split_tiles", "clustered"))
    before = (*_list_tiled_headers(t), "tiled.cu", "wgmma.cuh", "warpgroups.cu", "cluster.cuh")
    return KernelSource("clusters.cu", tuple(names), before, architectures=("sm_90a",))


def _make_role_source(t: DType) -> KernelSource:
    names = (f"{kernel}<{CUDA_TYPE_NAMES[t]}>" for kernel in ("tile_weights", "multiply_by_roles"))
    before = (*_make_cluster_source(t).before, "clusters.cu", "roles.cuh")
    return KernelSource("product_roles.cu", tuple(names), before, architectures=("sm_90a",))


TILED_SOURCE_BY_DTYPE = {
    **{
        t: _make_tiled_source(
            t,
            f"split_rows<{CUDA_TYPE_NAMES[t]}, 2>",
            *(f"tiled<{CUDA_TYPE_NAMES[t]}, {n}>" for n in (SMALL_TILE, LARGE_TILE, TALL_TILE)),
        )
        for t in FLOAT_DTYPES
    },
    **{t: _make_tiled_source(t, f"tiled_packed<{t.name}>") for t in PLANE_LAYOUTS},
}
WARPGROUP_SOURCE_BY_DTYPE = {
    **{
        t: _make_warpgroup_source(t, *(f"grouped<{CUDA_TYPE_NAMES[t]}, {terms}>" for terms in (1, 2)))
        for t in FLOAT_DTYPES
    },
    **{t: _make_warpgroup_source(t, f"grouped_packed<{t.name}>", f"unpacked<{t.name}>") for t in PLANE_LAYOUTS},
}
CLUSTER_SOURCE_BY_DTYPE = {t: _make_cluster_source(t) for t in FLOAT_DTYPES}
ROLE_SOURCE_BY_DTYPE = {t: _make_role_source(t) for t in FLOAT_DTYPES}
SHARED_SOURCE = _make_tiled_source(None, *(f"split_rows<{CUDA_TYPE_NAMES[t]}, 1>" for t in FLOAT_DTYPES), "add_shares")
SOURCES = (
    SHARED_SOURCE,
    *TILED_SOURCE_BY_DTYPE.values(),
    *WARPGROUP_SOURCE_BY_DTYPE.values(),
    *CLUSTER_SOURCE_BY_DTYPE.values(),
    *ROLE_SOURCE_BY_DTYPE.values(),
)


def _compute_shared_bytes_of_all_stages(dtype: DType, tile: TileShape) -> int:
    """Compute the shared-memory bytes of all pipeline stages of a block: tiles of weights and of activations.

    - In general, rows have 8 additional columns, so that different rows begin in different banks.
    - Warpgroup stages are swizzled and begin at a multiple of 1024 bytes. There are four, or three with two terms.
    - Cluster stages also have two mbarriers each.
    """
    is_float = dtype in FLOAT_DTYPES
    if tile == CLUSTER_TILE:
        columns, of_weights, of_x, more = 64, 4, 4, 1024 + 64
    elif tile == WARPGROUP_TILE:
        columns, of_weights, of_x, more = (64, 3, 6, 1024) if is_float else (64, 4, 4, 1024)
    else:
        columns, of_weights, of_x, more = (40, 3, 6, 0) if is_float else (72, 2, 3, 0)
    return (of_weights * tile.rows + of_x * tile.entries) * columns * 2 + more


def choose_tile_shape(
    launches: LaunchBuilder, w: Operand, entries: float, matrices: int, is_even: bool
) -> tuple[TileShape, int] | None:
    """Choose the tile shape of a matmul with many rows of x, and the number of blocks that share a tile's columns.

    Args:
        launches: Knows the limits of the device.
        w: The weight.
        entries: Rows of x of each matrix, exactly or on average.
        matrices: The number of matrices.
        is_even: Whether each matrix has exactly `entries` rows.

    Returns:
        The tile shape and the number of blocks, or `None` if other kernels are better.
    """

    def has_enough_tiles(tile: TileShape, shares: int, many: int) -> bool:
        """Return whether this many blocks have work, and a block has enough shared memory."""
        tiles = count_blocks(w.shape[-2], tile.rows) * matrices * max(1.0, entries / tile.entries)
        shared_bytes = _compute_shared_bytes_of_all_stages(w.dtype, tile) + count_code_book_bytes(w.dtype)
        return launches.can_allocate_shared_bytes(shared_bytes) and shares * tiles >= many

    if not (w.dtype in PLANE_LAYOUTS or w.dtype in FLOAT_DTYPES):
        return None
    largest = WARPGROUP_TILE if launches.limits.has_warpgroups else TALL_TILE
    max_shares = 1 if not is_even else w.shape[-1] // MIN_SPLIT_COLUMNS if largest == WARPGROUP_TILE else 2
    shares = [n for n in COLUMN_SPLITS if n <= max(1, max_shares)]
    tall = [(largest, n) for n in shares] if entries >= largest.entries else []
    if w.dtype in FLOAT_DTYPES:
        if largest == WARPGROUP_TILE and is_even and _is_cluster_faster_than_warpgroup(w.shape[-2], int(entries)):
            both = [*((CLUSTER_TILE, n) for n in shares), *tall]
            tall = sorted(both, key=lambda choice: choice[1] > 2)  # above two only if no other choice fills a device
        return next(
            (
                (tile, shares)
                for tile, shares in (*tall, (LARGE_TILE, 1))
                if has_enough_tiles(tile, shares, FULL_DEVICE_TILES)
            ),
            (SMALL_TILE, 1),
        )
    if largest == WARPGROUP_TILE and (
        found := next((choice for choice in tall if has_enough_tiles(*choice, FULL_DEVICE_TILES)), None)
    ):
        return found
    return (LARGE_TILE, 1) if entries >= MIN_BF16_ENTRIES and has_enough_tiles(LARGE_TILE, 1, MIN_BF16_TILES) else None


def unpack_to_bf16_if_faster(launches: LaunchBuilder, w: Operand, entries: int) -> Operand | None:
    """Launch the unpacking of a packed matrix to bfloat16 in scratch memory, for faster kernels; `None` if slower.

    Args:
        launches: Receives the launch.
        w: The packed matrix [rows, columns].
        entries: Rows of x.
    """
    rows, columns = w.shape[-2:]
    copy = replace(w, tensor=replace(w.tensor, shape=(rows, columns), dtype=DType.BF16, strides=(columns, 1)))
    is_faster = (
        entries >= MIN_UNPACKED_ENTRIES and 2 * rows * columns <= MAX_UNPACKED_BYTES and launches.limits.has_warpgroups
    )
    if (
        not is_faster
        or (choice := choose_tile_shape(launches, copy, entries, 1, True)) is None
        or choice[0] != CLUSTER_TILE
    ):
        return None
    to = launches.allocate_scratch((rows, columns), DType.BF16)
    words: list[LaunchWord] = [w, to, rows, columns // 32, columns // w.dtype.block * w.dtype.block_bytes]
    kernel = WARPGROUP_SOURCE_BY_DTYPE[w.dtype][f"unpacked<{w.dtype.name}>"]
    launches.add_launch(kernel, (count_blocks(columns, 512), count_blocks(rows, UNIT_ROWS)), 128, words)
    return to


def _is_cluster_faster_than_warpgroup(rows: int, entries: int) -> bool:
    """Return whether cluster tiles are faster than warpgroup tiles, which hold half as many rows of x.

    Cluster tiles are faster if both conditions hold:

    - A cluster can have several blocks.
    - The rows of x, padded to whole cluster tiles, are at most 5/4 of the rows padded to whole warpgroup tiles.

    Args:
        rows: The number of weight rows.
        entries: The number of rows of x.
    """
    room, half = (count_blocks(entries, tile.entries) * tile.entries for tile in (CLUSTER_TILE, WARPGROUP_TILE))
    return _choose_largest_cluster_with_few_idle(count_blocks(rows, CLUSTER_TILE.rows)) > 1 and 4 * room <= 5 * half


def _choose_largest_cluster_with_few_idle(row_blocks: int) -> int:
    """Choose the largest cluster (blocks that run together) for which at most 1/8 of the blocks have no weight rows.

    The number of blocks is rounded up to whole clusters, so the last cluster may have blocks without work.
    """
    return next(size for size in CLUSTER_SIZES if 8 * (-row_blocks % size) <= row_blocks)


def count_activation_terms(dtype: DType, tile: TileShape, is_exact: bool) -> int:
    """Return into how many 16-bit terms each activation is split: one, or two for more exact products.

    Packed weights and inexact 16-bit weights need one term, all others two.
    """
    return 1 if dtype in PLANE_LAYOUTS or (tile in (WARPGROUP_TILE, CLUSTER_TILE) and not is_exact) else 2


def find_activation_rounding_error(dtype: DType, is_exact: bool) -> float | None:
    """Return the relative error of a matmul that rounds activations for weights of a dtype; `None` without rounding."""
    if dtype in FLOAT_DTYPES and is_exact:
        return 2.0**-16
    return 2.0**-8 if dtype in PLANE_LAYOUTS else {DType.F16: 2.0**-11, DType.BF16: 2.0**-8}.get(dtype)


def _split_activations_into_terms(
    launches: LaunchBuilder, w: Operand, x: Operand, terms: int, tile: TileShape, tiles: int
) -> tuple[Operand, LaunchWord]:
    """Launch the split of each activation into 16-bit terms that sum to it, in tile order for clusters.

    Returns:
        The terms, and the launch word of the factors that undo the scales of rows (0: no scales).
    """
    count, step, columns = math.prod(x.shape[:-1]), compute_row_stride(x), x.shape[-1]
    kind = w.dtype if w.dtype in FLOAT_DTYPES else DType.BF16
    if tile == CLUSTER_TILE:
        kernel, room = (
            CLUSTER_SOURCE_BY_DTYPE[kind][f"split_tiles<{CUDA_TYPE_NAMES[kind]}, {terms}>"],
            tiles * tile.entries,
        )
        tokens: list[LaunchWord] = [count if math.prod(w.shape[:-2]) == 1 else x.shape[-2]]
    else:
        kernel, room = (
            (SHARED_SOURCE if terms == 1 else TILED_SOURCE_BY_DTYPE[kind])[
                f"split_rows<{CUDA_TYPE_NAMES[kind]}, {terms}>"
            ],
            count,
        )
        tokens = []
    to = launches.allocate_scratch((room, terms, count_blocks(columns, STAGE_COLUMNS) * STAGE_COLUMNS), DType.BF16)
    undo: LaunchWord = launches.allocate_scratch((count,)) if kind is DType.F16 else 0
    # The block that scales a row reads all of the row; each thread takes four columns at a time.
    whole_row_threads = 32 * min(max(1, count_blocks(columns, 4 * 32)), 32)
    grid, threads = (
        ((count, 1), whole_row_threads) if kind is DType.F16 else ((count, count_blocks(columns, 1024)), 256)
    )
    launches.add_launch(kernel, grid, threads, [x, step, columns, to, undo, *tokens])
    return to, undo


def _make_weight_stride_or_size_words(w: Operand) -> list[LaunchWord]:
    """Return two launch words of a weight: strides between matrices and between rows, or sizes of a packed weight.

    A packed weight has its number of 32-row units and the bytes of a row instead.
    """
    if w.dtype in PLANE_LAYOUTS:
        return [count_blocks(w.shape[-2], UNIT_ROWS), w.shape[-1] // w.dtype.block * w.dtype.block_bytes]
    steps = [s for n, s in zip(w.shape[:-2], w.strides[:-2], strict=True) if n != 1]
    return [steps[-1] if steps else 0, w.strides[-2]]


def _select_tiled_kernel(dtype: DType, tile: TileShape, terms: int) -> KernelInstance:
    """Select the tiled matmul kernel for a weight dtype, a tile shape and a number of activation terms."""
    if tile == CLUSTER_TILE:
        return CLUSTER_SOURCE_BY_DTYPE[dtype][f"clustered<{CUDA_TYPE_NAMES[dtype]}, {terms}>"]
    if tile == WARPGROUP_TILE:
        name = (
            f"grouped<{CUDA_TYPE_NAMES[dtype]}, {terms}>" if dtype in FLOAT_DTYPES else f"grouped_packed<{dtype.name}>"
        )
        return WARPGROUP_SOURCE_BY_DTYPE[dtype][name]
    return TILED_SOURCE_BY_DTYPE[dtype][
        f"tiled<{CUDA_TYPE_NAMES[dtype]}, {tile}>" if dtype in FLOAT_DTYPES else f"tiled_packed<{dtype.name}>"
    ]


def _launch_weight_tiling(launches: LaunchBuilder, w: Operand, row_tiles: int) -> Operand:
    """Launch the copy of a 16-bit matrix [rows, columns] into tiles that kernels load unchanged into shared memory."""
    rows, columns = w.shape[-2:]
    stages = count_blocks(columns, STAGE_COLUMNS)
    to = launches.allocate_scratch((row_tiles, stages, CLUSTER_TILE.rows, STAGE_COLUMNS), DType.BF16)
    kernel = ROLE_SOURCE_BY_DTYPE[w.dtype][f"tile_weights<{CUDA_TYPE_NAMES[w.dtype]}>"]
    launches.add_launch(kernel, (stages, row_tiles), CLUSTER_TILE.threads, [w, to, rows, columns, w.strides[-2]])
    return to


def _count_persistent_blocks(multiprocessors: int, cluster: int, items: int) -> int:
    """Return how many blocks to launch so that all run at once, in clusters of `cluster` blocks.

    There is at most one cluster for each item. Blocks of a cluster share a group of multiprocessors; a group has at
    least `MULTIPROCESSOR_GROUP` of them.
    """
    group = MULTIPROCESSOR_GROUP if cluster > 1 else 1
    return cluster * max(1, min(items, multiprocessors // group * (group // cluster)))


def launch_tiled_tensor_core_matmul(
    launches: LaunchBuilder,
    w: Operand,
    x: Operand,
    out: Operand,
    tiles: Operand,
    tile: TileShape,
    shares: int,
    terms: int,
    route: list[LaunchWord],
) -> None:
    """Launch a tiled matmul on tensor cores: split x into terms, multiply a table of tiles, and add partial results.

    Args:
        launches: Receives the launches.
        w: The weight.
        x: Activations [rows, columns].
        out: Results [rows, weight rows].
        tiles: The table of tiles [tiles, 4], int32.
        tile: The tile shape.
        shares: Number of blocks that share the columns of a tile.
        terms: Number of terms of an activation.
        route: The fields of the routing.
    """
    taken_apart, undo = _split_activations_into_terms(launches, w, x, terms, tile, tiles.shape[0])
    rows, count = w.shape[-2], math.prod(out.shape[:-1])
    row_blocks = count_blocks(rows, tile.rows)
    cluster = _choose_largest_cluster_with_few_idle(row_blocks) if tile == CLUSTER_TILE else 1
    grid = (tiles.shape[0], count_blocks(row_blocks, cluster) * cluster, shares)
    run = count_blocks(w.shape[-1], shares * STAGE_COLUMNS) * STAGE_COLUMNS
    parts = None
    more: list[LaunchWord] = []
    if tile in (WARPGROUP_TILE, CLUSTER_TILE):
        more = [0, 0]
        if shares > 1:
            left = launches.allocate_scratch((math.prod(grid), tile.rows * tile.entries))
            more = [left, launches.upload_constant(np.zeros(grid[:2], np.uint32))]  # kernels reset it to zeros
    elif shares > 1:
        parts = launches.allocate_scratch((shares, count, rows))
    to: list[LaunchWord] = [
        parts or out,
        w.shape[-1],
        rows,
        *_make_weight_stride_or_size_words(w),
        rows if parts else compute_row_stride(out),
    ]
    words: list[LaunchWord] = [w, taken_apart, undo, *to, tiles, *route, run, count * rows]
    shared_bytes = _compute_shared_bytes_of_all_stages(w.dtype, tile)
    is_plain = tile == CLUSTER_TILE and shares == terms == 1 and math.prod(w.shape[:-2]) == 1
    if is_plain and UnmeasuredKernelCandidate.PRODUCT_ROLES in launches.limits.candidates:
        tiled_weight = _launch_weight_tiling(launches, w, row_blocks)
        items = tiles.shape[0] * grid[1] // cluster
        blocks = _count_persistent_blocks(launches.multiprocessor_count, cluster, items)
        role_words = [tiled_weight, *words[1:], tiles.shape[0], items]
        kernel = ROLE_SOURCE_BY_DTYPE[w.dtype][f"multiply_by_roles<{CUDA_TYPE_NAMES[w.dtype]}>"]
        launches.add_launch(kernel, blocks, ROLE_THREADS, role_words, shared_bytes, (cluster, 1, 1))
        return
    kernel = _select_tiled_kernel(w.dtype, tile, terms)
    launches.add_launch(kernel, grid, tile.threads, [*words, *more], shared_bytes, (1, cluster, 1))
    if parts:
        words = [parts, out, shares, count * rows, rows, compute_row_stride(out)]
        launches.add_launch(SHARED_SOURCE["add_shares"], (count, count_blocks(rows, 1024)), 256, words)
