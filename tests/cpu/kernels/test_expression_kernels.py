"""Row kernels that are generated from the scalar language: each bit against NumPy, where each step is one array."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket.backends.base import Tensor, contiguous_strides
from hocket.backends.cpu.compilation import compiler
from hocket.backends.cpu.kernels.vector.elementwise import can_loop_over_rows, make_expression_row_kernel
from hocket.backends.cpu.kernels.vector.expression_kernels import make_expression_kernel
from hocket.backends.cpu.kernels.vector.lower_expressions import LANE_FUNCTIONS, has_lane_code_for_all_functions
from hocket.backends.cpu.kernels.vector.row_kernel_passes import ExpressionKernel
from hocket.backends.fusion.operand_views import with_shape_and_strides
from hocket.backends.fusion.operands import Operand, float32_bits
from hocket.graph import DType, Graph, input
from hocket.ops import REGISTRY, op
from hocket.ops.declaration import scalar
from hocket.ops.declaration.expression import Expression, linearise
from hocket.ops.declaration.numpy_functions import NUMPY_FUNCTIONS
from hocket.ops.declaration.scalar import Scalar
from hocket.ops.reduction.norms import normalise_scores

from ...given.arrays import assert_elements_close, assert_equal_bits
from ...given.packed_rows import call

RNG = np.random.default_rng(17)
OPERANDS = [Scalar("operand", (), index) for index in range(3)]
ROUNDED_FUNCTIONS = (
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "fma",
    "sqrt",
    "absolute",
    "neg",
    "floor",
    "round_half_away",
)
"""Functions that IEEE 754 defines to the last bit."""


def tree(lanes: np.ndarray) -> np.ndarray:
    """The binary tree over the last axis, which has 16 lanes: halves are added."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes


def sum_in_order(x: np.ndarray) -> np.ndarray:
    """The sum of rows as the CPU defines it: one accumulator of 16 lanes, then the tree."""
    padded = np.concatenate([x, np.zeros((len(x), -x.shape[1] % 16), np.float32)], 1).reshape(len(x), -1, 16)
    total = np.zeros((len(x), 16), np.float32)
    for block in range(padded.shape[1]):
        total = total + padded[:, block]
    return tree(total)


