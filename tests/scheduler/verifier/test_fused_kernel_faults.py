"""The verifier of fused kernels: correct ones pass, and each planted fault is found by the rule that its row names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.base import BufferSpec, Instruction, Program, Tensor, contiguous_strides
from hocket.backends.capabilities import FusedExpression, ProgramFusion
from hocket.backends.cpu.backend import CpuBackend
from hocket.graph import DType
from hocket.ops import REGISTRY
from hocket.scheduler.verifier.fused_kernels import find_fusion_faults
from hocket.scheduler.verifier.fused_terms import compose_axes

from ...given.fusion_faults import FUSION_FAULTS, FusionFault
from ...given.fusion_faults.programs import GRAPH_BUILDERS, build_fused_program

Planted = Callable[[Program, ProgramFusion], tuple[Program, ProgramFusion]]
ROWS, COLUMNS = 4, 24


def plan_program(graph: hocket.Graph) -> tuple[Program, ProgramFusion]:
    """The program of a graph on one CPU device, and its fused kernels."""
    backend = CpuBackend(1)
    program = hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]).device_plans[0].program
    return program, backend.describe_fusion(program)


def make_norm_program() -> tuple[Program, ProgramFusion]:
    """One kernel of seven ops with two results: a sum that is kept, and its scaled norm under a gate."""
    x, r = (hocket.input(name, (ROWS, COLUMNS)) for name in "xr")
    total = ops.sub(x, r)
    normed = ops.mul(ops.rms_norm(total, eps=1e-5), hocket.weight("w", (COLUMNS,)))
    gated = ops.add(ops.mul(ops.neg(normed), r), ops.scale(total, scale=0.5, bias=1.0))
    return plan_program(hocket.Graph({"total": total, "gated": gated}))


def make_instructions(*rows: tuple[str, str, str], outputs: str = "") -> Program:
    """Instructions ``(op, operands, result)`` over places of 16 floats, which have letters; the last one is kept."""

    def tensor(name: str) -> Tensor:
        return Tensor(0, 64 * (ord(name) - ord("a")), (1, 16), (16, 1), DType.F32)

    instructions = tuple(
        Instruction(op, tuple(map(tensor, src)), (tensor(dst),), REGISTRY[op].defaults, None, dst, number)
        for number, (op, src, dst) in enumerate(rows)
    )
    retained = {name: tensor(name) for name in outputs or rows[-1][2]}
    return Program((BufferSpec("arena", "", 64 * 26),), instructions, {}, retained)


def describe(program: Program) -> ProgramFusion:
    return CpuBackend(1).describe_fusion(program)


def change(fusion: ProgramFusion, **fields: object) -> ProgramFusion:
    """Replace fields of the first fused kernel."""
    first, *others = fusion.expressions
    return replace(fusion, expressions=(replace(first, **fields), *others))


def change_step(function: str, new: Callable[[FusedExpression, int], tuple]) -> Planted:
    """Replace the first step with a function; `new` gets the kernel and the number of the step."""

    def plant(program: Program, fusion: ProgramFusion) -> tuple[Program, ProgramFusion]:
        kernel = fusion.expressions[0]
        at = next(n for n, step in enumerate(kernel.steps) if step[0] == function)
        return program, change(fusion, steps=(*kernel.steps[:at], new(kernel, at), *kernel.steps[at + 1 :]))

    return plant


def swap_operands(kernel: FusedExpression, at: int) -> tuple:
    function, sources, value = kernel.steps[at]
    return function, sources[::-1], value


def drop_node(kernel: FusedExpression, at: int) -> tuple:
    return kernel.steps[kernel.steps[at][1][0]]


def round_once(kernel: FusedExpression, at: int) -> tuple:
    """The addition with the product that it reads, as one rounding."""
    product, other = kernel.steps[at][1]
    return "fma", (*kernel.steps[product][1], other), ""


def other_function(name: str) -> Callable[[FusedExpression, int], tuple]:
    return lambda kernel, at: (name, *kernel.steps[at][1:])


def other_value(value: int | str) -> Callable[[FusedExpression, int], tuple]:
    return lambda kernel, at: (*kernel.steps[at][:2], value)


def change_kernel(make: Callable[[FusedExpression], dict]) -> Planted:
    return lambda program, fusion: (program, change(fusion, **make(fusion.expressions[0])))


def change_weight(new: Callable[[Tensor], Tensor]) -> Planted:
    """Replace the view of the operand that is a weight."""
    return change_kernel(lambda k: {"operands": tuple(new(t) if t.buffer else t for t in k.operands)})


def reshape_rows(kernel: FusedExpression) -> dict:
    """The same elements in rows of half the length."""
    shape = (2 * ROWS, COLUMNS // 2)

    def view(t: Tensor) -> Tensor:
        dense = t.strides == contiguous_strides(t.shape)
        return replace(t, shape=shape, strides=contiguous_strides(shape) if dense else (0, 1))

    return {
        "shape": shape,
        "operands": tuple(map(view, kernel.operands)),
        "results": tuple((step, view(t)) for step, t in kernel.results),
    }


def move(t: Tensor, nbytes: int) -> Tensor:
    return replace(t, offset=t.offset + nbytes)


def lie_across_an_operand(kernel: FusedExpression) -> dict:
    (step, result), *others = kernel.results
    operand = next(t for t in kernel.operands if t.buffer == result.buffer)
    return {"results": ((step, replace(result, offset=operand.offset + 4)), *others)}


def write_the_state(program: Program, fusion: ProgramFusion) -> tuple[Program, ProgramFusion]:
    """All results lie in a buffer that is a state."""
    arena, *others = program.buffers
    state = BufferSpec("state", "s", arena.nbytes)

    def there(t: Tensor | None) -> Tensor:
        assert t is not None
        return replace(t, buffer=len(program.buffers)) if t.buffer == 0 else t

    calls = tuple(replace(i, src=tuple(map(there, i.src)), dst=tuple(map(there, i.dst))) for i in program.instructions)
    outputs = {name: there(t) for name, t in program.outputs.items()}
    kernel = fusion.expressions[0]
    results = tuple((step, there(t)) for step, t in kernel.results)
    changed = change(fusion, operands=tuple(map(there, kernel.operands)), results=results)
    return replace(program, buffers=(arena, *others, state), instructions=calls, outputs=outputs), changed


NORM_FAULTS: dict[str, tuple[str, Planted]] = {
    "operands of a difference are swapped": ("expression", change_step("sub", swap_operands)),
    "operands of a division are swapped": ("expression", change_step("div", swap_operands)),
    "a negation is dropped": ("expression", change_step("neg", drop_node)),
    "a root is dropped": ("expression", change_step("sqrt", drop_node)),
    "a product and a sum are rounded once": ("expression", change_step("add", round_once)),
    "a sum is a maximum": ("expression", change_step("row_dot", other_function("row_max"))),
    "a product is a sum": ("expression", change_step("mul", other_function("add"))),
    "a constant is another one": ("expression", change_step("constant", other_value((2.0).hex()))),
    "an operand is another one": ("expression", change_step("operand", other_value(1))),
    "an operand does not exist": ("operands", change_step("operand", other_value(9))),
    "a number of the call does not exist": ("expression", change_step("attribute", other_value("9.eps"))),
    "a number of the call is another one": (
        "expression",
        change_kernel(lambda k: {"attributes": {name: value + 1e-7 for name, value in k.attributes.items()}}),
    ),
    "numbers of the call are exchanged": (
        "expression",
        change_kernel(
            lambda k: {"attributes": dict(zip(k.attributes, reversed(k.attributes.values()), strict=True))},
        ),
    ),
    "a sum is over rows of half the length": ("expression", change_kernel(reshape_rows)),
    "a step reads itself": ("expression", change_step("neg", lambda k, at: ("neg", (at,), ""))),
    "an operand begins an element later": (
        "expression",
        change_weight(lambda t: replace(t, offset=4)),
    ),
    "rows of an operand are not repeated": (
        "expression",
        change_weight(lambda t: replace(t, strides=(1, 1))),
    ),
    "a view has another shape": (
        "operands",
        change_weight(lambda t: replace(t, shape=(1, COLUMNS))),
    ),
    "a result is not written": ("results", change_kernel(lambda k: {"results": k.results[1:]})),
    "a result is written elsewhere": (
        "results",
        change_kernel(lambda k: {"results": (*k.results[1:], (k.results[0][0], move(k.results[0][1], 1 << 16)))}),
    ),
    "a place is written that is no result": (
        "results",
        change_kernel(lambda k: {"results": (*k.results, (k.results[0][0], move(k.results[0][1], 1 << 16)))}),
    ),
    "results are exchanged": (
        "expression",
        change_kernel(
            lambda k: {"results": tuple((k.results[1 - n][0], t) for n, (_, t) in enumerate(k.results))},
        ),
    ),
    "a result is no step": ("expression", change_kernel(lambda k: {"results": tuple((99, t) for _, t in k.results)})),
    "a result lies across an operand": ("in place", change_kernel(lie_across_an_operand)),
    "two results lie in one place": (
        "in place",
        change_kernel(lambda k: {"results": tuple((step, k.results[0][1]) for step, _ in k.results)}),
    ),
    "a state is written": ("states", write_the_state),
    "an instruction is left out": (
        "order",
        lambda program, fusion: (program, replace(fusion, order=fusion.order[:-1])),
    ),
    "an instruction runs twice": (
        "order",
        lambda program, fusion: (program, replace(fusion, order=(*fusion.order, fusion.order[0]))),
    ),
    "instructions of a kernel run apart": (
        "order",
        lambda program, fusion: (program, replace(fusion, order=tuple((n,) for group in fusion.order for n in group))),
    ),
}
"""Faults of a kernel with two results, with the rule that finds each."""


def test_a_correct_kernel_has_no_fault():
    program, fusion = make_norm_program()
    (kernel,) = fusion.expressions
    assert len(kernel.instruction_numbers) == len(program.instructions) == 7
    assert len(kernel.results) == 2
    assert [*find_fusion_faults(program, fusion)] == []


@pytest.mark.parametrize("fault", NORM_FAULTS)
def test_each_planted_fault_of_a_kernel_is_found_by_its_rule(fault: str):
    rule, plant = NORM_FAULTS[fault]
    found = [*find_fusion_faults(*plant(*make_norm_program()))]
    assert any(f"{rule}: " in why for why in found), found


def make_repeating_program() -> tuple[Program, ProgramFusion]:
    """One kernel with factors per channel, which it computes from a weight per channel and repeats over the images."""
    factors = ops.sqrt(ops.scale(hocket.input("w", (6,)), scale=2.0))
    x = hocket.input("x", (2, 6, 3, 5))
    return plan_program(hocket.Graph({"y": ops.mul(x, ops.reshape(factors, shape=(6, 1, 1)))}))


REPEATED_FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "repeated over other axes": lambda t: replace(t, strides=(0, 0, 1, 0)),
    "repeated in tiles": lambda t: replace(t, strides=(0, 0, 0, 1)),
    "not repeated": lambda t: replace(t, strides=contiguous_strides(t.shape)),
    "of another channel": lambda t: replace(t, offset=t.offset + 4),
}


@pytest.mark.parametrize("fault", REPEATED_FAULTS)
def test_each_wrong_operand_of_a_repeated_value_is_found(fault: str):
    program, fusion = make_repeating_program()
    (kernel,) = fusion.expressions
    assert [*find_fusion_faults(program, fusion)] == []
    (at,) = (n for n, tensor in enumerate(kernel.operands) if tensor.strides == (0, 1, 0, 0))
    wrong = (*kernel.operands[:at], REPEATED_FAULTS[fault](kernel.operands[at]), *kernel.operands[at + 1 :])
    assert any("expression: " in why for why in find_fusion_faults(program, change(fusion, operands=wrong)))


def make_permuting_program() -> tuple[Program, ProgramFusion]:
    """One kernel that sums the columns of a product: it reads the product, which is not written, with permuted axes."""
    x, y = hocket.input("x", (2, 5, 6)), hocket.input("y", (5, 1))
    columns = ops.sum_rows(ops.permute(ops.mul(ops.neg(x), y), axes=(2, 0, 1)))
    return plan_program(hocket.Graph({"y": ops.scale(columns, scale=2.0)}))


PERMUTED_FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "in the order of memory": lambda t: replace(t, strides=contiguous_strides(t.shape)),
    "with exchanged axes": lambda t: replace(t, strides=(5, 30, 1)),
    "of the next column": lambda t: replace(t, offset=t.offset + 4),
    "of one row": lambda t: replace(t, strides=(1, 30, 0)),
}


@pytest.mark.parametrize("fault", PERMUTED_FAULTS)
def test_each_wrong_operand_of_a_permuted_value_is_found(fault: str):
    program, fusion = make_permuting_program()
    (kernel,) = fusion.expressions
    assert len(kernel.instruction_numbers) == 4
    assert [*find_fusion_faults(program, fusion)] == []
    (at,) = (n for n, tensor in enumerate(kernel.operands) if tensor.strides == (1, 30, 6))
    wrong = (*kernel.operands[:at], PERMUTED_FAULTS[fault](kernel.operands[at]), *kernel.operands[at + 1 :])
    assert any("expression: " in why for why in find_fusion_faults(program, change(fusion, operands=wrong)))


@pytest.mark.parametrize("seed", range(20))
def test_composed_axes_address_the_same_elements(seed: int):
    rng = np.random.default_rng(seed)
    shape = rng.integers(1, 4, rng.integers(0, 4))
    strides = rng.integers(0, 50, len(shape))
    value = sum((s * i for s, i in zip(strides, np.indices(shape), strict=True)), np.zeros(shape, int))
    sizes, steps = [], []
    for count in shape if rng.integers(2) else [value.size]:
        sizes += [*rng.integers(1, 4, 1), count]
        steps += [0, 1]
    dense = np.cumprod([n if step else 1 for n, step in zip(sizes[::-1], steps[::-1], strict=True)][:-1])[::-1]
    steps = [step * d for step, d in zip(steps, [*dense, 1], strict=True)] if sizes else []
    pairs = [(int(n), int(s)) for n, s in zip(sizes, steps, strict=True) if n > 1]
    outer = tuple(pairs[axis] for axis in rng.permutation(len(pairs)))
    read = np.lib.stride_tricks.as_strided(
        np.ascontiguousarray(value), [n for n, _ in outer], [value.itemsize * s for _, s in outer]
    )
    axes = compose_axes(outer, tuple((int(n), int(s)) for n, s in zip(shape, strides, strict=True) if n > 1))
    assert axes is not None
    found = sum(
        (s * i for (_, s), i in zip(axes, np.indices([n for n, _ in axes]), strict=True)),
        np.zeros([n for n, _ in axes], int),
    )
    assert np.array_equal(found.ravel(), read.ravel())


def reorder(*order: tuple[int, ...]) -> Planted:
    return lambda program, fusion: (program, replace(fusion, order=order, hooked=()))


ORDER_FAULTS: dict[str, tuple[str, Program, Planted]] = {
    "a value is read after another one is written over it": (
        "operands",
        make_instructions(("neg", "a", "b"), ("mul", "ba", "c"), ("mul_mat", "de", "a"), outputs="ca"),
        reorder((2,), (0, 1)),
    ),
    "a value is read before it is written": (
        "operands",
        make_instructions(("mul_mat", "ab", "c"), ("neg", "c", "d"), ("abs", "d", "e")),
        reorder((1, 2), (0,)),
    ),
    "an output is overwritten": (
        "operands",
        make_instructions(("mul_mat", "ad", "c"), ("neg", "a", "b"), ("abs", "b", "c")),
        reorder((1, 2), (0,)),
    ),
    "a group passes a collective": (
        "order",
        make_instructions(("neg", "a", "b"), ("abs", "b", "c"), ("all_reduce", "d", "e"), ("exp", "e", "f")),
        reorder((2,), (0, 1), (3,)),
    ),
    "a group is on both sides of a collective": (
        "order",
        make_instructions(("neg", "a", "b"), ("all_reduce", "d", "e"), ("exp", "b", "f"), outputs="ef"),
        reorder((0, 2), (1,)),
    ),
}
"""Orders of small programs, with the rule that finds each."""


@pytest.mark.parametrize("fault", ORDER_FAULTS)
def test_each_planted_order_is_found_by_its_rule(fault: str):
    rule, program, plant = ORDER_FAULTS[fault]
    fusion = describe(program)
    assert [*find_fusion_faults(program, fusion)] == []
    found = [*find_fusion_faults(*plant(program, fusion))]
    assert any(f"{rule}: " in why for why in found), found


@pytest.mark.parametrize("name", GRAPH_BUILDERS)
def test_a_program_without_a_planted_fault_is_correct(name: str):
    assert not [*find_fusion_faults(*build_fused_program(name))]


@pytest.mark.parametrize("fault", FUSION_FAULTS, ids=lambda fault: fault.name)
def test_each_fault_that_was_planted_blindly_is_found_by_its_rule(fault: FusionFault):
    faults = [*find_fusion_faults(*fault.plant())]
    assert any(fault.message in found for found in faults), faults


def test_a_plan_with_a_wrong_kernel_is_refused(monkeypatch: pytest.MonkeyPatch):
    right = CpuBackend.describe_fusion

    def describe_wrongly(self: CpuBackend, program: Program) -> ProgramFusion:
        return change_step("sub", swap_operands)(program, right(self, program))[1]

    monkeypatch.setattr(CpuBackend, "describe_fusion", describe_wrongly)
    with pytest.raises(hocket.PlanError, match=r"device 0: kernel of instructions 0, 1, .*: expression: "):
        make_norm_program()
