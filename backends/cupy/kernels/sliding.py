"""Kernels of sliding windows over the last axes, which convolutions multiply and poolings reduce."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from ....ops.declaration.attributes import float_attribute
from ....ops.declaration.shape_rules import integers_attribute
from ....ops.movement.sliding_windows import count_windows
from ...operands import Bound, need
from ..binding.launches import Binding, Launches, Word, blocks
from ..device.driver import Source
from .elementwise import MOST_ELEMENTS, THREADS, as_type
from .moves import BITS

MOST_AXES = 3
SOURCE = Source("sliding.cu", tuple(f"windows<{t}>" for t in BITS.values()))
SOURCES = (SOURCE,)


def _windows(launches: Launches, call: Bound) -> None:
    x, out, attrs = as_type(launches, call.operand(0), call.out.dtype), call.out, call.attrs
    count, rank = math.prod(out.shape), len(x.shape) - 2
    need(count < MOST_ELEMENTS, f"a result of {count} elements is too large for one launch")
    need(rank <= MOST_AXES, f"windows over {rank} axes are missing")
    taps, stride, dilation, left = (integers_attribute(attrs, name) for name in ("size", "stride", "dilation", "left"))
    along = zip(x.shape[2:], x.strides[2:], count_windows(x.shape, attrs), taps, stride, dilation, left, strict=True)
    axes: list[Word] = [*(1, 0, 1, 1, 1, 1, 0) * (MOST_AXES - rank), *(word for axis in along for word in axis)]
    bits = np.asarray(float_attribute(attrs, "value")).astype(x.dtype.storage).tobytes()
    words: list[Word] = [count, x.shape[1], *x.strides[:2], int.from_bytes(bits, "little"), *axes, x, out]
    launches.add(SOURCE[f"windows<{BITS[len(bits)]}>"], blocks(count, THREADS), THREADS, words)


BINDINGS: Mapping[str, Binding] = MappingProxyType({"windows": _windows})
