"""NumPy kernels of sums over rows or over all elements, in one pass each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from ..host.bindings import Binding, Calls, HostInstruction, without_scratch


def bind_sum_rows(call: HostInstruction) -> Calls:
    return [partial(np.add.reduce, call.operand(0), axis=-1, keepdims=True, out=call.out)]


def bind_mean(call: HostInstruction) -> Calls:
    share = np.float32(1 / max(1, call.operand(0).shape[-1]))
    return [*bind_sum_rows(call), partial(np.multiply, call.out, share, out=call.out)]


def bind_total(call: HostInstruction) -> Calls:
    return [partial(np.add.reduce, call.operand(0), axis=None, out=call.out)]


def bind_cumsum(call: HostInstruction) -> Calls:
    return [partial(np.add.accumulate, call.operand(0), axis=-1, out=call.out)]


KERNELS: Mapping[str, Binding] = {
    "sum_rows": without_scratch(bind_sum_rows),
    "mean": without_scratch(bind_mean),
    "sum": without_scratch(bind_total),
    "cumsum": without_scratch(bind_cumsum),
}
