"""Kernels over rows: norms, softmax, sums and argmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ....ops.declaration.attributes import float_attribute
from ....ops.reduction.norms import alibi_slopes
from ...fusion.dataflow import Dataflow, require_no_alias
from ...fusion.operands import BoundInstruction, Operand, require_supported
from ...fusion.patterns import match_scaled_norm
from ..binding.fused_binding import FusionBinder
from ..binding.iteration_axes import (
    MAX_ITERATION_AXES,
    IterationAxes,
    as_row_starts,
    build_merged_tiling_iteration_axes,
)
from ..binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ..device.driver import KernelInstance, KernelSource
from .elementwise import as_float

COUNT_EQUAL_THREADS = 256
NORM_KERNELS = ("Rms", "L2", "L2Clamped")
SOURCE = KernelSource(
    "rows.cu",
    (
        *(f"norm_by<{n}>" for n in NORM_KERNELS),
        *("scaled_norm", "centred_norm", "softmax", "sum_rows", "cumsum", "count_equal", "argmax"),
    ),
    ("columns.cuh",),
)
SOURCES = (SOURCE,)


def choose_row_threads(columns: int) -> int:
    """Choose the number of threads of a block that processes one row of `columns` entries."""
    return min(512, max(32, count_blocks(columns, 4 * 32) * 32))


def _build_row_axes(x: Operand, out: Operand) -> IterationAxes:
    return build_merged_tiling_iteration_axes(x.shape[:-1], [as_row_starts(x), as_row_starts(out)])


def _launch_row_kernel(
    launches: LaunchBuilder, kernel: KernelInstance, x: Operand, out: Operand, scalar: float, threads: int = 0
) -> None:
    """Launch a kernel with the C struct `Rows`, with one block for each row of `x`.

    Args:
        launches: Receives the launch.
        kernel: The kernel.
        x: The operand.
        out: The result, with an equal number of rows.
        scalar: The scalar argument of the kernel.
        threads: Threads of a block; 0 chooses by the row length.
    """
    axes = _build_row_axes(x, out)
    words: list[LaunchWord] = [
        x.shape[-1],
        x.strides[-1],
        *axes.axes_struct_fields,
        *axes.make_address_and_stride_fields(0, x),
        *axes.make_address_and_stride_fields(1, out),
        float(scalar),
    ]
    launches.add_launch(kernel, axes.element_count, threads or choose_row_threads(x.shape[-1]), words)


def _read_number(call: BoundInstruction, name: str) -> float:
    return float(float_attribute(call.attrs, name))


def _bind_rms_norm(launches: LaunchBuilder, call: BoundInstruction) -> None:
    _launch_row_kernel(
        launches, SOURCE["norm_by<Rms>"], as_float(launches, call.operand(0)), call.out, _read_number(call, "eps")
    )


def _launch_scaled_norm_with_optional_sum(
    launches: LaunchBuilder, x: Operand, y: Operand | None, scaled: BoundInstruction, norm: BoundInstruction, w: Operand
) -> None:
    """Launch an RMS norm of x, or of x + y, times a weight vector `w`.

    Args:
        launches: Receives the launch.
        x: The first operand.
        y: The second operand, or `None`.
        scaled: The multiplication by `w`, with the result.
        norm: The RMS norm. If there is a `y`, its operand receives the sum.
        w: The weight vector.
    """
    out = scaled.out
    total = None if y is None else norm.operand(0)
    require_supported(
        x.is_float and w.is_float and math.prod(w.shape[:-1]) == 1, "rows are not multiplied by one float vector each"
    )
    require_supported(w.shape[-1:] == x.shape[-1:], "a row is multiplied by one number")
    dense = [o for o in (y, total, out) if o is not None]
    require_supported(
        all(o.is_float and o.shape == x.shape and o.is_dense for o in dense), "operands differ, or are not dense"
    )
    require_no_alias(out, [w], [x, y])
    if total is not None:
        require_no_alias(total, [w, out], [x, y])
    heads = [as_row_starts(o or out) for o in (x, y, total, out)]
    axes = build_merged_tiling_iteration_axes(x.shape[:-1], heads)
    words: list[LaunchWord] = [
        x.shape[-1],
        x.strides[-1],
        w.strides[-1],
        _read_number(norm, "eps"),
        w,
        *axes.axes_struct_fields,
    ]
    for k, operand in enumerate((x, y, total, out)):
        words += [0] * (1 + MAX_ITERATION_AXES) if operand is None else axes.make_address_and_stride_fields(k, operand)
    launches.add_launch(SOURCE["scaled_norm"], axes.element_count, choose_row_threads(x.shape[-1]), words)


def _fuse_scaled_rms_norm(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Compute an RMS norm and its scaling by a weight vector, ``rms_norm(x) * w``, in one launch."""
    chain = match_scaled_norm(flow, number)
    norm, scaled = map(flow.bound_instruction, chain)
    _launch_scaled_norm_with_optional_sum(launches, norm.operand(0), None, scaled, norm, scaled.operand(1))
    return chain


