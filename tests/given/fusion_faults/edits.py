"""Edits of a program and the description of its fused kernels: functions from (program, fusion) to another pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hocket.backends.base import Instruction, Program, Tensor, contiguous_strides
from hocket.backends.capabilities import FusedExpression, ProgramFusion
from hocket.graph import DType

from .programs import FusedProgram, build_fused_program

Edit = Callable[[Program, ProgramFusion], FusedProgram]
Steps = Sequence[tuple[str, tuple[int, ...], int | str]]

# ---------------------------------------------------------------------------------------------------- edits of a group


def _edit_group(at: int, change: Callable[[FusedExpression], FusedExpression]) -> Edit:
    def edit(program: Program, fusion: ProgramFusion) -> FusedProgram:
        groups = list(fusion.expressions)
        groups[at] = change(groups[at])
        return program, replace(fusion, expressions=tuple(groups))

    return edit


def set_step(number: int, function: str, sources: tuple[int, ...] = (), value: int | str = "", group: int = 0) -> Edit:
    """Put another step at `number`."""
    return _edit_group(group, lambda g: replace(g, steps=_replace_at(g.steps, number, (function, sources, value))))


def add_steps(*steps: tuple[str, tuple[int, ...], int | str], group: int = 0) -> Edit:
    """Append steps; a result has to be moved to them with `set_result`."""
    return _edit_group(group, lambda g: replace(g, steps=(*g.steps, *steps)))


def set_attribute(name: str, value: float, group: int = 0) -> Edit:
    return _edit_group(group, lambda g: replace(g, attributes={**g.attributes, name: value}))


def drop_attributes(group: int = 0) -> Edit:
    return _edit_group(group, lambda g: replace(g, attributes={}))


def set_operand(number: int, group: int = 0, **fields: Any) -> Edit:
    """Change fields of the view of an operand."""
    return _edit_group(
        group, lambda g: replace(g, operands=_replace_at(g.operands, number, replace(g.operands[number], **fields)))
    )


def set_box(number: int, *bounds: tuple[int, int], group: int = 0) -> Edit:
    """Change a box."""
    return _edit_group(group, lambda g: replace(g, boxes=_replace_at(g.boxes, number, bounds)))


def swap_operands(one: int, other: int, group: int = 0) -> Edit:
    def swap(g: FusedExpression) -> FusedExpression:
        operands = list(g.operands)
        operands[one], operands[other] = operands[other], operands[one]
        return replace(g, operands=tuple(operands))

    return _edit_group(group, swap)


def drop_operand(group: int = 0) -> Edit:
    """Remove the last operand, which a step still reads."""
    return _edit_group(group, lambda g: replace(g, operands=g.operands[:-1]))


def set_result(number: int, step: int | None = None, group: int = 0, **fields: Any) -> Edit:
    """Change the step of a result, or fields of its place."""

    def change(g: FusedExpression) -> FusedExpression:
        old, place = g.results[number]
        new = (old if step is None else step, replace(place, **fields))
        return replace(g, results=_replace_at(g.results, number, new))

    return _edit_group(group, change)


def add_result(step: int, like: int = 0, group: int = 0, **fields: Any) -> Edit:
    """Write one step more, to the place of result `like` with other fields."""
    return _edit_group(group, lambda g: replace(g, results=(*g.results, (step, replace(g.results[like][1], **fields)))))


def drop_result(number: int, group: int = 0) -> Edit:
    return _edit_group(group, lambda g: replace(g, results=(*g.results[:number], *g.results[number + 1 :])))


def set_shape(*shape: int, group: int = 0) -> Edit:
    """Loop over another shape; operands and results keep their views."""
    return _edit_group(group, lambda g: replace(g, shape=shape))


def set_all_shapes(*shape: int, group: int = 0) -> Edit:
    """Loop over another shape, with dense views of this shape for all operands and results."""

    def reshape(t: Tensor) -> Tensor:
        return replace(t, shape=shape, strides=contiguous_strides(shape))

    return _edit_group(
        group,
        lambda g: replace(
            g,
            shape=shape,
            operands=tuple(map(reshape, g.operands)),
            results=tuple((step, reshape(t)) for step, t in g.results),
        ),
    )


def set_members(*numbers: int, group: int = 0) -> Edit:
    return _edit_group(group, lambda g: replace(g, instruction_numbers=numbers))


# ---------------------------------------------------------------------------------------------- edits of all the groups


def set_order(*order: tuple[int, ...]) -> Edit:
    return lambda program, fusion: (program, replace(fusion, order=order))


def add_group(
    numbers: tuple[int, ...],
    steps: Steps,
    operands: Sequence[tuple[int, int]],
    results: Sequence[tuple[int, int]],
    attributes: Mapping[str, float] | None = None,
) -> Edit:
    """Add a kernel over the shape of the last result.

    Args:
        numbers: the instructions.
        steps: the steps.
        operands: the operands, each as (instruction, index of its source); views broadcast to the shape.
        results: the results, each as (step, instruction that writes it).
        attributes: the numbers of the call.
    """

    def edit(program: Program, fusion: ProgramFusion) -> FusedProgram:
        shape = program.instructions[results[-1][1]].dst[0].shape
        sources = [program.instructions[n].src[k] for n, k in operands]
        views = [
            replace(
                t,
                shape=shape,
                strides=tuple(0 if n == 1 else s for n, s in zip(*_pad(t, len(shape)), strict=True)),
            )
            for t in sources
            if t is not None
        ]
        group = FusedExpression(
            numbers,
            tuple(steps),
            attributes or {},
            shape,
            tuple(views),
            tuple((step, program.instructions[n].dst[0]) for step, n in results),
        )
        return program, replace(fusion, expressions=(*fusion.expressions, group))

    return edit


def drop_group(group: int = 0) -> Edit:
    """Remove one kernel; the order is set apart."""
    return lambda program, fusion: (
        program,
        replace(fusion, expressions=(*fusion.expressions[:group], *fusion.expressions[group + 1 :])),
    )


def repeat_group(group: int = 0) -> Edit:
    return lambda program, fusion: (
        program,
        replace(fusion, expressions=(*fusion.expressions, fusion.expressions[group])),
    )


def take_kernels_of(name: str) -> Edit:
    """Use the kernels of another program."""
    return lambda program, _: (program, build_fused_program(name)[1])


# ------------------------------------------------------------------------------------------------- edits of the program


def set_scratch(number: int, offset: int, nbytes: int) -> Edit:
    """Give an instruction scratch bytes in the arena."""
    return set_instruction(number, scratch=Tensor(0, offset, (nbytes,), (1,), DType.I8))


def set_value_dtype(number: int, reader: int, index: int, dtype: DType) -> Edit:
    """Store the result of an instruction in another dtype, and read it in this dtype at one reader."""

    def edit(program: Program, fusion: ProgramFusion) -> FusedProgram:
        (out,) = program.instructions[number].dst
        changed = set_instruction(number, dst=(replace(out, dtype=dtype),))(program, fusion)
        return move_source(reader, index, dtype=dtype)(*changed)

    return edit


def set_instruction(number: int, **fields: Any) -> Edit:
    """Change an instruction; the kernels still compute the old one."""
    return lambda program, fusion: (
        replace(
            program,
            instructions=_replace_at(program.instructions, number, replace(program.instructions[number], **fields)),
        ),
        fusion,
    )


def move_result(number: int, offset: int) -> Edit:
    """Let the program write the result of an instruction to another place of the arena, and read it there.

    Readers are the operands and outputs with the old place that come after the instruction.
    """

    def edit(program: Program, fusion: ProgramFusion) -> FusedProgram:
        (old,) = program.instructions[number].dst

        def move(t: Tensor | None) -> Tensor | None:
            return replace(t, offset=offset) if t is not None and (t.buffer, t.offset) == (0, old.offset) else t

        later = tuple(
            replace(i, src=tuple(map(move, i.src))) if n > number else i for n, i in enumerate(program.instructions)
        )
        moved = _replace_at(later, number, replace(later[number], dst=(replace(old, offset=offset),)))
        arena = replace(program.buffers[0], nbytes=max(program.buffers[0].nbytes, offset + old.spec.nbytes))
        outputs = {name: move(t) for name, t in program.outputs.items()}
        changed = replace(program, instructions=moved, outputs=outputs, buffers=(arena, *program.buffers[1:]))
        return changed, fusion

    return edit


def move_source(number: int, index: int, **fields: Any) -> Edit:
    """Let an instruction read another place."""

    def edit(program: Program, fusion: ProgramFusion) -> FusedProgram:
        source = program.instructions[number].src[index]
        assert source is not None
        sources = _replace_at(program.instructions[number].src, index, replace(source, **fields))
        return set_instruction(number, src=sources)(program, fusion)

    return edit


def add_output(name: str, number: int, **fields: Any) -> Edit:
    """Make the result of an instruction an output of the program, or a view of it with other fields."""
    return lambda program, fusion: (
        replace(program, outputs={**program.outputs, name: replace(program.instructions[number].dst[0], **fields)}),
        fusion,
    )


def add_undo(at: int, number: int) -> Edit:
    """Let a rollback read the result of an instruction."""

    def edit(program: Program, fusion: ProgramFusion) -> FusedProgram:
        saved = program.instructions[number]
        back = Instruction("cont", saved.dst, saved.dst, {}, None, "restore")
        return replace(program, undo=(*program.undo, (at, back))), fusion

    return edit


def _replace_at(items: Sequence[Any], at: int, new: Any) -> tuple[Any, ...]:
    return (*items[:at], new, *items[at + 1 :])


def _pad(t: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    missing = (1,) * (rank - len(t.shape))
    return (*missing, *t.shape), (*missing, *t.strides)
