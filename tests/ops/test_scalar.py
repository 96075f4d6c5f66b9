"""The scalar language: expressions, their rounding, their formulas, and NumPy kernels made from them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import hocket
from hocket.backends.numpy.expressions import make_float32_expression_calls, plan_scratch
from hocket.graph import GraphError, input
from hocket.ops import REGISTRY, op, register
from hocket.ops.declaration import scalar
from hocket.ops.declaration.expression import Expression, Step, format_formula, linearise, trace
from hocket.ops.declaration.interpreter import evaluate
from hocket.ops.declaration.numpy_functions import NUMPY_FUNCTIONS
from hocket.ops.declaration.scalar import Scalar

from ..given.arrays import assert_elements_close, assert_equal_bits

RNG = np.random.default_rng(11)
A, B, C = (Scalar("operand", (), index) for index in range(3))
SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38], np.float32)


def test_equal_terms_are_one_step_and_zeros_of_two_signs_are_two():
    assert linearise((A + B) * (A + B)) == linearise((lambda s: s * s)(A + B))
    assert len(linearise((A + B) * (A + B)).steps) == 4
    assert len(linearise(A * 0.0 + B * -0.0).steps) == 7
    assert linearise(A + B) != linearise(B + A)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: linearise(A < B), "must be a number"),
        (lambda: scalar.exp(A < B), "got a truth value"),
        (lambda: A + (B < C), "got a truth value"),
        (lambda: scalar.where(A, B, C), "needs a comparison"),
        (lambda: scalar.where(A < B, A < C, C), "two numbers"),
        (lambda: A if A < B else B, "no truth value"),
        (lambda: linearise(scalar.row_sum(scalar.row_max(A))), "reads a number of the row"),
    ],
)
def test_a_wrong_expression_is_refused_when_it_is_declared(build, message):
    with pytest.raises(TypeError, match=message):
        build()


def test_a_formula_shows_terms_that_occur_twice_once():
    twice = scalar.exp(A - B)
    text = format_formula(linearise(twice / (1.0 + twice) - (A - (B + 2.0)) * -C), ("a", "b", "c"))
    assert text == "t1 = exp(a - b); t1 / (1 + t1) - (a - (b + 2)) * -c"


def test_a_number_of_the_call_is_rounded_once():
    """0.1 + 0.2 - 0.3 is 5.6e-17 in float64; rounded after each step it is 0 or 3e-8 in float32."""
    numbers = [Scalar("attribute", (), name) for name in "pqr"]
    expression = linearise(A * (numbers[0] + numbers[1] - numbers[2]))
    values = expression.compute_number_steps({"p": 0.1, "q": 0.2, "r": 0.3})
    assert values[max(values)] == 0.1 + 0.2 - 0.3
    x = np.ones(3, np.float32)
    assert_equal_bits(run_in_float32(expression, [x], {"p": 0.1, "q": 0.2, "r": 0.3}), x * np.float32(0.1 + 0.2 - 0.3))


def run_in_float32(expression: Expression, operands, attributes=()) -> np.ndarray:
    """Run the calls of the NumPy backend with scratch that holds NaN."""
    plan = plan_scratch(expression, [None if a is None else a.shape for a in operands])
    memory = [np.full(shape, np.nan, np.float32) for shape in plan.shapes]
    shape = next(a.shape for a in operands if a is not None)
    out = np.full((*shape[:-1], 1) if expression.reduces_row else shape, np.nan, np.float32)
    with np.errstate(all="ignore"):
        for run in make_float32_expression_calls(
            expression, operands, expression.compute_number_steps(dict(attributes)), out, plan, memory
        ):
            run()
    return out


def test_fma_rounds_the_exact_sum_once():
    x, y = (RNG.standard_normal(20_000).astype(np.float32) for _ in range(2))
    z = (-x.astype(np.float64) * y * (1 + RNG.choice([0.0, 2.0**-24, -(2.0**-30)], x.size))).astype(np.float32)
    z[::3] = (x * np.float32(2.0**20))[::3]
    found = NUMPY_FUNCTIONS["fma"](x, y, z, out=None)
    for a, b, c, result in zip(x, y, z, found, strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        candidates = [result, np.nextafter(result, np.float32(np.inf)), np.nextafter(result, np.float32(-np.inf))]
        assert abs(Fraction(float(result)) - exact) == min(abs(Fraction(float(n)) - exact) for n in candidates)


def test_fma_keeps_the_double_rounding_out():
    """The float64 sum is a tie of float32, and the exact sum is above it."""
    x, y, z = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12), np.float32(2.0**30)
    tie = np.float32(2.0**-31), np.float32(2.0**-25), np.float32(1 + 2.0**-23)
    for a, b, c in ((x, y, z), tie, (np.float32(2.0**-12 + 2.0**-35), np.float32(2.0**-12), np.float32(1.0))):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        found = NUMPY_FUNCTIONS["fma"](np.full(2, a), np.full(2, b), np.full(2, c), out=None)[0]
        below, above = np.nextafter(found, np.float32(-np.inf)), np.nextafter(found, np.float32(np.inf))
        assert all(abs(Fraction(float(found)) - exact) <= abs(Fraction(float(n)) - exact) for n in (below, above))


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_extrema_order_zeros_and_keep_nan(name):
    x, y = (grid.reshape(-1) for grid in np.meshgrid(SPECIAL, SPECIAL))
    with np.errstate(all="ignore"):
        found = NUMPY_FUNCTIONS[name](x, y, out=None)
    choose = max if name == "maximum" else min
    for a, b, result in zip(x, y, found, strict=True):
        if np.isnan(a) or np.isnan(b):
            assert np.isnan(result)
        else:
            assert_equal_bits(result, choose((a, b), key=lambda v: (v, not np.signbit(v))))


@pytest.mark.parametrize("name", [name for name, op in REGISTRY.items() if op.expression])
def test_a_formula_is_documented(name):
    from hocket.ops.page import format_op_section

    declared = REGISTRY[name]
    formulas = [line for line in format_op_section(declared) if line.startswith("* formula")]
    assert len(formulas) == (0 if name in ("compare", "reduce") else len(declared.signatures))


@pytest.mark.parametrize("reuse", [False, True], ids=["apart", "in place"])
def test_calls_of_numpy_are_the_interpreter_in_float32(reuse):
    """Scratch that is reused too early, or a result that is written too early, changes bits."""
    terms = [A, B, scalar.exp(-A), A * B]
    for seed in range(60):
        rng = np.random.default_rng(seed)
        pool = [*terms]
        for _ in range(12):
            x, y, z = (pool[i] for i in rng.integers(0, len(pool), 3))
            pool.append(
                [x + y, x * y, scalar.larger_of(x, y), scalar.where(x < y, z, x), scalar.fma(x, y, z), x - y][
                    rng.integers(6)
                ]
            )
        total = pool[-1] + pool[-2] * pool[-3]
        expression = linearise(total * scalar.row_sum(scalar.exp(-(total * total))) if seed % 2 else total)
        a, b = (rng.standard_normal((3, 7)).astype(np.float32) for _ in range(2))
        want = step_by_step(expression, [a, b])
        plan = plan_scratch(expression, [a.shape, b.shape])
        memory = [np.full(shape, np.nan, np.float32) for shape in plan.shapes]
        out = a if reuse else np.full_like(a, np.nan)
        with np.errstate(all="ignore"):
            for run in make_float32_expression_calls(
                expression, [a, b], expression.compute_number_steps({}), out, plan, memory
            ):
                run()
        assert_equal_bits(out, want)


def step_by_step(expression: Expression, operands) -> np.ndarray:
    """Evaluate each step to an array of its own, in float32."""
    values: list = []
    with np.errstate(all="ignore"):
        for step in expression.steps:
            if step.function == "operand":
                values.append(operands[step.value])
            elif step.function == "constant":
                values.append(np.float32(float.fromhex(step.value)))
            else:
                values.append(NUMPY_FUNCTIONS[step.function](*(values[s] for s in step.sources), out=None))
    return values[-1]


def test_a_row_of_only_negative_infinity_has_a_softmax_of_zeros():
    softmax = REGISTRY["softmax"]
    x = np.full((1, 2, 4), -np.inf)
    x[0, 1, 2] = 5.0
    assert_elements_close(softmax.run_reference([x], softmax.defaults)[0][0], [[0, 0, 0, 0], [0, 0, 1, 0]])


def test_an_op_of_another_module_is_declared_in_the_language():
    @op("x[..., *c], w[c] -> [..., c]", samples=(), errors=())
    def weighted_share(x: Scalar, w: Scalar, *, power: float = 1.0) -> Scalar:
        """Return ``w x`` over the sum of the row, to a power.  Test, 2026."""
        return power * (w * x) / scalar.row_sum(w * x)

    x, w = RNG.uniform(1, 2, (3, 5)), RNG.uniform(1, 2, 5)
    want = 2.5 * w * x / (w * x).sum(-1, keepdims=True)
    assert_elements_close(weighted_share.run_reference([x, w], {"power": 2.5})[0], want, 1e-14)
    assert weighted_share(input("x", (3, 5)), input("w", (5,))).shape == (3, 5)
    with pytest.raises(GraphError, match="no operand or attribute powr"):
        weighted_share(input("x", (3, 5)), input("w", (5,)), powr=2.0)
    assert weighted_share.expression is not None
    assert weighted_share.expression.format(weighted_share.defaults) == "t1 = w * x; power * t1 / row_sum(t1)"


def test_an_absent_operand_and_an_attribute_that_is_no_number_select_the_expression():
    declared, attributes = REGISTRY["softmax"].expression, REGISTRY["softmax"].defaults
    assert declared is not None
    without_count = declared.trace([True, False, False, False], attributes)
    assert without_count != declared.trace([True, False, True, False], attributes)
    swiglu, glu = REGISTRY["swiglu"].expression, REGISTRY["glu"].expression
    assert swiglu is not None
    assert glu is not None
    attributes = {**REGISTRY["glu"].defaults, "kind": "swiglu"}
    assert glu.trace([True, True], attributes) == swiglu.trace([True, True], {})
    assert trace(scalar.silu, (True,), (), ()).steps[0] == Step("operand", (), 0)


def test_an_empty_row_has_the_mean_zero():
    mean = REGISTRY["mean"].expression
    assert mean is not None
    assert_elements_close(evaluate(mean.trace([True], {}), [np.zeros((3, 0))], {}), np.zeros((3, 1)))


@pytest.mark.parametrize("signature", ["x[...] -> [...]", "x[..., c] -> [..., c]"])
def test_rows_that_devices_may_share_are_refused(signature):
    def share(x: Scalar) -> Scalar:
        return x / scalar.row_sum(x)

    with pytest.raises(GraphError, match=r"declare the last axis as \*c"):
        op(signature)(share)(input("x", (2, 8)))
    assert op("x[..., *c] -> [..., c]")(share)(input("x", (2, 8))).shape == (2, 8)


def _declare(function, signature="x[...] -> [...]", **more):
    function.__annotations__["return"] = "Scalar"
    function.__name__ = "declared_wrong"
    return op(signature, **more)(function)


def _return_row_sum(x):
    return scalar.row_sum(x)


def _ask_zero(x):
    if x == 0.0:
        return x
    return x + 1.0


def _call_itself(x):
    return _call_itself(x)


def _raise_two_lines(x):
    raise ValueError("first\nsecond")


@pytest.mark.parametrize(
    ("function", "signature", "problem"),
    [
        (lambda x: 1.5, "x[...] -> [...]", "must be a Scalar of its operands, but is 1.5"),
        (lambda x: None, "x[...] -> [...]", "must be a Scalar of its operands, but is None"),
        (
            lambda x: (x, x),
            "x[...] -> [...]",
            "must be a Scalar of its operands, but is (Scalar('operand'), Scalar('op",
        ),
        (lambda x: x < 1.0, "x[...] -> [...]", "is a truth value; use where"),
        (lambda x: scalar.row_count(), "x[..., *c] -> [..., c]", "one number for each row of x[..., *c], but"),
        (lambda x: x + None, "x[...] -> [...]", "None is no number"),
        (lambda x: x**2, "x[...] -> [...]", "unsupported operand type"),
        (lambda x: max(x, 0.0), "x[...] -> [...]", "no truth value while an op is declared"),
        (_ask_zero, "x[...] -> [...]", "no truth value while an op is declared"),
        (_call_itself, "x[...] -> [...]", "RecursionError"),
        (_raise_two_lines, "x[...] -> [...]", "ValueError: first second"),
        (lambda x, y: x + y, "x[...] -> [...]", "the signature has 1 operand, the function has 2"),
        (_return_row_sum, "x[..., *c] -> [..., c]", "one number for each row of x[..., *c], but the signature"),
        (_return_row_sum, "x[...] -> [...]", "declare the last axis as *c"),
        (lambda x: x, "x[..., a, b] -> [..., b, a]", "one number for each element of x[..., a, b], but"),
        (lambda x: x, "x[..., c] -> [..., 1]", "one number for each element of x[..., c], but"),
        (lambda x: x, "x[...] -> [...]: i32", "may be i32; a Scalar is a float"),
    ],
)
def test_a_wrong_declaration_is_refused_in_one_line_that_names_the_op(function, signature, problem):
    declared = _declare(function, signature)
    with pytest.raises(GraphError) as caught:
        register(declared)
    assert str(caught.value).startswith("declared_wrong: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "declared_wrong" not in REGISTRY
    if "i32" not in signature:
        with pytest.raises(GraphError, match=r"^declared_wrong\(") as built:
            declared(input("x", (2, 3)), *[input("y", (2, 3))] * (function.__code__.co_argcount - 1))
        assert "\n" not in str(built.value)


def test_an_absent_operand_that_the_function_reads_is_refused_when_the_node_is_built():
    declared = _declare(lambda x, y: x + y, "x[...], y[...]? -> [...]")
    with pytest.raises(GraphError, match=r"^declared_wrong\(%x.*None is no number"):
        declared(input("x", (2, 3)))
    assert declared(input("x", (2, 3)), input("y", (2, 3))).shape == (2, 3)


def test_an_attribute_without_annotation_is_refused():
    def power(x, *, exponent):
        return x

    with pytest.raises(GraphError, match=r"^declared_wrong: attribute exponent has no annotation"):
        _declare(power)


def test_equal_numbers_are_selected_with_where():
    expression = linearise(scalar.where(A == 0.0, B, A) + scalar.where(A != B, 1.0, 2.0))
    a, b = np.array([0.0, -0.0, 1.0, 3.0, np.nan]), np.array([5.0, 6.0, 1.0, 2.0, np.nan])
    want = np.where(a == 0, b, a) + np.where(a != b, 1.0, 2.0)
    assert_elements_close(evaluate(expression, [a, b], {}), want)


@pytest.mark.long
@pytest.mark.parametrize("device", ["reference:0", "numpy:0", "cpu:0"])
def test_a_chain_of_thousands_of_steps_is_computed(device):
    """Walks over an expression have no recursion; the limit of Python is 1,000 calls."""

    def add_often(x: Scalar) -> Scalar:
        total = x
        for _ in range(2000):
            total = total + x
        return total

    name = f"chain_{device.partition(':')[0]}"
    add_often.__name__ = name
    y = register(op("x[...] -> [...]")(add_often))(input("x", (5,)))
    try:
        x = np.arange(5, dtype=np.float32)
        assert_equal_bits(hocket.run(hocket.Graph({"y": y}), {"x": x}, devices=device)["y"], x * 2001)
    finally:
        del REGISTRY._ops[name]