def dot_in_order(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The sum of products as the CPU defines it: two accumulators in turn for pairs of blocks, then the first."""
    rows, columns = x.shape
    totals = [np.zeros((rows, 16), np.float32) for _ in range(2)]
    for c in range(0, columns, 16):
        x_block, y_block = (np.zeros((rows, 16), np.float32) for _ in range(2))
        x_block[:, : min(16, columns - c)], y_block[:, : min(16, columns - c)] = x[:, c : c + 16], y[:, c : c + 16]
        which = c // 16 % 2 if c < columns // 32 * 32 else 0
        totals[which] = NUMPY_FUNCTIONS["fma"](x_block, y_block, totals[which], out=None)
    return tree(totals[0] + totals[1])


def evaluate_in_order(expression: Expression, operands: list[np.ndarray]) -> np.ndarray:
    """Evaluate an expression without transcendental functions to the last bit."""
    own = {"row_sum": sum_in_order, "row_dot": dot_in_order}
    whole, values = np.broadcast_shapes(*(o.shape for o in operands)), []
    numbers = expression.compute_number_steps({})
    for number, (function, sources, value) in enumerate(expression.steps):
        if number in numbers:
            values.append(numbers[number] if isinstance(numbers[number], bool) else np.float32(numbers[number]))
        elif function == "operand":
            values.append(np.broadcast_to(operands[int(value)], whole))
        elif function == "row_count":
            values.append(np.float32(whole[-1]))
        elif function in own:
            values.append(own[function](*(np.broadcast_to(values[s], whole) for s in sources)))
        else:
            values.append(NUMPY_FUNCTIONS[function](*(values[s] for s in sources), out=None))
    return np.broadcast_to(values[-1], (*whole[:-1], 1) if expression.reduces_row else whole)


def run_kernel(expression: Expression, operands: list[np.ndarray], out: np.ndarray, threads: int = 1) -> None:
    """Run the kernel of an expression on rows [rows, columns] with any strides; an operand may have one column."""
    plan = ExpressionKernel(expression, tuple(o.shape[1] == 1 != out.shape[1] for o in operands))
    used = [operands[index] for index in plan.operand_indices]
    is_strided = tuple(o.shape[1] != 1 and o.strides[1] != 4 for o in used)
    kernel = make_expression_kernel(expression, tuple(o.shape[1] == 1 for o in used), is_strided)
    columns = max(o.shape[1] for o in (*used, out))
    words: list[object] = [columns, 1, 1, len(out)]
    for array in (*used, out):
        words += [array, 0, 0, array.strides[0], 0 if array.shape[1] == 1 else array.strides[1]]
    words += [float32_bits(expression.compute_number_steps({})[step]) for step in plan.steps_passed_as_words]
    for thread in range(threads):
        assert call(kernel, *words, thread=thread, threads=threads) == 0


def make_random_expression(rng: np.random.Generator, *, is_row: bool) -> Expression:
    """Make an expression of exact functions, and with `is_row` one sum and one dot product in the middle."""
    pool = [*OPERANDS, scalar.as_scalar(0.375)]
    for position in range(10):
        x, y, z = (pool[i] for i in rng.integers(0, len(pool), 3))
        name = ROUNDED_FUNCTIONS[rng.integers(len(ROUNDED_FUNCTIONS))]
        arity = {"fma": 3, "sqrt": 1, "absolute": 1, "neg": 1, "floor": 1, "round_half_away": 1}.get(name, 2)
        pool.append(Scalar(name, (x, y, z)[:arity]))
        if rng.integers(3) == 0:
            pool.append(scalar.where(x < y, pool[-1], z))
        if is_row and position in (3, 6):
            row = OPERANDS[0] + pool[-1] * OPERANDS[1]
            pool.append(scalar.row_dot(row, OPERANDS[2]) if position == 3 else scalar.row_sum(row) / scalar.row_count())
    return linearise(pool[-1] + pool[-2] * (OPERANDS[0] - pool[-3]))


@pytest.mark.long(cases=4)
@pytest.mark.parametrize("seed", range(24))
def test_a_kernel_has_the_bits_of_its_expression(seed: int):
    rng = np.random.default_rng(seed)
    expression = make_random_expression(rng, is_row=seed % 2 == 1)
    for columns in (1, 15, 16, 17, 31, 32, 48, 67):
        shapes = [(5, columns), (5, columns if seed % 3 else 1), (5, columns)]
        operands = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        out = np.full((5, columns), np.nan, np.float32)
        with np.errstate(all="ignore"):
            want = evaluate_in_order(expression, operands)
        run_kernel(expression, operands, out, threads=1 + seed % 3)
        assert_equal_bits(np.where(np.isnan(out), 0, out), np.where(np.isnan(want), 0, want))
        assert np.array_equal(np.isnan(out), np.isnan(want))


@pytest.mark.parametrize("columns", [16, 33, 67])
def test_the_first_pass_copies_strided_elements_to_the_result(columns: int):
    """Each pass after the first one that reads the strided operand reads the copy, so the bits are the same."""
    scores = linearise(normalise_scores(OPERANDS[0], None))
    first, power = OPERANDS[0], scalar.exp(OPERANDS[1])
    dots = [scalar.row_dot(power, first), scalar.row_dot(first, power)]
    stored = [linearise(power * dot) for dot in dots]  # the last reduction writes the exponentials to the result
    centred = scalar.exp(OPERANDS[1] - scalar.row_max(first))
    stored.append(linearise(centred * scalar.row_dot(centred, first)))
    randoms = [make_random_expression(np.random.default_rng(n), is_row=True) for n in range(4)]
    for expression in (scores, *stored, *randoms):
        operands = [RNG.standard_normal((5, columns)).astype(np.float32) for _ in range(3)]
        apart = [np.asfortranarray(operands[0]), *operands[1:]]
        want, out = (np.zeros((5, columns), np.float32) for _ in range(2))
        run_kernel(expression, operands, want)
        run_kernel(expression, apart, out, threads=2)
        assert_equal_bits(out, want)


def test_a_copy_to_the_result_needs_a_result_without_operands_in_its_memory():
    x, r, y = (np.zeros((7, 48), np.float32) for _ in range(3))
    apart, residual, free = make_operand(x, x.T.shape, 0), make_operand(r, r.shape, 1), make_operand(y, y.shape, 2)
    apart = with_shape_and_strides(apart, (7, 48), (1, 7))
    centred = OPERANDS[0] - scalar.row_sum(OPERANDS[0])
    kernel = make_expression_row_kernel(linearise(centred + OPERANDS[1]), [apart, residual], {})
    assert kernel is not None
    assert can_loop_over_rows(kernel, [apart, residual], [free])
    assert not can_loop_over_rows(kernel, [apart, residual], [residual])
    assert not can_loop_over_rows(kernel, [apart, apart], [free])
    power = scalar.exp(OPERANDS[1])
    kernel = make_expression_row_kernel(linearise(power * scalar.row_dot(power, OPERANDS[0])), [apart, residual], {})
    assert kernel is not None
    assert not can_loop_over_rows(kernel, [apart, residual], [free])


def make_operand(array: np.ndarray, shape: tuple[int, ...], buffer: int) -> Operand:
    return Operand(array.ctypes.data, Tensor(buffer, 0, shape, contiguous_strides(shape), DType.F32))


@pytest.mark.parametrize("columns", [1, 16, 33, 100])
def test_reductions_have_the_order_that_the_language_defines(columns: int):
    x, y = (RNG.standard_normal((4, columns)).astype(np.float32) for _ in range(2))
    out = np.zeros((4, 1), np.float32)
    run_kernel(linearise(scalar.row_sum(OPERANDS[0])), [x], out)
    assert_equal_bits(out, sum_in_order(x))
    run_kernel(linearise(scalar.row_dot(OPERANDS[0], OPERANDS[1])), [x, y], out)
    assert_equal_bits(out, dot_in_order(x, y))
    run_kernel(linearise(scalar.row_max(OPERANDS[0])), [x], out)
    assert_equal_bits(out, x.max(-1, keepdims=True))


@pytest.mark.parametrize("columns", [1, 16, 50])
def test_a_row_kernel_works_in_place_and_writes_only_its_columns(columns: int):
    """Exponentials stay in the result from their sum to the last pass, also where the result is the operand."""
    expression = linearise(normalise_scores(OPERANDS[0], None))
    rows = RNG.standard_normal((6, columns + 3)).astype(np.float32)
    x, before = rows[:, :columns], rows.copy()
    apart = np.zeros((6, columns), np.float32)
    run_kernel(expression, [x], apart)
    run_kernel(expression, [x], x, threads=2)
    assert_equal_bits(np.ascontiguousarray(x), apart)
    assert_equal_bits(rows[:, columns:], before[:, columns:])
    e = np.exp(before[:, :columns].astype(np.float64) - before[:, :columns].max(-1, keepdims=True))
    assert_elements_close(apart, e / e.sum(-1, keepdims=True), 2e-6)


def test_a_function_without_code_for_lanes_has_no_kernel():
    assert not has_lane_code_for_all_functions(linearise(scalar.sin(OPERANDS[0])))
    assert has_lane_code_for_all_functions(linearise(OPERANDS[0] * scalar.sin(Scalar("attribute", (), "phase"))))
    assert LANE_FUNCTIONS.keys() <= NUMPY_FUNCTIONS.keys()


def test_the_name_of_a_kernel_changes_with_its_code():
    one, other = linearise(OPERANDS[0] * 0.0), linearise(OPERANDS[0] * -0.0)
    names = {make_expression_kernel(e, kinds).name for e in (one, other) for kinds in ((False,), (True,))}
    assert len(names) == 4


@pytest.mark.parametrize("name", ["gelu", "softmax", "norm", "erf"])
def test_no_instruction_may_be_contracted_or_reordered(name: str):
    declared = REGISTRY[name].expression
    assert declared is not None
    present = [index == 0 for index in range(len(declared.operand_names))]
    kernel = make_expression_kernel(declared.trace(present, REGISTRY[name].defaults), (False,))
    assembly = compiler._emit_llvm_assembly_of_ir_body(kernel)
    assert "fmul" in assembly
    assert not {"fast", "contract", "reassoc", "afn"} & {*assembly.replace("(", " ").split()}


def test_an_op_of_another_package_runs_compiled_by_its_declaration_alone(monkeypatch: pytest.MonkeyPatch):
    @op("x[..., *c], w[c] -> [..., c]", samples=("x=f32[3], w=f32[3]",), errors=())
    def scaled_centre(x: Scalar, w: Scalar, *, shift: float = 0.25) -> Scalar:
        """Return ``w (x - mean(x)) + shift``.  Test, 2026."""
        return scalar.fma(w, x - scalar.row_sum(x) / scalar.row_count(), shift)

    monkeypatch.setattr(REGISTRY, "_ops", {**REGISTRY._ops, "scaled_centre": scaled_centre})
    x, w = RNG.standard_normal((5, 37)).astype(np.float32), RNG.standard_normal(37).astype(np.float32)
    graph = Graph({"y": scaled_centre(input("x", (5, 37)), input("w", (37,)))})
    executor = hocket.load(hocket.plan(graph, "cpu:0"), {})
    assert [kernel.split(".")[0] for kernel in executor.list_kernel_names()] == ["rows"]
    want = w * (x - x.mean(-1, keepdims=True, dtype=np.float64)) + 0.25
    assert_elements_close(executor.run({"x": x, "w": w})["y"], want, atol=1e-6)
