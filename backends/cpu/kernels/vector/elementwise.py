"""Elementwise kernels over rows. Operands have any strides; the last axis is dense, or one number per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from .....graph.attrs import Attr
from .....graph.dtypes import DType
from .....graph.old_names import make_module_getattr
from .....ops.declaration.expression import Expression, linearise
from .....ops.declaration.scalar import Scalar
from .....ops.registry import REGISTRY
from ....base import contiguous_strides
from ....fusion.operand_views import Box, extend_box_view_to_shape
from ....fusion.operands import BoundInstruction, Operand, float32_bits
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
    splat_from,
    splat_int,
    store,
    store_first_lanes,
)
from ...steps.column_split import find_continued_column_split
from ...steps.partition import compute_thread_range
from ...steps.step_table import StepTableBuilder, ThreadWork
from .expression_kernels import make_expression_kernel
from .lower_expressions import has_lane_code_for_all_functions
from .row_kernel_passes import HEADER_WORDS, OPERAND_WORDS, ExpressionKernel
from .row_loops import ELEMENT_STRIDE_WORDS, make_row_loop_args


def make_row_args(operands: str, more: str = "") -> KernelArgs:
    """Declare the argument words of a kernel that loops over rows: words of `make_row_loop_args`, then `more`.

    For an operand x the kernel reads ``ARGS.columns(a)``, ``ARGS.rows(a)``, ``ARGS.x(a, i)`` (address of row i), and
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


@kernel
def copy_strided_rows_to_dense(a, thread, threads):
    """Copy rows with strided elements to rows with dense elements."""
    n, apart = UNARY_ARGS.columns(a), splat_int(UNARY_ARGS.x_step(a))
    lo, hi = compute_thread_range(UNARY_ARGS.rows(a), thread, threads)
    for i in range(lo, hi):
        x, y = UNARY_ARGS.x(a, i), UNARY_ARGS.y(a, i)
        for c in range(0, n, LANES):
            store_lanes(y, c, n, gather_lanes(x, mul_int(make_clamped_lane_indices(c, n), apart)))
    return 0


Strides: TypeAlias = tuple[int, ...]
"""Bytes from element to element of each operand."""


@dataclass(frozen=True, slots=True)
class RowKernel:
    """A kernel that loops over rows, with everything that a step needs except the operands.

    A box is a part of the shape: an index range along each axis. A concatenation reads each operand in its own box.

    Attributes:
        select: function that returns the kernel for the element strides of the operands, 0 or 4 bytes.
        words: the argument words after the loop arguments (`make_row_loop_args`).
        whole_row_shape: the shape of the rows, if the kernel needs whole rows; else None.
        reads_strided: whether the kernel may read rows with strided elements.
        copies_strided: whether it may read them of one operand only, because it copies them to the result first.
        boxes: the boxes that operands cover.
        operand_boxes: for each operand the box that it covers; None if it covers the whole shape.
    """

    select: Callable[[Strides], Kernel]
    words: Sequence[int] = ()
    whole_row_shape: tuple[int, ...] | None = None
    reads_strided: bool = False
    copies_strided: bool = False
    boxes: Sequence[Box] = ()
    operand_boxes: Sequence[Box | None] = ()


def add_row_step_after_dense_copies(
    steps: StepTableBuilder, row_kernel: RowKernel, sources: Sequence[Operand], out: Operand
) -> bool:
    """Add the step of a kernel over rows, after copies of strided operands. Return False if that is impossible."""
    if add_row_step(steps, row_kernel, sources, [out]):
        return True
    dense = [_make_scratch_for_dense_copy(steps, o, k) for k, o in enumerate(sources)]
    if dense == [*sources] or make_row_thread_work_and_strides(row_kernel, dense, [out]) is None:
        return False
    for source, to in zip(sources, dense, strict=True):
        if to is not source:
            _add_strided_to_dense_copy_step(steps, source, to)
    return add_row_step(steps, row_kernel, dense, [out])


def add_row_step(
    steps: StepTableBuilder, row_kernel: RowKernel, sources: Sequence[Operand], results: Sequence[Operand]
) -> bool:
    """Add the step of a kernel over rows; return False if it cannot loop over the operands and results."""
    whole = make_row_thread_work_and_strides(row_kernel, sources, results)
    if whole is None:
        return False
    work, strides = whole
    kernel = row_kernel.select(strides)
    if not _add_step_for_previously_split_columns(steps, row_kernel, kernel, sources, results):
        steps.add(kernel, work.words, reads=sources, writes=results)
    return True


