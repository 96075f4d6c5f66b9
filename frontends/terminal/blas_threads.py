"""How many threads NumPy's matrix products may use."""

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
    """Bound the threads of the BLAS that NumPy is linked with; it may be in use already.

    Environment variables would do it only before NumPy is imported.  Raises `ModelError` if this BLAS has no such
    setting (Accelerate has none).
    """
    # A symbol is searched in the library named and in all it is linked with, hence in the BLAS.
    library = ctypes.CDLL(np._core._multiarray_umath.__file__)  # type: ignore[attr-defined]  # private, and without stubs
    for name in THREAD_SETTERS:
        if hasattr(library, name):
            getattr(library, name)(ctypes.c_int(count))
            return
    raise ModelError("-t: the BLAS of this NumPy cannot be told a number of threads; leave the flag out")
