"""GEMV of a few rows with float32, float16 or bfloat16 weights that have contiguous rows."""

from __future__ import annotations

from itertools import accumulate

from .....graph.dtypes import DType
from ....fusion.operands import Operand, require_supported
from ...binding.launch_builder import (
    MAX_DECLARED_SHARED_BYTES,
    LaunchBuilder,
    LaunchWord,
    compute_row_stride,
    count_blocks,
)
from ...device.device_limits import DEFAULT_SHARED_BYTES
from ...device.driver import KernelSource
from ...generated.row_prologue import (
    BLOCK_SUM_FLOATS,
    LANES_HEADER,
    PLAIN_PROLOGUE,
    PLAIN_PROLOGUE_WORDS,
    RowPrologue,
)
from ..elementwise import CUDA_TYPE_NAMES
from .epilogues import PLAIN_EPILOGUE, PLAIN_EPILOGUE_WORDS, ROUTING_EPILOGUE_HEADERS, RoutingEpilogue
from .routes import NO_SUM_FIELDS, NO_UNIT, WeightedExpertSum, WeightsAndResults, join_and_pad_product_words

ROWS_PER_BLOCK = 16
"""Weight rows of a block. Each warp has two rows and all their columns."""
COLUMN_SPLITS, MIN_SPLIT_COLUMNS = (8, 4, 2), 256
"""Numbers of column parts for weights with few rows, and the minimum columns of a part. Warps share the parts."""
SUM_ROWS_PER_BLOCK, MAX_SUM_WARPS = 2, 12
"""Weight rows of a block that adds entries, and its maximum warps. The warps share the entries."""
PROLOGUE_WARP_FACTOR, MAX_PROLOGUE_BLOCKS = 2, 132
"""Blocks that compute x have this factor more warps; and the maximum number of these blocks."""
TOKEN_COUNTS = (1, 2, 4)
SOURCES = tuple(
    KernelSource(
        "dense.cu",
        (*(f"few<{CUDA_TYPE_NAMES[dtype]}, {n}>" for n in TOKEN_COUNTS), f"summed<{CUDA_TYPE_NAMES[dtype]}>"),
        ("routes.cuh", PLAIN_PROLOGUE, PLAIN_EPILOGUE),
    )
    for dtype in (DType.F32, DType.F16, DType.BF16)
)
GEMV_SOURCE_BY_DTYPE = dict(zip((DType.F32, DType.F16, DType.BF16), SOURCES, strict=True))


def _make_weight_size_and_stride_words(w: Operand) -> list[LaunchWord]:
    """Return launch words of a weight: its row count, and its strides between matrices and between rows."""
    steps = [s for n, s in zip(w.shape[:-2], w.strides[:-2], strict=True) if n != 1]
    return [w.shape[-2], steps[-1] if steps else 0, w.strides[-2]]


