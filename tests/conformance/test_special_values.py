"""Each op has cases with infinities, zeros of both signs and subnormal numbers; a result that loses one fails."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends import find_device
from hocket.backends.cupy.device import hiprtc, nvrtc
from hocket.conformance import Outcome, parse_case, run_case
from hocket.conformance.cases.case import Case, make_case
from hocket.conformance.cases.inputs import (
    generate_random_operands,
    has_unquantised_floats,
    make_infinities_zeros_and_subnormals,
)
from hocket.conformance.checks.case_graph import build_case_graph
from hocket.conformance.checks.compare_arrays import compare_with_reference
from hocket.conformance.checks.run_case import replace_permitted_nonfinites_by_reference
from hocket.conformance.checks.tolerance import ErrorBudget, ExpectedResult
from hocket.conformance.generate_cases import generate_full_cases, select_quick_cases
from hocket.frontends.tensors.tensor import merge_equal_nodes
from hocket.graph.dtypes import DType
from hocket.graph.parse import parse_case as parse_point
from hocket.graph.spec import Spec
from hocket.ops import REGISTRY, Op

SPECIAL_INPUTS = ("special", "zeros", "denormal")
CLASSES = {
    "inf": lambda x: x == np.inf,
    "-inf": lambda x: x == -np.inf,
    "0": lambda x: (x == 0) & ~np.signbit(x),
    "-0": lambda x: (x == 0) & np.signbit(x),
    "subnormal": lambda x: (x > 0) & (x < 6e-7),
    "-subnormal": lambda x: (x < 0) & (x > -6e-7),
}
"""Kinds of special values; 6e-7 is above the subnormal numbers that the kit draws and below all its others."""

LOST = (
    "scale(x=f32[3,7], scale=1.0, inputs=zeros)",
    "scale(x=f32[3,7], scale=-0.0, inputs=normal)",
    "neg(x=f32[7,33], inputs=zeros)",
    "sgn(x=f32[7,33], inputs=zeros)",
    "round(x=f32[7,33], inputs=zeros)",
    "expm1(x=f32[7,33], inputs=zeros)",
    "log1p(x=f32[7,33], inputs=zeros)",
    "tanh(x=f32[7,33], inputs=zeros)",
    "relu(x=f32[7,33], inputs=zeros)",
    "elu(x=f32[7,33], inputs=zeros)",
    "reglu(gate=f32[7,33], up=f32[7,33], inputs=zeros)",
    "swiglu_clamp(gate=f32[7,33], up=f32[7,33], limit=2.5, inputs=zeros)",
    "maximum(a=f32[7,33], b=f32[7,33], inputs=zeros)",
    "maximum(a=f32[7,33], b=f32[33], inputs=special, layout=inplace)",
    "minimum(a=f32[7,33], b=f32[7,33], inputs=zeros)",
    "clamp(x=f32[7,33], min=0.0, max=6.0, inputs=zeros)",
    "clamp(x=f32[7,33], min=-0.0, max=0.0, inputs=zeros)",
    "clamp(x=f32[7,33], min=-1.0, max=-0.0, inputs=zeros)",
    "gelu_erf(x=f32[7,33], inputs=special)",
    "softmax(x=f32[2,7,33], inputs=special)",
)
"""Cases that some backend, or the reference, failed once."""


@pytest.mark.long(cases=4)
@pytest.mark.parametrize("name", REGISTRY)
def test_the_cases_of_an_op_are_legal_and_have_special_values_and_elements_of_each_dtype(name: str) -> None:
    """One test looks at all cases of an op, and at the quick run, which selects some of them."""
    _require_legal_points_with_all_samples(REGISTRY[name])
    _require_special_values_of_each_dtype(REGISTRY[name])
    quick = select_quick_cases(REGISTRY[name])
    operands = {operand for case in quick for operand, _ in _floats(case)}
    for kind in SPECIAL_INPUTS:
        assert {operand for case in quick if case.inputs == kind for operand, _ in _floats(case)} == operands
    compared = [case for case in quick if case.check == "reference"]
    covered = {(key, spec.dtype) for case in compared for key, spec in case.operands}
    tried = {(key, spec.dtype) for case in compared for key, spec in case.operands if not case.has_empty_operand}
    only_empty = {(key, dtype) for key, dtype in covered - tried if not (name == "transpose" and dtype.is_quantised)}
    assert only_empty == set()  # rows of blocks can be transposed only where there are none


def _require_legal_points_with_all_samples(op: Op) -> None:
    """The points of an op are its cases that differ in more than inputs, layout and check."""
    points = [
        c for c in generate_full_cases(op) if (c.layout, c.inputs, c.check) == ("contiguous", "normal", "reference")
    ]
    assert {make_case(op, parse_point(text)) for text in op.samples} <= set(points)
    for case in points:
        build_case_graph(case)  # raises where the op refuses it


def _require_special_values_of_each_dtype(op: Op) -> None:
    """Each dtype has cases, and the cases of an operand contain each special value."""
    missing = {(key, kind) for case in generate_full_cases(op) for key in _floats(case) for kind in SPECIAL_INPUTS}
    values = {
        operand: {
            kind
            for kind, holds in CLASSES.items()
            if holds(make_infinities_zeros_and_subnormals(op, operand, dtype)).any()
        }
        for (operand, dtype), _ in missing
    }
    for case in generate_full_cases(op):
        for key in _floats(case):
            missing.discard((key, case.inputs))
        if case.inputs == "special" and any(map(values.get, dict(_floats(case)))):
            operands = generate_random_operands(case)
            for operand, _ in _floats(case):
                values[operand] -= {kind for kind in values[operand] if CLASSES[kind](operands[operand]).any()}
    assert not missing
    assert not any(values.values()), values


def _floats(case: Case) -> list[tuple[str, DType]]:
    return [(operand, spec.dtype) for operand, spec in case.operands if has_unquantised_floats(spec)]


@pytest.mark.parametrize("device", ["reference:0", "numpy:0", "cpu:0"])
@pytest.mark.parametrize("text", LOST)
def test_special_values_are_where_they_belong(text: str, device: str) -> None:
    result = run_case(parse_case(text), *find_device(device))
    assert result.outcome is Outcome.PASS, result


@pytest.mark.parametrize(("wrong", "why"), [(0.0, "zero with the wrong sign"), (-1e-39, ""), (-0.0, "")])
def test_a_zero_needs_the_sign_of_the_reference_if_signed_zeros_is_set(wrong: float, why: str) -> None:
    want, got = np.array([1.0, -1e-60]), np.array([1.0, wrong])
    budget = ErrorBudget(np.full(2, 1e-30), np.full(2, 1e-30))
    found = compare_with_reference(got, want, budget, Spec((2,)), REGISTRY["add"])
    assert why in found.why if why else not found.why
    assert not compare_with_reference(got, want, budget, Spec((2,)), REGISTRY["add"], signed_zeros=False).why


@pytest.mark.parametrize("text", ["neg(x=f32[7], inputs=denormal)", "cast(x=f32[7], dtype=f16, inputs=special)"])
def test_elementwise_ops_keep_signs_and_subnormal_numbers(text: str) -> None:
    assert parse_case(text).needs_signed_zeros_and_subnormals


@pytest.mark.parametrize("text", ["sum_rows(x=f32[2,7])", "mul_mat(w=f32[2,7], x=f32[3,7])", "cont(x=q8_0[32])"])
def test_sums_and_quantised_numbers_keep_neither(text: str) -> None:
    assert not parse_case(text).needs_signed_zeros_and_subnormals


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("mul_mat(w=f16[2,7], x=f32[3,7], inputs=special)", ("w",)),
        ("mul_mat(w=bf16[2,7], x=f32[3,7], inputs=normal)", ()),
        ("mul_mat(w=f32[2,7], x=f32[3,7], inputs=special)", ()),
        ("attention(q=f32[1,4,16], k=f32[9,4,16], v=f32[9,4,16], scale=0.25, inputs=special)", ("k", "v")),
        ("softmax(x=f32[2,3,5], mask=f32[3,5], sinks=f32[2], inputs=special)", ()),
    ],
)
def test_only_operands_of_products_have_infinities_that_become_nan(text: str, operands: tuple[str, ...]) -> None:
    assert parse_case(text).nan_for_infinity_operands == operands
    assert not parse_case(text).can_exchange_nan_and_infinity


@pytest.mark.parametrize(
    ("text", "is_any"),
    [
        ("mul_mat(w=q8_0[2,32], x=f32[3,32], inputs=special)", True),
        ("mul_mat(w=q8_0[2,32], x=f32[3,32], inputs=large)", False),
        ("gated_linear_attn(k=f32[5,2,8], v=f32[5,2,8], q=f32[5,2,8], g=f32[5,2,8], state=f32[2,8,8], scale=0.5,"
         " inputs=special)", True),
        ("cumsum(x=f32[3,7], inputs=special)", False),
    ],
)  # fmt: skip
def test_any_infinity_will_do_in_quantised_products_and_recurrences_only(text: str, is_any: bool) -> None:
    assert parse_case(text).can_exchange_nan_and_infinity is is_any


def test_only_elements_that_an_infinite_weight_reaches_may_be_nan() -> None:
    operands = {"w": np.array([[np.inf, 1.0], [1.0, 2.0]]), "x": np.array([[1.0, 2.0], [np.inf, 1.0]])}
    expected = ExpectedResult(parse_case("mul_mat(w=f16[2,2], x=f32[2,2], inputs=special)"), operands)
    assert expected.mask_nan_from_infinities(0).tolist() == [[True, False], [True, False]]


def test_an_infinity_has_either_sign_or_is_nan_where_rounding_decides() -> None:
    text = "rope(x=f32[1,1,2], pos=i32[1], factors=f32[1], n_dims=2, inputs=special)"
    for factor, is_undecided in ((1e-39, True), (1.0, False)):
        operands = {"x": np.array([[[np.inf, 1.0]]]), "pos": np.array([7]), "factors": np.array([factor])}
        expected = ExpectedResult(parse_case(text), operands)
        want = expected.arrays[0]
        assert np.isinf(want).any()
        for got in (np.where(np.isinf(want), -want, want), np.where(np.isinf(want), np.nan, want)):
            assert (
                np.array_equal(replace_permitted_nonfinites_by_reference(parse_case(text), got, expected, 0), want)
                == is_undecided
            )


@pytest.mark.parametrize("device", ["numpy:0", "cpu:0"])
@pytest.mark.parametrize(("factor", "bias"), [(1.0, 0.0), (-0.0, 0.0), (2.0, -0.0)])
def test_a_scale_without_bias_adds_nothing(factor: float, bias: float, device: str) -> None:
    x = np.array([-0.0, 0.0, 1.0, -1.0], np.float32)
    y = ops.scale(hocket.input("x", x.shape), scale=factor, bias=bias)
    got = hocket.run(hocket.Graph({"y": y}), {"x": x}, devices=device)["y"]
    assert np.array_equal(np.signbit(got), np.signbit(x * np.float32(factor)))


def test_nodes_that_differ_in_the_sign_of_a_zero_are_two() -> None:
    x = hocket.input("x", (3,))
    graph = merge_equal_nodes(hocket.Graph({"a": ops.scale(x, scale=0.0), "b": ops.scale(x, scale=-0.0)}))
    assert graph.outputs["a"].node is not graph.outputs["b"].node
    got = hocket.run(graph, {"x": np.ones(3, np.float32)})
    assert not np.signbit(got["a"]).any()
    assert np.signbit(got["b"]).all()


@pytest.mark.parametrize("options", [nvrtc.OPTIONS, hiprtc.OPTIONS])
def test_device_code_is_compiled_without_flushing(options: tuple[str, ...]) -> None:
    assert not [o for o in options if any(word in o for word in ("ftz", "flush", "fast", "finite", "nsz"))]
