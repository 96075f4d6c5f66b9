"""Kernels that combine the entries of rows: reductions, accumulations, and scatters by index."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...fusion.operands import BoundInstruction, Operand, require_supported
from ..binding.iteration_axes import as_row_starts, build_merged_tiling_iteration_axes
from ..binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder
from ..device.driver import KernelSource
from .elementwise import CAST_TARGETS, CUDA_TYPE_NAMES, as_type
from .moves import ID_TYPE_NAMES, copy_unless_in_place
from .rows import choose_row_threads

REDUCTION_CODES: Mapping[str, int] = MappingProxyType(
    {"max": 0, "min": 1, "sum": 2, "prod": 3, "add": 2, "mul": 3, "set": 4}
)
"""Codes of reductions in kernels, by attribute value."""
REDUCTION_TYPES = tuple(CUDA_TYPE_NAMES[t] for t in CAST_TARGETS)
SOURCE = KernelSource(
    "reductions.cu",
    (
        *(f"{kernel}<{t}>" for kernel in ("reduced", "accumulated") for t in REDUCTION_TYPES),
        *(f"put<{t}, {i}>" for t in REDUCTION_TYPES for i in ID_TYPE_NAMES.values()),
    ),
)
SOURCES = (SOURCE,)


def _launch_reduction(launches: LaunchBuilder, call: BoundInstruction, kernel: str, out: Operand, threads: int) -> None:
    x, code = as_type(launches, call.operand(0), out.dtype), REDUCTION_CODES[str(call.attrs["kind"])]
    axes = build_merged_tiling_iteration_axes(x.shape[:-1], [as_row_starts(x), as_row_starts(out)])
    words: list[LaunchWord] = [
        x.shape[-1],
        x.strides[-1],
        code,
        *axes.axes_struct_fields,
        *axes.make_address_and_stride_fields(0, x),
        *axes.make_address_and_stride_fields(1, out),
    ]
    launches.add_launch(SOURCE[f"{kernel}<{CUDA_TYPE_NAMES[out.dtype]}>"], axes.element_count, threads, words)


def _bind_reduce(launches: LaunchBuilder, call: BoundInstruction) -> None:
    _launch_reduction(launches, call, "reduced", call.out, choose_row_threads(call.operand(0).shape[-1]))


def _bind_accumulate(launches: LaunchBuilder, call: BoundInstruction) -> None:
    require_supported(call.out.is_dense_along(-1), "rows of the result are not dense")
    _launch_reduction(launches, call, "accumulated", call.out, 32)


def _bind_scatter(launches: LaunchBuilder, call: BoundInstruction) -> None:
    ids, out = call.operand(1), call.out
    require_supported(ids.dtype in ID_TYPE_NAMES, f"ids of type {ids.dtype} are missing")
    x = as_type(launches, call.operand(2), out.dtype)
    copy_unless_in_place(launches, call.operand(0), out)
    axes, size = (
        build_merged_tiling_iteration_axes(ids.shape[:-1], [as_row_starts(o) for o in (ids, x, out)]),
        out.shape[-1],
    )
    words: list[LaunchWord] = [ids.shape[-1], size, ids.strides[-1], x.strides[-1], out.strides[-1]]
    words += [
        REDUCTION_CODES[str(call.attrs["reduce"])],
        *axes.axes_struct_fields,
        *axes.make_address_and_stride_fields(0, ids),
        *axes.make_address_and_stride_fields(1, x),
        *axes.make_address_and_stride_fields(2, out),
    ]
    words += launches.add_fault_message(f"id {{value}} names no entry of its row, which has {size}")
    launches.add_launch(
        SOURCE[f"put<{CUDA_TYPE_NAMES[out.dtype]}, {ID_TYPE_NAMES[ids.dtype]}>"],
        axes.element_count,
        choose_row_threads(size),
        words,
    )


BINDINGS: Mapping[str, OpBinder] = MappingProxyType(
    {"reduce": _bind_reduce, "accumulate": _bind_accumulate, "scatter": _bind_scatter}
)