def launch_gemv(
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
    """Launch a GEMV: multiply a few rows of x by several float weights.

    An entry is one weight matrix with its rows of x. With experts it is a pair of a token and a chosen expert.

    Args:
        launches: Receives the launch.
        products: The weights and their results.
        x: Activations [entries * tokens, columns].
        entries: The number of entries.
        tokens: Rows of x for each entry, at most 4.
        route: The fields that map each entry to its matrix and rows.
        unit: Code of the gated unit, such as SwiGLU, that joins two products.
        other_products: Weights of additional entries, which have one row each.
        other_entries: The number of additional entries.
        prologue: The computation of x, which is not read then.
        epilogue: The expert routing by one of the results.
    """
    count = next(n for n in TOKEN_COUNTS if n >= tokens)
    w = products[0][0]

    def count_row_blocks(parts: int) -> list[int]:
        return [count_blocks(matrix.shape[-2], ROWS_PER_BLOCK // parts // (2 if unit else 1)) for matrix, _ in products]

    def can_split(parts: int) -> bool:
        taken = count_row_blocks(parts // 2)
        busy = (taken[0] if unit else sum(taken)) * (entries + other_entries)
        return w.shape[-1] >= MIN_SPLIT_COLUMNS * parts and busy < launches.multiprocessor_count

    parts, more = next(filter(can_split, COLUMN_SPLITS), 1), 1 if prologue is None else PROLOGUE_WARP_FACTOR
    taken = [count_blocks(n, more) for n in count_row_blocks(parts)]
    first = [0 if unit else n for n in accumulate(taken, initial=0)]
    fields = [
        [w, out, n, *_make_weight_size_and_stride_words(w), compute_row_stride(out)]
        for (w, out), n in zip([*products, *other_products], [*first, 0], strict=False)
    ]
    words = [
        *join_and_pad_product_words(fields),
        len(products),
        unit,
        parts,
        x if prologue is None else 0,
        w.shape[-1],
        tokens,
        compute_row_stride(x),
        *route,
        entries,
    ]
    words += [*NO_SUM_FIELDS, *(PLAIN_PROLOGUE_WORDS if prologue is None else prologue.words)]
    words += PLAIN_EPILOGUE_WORDS if epilogue is None else epilogue.words
    source, shared = _make_gemv_source(w.dtype, prologue, epilogue), 0 if epilogue is None else epilogue.shared_bytes
    if prologue is not None:
        # The number of parts depends on the device, and this decision does not: memory is planned with it.
        blocks = sum(count_blocks(n, PROLOGUE_WARP_FACTOR) for n in count_row_blocks(1)[: 1 if unit else None])
        require_supported(blocks <= MAX_PROLOGUE_BLOCKS, "many blocks would compute the rows of x")
        shared = max(shared, 4 * (count * (w.shape[-1] + prologue.numbers_per_row) + BLOCK_SUM_FLOATS))
        require_supported(shared + MAX_DECLARED_SHARED_BYTES <= DEFAULT_SHARED_BYTES, "x is long for shared memory")
    kernel = source[f"few<{CUDA_TYPE_NAMES[w.dtype]}, {count}>"]
    grid = taken[0] if unit else sum(taken), entries + other_entries
    launches.add_launch(kernel, grid, 256 * more, words, shared)


def _make_gemv_source(dtype: DType, prologue: RowPrologue | None, epilogue: RoutingEpilogue | None) -> KernelSource:
    """Make the source of GEMV kernels with a prologue and an epilogue."""
    plain = GEMV_SOURCE_BY_DTYPE[dtype]
    if prologue is None and epilogue is None:
        return plain
    before = PLAIN_PROLOGUE if prologue is None else LANES_HEADER
    after = (PLAIN_EPILOGUE,) if epilogue is None else ROUTING_EPILOGUE_HEADERS
    generated = "".join(part.text for part in (prologue, epilogue) if part is not None)
    return KernelSource("dense.cu", plain.names, ("routes.cuh", before, *after), generated=generated)


def launch_gemv_with_expert_sum(
    launches: LaunchBuilder, w: Operand, x: Operand, out: Operand, summed: WeightedExpertSum
) -> None:
    """Launch a GEMV with the float weights of chosen experts, which also adds up the weighted results of each token.

    Args:
        launches: Receives the launch.
        w: Weights of the experts.
        x: Activations, contiguous [tokens, used experts, columns].
        out: Results [tokens, rows].
        summed: The factors of the products, and the weight of an additional product.
    """
    products = [(w, out), *([] if summed.other is None else [(summed.other, out)])]
    fields: list[list[LaunchWord]] = [
        [m, o, 0, *_make_weight_size_and_stride_words(m), compute_row_stride(o)] for m, o in products
    ]
    words = [
        *join_and_pad_product_words(fields),
        1,
        NO_UNIT,
        1,
        x,
        w.shape[-1],
        1,
        compute_row_stride(x),
        1,
        1,
        *summed.choice,
        0,
        *summed.words,
        *PLAIN_PROLOGUE_WORDS,
        *PLAIN_EPILOGUE_WORDS,
    ]
    grid = count_blocks(w.shape[-2], SUM_ROWS_PER_BLOCK), out.shape[0]
    launches.add_launch(
        GEMV_SOURCE_BY_DTYPE[w.dtype][f"summed<{CUDA_TYPE_NAMES[w.dtype]}>"],
        grid,
        32 * min(MAX_SUM_WARPS, summed.products_per_token),
        words,
    )
