"""One op of another package: its meaning, its sharding rules, and the places of its kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.ops import op

Array = npt.NDArray[Any]


@op(
    "x[..., *c] -> [..., c]",
    linear=("x",),
    inplace="x",
    flops=lambda c, **_: 3 * c,
    samples=("x=f32[3,64]", "x=f16[2,5]", "x=f32[4,3,7]", "x=f32[0,5]"),
    errors=(("x=i32[4]", "x is i32"), ("x=f32[]", "needs at least 1")),
    kernels={
        "numpy": "hocket_centre.numpy_kernel:CENTRE",
        "cpu": "hocket_centre.cpu_kernel:bind",
        "cuda": "hocket_centre.cuda_kernel:bind",
    },
)
def centre(x: Array) -> Array:
    """``x - mean(x)`` over the last axis, the first half of a layer norm. Ba, Kiros and Hinton, 2016."""
    return x - np.sum(x, axis=-1, keepdims=True) / max(x.shape[-1], 1)
