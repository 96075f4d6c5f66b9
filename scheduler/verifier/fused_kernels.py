"""The verification of fused kernels: a program with generated kernels is compared with its instructions.

It shares no code with the pass that groups instructions. The group is undone: the declaration of each op is substituted
into the declarations of its readers, and the result must be the expression of the kernel, term by term. The bytes that
each kernel reads must have the contents that the instructions find in program order.

Rules, named at the beginning of each fault:

- order: each instruction and each kernel runs once, and no instruction passes a collective. Instructions of a kernel
  are ascending.
- operands: a kernel reads the elements that its instructions read, and no others; each has the same content as in
  program order.
- expression: each result is the composition of its instructions, with the same roundings and the same rows.
- results: each value that something else reads is written to its place, and nothing else is written.
- in place: a result lies only on an operand with the same elements, and on no other result.
- states: a generated kernel writes no state.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from ...backends.base import Instruction, Program, Tensor
from ...backends.capabilities import FusedExpression, GeneratesFusedKernels, ProgramFusion
from ...graph.dtypes import DType
from ...graph.errors import PlanError
from ...ops import REGISTRY
from ...ops.collectives import COLLECTIVES
from ...ops.declaration.attributes import float_attribute
from ...ops.declaration.interpreter import ScalarLanguageDeclaration
from .memory.buffer_contents import BufferContents, compute_byte_extent

Axes = tuple[tuple[int, int], ...]
Content = tuple[tuple[int, int, object], ...]
"""The contents of a byte range: first byte, end byte and content of each part."""
REDUCTION_PREFIX = "row_"
ATTRIBUTE, CONSTANT, OPERAND, ROW_OPERAND = "attribute", "constant", "operand", "row_operand"


def verify_fused_kernels(program: Program, backend: GeneratesFusedKernels) -> None:
    """Verify the fused kernels that a backend generates for a program; raise `PlanError` with the first fault."""
    for why in find_fusion_faults(program, backend.describe_fusion(program)):
        raise PlanError(f"program of {len(program.instructions)} steps: {why}")


def find_fusion_faults(program: Program, fusion: ProgramFusion) -> Iterator[str]:
    """Yield as text all reasons why fused kernels do not compute the instructions of a program."""
    if faults := [*_find_missing_or_reordered_instruction_faults(program, fusion)]:
        yield from faults
        return
    contents = _RunContents(program)
    for group in fusion.expressions:
        label = f"kernel of instructions {', '.join(map(str, group.instruction_numbers))}"
        if faults := [*_find_state_and_place_faults(program, group)]:
            yield from (f"{label}: {why}" for why in faults)
            continue
        yield from (f"{label}: {why}" for why in _find_missing_or_extra_result_faults(program, contents, group))
        yield from (f"{label}: {why}" for why in _KernelTerms(program, contents, group).find_faults())
    yield from contents.find_differences(fusion)


# ------------------------------------------------------------------------------------------------------------ order


def _find_missing_or_reordered_instruction_faults(program: Program, fusion: ProgramFusion) -> Iterator[str]:
    """Yield faults of the order: an instruction that is missing or repeated, or that passes a collective."""
    count, times = len(program.instructions), Counter(n for group in fusion.order for n in group)
    wrong = [n for n in {*range(count), *times} if times[n] != 1 or not 0 <= n < count]
    if wrong:
        yield f"order: instruction {min(wrong)} runs {times[min(wrong)]} times"
        return
    groups = {*fusion.order}
    for numbers, kernels in Counter(kernel.instruction_numbers for kernel in fusion.expressions).items():
        if numbers not in groups:
            yield f"order: the instructions {numbers} have a kernel, but do not run together"
        if kernels > 1:
            yield f"order: the instructions {numbers} have {kernels} kernels"
        if [*numbers] != sorted(numbers):
            yield f"order: the instructions {numbers} of a kernel are not ascending"
    run = [n for group in fusion.order for n in group]
    passed = 0
    for position, number in enumerate(run):
        passed = max(passed, number)
        if program.instructions[number].op in COLLECTIVES and (passed != number or position != number):
            yield f"order: an instruction passes the collective {number}"
    for group in fusion.order:
        if len(group) > 1 and any(program.instructions[n].op in COLLECTIVES for n in group):
            yield f"order: the group {group} has a collective"


# ----------------------------------------------------------------------------------------------------------- memory


def _has_common_bytes(one: Tensor, other: Tensor) -> bool:
    (buffer, start, end), (other_buffer, other_start, other_end) = map(compute_byte_extent, (one, other))
    return buffer == other_buffer and start < other_end and other_start < end


def _find_state_and_place_faults(program: Program, group: FusedExpression) -> Iterator[str]:
    """Yield faults of the memory that a kernel writes: states, and overlaps with operands and other results."""
    for _, result in group.results:
        if not 0 <= result.buffer < len(program.buffers) or program.buffers[result.buffer].kind != "arena":
            yield f"states: {result} is not in the arena"
    for position, (_, result) in enumerate(group.results):
        for operand in group.operands:
            same = (operand.offset, _merge_axes(operand)) == (result.offset, _merge_axes(result))
            if _has_common_bytes(operand, result) and not same:
                yield f"in place: {result} overlaps {operand}"
        for _, other in group.results[:position]:
            if _has_common_bytes(other, result):
                yield f"in place: {result} overlaps {other}"


def _merge_axes(tensor: Tensor, shape: tuple[int, ...] | None = None) -> Axes | None:
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


class _RunContents:
    """The contents of memory before each instruction, if the instructions run one by one in program order.

    `readers` are the instructions that read each result; a result that is read after the run has none.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.reads: list[list[Content | None]] = []
        self.readers: dict[tuple[int, int], set[int]] = {}
        self.retained: set[tuple[int, int]] = set()
        contents = self._make_start()
        for number, instruction in enumerate(program.instructions):
            self.reads.append([None if t is None else _read_content(contents, t) for t in instruction.src])
            for content in self.reads[-1]:
                self._note_readers(content, number)
            _record_scratch(contents, instruction)
            for index, tensor in enumerate(instruction.dst):
                contents.record_write_and_overwritten_values(compute_byte_extent(tensor), (number, index))
                self.readers.setdefault((number, index), set())
        self.final = self._read_final(contents)
        for content in self.final.values():
            self.retained |= {value for _, _, value in content if isinstance(value, tuple)}

    def _make_start(self) -> BufferContents:
        return BufferContents(self.program, keeps_remainders=True)

    def _note_readers(self, content: Content | None, number: int) -> None:
        for _, _, value in content or ():
            if isinstance(value, tuple):
                self.readers[value].add(number)

    def _read_final(self, contents: BufferContents) -> dict[str, Content]:
        """Return the contents of everything that is read after a run."""
        program = self.program
        tensors = {f"output {name}": tensor for name, tensor in program.outputs.items()}
        for at, back in program.undo:
            tensors |= {f"save {at}.{index}": t for index, t in enumerate(back.src) if t is not None}
        for number, buffer in enumerate(program.buffers[1:], 1):
            tensors[f"buffer {number}"] = Tensor(number, 0, (buffer.nbytes,), (1,), DType.I8)
        return {name: _read_content(contents, tensor) for name, tensor in tensors.items()}

    def is_needed(self, number: int, members: Sequence[int]) -> bool:
        """Return whether something outside of a group reads a result of instruction `number`."""
        values = [(number, index) for index in range(len(self.program.instructions[number].dst))]
        return any(value in self.retained or not self.readers[value] <= {*members} for value in values)

    def find_differences(self, fusion: ProgramFusion) -> Iterator[str]:
        """Yield where a run with fused kernels reads or leaves other contents than the instructions in their order."""
        contents = self._make_start()
        for group in fusion.order:
            members = {*group}
            for number in group:
                for index, tensor in enumerate(self.program.instructions[number].src):
                    expected = self.reads[number][index]
                    if tensor is None or expected is None:
                        continue
                    inside = [part for part in expected if isinstance(part[2], tuple) and part[2][0] in members]
                    if _leave_out(_read_content(contents, tensor), inside) != _leave_out(expected, inside):
                        yield f"operands: operand {index} of instruction {number} has another content in the fused run"
            for number in group:
                if len(group) == 1:
                    _record_scratch(contents, self.program.instructions[number])
                if len(group) == 1 or self.is_needed(number, group):
                    for index, tensor in enumerate(self.program.instructions[number].dst):
                        contents.record_write_and_overwritten_values(compute_byte_extent(tensor), (number, index))
        for name, content in self._read_final(contents).items():
            if content != self.final[name]:
                yield f"operands: {name} has another content after the fused run"


