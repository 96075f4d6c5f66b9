"""The terms of a fused kernel and of its instructions: substituted declarations, which must be equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np

from ...backends.base import Instruction, Program, Tensor
from ...backends.capabilities import FusedExpression
from ...graph.dtypes import DType
from ...ops import REGISTRY
from ...ops.declaration.attributes import float_attribute
from ...ops.declaration.interpreter import ScalarLanguageDeclaration
from .run_contents import RunContents

Axes = tuple[tuple[int, int], ...]
Placement = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]
"""The place of a value in its reader: the shape of the reader, the index of its beginning, and the box that is read."""
REDUCTION_PREFIX = "row_"
ATTRIBUTE, CONSTANT, OPERAND, ROW_OPERAND, INSIDE = "attribute", "constant", "operand", "row_operand", "inside"


def merge_axes(tensor: Tensor, shape: tuple[int, ...] | None = None) -> Axes | None:
    """Return sizes and strides of the elements in row-major order, with as few axes as possible.

    Two views have the same elements in the same order if these and their offsets are equal. `shape` is a shape to which
    the tensor is repeated; the result is None if that is impossible.
    """
    target = tensor.shape if shape is None else shape
    missing = len(target) - len(tensor.shape)
    if missing < 0:
        return None
    axes: list[tuple[int, int]] = []
    own = [(1, 0)] * missing + [*zip(tensor.shape, tensor.strides, strict=True)]
    for (size, stride), expected in zip(own, target, strict=True):
        if size not in (1, expected):
            return None
        if expected == 1:
            continue
        step = stride if size == expected else 0
        if axes and axes[-1][1] == expected * step:
            axes[-1] = axes[-1][0] * expected, step
        else:
            axes.append((expected, step))
    return tuple(axes)


def _merge_box(shape: Sequence[int], box: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return sizes and bounds of a box with as few axes as possible: whole inner axes merge with the axis before."""
    axes: list[tuple[int, int, int]] = []
    for n, (low, high) in zip(shape, box, strict=True):
        if n != 1 and axes and (low, high) == (0, n):
            m, first, end = axes.pop()
            axes.append((m * n, first * n, end * n))
        elif n != 1:
            axes.append((n, low, high))
    return tuple(axes)


