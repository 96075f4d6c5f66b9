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
from .run_contents import UnfusedRunContents

Axes = tuple[tuple[int, int], ...]
PlacementInShape = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]
"""The place of a value in its reader: the shape of the reader, the index of its beginning, and the box that is read."""
REDUCTION_PREFIX = "row_"
ATTRIBUTE, CONSTANT, OPERAND, ROW_OPERAND, INSIDE = "attribute", "constant", "operand", "row_operand", "inside"


def merge_tensor_axes(tensor: Tensor, shape: tuple[int, ...] | None = None) -> Axes | None:
    """Return the axes of a strided tensor as (size, stride) pairs in row-major order, merged where possible.

    Two views with equal offsets and equal merged axes read the same elements in the same order. Example: a dense [2,
    3] tensor with strides (3, 1) gives ``((6, 1),)``.

    Args:
        tensor: The tensor.
        shape: The shape to which the tensor is broadcast; None for its own shape. If that is impossible, the result
            is None.
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


def compose_axes(outer: Axes, inner: Axes) -> Axes | None:
    """Return the axes with which a reader of a repeated or permuted value would read one operand of this value.

    A kernel can compute an elementwise value again for each reader that repeats or permutes it. The operands of the
    value are then read with the axes of the reader.

    Args:
        outer: How a reader repeats the elements of the value: strides count elements. Axes with strides above 0 cover
            all elements once.
        inner: The axes of an operand, element by element of the value.

    Returns:
        The axes of the operand for the reader, merged; None if strides cannot express them.
    """
    if not covers_each_element_once(outer, math.prod(size for size, _ in inner)):
        return None
    merged: list[tuple[int, int]] = []
    for size, step in outer:
        for part in [(size, 0)] if step == 0 else _split_axis_at_axes(size, step, inner):
            if part is None:
                return None
            if merged and merged[-1][1] == part[0] * part[1]:
                merged[-1] = merged[-1][0] * part[0], part[1]
            else:
                merged.append(part)
    return tuple(merged)


def covers_each_element_once(axes: Axes, size: int) -> bool:
    """Return whether the axes with strides above 0 cover `size` dense elements, each once, in any order."""
    covered = 1
    for n, step in sorted((axis for axis in axes if axis[1] != 0), key=lambda axis: axis[1]):
        if step != covered:
            return False
        covered *= n
    return covered == size


def _split_axis_at_axes(size: int, step: int, inner: Axes) -> list[tuple[int, int] | None]:
    """Split an axis of `size` elements, `step` apart, at the bounds of the `inner` axes of a dense value.

    Each part has the stride of its inner axis. A part is None if the bounds do not divide each other.
    """
    parts: list[tuple[int, int] | None] = []
    below = 1
    for own, stride in reversed(inner):
        first, end = max(below, step), min(below * own, step * size)
        if first < end:
            is_whole = first % below == 0 and end % first == 0
            parts.append((end // first, stride * (first // below)) if is_whole else None)
        below *= own
    return parts[::-1]


def merge_box_axes(shape: Sequence[int], box: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return (axis size, start, end) triples of a box: index ranges on the axes of `shape`, merged where possible.

    An axis that lies inside the box completely is merged into the axis before it. Equal triples are equal boxes.
    """
    axes: list[tuple[int, int, int]] = []
    for n, (low, high) in zip(shape, box, strict=True):
        if n != 1 and axes and (low, high) == (0, n):
            m, first, end = axes.pop()
            axes.append((m * n, first * n, end * n))
        elif n != 1:
            axes.append((n, low, high))
    return tuple(axes)


