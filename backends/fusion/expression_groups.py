"""Groups of instructions that one generated kernel computes: the composition of their expressions.

A value that only the group reads is a step of the composed expression, and is not written. Each step rounds once, as in
the kernels of the single ops, so the bits of all results are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...graph.attrs import Attrs
from ...ops.declaration.attributes import float_attribute
from ...ops.declaration.expression import Expression, Step
from ..base import contiguous_strides
from .dataflow import has_same_elements
from .operand_views import (
    Box,
    Placement,
    Shape,
    find_strides_of_reshape,
    is_whole,
    place_whole,
    reshape_box,
    reshape_repeated_operand,
    with_axes,
)
from .operands import NoKernelError, Operand, compute_broadcast_strides, require_supported

MAX_GROUP_OPERANDS = 16
"""The most operands and results of a group: addresses that the loop over rows keeps."""
MAX_GROUP_STEPS = 96
"""The most steps of a composed expression: longer kernels compile slowly."""


@dataclass(frozen=True, eq=False)
class TracedInstruction:
    """An instruction with an op that is declared in the scalar language.

    Attributes:
        expression: the expression of the op.
        operands: operands of the expression; None for an absent one.
        producers: for each operand, the last instruction before this one that writes into its memory, or None.
        attributes: attributes of the instruction.
        out: the result.
        readers: the instructions that read the result; None if it is retained.
        starts: the index of the result at which each operand begins; None if operands broadcast to the result.
    """

    expression: Expression
    operands: Sequence[Operand | None]
    producers: Sequence[int | None]
    attributes: Attrs
    out: Operand
    readers: frozenset[int] | None
    starts: Sequence[Shape] | None = None

    @cached_property
    def shape(self) -> Shape:
        """The shape over which the expression is evaluated: the shape of the rows, or of the result."""
        if not self.expression.depends_on_row_reduction_or_length:
            return self.out.shape
        return next(o.shape for o in self.operands if o is not None)

    @cached_property
    def size(self) -> int:
        """The number of elements of `shape`."""
        return math.prod(self.shape)

    @cached_property
    def why_it_cannot_join(self) -> str | None:
        """The reason why the instruction can be in no group, or None."""
        out, expression = self.out, self.expression
        if not self.size:
            return "an op has no elements"
        if self.readers is not None and not self.readers:
            return "nobody reads a result"
        if not (out.is_float and out.is_dense and out.declared_spec is None and out.size):
            return "a result is not dense float32 in the arena"
        if expression.steps_without_operands.issuperset(expression.results):
            return "a result needs no operand"
        return None

    @cached_property
    def moved_bytes(self) -> int:
        """The bytes that a kernel of the instruction alone reads and writes; raises `NoKernelError` without one."""
        read = [int(s.value) for s in self.expression.steps if s.function == "operand"]
        views = {
            (view.address, view.strides): view
            for view in (self.view_operand(k, self.shape) if self.starts is None else self.operand(k) for k in read)
        }
        return count_region_bytes([*views.values(), self.out])

    @cached_property
    def _views(self) -> dict[tuple[int, Shape], Operand]:
        return {}

    def operand(self, index: int) -> Operand:
        """Return operand number `index`, which must be present."""
        operand = self.operands[index]
        assert operand is not None
        return operand

    def place_operand(self, index: int, placement: Placement | None) -> Placement | None:
        """Return the placement of an operand if the result has a placement; None stands for the whole shape."""
        if self.starts is None:
            return placement
        operand = self.operand(index)
        return (placement or place_whole(self.shape)).place_inside(self.starts[index], operand.shape)

    def view_operand(self, index: int, shape: Shape) -> Operand:
        """Return an operand as a view with another shape of equal size; raises `NoKernelError` without such a view."""
        operand = self.operand(index)
        if (index, shape) not in self._views:
            self._views[index, shape] = reshape_repeated_operand(operand, self.shape, shape)
        return self._views[index, shape]


@dataclass(frozen=True, eq=False)
class ExpressionGroup:
    """Instructions with one composed expression.

    Attributes:
        instruction_numbers: the instructions, ascending.
        expression: the composed expression; its results are listed.
        attributes: the float attributes of the composed expression, ``position.name``.
        shape: the shape over which the expression is evaluated.
        operands: the operands as views with this shape; repeated axes have stride 0. Of an operand that is read in a
            box, only the elements of the box.
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
    def moved_bytes(self) -> int:
        """The bytes that the kernel reads and writes. Each byte of an operand counts once."""
        return count_region_bytes([*self.operands, *self.results])


