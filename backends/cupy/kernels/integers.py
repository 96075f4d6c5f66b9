"""Kernels of integer arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ....graph.dtypes import DType
from ....ops.elementwise.integers import INTEGER_OPERATIONS
from ...fusion.operands import BoundInstruction
from ..binding.launch_builder import LaunchBuilder, OpBinder
from ..device.driver import KernelSource
from .elementwise import CUDA_TYPE_NAMES, as_type, launch_elementwise
from .moves import ID_TYPE_NAMES

INTEGER_TYPE_NAMES = tuple(name for dtype, name in CUDA_TYPE_NAMES.items() if dtype.is_integer)
KERNEL_NAMES = tuple(f"calculate<{a}, {b}>" for a in INTEGER_TYPE_NAMES for b in ID_TYPE_NAMES.values())
SOURCE = KernelSource("integers.cu", KERNEL_NAMES, ("elements.cuh",))
SOURCES = (SOURCE,)


def _bind_calculate(launches: LaunchBuilder, call: BoundInstruction) -> None:
    a, b, out = call.operand(0), call.operand(1), call.out
    b = b if b.dtype in ID_TYPE_NAMES else as_type(launches, b, DType.I32)
    kernel = SOURCE[f"calculate<{CUDA_TYPE_NAMES[out.dtype]}, {CUDA_TYPE_NAMES[b.dtype]}>"]
    launch_elementwise(launches, kernel, [a, b], out, [], tuple(INTEGER_OPERATIONS).index(str(call.attrs["kind"])))


BINDINGS: Mapping[str, OpBinder] = MappingProxyType({"calculate": _bind_calculate})