def _read_content(contents: BufferContents, tensor: Tensor) -> Content:
    """Return the contents of the bytes of a tensor. Bytes that no instruction has written are left out."""
    buffer, start, end = compute_byte_extent(tensor)
    if start == end:
        return ()
    starts, ranges = contents.starts[buffer], contents.ranges[buffer]
    first, stop = max(bisect_right(starts, start) - 1, 0), bisect_left(starts, end)
    parts = [(starts[at], *ranges[at]) for at in range(first, stop)]
    return tuple((max(low, start), min(high, end), value) for low, high, value in parts if high > start)


def _record_scratch(contents: BufferContents, instruction: Instruction) -> None:
    if instruction.scratch is not None:
        contents.record_write_and_overwritten_values(compute_byte_extent(instruction.scratch), None)


def _leave_out(content: Content, ranges: Sequence[tuple[int, int, object]]) -> Content:
    """Return a content without the bytes of `ranges`, which are in order and do not overlap."""
    parts: Sequence[tuple[int, int, object]] = content
    for start, end, _ in ranges:
        before = [(low, min(high, start), value) for low, high, value in parts if low < start]
        parts = [*before, *((max(low, end), high, value) for low, high, value in parts if high > end)]
    return tuple(parts)


# ------------------------------------------------------------------------------------------------------- expressions


