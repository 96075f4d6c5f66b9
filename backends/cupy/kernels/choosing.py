"""Kernels of comparisons (results are 0 and 1), of `where`, and of gathers along rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ....graph.dtypes import DType
from ....ops.elementwise.comparisons import COMPARISONS
from ...fusion.operands import BoundInstruction, Operand, require_supported
from ..binding.iteration_axes import as_row_starts_with_repeat_axis, build_merged_tiling_iteration_axes
from ..binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ..device.driver import KernelSource
from .elementwise import CUDA_TYPE_NAMES, ELEMENTWISE_THREADS, MAX_ELEMENTS, as_type, launch_elementwise
from .moves import BITS_TYPE_NAMES, ID_TYPE_NAMES

COMPARABLE_DTYPES = (DType.F32, DType.I32, DType.I64)
SOURCE = KernelSource(
    "choosing.cu",
    (
        *(f"compare<{CUDA_TYPE_NAMES[a]}, {CUDA_TYPE_NAMES[b]}>" for a in COMPARABLE_DTYPES for b in COMPARABLE_DTYPES),
        *(f"where<{t}>" for t in BITS_TYPE_NAMES.values()),
        *(f"taken<{t}, {i}>" for t in BITS_TYPE_NAMES.values() for i in ID_TYPE_NAMES.values()),
    ),
    ("elements.cuh",),
)
SOURCES = (SOURCE,)


def _bind_compare(launches: LaunchBuilder, call: BoundInstruction) -> None:
    sources = [_as_comparable_dtype(launches, call.operand(i)) for i in (0, 1)]
    kernel = SOURCE[f"compare<{', '.join(CUDA_TYPE_NAMES[x.dtype] for x in sources)}>"]
    launch_elementwise(launches, kernel, sources, call.out, [], tuple(COMPARISONS).index(str(call.attrs["kind"])))


def _as_comparable_dtype(launches: LaunchBuilder, x: Operand) -> Operand:
    """Return `x` in a dtype that comparison kernels can read and that represents all values of `x` exactly."""
    return x if x.dtype in COMPARABLE_DTYPES else as_type(launches, x, DType.I32 if x.dtype.is_integer else DType.F32)


def _bind_where(launches: LaunchBuilder, call: BoundInstruction) -> None:
    dtype = call.out.dtype
    choices = [as_type(launches, call.operand(i), dtype) for i in (1, 2)]
    sources = [as_type(launches, call.operand(0), DType.F32), *choices]
    launch_elementwise(launches, SOURCE[f"where<{BITS_TYPE_NAMES[dtype.storage.itemsize]}>"], sources, call.out, [])


def _bind_gather(launches: LaunchBuilder, call: BoundInstruction) -> None:
    x, ids, out = as_type(launches, call.operand(0), call.out.dtype), call.operand(1), call.out
    require_supported(ids.dtype in ID_TYPE_NAMES, f"ids of type {ids.dtype} are missing")
    axes, size = (
        build_merged_tiling_iteration_axes(out.shape, [as_row_starts_with_repeat_axis(x), ids, out]),
        x.shape[-1],
    )
    require_supported(
        axes.element_count < MAX_ELEMENTS, f"a result of {axes.element_count} elements is too large for one launch"
    )
    words: list[LaunchWord] = [axes.element_count, size, x.strides[-1], *axes.axes_struct_fields]
    words += [
        word for k, operand in enumerate((x, ids, out)) for word in axes.make_address_and_stride_fields(k, operand)
    ]
    words += launches.add_fault_message(f"id {{value}} names no entry of its row, which has {size}")
    kernel = SOURCE[f"taken<{BITS_TYPE_NAMES[x.dtype.storage.itemsize]}, {ID_TYPE_NAMES[ids.dtype]}>"]
    launches.add_launch(kernel, count_blocks(axes.element_count, ELEMENTWISE_THREADS), ELEMENTWISE_THREADS, words)


BINDINGS: Mapping[str, OpBinder] = MappingProxyType(
    {"compare": _bind_compare, "where": _bind_where, "gather": _bind_gather}
)