def _add_step_for_previously_split_columns(
    steps: StepTableBuilder,
    row_kernel: RowKernel,
    kernel: Kernel,
    sources: Sequence[Operand],
    results: Sequence[Operand],
) -> bool:
    """Add a step in which each thread computes the columns that it wrote in an earlier step, so no barrier is needed.

    Return False if the operands have no such columns.
    """
    whole_rows, count = row_kernel.whole_row_shape is not None, len(sources)
    column_split = (
        None if row_kernel.boxes else find_continued_column_split(steps, sources, results[0], whole_rows=whole_rows)
    )
    if column_split is None:
        return False
    slices = zip(*(column_split.slice_by_thread(o) for o in (*sources, *results)), strict=True)
    parts: list[ThreadWork | None] = []
    for each, (first, last) in zip(slices, pairwise(column_split.axis_bounds), strict=True):
        own = replace(row_kernel, whole_row_shape=each[0].shape) if whole_rows and each[0] else row_kernel
        part = None if None in each else make_row_thread_work_and_strides(own, each[:count], each[count:])
        if first < last and (part is None or row_kernel.select(part[1]) != kernel):
            return False
        parts.append(part and part[0])
    steps.add_by_columns(kernel, parts, results, column_split.column_bounds)
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
    """Make the argument words of `copy_strided_rows_to_dense`: row length, row counts, addresses and strides.

    The result is None if the operands are not float32 or are empty, or if the loop has too many axes.
    """
    if not (x.is_float and to.is_float and to.tensor.spec.size):
        return None
    walk = make_row_loop_args(to.shape, [x, to], apart=True)
    if walk is None or walk[-1] != 4:
        walk = make_row_loop_args(to.shape, [x, to], whole_rows=True, apart=True)
    return None if walk is None or walk[-1] != 4 else walk


def can_copy(x: Operand, to: Operand) -> bool:
    """Return whether `add_copy_step` can copy `x` to `to`."""
    return _make_strided_copy_loop_args(x, to) is not None


def _add_strided_to_dense_copy_step(steps: StepTableBuilder, x: Operand, to: Operand) -> bool:
    """Add the step that copies strided `x` to dense `to`; return False if the kernel cannot loop over both."""
    walk = _make_strided_copy_loop_args(x, to)
    if walk is None:
        return False
    steps.add(copy_strided_rows_to_dense, UNARY_ARGS(walk=walk), reads=[x], writes=[to])
    return True


def make_whole_row_args_and_dense_copy(
    steps: StepTableBuilder, x: Operand, y: Operand
) -> tuple[list[int], Operand] | None:
    """Make the argument words with which a kernel loops over whole rows of `x` and `y`; copy `x` if it is strided.

    Returns:
        The words (row length, row counts, addresses, strides), and `x` or its dense copy. None means that a kernel
        cannot loop over the rows: they are not float32, or have too many axes.
    """
    for source in (x, _make_scratch_for_dense_copy(steps, x, 0)):
        walk = make_row_loop_args(x.shape, [source, y], whole_rows=True) if x.is_float and x.shape else None
        if walk is not None and walk[ELEMENT_STRIDE_WORDS][0] == 4:
            if source is not x:
                _add_strided_to_dense_copy_step(steps, x, source)
            return walk, source
    return None


def make_row_thread_work_and_strides(
    row_kernel: RowKernel, sources: Sequence[Operand], results: Sequence[Operand]
) -> tuple[ThreadWork, Strides] | None:
    """Make the work of a step with a kernel that loops over rows; return it with the element strides in bytes.

    The result is None if operands are empty, or need a dense copy first.
    """
    walk = _make_loop_args_of_operands_and_results(row_kernel, sources, results)
    if walk is None:
        return None
    strides = tuple(walk[ELEMENT_STRIDE_WORDS][: len(sources)])
    return ThreadWork([*walk, *row_kernel.words], sources, results), strides


def can_loop_over_rows(row_kernel: RowKernel, sources: Sequence[Operand], results: Sequence[Operand]) -> bool:
    """Return whether a kernel can loop over the rows of operands and results, without copies."""
    return _make_loop_args_of_operands_and_results(row_kernel, sources, results) is not None


def _make_loop_args_of_operands_and_results(
    row_kernel: RowKernel, sources: Sequence[Operand], results: Sequence[Operand]
) -> list[int] | None:
    """Make the loop arguments (`make_row_loop_args`) of a step that writes dense rows, or one number per row.

    The result is None if operands are empty, or need a copy first.
    """
    if not all(o.is_float and o.size for o in (*sources, *results)):
        return None
    whole_row_shape, boxes = row_kernel.whole_row_shape, row_kernel.boxes
    shape = whole_row_shape or results[0].shape
    placed = zip_longest(sources, row_kernel.operand_boxes)
    operands = [o if box is None else extend_box_view_to_shape(o, box, shape) for o, box in placed]
    operands += results
    walk = None
    for apart in (False, True) if row_kernel.reads_strided or row_kernel.copies_strided else (False,):
        for whole_rows in (False, True) if whole_row_shape is None else (True,):
            walk = walk or make_row_loop_args(shape, operands, whole_rows=whole_rows, apart=apart, boxes=boxes)
            if walk is not None and whole_row_shape is None and set(_get_result_strides(walk, sources, results)) != {4}:
                walk = None
    if walk is None:
        return None
    strided = [o for o, step in zip(sources, walk[ELEMENT_STRIDE_WORDS], strict=False) if step not in (0, 4)]
    if strided and not row_kernel.reads_strided:
        is_free = not any(o.region.overlaps(out.region) for o in sources for out in results)
        if len(strided) > 1 or not is_free:
            return None
    for to, out in zip(_get_result_strides(walk, sources, results), results, strict=True):
        if to != 4 and not (whole_row_shape and out.shape[-1] == 1):
            return None
    return walk