def _find_missing_or_extra_result_faults(
    program: Program, contents: _RunContents, group: FusedExpression
) -> Iterator[str]:
    """Yield results that a kernel does not write although something reads them, and places that are no result."""
    places = Counter((t.buffer, t.offset, math.prod(t.shape)) for _, t in group.results)
    for number in group.instruction_numbers:
        instruction = program.instructions[number]
        if len(instruction.dst) != 1:
            yield f"results: instruction {number} has {len(instruction.dst)} results"
            continue
        (out,) = instruction.dst
        place = out.buffer, out.offset, math.prod(out.shape)
        if contents.is_needed(number, group.instruction_numbers):
            if not places[place]:
                yield f"results: the result of instruction {number} is not written"
            places[place] -= 1
    if any(count > 0 for count in places.values()):
        yield "results: it writes a place that is no needed result of its instructions"


@dataclass
class _KernelTerms:
    """The terms of a kernel and of its instructions. Equal terms are one number in `terms`."""

    program: Program
    contents: _RunContents
    group: FusedExpression
    terms: dict[tuple[object, ...], int] = field(default_factory=dict)
    computed: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """For each instruction the term of its result, and whether it is one number per row."""

    def find_faults(self) -> Iterator[str]:
        try:
            self._check()
        except _FusedKernelError as why:
            yield str(why)

    def _check(self) -> None:
        group = self.group
        size = math.prod(group.shape)
        _require(all(t.shape == group.shape for t in group.operands), "operands: a view has another shape")
        for number in group.instruction_numbers:
            self.computed[number] = self._trace_instruction(number, self.program.instructions[number], size)
        own = self._compute_term_of_each_step()
        numbers = group.instruction_numbers  # values that only members read may lie at the same place
        needed = [n for n in numbers if self.contents.is_needed(n, numbers)]
        for step, place in group.results:
            makers = [n for n in needed if self._is_written_at(n, place)]
            _require(0 <= step < len(own), "expression: a result is no step")
            _require(
                any(self.computed[n][0] == own[step] for n in makers),
                f"expression: the result at {place} is not what its instructions compute",
            )

    def _is_written_at(self, number: int, place: Tensor) -> bool:
        """Return whether a place holds the elements of a result of an instruction, each once."""
        (out,), is_per_row = self.program.instructions[number].dst, self.computed[number][1]
        shape = (*self.group.shape[:-1], 1) if is_per_row else self.group.shape
        return place.shape == shape and (out.buffer, out.offset, _merge_axes(out), out.dtype) == (
            place.buffer,
            place.offset,
            _merge_axes(place),
            place.dtype,
        )

    def _intern(self, *term: object) -> int:
        return self.terms.setdefault(term, len(self.terms))

    def _intern_element(self, tensor: Tensor, axes: Axes | None) -> int:
        """Return the term of an element of memory at the same index."""
        _require(tensor.dtype is DType.F32, "operands: an operand is not float32")
        return self._intern(OPERAND, tensor.buffer, tensor.offset, axes)

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
                is_one_number = function == OPERAND or columns == 1 or tensor.strides[-1] == 0
                _require(is_one_number, "operands: an operand has several numbers per row")
                own.append(self._intern_element(tensor, _merge_axes(tensor)))
            elif function == ATTRIBUTE:
                _require(str(value) in self.group.attributes, "expression: a number of the call is missing")
                own.append(self._intern(ATTRIBUTE, float(self.group.attributes[str(value)]).hex()))
            elif function == CONSTANT:
                own.append(self._intern(CONSTANT, value))
            else:
                own.append(self._intern_step(function, [own[s] for s in sources], columns))
        return own

    def _trace_instruction(self, number: int, instruction: Instruction, size: int) -> tuple[int, bool]:
        """Return the term of the result of an instruction, and whether it is one number per row."""
        declared = REGISTRY[instruction.op].expression if instruction.op in REGISTRY else None
        if declared is None or not _keeps_operands(declared, instruction):
            raise _FusedKernelError(f"expression: the op {instruction.op} is not declared in the scalar language")
        _require(
            instruction.dst[0].dtype is DType.F32, f"expression: the result of instruction {number} is not float32"
        )
        operands = [*instruction.src, *[None] * (len(declared.operand_names) - len(instruction.src))]
        expression = declared.trace([t is not None for t in operands], instruction.attrs)
        has_rows = any(s.function.startswith(REDUCTION_PREFIX) for s in expression.steps)
        shape = next(t.shape for t in operands if t is not None) if has_rows else instruction.dst[0].shape
        columns = self.group.shape[-1] if self.group.shape else 1
        own_columns = shape[-1] if shape else 1
        is_per_row = math.prod(shape) != size
        if is_per_row:
            _require(math.prod(shape) * columns == size and not has_rows, "expression: an op has another size")
        elif has_rows:
            _require(own_columns == columns, "expression: an op reduces other rows")
        terms: list[int] = []
        depends = False
        for function, sources, value in expression.steps:
            if function == OPERAND:
                terms.append(self._trace_operand(number, int(value), shape, is_per_row))
                depends = True
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

    def _trace_operand(self, number: int, index: int, shape: tuple[int, ...], is_per_row: bool) -> int:
        """Return the term of an operand of an instruction: the result of another one of the group, or memory."""
        tensor = self.program.instructions[number].src[index]
        assert tensor is not None
        _require(tensor.dtype is DType.F32, f"operands: operand {index} of instruction {number} is not float32")
        axes = _merge_axes(tensor, shape)
        if axes is None:
            raise _FusedKernelError(f"operands: operand {index} of instruction {number} is repeated as tiles")
        content = self.contents.reads[number][index] or ()
        inside = {v[0] for _, _, v in content if isinstance(v, tuple) and v[0] in self.computed}
        if not inside:
            return self._intern_element(tensor, self._repeat_along_row(axes) if is_per_row else axes)
        whole = len(content) == 1 and len(inside) == 1
        _require(whole, f"operands: operand {index} of instruction {number} has several contents")
        (maker,) = inside
        term, has_rows = self.computed[maker]
        (out,) = self.program.instructions[maker].dst
        rows = math.prod(out.shape)
        dense: Axes = ((rows, 1),) if rows > 1 else ()
        if has_rows and not is_per_row:
            dense = self._repeat_along_row(dense)
        same = tensor.offset == out.offset and _merge_axes(out) == (((rows, 1),) if rows > 1 else ()) and axes == dense
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


class _FusedKernelError(Exception):
    """A fault of one fused kernel; the message begins with the name of its rule."""


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise _FusedKernelError(why)
