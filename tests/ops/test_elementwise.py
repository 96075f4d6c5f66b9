"""Results of elementwise, gated, reducing, sorting and arranging ops: small values by hand, ties, edges, algebra."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from hocket import ops
from hocket.graph import Graph, Spec, Value, input, parse_case
from hocket.ops.declaration.numpy_functions import erfc
from hocket.ops.declaration.numpy_functions import error_function as erf
from hocket.ops.declaration.signature import DimensionRole, LeadingAxesBroadcast
from hocket.ops.elementwise.gated_units import GLU_FUNCTIONS
from hocket.scheduler import load, plan

from ..given.arrays import assert_elements_close, assert_equal_bits

INF = math.inf


def run(op, *arrays, **attrs):
    """The reference of an op on lists, attributes settled as a node would have them."""
    return op.run_reference([ops.as_reference_array(np.array(a)) for a in arrays], op.normalise_attributes(attrs))[0]


# ---------------------------------------------------------------------------------------------------------- unary

X = (-20.0, -3.0, -1.0, -0.3, -1e-9, 0.0, 1e-9, 0.3, 1.0, 3.0, 20.0)

ONE_BY_ONE = {
    ops.abs_: abs,
    ops.sgn: lambda x: (x > 0) - (x < 0),
    ops.step: lambda x: float(x > 0),
    ops.sqr: lambda x: x * x,
    ops.exp: math.exp,
    ops.expm1: math.expm1,
    ops.sin: math.sin,
    ops.cos: math.cos,
    ops.floor: math.floor,
    ops.ceil: math.ceil,
    ops.trunc: math.trunc,
    ops.neg: lambda x: -x,
    ops.relu: lambda x: max(x, 0.0),
    ops.elu: lambda x: x if x > 0 else math.expm1(x),
    ops.softplus: lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
    ops.sigmoid: lambda x: 1 / (1 + math.exp(-x)),
    ops.silu: lambda x: x / (1 + math.exp(-x)),
    ops.gelu_quick: lambda x: x / (1 + math.exp(-1.702 * x)),
    ops.gelu_erf: lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    ops.gelu: lambda x: x / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ops.hardsigmoid: lambda x: min(1.0, max(0.0, (x + 3) / 6)),
    ops.hardswish: lambda x: x * min(1.0, max(0.0, (x + 3) / 6)),
    ops.tanh: math.tanh,
}


@pytest.mark.parametrize(("op", "formula"), ONE_BY_ONE.items(), ids=lambda x: getattr(x, "name", ""))
def test_a_unary_op_is_its_formula_at_every_magnitude(op, formula):
    x = [v for v in X if op is not ops.gelu or v > -20]  # exp(2 u) would overflow there in plain Python
    assert_elements_close(run(op, x), [formula(v) for v in x])


def test_roots_and_logarithms_invert_squares_and_exponentials():
    assert_elements_close(run(ops.sqrt, [0.0, 0.25, 2.0, 1e10]), [0.0, 0.5, math.sqrt(2), 1e5])
    assert_elements_close(run(ops.log, [1e-10, 1.0, math.e]), [-10 * math.log(10), 0.0, 1.0], 1e-15)


def test_the_error_function_has_its_known_values():
    assert_elements_close(
        erf(np.array([0.5, 1.0, 3.0])), [0.5204998778130465, 0.8427007929497149, 0.9999779095030014], 1e-15
    )
    assert_elements_close(erfc(np.array([0.5, 5.0])), [0.4795001221869535, 1.5374597944280349e-12], 1e-15)
    x = np.linspace(-6, 6, 1001)
    assert_elements_close(erf(x), [math.erf(v) for v in x], 1e-15)
    assert erf(np.zeros(())).shape == ()
    assert erf(np.zeros((2, 0))).shape == (2, 0)


def test_both_forms_of_gelu_agree_with_the_textbook_form():
    x = np.linspace(-4, 4, 401)
    assert_elements_close(
        run(ops.gelu, x), 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), 1e-10
    )
    assert_elements_close(run(ops.gelu_erf, x), 0.5 * x * (1 + erf(x / math.sqrt(2))), 1e-10)
    assert np.abs(run(ops.gelu, x) - run(ops.gelu_erf, x)).max() < 1e-3


def test_the_kernel_of_gelu_has_single_precision_everywhere():
    x = np.append(np.linspace(-9, 9, 20001), [0.0, 1e-30, -1e-30, 1e4, -1e4, INF]).astype(np.float32)
    for op in (ops.gelu, ops.gelu_erf):
        got = load(plan(Graph({"y": op(input("x", x.shape))}), "cpu:0"), {}).run({"x": x})["y"]
        np.testing.assert_allclose(got, run(op, x), rtol=2e-6, atol=2e-7)


def test_halves_round_away_from_zero():
    x = [-2.5, -1.5, -0.5, -0.49999999999999994, 0.49999999999999994, 0.5, 1.5, 2.5, 4503599627370497.0, INF]
    assert_equal_bits(run(ops.round_, x[:-1]), [-3, -2, -1, 0, 0, 1, 2, 3, 4503599627370497.0])


def test_large_arguments_neither_overflow_nor_warn():
    x = [-1e4, 1e4]
    assert_equal_bits(run(ops.sigmoid, x), [0, 1])
    assert_equal_bits(run(ops.softplus, x), [0, 1e4])
    assert_equal_bits(run(ops.elu, x), [-1, 1e4])
    for op in (ops.silu, ops.gelu, ops.gelu_erf, ops.gelu_quick):
        assert_equal_bits(run(op, x), [0, 1e4])


def test_clamp_leaves_numbers_within_the_bounds():
    assert_equal_bits(run(ops.clamp, [-INF, -1, 0.5, 2, INF], min=-0.5, max=1.0), [-0.5, -0.5, 0.5, 1, 1])
    assert_equal_bits(run(ops.clamp, [-5.0, 5.0], min=-INF, max=0.0), [-5, 0])


def test_leaky_relu_scales_what_is_negative():
    assert_equal_bits(run(ops.leaky_relu, [-2, 0, 3], negative_slope=0.5), [-1, 0, 3])


def test_xielu_takes_the_attributes_of_ggml_xielu():
    n, p, beta, eps = 0.5 + math.log1p(math.exp(0.8)), math.log1p(math.exp(-0.3)), 0.5, -1e-6
    want = [n * (math.expm1(-2.0) + 2.0) - 1.0, n * math.expm1(eps), p * 9.0 + 1.5]
    assert_elements_close(run(ops.xielu, [-2.0, 0.0, 3.0], alpha_n=0.8, alpha_p=-0.3, beta=beta, eps=eps), want)


# ---------------------------------------------------------------------------------------------------------- gated

GATE, UP = [-9.0, -1.0, 0.5, 9.0], [2.0, -9.0, 9.0, 0.25]
GATED = {
    ops.reglu: lambda g, u: max(g, 0) * u,
    ops.geglu: lambda g, u: ONE_BY_ONE[ops.gelu](g) * u,
    ops.geglu_erf: lambda g, u: ONE_BY_ONE[ops.gelu_erf](g) * u,
    ops.geglu_quick: lambda g, u: ONE_BY_ONE[ops.gelu_quick](g) * u,
    ops.swiglu: lambda g, u: ONE_BY_ONE[ops.silu](g) * u,
    ops.swiglu_oai: lambda g, u: min(g, 7) / (1 + math.exp(-1.702 * min(g, 7))) * (min(max(u, -7), 7) + 1),
    ops.swiglu_clamp: lambda g, u: ONE_BY_ONE[ops.silu](min(g, 7)) * min(max(u, -7), 7),
}


@pytest.mark.parametrize(("op", "formula"), GATED.items(), ids=lambda x: getattr(x, "name", ""))
def test_a_gated_unit_is_its_formula_split_joined_and_swapped(op, formula):
    want = [formula(g, u) for g, u in zip(GATE, UP, strict=True)]
    attrs = {"limit": 7.0} if "limit" in op.attribute_types else {}
    assert_elements_close(run(op, GATE, UP, **attrs), want)
    assert_elements_close(run(ops.glu, [GATE + UP], kind=op.name), [want])
    assert_elements_close(run(ops.glu, [UP + GATE], kind=op.name, swapped=True), [want])


def test_every_gated_unit_is_a_kind_of_glu():
    assert set(GLU_FUNCTIONS) == {op.name for op in GATED} == set(ops.glu.signatures)
    assert run(ops.glu, [[1.0, 2.0]], kind="swiglu_oai", alpha=0.0, limit=0.5) == [[0.25 * 1.5]]


# ----------------------------------------------------------------------------------------------- norms, reductions


def test_sums_and_means_of_rows_keep_the_axis():
    x = [[1.0, 2.0, 3.0], [-1.0, 0.5, 0.25]]
    assert_equal_bits(run(ops.sum_rows, x), [[6], [-0.25]])
    assert_equal_bits(run(ops.mean, x), [[2], [-0.25 / 3]])
    assert_equal_bits(run(ops.sum_, x), 5.75)
    assert_equal_bits(run(ops.cumsum, x), [[1, 3, 6], [-1, -0.5, -0.25]])
    assert run(ops.sum_rows, np.zeros((2, 0))).tolist() == run(ops.mean, np.zeros((2, 0))).tolist() == [[0], [0]]
    assert run(ops.sum_, np.zeros((0, 3))) == 0


def test_argmax_takes_the_first_of_equal_entries():
    assert_equal_bits(run(ops.argmax, [[1, 3, 3, 2], [5, 5, 5, 5], [-INF, -INF, -2, -INF]]), [1, 0, 2])


def test_count_equal_counts_and_is_an_i64():
    assert_equal_bits(run(ops.count_equal, [[1, 2], [3, 4]], [[1, 0], [3, 5]]), 2)
    assert str(ops.count_equal(input("a", (3,), "i32"), input("b", (3,), "i32")).spec) == "i64[]"


def test_layer_norm_centres_and_scales():
    x = [[1.0, 2.0, 3.0, 6.0], [5.0, 5.0, 5.0, 5.0]]
    assert_elements_close(run(ops.norm, x[0], eps=0.0), np.array([-2, -1, 0, 3]) / math.sqrt(3.5))
    assert_elements_close(run(ops.norm, x, eps=0.5)[0], np.array([-2, -1, 0, 3]) / 2.0)
    assert_equal_bits(run(ops.norm, x)[1], [0, 0, 0, 0])
    assert_equal_bits(run(ops.norm, np.zeros((2, 0))), np.zeros((2, 0)))


def test_layer_norm_and_group_norm_agree_where_there_is_one_group():
    x = np.random.default_rng(1).standard_normal((2, 6, 3, 4)) + 5
    flat = run(ops.norm, x.reshape(2, 72), eps=1e-6).reshape(x.shape)
    assert_elements_close(run(ops.group_norm, x, groups=1), flat)
    parts = [run(ops.group_norm, x[:, i : i + 2], groups=1) for i in (0, 2, 4)]
    assert_elements_close(run(ops.group_norm, x, groups=3), np.concatenate(parts, axis=1))


def test_groups_that_do_not_divide_the_channels_end_in_a_shorter_one():
    x = np.random.default_rng(2).standard_normal((7, 2, 2))
    parts = [run(ops.group_norm, x[i:j], groups=1) for i, j in ((0, 2), (2, 4), (4, 6), (6, 7))]
    assert_elements_close(run(ops.group_norm, x, groups=4), np.concatenate(parts))
    assert run(ops.group_norm, x, groups=9).shape == (7, 2, 2)


# -------------------------------------------------------------------------------------------------------- sorting


def test_sorting_is_stable_ascending_and_descending():
    x = [3.0, 1.0, 3.0, -INF, 1.0, -0.0, 0.0]
    assert_equal_bits(run(ops.argsort, x), [3, 5, 6, 1, 4, 0, 2])
    assert_equal_bits(run(ops.argsort, x, descending=True), [0, 2, 1, 4, 5, 6, 3])


def test_top_k_is_the_head_of_the_descending_order():
    x = np.random.default_rng(3).integers(0, 5, (4, 3, 20)).astype(float)
    for k in (0, 1, 7, 20):
        assert_equal_bits(run(ops.top_k, x, k=k), run(ops.argsort, x, descending=True)[..., :k])
    assert_equal_bits(run(ops.top_k, [[2, 9, 9, 1]], k=3), [[1, 2, 0]])


# ------------------------------------------------------------------------------------------------------ arranging


def test_repeat_tiles_and_does_not_interleave():
    assert_equal_bits(run(ops.repeat, [[1, 2]], shape=(2, 4)), [[1, 2, 1, 2], [1, 2, 1, 2]])
    assert_equal_bits(run(ops.repeat, [1, 2], shape=(2, 4)), [[1, 2, 1, 2], [1, 2, 1, 2]])
    assert run(ops.repeat, np.zeros((2, 3)), shape=(0, 3)).shape == (0, 3)


def test_pad_adds_zeros_or_goes_round():
    assert_equal_bits(run(ops.pad, [[1, 2]], left=(1, 0), right=(0, 2)), [[0, 0, 0, 0], [1, 2, 0, 0]])
    assert_equal_bits(run(ops.pad, [1, 2, 3], left=(2,), right=(5,), circular=True), [2, 3, 1, 2, 3, 1, 2, 3, 1, 2])
    x = np.arange(12.0).reshape(3, 4)
    assert_equal_bits(
        run(ops.pad, x, left=(1, 2), right=(2, 1), circular=True), np.pad(x, [(1, 2), (2, 1)], mode="wrap")
    )


def test_reflection_does_not_repeat_the_outer_entry():
    assert_equal_bits(run(ops.pad_reflect_1d, [[1, 2, 3, 4]], left=2, right=3), [[3, 2, 1, 2, 3, 4, 3, 2, 1]])


def test_roll_moves_entries_to_higher_indices():
    assert_equal_bits(run(ops.roll, [1, 2, 3, 4], shifts=(1,)), [4, 1, 2, 3])
    assert_equal_bits(run(ops.roll, [[1, 2, 3], [4, 5, 6]], shifts=(1, -1)), [[5, 6, 4], [2, 3, 1]])
    assert_equal_bits(run(ops.roll, [1, 2, 3], shifts=(-7,)), run(ops.roll, [1, 2, 3], shifts=(2,)))


def test_set_replaces_and_acc_adds_a_region():
    a, b = np.ones((3, 4)), [[5, 6], [7, 8]]
    assert_equal_bits(run(ops.set_, a, b, offsets=(1, 2)), [[1, 1, 1, 1], [1, 1, 5, 6], [1, 1, 7, 8]])
    assert_equal_bits(run(ops.acc, a, b, offsets=(1, 2)), [[1, 1, 1, 1], [1, 1, 6, 7], [1, 1, 8, 9]])
    assert ops.acc.links is ops.set_.links


# ----------------------------------------------------------------------------------------- triangles and generators


def test_the_causal_mask_leaves_the_past_and_the_token_itself():
    assert_equal_bits(run(ops.diag_mask_inf, np.ones((2, 4)), n_past=1), [[1, 1, -INF, -INF], [1, 1, 1, -INF]])


def test_the_four_triangles_are_those_of_ggml():
    x = np.arange(1.0, 10).reshape(3, 3)
    assert_equal_bits(run(ops.tri, x, kind="lower"), [[0, 0, 0], [4, 0, 0], [7, 8, 0]])
    assert_equal_bits(run(ops.tri, x, kind="lower_diag"), [[1, 0, 0], [4, 5, 0], [7, 8, 9]])
    assert_equal_bits(run(ops.tri, x, kind="upper"), [[0, 2, 3], [0, 0, 6], [0, 0, 0]])
    assert_equal_bits(run(ops.tri, x, kind="upper_diag"), [[1, 2, 3], [0, 5, 6], [0, 0, 9]])
    assert not np.isnan(run(ops.tri, np.full((2, 2), INF), kind="lower")).any()


def test_diag_keeps_infinities_off_the_other_entries():
    assert_equal_bits(run(ops.diag, [[1, INF], [3, 4]]), [[[1, 0], [0, INF]], [[3, 0], [0, 4]]])


def test_a_triangular_system_is_solved_without_reading_above_the_diagonal():
    a, b = [[2, 99, 99], [1, 4, 99], [-1, 2, 0.5]], [[2.0, 4.0], [9.0, 2.0], [0.0, 1.0]]
    want = [[1.0, 2.0], [2.0, 0.0], [-6.0, 6.0]]
    assert_equal_bits(run(ops.solve_tri, a, b), want)
    rng = np.random.default_rng(4)
    lower = np.tril(rng.standard_normal((2, 9, 9))) + 4 * np.eye(9)
    assert_elements_close(run(ops.solve_tri, lower, lower @ np.ones((2, 9, 3))), np.ones((2, 9, 3)))


def test_arange_counts_exactly():
    assert_equal_bits(run(ops.arange, start=0.0, stop=1.0, step=0.25), [0, 0.25, 0.5, 0.75])
    assert_equal_bits(run(ops.arange, start=3.0, stop=0.5, step=-1.0), [3, 2, 1])
    assert run(ops.arange, start=2.0, stop=1.0).size == 0
    for stop, step in ((1.0, 0.1), (0.3, 0.1), (7.0, 0.7)):
        count = math.ceil(Fraction(stop / step))
        assert ops.arange(start=0.0, stop=stop, step=step).shape == run(ops.arange, start=0, stop=stop, step=step).shape
        assert run(ops.arange, start=0.0, stop=stop, step=step).size == count


def test_fill_takes_shape_and_dtype():
    assert str(ops.fill(input("x", (2, 3), "f16"), value=1.5).spec) == "f16[2,3]"
    assert_equal_bits(run(ops.fill, [[INF, 1.0]], value=-2.0), [[-2, -2]])


def test_timestep_embedding_is_cosines_then_sines_then_a_zero_if_odd():
    t = [0.0, 2.0]
    want = [[1, 1, 0, 0, 0], [math.cos(2), math.cos(0.2), math.sin(2), math.sin(0.2), 0]]
    assert_elements_close(run(ops.timestep_embedding, t, dim=5, max_period=100), want)


# --------------------------------------------------------------------------------------------- algebra, every op


def has_quantised_operands(text):
    return any(isinstance(part, Spec) and part.dtype.is_quantised for part in parse_case(text).values())


SAMPLES = [(op, text) for op in ops.REGISTRY.values() for text in op.samples if not has_quantised_operands(text)]
LINEAR = [(op, text) for op, text in SAMPLES if op.linear and not op.is_view]
# ALiBi's slopes depend on the number of a head, so there heads cannot be cut without passing slopes on.
NAMED = [(op, text) for op, text in SAMPLES if op.infer_spec is None and not op.is_view and "max_bias" not in text]


def node_of(op, text):
    parts = parse_case(text)
    leaves = {k: input(k, s.shape, s.dtype) for k, s in parts.items() if isinstance(s, Spec)}
    built = op(**leaves, **{k: v for k, v in parts.items() if not isinstance(v, Spec)})
    return (built if isinstance(built, Value) else built[0]).node


def legal(op, node, rng):
    """Operands within the declared ranges."""
    sizes = op.resolve_sizes([None if s is None else s.spec for s in node.src], node.attrs).by_name
    arrays = []
    for name, source in zip(op.operand_names, node.src, strict=False):
        bounds = op.ranges.get(name)
        if source is None:
            arrays.append(None)
        elif source.dtype.is_integer:
            high = sizes[bounds.high] if bounds and isinstance(bounds.high, str) else 3
            numbers = rng.integers(0, high, source.shape)
            if bounds and bounds.distinct:
                rows = [rng.permutation(high)[: source.shape[-1]] for _ in range(math.prod(source.shape[:-1]))]
                numbers = np.array(rows, np.int64).reshape(source.shape)
            arrays.append(numbers)
        else:
            arrays.append(rng.uniform(*((bounds.low, bounds.high) if bounds else (-2, 2)), source.shape))
    return arrays


@pytest.mark.parametrize(("op", "text"), LINEAR, ids=lambda x: x.name if isinstance(x, ops.Op) else x)
def test_what_is_declared_linear_is_linear(op, text):
    """The sum of results is the result of the sum, for operands taken one group at a time."""
    node = node_of(op, text)
    rng = np.random.default_rng(5)
    arrays = legal(op, node, rng)
    for group in op.linear_operands(node.attrs):
        at = [op.operand_names.index(name) for name in group.split("+")]
        if any(arrays[i].dtype.kind in "iu" for i in at):
            continue
        first, second = ([rng.standard_normal(a.shape) if i in at else a for i, a in enumerate(arrays)] for _ in "ab")
        both = [a + b if i in at else a for i, (a, b) in enumerate(zip(first, second, strict=True))]
        parts = op.run_reference(first, node.attrs)[0] + op.run_reference(second, node.attrs)[0]
        np.testing.assert_allclose(op.run_reference(both, node.attrs)[0], parts, rtol=1e-9, atol=1e-9)


ZEROS = [(op, text) for op, text in SAMPLES if op.zeros]


@pytest.mark.parametrize(("op", "text"), ZEROS, ids=lambda x: x.name if isinstance(x, ops.Op) else x)
def test_zeros_of_what_is_declared_so_give_zeros_there_and_change_nothing_elsewhere(op, text):
    node = node_of(op, text)
    rng = np.random.default_rng(5)
    arrays = legal(op, node, rng)
    (before,) = op.run_reference(arrays, node.attrs)
    specs = [None if s is None else s.spec for s in node.src]
    for group in op.zeros:
        at = [op.operand_names.index(name) for name in group.split("+")]
        ranks = range(before.ndim + 1)
        count = max(n for n in ranks if all(op.keeps_leading_axes(specs, node.specs[0], node.attrs, i, n) for i in at))
        mask = rng.random(before.shape[:count]) < 0.5
        over = [mask.reshape(mask.shape + (1,) * (a.ndim - count)) for a in (*arrays, before)]
        zeroed = [np.where(over[i], 0.0, a) if i in at else a for i, a in enumerate(arrays)]
        (after,) = op.run_reference(zeroed, node.attrs)
        np.testing.assert_array_equal(after, np.where(over[-1], 0.0, before))


def axes_of(operand, rank, name):
    """Axes of an operand or result that are the dimension `name`; None is the first of the leading axes."""
    extra = rank - len(operand.dims)
    if name is None:
        return [0] if operand.leading is LeadingAxesBroadcast.EQUAL and extra else []
    return [extra + i for i, dim in enumerate(operand.dims) if dim.factors == (name,)]


def halves(arrays, operands, name):
    """The operands cut in two along a dimension: for each part its operands."""
    for half in (0, 1):
        part = list(arrays)
        for i, (array, operand) in enumerate(zip(arrays, operands, strict=False)):
            for axis in axes_of(operand, array.ndim, name) if array is not None else ():
                part[i] = np.split(part[i], [part[i].shape[axis] // 2], axis)[half]
        yield part


@pytest.mark.parametrize(("op", "text"), NAMED, ids=lambda x: x.name if isinstance(x, ops.Op) else x)
def test_dimensions_declared_parallel_can_be_sharded(op, text):
    """Parts of operands cut along a parallel dimension give the parts of the result."""
    node = node_of(op, text)
    signature = op.signature_for(node.attrs)
    arrays = legal(op, node, np.random.default_rng(6))
    whole = op.run_reference(arrays, node.attrs)
    bound = {
        f
        for d in signature.operand_dims
        if d.role is not DimensionRole.PARALLEL or len(d.factors) > 1 or d.may_be_one
        for f in d.factors
    } | set(op.unsharded_dimensions(node.attrs) if op.unsharded_dimensions else ())
    names: list[str | None] = [
        f for d in signature.operand_dims for f in d.factors if f not in bound and not f.isdecimal()
    ]
    if all(o.leading in (LeadingAxesBroadcast.EQUAL, LeadingAxesBroadcast.NONE) for o in signature.operands):
        names.append(None)
    for name in dict.fromkeys(names):
        parts = [op.run_reference(part, node.attrs) for part in halves(arrays, signature.operands, name)]
        for result, want, *shards in zip(signature.results, whole, *parts, strict=True):
            (axis, *more) = axes_of(result, want.ndim, name) or [None]
            if axis is not None:
                assert not more
                np.testing.assert_allclose(np.concatenate(shards, axis), want, rtol=1e-9, atol=1e-12)


def test_a_sum_over_everything_says_that_its_leading_axes_end():
    assert "x[+...] -> []" in ops.sum_.signature_for({}).text
    x = input("x", (3, 5, 4))
    assert ops.sum_.count_flops(ops.sum_(x).node) == 60
    built = plan(Graph({"y": ops.sum_(x)}), "cpu:0")
    got = load(built, {}).run({"x": np.ones((3, 5, 4), np.float32)})["y"]
    assert got.shape == ()
    assert got == 60


def test_the_documentation_of_every_op_here_names_ggml():
    for op in (*ONE_BY_ONE, *GATED, *(ops.glu, ops.norm, ops.group_norm, ops.top_k, ops.set_, ops.acc, ops.tri)):
        assert "ggml: ``" in op.documentation, op.name
