"""Row kernels that are generated from expressions of the scalar language, as LLVM code without Numba.

A kernel loops over the rows of its thread, 16 columns at a time. Each reduction of the row is one pass over the
columns, and one more pass writes the result. A pass computes again the elements that it needs. The exception is an
element of a transcendental function: the pass that sums it writes it to the result, from where the last pass reads it.
Likewise the first pass that reads an operand with strided elements copies them to the result for the later passes.

A kernel for panels is a hook of another kernel (`panel_hooks`): it computes some rows and columns of a matrix.

The order of sums is the same on each processor. `row_sum` has one accumulator of 16 lanes. `row_dot` has two, which
take turns, and ends with the first. The lanes of an accumulator are added as a binary tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from llvmlite import ir

from .....ops.declaration.expression import OPERAND_FUNCTIONS, Expression
from .....ops.declaration.scalar import COMPARISON_FUNCTIONS, ROW_FUNCTIONS
from ...compilation.compiler import IrBody, Kernel
from ...simd import vectors
from ...simd.vectors import LANES
from .lower_expressions import LANE_FUNCTIONS, emit_splat
from .row_kernel_passes import BOX_WORDS, HEADER_WORDS, OPERAND_WORDS, ExpressionKernel

_I64, _F32 = ir.IntType(64), ir.FloatType()
_LANES_TYPE = ir.VectorType(_F32, LANES)
_Reduction = tuple[Callable[..., Any], Callable[..., Any], float]
_REDUCTIONS: Mapping[str, _Reduction] = MappingProxyType(
    {
        "row_sum": (vectors.add.body, vectors.lane_sum.body, 0.0),
        "row_dot": (lambda b, total, x, y: vectors.fma.body(b, x, y, total), vectors.lane_sum.body, 0.0),
        "row_product": (vectors.mul.body, vectors.lane_product.body, 1.0),
        "row_max": (vectors.larger.body, vectors.lane_max.body, float("-inf")),
        "row_min": (vectors.smaller.body, vectors.lane_min.body, float("inf")),
    }
)
"""For each reduction: the code that adds lanes to an accumulator, its reduction across lanes, its neutral element."""


@cache
def make_expression_kernel(
    expression: Expression, is_single: tuple[bool, ...], is_strided: tuple[bool, ...] = (), panels: str = ""
) -> Kernel:
    """Make the kernel that computes an expression of the scalar language for rows of operands.

    Args:
        expression: the expression; `has_lane_code_for_all_functions` holds.
        is_single: for each operand that the expression reads, whether it has one element for each row.
        is_strided: for each of these operands, whether the elements of its rows are apart.
        panels: the panels of a hook, as in `ExpressionKernel`.
    """
    plan = ExpressionKernel(expression, is_single, is_strided, panels)
    source = expression.declaration or make_expression_kernel
    return Kernel(plan.name, IrBody(lambda function: _RowKernelEmitter(plan, function).emit(), source))


@dataclass
class _RowKernelEmitter:
    """Emitter of the LLVM code of one row kernel.

    `b` is the IR builder. `row_values` has the values of steps that are equal in all columns of the present row.
    """

    plan: ExpressionKernel
    function: ir.Function
    b: Any = field(init=False)
    row_values: dict[int, Any] = field(init=False, default_factory=dict)
    addresses: list[Any] = field(init=False, default_factory=list)
    box_words: list[list[Any]] = field(init=False, default_factory=list)
    box_columns: list[tuple[Any, Any]] = field(init=False, default_factory=list)
    """The first column and the number of columns of each box in the present row."""
    columns: Any = field(init=False)
    copying_pass: tuple[int | None] | None = None
    """The reduction of the pass that copies the strided operand of the present row. It is None before that pass."""

    def emit(self) -> None:
        """Emit the kernel function ``(arguments, thread, threads) -> 0``: a loop over the rows of the thread."""
        steps = self.plan.expression.steps
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.columns = self._word(0)
        boxes = [self._first_box_word + BOX_WORDS * box for box in range(self.plan.box_count)]
        self.box_words = [[self._word(first + index) for index in range(BOX_WORDS)] for first in boxes]
        first_number = self._first_box_word + BOX_WORDS * self.plan.box_count
        numbers: dict[int, Any] = {}
        numbers_passed = self.plan.steps_passed_as_words
        for index, number in enumerate(numbers_passed):
            bits = self.b.trunc(self._word(first_number + index), ir.IntType(32))
            lanes = vectors.splat.body(self.b, self.b.bitcast(bits, _F32))
            is_truth = steps[number].function in COMPARISON_FUNCTIONS
            numbers[number] = self.b.fcmp_unordered("!=", lanes, emit_splat(self.b, 0.0)) if is_truth else lanes
        for number, step in enumerate(steps):
            if step.function == "constant":
                numbers[number] = emit_splat(self.b, float.fromhex(str(step.value)))
            elif step.function == "row_count":
                numbers[number] = vectors.splat.body(self.b, self.b.sitofp(self.columns, _F32))
        if self.plan.panels in ("columns", "blocks"):
            self._emit_panel(numbers)
        else:
            first, last = self._emit_thread_row_range()

            def emit_row(row: Any) -> None:
                self._emit_passes_over_row(self._emit_operand_and_result_row_addresses(row), numbers)
                if self.plan.panels:
                    self._emit_hook_call(row, first, last, first_number + len(numbers_passed))

            self._emit_loop_and_return_index(first, last, 1, emit_row)
        self.b.ret(_integer(0))

    def _emit_hook_call(self, row: Any, first: Any, last: Any, word: int) -> None:
        """Emit the call of a hook (epilogue kernel) after the thread's last block in a row of the matrix.

        A block is one row of the kernel; several blocks are one row of the matrix.
        `word` is the first of these words: the number of the first block, the blocks of a row, and one hook as in
        `panel_hooks`. `row` is a block, and `first` and `last` are the first and the end block of the thread.
        """
        b, one, half = self.b, _integer(1), _integer(32)
        number, blocks = b.add(row, self._word(word)), self._word(word + 1)
        matrix_row, block = b.sdiv(number, blocks), b.srem(number, blocks)
        following = b.add(block, one)
        is_last = b.or_(b.icmp_signed("==", following, blocks), b.icmp_signed("==", b.add(row, one), last))
        with b.if_then(is_last):
            present = b.sub(b.add(row, one), first)
            count = b.select(b.icmp_signed("<", present, following), present, following)
            start, columns = (b.mul(n, self.columns) for n in (b.sub(following, count), count))
            kind = ir.FunctionType(_I64, [_I64] * 3).as_pointer()
            arguments = b.add(self.function.args[0], _integer(8 * (word + 5)))
            ranges = (b.or_(b.shl(at, half), size) for at, size in ((matrix_row, one), (start, columns)))
            b.call(b.inttoptr(self._word(word + 3), kind), [arguments, *ranges])

    def _emit_panel(self, numbers: Mapping[int, Any]) -> None:
        """Emit the loops over the rows of a panel: in each row the columns, or all row blocks, of the panel.

        Words 1 to 3 of an operand are the bytes from row group to row group, from row to row, and from block to block.
        Word 2 of the arguments is the rows of a group.
        """
        b, half = self.b, _integer(32)
        (row, rows), (column, columns) = (
            (b.lshr(range_, half), b.and_(range_, _integer((1 << 32) - 1))) for range_ in self.function.args[1:]
        )
        if self.plan.panels == "columns":
            self.columns = columns
            blocks = _integer(0), _integer(1)
        else:
            blocks = b.sdiv(column, self.columns), b.sdiv(b.add(column, columns), self.columns)
        firsts = [HEADER_WORDS + OPERAND_WORDS * n for n in range(self._operand_and_result_count)]
        steps = [tuple(self._word(first + axis) for axis in (1, 2, 3)) for first in firsts]
        starts = [self._word(first) for first in firsts]
        if self.plan.panels == "columns":
            skipped = (b.mul(column, self._word(first + 4)) for first in firsts)
            starts = [b.add(start, skip) for start, skip in zip(starts, skipped, strict=True)]

        def emit_blocks_of_row(index: Any) -> None:
            group, inner = self._emit_row_group_and_row(index)
            row_starts = [
                b.add(start, b.add(b.mul(group, outer), b.mul(inner, step)))
                for start, (outer, step, _) in zip(starts, steps, strict=True)
            ]

            def emit_block(block: Any) -> None:
                addresses = [b.add(s, b.mul(block, step)) for s, (*_, step) in zip(row_starts, steps, strict=True)]
                self._emit_passes_over_row(addresses, numbers)

            self._emit_loop_and_return_index(*blocks, 1, emit_block)

        self._emit_loop_and_return_index(row, b.add(row, rows), 1, emit_blocks_of_row)

    def _emit_row_group_and_row(self, index: Any) -> tuple[Any, Any]:
        """Emit code that splits the row number `index` into a row group and the row in it; one group needs no code."""
        b = self.b
        with b.goto_entry_block():
            group, row = (b.alloca(_I64) for _ in range(2))
        b.store(_integer(0), group)
        b.store(index, row)
        with b.if_then(b.icmp_signed(">", self._word(1), _integer(1))):
            b.store(b.sdiv(index, self._word(2)), group)
            b.store(b.srem(index, self._word(2)), row)
        return b.load(group), b.load(row)

    @property
    def _operand_and_result_count(self) -> int:
        """The number of operands that the expression reads, plus the number of its results."""
        return len(self.plan.operand_indices) + len(self.plan.expression.results)

    @property
    def _first_box_word(self) -> int:
        return HEADER_WORDS + OPERAND_WORDS * self._operand_and_result_count

    def _word(self, index: int) -> Any:
        return vectors.load_argument_word.body(self.b, self.function.args[0], _integer(index))

    def _emit_thread_row_range(self) -> tuple[Any, Any]:
        """Emit code that computes the first and the end row of the thread, as `compute_thread_range` does."""
        b, (_, thread, threads) = self.b, self.function.args
        rows = b.mul(b.mul(self._word(1), self._word(2)), self._word(3))
        each = b.sdiv(b.add(rows, b.sub(threads, _integer(1))), threads)
        bounds = b.mul(each, thread), b.mul(each, b.add(thread, _integer(1)))
        first, last = (b.select(b.icmp_signed("<", x, rows), x, rows) for x in bounds)
        return first, last

    def _emit_loop_and_return_index(self, start: Any, stop: Any, step: int, body: Callable[[Any], None]) -> Any:
        """Emit ``for i in range(start, stop, step)``, and return the value of i after the loop."""
        with self.b.goto_entry_block():
            place = self.b.alloca(_I64)
        self.b.store(start, place)
        head, inside, after = (self.function.append_basic_block(n) for n in ("head", "inside", "after"))
        self.b.branch(head)
        self.b.position_at_end(head)
        index = self.b.load(place)
        self.b.cbranch(self.b.icmp_signed("<", index, stop), inside, after)
        self.b.position_at_end(inside)
        body(index)
        self.b.store(self.b.add(index, _integer(step)), place)
        self.b.branch(head)
        self.b.position_at_end(after)
        return index

    # ------------------------------------------------------------------------------------------------------- rows

    def _emit_passes_over_row(self, addresses: list[Any], numbers: Mapping[int, Any]) -> None:
        """Emit the code of one row: a pass for each reduction, then the pass that writes the result.

        `addresses` are the addresses of the row in each operand and in each result.
        """
        expression = self.plan.expression
        self.addresses, self.row_values, self.copying_pass = addresses, {**numbers}, None
        for number, step in enumerate(expression.steps):
            if step.function in OPERAND_FUNCTIONS and not step.sources:
                index = self.plan.operand_indices.index(int(step.value))
                if step.function == "row_operand" or self.plan.is_single[index]:
                    self.row_values[number] = vectors.splat_from.body(self.b, self.addresses[index])
        self._emit_steps_computed_once_per_row()
        for number, step in enumerate(expression.steps):
            if step.function in ROW_FUNCTIONS:
                self.row_values[number] = self._emit_reduction(number)
                self._emit_steps_computed_once_per_row()
        elements: list[tuple[int, Any]] = []
        for result, address in zip(expression.results, self.addresses[-len(expression.results) :], strict=True):
            if expression.depends_on_row_reduction_or_length and result in expression.steps_with_one_number_per_row:
                vectors.store_scalar.body(self.b, address, vectors.lane_0.body(self.b, self.row_values[result]))
            else:
                elements.append((result, address))

        def write_results(column: Any, count: Any) -> None:
            lanes = self._emit_lanes_of_steps([result for result, _ in elements], column, count)
            for (_, address), value in zip(elements, lanes, strict=True):  # a result may lie on an operand
                self._emit_store_of_lanes(address, value, column, count)

        if elements:
            self._emit_pass_over_columns(write_results)

    def _emit_steps_computed_once_per_row(self) -> None:
        """Emit all steps that depend only on row values known so far: they are computed once for each row."""
        for number, step in enumerate(self.plan.expression.steps):
            is_known = step.sources and step.function not in ROW_FUNCTIONS and self.row_values.keys() >= {*step.sources}
            if is_known and number not in self.row_values:
                values = (self.row_values[s] for s in step.sources)
                self.row_values[number] = LANE_FUNCTIONS[step.function](self.b, *values)

    def _emit_operand_and_result_row_addresses(self, row: Any) -> list[Any]:
        """Emit code that computes the address of row number `row` in each operand and in the result."""
        b, outer, inner = self.b, self._word(2), self._word(3)
        axes = b.icmp_signed("==", b.mul(self._word(1), outer), _integer(1))
        with b.goto_entry_block():
            places = [b.alloca(_I64) for _ in range(3)]
        for place, value in zip(places, (_integer(0), _integer(0), row), strict=True):
            b.store(value, place)
        with b.if_then(b.not_(axes)):
            rest = b.sdiv(row, inner)
            parts = b.sdiv(rest, outer), b.srem(rest, outer), b.srem(row, inner)
            for place, value in zip(places, parts, strict=True):
                b.store(value, place)
        indices = [b.load(place) for place in places]
        self.box_columns = [self._emit_columns_of_box(words, indices) for words in self.box_words]
        addresses, boxes = [], (*self.plan.operand_boxes, *(None for _ in self.plan.expression.results))
        for operand, box in enumerate(boxes):
            first = HEADER_WORDS + OPERAND_WORDS * operand
            address, own_indices = self._word(first), indices
            if box is not None:  # the address is where the box begins
                lows = zip((*indices, _integer(0)), self.box_words[box][::2], strict=True)
                own_indices = [b.sub(index, low) for index, low in lows]
            for axis, index in enumerate(own_indices):
                address = b.add(address, b.mul(index, self._word(first + 1 + axis)))
            addresses.append(address)
        return addresses

    def _emit_columns_of_box(self, words: Sequence[Any], indices: Sequence[Any]) -> tuple[Any, Any]:
        """Emit code that computes the columns of the present row that are in a box: first column, and count or 0."""
        b = self.b
        *outer, (first, end) = zip(words[::2], words[1::2], strict=True)
        count = b.sub(end, first)
        for (low, high), index in zip(outer, indices, strict=True):
            count = b.select(b.icmp_unsigned("<", b.sub(index, low), b.sub(high, low)), count, _integer(0))
        return first, count

    def _emit_mask_of_box(self, box: int, column: Any) -> Any:
        """Emit a mask of 16 lanes that tells which of the columns from `column` on are in box number `box`."""
        b, (low, size), kind = self.b, self.box_columns[box], ir.VectorType(ir.IntType(32), LANES)
        first, count = (vectors.splat_int.body(b, x) for x in (b.sub(column, low), size))
        return b.icmp_unsigned("<", b.add(first, ir.Constant(kind, [*range(LANES)])), count)

    def _emit_pass_over_columns(self, body: Callable[[Any, Any], None], start: Any = None) -> None:
        """Emit a loop over the columns of a row, 16 at a time.

        ``body(column, count)`` emits the code of 16 columns. `count` is None, or the number of columns in the last
        turn if fewer than 16 are left.
        """
        whole = self.b.sub(self.columns, _integer(LANES - 1))
        end = self._emit_loop_and_return_index(
            _integer(0) if start is None else start, whole, LANES, lambda column: body(column, None)
        )
        with self.b.if_then(self.b.icmp_signed("<", end, self.columns)):
            body(end, self.b.sub(self.columns, end))

    def _emit_reduction(self, number: int) -> Any:
        """Emit the pass over a row that computes reduction step `number`; return the result, repeated in all lanes."""
        b, step = self.b, self.plan.expression.steps[number]
        join, across, neutral = _REDUCTIONS[step.function]
        with b.goto_entry_block():
            totals = [b.alloca(_LANES_TYPE) for _ in range(2 if step.function == "row_dot" else 1)]
        for total in totals:
            b.store(emit_splat(b, neutral), total)

        def add_columns(total: Any, column: Any, count: Any) -> None:
            values = self._emit_lanes_of_steps(step.sources, column, count, number)
            if count is not None:
                mask = vectors.emit_first_lanes_mask(b, count)
                values = [b.select(mask, v, emit_splat(b, 0.0 if len(totals) == 2 else neutral)) for v in values]
            b.store(join(b, b.load(total), *values), total)

        start = None
        if len(totals) == 2:
            pairs = b.sub(self.columns, _integer(2 * LANES - 1))

            def add_pair(column: Any) -> None:
                add_columns(totals[0], column, None)
                add_columns(totals[1], b.add(column, _integer(LANES)), None)

            start = self._emit_loop_and_return_index(_integer(0), pairs, 2 * LANES, add_pair)
        self._emit_pass_over_columns(lambda column, count: add_columns(totals[0], column, count), start)
        result = b.load(totals[0])
        if len(totals) == 2:
            result = vectors.add.body(b, result, b.load(totals[1]))
        return vectors.splat.body(b, across(b, result))

    # ---------------------------------------------------------------------------------------------------- elements

    def _emit_lanes_of_steps(
        self, required: Sequence[int], column: Any, count: Any, reduction: int | None = None
    ) -> list[Any]:
        """Emit code that computes the `required` steps for 16 columns from `column` on; return one vector per step.

        Args:
            required: The numbers of the steps.
            column: The first column.
            count: The number of columns that are left if there are fewer than 16, else None.
            reduction: The reduction step to which the pass belongs; None for the pass that writes the result.
        """
        values = {**self.row_values}
        pending = [*reversed(required)]
        while pending:  # without recursion, as in `Expression.find_element_steps`
            number = pending[-1]
            function, sources, value = self.plan.expression.steps[number]
            is_stashed = number == self.plan.stored_step and reduction is None
            if missing := [s for s in sources if s not in values and number not in values and not is_stashed]:
                pending += reversed(missing)
                continue
            pending.pop()
            if number in values:
                continue
            is_copied = number == self.plan.copied_step and self.copying_pass not in (None, (reduction,))
            if is_stashed or is_copied:
                values[number] = self._load(self.addresses[-1], column, count)
            elif function == "operand":
                mask = values[sources[0]] if sources else None
                values[number] = self._emit_load_of_operand(int(value), column, count, mask)
            elif function == "inside":
                values[number] = self._emit_mask_of_box(int(value), column)
            else:
                values[number] = LANE_FUNCTIONS[function](self.b, *(values[s] for s in sources))
            if number == self.plan.stored_step and reduction is not None and reduction == self.plan.last_reduction:
                self._emit_store_of_lanes(self.addresses[-1], values[number], column, count)
            if number == self.plan.copied_step and not is_copied:
                self.copying_pass = (reduction,)
                self._emit_store_of_lanes(self.addresses[-1], values[number], column, count)
        return [values[number] for number in required]

    def _emit_load_of_operand(self, operand: int, column: Any, count: Any, mask: Any) -> Any:
        """Emit code that loads 16 elements of an operand from `column` on; lanes out of the mask are not read."""
        b, index = self.b, self.plan.operand_indices.index(operand)
        is_single, address = self.plan.is_single[index], self.addresses[index]
        if not (is_single or (self.plan.is_strided and self.plan.is_strided[index])):
            if mask is None:
                return self._load(address, column, count)
            return vectors.emit_masked_load(b, b.add(address, b.mul(column, _integer(4))), mask)
        if mask is None:
            mask = emit_splat(b, True) if count is None else vectors.emit_first_lanes_mask(b, count)
        apart = self._word(HEADER_WORDS + OPERAND_WORDS * index + OPERAND_WORDS - 1)
        lanes = ir.Constant(ir.VectorType(_I64, LANES), [*range(LANES)])
        offsets = b.mul(lanes, vectors.emit_splat_address(b, apart))
        return vectors.emit_masked_gather(b, b.add(address, b.mul(column, apart)), offsets, mask)

    def _load(self, row: Any, column: Any, count: Any) -> Any:
        address = self.b.add(row, self.b.mul(column, _integer(4)))
        if count is None:
            return vectors.load.body(self.b, address)
        return vectors.load_first_lanes.body(self.b, address, count)

    def _emit_store_of_lanes(self, row: Any, lanes: Any, column: Any, count: Any) -> None:
        """Emit the store of 16 lanes (or the first `count`) to the result row at address `row`, from `column` on."""
        address = self.b.add(row, self.b.mul(column, _integer(4)))
        if count is None:
            vectors.store.body(self.b, address, lanes)
        else:
            vectors.store_first_lanes.body(self.b, address, lanes, count)


def _integer(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)
