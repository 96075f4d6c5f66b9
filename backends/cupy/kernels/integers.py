"""Kernels of integer arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ....graph.dtypes import DType
from ....ops.elementwise.integers import INTEGER_OPERATIONS
from ...operands import Bound
from ..binding.launches import Binding, Launches
from ..device.driver import Source
from .elementwise import TYPES, as_type, launch_map
from .moves import IDS

INTEGERS = tuple(name for dtype, name in TYPES.items() if dtype.is_integer)
NAMES = tuple(f"calculate<{a}, {b}>" for a in INTEGERS for b in IDS.values())
SOURCE = Source("integers.cu", NAMES, ("elements.cuh",))
SOURCES = (SOURCE,)


def _calculate(launches: Launches, call: Bound) -> None:
    a, b, out = call.operand(0), call.operand(1), call.out
    b = b if b.dtype in IDS else as_type(launches, b, DType.I32)
    kernel = SOURCE[f"calculate<{TYPES[out.dtype]}, {TYPES[b.dtype]}>"]
    launch_map(launches, kernel, [a, b], out, [], tuple(INTEGER_OPERATIONS).index(str(call.attrs["kind"])))


BINDINGS: Mapping[str, Binding] = MappingProxyType({"calculate": _calculate})
