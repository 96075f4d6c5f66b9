"""Quantised rows of weights by compiled kernels, without the GIL: several threads quantise at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .....graph.dtypes import DType
from .....graph.errors import GraphError
from .....ops.quantisation import encode_array
from ...compilation.compiler import KERNEL_FUNCTION, Kernel, compile_missing_kernels
from . import code_blocks, iq1_blocks, iq2_blocks, iq3_blocks, narrow_blocks, small_blocks, super_blocks
from .block_loop import ARGS
from .code_blocks import make_doubled_fp4_nearest_value_table, make_iq4_nearest_value_table
from .lattice_search import LATTICE_SCRATCH_BYTES

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

KERNELS: dict[DType, tuple[Kernel, Callable[[], FloatArray] | None]] = {
    DType.BF16: (small_blocks.round_bf16, None),
    DType.Q4_0: (small_blocks.quantise_q4_0, None),
    DType.Q4_1: (small_blocks.quantise_q4_1, None),
    DType.Q5_0: (small_blocks.quantise_q5_0, None),
    DType.Q5_1: (small_blocks.quantise_q5_1, None),
    DType.Q8_0: (small_blocks.quantise_q8_0, None),
    DType.Q2_K: (super_blocks.quantise_q2_k, None),
    DType.Q3_K: (super_blocks.quantise_q3_k, None),
    DType.Q4_K: (super_blocks.quantise_q4_k, None),
    DType.Q5_K: (super_blocks.quantise_q5_k, None),
    DType.Q6_K: (super_blocks.quantise_q6_k, None),
    DType.IQ4_NL: (code_blocks.quantise_iq4_nl, make_iq4_nearest_value_table),
    DType.IQ4_XS: (code_blocks.quantise_iq4_xs, make_iq4_nearest_value_table),
    DType.IQ3_S: (iq3_blocks.quantise_iq3_s, iq3_blocks.make_iq3_s_table),
    DType.IQ3_XXS: (iq3_blocks.quantise_iq3_xxs, iq3_blocks.make_iq3_xxs_table),
    DType.IQ2_S: (iq2_blocks.quantise_iq2_s, iq2_blocks.make_iq2_s_table),
    DType.IQ2_XS: (iq2_blocks.quantise_iq2_xs, iq2_blocks.make_iq2_xs_table),
    DType.IQ2_XXS: (iq2_blocks.quantise_iq2_xxs, iq2_blocks.make_iq2_xxs_table),
    DType.IQ1_M: (iq1_blocks.quantise_iq1_m, iq1_blocks.make_iq1_search_table),
    DType.IQ1_S: (iq1_blocks.quantise_iq1_s, iq1_blocks.make_iq1_search_table),
    DType.Q1_0: (narrow_blocks.quantise_q1_0, None),
    DType.Q2_0: (narrow_blocks.quantise_q2_0, None),
    DType.NVFP4: (narrow_blocks.quantise_nvfp4, narrow_blocks.make_nvfp4_value_and_scale_table),
    DType.MXFP4: (code_blocks.quantise_mxfp4, make_doubled_fp4_nearest_value_table),
    DType.TQ1_0: (code_blocks.quantise_tq1_0, None),
    DType.TQ2_0: (code_blocks.quantise_tq2_0, None),
}
"""By dtype: the kernel, and the function that makes its table."""
SEARCHED_DTYPES = (DType.Q4_1, DType.Q5_1)
"""Dtypes with blocks of 32 that have a search of scales also without importances.

Q4_0 and Q5_0 have none: a search lowers their squared error by 10 %, but the KL divergence of SmolLM2 grows by 8 %.
"""
WRITABLE_DTYPES = (DType.F32, DType.F16, *KERNELS)
"""The dtypes to which `quantise_rows` rounds."""


def compile_quantisers(dtypes: set[DType]) -> None:
    """Compile the quantiser kernels of some dtypes in advance, so that their first use does not wait."""
    compile_missing_kernels(KERNELS[dtype][0] for dtype in dtypes if dtype in KERNELS)


def quantise_rows(
    x: FloatArray, dtype: DType, importance: FloatArray | None = None, *, searches: bool = True
) -> ByteArray:
    """Quantise or round rows of numbers to the storage format of a weight dtype.

    Args:
        x: Finite numbers [rows, columns]; `columns` is a multiple of ``dtype.block``.
        dtype: One of `WRITABLE_DTYPES`.
        importance: The weight of the squared errors of each column [columns], 0 or more. With None, all columns are
            equally important. It has no effect for floats, Q8_0, MXFP4 and ternary types.
        searches: Whether Q4_1 and Q5_1 search the scales with the smallest error if there are no importances. If False,
            the range of a block determines its scale, and the bytes equal the bytes of ggml.

    Returns:
        uint8 [rows, row bytes].

    Raises:
        GraphError: The dtype has no quantiser, or the columns are no whole number of blocks.
    """
    if dtype not in WRITABLE_DTYPES:
        raise GraphError(
            f"quantise_rows({dtype}): there is no quantiser for this dtype; need one of "
            f"{', '.join(map(str, WRITABLE_DTYPES))}"
        )
    rows, columns = x.shape
    if columns % dtype.block:
        raise GraphError(f"quantise_rows({dtype}): rows have {columns} columns; need a multiple of {dtype.block}")
    x = np.ascontiguousarray(x, np.float32)
    if dtype not in KERNELS:
        return np.ascontiguousarray(encode_array(x, dtype)).view(np.uint8).reshape(rows, -1)
    body, make_table = KERNELS[dtype]
    table = None if make_table is None else make_table()
    out = np.empty((rows, dtype.count_bytes(columns)), np.uint8)
    scratch = np.empty(LATTICE_SCRATCH_BYTES, np.uint8)
    values = {"x": x.ctypes.data, "y": out.ctypes.data, "rows": rows, "columns": columns}
    values |= {"scratch": scratch.ctypes.data, "importance": 0, "table": 0 if table is None else table.ctypes.data}
    if importance is None and searches and dtype in SEARCHED_DTYPES:
        importance = np.ones(columns, np.float32)
    if importance is not None:
        importance = _normalise_and_raise_importances(importance)
        values["importance"] = importance.ctypes.data
    block = np.array(ARGS(**values), np.int64)
    KERNEL_FUNCTION(body.address)(block.ctypes.data, 0, 1)
    return out


MIN_IMPORTANCE = np.float32(1e-6)
"""The smallest importance of a column, as a share of the mean. With zeros, a block might have no scale."""


def _normalise_and_raise_importances(importance: FloatArray) -> FloatArray:
    """Normalise importances [columns] to the mean 1, and raise them to a positive minimum."""
    mean = float(importance.mean(dtype=np.float64))
    if not mean > 0:
        return np.ones(len(importance), np.float32)
    return np.maximum((importance / mean).astype(np.float32), MIN_IMPORTANCE)
