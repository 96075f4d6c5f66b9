"""The code books of CUDA kernels equal the code books of the formats; NumPy decodes them, so no compiler is needed."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.backends.cupy.book_levels import (
    BOOK_DTYPES,
    BOOK_LEVELS_FILE,
    compute_codebook_entry_levels,
    format_book_levels_header,
)
from hocket.backends.cupy.kernels.products import packed
from hocket.graph.dtypes import DType
from hocket.ops.quantisation import load_code_book


def test_the_header_is_what_the_script_writes():
    assert BOOK_LEVELS_FILE.read_text("utf-8") == format_book_levels_header(), (
        "run python -m hocket.backends.cupy.book_levels"
    )


@pytest.mark.parametrize("dtype", packed.CODE_BOOK_ENTRIES, ids=str)
def test_levels_stand_for_the_numbers_of_a_book(dtype):
    book = load_code_book(DType.IQ1_S if dtype is DType.IQ1_M else dtype)
    assert packed.CODE_BOOK_ENTRIES[dtype] == len(book)
    levels = compute_codebook_entry_levels(DType.IQ1_S if dtype is DType.IQ1_M else dtype)
    width = 16 // book.shape[1]
    columns = levels[:, None] >> np.arange(book.shape[1], dtype=np.uint16) * np.uint16(width) & (2**width - 1)
    assert np.array_equal(np.unique(book)[columns], book)
    assert np.array_equal(load_code_book(dtype), book)


def test_every_book_is_written():
    assert {*BOOK_DTYPES, DType.IQ1_M} == packed.CODE_BOOK_ENTRIES.keys()
