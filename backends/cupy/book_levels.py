"""Writes ``book_levels.cuh``, the code books for CUDA kernels: ``python -m hocket.backends.cupy.book_levels``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...graph.dtypes import DType
from ...graph.storage.files import write_text
from ...ops.quantisation import load_code_book
from .device.driver import KERNEL_FOLDER

BOOK_LEVELS_FILE = KERNEL_FOLDER / "products" / "book_levels.cuh"
BOOK_DTYPES = (DType.IQ3_S, DType.IQ3_XXS, DType.IQ2_S, DType.IQ2_XS, DType.IQ2_XXS, DType.IQ1_S)
"""A dtype for each code book. IQ1_M has the book of IQ1_S."""
LEVELS_PER_LINE = 14
HEADER = """// The code books of the types IQ1, IQ2 and IQ3, from `python -m hocket.backends.cupy.book_levels`.
//
// A level is the position of a number among the distinct numbers of the book.  The first column has the
// lowest bits of an entry.
"""


def compute_codebook_entry_levels(dtype: DType) -> npt.NDArray[np.uint16]:
    """Return each entry of a code book in 16 bits, as level numbers: 4 bits for each of 4 columns, or 2 for each of 8.

    A level is the position of a value among the distinct values of the code book, in ascending order.
    """
    book = load_code_book(dtype)
    levels = np.searchsorted(np.unique(book), book).astype(np.uint16)
    columns = levels.shape[1]
    shifts = np.arange(columns, dtype=np.uint16) * np.uint16(16 // columns)
    return np.bitwise_or.reduce(levels << shifts, axis=1)


def format_book_levels_header() -> str:
    """Return the text of the generated header ``book_levels.cuh``, with the code books of all dtypes as C++ arrays."""
    parts = [HEADER]
    for dtype in BOOK_DTYPES:
        words = [f"0x{level:04x}" for level in compute_codebook_entry_levels(dtype).tolist()]
        lines = [", ".join(words[i : i + LEVELS_PER_LINE]) for i in range(0, len(words), LEVELS_PER_LINE)]
        name, count = dtype.name, len(words)
        parts.append(
            f"__device__ const u16 LEVELS_{name}[{count}] = {{\n    " + ",\n    ".join(lines) + "};\n"
            f"struct LevelsOf{name} {{\n    static constexpr int ENTRIES = {count};\n"
            f"    static __device__ __forceinline__ u32 of(int entry) {{ return LEVELS_{name}[entry]; }}\n}};\n"
        )
    return "".join(parts)


if __name__ == "__main__":
    write_text(BOOK_LEVELS_FILE, format_book_levels_header())
