"""Groups of instructions that one generated kernel computes: the composition of their expressions.

A value that only the group reads is a step of the composed expression, and is not written. Each step rounds once, as in
the kernels of the single ops, so the bits of all results are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...ops.declaration.attributes import float_attribute
from ...ops.declaration.expression import Expression, Step
from ...ops.declaration.scalar import ROW_FUNCTIONS
from ..base import contiguous_strides
from .dataflow import has_same_elements
from .operand_views import (
    Box,
    PlacementInShape,
    RepetitionToShape,
    Shape,
    find_strides_of_reshape,
    is_box_of_whole_shape,
    is_permutation_of_dense,
    place_whole,
    reshape_box,
    with_shape_and_strides,
)
from .operands import NoKernelError, Operand, compute_broadcast_strides, require_supported
from .traced_instruction import OperandPlacement, TracedInstruction, count_region_bytes

MAX_GROUP_OPERANDS = 16
"""The most operands and results of a group: addresses that the loop over rows keeps."""
MAX_GROUP_STEPS = 96
"""The most steps of a composed expression: longer kernels compile slowly."""
MAX_PERMUTED_ELEMENTS = 1 << 12
"""The most elements of a value of several operands that a reader with permuted axes computes itself. Each operand is
then read in strides, which takes longer than a copy of the value if the operands do not fit into the first caches."""


@dataclass(frozen=True, eq=False)
class ExpressionGroup:
    """Instructions that one generated kernel computes, as one expression, with the memory that it reads and writes.

    Attributes:
        instruction_numbers: the instructions, ascending.
        expression: the composed expression; its results are listed.
        attributes: the float attributes of the composed expression, ``position.name``.
        shape: the shape over which the expression is evaluated.
        operands: the operands as views with this shape; repeated axes have stride 0. Of an operand that is read in a
            box (an index range on each axis), only the elements of the box.
        boxes: the parts of the shape in which operands are read.
        results: the results that are written, as views with this shape, or with one column for a number per row.
        saved_bytes: the bytes that single kernels would move in addition.
    """

    instruction_numbers: tuple[int, ...]
    expression: Expression
    attributes: Mapping[str, float]
    shape: Shape
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    saved_bytes: int = 0
    boxes: tuple[Box, ...] = ()

    @property
    def size(self) -> int:
        """The number of elements of `shape`."""
        return math.prod(self.shape)

    @cached_property
    def operands_with_one_number_per_row(self) -> frozenset[int]:
        """The operands with one number for all columns of a row; a kernel reads it once per row."""
        boxed = {int(s.value) for s in self.expression.steps if s.function == "operand" and s.sources}
        return frozenset(n for n, o in enumerate(self.operands) if o.strides[-1:] == (0,) and n not in boxed)

    @cached_property
    def row_count(self) -> int:
        """The number of rows: trailing axes with one number of each of `operands_with_one_number_per_row` are a row."""
        strides = [self.operands[n].strides for n in self.operands_with_one_number_per_row]
        axis = len(self.shape)
        while axis and all(s[axis - 1] == 0 for s in strides):
            axis -= 1
        return math.prod(self.shape[:axis])

    @cached_property
    def moved_bytes(self) -> int:
        """The bytes that the fused kernel reads and writes. Each byte of an operand counts once."""
        return count_region_bytes([*self.operands, *self.results])


@dataclass
class GroupComposition:
    """An expression under construction, which computes several instructions over one common shape.

    It consists of steps, operands, and the boxes (index ranges) in which operands are read. `compose_instructions`
    makes one. Another instruction adds its steps to the present ones (`join`).
    """

    calls: Mapping[int, TracedInstruction]
    shape: Shape
    steps: dict[Step, int] = field(default_factory=dict)
    attributes: dict[str, float] = field(default_factory=dict)
    operands: list[Operand] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    inside_steps: list[tuple[int, ...]] = field(default_factory=list)
    step_by_number: dict[tuple[int, OperandPlacement | None], int] = field(default_factory=dict)
    numbers_per_row: set[int] = field(default_factory=set)
    result_views: dict[tuple[int, bool], Operand] = field(default_factory=dict)
    can_repeat: bool = False

    def join(self, calls: Mapping[int, TracedInstruction]) -> GroupComposition:
        """Return a composition that also computes the instructions `calls`; raise `NoKernelError` if it cannot."""
        return _compose_over_any_shape({**self.calls, **calls}, self, self.can_repeat)

    def copy_for_adding_instructions(self, calls: Mapping[int, TracedInstruction]) -> GroupComposition:
        """Return a copy to which steps can be added; `calls` are all of its instructions then."""
        return GroupComposition(
            calls,
            self.shape,
            self.steps.copy(),
            self.attributes.copy(),
            self.operands.copy(),
            self.boxes.copy(),
            self.inside_steps.copy(),
            self.step_by_number.copy(),
            self.numbers_per_row.copy(),
            self.result_views.copy(),
            self.can_repeat,
        )

    @cached_property
    def group(self) -> ExpressionGroup:
        """The finished group, with results in program order; raises `NoKernelError` if no kernel can compute it."""
        return self.build_group_with_results(self.list_numbers_read_outside())

    def list_numbers_read_outside(self) -> list[int]:
        """List the instructions with results that are read outside of the group, so that the kernel must write them."""
        calls = self.calls
        return sorted(n for n, c in calls.items() if c.readers is None or not c.readers <= calls.keys())

    def build_group_with_results(self, stored: Sequence[int]) -> ExpressionGroup:
        """Build the group that writes the results of the instructions `stored`, in this order."""
        expression = Expression(tuple(self.steps), listed_results=tuple(self.step_by_number[n, None] for n in stored))
        results = tuple(self._reshape_result_to_group(n, expression) for n in stored)
        require_supported(
            len(self.operands) + len(results) <= MAX_GROUP_OPERANDS and len(self.steps) <= MAX_GROUP_STEPS,
            "it has too many operands or steps",
        )
        for position, result in enumerate(results):
            require_supported(
                all(
                    not o.region.overlaps(result.region) or (o.shape == self.shape and has_same_elements(o, result))
                    for o in self.operands
                )
                and not any(other.region.overlaps(result.region) for other in results[:position]),
                "a result lies where something is still read",
            )
        numbers = tuple(sorted(self.calls))
        return ExpressionGroup(
            numbers, expression, self.attributes, self.shape, tuple(self.operands), results, boxes=tuple(self.boxes)
        )

    def build_group_for_any_order(self) -> ExpressionGroup:
        """Build the group with its results in a canonical order, so that equal groups always share one compiled kernel.

        The order does not depend on the order of the program.
        """
        whole, stored = (
            GroupComposition(self.calls, self.shape, can_repeat=self.can_repeat),
            sorted(self.list_numbers_read_outside(), key=self._make_result_key),
        )
        for number in stored:
            whole.add_with_producers(number)
        return whole.build_group_with_results(stored)

    def _make_result_key(self, number: int) -> tuple[int, int, int]:
        """Return the sort key of a result, which is the same in every valid program order."""
        tensor = self.calls[number].out.tensor
        return len(self._producers_inside[number]), tensor.buffer, tensor.offset

    @cached_property
    def _producers_inside(self) -> Mapping[int, set[int]]:
        """For each instruction of the group, the other instructions of the group on which it depends."""
        producers: dict[int, set[int]] = {}
        for number in sorted(self.calls):
            direct = self.calls.keys() & {n for n in self.calls[number].producers if n is not None}
            producers[number] = direct.union(*(producers[n] for n in direct))
        return producers

    def add_with_producers(self, number: int, placement: OperandPlacement | None = None) -> None:
        """Add the steps that compute an instruction, after the steps of its producers in the group.

        Steps that exist already are reused.

        Args:
            number: The instruction.
            placement: Where the result is read, if only a part of it is read or if it is repeated; else None.
        """
        if (number, placement) in self.step_by_number:
            return
        call = self.calls[number]
        expression = call.expression
        if call.reason_against_fusion is not None:
            raise NoKernelError(call.reason_against_fusion)
        is_per_row = placement is None and self._computes_one_number_per_row(call)
        require_supported(
            placement is None or not expression.depends_on_row_reduction_or_length, "a part of a row is read"
        )
        steps = [
            self._find_or_add_operand_step(number, call, int(s.value), placement)
            for s in expression.steps
            if s.function == "operand"
        ]
        position, added, inner = len(self.step_by_number), list[int](), iter(steps)
        for function, sources, value in expression.steps:
            if function == "operand":
                added.append(next(inner))
                continue
            if function == "attribute":
                name = f"{position}.{value}"
                self.attributes[name] = float(float_attribute(call.attributes, str(value)))
                step = Step(function, (), name)
            elif function == "inside":
                added.append(self._add_box_test_step(call.compute_operand_placement(int(value), placement)))
                continue
            else:
                step = Step(function, tuple(added[s] for s in sources), value)
            added.append(self.steps.setdefault(step, len(self.steps)))
        self.step_by_number[number, placement] = added[-1]
        if is_per_row or expression.reduces_row:
            self.numbers_per_row.add(number)

    @cached_property
    def size(self) -> int:
        """The number of elements of `shape`."""
        return math.prod(self.shape)

    def _computes_one_number_per_row(self, call: TracedInstruction) -> bool:
        """Return whether an instruction computes one number per row, not per element; may raise `NoKernelError`."""
        if call.size == self.size:
            fits = not call.expression.depends_on_row_reduction_or_length or call.shape[-1:] == self.shape[-1:]
            require_supported(fits, "rows have other lengths")
            return False
        is_per_row = (
            bool(self.shape)
            and call.size * self.shape[-1] == self.size
            and not call.expression.depends_on_row_reduction_or_length
        )
        require_supported(is_per_row, "it is evaluated over another shape")
        return True

    def _add_box_test_step(self, placement: OperandPlacement | None) -> int:
        """Add the step that tests whether the current element lies in the box (index range) of a placed value.

        Returns:
            The number of the step.
        """
        assert isinstance(placement, PlacementInShape)
        box = reshape_box(placement.shape, placement.box, self.shape)
        self.boxes += [] if box in self.boxes else [box]
        return self.steps.setdefault(Step("inside", (), self.boxes.index(box)), len(self.steps))

    def _find_or_add_operand_step(
        self, number: int, call: TracedInstruction, index: int, placement: OperandPlacement | None
    ) -> int:
        """Return the step that supplies an operand: the step of its producer in the group, or a read from memory."""
        operand, maker = call.operand(index), call.producers[index]
        place = call.compute_operand_placement(index, placement)
        place = None if place == place_whole(call.shape) else place
        if maker in self.calls:
            assert maker is not None
            if isinstance(place, RepetitionToShape) or (
                place is None and self._is_read_repeatedly(maker, call, operand)
            ):
                read = operand.shape, operand.strides, call.shape
                place = RepetitionToShape((read, *(() if place is None else place.reads)))
            elif place is not None:
                self._require_axes_of_producer_result(maker, call, operand)
            self.add_with_producers(maker, place)
            self._require_whole_producer_result(maker, call, operand, place)
            return self.step_by_number[maker, place]
        region = operand.region
        require_supported(
            not any(c.out.region.overlaps(region) for n, c in self.calls.items() if n < number),
            "something else lies there",
        )
        require_supported(operand.is_float, "an operand is not float32")
        if isinstance(place, RepetitionToShape):
            view = place.repeat_operand(operand, call.shape, self.shape)
            return self._find_or_add_memory_read_step("operand", (), view)
        if place is not None:
            return self._add_placed_operand_step(call, operand, place)
        is_per_row = call.size != self.size
        view = call.reshape_operand_view(index, (*self.shape[:-1], 1) if is_per_row else self.shape)
        view = with_shape_and_strides(view, self.shape, (*view.strides[:-1], 0)) if is_per_row else view
        return self._find_or_add_memory_read_step("row_operand" if is_per_row else "operand", (), view)

    def _add_placed_operand_step(self, call: TracedInstruction, operand: Operand, place: PlacementInShape) -> int:
        """Add the step that reads an operand from memory only where it has elements, as in a concatenation.

        Returns:
            The number of the step.
        """
        strides = compute_broadcast_strides(operand, operand.shape if call.starts else call.shape)
        require_supported(len(strides) == len(place.shape), "a placed operand has other axes")
        own = find_strides_of_reshape(place.shape, strides, self.shape)
        if own is None:
            raise NoKernelError("an operand has no view with the shape of the group")
        box = reshape_box(place.shape, place.box, self.shape)
        view = with_shape_and_strides(
            place.slice_box_of_operand(operand, strides), tuple(high - low for low, high in box), own
        )
        inside = () if is_box_of_whole_shape(box, self.shape) else (self._add_box_test_step(place),)
        return self._find_or_add_memory_read_step("operand", inside, view)

    def _find_or_add_memory_read_step(self, function: str, inside: tuple[int, ...], view: Operand) -> int:
        """Return the number of the step that reads a view of memory; add the step and the operand if they are new.

        `inside` has the step that tests a box, if the view is read only there.
        """
        keys = [(o.address, o.strides, i) for o, i in zip(self.operands, self.inside_steps, strict=True)]
        key = view.address, view.strides, inside
        if key not in keys:
            keys.append(key)
            self.operands.append(view)
            self.inside_steps.append(inside)
        position = keys.index(key)
        return self.steps.setdefault(Step(function, inside, position), len(self.steps))

    def _is_read_repeatedly(self, maker: int, call: TracedInstruction, operand: Operand) -> bool:
        """Return whether an instruction repeats or permutes the result of an elementwise producer."""
        producer = self.calls[maker]
        if not self.can_repeat or producer.expression.depends_on_row_reduction_or_length:
            return False
        if operand.size >= call.size:
            reads_once = sum(s.function in ROW_FUNCTIONS for s in call.expression.steps) == 1
            is_cheap = self.size <= MAX_PERMUTED_ELEMENTS or (
                reads_once and self._reads_one_whole_operand_from_memory(producer)
            )
            is_whole = call.size == self.size and not operand.is_dense
            return is_whole and is_cheap and is_permutation_of_dense(operand)
        is_per_row = producer.size * self.shape[-1] == self.size and self._reads_numbers_of_rows(call, operand)
        return call.size == self.size and not is_per_row

    def _reads_one_whole_operand_from_memory(self, call: TracedInstruction) -> bool:
        """Return whether only one operand of an instruction has as many elements as its result, and lies in memory.

        A reader with permuted axes then reads as many strided elements as a reader of the result.
        """
        operands = ((o, maker) for o, maker in zip(call.operands, call.producers, strict=True) if o is not None)
        whole = [maker for o, maker in operands if o.size == call.size and not _repeats_elements(o)]
        return len(whole) == 1 and whole[0] not in self.calls

    def _reads_numbers_of_rows(self, call: TracedInstruction, operand: Operand) -> bool:
        """Return whether an operand has one number for each row of the group, with shape [..., 1] for rows [..., n]."""
        padded = (1,) * (len(call.shape) - len(operand.shape)) + operand.shape
        return call.shape[-1:] == self.shape[-1:] and padded == (*call.shape[:-1], 1)

    def _require_axes_of_producer_result(self, maker: int, call: TracedInstruction, operand: Operand) -> None:
        """Require that an operand has the same axes as the result of its producer; raise `NoKernelError` otherwise."""
        out = self.calls[maker].out
        has_same_axes = operand.shape == out.shape == self.calls[maker].shape
        require_supported(has_same_axes and (call.starts or call.shape == out.shape), "a part is reshaped")

    def _require_whole_producer_result(
        self, maker: int, call: TracedInstruction, operand: Operand, place: OperandPlacement | None
    ) -> None:
        """Require that an operand is the whole result of its producer; raise `NoKernelError` otherwise."""
        out = self.calls[maker].out
        is_in_order = is_permutation_of_dense(operand) if isinstance(place, RepetitionToShape) else operand.is_dense
        require_supported(
            operand is out or (operand.region == out.region and operand.size == out.size and is_in_order),
            "a part of a result is read",
        )
        if place is not None:
            return
        if maker not in self.numbers_per_row or call.size != self.size:
            require_supported(operand.size == call.size, "a result is repeated")
            return
        require_supported(self._reads_numbers_of_rows(call, operand), "rows have other numbers")

    def _reshape_result_to_group(self, number: int, expression: Expression) -> Operand:
        """Return a result that the kernel writes as a view with the shape of the group."""
        is_per_row = (
            expression.depends_on_row_reduction_or_length
            and self.step_by_number[number, None] in expression.steps_with_one_number_per_row
        )
        require_supported(is_per_row == (number in self.numbers_per_row), "a number of the row is repeated")
        if (number, is_per_row) not in self.result_views:
            shape = (*self.shape[:-1], 1) if is_per_row else self.shape
            out = self.calls[number].out
            self.result_views[number, is_per_row] = with_shape_and_strides(out, shape, contiguous_strides(shape))
        return self.result_views[number, is_per_row]


def _repeats_elements(operand: Operand) -> bool:
    return any(n != 1 and stride == 0 for n, stride in zip(operand.shape, operand.strides, strict=True))


def compose_instructions(calls: Mapping[int, TracedInstruction], *, can_repeat: bool = False) -> GroupComposition:
    """Compose several instructions into one expression over a common shape, for one generated kernel.

    Args:
        calls: The instructions.
        can_repeat: Whether an elementwise producer may be smaller than the shape; it is computed for each reader.

    Raises:
        NoKernelError: the views of the values do not fit together.
    """
    return _compose_over_any_shape(calls, None, can_repeat)


def _compose_over_any_shape(
    calls: Mapping[int, TracedInstruction], smaller: GroupComposition | None, can_repeat: bool
) -> GroupComposition:
    """Compose instructions over the shape of one of them: the largest shape that works.

    `smaller` is the composition of some of the instructions. Its steps are kept if one other is the last.
    """
    numbers = sorted(calls)
    size = max(call.size for call in calls.values())
    shapes = {calls[number].shape: None for number in numbers if calls[number].size == size}
    reasons: list[NoKernelError] = []
    for shape in sorted(shapes, key=len, reverse=True):
        is_last_added = smaller is not None and smaller.shape == shape and numbers[:-1] == sorted(smaller.calls)
        try:
            if smaller is not None and is_last_added:
                composition = smaller.copy_for_adding_instructions(calls)
            else:
                composition = GroupComposition(calls, shape, can_repeat=can_repeat)
            for number in numbers[-1:] if is_last_added else composition.list_numbers_read_outside():
                composition.add_with_producers(number)
            require_supported(composition.group.operands, "nothing is read")
        except NoKernelError as why:
            reasons.append(why)
        else:
            return composition
    raise reasons[0]