@dataclass
class KernelTerms:
    """The terms of a kernel and of its instructions. Equal terms are one number in `terms`."""

    program: Program
    contents: RunContents
    group: FusedExpression
    terms: dict[tuple[object, ...], int] = field(default_factory=dict)
    computed: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """For each instruction the term of its result, and whether it is one number per row."""
    placed: dict[tuple[int, Placement], int] = field(default_factory=dict)
    """For each instruction with a result that is read in a place, the term of the result there."""

    def find_faults(self) -> Iterator[str]:
        try:
            self._check()
        except FusedKernelError as why:
            yield str(why)

    def _check(self) -> None:
        group = self.group
        is_view = bool(group.boxes) or all(t.shape == group.shape for t in group.operands)
        _require(is_view, "operands: a view has another shape")
        for number in () if group.boxes else group.instruction_numbers:
            self._compute(number)
        own = self._compute_term_of_each_step()
        numbers = group.instruction_numbers  # values that only members read may lie at the same place
        needed = [n for n in numbers if self.contents.is_needed(n, numbers)]
        for step, place in group.results:
            makers = [n for n in needed if self._is_written_at(n, place)]
            _require(0 <= step < len(own), "expression: a result is no step")
            _require(
                any(self._compute(n)[0] == own[step] for n in makers),
                f"expression: the result at {place} is not what its instructions compute",
            )

    def _compute(self, number: int) -> tuple[int, bool]:
        """Return the term of the result of an instruction, and whether it is one number per row."""
        if number not in self.computed:
            self.computed[number] = self._trace_instruction(number, self.program.instructions[number])
        return self.computed[number]

    def _is_written_at(self, number: int, place: Tensor) -> bool:
        """Return whether a place holds the elements of a result of an instruction, each once."""
        (out,), is_per_row = self.program.instructions[number].dst, self._compute(number)[1]
        shape = (*self.group.shape[:-1], 1) if is_per_row else self.group.shape
        return place.shape == shape and (out.buffer, out.offset, merge_axes(out), out.dtype) == (
            place.buffer,
            place.offset,
            merge_axes(place),
            place.dtype,
        )

    def _intern(self, *term: object) -> int:
        return self.terms.setdefault(term, len(self.terms))

    def _intern_element(self, tensor: Tensor, axes: Axes | None) -> int:
        """Return the term of an element of memory at the same index."""
        _require(tensor.dtype is DType.F32, "operands: an operand is not float32")
        return self._intern(OPERAND, tensor.buffer, tensor.offset, axes)

    def _intern_element_in_box(self, tensor: Tensor, shape: tuple[int, ...], box: Sequence[tuple[int, int]]) -> int:
        """Return the term of an element at the same index of a box. The tensor begins at the first one in the box."""
        axes = merge_axes(replace(tensor, shape=shape))
        if _merge_box(shape, box) == _merge_box(shape, [(0, n) for n in shape]):
            return self._intern_element(tensor, axes)
        _require(tensor.dtype is DType.F32, "operands: an operand is not float32")
        return self._intern(OPERAND, tensor.buffer, tensor.offset, axes, _merge_box(shape, box))

    def _intern_step(self, function: str, sources: Sequence[int], columns: int) -> int:
        """Return the term of a function; a reduction depends on the length of the rows."""
        return self._intern(function, *sources, columns if function.startswith(REDUCTION_PREFIX) else None)

    def _compute_term_of_each_step(self) -> list[int]:
        """Return the term of each step of the kernel."""
        own: list[int] = []
        columns = self.group.shape[-1] if self.group.shape else 1
        for function, sources, value in self.group.steps:
            _require(all(0 <= s < len(own) for s in sources), "expression: a step reads a later one")
            if function in (OPERAND, ROW_OPERAND):
                _require(0 <= int(value) < len(self.group.operands), "operands: an operand is missing")
                tensor = self.group.operands[int(value)]
                if sources:
                    own.append(self._trace_read_in_box(tensor, sources))
                    continue
                _require(tensor.shape == self.group.shape, "operands: a view has another shape")
                is_one_number = function == OPERAND or columns == 1 or tensor.strides[-1] == 0
                _require(is_one_number, "operands: an operand has several numbers per row")
                own.append(self._intern_element(tensor, merge_axes(tensor)))
            elif function == INSIDE:
                _require(0 <= int(value) < len(self.group.boxes), "expression: a box is missing")
                own.append(self._intern(INSIDE, _merge_box(self.group.shape, self._read_box(int(value)))))
            elif function == ATTRIBUTE:
                _require(str(value) in self.group.attributes, "expression: a number of the call is missing")
                own.append(self._intern(ATTRIBUTE, float(self.group.attributes[str(value)]).hex()))
            elif function == CONSTANT:
                own.append(self._intern(CONSTANT, value))
            else:
                own.append(self._intern_step(function, [own[s] for s in sources], columns))
        return own

    def _read_box(self, number: int) -> tuple[tuple[int, int], ...]:
        """Return a box of the kernel, which must lie in its shape."""
        shape, box = self.group.shape, self.group.boxes[number]
        is_part = len(box) == len(shape) and all(0 <= a < b <= n for (a, b), n in zip(box, shape, strict=True))
        _require(is_part, "operands: a box does not lie in the shape")
        return box

    def _trace_read_in_box(self, tensor: Tensor, sources: Sequence[int]) -> int:
        """Return the term of a step that reads an operand in the box of another step."""
        function, _, value = self.group.steps[sources[0]]
        _require(function == INSIDE and len(sources) == 1, "operands: an operand is read in no box")
        shape, box = self.group.shape, self.group.boxes[int(value)]
        is_view = tensor.shape == tuple(high - low for low, high in box)
        _require(is_view, "operands: a view has another shape")
        return self._intern_element_in_box(tensor, shape, box)

    def _trace_instruction(
        self, number: int, instruction: Instruction, place: Placement | None = None
    ) -> tuple[int, bool]:
        """Return the term of the result of an instruction, and whether it is one number per row.

        With `place`, the result is read in this place only.
        """
        size = math.prod(self.group.shape)
        declared = REGISTRY[instruction.op].expression if instruction.op in REGISTRY else None
        if declared is None or not _keeps_operands(declared, instruction):
            raise FusedKernelError(f"expression: the op {instruction.op} is not declared in the scalar language")
        _require(
            instruction.dst[0].dtype is DType.F32, f"expression: the result of instruction {number} is not float32"
        )
        operands = [*instruction.src, *[None] * (len(declared.operand_names) - len(instruction.src))]
        expression = declared.trace([t is not None for t in operands], instruction.attrs)
        has_rows = any(s.function.startswith(REDUCTION_PREFIX) for s in expression.steps)
        shape = next(t.shape for t in operands if t is not None) if has_rows else instruction.dst[0].shape
        columns = self.group.shape[-1] if self.group.shape else 1
        own_columns = shape[-1] if shape else 1
        is_per_row = math.prod(shape) != size and place is None
        if place is not None:
            is_element = not has_rows and all(s.function != "row_count" for s in expression.steps)
            _require(is_element, "expression: a part of a row is read")
        elif is_per_row:
            _require(math.prod(shape) * columns == size and not has_rows, "expression: an op has another size")
        elif has_rows:
            _require(own_columns == columns, "expression: an op reduces other rows")
        terms: list[int] = []
        depends = False
        for function, sources, value in expression.steps:
            if function == OPERAND:
                child = self._place_operand(declared, instruction, int(value), place)
                if child is None:
                    terms.append(self._trace_operand(number, int(value), shape, is_per_row))
                else:
                    terms.append(self._trace_placed_operand(number, int(value), child, declared.place is None))
                depends = True
            elif function == INSIDE:
                child = self._place_operand(declared, instruction, int(value), place)
                _require(child is not None, "expression: an operand has no place")
                assert child is not None
                terms.append(self._intern(INSIDE, _merge_box(child[0], child[2])))
            elif function == ATTRIBUTE:
                number_of_call = float(float_attribute(instruction.attrs, str(value)))
                terms.append(self._intern(ATTRIBUTE, number_of_call.hex()))
            elif function == CONSTANT:
                terms.append(self._intern(CONSTANT, value))
            else:
                terms.append(self._intern_step(function, [terms[s] for s in sources], own_columns))
        result = terms[-1] if depends else self._intern("rounded", terms[-1])
        return result, is_per_row or math.prod(instruction.dst[0].shape) * columns == size != math.prod(
            instruction.dst[0].shape
        )

    @staticmethod
    def _place_operand(
        declared: ScalarLanguageDeclaration, instruction: Instruction, index: int, place: Placement | None
    ) -> Placement | None:
        """Return the place of an operand. The result of the instruction has a place, or is whole."""
        if declared.place is None:
            return place
        tensors = [t for t in instruction.src if t is not None]
        starts = declared.place([t.shape for t in tensors], instruction.attrs)
        if starts is None:
            raise FusedKernelError(f"expression: the attributes of {instruction.op} are not declared")
        shape = instruction.dst[0].shape
        if place is None:
            place = shape, (0,) * len(shape), tuple((0, n) for n in shape)
        start = tuple(a + b for a, b in zip(place[1], starts[index], strict=True))
        ends = zip(place[2], start, tensors[index].shape, strict=True)
        return place[0], start, tuple((max(low, at), min(high, at + n)) for (low, high), at, n in ends)

    def _trace_placed_operand(self, number: int, index: int, place: Placement, broadcasts: bool) -> int:
        """Return the term of an operand that is read in a place only: the result of an instruction, or memory."""
        tensor, (own,) = self.program.instructions[number].src[index], self.program.instructions[number].dst
        assert tensor is not None
        label = f"operands: operand {index} of instruction {number}"
        content = self.contents.reads[number][index] or ()
        inside = {v[0] for _, _, v in content if isinstance(v, tuple) and v[0] in self.group.instruction_numbers}
        if not inside:
            shape, start, box = place
            lent = len(shape) - len(tensor.shape) if broadcasts else 0
            strides = (*[0] * lent, *(0 if n == 1 else s for n, s in zip(tensor.shape, tensor.strides, strict=True)))
            sizes = (*[1] * lent, *tensor.shape)
            _require(
                len(strides) == len(shape) and (not broadcasts or merge_axes(tensor, own.shape) is not None),
                f"{label} has other axes",
            )
            first = sum((low - at) * s for (low, _), at, s in zip(box, start, strides, strict=True))
            view = replace(tensor, offset=tensor.offset + 4 * first, shape=sizes, strides=strides)
            return self._intern_element_in_box(view, shape, box)
        _require(len(content) == 1 and len(inside) == 1, f"{label} has several contents")
        (maker,) = inside
        (out,) = self.program.instructions[maker].dst
        same = (tensor.offset, tensor.shape, merge_axes(tensor)) == (out.offset, out.shape, merge_axes(out))
        _require(same and (not broadcasts or own.shape == out.shape), f"{label} is another view of instruction {maker}")
        if (maker, place) not in self.placed:
            self.placed[maker, place] = self._trace_instruction(maker, self.program.instructions[maker], place)[0]
        return self.placed[maker, place]

    def _trace_operand(self, number: int, index: int, shape: tuple[int, ...], is_per_row: bool) -> int:
        """Return the term of an operand of an instruction: the result of another one of the group, or memory."""
        tensor = self.program.instructions[number].src[index]
        assert tensor is not None
        _require(tensor.dtype is DType.F32, f"operands: operand {index} of instruction {number} is not float32")
        axes = merge_axes(tensor, shape)
        if axes is None:
            raise FusedKernelError(f"operands: operand {index} of instruction {number} is repeated as tiles")
        content = self.contents.reads[number][index] or ()
        inside = {v[0] for _, _, v in content if isinstance(v, tuple) and v[0] in self.group.instruction_numbers}
        if not inside:
            return self._intern_element(tensor, self._repeat_along_row(axes) if is_per_row else axes)
        whole = len(content) == 1 and len(inside) == 1
        _require(whole, f"operands: operand {index} of instruction {number} has several contents")
        (maker,) = inside
        term, has_rows = self._compute(maker)
        (out,) = self.program.instructions[maker].dst
        rows = math.prod(out.shape)
        dense: Axes = ((rows, 1),) if rows > 1 else ()
        if has_rows and not is_per_row:
            dense = self._repeat_along_row(dense)
        same = tensor.offset == out.offset and merge_axes(out) == (((rows, 1),) if rows > 1 else ()) and axes == dense
        _require(same, f"operands: operand {index} of instruction {number} is another view of instruction {maker}")
        return term

    def _repeat_along_row(self, axes: Axes) -> Axes:
        """Return the axes of a number per row that all columns of the row repeat."""
        columns = self.group.shape[-1] if self.group.shape else 1
        if columns == 1:
            return axes
        is_repeated = axes and axes[-1][1] == 0
        return (*axes[:-1], (axes[-1][0] * columns, 0)) if is_repeated else (*axes, (columns, 0))


def _keeps_operands(declared: ScalarLanguageDeclaration, instruction: Instruction) -> bool:
    """Return whether the expression of an op has the operands of the instruction: its `arrange` returns them as is."""
    if declared.arrange is None:
        return True
    operands = [None if t is None else np.broadcast_to(np.float32(0), t.shape) for t in instruction.src]
    arranged = declared.arrange_operands_for_expression(operands, instruction.attrs)
    return all(a is b for a, b in zip_longest(arranged, operands))


class FusedKernelError(Exception):
    """A fault of one fused kernel; the message begins with the name of its rule."""


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise FusedKernelError(why)
