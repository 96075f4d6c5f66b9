"""Kernels of comparisons (results are 0 and 1), of `where`, and of gathers along rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ....graph.dtypes import DType
from ....ops.elementwise.comparisons import COMPARISONS
from ...operands import Bound, Operand, need
from ..binding.axes import axes_of, repeated_heads
from ..binding.launches import Binding, Launches, Word, blocks
from ..device.driver import Source
from .elementwise import MOST_ELEMENTS, THREADS, TYPES, as_type, launch_map
from .moves import BITS, IDS

COMPARED = (DType.F32, DType.I32, DType.I64)
SOURCE = Source(
    "choosing.cu",
    (
        *(f"compare<{TYPES[a]}, {TYPES[b]}>" for a in COMPARED for b in COMPARED),
        *(f"where<{t}>" for t in BITS.values()),
        *(f"taken<{t}, {i}>" for t in BITS.values() for i in IDS.values()),
    ),
    ("elements.cuh",),
)
SOURCES = (SOURCE,)


def _compare(launches: Launches, call: Bound) -> None:
    sources = [_comparable(launches, call.operand(i)) for i in (0, 1)]
    kernel = SOURCE[f"compare<{', '.join(TYPES[x.dtype] for x in sources)}>"]
    launch_map(launches, kernel, sources, call.out, [], tuple(COMPARISONS).index(str(call.attrs["kind"])))


def _comparable(launches: Launches, x: Operand) -> Operand:
    """Return `x` in a comparable dtype that holds all its values."""
    return x if x.dtype in COMPARED else as_type(launches, x, DType.I32 if x.dtype.is_integer else DType.F32)


def _where(launches: Launches, call: Bound) -> None:
    dtype = call.out.dtype
    choices = [as_type(launches, call.operand(i), dtype) for i in (1, 2)]
    sources = [as_type(launches, call.operand(0), DType.F32), *choices]
    launch_map(launches, SOURCE[f"where<{BITS[dtype.storage.itemsize]}>"], sources, call.out, [])


def _gather(launches: Launches, call: Bound) -> None:
    x, ids, out = as_type(launches, call.operand(0), call.out.dtype), call.operand(1), call.out
    need(ids.dtype in IDS, f"ids of type {ids.dtype} are missing")
    axes, size = axes_of(out.shape, [repeated_heads(x), ids, out]), x.shape[-1]
    need(axes.count < MOST_ELEMENTS, f"a result of {axes.count} elements is too large for one launch")
    words: list[Word] = [axes.count, size, x.strides[-1], *axes.words]
    words += [word for k, operand in enumerate((x, ids, out)) for word in axes.walk(k, operand)]
    words += launches.fault(f"id {{value}} names no entry of its row, which has {size}")
    kernel = SOURCE[f"taken<{BITS[x.dtype.storage.itemsize]}, {IDS[ids.dtype]}>"]
    launches.add(kernel, blocks(axes.count, THREADS), THREADS, words)


BINDINGS: Mapping[str, Binding] = MappingProxyType({"compare": _compare, "where": _where, "gather": _gather})
