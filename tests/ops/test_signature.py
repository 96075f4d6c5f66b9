"""Signatures are solved for every dimension, and links say truly which axes of a result are which of a source."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hocket import ops
from hocket.graph import DType, GraphError, Spec, Value, input, parse_case
from hocket.ops.declaration.axis_links import AxisLink, link_reshaped_axes
from hocket.ops.declaration.signature import DimensionRole, LeadingAxesBroadcast, SignatureMismatch, parse_signature


def bind(signature: str, *shapes: tuple[int, ...] | None):
    """Sizes of all dimensions for f32 operands of these shapes."""
    return parse_signature(signature).resolve_sizes([None if s is None else Spec(s) for s in shapes])


def results(signature: str, *shapes: tuple[int, ...] | None) -> list[tuple[int, ...]]:
    parsed = parse_signature(signature)
    specs = [None if s is None else Spec(s) for s in shapes]
    return [s.shape for s in parsed.result_specs(specs, parsed.resolve_sizes(specs))]


def refuse(signature: str, *shapes: tuple[int, ...] | None) -> str:
    with pytest.raises(SignatureMismatch) as caught:
        bind(signature, *shapes)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------- reading


def test_every_part_of_the_notation_is_read():
    signature = parse_signature("w[/..., (h g), +k]: weight, x[~..., *c, 1|d, 4]?: f16|i32 -> [..., h]: f32, [c]: w")
    w, x = signature.operands
    assert (w.name, w.leading, w.optional, w.dtypes[:3]) == (
        "w",
        LeadingAxesBroadcast.GROUPED,
        False,
        (DType.F32, DType.F16, DType.BF16),
    )
    assert [(d.factors, d.role, d.may_be_one) for d in w.dims] == [
        (("h", "g"), DimensionRole.PARALLEL, False),
        (("k",), DimensionRole.CONTRACTED, False),
    ]
    assert (x.name, x.leading, x.optional, x.dtypes) == ("x", LeadingAxesBroadcast.TILED, True, (DType.F16, DType.I32))
    assert [(d.factors, d.role, d.may_be_one) for d in x.dims] == [
        (("c",), DimensionRole.COUPLED, False),
        (("d",), DimensionRole.PARALLEL, True),
        (("4",), DimensionRole.PARALLEL, False),
    ]
    assert [(r.leading, r.dtypes, r.dtype_of) for r in signature.results] == [
        (LeadingAxesBroadcast.EQUAL, (DType.F32,), ""),
        (LeadingAxesBroadcast.NONE, (), "w"),
    ]


def test_a_dimension_that_is_looked_up_names_the_operand_by_which():
    signature = parse_signature("w[rows@ids, n], ids[..., k]: index -> [..., k, n]")
    assert signature.indexed_dimension == (signature.operands[0], signature.operands[0].dims[0])
    assert (signature.operands[0].dims[0].role, signature.operands[0].dims[0].index) == (DimensionRole.INDEXED, "ids")
    assert parse_signature("w[rows, n], ids[k] -> [k, n]").indexed_dimension is None


@pytest.mark.parametrize(
    ("signature", "shapes", "result", "axis_counts"),
    [
        ("x[...] -> [...]", [(2, 3, 4)], (2, 3, 4), [3]),
        ("x[..., *n] -> [..., n]", [(2, 3, 4)], (2, 3, 4), [2]),
        ("x[..., (2 n)] -> [..., n]", [(2, 3, 4)], (2, 3, 2), [2]),
        ("a[...], b[~...] -> [...]", [(2, 3, 4), (3, 4)], (2, 3, 4), [3, 0]),
        ("a[...], b[~...] -> [...]", [(2, 3, 4), (2, 1, 4)], (2, 3, 4), [3, 1]),
        ("w[/..., n, +k], x[..., m, +k] -> [..., m, n]", [(3, 3), (2, 3, 3)], (2, 3, 3), [0, 2]),
        ("x[..., v], ids[..., (r v)] -> [..., (r v)]", [(5, 2), (5, 6)], (5, 6), [1, 2]),
        ("x[..., v], ids[..., (r v)] -> [..., (r v)]", [(5, 6), (5, 6)], (5, 6), [2, 2]),
        ("x[+..., n] -> [n]", [(4, 4)], (4,), [0]),
        ("a[n, m] -> [m, n]", [(4, 4)], (4, 4), [0]),
    ],
)
def test_first_axes_of_an_operand_are_those_of_the_result_where_names_say_so(signature, shapes, result, axis_counts):
    parsed = parse_signature(signature)
    sizes = parsed.resolve_sizes([Spec(s, o.dtypes[0]) for s, o in zip(shapes, parsed.operands, strict=True)])
    for operand, shape, maximum in zip(parsed.operands, shapes, axis_counts, strict=True):
        counts = [n for n in range(len(shape) + 1) if parsed.keeps_leading_axes(operand, shape, result, sizes, n)]
        assert counts == list(range(maximum + 1))


@pytest.mark.parametrize("text", ["x[n]", "x[n -> [n]", "x[n]; y[n] -> [n]", "x[n, ...] -> [n]", "x[n!] -> [n]"])
def test_a_mistake_in_a_signature_is_an_error(text):
    with pytest.raises(GraphError):
        parse_signature(text)


# ------------------------------------------------------------------------------------------------------- solving


def test_two_products_with_a_shared_factor_are_solved_from_whichever_is_known():
    """q has h g heads and v has r h: only k has h by itself."""
    text = "q[(h g), d], v[(r h), e], k[h, d] -> [(r g), e]"
    assert bind(text, (8, 4), (6, 5), (2, 4)).by_name == {"h": 2, "g": 4, "r": 3, "d": 4, "e": 5}
    assert results(text, (8, 4), (6, 5), (2, 4)) == [(12, 5)]


def test_a_product_is_solved_in_either_order_of_operands_and_factors():
    for text in ("q[(h g)], k[h] -> [g]", "q[(g h)], k[h] -> [g]"):
        assert results(text, (12,), (3,)) == [(4,)]
    assert results("k[h], q[(h g)] -> [g]", (3,), (12,)) == [(4,)]


def test_a_chain_of_products_is_solved_one_after_the_other():
    assert bind("a[(x y)], b[(y z)], c[(z w)], d[w] -> [x]", (6,), (6,), (10,), (5,)).by_name["x"] == 2


def test_a_product_with_a_number_is_solved():
    assert results("x[(n 2)] -> [n]", (10,)) == [(5,)]
    assert refuse("x[(n 2)] -> [n]", (9,)) == "an axis of x[(n 2)] is 9, which is no product n=? x 2=2"


def test_a_product_that_does_not_divide_names_its_factors():
    assert refuse("q[(h g)], k[h] -> [g]", (8,), (3,)) == "an axis of q[(h g)] is 8, which is no product h=3 x g=?"
    assert "which is no product h=3 x g=2" in refuse("q[(h g)], k[h], l[g] -> [g]", (8,), (3,), (2,))


def test_a_product_of_unknowns_is_refused():
    with pytest.raises(SignatureMismatch):
        bind("q[(h g)] -> [h]", (8,))


@pytest.mark.parametrize(
    ("size", "known", "other"), [(0, 3, 0), (0, 0, 1), (7, 1, 7), (13, 13, 1), (0, 1, 0)], ids=lambda n: str(n)
)
def test_zero_and_one_and_primes_in_a_product(size, known, other):
    assert results("q[(h g)], k[h] -> [g]", (size,), (known,)) == [(other,)]


def test_something_is_no_multiple_of_nothing():
    assert "no product h=0 x g=?" in refuse("q[(h g)], k[h] -> [g]", (3,), (0,))


def test_a_name_has_one_size_everywhere():
    assert refuse("a[n], b[n] -> [n]", (2,), (3,)) == "n is 2 in a[n] but 3 in b[n]"
    assert refuse("a[n, n] -> [n]", (2, 3)) == "n is 2 in a[n, n] but 3 in a[n, n]"
    assert results("a[n, n] -> [n]", (0, 0)) == [(0,)]


def test_a_size_that_is_a_number_is_required():
    assert results("a[4, n] -> [n]", (4, 3)) == [(3,)]
    assert refuse("a[4, n] -> [n]", (5, 3)) == "an axis of a[4, n] is 5; it must be 4"


def test_an_axis_that_may_be_one_is_one_or_the_size():
    text = "g[1|d], q[d] -> [d]"
    assert results(text, (1,), (5,)) == results(text, (5,), (5,)) == [(5,)]
    assert results(text, (1,), (1,)) == [(1,)]
    assert refuse(text, (3,), (5,)) == "d is 3 in g[1|d] but 5 in q[d]"
    assert refuse(text, (0,), (5,)) == "d is 0 in g[1|d] but 5 in q[d]"


def test_leading_axes_are_equal_and_go_to_the_result():
    assert bind("a[..., n], b[..., n] -> [..., n]", (2, 3, 4), (2, 3, 4)).leading == (2, 3)
    assert bind("a[..., n] -> [..., n]", (4,)).batch_size == 1
    assert bind("a[..., n] -> [..., n]", (0, 5, 4)).batch_size == 0
    message = "leading axes are [2] in a[..., n] but [3] in b[..., n]"
    assert refuse("a[..., n], b[..., n] -> [..., n]", (2, 4), (3, 4)) == message
    assert "leading axes are [2] in" in refuse("a[..., n], b[..., n] -> [..., n]", (2, 4), (4,))


@pytest.mark.parametrize("mark", ["~...", "/..."], ids=["tiles", "groups"])
def test_tiles_and_groups_divide_the_leading_axes(mark):
    text = f"b[{mark}, n], a[..., n] -> [..., n]"
    for small in ((), (1,), (3,), (6,), (1, 6), (2, 3), (4, 1), (1, 1)):
        assert bind(text, (*small, 5), (4, 6, 5)).leading == (4, 6)
    assert refuse(text, (4, 5), (4, 6, 5)) == "leading axes [4] of b do not divide [4, 6]"
    assert refuse(text, (1, 4, 6, 5), (4, 6, 5)) == "b has more leading axes, [1, 4, 6], than a, [4, 6]"
    assert refuse(text, (0, 5), (4, 6, 5)) == "leading axes [0] of b do not divide [4, 6]"


def test_anything_tiles_into_an_empty_axis():
    """A device without a share of the repeats has whole tiles and nothing to put them into."""
    text = "a[...], b[~...] -> [...]"
    assert results(text, (0, 3), (1, 3)) == results(text, (0, 3), (0, 3)) == results(text, (0, 3), (2, 3)) == [(0, 3)]


def test_too_few_or_too_many_axes_are_reported():
    assert refuse("a[n, m] -> [n]", (2,)) == "a has rank 1; a[n, m] needs 2"
    assert refuse("a[n, m] -> [n]", (1, 2, 3)) == "a has rank 3; a[n, m] needs 2"
    assert refuse("a[..., n, m] -> [n]", (2,)) == "a has rank 1; a[..., n, m] needs at least 2"


def test_an_optional_operand_says_nothing_when_it_is_missing():
    text = "a[..., n], b[~..., n]?, c[k]? -> [..., n]"
    assert results(text, (2, 3), None, None) == results(text, (2, 3), (3,), (9,)) == [(2, 3)]
    assert "k" not in bind(text, (2, 3), (3,), None).by_name
    assert refuse(text, None, (3,), None) == "operand a is missing"


def test_an_operand_left_out_in_the_middle_or_at_the_end_builds_the_same_node_as_none():
    x, mask, sinks = input("x", (2, 3, 5)), input("m", (3, 5)), input("s", (2,))
    assert ops.softmax(x, None, sinks).node.src == ops.softmax(x, sinks=sinks).node.src == (x, None, sinks)
    assert ops.softmax(x, None, None).node.src == ops.softmax(x).node.src == (x,)
    assert ops.softmax(x, mask=mask).node.src == (x, mask)


def test_dtypes_of_results_follow_the_signature():
    signature = parse_signature("a[n]: any, b[n] -> [n], [n]: b, [n]: i32")
    specs = [Spec((32,), DType.Q8_0), Spec((32,), DType.F16)]
    specs_of_results = signature.result_specs(specs, signature.resolve_sizes(specs))
    assert [s.dtype for s in specs_of_results] == [DType.Q8_0, DType.F16, DType.I32]
    with pytest.raises(SignatureMismatch, match="b is i8; it must be one of f32, f16, bf16"):
        signature.resolve_sizes([Spec((2,)), Spec((2,), DType.I8)])


# --------------------------------------------------------------------------------------------------------- links

# `acc` adds where `set` replaces, so its entries cannot be told by number; it has the links of `set`.
LINKED = [
    (op, text) for op in ops.REGISTRY.values() if op.links is not None and op is not ops.acc for text in op.samples
]
MORE_VIEWS = [
    (ops.reshape, text)
    for text in (
        *("x=f32[2,6,5], shape=(4,3,5)", "x=f32[2,3,4,5], shape=(6,20)", "x=f32[6,20], shape=(2,3,4,5)"),
        *("x=f32[7,1,3], shape=(7,3)", "x=f32[1,7,1], shape=(7,1)", "x=f32[7], shape=(1,1,7,1)", "x=f32[], shape=(1,)"),
        *("x=f32[12,5], shape=(3,4,5)", "x=f32[3,4,5], shape=(3,20)", "x=f32[4,9], shape=(6,6)"),
        *(
            "x=f32[2,0,3], shape=(2,0,5)",
            "x=f32[0], shape=(3,0)",
            "x=f32[13,1], shape=(1,13)",
            "x=f32[2,1,2], shape=(4,)",
        ),
    )
] + [
    (ops.slice_, "x=f32[7,13], axis=-2, start=6, stop=7"),
    (ops.slice_, "x=f32[7,13], axis=1, start=13, stop=13"),
    (ops.broadcast, "x=f32[1,1], shape=(2,1,3)"),
    (ops.broadcast, "x=f32[0,1], shape=(2,0,5)"),
    (ops.concat, "a=f32[0,3], b=f32[2,3], axis=0"),
    (ops.concat, "a=f32[1,1,7], b=f32[1,13,7], axis=-2"),
    (ops.permute, "x=f32[1,7,0,2], axes=(2,0,3,1)"),
]


def flat_index(index: tuple[np.ndarray, ...], axes: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The index along `axes` as one product, outer first."""
    numbers = np.zeros(index[0].shape if index else (1,), np.int64)
    for axis in axes:
        numbers = numbers * shape[axis] + index[axis]
    return numbers


