"""Kernels that combine the entries of rows: reductions, accumulations, and scatters by index."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...operands import Bound, Operand, need
from ..binding.axes import axes_of, row_heads
from ..binding.launches import Binding, Launches, Word
from ..device.driver import Source
from .elementwise import TARGETS, TYPES, as_type
from .moves import IDS, begin_with
from .rows import row_threads

WAYS: Mapping[str, int] = MappingProxyType({"max": 0, "min": 1, "sum": 2, "prod": 3, "add": 2, "mul": 3, "set": 4})
"""Codes of reductions in kernels, by attribute value."""
KEPT = tuple(TYPES[t] for t in TARGETS)
SOURCE = Source(
    "reductions.cu",
    (
        *(f"{kernel}<{t}>" for kernel in ("reduced", "accumulated") for t in KEPT),
        *(f"put<{t}, {i}>" for t in KEPT for i in IDS.values()),
    ),
)
SOURCES = (SOURCE,)


def _launch_rows(launches: Launches, call: Bound, kernel: str, out: Operand, threads: int) -> None:
    x, way = as_type(launches, call.operand(0), out.dtype), WAYS[str(call.attrs["kind"])]
    axes = axes_of(x.shape[:-1], [row_heads(x), row_heads(out)])
    words: list[Word] = [x.shape[-1], x.strides[-1], way, *axes.words, *axes.walk(0, x), *axes.walk(1, out)]
    launches.add(SOURCE[f"{kernel}<{TYPES[out.dtype]}>"], axes.count, threads, words)


def _reduce(launches: Launches, call: Bound) -> None:
    _launch_rows(launches, call, "reduced", call.out, row_threads(call.operand(0).shape[-1]))


def _accumulate(launches: Launches, call: Bound) -> None:
    need(call.out.is_dense_along(-1), "rows of the result are not dense")
    _launch_rows(launches, call, "accumulated", call.out, 32)


def _scatter(launches: Launches, call: Bound) -> None:
    ids, out = call.operand(1), call.out
    need(ids.dtype in IDS, f"ids of type {ids.dtype} are missing")
    x = as_type(launches, call.operand(2), out.dtype)
    begin_with(launches, call.operand(0), out)
    axes, size = axes_of(ids.shape[:-1], [row_heads(o) for o in (ids, x, out)]), out.shape[-1]
    words: list[Word] = [ids.shape[-1], size, ids.strides[-1], x.strides[-1], out.strides[-1]]
    words += [WAYS[str(call.attrs["reduce"])], *axes.words, *axes.walk(0, ids), *axes.walk(1, x), *axes.walk(2, out)]
    words += launches.fault(f"id {{value}} names no entry of its row, which has {size}")
    launches.add(SOURCE[f"put<{TYPES[out.dtype]}, {IDS[ids.dtype]}>"], axes.count, row_threads(size), words)


BINDINGS: Mapping[str, Binding] = MappingProxyType({"reduce": _reduce, "accumulate": _accumulate, "scatter": _scatter})