@dataclass
class GroupComposition:
    """The composition of a group over one shape: its steps, its operands, and the step of each placed instruction.

    `compose_instructions` makes one. Another instruction adds its steps to the present ones (`join`).
    """

    calls: Mapping[int, TracedInstruction]
    shape: Shape
    steps: dict[Step, int] = field(default_factory=dict)
    attributes: dict[str, float] = field(default_factory=dict)
    operands: list[Operand] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    inside_steps: list[tuple[int, ...]] = field(default_factory=list)
    step_by_number: dict[tuple[int, Placement | None], int] = field(default_factory=dict)
    numbers_per_row: set[int] = field(default_factory=set)
    result_views: dict[tuple[int, bool], Operand] = field(default_factory=dict)

    def join(self, number: int, call: TracedInstruction) -> GroupComposition:
        """Return the composition with one more instruction; raises `NoKernelError`."""
        return _compose_over_any_shape({**self.calls, number: call}, self)

    def copy_for(self, calls: Mapping[int, TracedInstruction]) -> GroupComposition:
        """Return a copy to which the instructions `calls` may be added."""
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
        )

    @cached_property
    def group(self) -> ExpressionGroup:
        """The group, with results in the order of instructions; raises `NoKernelError` if no kernel can compute it."""
        return self.build_group_with_results(self.list_numbers_read_outside())

    def list_numbers_read_outside(self) -> list[int]:
        """List the instructions with results that something outside of the group reads, ascending."""
        calls = self.calls
        return sorted(n for n, c in calls.items() if c.readers is None or not c.readers <= calls.keys())

    def build_group_with_results(self, stored: Sequence[int]) -> ExpressionGroup:
        """Return the group with the results of some instructions, in this order; raises `NoKernelError`."""
        expression = Expression(tuple(self.steps), listed_results=tuple(self.step_by_number[n, None] for n in stored))
        results = tuple(self._view_result(n, expression) for n in stored)
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
        """Return the group; it is the same for each valid order of the program."""
        whole, stored = (
            GroupComposition(self.calls, self.shape),
            sorted(self.list_numbers_read_outside(), key=self._make_result_key),
        )
        for number in stored:
            whole.add_with_producers(number)
        return whole.build_group_with_results(stored)

    def _make_result_key(self, number: int) -> tuple[int, int, int]:
        """Return the key that orders results: it is the same in each valid order of the program."""
        tensor = self.calls[number].out.tensor
        return len(self._producers_inside[number]), tensor.buffer, tensor.offset

    @cached_property
    def _producers_inside(self) -> Mapping[int, set[int]]:
        """The instructions of the group on which each one depends."""
        producers: dict[int, set[int]] = {}
        for number in sorted(self.calls):
            direct = self.calls.keys() & {n for n in self.calls[number].producers if n is not None}
            producers[number] = direct.union(*(producers[n] for n in direct))
        return producers

    def add_with_producers(self, number: int, placement: Placement | None = None) -> None:
        """Add the steps of the producers of an instruction, then its own; steps that exist are shared.

        With a placement, the result of the instruction is read in this place only.
        """
        if (number, placement) in self.step_by_number:
            return
        call = self.calls[number]
        expression = call.expression
        if call.why_it_cannot_join is not None:
            raise NoKernelError(call.why_it_cannot_join)
        is_per_row = placement is None and self._is_number_per_row(call)
        require_supported(
            placement is None or not expression.depends_on_row_reduction_or_length, "a part of a row is read"
        )
        steps = [
            self._add_operand(number, call, int(s.value), placement)
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
                added.append(self._add_box(call.place_operand(int(value), placement)))
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

    def _is_number_per_row(self, call: TracedInstruction) -> bool:
        """Return whether an instruction computes numbers per row from such numbers; raises `NoKernelError`."""
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

    def _add_box(self, placement: Placement | None) -> int:
        """Return the step that is true in the box of a placement."""
        assert placement is not None
        box = reshape_box(placement.shape, placement.box, self.shape)
        self.boxes += [] if box in self.boxes else [box]
        return self.steps.setdefault(Step("inside", (), self.boxes.index(box)), len(self.steps))

    def _add_operand(self, number: int, call: TracedInstruction, index: int, placement: Placement | None) -> int:
        """Return the step of an operand: the result of an earlier instruction, or an operand of the group."""
        operand, maker = call.operand(index), call.producers[index]
        place = call.place_operand(index, placement)
        if maker in self.calls:
            assert maker is not None
            if place is not None:
                self._require_same_axes(maker, call, operand)
            self.add_with_producers(maker, place)
            self._require_whole_value(maker, call, operand, place)
            return self.step_by_number[maker, place]
        region = operand.region
        require_supported(
            not any(c.out.region.overlaps(region) for n, c in self.calls.items() if n < number),
            "something else lies there",
        )
        require_supported(operand.is_float, "an operand is not float32")
        if place is not None:
            return self._add_placed_operand(call, operand, place)
        is_per_row = call.size != self.size
        view = call.view_operand(index, (*self.shape[:-1], 1) if is_per_row else self.shape)
        view = with_axes(view, self.shape, (*view.strides[:-1], 0)) if is_per_row else view
        return self._add_read("row_operand" if is_per_row else "operand", (), view)

    def _add_placed_operand(self, call: TracedInstruction, operand: Operand, place: Placement) -> int:
        """Return the step of an operand that is read in the box of its placement."""
        strides = compute_broadcast_strides(operand, operand.shape if call.starts else call.shape)
        require_supported(len(strides) == len(place.shape), "a placed operand has other axes")
        own = find_strides_of_reshape(place.shape, strides, self.shape)
        if own is None:
            raise NoKernelError("an operand has no view with the shape of the group")
        box = reshape_box(place.shape, place.box, self.shape)
        view = with_axes(place.slice_operand(operand, strides), tuple(high - low for low, high in box), own)
        inside = () if is_whole(box, self.shape) else (self._add_box(place),)
        return self._add_read("operand", inside, view)

    def _add_read(self, function: str, inside: tuple[int, ...], view: Operand) -> int:
        """Return the step that reads a view of memory."""
        keys = [(o.address, o.strides, i) for o, i in zip(self.operands, self.inside_steps, strict=True)]
        key = view.address, view.strides, inside
        if key not in keys:
            keys.append(key)
            self.operands.append(view)
            self.inside_steps.append(inside)
        position = keys.index(key)
        return self.steps.setdefault(Step(function, inside, position), len(self.steps))

    def _require_same_axes(self, maker: int, call: TracedInstruction, operand: Operand) -> None:
        """Require that a placed operand has the axes of the earlier result that it reads."""
        out = self.calls[maker].out
        has_same_axes = operand.shape == out.shape == self.calls[maker].shape
        require_supported(has_same_axes and (call.starts or call.shape == out.shape), "a part is reshaped")

    def _require_whole_value(
        self, maker: int, call: TracedInstruction, operand: Operand, place: Placement | None
    ) -> None:
        """Require that an operand has each element, or each number per row, of an earlier result in its place."""
        out = self.calls[maker].out
        require_supported(
            operand is out or (operand.region == out.region and operand.is_dense and operand.size == out.size),
            "a part of a result is read",
        )
        if place is not None:
            return
        if maker not in self.numbers_per_row or call.size != self.size:
            require_supported(operand.size == call.size, "a result is repeated")
            return
        padded = (1,) * (len(call.shape) - len(operand.shape)) + operand.shape
        require_supported(
            call.shape[-1:] == self.shape[-1:] and padded == (*call.shape[:-1], 1), "rows have other numbers"
        )

    def _view_result(self, number: int, expression: Expression) -> Operand:
        """Return a written result as a view of the shape of the group."""
        is_per_row = (
            expression.depends_on_row_reduction_or_length
            and self.step_by_number[number, None] in expression.steps_with_one_number_per_row
        )
        require_supported(is_per_row == (number in self.numbers_per_row), "a number of the row is repeated")
        if (number, is_per_row) not in self.result_views:
            shape = (*self.shape[:-1], 1) if is_per_row else self.shape
            out = self.calls[number].out
            self.result_views[number, is_per_row] = with_axes(out, shape, contiguous_strides(shape))
        return self.result_views[number, is_per_row]


def compose_instructions(calls: Mapping[int, TracedInstruction]) -> GroupComposition:
    """Compose the expressions of instructions.

    Raises:
        NoKernelError: the views of the values do not fit together.
    """
    return _compose_over_any_shape(calls, None)


def _compose_over_any_shape(
    calls: Mapping[int, TracedInstruction], smaller: GroupComposition | None
) -> GroupComposition:
    """Compose instructions over the first shape that fits: of the largest size, with the most axes.

    `smaller` is the composition of all instructions but one. Its steps are kept if the other one is the last.
    """
    numbers = sorted(calls)
    size = max(call.size for call in calls.values())
    shapes = {calls[number].shape: None for number in numbers if calls[number].size == size}
    reasons: list[NoKernelError] = []
    for shape in sorted(shapes, key=len, reverse=True):
        is_last_added = smaller is not None and smaller.shape == shape and numbers[-1] not in smaller.calls
        try:
            if smaller is not None and is_last_added:
                composition = smaller.copy_for(calls)
            else:
                composition = GroupComposition(calls, shape)
            for number in numbers[-1:] if is_last_added else composition.list_numbers_read_outside():
                composition.add_with_producers(number)
            require_supported(composition.group.operands, "nothing is read")
        except NoKernelError as why:
            reasons.append(why)
        else:
            return composition
    raise reasons[0]


def count_region_bytes(operands: Sequence[Operand]) -> int:
    """Return the sum of the bytes from the first to the last of each operand."""
    return sum(o.region.high - o.region.low for o in operands)
