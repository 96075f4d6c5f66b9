"""Repeats, casts, ranges of numbers, and biases of chosen experts."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial

import numpy as np

from .....graph.dtypes import DType
from .....ops.declaration.shape_rules import integers_attribute
from ....base import contiguous_strides
from ....fusion.dataflow import has_same_elements
from ....fusion.operands import BoundInstruction, Operand
from ...compilation.compiler import Kernel, kernel, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.half_memory import round_f32_to_bf16_values, round_to_f16_values
from ...simd.vectors import (
    LANES,
    add,
    bits_to_float,
    float_to_bits,
    load_int,
    load_long,
    to_float,
    truncate_to_int,
)
from ...steps.partition import compute_thread_range
from ...steps.step_table import StepTableBuilder
from ..packed.weight_packing import INVALID_ROW
from ..vector.elementwise import (
    UNARY_ARGS,
    RowKernel,
    add_copy_step,
    add_row_step_after_dense_copies,
    load_lanes,
    store_lanes,
)

BIAS = declare_args("rows columns x x_row bias ids id_bytes experts first routed y y_row")
"""`experts` rows of `bias` belong to the ids from `first` on; `routed` is the number of all experts."""


@subroutine
def convert_int32_bits_to_float(x):
    """Convert int32 lanes to float32; the operand has the int32 bits in lanes of type float32."""
    return to_float(float_to_bits(x))


@subroutine
def truncate_float_to_int32_bits(x):
    """Truncate float32 lanes to int32; the result has the int32 bits in lanes of type float32."""
    return bits_to_float(truncate_to_int(x))


CASTS = {
    (DType.F32, DType.F16): subroutine(lambda x: round_to_f16_values(x)),
    (DType.F32, DType.BF16): subroutine(lambda x: round_f32_to_bf16_values(x)),
    (DType.I32, DType.F32): convert_int32_bits_to_float,
    (DType.F32, DType.I32): truncate_float_to_int32_bits,
}
"""The conversion of 16 lanes by the dtype of the operand and the attribute `dtype`; floats are stored as f32."""


@kernel
def add_expert_bias(a, thread, threads):
    """Add to each row the bias of its expert: ``y[i] = x[i] + bias[ids[i] - first]``.

    Rows with an expert on another device are copied without a bias. An id that is no expert stops the run.
    """
    n, experts, first, size = BIAS.columns(a), BIAS.experts(a), BIAS.first(a), BIAS.id_bytes(a)
    low, high = compute_thread_range(BIAS.rows(a), thread, threads)
    for i in range(low, high):
        expert = load_int(BIAS.ids(a) + 4 * i) if size == 4 else load_long(BIAS.ids(a) + 8 * i)
        if expert < 0 or expert >= BIAS.routed(a):
            return INVALID_ROW | expert << 8
        x, y, row = BIAS.x(a) + i * BIAS.x_row(a), BIAS.y(a) + i * BIAS.y_row(a), expert - first
        is_local = row >= 0 and row < experts
        bias = BIAS.bias(a) + 4 * n * row
        for c in range(0, n, LANES):
            value = load_lanes(x, c, n, 4)
            store_lanes(y, c, n, add(value, load_lanes(bias, c, n, 4)) if is_local else value)
    return 0


def _view_with_axes(operand: Operand, shape: tuple[int, ...], strides: tuple[int, ...]) -> Operand:
    return replace(operand, tensor=replace(operand.tensor, shape=shape, strides=strides))


def _view_bits_as_float32(operand: Operand) -> Operand:
    """Return a 32-bit operand with type float32 and unchanged bits, so that float kernels can copy it."""
    return replace(operand, tensor=replace(operand.tensor, dtype=DType.F32))


def _bind_repeat(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of a `repeat`: a copy of the operand with stride 0 along the repetitions.

    Each repeated axis of the result is split into two axes: repetition and entry. Return False if the kernel cannot
    copy with these axes.
    """
    x, y = call.operand(0), call.out
    if not y.is_float or not x.is_float:
        return False
    missing = len(y.shape) - len(x.shape)
    sizes, steps_of_x = [1] * missing + [*x.shape], [0] * missing + [*x.strides]
    shape: list[int] = []
    from_strides: list[int] = []
    to_strides: list[int] = []
    for n, step, m, to in zip(sizes, steps_of_x, y.shape, y.strides, strict=True):
        if n not in (1, m):
            shape.append(m // n)
            from_strides.append(0)
            to_strides.append(n * to)
            m = n
        shape.append(m)
        from_strides.append(0 if n == 1 else step)
        to_strides.append(to)
    source = _view_with_axes(x, tuple(shape), tuple(from_strides))
    return add_copy_step(steps, source, _view_with_axes(y, tuple(shape), tuple(to_strides)))


def _bind_cast(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    x, y, target = call.operand(0), call.out, call.attrs["dtype"]
    if not isinstance(target, DType) or y.dtype is not (DType.I32 if target is DType.I32 else DType.F32):
        return False
    if x.is_float and target is DType.F32:
        return add_copy_step(steps, x, y)
    if (x.dtype, target) not in CASTS:
        return False
    row_kernel = RowKernel(partial(_select_cast_kernel, x.dtype, target))
    return add_row_step_after_dense_copies(steps, row_kernel, [_view_bits_as_float32(x)], _view_bits_as_float32(y))


def _select_cast_kernel(source: DType, target: DType, strides: tuple[int, ...]) -> Kernel:
    """Select the kernel of a cast by the element stride of the operand: 4 bytes, or 0 for one element per row."""
    return make_32_bit_cast_kernel(source, target, strides == (0,))


@cache
def make_32_bit_cast_kernel(source: DType, target: DType, is_single: bool) -> Kernel:
    """Make the kernel of a cast between 32-bit types; `is_single` means one element for each row of the operand."""
    convert, step = CASTS[source, target], 0 if is_single else 4

    def body(a, thread, threads):
        n = UNARY_ARGS.columns(a)
        first, last = compute_thread_range(UNARY_ARGS.rows(a), thread, threads)
        for i in range(first, last):
            x, y = UNARY_ARGS.x(a, i), UNARY_ARGS.y(a, i)
            for c in range(0, n, LANES):
                store_lanes(y, c, n, convert(load_lanes(x, c, n, step)))
        return 0

    return Kernel(f"arrangements.cast.{source}_to_{target}{'.single' if is_single else ''}", body)


def _bind_arange_as_constant_copy(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of an arange: copy a constant with its numbers, which are computed once."""
    y = call.out
    start, step = (np.float64(np.asarray(call.attrs[name])) for name in ("start", "step"))
    numbers = (start + step * np.arange(y.shape[0])).astype(np.float32)
    memory = steps.constant(numbers)
    tensor = replace(memory.tensor, shape=y.shape, strides=contiguous_strides(y.shape), dtype=DType.F32)
    return add_copy_step(steps, Operand(memory.address, tensor), y)


def _bind_add_id(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    x, bias, ids, y = (*(call.operand(i) for i in range(3)), call.out)
    id_bytes = {DType.I32: 4, DType.I64: 8}.get(ids.dtype)
    floats = all(o.is_float and o.has_uniform_row_stride for o in (x, bias, y)) and bias.is_dense
    if id_bytes is None or not ids.is_dense or not floats:
        return False
    experts = bias.shape[0]
    block = BIAS(
        rows=math.prod(x.shape[:-1]),
        columns=x.shape[-1],
        x=x.address,
        x_row=x.row_stride_bytes,
        bias=bias.address,
        ids=ids.address,
        id_bytes=id_bytes,
        experts=experts,
        first=int(np.asarray(call.attrs["first"])),
        routed=int(np.asarray(call.attrs["total"])) or experts,
        y=y.address,
        y_row=y.row_stride_bytes,
    )
    steps.add(add_expert_bias, block, reads=[x, bias, ids], writes=[y], stops=True)
    return True


def _bind_set_in_place(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of a `set` in place: a copy into the region.

    Return False if the result is not in place, or the kernel cannot copy. Then a generated kernel computes the op.
    """
    a, b, region = call.operand(0), call.operand(1), call.out
    if not has_same_elements(a, region) or b.region.overlaps(region.region):
        return False
    for axis, start in enumerate(integers_attribute(call.attrs, "offsets")):
        region = region.slice_axis(axis, start, b.shape[axis])
    return not b.size or add_copy_step(steps, b, region)


BINDINGS = {
    "repeat": _bind_repeat,
    "cast": _bind_cast,
    "arange": _bind_arange_as_constant_copy,
    "add_id": _bind_add_id,
    "set": _bind_set_in_place,
}
