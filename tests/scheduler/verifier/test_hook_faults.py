"""The verifier of hooked kernels: a correct one passes, and each planted fault is found by the rule in its row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hocket.backends.base import BufferSpec, Instruction, Program, Tensor, contiguous_strides
from hocket.backends.capabilities import FusedExpression, HookedKernel, ProgramFusion
from hocket.graph import DType
from hocket.ops import REGISTRY
from hocket.scheduler.verifier.fused_kernels import find_fusion_faults

ROWS, HEADS, HEAD = 4, 3, 8
MATRIX_COLUMNS = HEADS * HEAD
ROW_BYTES, PLACE_BYTES = 4 * MATRIX_COLUMNS, 4 * ROWS * MATRIX_COLUMNS
Pair = tuple[Program, ProgramFusion]
Edit = Callable[[Program, ProgramFusion], Pair]


def tensor(place: int, *shape: int, buffer: int = 0) -> Tensor:
    shape = shape or (ROWS, MATRIX_COLUMNS)
    return Tensor(buffer, place * PLACE_BYTES, shape, contiguous_strides(shape), DType.F32)


X, RESIDUAL, PRODUCT, SUM, NORMED = (tensor(place) for place in range(5))
SUM_HEADS, NORMED_HEADS = (replace(tensor(place, ROWS, HEADS, HEAD)) for place in (3, 4))
WEIGHT = tensor(0, MATRIX_COLUMNS, MATRIX_COLUMNS, buffer=1)


def make_instruction(number: int, op: str, src: tuple[Tensor, ...], dst: Tensor) -> Instruction:
    return Instruction(op, src, (dst,), REGISTRY[op].defaults, None, op, number)


def make_kernel(instruction: Instruction) -> FusedExpression:
    """The generated kernel of one instruction."""
    declared = REGISTRY[instruction.op].expression
    steps = declared.trace([True] * len(instruction.src), instruction.attrs).steps
    attributes = {name: float(value) for name, value in instruction.attrs.items()}
    shape = instruction.dst[0].shape
    results = ((len(steps) - 1, instruction.dst[0]),)
    return FusedExpression((instruction.index,), steps, attributes, shape, instruction.src, results)


def make_program() -> Pair:
    """A product, and two hooks: the sum with a residual, and the norm of each head of the sum."""
    calls = (
        make_instruction(0, "mul_mat", (WEIGHT, X), PRODUCT),
        make_instruction(1, "add", (PRODUCT, RESIDUAL), SUM),
        make_instruction(2, "rms_norm", (SUM_HEADS,), NORMED_HEADS),
    )
    buffers = (
        BufferSpec("arena", "", 16 * PLACE_BYTES),
        BufferSpec("weight", "w", 4 * MATRIX_COLUMNS * MATRIX_COLUMNS),
    )
    program = Program(buffers, calls, {"x": X, "residual": RESIDUAL}, {"product": PRODUCT, "sum": SUM, "y": NORMED})
    kernels = tuple(map(make_kernel, calls[1:]))
    return program, ProgramFusion(((0, 1, 2),), kernels, (HookedKernel(((0,), (1,), (2,)), HEAD),))


def set_hooked(*kernels: HookedKernel) -> Edit:
    return lambda program, fusion: (program, replace(fusion, hooked=kernels))


def set_stages(*stages: tuple[int, ...]) -> Edit:
    return set_hooked(HookedKernel(stages, HEAD))


def set_panel_columns(columns: int) -> Edit:
    return set_hooked(HookedKernel(((0,), (1,), (2,)), columns))


def move(old: Tensor, nbytes: int, to: Tensor | None = None) -> Edit:
    """Move a value to another place, in the program and in all kernels: to `nbytes` after another value."""

    def place(t: Tensor | None) -> Tensor | None:
        return t and (replace(t, offset=(to or old).offset + nbytes) if t.offset == old.offset and not t.buffer else t)

    def edit(program: Program, fusion: ProgramFusion) -> Pair:
        calls = tuple(
            replace(i, src=tuple(map(place, i.src)), dst=tuple(map(place, i.dst))) for i in program.instructions
        )
        kernels = tuple(
            replace(k, operands=tuple(map(place, k.operands)), results=tuple((n, place(t)) for n, t in k.results))
            for k in fusion.expressions
        )
        inputs, outputs = ({n: place(t) for n, t in some.items()} for some in (program.inputs, program.outputs))
        return replace(program, instructions=calls, inputs=inputs, outputs=outputs), replace(
            fusion, expressions=kernels
        )

    return edit


def change_operand(kernel: int, operand: int, **fields: object) -> Edit:
    """Change fields of an operand of a hook, in the program too."""

    def edit(program: Program, fusion: ProgramFusion) -> Pair:
        kernels, calls = [*fusion.expressions], [*program.instructions]
        operands = [*kernels[kernel].operands]
        operands[operand] = replace(operands[operand], **fields)
        kernels[kernel] = replace(kernels[kernel], operands=tuple(operands))
        calls[kernel + 1] = replace(calls[kernel + 1], src=tuple(operands))
        return replace(program, instructions=tuple(calls)), replace(fusion, expressions=tuple(kernels))

    return edit


def change_body(**fields: object) -> Edit:
    def edit(program: Program, fusion: ProgramFusion) -> Pair:
        first, *others = program.instructions
        return replace(program, instructions=(replace(first, **fields), *others)), fusion

    return edit


def change_kernel(kernel: int, **fields: object) -> Edit:
    def edit(program: Program, fusion: ProgramFusion) -> Pair:
        kernels = [*fusion.expressions]
        kernels[kernel] = replace(kernels[kernel], **fields)
        return program, replace(fusion, expressions=tuple(kernels))

    return edit


def leave_out_kernel(program: Program, fusion: ProgramFusion) -> Pair:
    return program, replace(fusion, expressions=fusion.expressions[:1])


def read_rows_of_the_matrix(program: Program, fusion: ProgramFusion) -> Pair:
    """The norm is one of whole rows; a panel has only a part of such a row."""
    norm = make_instruction(2, "rms_norm", (SUM,), NORMED)
    first, second, _ = program.instructions
    kernels = (fusion.expressions[0], make_kernel(norm))
    return replace(program, instructions=(first, second, norm)), replace(fusion, expressions=kernels)


FAULTS: dict[str, tuple[str, Edit]] = {
    "the hook runs before the body": ("hooks", set_stages((1,), (0,), (2,))),
    "the second hook runs before the first": ("operands", set_stages((0,), (2,), (1,))),
    "a hook is left out": ("hooks", set_stages((0,), (1,))),
    "a hook runs twice": ("hooks", set_stages((0,), (1,), (1,), (2,))),
    "there is no hook": ("hooks", set_stages((0, 1, 2))),
    "two stages are one": ("hooks", set_stages((0,), (1, 2))),
    "the body has an op with a generated kernel": ("hooks", set_stages((0, 1), (2,))),
    "there is no body": ("hooks", set_stages((), (0,), (1,), (2,))),
    "two kernels have the same instructions": (
        "hooks",
        set_hooked(*2 * [HookedKernel(((0,), (1,), (2,)), HEAD)]),
    ),
    "the stages do not run together": (
        "hooks",
        lambda program, fusion: (program, replace(fusion, order=((0,), (1,), (2,)))),
    ),
    "a hook has no kernel": ("hooks", leave_out_kernel),
    "a panel has a part of a row": ("hooks", set_panel_columns(HEAD // 2)),
    "a panel has one column": ("hooks", set_panel_columns(1)),
    "a panel has no columns": ("hooks", set_panel_columns(0)),
    "panels do not divide the columns": ("hooks", set_panel_columns(2 * HEAD)),
    "a row is in several panels": ("hooks", read_rows_of_the_matrix),
    "the sum is written over the activations": ("hooks", move(SUM, 0, X)),
    "the norm is written over the activations": ("hooks", move(NORMED, 4, X)),
    "the sum is written over the next row of the product": ("hooks", move(SUM, ROW_BYTES, PRODUCT)),
    "the sum is written over the next column of the product": ("hooks", move(SUM, 4, PRODUCT)),
    "the norm is written over the next row of the residual": ("hooks", move(NORMED, ROW_BYTES, RESIDUAL)),
    "the sum is written over the weight": (
        "hooks",
        lambda program, fusion: (
            program,
            replace(
                fusion,
                expressions=(
                    replace(fusion.expressions[0], results=((2, replace(SUM, buffer=1, offset=0)),)),
                    fusion.expressions[1],
                ),
            ),
        ),
    ),
    "the product is read a row later": ("hooks", change_operand(0, 0, offset=PRODUCT.offset + ROW_BYTES)),
    "the product is read with its rows and columns exchanged": (
        "hooks",
        change_operand(0, 0, strides=(1, ROWS)),
    ),
    "the first row of the product is read for all rows": ("hooks", change_operand(0, 0, strides=(0, 1))),
    "the sum is read head by head": (
        "hooks",
        change_operand(1, 0, strides=(HEAD, ROWS * HEAD, 1)),
    ),
    "a hook has half of the rows": ("hooks", change_kernel(0, shape=(ROWS // 2, MATRIX_COLUMNS))),
    "the body needs its scratch memory after the sum": ("hooks", change_body(scratch=SUM)),
    "the result of the body has gaps": (
        "hooks",
        change_body(dst=(replace(PRODUCT, strides=(2 * MATRIX_COLUMNS, 1)),)),
    ),
    "the result of the body is half precision": ("hooks", change_body(dst=(replace(PRODUCT, dtype=DType.F16),))),
    "the body has two results": ("hooks", change_body(dst=(PRODUCT, tensor(8)))),
    "the body is a collective": ("hooks", change_body(op="all_reduce")),
}
"""Faults of a kernel with two hooks, with the rule that finds each."""


def test_a_correct_kernel_with_hooks_has_no_fault():
    assert [*find_fusion_faults(*make_program())] == []


def test_hooks_write_nothing_that_any_instruction_of_their_body_reads():
    inner = tensor(6)
    calls = (
        make_instruction(0, "mul_mat", (WEIGHT, X), inner),
        make_instruction(1, "mul_mat", (WEIGHT, inner), PRODUCT),
        make_instruction(2, "add", (PRODUCT, RESIDUAL), SUM),
    )
    program = replace(make_program()[0], instructions=calls, outputs={"sum": SUM})
    pair = program, ProgramFusion(((0, 1, 2),), (make_kernel(calls[2]),), (HookedKernel(((0, 1), (2,)), 1),))
    assert [*find_fusion_faults(*pair)] == []
    for read in (X, inner):
        assert all(why.startswith("hooks: ") for why in find_fusion_faults(*move(SUM, 0, read)(*pair)))
        assert [*find_fusion_faults(*move(SUM, 0, read)(*pair))]


@pytest.mark.parametrize("result", [PRODUCT, RESIDUAL], ids=["product", "residual"])
def test_a_hook_may_write_over_the_element_that_it_reads(result: Tensor):
    program, fusion = make_program()
    program = replace(program, outputs={"y": NORMED})
    assert [*find_fusion_faults(*move(SUM, 0, result)(program, fusion))] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_of_hooks_is_found_by_its_rule(fault: str):
    rule, plant = FAULTS[fault]
    found = [*find_fusion_faults(*plant(*make_program()))]
    assert found
    assert all(why.startswith(f"{rule}: ") for why in found), found