@dataclass
class SymbolicTerms:
    """Proves by symbolic evaluation that a fused kernel computes the same as the instructions that it replaces.

    A term is a symbolic expression: a function of other terms, or a memory element, an attribute or a constant.
    `terms` gives equal terms the same number. So the kernel and an instruction compute equal results if their numbers
    are equal.
    """

    program: Program
    contents: UnfusedRunContents
    group: FusedExpression
    terms: dict[tuple[object, ...], int] = field(default_factory=dict)
    computed: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """For each instruction the term of its result, and whether it is one number per row."""
    placed: dict[tuple[int, PlacementInShape], int] = field(default_factory=dict)
    """For each instruction with a result that is read in a place, the term of the result there."""
    repeated: dict[tuple[int, Axes], int] = field(default_factory=dict)
    """For each instruction with a result that larger results repeat, the term of the result by its axes there."""

    def find_faults(self) -> Iterator[str]:
        try:
            self._check()
        except FusedKernelError as why:
            yield str(why)

    def _check(self) -> None:
        group = self.group
        is_view = bool(group.boxes) or all(t.shape == group.shape for t in group.operands)
        _require(is_view, "operands: a view has another shape")
        own = self._compute_kernel_step_terms()
        numbers = group.instruction_numbers  # values that only members read may lie at the same place
        needed = [n for n in numbers if self.contents.is_result_read_outside_group(n, numbers)]
        for step, place in group.results:
            makers = [n for n in needed if self._is_result_of_instruction_at(n, place)]
            _require(0 <= step < len(own), "expression: a result is no step")
            _require(
                any(self._compute_instruction_term(n)[0] == own[step] for n in makers),
                f"expression: the result at {place} is not what its instructions compute",
            )
        read = {number for number, _ in (*self.placed, *self.repeated)}
        for number in () if group.boxes else {*numbers} - read:
            self._compute_instruction_term(number)

    def _compute_instruction_term(self, number: int) -> tuple[int, bool]:
        """Return the term number of an instruction's result, and whether the result has one number for each row."""
        if number not in self.computed:
            self.computed[number] = self._trace_instruction_to_term(number, self.program.instructions[number])
        return self.computed[number]

    def _is_result_of_instruction_at(self, number: int, place: Tensor) -> bool:
        """Return whether a written tensor is the result of an instruction, with the same bytes, shape and strides."""
        (out,), is_per_row = self.program.instructions[number].dst, self._compute_instruction_term(number)[1]
        shape = (*self.group.shape[:-1], 1) if is_per_row else self.group.shape
        return place.shape == shape and (out.buffer, out.offset, merge_tensor_axes(out), out.dtype) == (
            place.buffer,
            place.offset,
            merge_tensor_axes(place),
            place.dtype,
        )

    def _intern(self, *term: object) -> int:
        return self.terms.setdefault(term, len(self.terms))

    def _intern_memory_element_term(self, tensor: Tensor, axes: Axes | None) -> int:
        """Return the term number of a read from memory, of one element of `tensor` for each computed element.

        `axes` are the (size, stride) pairs with which the tensor is read.
        """
        _require(tensor.dtype is DType.F32, "operands: an operand is not float32")
        return self._intern(OPERAND, tensor.buffer, tensor.offset, axes)

    def _intern_memory_element_term_in_box(
        self, tensor: Tensor, shape: tuple[int, ...], box: Sequence[tuple[int, int]]
    ) -> int:
        """Return the term number of a read from memory that happens only inside a box, an index range on each axis.

        Example: an operand of a concatenation. `tensor` begins at the first element of the box; `shape` is the whole
        shape.
        """
        axes = merge_tensor_axes(replace(tensor, shape=shape))
        if merge_box_axes(shape, box) == merge_box_axes(shape, [(0, n) for n in shape]):
            return self._intern_memory_element_term(tensor, axes)
        _require(tensor.dtype is DType.F32, "operands: an operand is not float32")
        return self._intern(OPERAND, tensor.buffer, tensor.offset, axes, merge_box_axes(shape, box))

    def _intern_function_term(self, function: str, sources: Sequence[int], columns: int) -> int:
        """Return the term number of a function of other terms; for a row reduction, it depends on the row length."""
        return self._intern(function, *sources, columns if function.startswith(REDUCTION_PREFIX) else None)

    def _compute_kernel_step_terms(self) -> list[int]:
        """Return for each step of the kernel's expression the number of the symbolic term that it computes."""
        own: list[int] = []
        columns = self.group.shape[-1] if self.group.shape else 1
        for function, sources, value in self.group.steps:
            _require(all(0 <= s < len(own) for s in sources), "expression: a step reads a later one")
            if function in (OPERAND, ROW_OPERAND):
                _require(0 <= int(value) < len(self.group.operands), "operands: an operand is missing")
                tensor = self.group.operands[int(value)]
                if sources:
                    own.append(self._compute_boxed_operand_term(tensor, sources))
                    continue
                _require(tensor.shape == self.group.shape, "operands: a view has another shape")
                is_one_number = function == OPERAND or columns == 1 or tensor.strides[-1] == 0
                _require(is_one_number, "operands: an operand has several numbers per row")
                own.append(self._intern_memory_element_term(tensor, merge_tensor_axes(tensor)))
            elif function == INSIDE:
                _require(0 <= int(value) < len(self.group.boxes), "expression: a box is missing")
                own.append(
                    self._intern(INSIDE, merge_box_axes(self.group.shape, self._require_box_in_shape(int(value))))
                )
            elif function == ATTRIBUTE:
                _require(str(value) in self.group.attributes, "expression: a number of the call is missing")
                own.append(self._intern(ATTRIBUTE, float(self.group.attributes[str(value)]).hex()))
            elif function == CONSTANT:
                own.append(self._intern(CONSTANT, value))
            else:
                own.append(self._intern_function_term(function, [own[s] for s in sources], columns))
        return own

    def _require_box_in_shape(self, number: int) -> tuple[tuple[int, int], ...]:
        """Return the (start, end) ranges of box `number`; raise `FusedKernelError` if it exceeds the kernel's shape."""
        shape, box = self.group.shape, self.group.boxes[number]
        is_part = len(box) == len(shape) and all(0 <= a < b <= n for (a, b), n in zip(box, shape, strict=True))
        _require(is_part, "operands: a box does not lie in the shape")
        return box

    def _compute_boxed_operand_term(self, tensor: Tensor, sources: Sequence[int]) -> int:
        """Return the term number of a kernel step that reads an operand only inside a box, an index range on each axis.

        `sources` must be one earlier step, which tests whether the element lies in the box.
        """
        function, _, value = self.group.steps[sources[0]]
        _require(function == INSIDE and len(sources) == 1, "operands: an operand is read in no box")
        shape, box = self.group.shape, self.group.boxes[int(value)]
        is_view = tensor.shape == tuple(high - low for low, high in box)
        _require(is_view, "operands: a view has another shape")
        return self._intern_memory_element_term_in_box(tensor, shape, box)

    def _trace_instruction_to_term(
        self, number: int, instruction: Instruction, place: PlacementInShape | None = None, repeats: Axes | None = None
    ) -> tuple[int, bool]:
        """Compute the term of a result from the declared expression of its op, and whether it is one number per row.

        With `place`, the result is read in this part of the kernel's shape only. With `repeats`, a larger value
        repeats it.
        """
        size = math.prod(self.group.shape)
        declared = REGISTRY[instruction.op].expression if instruction.op in REGISTRY else None
        if declared is None or not _has_unchanged_operands(declared, instruction):
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
        is_per_row = math.prod(shape) != size and place is None and repeats is None
        if place is not None or repeats is not None:
            is_element = not has_rows and all(s.function != "row_count" for s in expression.steps)
            _require(is_element, "expression: a part of a row is read")
            _require(repeats is None or declared.place is None, "expression: a value with parts is repeated")
        elif is_per_row:
            _require(math.prod(shape) * columns == size and not has_rows, "expression: an op has another size")
        elif has_rows:
            _require(own_columns == columns, "expression: an op reduces other rows")
        terms: list[int] = []
        depends = False
        for function, sources, value in expression.steps:
            if function == OPERAND:
                child = self._compute_operand_placement(declared, instruction, int(value), place)
                if child is None or child == (shape, (0,) * len(shape), tuple((0, n) for n in shape)):
                    terms.append(self._compute_operand_term(number, int(value), shape, is_per_row, repeats))
                else:
                    terms.append(self._compute_placed_operand_term(number, int(value), child, declared.place is None))
                depends = True
            elif function == INSIDE:
                child = self._compute_operand_placement(declared, instruction, int(value), place)
                _require(child is not None, "expression: an operand has no place")
                assert child is not None
                terms.append(self._intern(INSIDE, merge_box_axes(child[0], child[2])))
            elif function == ATTRIBUTE:
                number_of_call = float(float_attribute(instruction.attrs, str(value)))
                terms.append(self._intern(ATTRIBUTE, number_of_call.hex()))
            elif function == CONSTANT:
                terms.append(self._intern(CONSTANT, value))
            else:
                terms.append(self._intern_function_term(function, [terms[s] for s in sources], own_columns))
        result = terms[-1] if depends else self._intern("rounded", terms[-1])
        return result, is_per_row or math.prod(instruction.dst[0].shape) * columns == size != math.prod(
            instruction.dst[0].shape
        )

    @staticmethod
    def _compute_operand_placement(
        declared: ScalarLanguageDeclaration, instruction: Instruction, index: int, place: PlacementInShape | None
    ) -> PlacementInShape | None:
        """Compute where an operand begins in the kernel's shape, and in which part of it the operand is read.

        Only ops such as a concatenation declare such places; None means that the operand is read whole. `place` is
        the place of the instruction's own result; None means the whole shape.
        """
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

    def _compute_placed_operand_term(self, number: int, index: int, place: PlacementInShape, broadcasts: bool) -> int:
        """Return the term number of an operand that is read only in one part of the kernel's shape.

        It is the term of the instruction that computes the operand in the same kernel, or else a read from memory.
        """
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
                len(strides) == len(shape) and (not broadcasts or merge_tensor_axes(tensor, own.shape) is not None),
                f"{label} has other axes",
            )
            first = sum((low - at) * s for (low, _), at, s in zip(box, start, strides, strict=True))
            view = replace(tensor, offset=tensor.offset + 4 * first, shape=sizes, strides=strides)
            return self._intern_memory_element_term_in_box(view, shape, box)
        _require(len(content) == 1 and len(inside) == 1, f"{label} has several contents")
        (maker,) = inside
        (out,) = self.program.instructions[maker].dst
        same = (tensor.offset, tensor.shape, merge_tensor_axes(tensor)) == (
            out.offset,
            out.shape,
            merge_tensor_axes(out),
        )
        _require(same and (not broadcasts or own.shape == out.shape), f"{label} is another view of instruction {maker}")
        if (maker, place) not in self.placed:
            self.placed[maker, place] = self._trace_instruction_to_term(maker, self.program.instructions[maker], place)[
                0
            ]
        return self.placed[maker, place]

    def _compute_operand_term(
        self, number: int, index: int, shape: tuple[int, ...], is_per_row: bool, repeats: Axes | None
    ) -> int:
        """Return the term number of an operand: the term of its producer in the same kernel, or a read from memory.

        `shape` is the shape of the instruction. `repeats` are the (size, stride) pairs with which its result is
        repeated.
        """
        tensor = self.program.instructions[number].src[index]
        assert tensor is not None
        label = f"operands: operand {index} of instruction {number}"
        _require(tensor.dtype is DType.F32, f"{label} is not float32")
        own_axes = merge_tensor_axes(tensor, shape)
        axes = own_axes if repeats is None or own_axes is None else compose_axes(repeats, own_axes)
        if axes is None:
            raise FusedKernelError(f"{label} is repeated as tiles")
        content = self.contents.reads[number][index] or ()
        inside = {v[0] for _, _, v in content if isinstance(v, tuple) and v[0] in self.group.instruction_numbers}
        if not inside:
            return self._intern_memory_element_term(
                tensor, self._repeat_row_number_over_columns(axes) if is_per_row else axes
            )
        _require(len(content) == 1 and len(inside) == 1, f"{label} has several contents")
        (maker,) = inside
        (out,) = self.program.instructions[maker].dst
        rows = math.prod(out.shape)
        dense: Axes = ((rows, 1),) if rows > 1 else ()
        is_whole = tensor.offset == out.offset and dense == merge_tensor_axes(out)
        is_whole = is_whole and covers_each_element_once(merge_tensor_axes(tensor) or (), rows)
        if is_whole and not is_per_row and (repeats is not None or axes != dense) and not self._is_per_row(maker, axes):
            if (maker, axes) not in self.repeated:
                instruction = self.program.instructions[maker]
                self.repeated[maker, axes] = self._trace_instruction_to_term(maker, instruction, None, axes)[0]
            return self.repeated[maker, axes]
        term, has_rows = self._compute_instruction_term(maker)
        expected = self._repeat_row_number_over_columns(dense) if has_rows and not is_per_row else dense
        _require(is_whole and axes == expected, f"{label} is another view of instruction {maker}")
        return term

    def _is_per_row(self, maker: int, axes: Axes) -> bool:
        """Return whether `axes` repeat each number of an instruction's result over one row, as broadcasting does."""
        rows, columns = math.prod(self.program.instructions[maker].dst[0].shape), (self.group.shape or (1,))[-1]
        dense: Axes = ((rows, 1),) if rows > 1 else ()
        return rows * columns == math.prod(self.group.shape) and axes == self._repeat_row_number_over_columns(dense)

    def _repeat_row_number_over_columns(self, axes: Axes) -> Axes:
        """Append a broadcast axis (stride 0) that repeats one number for each row over the columns of the row."""
        columns = self.group.shape[-1] if self.group.shape else 1
        if columns == 1:
            return axes
        is_repeated = axes and axes[-1][1] == 0
        return (*axes[:-1], (axes[-1][0] * columns, 0)) if is_repeated else (*axes, (columns, 0))


def _has_unchanged_operands(declared: ScalarLanguageDeclaration, instruction: Instruction) -> bool:
    """Return whether the declared expression of an op reads the operands themselves, in order, and no views of them."""
    if declared.arrange is None:
        return True
    operands = [None if t is None else np.broadcast_to(np.float32(0), t.shape) for t in instruction.src]
    arranged = declared.arrange_operands_for_expression(operands, instruction.attrs)
    return all(a is b for a, b in zip_longest(arranged, operands))


class FusedKernelError(Exception):
    """The error that a fused kernel does not compute its instructions; the message begins with the violated rule."""


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise FusedKernelError(why)
