"""Groups of instructions that one generated kernel computes: the composition of their expressions.

A value that only the group reads is a step of the composed expression, and is not written. Each step rounds once, as in
the kernels of the single ops, so the bits of all results are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...graph.attrs import Attrs
from ...ops.declaration.attributes import float_attribute
from ...ops.declaration.expression import Expression, Step
from ..base import contiguous_strides
from .dataflow import Dataflow, has_same_elements
from .operands import NoKernelError, Operand, compute_broadcast_strides, require_supported

MAX_GROUP_OPERANDS = 16
"""The most operands and results of a group: addresses that the loop over rows keeps."""
MAX_GROUP_STEPS = 96
"""The most steps of a composed expression: longer kernels compile slowly."""
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TracedInstruction:
    """An instruction with an op that is declared in the scalar language.

    Attributes:
        expression: the expression of the op.
        operands: operands of the expression; None for an absent one.
        attributes: attributes of the instruction.
        out: the result.
    """

    expression: Expression
    operands: Sequence[Operand | None]
    attributes: Attrs
    out: Operand

    @property
    def shape(self) -> Shape:
        """The shape over which the expression is evaluated: the shape of the rows, or of the result."""
        if not self.expression.depends_on_row_reduction_or_length:
            return self.out.shape
        return next(o.shape for o in self.operands if o is not None)


TraceInstruction = Callable[[int], TracedInstruction | None]
"""A function from the number of an instruction to the traced instruction; None for one that must stay alone."""


@dataclass(frozen=True, eq=False)
class ExpressionGroup:
    """Instructions with one composed expression.

    Attributes:
        instruction_numbers: the instructions, ascending.
        expression: the composed expression; its results are listed.
        attributes: the float attributes of the composed expression, ``position.name``.
        shape: the shape over which the expression is evaluated.
        operands: the operands as views with this shape; repeated axes have stride 0.
        results: the results that are written, as views with this shape, or with one column for a number per row.
        result_numbers: the instruction of each result.
        saved_bytes: the bytes that single kernels would move in addition.
    """

    instruction_numbers: tuple[int, ...]
    expression: Expression
    attributes: Mapping[str, float]
    shape: Shape
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    result_numbers: tuple[int, ...]
    saved_bytes: int = 0

    @property
    def moved_bytes(self) -> int:
        """The bytes that the kernel reads and writes. Each byte of an operand counts once."""
        return sum(o.region.high - o.region.low for o in (*self.operands, *self.results))


def compose_group(flow: Dataflow, numbers: Sequence[int], trace: TraceInstruction) -> ExpressionGroup:
    """Compose the expressions of instructions. The result is the same for each valid order of the program.

    Raises:
        NoKernelError: an instruction has no expression, or the views of the values do not fit together.
    """
    calls: dict[int, TracedInstruction] = {}
    for number in sorted(numbers):
        call = trace(number)
        if call is None:
            raise NoKernelError("an op is not declared in the scalar language")
        calls[number] = call
    size = max(math.prod(call.shape) for call in calls.values())
    require_supported(all(math.prod(call.shape) for call in calls.values()), "an op has no elements")
    shapes = {call.shape: None for call in calls.values() if math.prod(call.shape) == size}
    reasons: list[NoKernelError] = []
    for shape in sorted(shapes, key=len, reverse=True):
        try:
            return _GroupComposer(flow, calls, shape).compose()
        except NoKernelError as why:
            reasons.append(why)
    raise reasons[0]


@dataclass
class _GroupComposer:
    """The composition of a group over one shape: steps so far, operands, and the step of each instruction."""

    flow: Dataflow
    calls: Mapping[int, TracedInstruction]
    shape: Shape
    steps: dict[Step, int] = field(default_factory=dict)
    attributes: dict[str, float] = field(default_factory=dict)
    operands: list[Operand] = field(default_factory=list)
    step_by_number: dict[int, int] = field(default_factory=dict)
    numbers_per_row: set[int] = field(default_factory=set)

    def compose(self) -> ExpressionGroup:
        """Compose all instructions; raises `NoKernelError`."""
        stored = sorted((n for n in self.calls if not self._is_read_inside_only(n)), key=self._make_result_key)
        require_supported(stored, "nobody reads a result")
        for number in stored:
            self._add_with_producers(number)
        require_supported(len(self.step_by_number) == len(self.calls), "nobody reads a result")
        expression = Expression(tuple(self.steps), listed_results=tuple(self.step_by_number[n] for n in stored))
        results = tuple(self._view_result(n, expression) for n in stored)
        require_supported(
            len(self.operands) + len(results) <= MAX_GROUP_OPERANDS and len(self.steps) <= MAX_GROUP_STEPS,
            "it has too many operands or steps",
        )
        for position, result in enumerate(results):
            require_supported(
                all(has_same_elements(o, result) or not o.region.overlaps(result.region) for o in self.operands)
                and not any(other.region.overlaps(result.region) for other in results[:position]),
                "a result lies where something is still read",
            )
        return ExpressionGroup(
            tuple(self.calls), expression, self.attributes, self.shape, tuple(self.operands), results, tuple(stored)
        )

    def _make_result_key(self, number: int) -> tuple[int, int, int]:
        """Return the key that orders results: it is the same in each valid order of the program."""
        tensor = self.calls[number].out.tensor
        return len(self._producers_inside[number]), tensor.buffer, tensor.offset

    @cached_property
    def _producers_inside(self) -> Mapping[int, set[int]]:
        """The instructions of the group on which each one depends."""
        producers: dict[int, set[int]] = {}
        for number, call in self.calls.items():
            direct = {n for o in call.operands if o is not None for n in self._find_writers_inside(o, number)}
            producers[number] = direct.union(*(producers[n] for n in direct))
        return producers

    def _find_writers_inside(self, operand: Operand, number: int) -> list[int]:
        """Return the earlier instructions of the group that write into an operand of instruction `number`."""
        return [n for n in self.calls if n < number and self.calls[n].out.region.overlaps(operand.region)]

    def _is_read_inside_only(self, number: int) -> bool:
        readers = self.flow.find_readers(number)
        return readers is not None and self.calls.keys() >= {*readers}

    def _add_with_producers(self, number: int) -> None:
        """Add the steps of the producers of an instruction, then its own; steps that exist are shared."""
        if number in self.step_by_number:
            return
        call = self.calls[number]
        expression, out = call.expression, call.out
        is_per_row = self._is_number_per_row(call)
        require_supported(
            out.is_float and out.is_dense and out.declared_spec is None and out.tensor.spec.size,
            "a result is not dense float32 in the arena",
        )
        require_supported(
            not expression.steps_without_operands.issuperset(expression.results), "a result needs no operand"
        )
        steps = [self._add_operand(number, call, int(s.value)) for s in expression.steps if s.function == "operand"]
        position, added, inner = len(self.step_by_number), list[int](), iter(steps)
        for function, sources, value in expression.steps:
            if function == "operand":
                added.append(next(inner))
                continue
            if function == "attribute":
                name = f"{position}.{value}"
                self.attributes[name] = float(float_attribute(call.attributes, str(value)))
                step = Step(function, (), name)
            else:
                step = Step(function, tuple(added[s] for s in sources), value)
            added.append(self.steps.setdefault(step, len(self.steps)))
        self.step_by_number[number] = added[-1]
        if is_per_row or expression.reduces_row:
            self.numbers_per_row.add(number)

    def _is_number_per_row(self, call: TracedInstruction) -> bool:
        """Return whether an instruction computes numbers per row from such numbers; raises `NoKernelError`."""
        size, own = math.prod(self.shape), math.prod(call.shape)
        if own == size:
            fits = not call.expression.depends_on_row_reduction_or_length or call.shape[-1:] == self.shape[-1:]
            require_supported(fits, "rows have other lengths")
            return False
        is_per_row = (
            bool(self.shape) and own * self.shape[-1] == size and not call.expression.depends_on_row_reduction_or_length
        )
        require_supported(is_per_row, "it is evaluated over another shape")
        return True

    def _add_operand(self, number: int, call: TracedInstruction, index: int) -> int:
        """Return the step of an operand: the result of an earlier instruction, or an operand of the group."""
        operand = call.operands[index]
        assert operand is not None
        makers = self._find_writers_inside(operand, number)
        if makers:
            maker = self.flow.find_last_writer(operand.region, number)
            require_supported(maker in makers, "something else lies there")
            assert maker is not None
            self._add_with_producers(maker)
            self._require_whole_value(maker, call, operand)
            return self.step_by_number[maker]
        require_supported(operand.is_float, "an operand is not float32")
        require_supported(math.prod(call.shape) == math.prod(self.shape), "an operand has one number per row")
        view = view_over_shape(operand, call.shape, self.shape)
        known = (n for n, o in enumerate(self.operands) if (o.address, o.strides) == (view.address, view.strides))
        position = next(known, len(self.operands))
        self.operands += [view] if position == len(self.operands) else []
        return self.steps.setdefault(Step("operand", (), position), len(self.steps))

    def _require_whole_value(self, maker: int, call: TracedInstruction, operand: Operand) -> None:
        """Require that an operand has each element, or each number per row, of an earlier result in its place."""
        out = self.calls[maker].out
        require_supported(
            operand.region == out.region and operand.is_dense and operand.tensor.spec.size == out.tensor.spec.size,
            "a part of a result is read",
        )
        own = math.prod(call.shape)
        if maker not in self.numbers_per_row or own != math.prod(self.shape):
            require_supported(operand.tensor.spec.size == own, "a result is repeated")
            return
        padded = (1,) * (len(call.shape) - len(operand.shape)) + operand.shape
        require_supported(
            call.shape[-1:] == self.shape[-1:] and padded == (*call.shape[:-1], 1), "rows have other numbers"
        )

    def _view_result(self, number: int, expression: Expression) -> Operand:
        """Return a written result as a view of the shape of the group."""
        is_per_row = (
            expression.depends_on_row_reduction_or_length
            and self.step_by_number[number] in expression.steps_with_one_number_per_row
        )
        require_supported(is_per_row == (number in self.numbers_per_row), "a number of the row is repeated")
        shape = (*self.shape[:-1], 1) if is_per_row else self.shape
        out = self.calls[number].out
        return replace(out, tensor=replace(out.tensor, shape=shape, strides=contiguous_strides(shape)))


def view_over_shape(operand: Operand, own_shape: Shape, shape: Shape) -> Operand:
    """Return an operand that is repeated to `own_shape` as a view with another shape of equal size.

    Raises:
        NoKernelError: no strides describe this view.
    """
    is_repeated_whole = len(operand.shape) <= len(own_shape) and all(
        n in (1, m) for n, m in zip(reversed(operand.shape), reversed(own_shape), strict=False)
    )
    require_supported(is_repeated_whole, "an operand is repeated as tiles")
    strides = find_strides_of_reshape(own_shape, compute_broadcast_strides(operand, own_shape), shape)
    if strides is None:
        raise NoKernelError("an operand has no view with the shape of the group")
    return replace(operand, tensor=replace(operand.tensor, shape=shape, strides=strides))


def find_strides_of_reshape(own_shape: Shape, own_strides: Sequence[int], shape: Shape) -> Shape | None:
    """Return the strides of a view of `own_shape` after a reshape to `shape` of equal size; None without such a view.

    Axes of size 1 have stride 0.
    """
    axes: list[tuple[int, int]] = []
    for size, stride in zip(own_shape, own_strides, strict=True):
        if size != 1 and axes and axes[-1][1] == size * stride:
            axes[-1] = axes[-1][0] * size, stride
        elif size != 1:
            axes.append((size, stride))
    strides: list[int] = []
    left, step = axes.pop() if axes else (1, 0)
    for size in reversed(shape):
        if size == 1:
            strides.append(0)
            continue
        if left == 1 and axes:
            left, step = axes.pop()
        if left % size:
            return None
        strides.append(step)
        left, step = left // size, step * size
    return tuple(reversed(strides))
