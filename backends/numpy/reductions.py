"""Sums over rows or over all elements, in one pass each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from ..calls import Binding, Call, Calls, plain


def sum_rows(call: Call) -> Calls:
    return [partial(np.add.reduce, call.operand(0), axis=-1, keepdims=True, out=call.out)]


def mean(call: Call) -> Calls:
    share = np.float32(1 / max(1, call.operand(0).shape[-1]))
    return [*sum_rows(call), partial(np.multiply, call.out, share, out=call.out)]


def total(call: Call) -> Calls:
    return [partial(np.add.reduce, call.operand(0), axis=None, out=call.out)]


def cumsum(call: Call) -> Calls:
    return [partial(np.add.accumulate, call.operand(0), axis=-1, out=call.out)]


KERNELS: Mapping[str, Binding] = {
    "sum_rows": plain(sum_rows),
    "mean": plain(mean),
    "sum": plain(total),
    "cumsum": plain(cumsum),
}
