"""Every op's samples through plan and executor on each backend, against the float64 reference."""

from __future__ import annotations

from functools import cache
from zlib import crc32

import numpy as np
import pytest

from hocket import graph as g
from hocket import ops
from hocket.graph import Graph, Spec, Value, parse_case
from hocket.ops.collective import COLLECTIVES
from hocket.ops.quants import dequantise
from hocket.ops.signature import Role
from hocket.scheduler import load, plan

# Collectives are put in by the planner; tests/test_sharding.py and the conformance kit run them.
SAMPLES = [(op, text) for op in ops.REGISTRY.values() if op.name not in COLLECTIVES for text in op.samples]
# Squared rounding of the arithmetic, times a margin for reductions (up to 256 terms) and recurrences.
LIMITS = {"cpu:0": 1024 * float(np.finfo(np.float32).eps) ** 2, "reference:0": 1e-28}
LAYOUTS = ("dense", "strided")


def leaf(name: str, spec: Spec, layout: str) -> tuple[Value, Value]:
    """A leaf and the value an op reads from it: itself, or a view with other strides of the same shape."""
    if spec.dtype.is_quantised or layout == "dense" or not spec.shape:
        kind = g.weight if spec.dtype.is_quantised else g.input
        value = kind(name, spec.shape, spec.dtype)
        return value, value
    axes = tuple(reversed(range(len(spec.shape))))
    wide = g.input(name, (*(spec.shape[a] for a in axes), 2), spec.dtype)
    part = ops.reshape(ops.slice_(wide, axis=-1, start=1, stop=2), shape=wide.shape[:-1])
    return wide, ops.permute(part, axes=axes)


def random_operand(spec: Spec, legal, sizes, rng):
    if spec.dtype.is_quantised:
        raw = rng.integers(0, 255, (*spec.shape[:-1], spec.shape[-1] // spec.dtype.block * spec.dtype.block_bytes))
        blocks = raw.astype(np.uint8).reshape(-1, spec.dtype.block_bytes)
        with np.errstate(all="ignore"):
            values = dequantise(blocks, spec.dtype)
        blocks[~(np.abs(values) < 8).all(-1)] = 0  # random scales may be inf, NaN or enormous
        return blocks.reshape(raw.shape)
    if spec.dtype.is_integer:
        high = sizes[legal.high] if legal and isinstance(legal.high, str) else int(legal.high) + 1 if legal else 100
        if legal and legal.distinct:
            count = spec.size // max(1, spec.shape[-1])
            rows = [rng.permutation(high)[: spec.shape[-1]] for _ in range(count)]
            return np.array(rows, np.int64).reshape(spec.shape)
        return rng.integers(0, high, spec.shape)
    low, high = (legal.low, legal.high) if legal else (-2.0, 2.0)
    values = rng.uniform(low, high, spec.shape).astype(np.float32)
    return ops.cast.reference(values, dtype=spec.dtype).astype(np.float32)


def as_bound(array, leaf_value: Value, operand: Value):
    if leaf_value is operand:
        return array
    wide = np.full(leaf_value.shape, 77, array.dtype)
    wide[..., 1] = np.transpose(array)
    return wide


@cache
def quantised_legal(dtype) -> bool:
    try:
        dequantise(np.zeros((1, dtype.block_bytes), np.uint8), dtype)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("device", ["cpu:0", "reference:0"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("op", "text"), SAMPLES, ids=lambda x: x.name if isinstance(x, ops.Op) else x)
def test_a_backend_agrees_with_the_reference(op, text, layout, device):
    parts = parse_case(text)
    specs = {k: s for k, s in parts.items() if isinstance(s, Spec)}
    if any(s.dtype.is_quantised and not quantised_legal(s.dtype) for s in specs.values()):
        pytest.skip("no dequantiser for this type")
    attrs = {k: v for k, v in parts.items() if not isinstance(v, Spec)}
    pairs = {k: leaf(k, s, layout) for k, s in specs.items()}
    built = op(**{k: v for k, (_, v) in pairs.items()}, **attrs)
    results = (built,) if isinstance(built, Value) else built
    rng = np.random.default_rng(crc32(text.encode()))
    node = results[0].node
    sizes = op.sizes([None if s is None else s.spec for s in node.src], node.attrs).named
    arrays = {k: random_operand(s, op.ranges.get(k), sizes, rng) for k, s in specs.items()}
    operands = [None if k not in arrays else exact(arrays[k], specs[k].dtype) for k in op.operand_names]
    expected = op.run(operands, node.attrs)
    contracts = any(d.role is Role.CONTRACTED for d in op.signature_for(node.attrs).dims)
    # A sum of products may cancel, so its error is measured against the sum of their magnitudes.
    scales = op.run([None if a is None else np.abs(a) for a in operands], node.attrs) if contracts else expected
    made = plan(Graph({f"r{i}": v for i, v in enumerate(results)}), device)
    bound = {k: as_bound(arrays[k], *pairs[k]) for k in arrays}
    weights = {k: v for k, v in bound.items() if pairs[k][0].node.op == "weight"}
    outputs = load(made, weights).run({k: v for k, v in bound.items() if k not in weights})
    for want, got, scale in zip(expected, outputs.values(), scales, strict=True):
        compare(want, got, scale, LIMITS[device])


def exact(array, dtype):
    return ops.exact(dequantise(array, dtype) if dtype.is_quantised else array)


def compare(want, got, scale, limit):
    assert want.shape == got.shape
    finite = np.isfinite(want)
    np.testing.assert_array_equal(finite, np.isfinite(got))
    np.testing.assert_array_equal(want[~finite], got[~finite])
    error = np.subtract(want, got, out=np.zeros(want.shape), where=finite) ** 2
    scale = np.where(finite, scale, 0.0) ** 2
    if want.ndim and want.size:
        error, scale = error.sum(-1), scale.sum(-1)
    assert np.all(error <= limit * scale + 1e-30), f"worst row NMSE {np.max(error / np.maximum(scale, 1e-300)):.3g}"