def untrue(link: AxisLink, sources: list[np.ndarray], result: np.ndarray) -> int:
    """How many elements of `result` do not come from where `link` says; every element holds a number of its own."""
    source = sources[link.operand]
    first = int(source.flat[0]) if source.size else 0
    places = np.argwhere((result >= first) & (result < first + source.size))
    at = tuple(places.T)
    index = np.unravel_index(result[at].reshape(-1).astype(np.int64) - first, source.shape) if source.size else at
    long, short = math.prod(source.shape[a] for a in link.source), math.prod(result.shape[a] for a in link.result)
    there, here = flat_index(index, link.source, source.shape), flat_index(at, link.result, result.shape)
    return int(np.sum(there != here + (link.start if long >= short else -link.start)))


def rearrange(op: ops.Op, text: str) -> tuple[tuple[AxisLink, ...], list[np.ndarray], np.ndarray]:
    """The links of a sample, operands filled with distinct numbers, and the result."""
    parts = parse_case(text)
    operands = {k: input(k, s.shape, s.dtype) for k, s in parts.items() if isinstance(s, Spec)}
    value = op(**operands, **{k: v for k, v in parts.items() if not isinstance(v, Spec)})
    assert isinstance(value, Value)
    specs = tuple(s.spec for s in value.node.inputs)
    starts = np.cumsum([1, *(s.size for s in specs)])  # `pad` fills in 0
    arrays = [np.arange(n, n + s.size).reshape(s.shape) for n, s in zip(starts, specs, strict=False)]
    return op.links(specs, value.node.attrs), arrays, op.run_reference(arrays, value.node.attrs)[0]


