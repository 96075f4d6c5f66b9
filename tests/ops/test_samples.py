"""Samples and errors of all ops: results are inferred and computed as declared, errors have their message."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hocket import ops
from hocket.graph import DType, GraphError, Spec, Value, input, parse_case
from hocket.ops.declaration.signature import DimensionRole, LeadingAxesBroadcast

SAMPLES = [(op, text) for op in ops.REGISTRY.values() for text in op.samples]
ERRORS = [(op, text, message) for op in ops.REGISTRY.values() for text, message in op.errors]


SOURCE = re.compile(r"ggml|, (19|20)\d\d\b")


def build(op: ops.Op, text: str):
    parts = parse_case(text)
    operands = {k: input(k, s.shape, s.dtype) for k, s in parts.items() if isinstance(s, Spec)}
    attrs = {k: v for k, v in parts.items() if not isinstance(v, Spec)}
    built = op(**operands, **attrs)
    return (built if isinstance(built, Value) else built[0]).node


def random_array(spec: Spec, legal: ops.Range | None, sizes, rng) -> np.ndarray:
    if spec.dtype.is_integer:
        high = sizes[legal.high] if legal and isinstance(legal.high, str) else int(legal.high) + 1 if legal else 100
        if legal and legal.distinct:
            return (
                np.stack(
                    [rng.permutation(high)[: spec.shape[-1]] for _ in range(spec.size // max(1, spec.shape[-1]))]
                    or [[]]
                )
                .reshape(spec.shape)
                .astype(np.int64)
            )
        return rng.integers(0, high, spec.shape)
    if legal:
        return rng.uniform(legal.low, legal.high, spec.shape)
    return rng.standard_normal(spec.shape)


@pytest.mark.parametrize(("op", "text"), SAMPLES, ids=lambda x: x.name if isinstance(x, ops.Op) else x)
def test_a_sample_has_the_shape_that_was_inferred(op, text):
    node = build(op, text)
    rng = np.random.default_rng(0)
    sizes = op.resolve_sizes([None if s is None else s.spec for s in node.src], node.attrs).by_name
    arrays = [
        None if s is None else random_array(s.spec, op.ranges.get(name), sizes, rng)
        for name, s in zip(op.operand_names, node.src, strict=False)
    ]
    before = [None if a is None else a.copy() for a in arrays]
    results = op.run_reference(arrays, node.attrs)
    assert [r.shape for r in results] == [s.shape for s in node.specs]
    for result in results:
        assert not np.isnan(result).any()
    for array, copy in zip(arrays, before, strict=True):
        if array is not None:
            np.testing.assert_array_equal(array, copy, "the reference changed its operand")
    assert op.count_flops(node) >= 0
    assert op.count_bytes(node) >= 0


@pytest.mark.parametrize(("op", "text", "message"), ERRORS, ids=lambda x: x.name if isinstance(x, ops.Op) else x)
def test_a_bad_sample_is_refused_with_its_message(op, text, message):
    with pytest.raises(GraphError) as caught:
        build(op, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{op.name}(")


@pytest.mark.parametrize("op", ops.REGISTRY.values(), ids=lambda op: op.name)
def test_an_op_is_declared_completely(op):
    first_line, *_ = op.documentation.splitlines()
    assert first_line
    assert SOURCE.search(op.documentation), "the documentation names ggml's op, or a paper by its year"
    assert op.samples
    assert len(op.errors) >= 2
    operands = set(op.operand_names)
    assert {name for text in op.linear_operands(op.defaults or {"bias": 0}) for name in text.split("+")} <= operands
    assert {name for text in op.zeros for name in text.split("+")} <= operands
    for signature in op.signatures.values():
        if signature.indexed_dimension:
            table, dim = signature.indexed_dimension
            assert {"first", "total"} <= set(op.defaults)
            assert dim.index in operands
            assert any(table.name in text.split("+") for text in op.linear_operands(op.defaults))
    assert {name for _, name in op.inplace_pairs(op.defaults)} <= operands
    assert set(op.ranges) <= operands
    if op.infer_spec is not None and op.name != "cast":
        assert op.links is not None, "a shape that names cannot say needs links to say how it shards"
    costs = [(op.count_flops(node), op.count_bytes(node)) for node in (build(op, text) for text in op.samples)]
    assert op.is_view or any(nbytes > 0 for _, nbytes in costs)


@pytest.mark.parametrize("op", ops.REGISTRY.values(), ids=lambda op: op.name)
def test_an_axis_that_ends_in_an_op_is_contracted_or_coupled(op):
    """A parallel axis is an axis of the result, too; an axis that the result lacks has another role."""
    for signature in op.signatures.values() if op.infer_spec is None else ():
        factors = {factor for result in signature.results for dim in result.dims for factor in dim.factors}
        ends = [
            dim for dim in signature.operand_dims if not factors & set(dim.factors) and not dim.factors[0].isdecimal()
        ]
        declared = {dim.factors for dim in signature.operand_dims if dim.role is not DimensionRole.PARALLEL}
        assert {dim.factors for dim in ends} <= declared
        if any(o.leading is LeadingAxesBroadcast.EQUAL for o in signature.operands):
            assert all(r.leading is LeadingAxesBroadcast.EQUAL for r in signature.results)


def test_roles_are_read_from_the_signature():
    signature = ops.mul_mat.signature_for({})
    assert {d.factors[0]: d.role for d in signature.operands[0].dims} == {
        "n": DimensionRole.PARALLEL,
        "k": DimensionRole.CONTRACTED,
    }
    assert ops.attention.signature_for({}).operands[0].dims[1].factors == ("kv_heads", "query_heads")
    assert ops.gated_delta_net.signature_for({"heads": "interleaved"}).operands[2].dims[1].factors == (
        "key_heads",
        "value_heads",
    )


def test_an_error_says_who_got_need():
    with pytest.raises(GraphError) as caught:
        ops.mul_mat(input("ffn_up", (8, 15)), input("norm", (3, 16)))
    assert str(caught.value) == (
        "mul_mat(%ffn_up: f32[8,15], %norm: f32[3,16]): k is 15 in w[/..., n, +k] but 16 in x[..., m, +k]"
    )


def test_every_dtype_is_that_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    other = {DType.Q8_1}  # the package says 40 bytes; ggml-common.h has two halves, so 36
    newer = {DType.Q1_0, DType.Q2_0} - {
        d for d in DType if d.ggml in {kind.value for kind in gguf.GGMLQuantizationType}
    }
    for dtype in set(DType) - other - newer:
        kind = gguf.GGMLQuantizationType(dtype.ggml)
        assert kind.name.lower() == dtype.text.lower()
        assert gguf.GGML_QUANT_SIZES[kind] == (dtype.block, dtype.block_bytes)
