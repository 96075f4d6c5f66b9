"""The layout of quantisation blocks in memory, as in ``ggml-common.h`` of llama.cpp, and their code books."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..graph.dtypes import DType

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


def _make_record_dtype(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype(list(fields))


D, DMIN = ("d", "<f2"), ("dmin", "<f2")
"""Fields of records: the scale and the minimum of a block, float16."""

BLOCK_LAYOUTS = {
    DType.Q4_0: _make_record_dtype(D, ("qs", "u1", 16)),
    DType.Q4_1: _make_record_dtype(D, DMIN, ("qs", "u1", 16)),
    DType.Q5_0: _make_record_dtype(D, ("qh", "u1", 4), ("qs", "u1", 16)),
    DType.Q5_1: _make_record_dtype(D, DMIN, ("qh", "u1", 4), ("qs", "u1", 16)),
    DType.Q8_0: _make_record_dtype(D, ("qs", "i1", 32)),
    DType.Q2_K: _make_record_dtype(("scales", "u1", 16), ("qs", "u1", 64), D, DMIN),
    DType.Q3_K: _make_record_dtype(("qh", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), D),
    DType.Q4_K: _make_record_dtype(D, DMIN, ("scales", "u1", 12), ("qs", "u1", 128)),
    DType.Q5_K: _make_record_dtype(D, DMIN, ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)),
    DType.Q6_K: _make_record_dtype(("qs", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), D),
    DType.IQ2_XXS: _make_record_dtype(D, ("qs", "<u4", 16)),
    DType.IQ2_XS: _make_record_dtype(D, ("qs", "<u2", 32), ("scales", "u1", 8)),
    DType.IQ3_XXS: _make_record_dtype(D, ("qs", "u1", 64), ("signs", "<u4", 8)),
    DType.IQ1_S: _make_record_dtype(D, ("qs", "u1", 32), ("qh", "<u2", 8)),
    DType.IQ4_NL: _make_record_dtype(D, ("qs", "u1", 16)),
    DType.IQ3_S: _make_record_dtype(D, ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)),
    DType.IQ2_S: _make_record_dtype(D, ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)),
    DType.IQ4_XS: _make_record_dtype(D, ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)),
    DType.IQ1_M: _make_record_dtype(("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)),
    DType.TQ1_0: _make_record_dtype(("qs", "u1", 48), ("qh", "u1", 4), D),
    DType.TQ2_0: _make_record_dtype(("qs", "u1", 64), D),
    DType.MXFP4: _make_record_dtype(("e", "u1"), ("qs", "u1", 16)),
    DType.NVFP4: _make_record_dtype(("scales", "u1", 4), ("qs", "u1", 32)),
    DType.Q1_0: _make_record_dtype(D, ("qs", "u1", 16)),
    DType.Q2_0: _make_record_dtype(D, ("qs", "u1", 16)),
}
"""The NumPy record of a quantised block by dtype; the field names are the names in ggml."""

IQ4_NL_CODE_BOOK = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The 4-bit code book ``kvalues_iq4nl`` of ggml."""
FP4_VALUES_TIMES_2 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of a 4-bit float (``kvalues_mxfp4``); ggml drops the sign of minus zero."""


def _compute_half_e4m3_values() -> F32:
    """Return a table of half the value of each 8-bit E4M3 float (4 exponent bits, 3 fraction bits): float32 [256].

    The sign is ignored, and NaN gives 0. Source: ``ue4m3_to_fp32`` of ggml.
    """
    bits = np.arange(256, dtype=np.uint32)
    halves = ((bits & 127) << 20).view(np.float32) * np.float32(2.0**119)
    halves[127] = 0
    return halves


HALF_OF_E4M3 = _compute_half_e4m3_values()
"""Half of the value of each E4M3 byte."""