@pytest.mark.parametrize(("op", "text"), [*LINKED, *MORE_VIEWS], ids=lambda x: x.name if isinstance(x, ops.Op) else x)
def test_elements_of_a_result_come_from_where_its_links_say(op, text):
    links, sources, result = rearrange(op, text)
    for link in links:
        assert untrue(link, sources, result) == 0, link
    for axis in range(result.ndim):
        owners = [(link.operand, link.source) for link in links if axis in link.result]
        assert len(owners) == len(set(owners)), "an axis of a result is linked once to each operand"


def test_the_check_of_links_finds_a_wrong_one():
    _, sources, result = rearrange(ops.slice_, "x=f32[5,6], axis=0, start=2, stop=5")
    assert untrue(AxisLink(0, (0,), (0,), 2), sources, result) == 0
    assert untrue(AxisLink(0, (0,), (0,), 1), sources, result) == result.size
    assert untrue(AxisLink(0, (1,), (0,)), sources, result) > 0
    _, sources, result = rearrange(ops.concat, "a=f32[2,3], b=f32[4,3], axis=0")
    assert untrue(AxisLink(1, (0,), (0,), 2), sources, result) == 0
    assert untrue(AxisLink(1, (0,), (0,), 0), sources, result) == 12


@pytest.mark.parametrize(
    ("source", "result", "axes"),
    [
        ((6, 4), (2, 3, 4), [((0,), (0, 1)), ((1,), (2,))]),
        ((2, 3, 4), (24,), [((0, 1, 2), (0,))]),
        ((2, 3, 4), (2, 3, 4), [((0,), (0,)), ((1,), (1,)), ((2,), (2,))]),
        ((4, 9, 5), (6, 6, 5), [((0, 1), (0, 1)), ((2,), (2,))]),
        ((7,), (7, 1), [((0,), (0,))]),
    ],
)
def test_a_reshape_links_the_shortest_runs_of_axes(source, result, axes):
    assert [(link.source, link.result) for link in link_reshaped_axes(source, result)] == axes
