"""Matrix products through BLAS."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

import numpy as np

from .elementwise import plain
from .kernel import Call, Calls, Kernel


def mul_mat(call: Call) -> Calls:
    """``x @ w.T``; leading axes of `w` serve runs of neighbours, so those of `x` split into (entry, run)."""
    w, x, out = call.operand(0), call.operand(1), call.out
    if w.ndim == 2 and x.ndim > 2:  # one matrix for all rows: one large product instead of many
        with suppress(ValueError):  # strides that do not merge
            x, out = x.reshape(-1, x.shape[-1], copy=False), out.reshape(-1, out.shape[-1], copy=False)
    leading = x.ndim - 2
    entries = (1,) * (leading - (w.ndim - 2)) + w.shape[:-2]
    w = w.reshape(tuple(n for m in entries for n in (m, 1)) + w.shape[-2:], copy=False)
    shape = tuple(n for m, total in zip(entries, x.shape[:-2], strict=True) for n in (m, total // m if m else 0))
    x, out = x.reshape(shape + x.shape[-2:], copy=False), out.reshape(shape + out.shape[-2:], copy=False)
    return [partial(np.matmul, x, np.swapaxes(w, -1, -2), out=out)]


KERNELS: Mapping[str, Kernel] = {"mul_mat": plain(mul_mat)}
