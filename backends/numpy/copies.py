"""NumPy kernels that copy: contiguous copies and casts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from ...graph.dtypes import DType
from ...ops.elementwise.binary import round_to_dtype
from ..host.bindings import Binding, Calls, HostInstruction, bind_copy, make_binding_without_scratch


def bind_cast(call: HostInstruction) -> Calls:
    dtype = call.attrs["dtype"]
    assert isinstance(dtype, DType)
    source, out = call.operand(0), call.out
    if dtype is DType.F32 or (source.dtype == out.dtype and dtype.is_integer):
        return [partial(np.copyto, out, source, casting="unsafe")]

    def run() -> None:  # the rounding of the reference; rarely used, so it may allocate
        out[...] = round_to_dtype(source, dtype)

    return [run]


KERNELS: Mapping[str, Binding] = {
    "cast": make_binding_without_scratch(bind_cast),
    "cont": make_binding_without_scratch(bind_copy),
}
