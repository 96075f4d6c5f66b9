"""The largest of many numbers, chosen by a compiled kernel: what sampling asks of the logits of a vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .compiler import REPLAY
from .kernels.reductions import TOP_K, top_k


def largest(x: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Where the `count` largest of ``x`` f32[n] are, 0 < count <= n: the largest first, of equals the first.

    For a small `count`: its square is the time for numbers that come in rising order.
    """
    x, places = np.ascontiguousarray(x, np.float32), np.empty(count, np.int32)
    block = TOP_K(rows=1, x=x.ctypes.data, step=0, n=x.size, y=places.ctypes.data, pace=0, k=count)
    words = np.array(block, np.int64)
    REPLAY(top_k.address)(words.ctypes.data, 0, 1)
    return places.astype(np.int64)


def descending(x: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Where all of ``x`` f32[n] are in that order.  Words of number and place sort faster than places stably."""
    bits = (np.float32(0) - x).view(np.int32)  # and not -x, which would tell the two zeros apart
    keys = bits ^ (bits >> 31 & np.int32(0x7FFFFFFF))
    words = keys.astype(np.int64) << 32 | np.arange(x.size)
    words.sort()
    return words & 0xFFFFFFFF
