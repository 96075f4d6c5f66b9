"""Kernels of sliding windows over the last axes, which convolutions multiply and poolings reduce."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from ....ops.declaration.attributes import float_attribute
from ....ops.declaration.shape_rules import integers_attribute
from ....ops.movement.sliding_windows import count_windows
from ...fusion.operands import BoundInstruction, require_supported
from ..binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ..device.driver import KernelSource
from .elementwise import ELEMENTWISE_THREADS, MAX_ELEMENTS, as_type
from .moves import BITS_TYPE_NAMES

MAX_WINDOW_AXES = 3
SOURCE = KernelSource("sliding.cu", tuple(f"windows<{t}>" for t in BITS_TYPE_NAMES.values()))
SOURCES = (SOURCE,)


def _bind_windows(launches: LaunchBuilder, call: BoundInstruction) -> None:
    x, out, attrs = as_type(launches, call.operand(0), call.out.dtype), call.out, call.attrs
    count, rank = math.prod(out.shape), len(x.shape) - 2
    require_supported(count < MAX_ELEMENTS, f"a result of {count} elements is too large for one launch")
    require_supported(rank <= MAX_WINDOW_AXES, f"windows over {rank} axes are missing")
    taps, stride, dilation, left = (integers_attribute(attrs, name) for name in ("size", "stride", "dilation", "left"))
    along = zip(x.shape[2:], x.strides[2:], count_windows(x.shape, attrs), taps, stride, dilation, left, strict=True)
    axes: list[LaunchWord] = [
        *(1, 0, 1, 1, 1, 1, 0) * (MAX_WINDOW_AXES - rank),
        *(word for axis in along for word in axis),
    ]
    bits = np.asarray(float_attribute(attrs, "value")).astype(x.dtype.storage).tobytes()
    words: list[LaunchWord] = [count, x.shape[1], *x.strides[:2], int.from_bytes(bits, "little"), *axes, x, out]
    launches.add_launch(
        SOURCE[f"windows<{BITS_TYPE_NAMES[len(bits)]}>"],
        count_blocks(count, ELEMENTWISE_THREADS),
        ELEMENTWISE_THREADS,
        words,
    )


BINDINGS: Mapping[str, OpBinder] = MappingProxyType({"windows": _bind_windows})