def _fuse_sum_and_scaled_rms_norm(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Compute ``rms_norm(x + y) * w`` in one launch, which also writes the sum."""
    norm, factor = match_scaled_norm(flow, flow.require_first_reader_of_whole_result(number, "rms_norm"))
    total, scaled = flow.bound_instruction(number), flow.bound_instruction(factor)
    require_supported(len(flow.require_readers(number)) > 1, "the sum has no other reader")
    require_supported(total.operand(0).shape == total.operand(1).shape, "the operands of a sum differ")
    x, y = total.operand(0), total.operand(1)
    if not y.is_dense:
        x, y = y, x
    _launch_scaled_norm_with_optional_sum(launches, x, y, scaled, flow.bound_instruction(norm), scaled.operand(1))
    return number, norm, factor


def _bind_l2_norm(launches: LaunchBuilder, call: BoundInstruction) -> None:
    kernel = SOURCE["norm_by<L2Clamped>" if call.attrs["clamp"] else "norm_by<L2>"]
    _launch_row_kernel(launches, kernel, as_float(launches, call.operand(0)), call.out, _read_number(call, "eps"))


def _bind_norm(launches: LaunchBuilder, call: BoundInstruction) -> None:
    _launch_row_kernel(
        launches, SOURCE["centred_norm"], as_float(launches, call.operand(0)), call.out, _read_number(call, "eps")
    )


def _bind_group_norm(launches: LaunchBuilder, call: BoundInstruction) -> None:
    """Bind a group norm to its launches.

    One launch computes all complete groups of channels, and another one a smaller last group.
    """
    x, out = as_float(launches, call.operand(0)), call.out
    require_supported(x.is_dense, "the channels of x are not dense")
    *leading, channels, height, width = x.shape
    run = count_blocks(channels, int(_read_number(call, "groups")))
    whole, rest = divmod(channels, run) if run else (0, 0)
    batch, size, area = math.prod(leading), channels * height * width, height * width
    for first, count, length in ((0, whole, run), (whole * run, 1, rest)):
        if not length or not count:
            continue
        parts = [
            _view_elements(o, first * area, (batch, count, length * area), (size, run * area, 1)) for o in (x, out)
        ]
        _launch_row_kernel(launches, SOURCE["centred_norm"], parts[0], parts[1], _read_number(call, "eps"))


def _view_elements(x: Operand, skip: int, shape: Sequence[int], strides: Sequence[int]) -> Operand:
    """Return a view of the elements of `x` with another start, shape and strides.

    Args:
        x: The operand.
        skip: The number of elements before the view.
        shape: The shape of the view.
        strides: The strides of the view, in elements.
    """
    at = skip * x.dtype.storage.itemsize
    tensor = replace(x.tensor, offset=x.tensor.offset + at, shape=tuple(shape), strides=tuple(strides))
    return replace(x, address=x.address + at, tensor=tensor)


def _bind_softmax(launches: LaunchBuilder, call: BoundInstruction) -> None:
    x, mask, sinks, out = (
        as_float(launches, call.operand(0)),
        call.optional_operand(1),
        call.optional_operand(2),
        call.out,
    )
    heads, max_bias = x.shape[-3], _read_number(call, "max_bias")
    operands, steps = [as_row_starts(x), as_row_starts(out)], 0
    extra: list[Operand | None] = [None, None, None]
    if mask is not None:
        mask = as_float(launches, mask)
        steps, row = mask.strides[-1], as_row_starts(mask)
        if call.attrs["mask_heads"] == "one":
            row = _view_elements(row, 0, (*row.shape[:-1], 1, row.shape[-1]), (*row.strides[:-1], 0, row.strides[-1]))
        extra[0] = mask
        operands.append(row)
        if max_bias > 0.0:
            extra[1] = launches.upload_constant(alibi_slopes(heads, max_bias).astype(np.float32))
    if sinks is not None:
        extra[2] = as_float(launches, sinks)
    one_a_head = [_view_elements(e, 0, (heads, 1), (e.strides[0], 0)) for e in extra[1:] if e is not None]
    axes = build_merged_tiling_iteration_axes(x.shape[:-1], [*operands, *one_a_head])
    words: list[LaunchWord] = [x.shape[-1], x.strides[-1], steps, _read_number(call, "scale"), *axes.axes_struct_fields]
    words += [*axes.make_address_and_stride_fields(0, x), *axes.make_address_and_stride_fields(1, out)]
    position = 2
    for operand in extra:
        words += (
            [0] * (1 + MAX_ITERATION_AXES)
            if operand is None
            else axes.make_address_and_stride_fields(position, operand)
        )
        position += operand is not None
    launches.add_launch(SOURCE["softmax"], axes.element_count, choose_row_threads(x.shape[-1]), words)


# --------------------------------------------------------------------------------------------------------- sums


def _make_sum_rows_binder(factor: Callable[[int], float]) -> OpBinder:
    def bind(launches: LaunchBuilder, call: BoundInstruction) -> None:
        x = as_float(launches, call.operand(0))
        _launch_row_kernel(launches, SOURCE["sum_rows"], x, call.out, factor(x.shape[-1]))

    return bind


def _bind_sum_of_all_elements(launches: LaunchBuilder, call: BoundInstruction) -> None:
    """Bind the sum of all elements, in two launches so that many blocks work: sums of rows, then their sum."""
    x, out = as_float(launches, call.operand(0)), call.out
    count = math.prod(x.shape)
    columns = max((n for n in range(1, math.isqrt(count) + 1) if count % n == 0), default=0)
    require_supported(x.is_dense, "x is not dense")
    parts = launches.allocate_scratch((max(1, columns),))
    rows = _view_elements(
        x, 0, (columns, count // columns) if columns else (1, 0), (count // columns if columns else 0, 1)
    )
    _launch_row_kernel(launches, SOURCE["sum_rows"], rows, _view_elements(parts, 0, (rows.shape[0], 1), (1, 1)), 1.0)
    _launch_row_kernel(
        launches,
        SOURCE["sum_rows"],
        _view_elements(parts, 0, (1, rows.shape[0]), (0, 1)),
        _view_elements(out, 0, (1, 1), (0, 0)),
        1.0,
    )


def _bind_cumsum(launches: LaunchBuilder, call: BoundInstruction) -> None:
    _launch_row_kernel(launches, SOURCE["cumsum"], as_float(launches, call.operand(0)), call.out, 0.0, threads=32)


def _bind_count_equal(launches: LaunchBuilder, call: BoundInstruction) -> None:
    a, b = call.operand(0), call.operand(1)
    require_supported(a.is_dense and b.is_dense, "the compared operands are not dense")
    launches.add_launch(SOURCE["count_equal"], 1, COUNT_EQUAL_THREADS, [math.prod(a.shape), a, b, call.out])


# ------------------------------------------------------------------------------------------------------ largest


def _bind_argmax(launches: LaunchBuilder, call: BoundInstruction) -> None:
    x, out = as_float(launches, call.operand(0)), call.out
    axes = build_merged_tiling_iteration_axes(x.shape[:-1], [as_row_starts(x), out])
    words: list[LaunchWord] = [
        x.shape[-1],
        x.strides[-1],
        *axes.axes_struct_fields,
        *axes.make_address_and_stride_fields(0, x),
        *axes.make_address_and_stride_fields(1, out),
    ]
    launches.add_launch(SOURCE["argmax"], axes.element_count, choose_row_threads(x.shape[-1]), words)


FUSED: Mapping[str, Sequence[FusionBinder]] = {
    "add": (_fuse_sum_and_scaled_rms_norm,),
    "rms_norm": (_fuse_scaled_rms_norm,),
}
BINDINGS: Mapping[str, OpBinder] = {
    "rms_norm": _bind_rms_norm,
    "l2_norm": _bind_l2_norm,
    "norm": _bind_norm,
    "group_norm": _bind_group_norm,
    "softmax": _bind_softmax,
    "sum_rows": _make_sum_rows_binder(lambda n: 1.0),
    "mean": _make_sum_rows_binder(lambda n: 1.0 / max(1, n)),
    "sum": _bind_sum_of_all_elements,
    "cumsum": _bind_cumsum,
    "count_equal": _bind_count_equal,
    "argmax": _bind_argmax,
}
