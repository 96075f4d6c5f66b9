"""The thread limit of the BLAS library of NumPy."""

from __future__ import annotations

import ctypes

import numpy as np

from ..errors import ModelError

THREAD_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
    "MKL_Set_Num_Threads",
)


def set_blas_threads(count: int) -> None:
    """Set the thread count of the BLAS library of NumPy, at any time.

    Environment variables work only before the import of NumPy.

    Raises:
        ModelError: The BLAS library, such as Accelerate, has no function for it.
    """
    # The symbol search includes the linked libraries, and so the BLAS library.
    library = ctypes.CDLL(np._core._multiarray_umath.__file__)  # type: ignore[attr-defined]  # private, and without stubs
    for name in THREAD_SETTERS:
        if hasattr(library, name):
            getattr(library, name)(ctypes.c_int(count))
            return
    raise ModelError("-t: the BLAS of this NumPy cannot be told a number of threads; leave the flag out")
