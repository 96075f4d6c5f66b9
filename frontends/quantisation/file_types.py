"""The types of ``hocket quantize``: the number that a file stores, and the dtype of most of its tensors.

Source: ``llama_ftype`` in llama.h, and ``llama_ftype_get_default_type`` in llama-quant.cpp of llama.cpp.
"""

from __future__ import annotations

from ...backends.cpu.kernels.quantisers.row_quantiser import WRITABLE_DTYPES
from ...graph.dtypes import DType
from ...graph.lazy_dataclass import dataclass
from ...graph.validation import did_you_mean
from ..errors import ModelError


@dataclass(frozen=True, slots=True)
class FileType:
    """A file type of llama.cpp, such as Q4_K_M, which determines the dtypes of all tensors of a file.

    `number` is the value of ``general.file_type``. Most tensors have the dtype `dtype`.
    """

    name: str
    number: int
    dtype: DType


FILE_TYPES = {
    one.name: one
    for one in (
        FileType("F32", 0, DType.F32),
        FileType("F16", 1, DType.F16),
        FileType("BF16", 32, DType.BF16),
        FileType("Q8_0", 7, DType.Q8_0),
        FileType("Q6_K", 18, DType.Q6_K),
        FileType("Q5_K_M", 17, DType.Q5_K),
        FileType("Q5_K_S", 16, DType.Q5_K),
        FileType("Q5_1", 9, DType.Q5_1),
        FileType("Q5_0", 8, DType.Q5_0),
        FileType("Q4_K_M", 15, DType.Q4_K),
        FileType("Q4_K_S", 14, DType.Q4_K),
        FileType("IQ4_NL", 25, DType.IQ4_NL),
        FileType("IQ4_XS", 30, DType.IQ4_XS),
        FileType("Q4_1", 3, DType.Q4_1),
        FileType("Q4_0", 2, DType.Q4_0),
        FileType("MXFP4_MOE", 38, DType.MXFP4),
        FileType("IQ3_M", 27, DType.IQ3_S),
        FileType("IQ3_S", 26, DType.IQ3_S),
        FileType("IQ3_XS", 22, DType.IQ3_S),
        FileType("IQ3_XXS", 23, DType.IQ3_XXS),
        FileType("Q3_K_L", 13, DType.Q3_K),
        FileType("Q3_K_M", 12, DType.Q3_K),
        FileType("Q3_K_S", 11, DType.Q3_K),
        FileType("Q2_K", 10, DType.Q2_K),
        FileType("Q2_K_S", 21, DType.Q2_K),
        FileType("IQ2_M", 29, DType.IQ2_S),
        FileType("IQ2_S", 28, DType.IQ2_XS),
        FileType("IQ2_XS", 20, DType.IQ2_XS),
        FileType("IQ2_XXS", 19, DType.IQ2_XXS),
        FileType("Q2_0", 41, DType.Q2_0),
        FileType("TQ2_0", 37, DType.TQ2_0),
        FileType("IQ1_M", 31, DType.IQ1_M),
        FileType("IQ1_S", 24, DType.IQ1_S),
        FileType("TQ1_0", 36, DType.TQ1_0),
        FileType("Q1_0", 40, DType.Q1_0),
    )
}
"""The types by name, from the largest to the smallest files of each group."""
OTHER_NAMES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "FP16": "F16", "FP32": "F32"}
"""Short names of types."""


def find_writable_dtype(text: str) -> DType | None:
    """Return the dtype with a name, or None if it cannot be written; upper and lower case are equal."""
    return next((dtype for dtype in WRITABLE_DTYPES if dtype.text.lower() == text.lower()), None)


def parse_file_type(text: str) -> FileType:
    """Return the file type with a name; upper and lower case are equal.

    Raises:
        ModelError: There is no such type.
    """
    name = text.upper()
    name = OTHER_NAMES.get(name, name)
    if name not in FILE_TYPES and find_writable_dtype(name) is not None:
        raise ModelError(
            f"type {name}: it is a dtype of tensors, but not a type of files; give another type, and "
            f"--tensor-type REGEX={name.lower()}"
        )
    if name not in FILE_TYPES:
        hint = did_you_mean(name, FILE_TYPES) or f"; one of {', '.join(FILE_TYPES)}"
        raise ModelError(f"there is no type {text!r:.80}{hint}")
    return FILE_TYPES[name]
