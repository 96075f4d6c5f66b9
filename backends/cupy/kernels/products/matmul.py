"""Binding of matmuls, also with the experts that a router chose: the choice of kernels and tiles.

1. Up to 4 rows of x per matrix: GEMV.
2. More rows: tensor cores, over a table of tiles, for packed and 16-bit weights.
3. Other weights and strides: the kernel for any strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .....graph.dtypes import DType
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ...binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, compute_row_stride, count_blocks
from ...device.driver import KernelSource
from ...generated.row_prologue import RowPrologue
from ..elementwise import as_float
from . import dense, packed, products, tiled
from .epilogues import RoutingEpilogue
from .routes import NO_UNIT, WeightsAndResults

ROUTES_SOURCE = KernelSource("routes.cu", ("routes",), ("routes.cuh",))
SOURCES = (ROUTES_SOURCE, *dense.SOURCES, *packed.SOURCES, *tiled.SOURCES)
MAX_GEMV_ROWS = 4
"""Maximum rows of x per matrix for GEMV kernels, which keep up with memory. Tensor cores multiply more rows."""
MAX_GRID_SIZE = 65535
"""Maximum number of entries or tiles of a launch."""
TiledLauncher = Callable[..., None]
"""A function that multiplies a table of tiles: x, out, tiles, route."""


def is_complete_packed_weight(w: Operand) -> bool:
    """Return whether an operand is a complete weight in packed layout, not a view of a part."""
    return w.has_packed_layout and w.is_whole_buffer


def _as_matmul_readable_weight(launches: LaunchBuilder, w: Operand) -> Operand:
    """Return a weight in a form that matmul kernels read: packed or float as it is, anything else converted."""
    if is_complete_packed_weight(w):
        return w
    return w if w.dtype in dense.GEMV_SOURCE_BY_DTYPE else as_float(launches, w)


def is_gemv_readable(w: Operand) -> bool:
    """Return whether GEMV kernels can read the weight in its stored form."""
    return is_complete_packed_weight(w) or (w.dtype in dense.GEMV_SOURCE_BY_DTYPE and w.strides[-1] == 1)


def _has_tensor_core_kernel(w: Operand) -> bool:
    """Return whether there is a tensor-core kernel for the weight."""
    return is_complete_packed_weight(w) or w.dtype in tiled.FLOAT_DTYPES


def _choose_tensor_core_launcher_and_rows(
    launches: LaunchBuilder, call: BoundInstruction, w: Operand, entries: float, matrices: int, is_even: bool
) -> tuple[int, TiledLauncher]:
    """Choose the launch function of a tiled matmul on tensor cores, and the maximum rows of x of its tiles.

    Args:
        launches: Receives launches that unpack the weight.
        call: The matmul instruction.
        w: The weight.
        entries: Rows of x of each matrix, exactly or on average.
        matrices: The number of matrices.
        is_even: Whether each matrix has exactly `entries` rows.

    Returns:
        The maximum rows of x of a tile, and the launch function.
    """
    is_exact = bool(call.attrs["exact"]) and not is_complete_packed_weight(w)
    if is_even and is_complete_packed_weight(w) and math.prod(w.shape[:-2]) == 1:
        w = tiled.unpack_to_bf16_if_faster(launches, w, int(entries)) or w
    if found := tiled.choose_tile_shape(launches, w, entries, matrices, is_even):
        tile, shares = found
        terms = tiled.count_activation_terms(w.dtype, tile, is_exact)
        return tile.entries, partial(
            tiled.launch_tiled_tensor_core_matmul, launches, w, tile=tile, shares=shares, terms=terms
        )
    shape = packed.choose_largest_tile_filling_device(w, entries, matrices)
    return 8 * shape[0], partial(packed.quantise_and_launch_tiled_matmul, launches, w, shape=shape)


def launch_gemv_of_any_weights(
    launches: LaunchBuilder,
    products: WeightsAndResults,
    x: Operand,
    entries: int,
    tokens: int,
    route: list[LaunchWord],
    unit: int = NO_UNIT,
    other_products: WeightsAndResults = (),
    other_entries: int = 0,
    prologue: RowPrologue | None = None,
    epilogue: RoutingEpilogue | None = None,
) -> None:
    """Launch a GEMV: multiply a few rows of x by packed or float weights; see `dense.launch_gemv`."""
    arguments = launches, products, x, entries, tokens, route, unit, other_products, other_entries, prologue
    if is_complete_packed_weight(products[0][0]):
        require_supported(epilogue is None, "products with packed weights choose no experts")
        packed.launch_gemv(*arguments)
    else:
        dense.launch_gemv(*arguments, epilogue)


# -------------------------------------------------------------------------------------------------------- mul_mat


def _compute_weight_matrix_indices(w: Operand, x: Operand) -> npt.NDArray[np.int32]:
    """Return, for each matrix of `x`, the index of the weight matrix that multiplies it.

    If `w` has fewer matrices than `x` along an axis, adjacent matrices of `x` share a weight matrix.
    """
    leading = x.shape[:-2]
    sizes = (1,) * (len(leading) - len(w.shape) + 2) + w.shape[:-2]
    matrices = np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes)
    for axis, (n, m) in enumerate(zip(sizes, leading, strict=True)):
        matrices = np.repeat(matrices, m // n if n else 0, axis=axis)
    return matrices.reshape(-1)


def _bind_mul_mat(launches: LaunchBuilder, call: BoundInstruction) -> None:
    w, x, out = _as_matmul_readable_weight(launches, call.operand(0)), as_float(launches, call.operand(1)), call.out
    matrices, tokens = _compute_weight_matrix_indices(w, x), x.shape[-2]
    if math.prod(w.shape[:-2]) == 1:
        matrices, tokens = np.zeros(1, np.int32), math.prod(x.shape[:-1])
    even = (
        w.strides[-1] == 1 and (len(w.shape) == 2 or _has_uniform_matrix_stride(w)) and len(matrices) <= MAX_GRID_SIZE
    )
    if not is_complete_packed_weight(w) and (
        not even or not x.has_uniform_row_stride or (tokens > MAX_GEMV_ROWS and not _has_tensor_core_kernel(w))
    ):
        return products.launch_strided_matmul(launches, w, x, out)
    if tokens <= MAX_GEMV_ROWS:
        require_supported(len(matrices) <= MAX_GRID_SIZE, f"{len(matrices)} matrices are too many for one launch")
        count = math.prod(w.shape[:-2])
        # Every index is valid, so the fault fields stay 0.
        route: list[LaunchWord] = [1, 1, launches.upload_constant(matrices) if count > 1 else 0, 0, count, count, 0, 0]
        return launch_gemv_of_any_weights(launches, [(w, out)], x, len(matrices), tokens, route)
    size, many = _choose_tensor_core_launcher_and_rows(launches, call, w, tokens, len(matrices), is_even=True)
    tiles = [
        (matrix, entry * tokens + first, min(size, tokens - first), 0)
        for entry, matrix in enumerate(matrices.tolist())
        for first in range(0, tokens, size)
    ]
    require_supported(len(tiles) <= MAX_GRID_SIZE, f"{len(tiles)} tiles are too many for one launch")
    many(x, out, launches.upload_constant(np.array(tiles, np.int32).reshape(-1, 4)), route=[0, 1, 1])


def _has_uniform_matrix_stride(w: Operand) -> bool:
    """Return whether the distance between consecutive matrices of a weight is constant."""
    axes = [(n, s) for n, s in zip(w.shape[:-2], w.strides[:-2], strict=True) if n != 1]
    return all(outer == n * inner for (_, outer), (n, inner) in pairwise(axes))


# ----------------------------------------------------------------------------------------------------- mul_mat_id


def _bind_mul_mat_id(launches: LaunchBuilder, call: BoundInstruction) -> None:
    w, x, out = _as_matmul_readable_weight(launches, call.operand(0)), as_float(launches, call.operand(1)), call.out
    require_supported(w.strides[-1] == 1 or w.shape[-1] == 1 or 0 in w.shape, "rows of experts are not dense")
    compute_row_stride(x), compute_row_stride(out)
    experts, total, slots = w.shape[0], _count_all_experts(call), math.prod(call.operand(2).shape)
    spread, choice = make_slot_map_and_choice_fields(launches, call)
    if has_few_slots_per_expert(call) or not _has_tensor_core_kernel(w):
        require_supported(slots <= MAX_GRID_SIZE, f"{slots} slots are too many for one launch")
        return launch_gemv_of_any_weights(launches, [(w, out)], x, slots, 1, [*spread, *choice])
    size, many = _choose_tensor_core_launcher_and_rows(launches, call, w, slots / total, experts, is_even=False)
    count = experts + 1 + slots // size
    require_supported(count <= MAX_GRID_SIZE, f"{count} tiles are too many for one launch")
    tiles, order = launches.allocate_scratch((count, 4), DType.I32), launches.allocate_scratch((slots,), DType.I32)
    threads = min(1024, count_blocks(max(slots, experts + 1), 32) * 32)
    launches.add_launch(
        ROUTES_SOURCE["routes"], 1, threads, [slots, size, count, tiles, order, *choice], 4 * (experts + 1)
    )
    many(x, out, tiles, route=[order, *spread])


def _count_all_experts(call: BoundInstruction) -> int:
    """Return the number of experts of a `mul_mat_id` instruction, including those on other devices."""
    return int(np.asarray(call.attrs["total"])) or call.operand(0).shape[0]


def has_few_slots_per_expert(call: BoundInstruction) -> bool:
    """Return whether few tokens go to each expert on average, so that a GEMV is better than a tiled matmul."""
    return math.prod(call.operand(2).shape) <= max(MAX_GEMV_ROWS, _count_all_experts(call) // 2)


def make_slot_map_and_choice_fields(
    launches: LaunchBuilder, call: BoundInstruction
) -> tuple[list[LaunchWord], list[LaunchWord]]:
    """Return the kernel arguments that route tokens to experts: the row of x of each slot, and the C struct `Choice`.

    A slot is one pair of a token and a chosen expert.
    """
    x, ids, total = call.operand(1), call.operand(2), _count_all_experts(call)
    require_supported(ids.is_dense, "ids of experts do not lie densely")
    flat = replace(ids, tensor=replace(ids.tensor, shape=(math.prod(ids.shape),), strides=(1,)))
    first = int(np.asarray(call.attrs["first"]))
    fault = launches.add_fault_message(f"id {{value}} is none of {total} experts")
    return [ids.shape[-1], x.shape[-2]], [flat, first, call.operand(0).shape[0], total, *fault]


BINDINGS: Mapping[str, OpBinder] = {"mul_mat": _bind_mul_mat, "mul_mat_id": _bind_mul_mat_id}