def _get_result_strides(walk: Sequence[int], sources: Sequence[Operand], results: Sequence[Operand]) -> Sequence[int]:
    """Return the bytes from element to element of each result, from the loop arguments `walk`."""
    return walk[ELEMENT_STRIDE_WORDS][len(sources) : len(sources) + len(results)]


def add_expression_step(
    steps: StepTableBuilder,
    expression: Expression,
    operands: Sequence[Operand | None],
    out: Operand,
    attributes: Mapping[str, Attr] = MappingProxyType({}),
) -> bool:
    """Add the step of an expression of the scalar language; return False if no kernel can compute it.

    Args:
        steps: the steps.
        expression: the expression of one element or one row.
        operands: operands of the expression, which broadcast to the shape of the result or of the rows.
        out: the result.
        attributes: the float attributes of the call.
    """
    row_kernel = make_expression_row_kernel(expression, operands, attributes)
    sources = _select_read_operands(expression, operands)
    return row_kernel is not None and add_row_step_after_dense_copies(steps, row_kernel, sources, out)


def _select_read_operands(expression: Expression, operands: Sequence[Operand | None]) -> list[Operand]:
    """Return the operands that an expression reads, in the order of the words of its kernel."""
    return [o for index in ExpressionKernel(expression, ()).operand_indices if (o := operands[index]) is not None]


def make_expression_row_kernel(
    expression: Expression,
    operands: Sequence[Operand | None],
    attributes: Mapping[str, Attr],
    shape: tuple[int, ...] | None = None,
    boxes: Sequence[Box] = (),
) -> RowKernel | None:
    """Make the kernel that evaluates an expression row by row; None if it has functions without code, or no rows.

    `shape` is the shape of the rows, by default the shape of the first operand. `boxes` are parts of it, in which
    operands are read (`RowKernel`).
    """
    plan, sources = ExpressionKernel(expression, ()), _select_read_operands(expression, operands)
    if not has_lane_code_for_all_functions(expression) or (
        expression.depends_on_row_reduction_or_length and (not sources or not sources[0].shape)
    ):
        return None
    numbers = expression.compute_number_steps(attributes)
    words = [float32_bits(numbers[step]) for step in plan.steps_passed_as_words]

    def select(strides: Strides) -> Kernel:
        return make_expression_kernel(
            expression, tuple(s == 0 for s in strides), tuple(s not in (0, 4) for s in strides)
        )

    has_rows = expression.depends_on_row_reduction_or_length
    return RowKernel(
        select,
        words,
        (shape or sources[0].shape) if has_rows else None,
        not plan.has_several_passes,
        plan.can_copy_to_result,
        boxes,
        [None if box is None else boxes[box] for box in plan.operand_boxes],
    )


COPY, FILL = linearise(Scalar("operand", (), 0)), linearise(Scalar("attribute", (), "value"))
"""The expressions of a copy, and of a number."""


def add_copy_step(steps: StepTableBuilder, x: Operand, out: Operand) -> bool:
    """Add the step that copies an operand; return False if no kernel can loop over both."""
    return add_expression_step(steps, COPY, [x], out) or _add_strided_to_dense_copy_step(steps, x, out)


def add_fill_step(steps: StepTableBuilder, value: float, out: Operand) -> bool:
    """Add the step that fills an operand with a number. Return False if no kernel can loop over the operand."""
    return add_expression_step(steps, FILL, [], out, {"value": value})


def bind_declared_op(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of an op that is declared in the scalar language. Return False if no kernel can compute it."""
    declared = REGISTRY[call.op].expression
    if declared is None or (declared.arrange and any(o is not None for o in call.src[1:])):
        return False
    operands = [call.optional_operand(index) for index in range(len(declared.operand_names))]
    expression = declared.trace([o is not None for o in operands], call.attrs)
    return add_expression_step(steps, expression, operands, call.out, call.attrs)


def _bind_copy(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    return add_copy_step(steps, call.operand(0), call.out)


BINDINGS = {"cont": _bind_copy}


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
