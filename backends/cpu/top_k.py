"""Top-k selection and descending order of logits on the CPU, for sampling from a vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .compilation.compiler import KERNEL_FUNCTION
from .kernels.rows.reductions import TOP_K_ARGS, find_top_k_indices


def find_top_k(x: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Return the indices of the `count` largest numbers of ``x`` f32[n], largest first, by a compiled kernel.

    Among equal numbers the first index comes first. `count` is between 1 and n and should be small: ascending numbers
    take time proportional to the square of `count`.
    """
    x, places = np.ascontiguousarray(x, np.float32), np.empty(count, np.int32)
    block = TOP_K_ARGS(rows=1, x=x.ctypes.data, step=0, n=x.size, y=places.ctypes.data, pace=0, k=count)
    words = np.array(block, np.int64)
    KERNEL_FUNCTION(find_top_k_indices.address)(words.ctypes.data, 0, 1)
    return places.astype(np.int64)


def argsort_descending(x: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the indices that sort ``x`` f32[n] in descending order; among equal numbers the first index comes first.

    Integers that combine number and index sort faster than a stable sort of indices.
    """
    bits = (np.float32(0) - x).view(np.int32)  # not -x, which would distinguish the two zeros
    keys = bits ^ (bits >> 31 & np.int32(0x7FFFFFFF))
    words = keys.astype(np.int64) << 32 | np.arange(x.size)
    words.sort()
    return words & 0xFFFFFFFF
