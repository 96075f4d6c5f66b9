"""NumPy kernels of sums over all elements, and of running sums, in one pass each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from ..host.bindings import Binding, Calls, HostInstruction, make_binding_without_scratch


def bind_total(call: HostInstruction) -> Calls:
    return [partial(np.add.reduce, call.operand(0), axis=None, out=call.out)]


def bind_cumsum(call: HostInstruction) -> Calls:
    return [partial(np.add.accumulate, call.operand(0), axis=-1, out=call.out)]


KERNELS: Mapping[str, Binding] = {
    "sum": make_binding_without_scratch(bind_total),
    "cumsum": make_binding_without_scratch(bind_cumsum),
}
