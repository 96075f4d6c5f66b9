"""Elementwise kernels over rows. Operands have any strides; the last axis is dense, or one number per row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from .....graph.dtypes import DType
from .....graph.old_names import make_module_getattr
from .....ops.declaration.attributes import float_attribute
from ....base import contiguous_strides
from ....fusion.operands import BoundInstruction, Operand, compute_broadcast_strides, float32_bits
from ...compilation.compiler import Kernel, Subroutine, kernel, subroutine
from ...compilation.kernel_args import KernelArgs, declare_args
from ...simd.half_memory import store_first_bf16, store_first_f16
from ...simd.vectors import (
    LANES,
    gather_lanes,
    load,
    load_argument_word,
    load_first_lanes,
    make_clamped_lane_indices,
    mul_int,
    splat,
    splat_from,
    splat_int,
    store,
    store_first_lanes,
    where_nonzero,
)
from ...steps.column_split import find_continued_column_split
from ...steps.partition import compute_thread_range
from ...steps.step_table import InstructionBinder, StepTableBuilder, ThreadWork
from . import vector_functions

HEADER_WORDS = 4
"""Words of a walk (the arguments that iterate over rows) before its operands: row length, three counts of rows."""
OPERAND_WORDS = 5
"""Words of an operand: address, bytes from row to row along three axes, bytes from element to element."""
ELEMENT_STRIDE_WORDS = slice(HEADER_WORDS + OPERAND_WORDS - 1, None, OPERAND_WORDS)
"""The words of a walk that hold the bytes from element to element of each operand."""


def make_row_args(operands: str, more: str = "") -> KernelArgs:
    """Make the arguments of a kernel over rows: the loop arguments `walk` (`make_row_loop_args`), then `more`.

    The kernel reads ``ARGS.columns(a)``, ``ARGS.rows(a)``, ``ARGS.x(a, i)`` (address of row i of operand x), and
    ``ARGS.x_step(a)`` (bytes from element to element).
    """
    names = operands.split()
    parts = {"columns": load_row_length, "rows": load_row_count}
    for index, name in enumerate(names):
        first = HEADER_WORDS + OPERAND_WORDS * index
        parts |= {name: _make_compute_row_address(first), f"{name}_step": _make_load_element_stride(first)}
    return declare_args(f"walk[{HEADER_WORDS + OPERAND_WORDS * len(names)}] {more}", parts)


load_row_length = subroutine(lambda a: load_argument_word(a, 0))
load_row_count = subroutine(lambda a: load_argument_word(a, 1) * load_argument_word(a, 2) * load_argument_word(a, 3))


def _make_compute_row_address(at: int) -> Subroutine:
    """Make the subroutine ``(a, i)`` that returns the address of row `i` of the operand with arguments at word `at`."""

    def compute_row_address(a, i):
        outer, inner = load_argument_word(a, 2), load_argument_word(a, 3)
        base = load_argument_word(a, at)
        if load_argument_word(a, 1) * outer == 1:
            return base + i * load_argument_word(a, at + 3)
        rest = i // inner
        return (
            base
            + rest // outer * load_argument_word(a, at + 1)
            + rest % outer * load_argument_word(a, at + 2)
            + i % inner * load_argument_word(a, at + 3)
        )

    return subroutine(compute_row_address)


def _make_load_element_stride(at: int) -> Subroutine:
    """Make the subroutine ``(a)`` that returns the element stride in bytes of the operand at argument word `at`."""

    def load_element_step(a):
        return load_argument_word(a, at + OPERAND_WORDS - 1)

    return subroutine(load_element_step)


@subroutine
def load_lanes(p, c, n, step):
    """Load up to 16 elements of a float32 row of `n` elements from column `c` on; with `step` 0, its only element."""
    if step == 0:
        return splat_from(p)
    if n - c >= LANES:
        return load(p + 4 * c)
    return load_first_lanes(p + 4 * c, n - c)


@subroutine
def store_lanes(p, c, n, value):
    """Store up to 16 lanes to a float32 row of `n` elements, from column `c` on; lanes past its end are dropped."""
    if n - c >= LANES:
        store(p + 4 * c, value)
    else:
        store_first_lanes(p + 4 * c, value, n - c)


@subroutine
def store_lanes_f16(p, c, n, value):
    store_first_f16(p + 2 * c, value, n - c)


@subroutine
def store_lanes_bf16(p, c, n, value):
    store_first_bf16(p + 2 * c, value, n - c)


LANE_STORERS = {DType.F32: store_lanes, DType.F16: store_lanes_f16, DType.BF16: store_lanes_bf16}
"""Functions that store up to 16 elements from column `c` of `n`, rounded to each type."""
UNARY_ARGS = make_row_args("x y")


@cache
def make_unary_kernel(name: str, function: Subroutine | None = None) -> Kernel:
    """Make the elementwise kernel ``y = f(x)`` of a function of 16 lanes, by default the function `name` of `UNARY`."""
    compute = function or vector_functions.UNARY[name]

    def body(a, thread, threads):
        n = UNARY_ARGS.columns(a)
        lo, hi = compute_thread_range(UNARY_ARGS.rows(a), thread, threads)
        for i in range(lo, hi):
            x, y = UNARY_ARGS.x(a, i), UNARY_ARGS.y(a, i)
            for c in range(0, n, LANES):
                store_lanes(y, c, n, compute(load_lanes(x, c, n, 4)))
        return 0

    return Kernel(f"elementwise.unary.{name}", body)


@kernel
def copy_strided_rows(a, thread, threads):
    """Copy rows with strided elements to rows with dense elements."""
    n, apart = UNARY_ARGS.columns(a), splat_int(UNARY_ARGS.x_step(a))
    lo, hi = compute_thread_range(UNARY_ARGS.rows(a), thread, threads)
    for i in range(lo, hi):
        x, y = UNARY_ARGS.x(a, i), UNARY_ARGS.y(a, i)
        for c in range(0, n, LANES):
            store_lanes(y, c, n, gather_lanes(x, mul_int(make_clamped_lane_indices(c, n), apart)))
    return 0


BINARY_ARGS = make_row_args("x z y")


@cache
def make_binary_kernel(name: str) -> Kernel:
    """Make the elementwise kernel ``y = f(x, z)`` for the function `name` of `BINARY`."""
    function = vector_functions.BINARY[name]

    def body(a, thread, threads):
        n, first, second = BINARY_ARGS.columns(a), BINARY_ARGS.x_step(a), BINARY_ARGS.z_step(a)
        lo, hi = compute_thread_range(BINARY_ARGS.rows(a), thread, threads)
        for i in range(lo, hi):
            x, z, y = BINARY_ARGS.x(a, i), BINARY_ARGS.z(a, i), BINARY_ARGS.y(a, i)
            for c in range(0, n, LANES):
                store_lanes(y, c, n, function(load_lanes(x, c, n, first), load_lanes(z, c, n, second)))
        return 0

    return Kernel(f"elementwise.binary.{name}", body)


NUMBER_FUNCTIONS = {
    **{"scale": vector_functions.affine, "leaky_relu": vector_functions.leaky_relu},
    **{
        "clamp": vector_functions.clamp,
        "clamp_from_0": vector_functions.clamp_from_pos_0,
        "clamp_to_0": vector_functions.clamp_to_neg_0,
    },
}
NUMBER_ARGS = make_row_args("x y", "first:f32 second:f32")


@cache
def make_elementwise_kernel_with_two_numbers(name: str) -> Kernel:
    """Make the elementwise kernel ``y = f(x, first, second)`` with two numbers, for one of `NUMBER_FUNCTIONS`."""
    function = NUMBER_FUNCTIONS[name]

    def body(a, thread, threads):
        n, first, second = NUMBER_ARGS.columns(a), NUMBER_ARGS.first(a), NUMBER_ARGS.second(a)
        lo, hi = compute_thread_range(NUMBER_ARGS.rows(a), thread, threads)
        for i in range(lo, hi):
            x, y = NUMBER_ARGS.x(a, i), NUMBER_ARGS.y(a, i)
            for c in range(0, n, LANES):
                store_lanes(y, c, n, function(load_lanes(x, c, n, 4), first, second))
        return 0

    return Kernel(f"elementwise.with_numbers.{name}", body)


CHOICE_ARGS = make_row_args("t x z y")


@kernel
def select_elements(a, thread, threads):
    """Select elements by a condition: ``y = x if t != 0 else z``. Each operand may be one number for the whole row."""
    n, t_step = CHOICE_ARGS.columns(a), CHOICE_ARGS.t_step(a)
    x_step, z_step = CHOICE_ARGS.x_step(a), CHOICE_ARGS.z_step(a)
    lo, hi = compute_thread_range(CHOICE_ARGS.rows(a), thread, threads)
    for i in range(lo, hi):
        t, x, z, y = CHOICE_ARGS.t(a, i), CHOICE_ARGS.x(a, i), CHOICE_ARGS.z(a, i), CHOICE_ARGS.y(a, i)
        for c in range(0, n, LANES):
            chosen = where_nonzero(
                load_lanes(t, c, n, t_step), load_lanes(x, c, n, x_step), load_lanes(z, c, n, z_step)
            )
            store_lanes(y, c, n, chosen)
    return 0


FILL_ARGS = make_row_args("y", "value:f32")


@kernel
def fill(a, thread, threads):
    """Fill the rows of y with one number."""
    n, value = FILL_ARGS.columns(a), splat(FILL_ARGS.value(a))
    lo, hi = compute_thread_range(FILL_ARGS.rows(a), thread, threads)
    for i in range(lo, hi):
        for c in range(0, n, LANES):
            store_lanes(FILL_ARGS.y(a, i), c, n, value)
    return 0


MAX_ROW_ELEMENTS = 2048
"""Largest length of the rows into which a longer run is cut, so that threads have rows to share."""


def make_row_loop_args(
    shape: Sequence[int], operands: Sequence[Operand], *, whole_rows: bool = False, apart: bool = False
) -> list[int] | None:
    """Make the loop arguments of a kernel over rows: row length, row counts, addresses, strides; None if impossible.

    Operands broadcast to `shape`. Adjacent axes merge if all operands allow it; `whole_rows` keeps the last axis.
    `apart` allows strided elements.
    """
    if any(n not in (1, m) for o in operands for n, m in zip(reversed(o.shape), reversed(shape), strict=False)):
        return None  # a repeated operand
    strides = [compute_broadcast_strides(o, shape) for o in operands]
    axes = [(n, *steps) for n, *steps in zip(shape, *strides, strict=True) if n != 1]
    last = [(shape[-1] if shape else 1, *(s[-1] if s else 0 for s in strides))] if whole_rows else []
    if whole_rows and axes and shape[-1] != 1:
        axes.pop()
    merged = [*axes[:1]]
    for n, *steps in axes[1:]:
        before = merged[-1]
        if all(was == n * now for was, now in zip(before[1:], steps, strict=True)):
            merged[-1] = (before[0] * n, *steps)
        else:
            merged.append((n, *steps))
    if not whole_rows:
        last = [merged.pop() if merged else (1, *(1 for _ in operands))]
    (n, *steps) = last[0]
    if not apart and any(s not in (0, 1) for s in steps) and n > 1:
        return None
    if not merged and not whole_rows and n > MAX_ROW_ELEMENTS:
        row_elements = max(p for p in range(1, MAX_ROW_ELEMENTS + 1) if n % p == 0)
        merged, n = [(n // row_elements, *(s * row_elements for s in steps))], row_elements
    if len(merged) > 3:
        return None
    while len(merged) < 3:
        merged.insert(0, (1, *(0 for _ in operands)))
    walk = [n, *(axis[0] for axis in merged)]
    for k, operand in enumerate(operands):
        step = 4 * steps[k] if n > 1 else 4
        walk += [operand.address, *(4 * axis[k + 1] for axis in merged), step]
    return walk


RowKernel = tuple[Kernel, KernelArgs, Mapping[str, int]]
"""A kernel of this file, its words, and the values of the words behind the walk."""


def add_row_step_after_dense_copies(
    steps: StepTableBuilder, of: RowKernel, sources: Sequence[Operand], out: Operand
) -> bool:
    """Add the step of a kernel over rows, after copies of strided operands; False if that is impossible."""
    whole = _make_row_thread_work(of, sources, out)
    if whole is None:
        dense = [_make_scratch_for_dense_copy(steps, o, k) for k, o in enumerate(sources)]
        if _make_row_thread_work(of, dense, out) is None:
            return False
        for source, to in zip(sources, dense, strict=True):
            if to is not source:
                _add_strided_copy_step(steps, source, to)
        return add_row_step_after_dense_copies(steps, of, dense, out)
    if (column_split := find_continued_column_split(steps, sources, out)) is not None:
        slices = zip(*(column_split.slice_by_thread(o) for o in (*sources, out)), strict=True)
        parts = [None if None in each else _make_row_thread_work(of, each[:-1], each[-1]) for each in slices]
        if all(
            part is not None
            for part, (first, last) in zip(parts, pairwise(column_split.axis_bounds), strict=True)
            if first < last
        ):
            steps.add_by_columns(of[0], parts, out, column_split.column_bounds)
            return True
    steps.add(of[0], whole.words, reads=sources, writes=[out])
    return True


def _make_scratch_for_dense_copy(steps: StepTableBuilder, x: Operand, number: int) -> Operand:
    """Return scratch memory for a dense copy of `x`; return `x` itself if it is dense or cannot be copied."""
    if not x.shape or x.shape[-1] == 1 or x.strides[-1] in (0, 1):
        return x
    nbytes = x.tensor.spec.nbytes
    memory = steps.scratch(f"collected {number} {nbytes}", nbytes)
    tensor = replace(memory.tensor, shape=x.shape, strides=contiguous_strides(x.shape), dtype=x.dtype)
    to = Operand(memory.address, tensor)
    return to if can_copy(x, to) else x


def _make_strided_copy_loop_args(x: Operand, to: Operand) -> list[int] | None:
    """Make the loop arguments (`make_row_loop_args`) of `copy_strided_rows`; None if it cannot loop over them."""
    if not (x.is_float and to.is_float and to.tensor.spec.size):
        return None
    walk = make_row_loop_args(to.shape, [x, to], apart=True)
    if walk is None or walk[-1] != 4:
        walk = make_row_loop_args(to.shape, [x, to], whole_rows=True, apart=True)
    return None if walk is None or walk[-1] != 4 else walk


def can_copy(x: Operand, to: Operand) -> bool:
    """Return whether `add_unary_step` can copy `x` to `to`."""
    return _make_strided_copy_loop_args(x, to) is not None


def _add_strided_copy_step(steps: StepTableBuilder, x: Operand, to: Operand) -> bool:
    """Add the step that copies strided `x` to dense `to`; return False if the kernel cannot loop over both."""
    walk = _make_strided_copy_loop_args(x, to)
    if walk is None:
        return False
    steps.add(copy_strided_rows, UNARY_ARGS(walk=walk), reads=[x], writes=[to])
    return True


def make_whole_row_args_and_dense_copy(
    steps: StepTableBuilder, x: Operand, y: Operand
) -> tuple[list[int], Operand] | None:
    """Make the loop arguments over whole rows of `x` and `y`; return them with `x`, or with a dense copy of `x`."""
    for source in (x, _make_scratch_for_dense_copy(steps, x, 0)):
        walk = make_row_loop_args(x.shape, [source, y], whole_rows=True) if x.is_float and x.shape else None
        if walk is not None and walk[ELEMENT_STRIDE_WORDS][0] == 4:
            if source is not x:
                _add_strided_copy_step(steps, x, source)
            return walk, source
    return None


def _make_row_thread_work(of: RowKernel, sources: Sequence[Operand], out: Operand) -> ThreadWork | None:
    """Make the work of one thread for a kernel over rows; None if operands are empty or need a copy first."""
    operands = [*sources, out]
    if not all(o.is_float for o in operands) or not out.tensor.spec.size:
        return None
    walk = make_row_loop_args(out.shape, operands) or make_row_loop_args(out.shape, operands, whole_rows=True)
    if walk is None or walk[-1] != 4 or (len(sources) == 1 and walk[ELEMENT_STRIDE_WORDS][0] != 4):
        return None
    _, args, numbers = of
    return ThreadWork(args(walk=walk, **numbers), sources, [out])


def add_unary_step(steps: StepTableBuilder, name: str, x: Operand, out: Operand) -> bool:
    """Add the elementwise step of one of `UNARY`; return False if the kernel cannot loop over the operands."""
    of: RowKernel = (make_unary_kernel(name), UNARY_ARGS, {})
    if name == "copy" and _make_row_thread_work(of, [x], out) is None:
        return _add_strided_copy_step(steps, x, out)
    return add_row_step_after_dense_copies(steps, of, [x], out)


def add_binary_step(steps: StepTableBuilder, name: str, x: Operand, z: Operand, out: Operand) -> bool:
    """Add the elementwise step of one of `BINARY`; return False if the kernel cannot loop over the operands."""
    return add_row_step_after_dense_copies(steps, (make_binary_kernel(name), BINARY_ARGS, {}), [x, z], out)


def _make_unary_binding(name: str) -> InstructionBinder:
    return lambda steps, call: add_unary_step(steps, name, call.operand(0), call.out)


def _make_binary_binding(name: str) -> InstructionBinder:
    return lambda steps, call: add_binary_step(steps, name, call.operand(0), call.operand(1), call.out)


def _add_number_step(
    steps: StepTableBuilder, call: BoundInstruction, name: str, first: float, second: float = 0.0
) -> bool:
    numbers = {"first": float32_bits(first), "second": float32_bits(second)}
    return add_row_step_after_dense_copies(
        steps, (make_elementwise_kernel_with_two_numbers(name), NUMBER_ARGS, numbers), [call.operand(0)], call.out
    )


def _bind_scale(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    scale, bias = (float_attribute(call.attrs, name) for name in ("scale", "bias"))
    return _add_number_step(steps, call, "scale", scale, bias or -0.0)


def _bind_clamp(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    low, high = float_attribute(call.attrs, "min"), float_attribute(call.attrs, "max")
    name = "clamp_to_0" if _is_signed_zero(high, -1.0) else "clamp_from_0" if _is_signed_zero(low, 1.0) else "clamp"
    return _add_number_step(steps, call, name, low, high)


def _is_signed_zero(value: float, sign: float) -> bool:
    return value == 0 and math.copysign(1.0, value) == sign


def _bind_leaky_relu(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    return _add_number_step(steps, call, "leaky_relu", float_attribute(call.attrs, "negative_slope"))


def _bind_compare(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    return add_binary_step(steps, str(call.attrs["kind"]), call.operand(0), call.operand(1), call.out)


def _bind_where(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    return add_row_step_after_dense_copies(
        steps, (select_elements, CHOICE_ARGS, {}), [call.operand(i) for i in range(3)], call.out
    )


def _bind_fill(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    return add_row_step_after_dense_copies(
        steps, (fill, FILL_ARGS, {"value": call.float_attribute_bits("value")}), [], call.out
    )


BINDINGS = {
    **{"scale": _bind_scale, "clamp": _bind_clamp, "fill": _bind_fill, "leaky_relu": _bind_leaky_relu},
    **{"compare": _bind_compare, "where": _bind_where, "cont": _make_unary_binding("copy")},
    **{n: _make_unary_binding(n) for n in vector_functions.UNARY if n != "copy"},
    **{
        n: _make_binary_binding(n)
        for n in vector_functions.BINARY
        if n not in vector_functions.GATED and n not in vector_functions.COMPARISONS
    },
}


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(
        globals(),
        lanes="load_lanes",
        put="store_lanes",
        row_words="make_row_args",
        rows_of="make_row_loop_args",
        make_row_walk="make_row_loop_args",
        ELEMENTS="ELEMENT_STRIDE_WORDS",
    )
