"""States of fewer bits a number: rows are written and read as they are, by kernels or in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket import DType, Graph, input, ops, state
from hocket.backends.cpu.backend import CpuBackend
from hocket.graph.dtypes import STATE_DTYPES
from hocket.ops import REGISTRY
from hocket.ops.block_layouts import IQ4_NL_CODE_BOOK
from hocket.ops.quantisation import decode_array, encode_array

from ...given.models.goldens import nmse
from ...given.state_ways import build_state_graphs, inputs_of

TYPES = ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]
DEVICES = ["cpu:0", "cpu:0,cpu:1", "cpu:0,cpu:1,cpu:2"]


STATE_GRAPHS = [(name, dtype) for dtype in TYPES for name, _ in build_state_graphs(dtype)]
CODES = {
    **{"q8_0": range(-127, 127), "q4_0": range(-8, 8), "q4_1": range(-8, 8)},
    **{"q5_0": range(-16, 16), "q5_1": range(-16, 16), "iq4_nl": [*map(int, IQ4_NL_CODE_BOOK)]},
}
"""The multiples of its scale that a block has if the first and the last of them are in it."""
INTEGER_KEYS = ("q8_0", "q4_0")
"""Keys that meet queries of few tokens as integers."""


@pytest.mark.long
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize(("graph_name", "dtype"), STATE_GRAPHS)
def test_a_state_holds_what_its_type_can_hold(graph_name, dtype, devices):
    """All numbers are multiples of 1/32 below 4, so nothing is rounded, and the definition has the same bits."""
    graph = dict(build_state_graphs(dtype))[graph_name]
    inputs = inputs_of(graph, CODES.get(dtype, range(-99, 99)))
    right, run = (hocket.load(hocket.plan(graph, on), {}) for on in ("reference:0", devices))
    for _ in range(3):
        expected, results = right.run(inputs), run.run(inputs)
        assert all(np.array_equal(results[name], expected[name]) for name in expected)
        assert np.array_equal(run.store.state("s"), right.store.state("s"))
        assert np.any(np.array(run.store.state("s")))


@pytest.mark.parametrize("dtype", [str(dtype) for dtype in STATE_DTYPES if dtype is not DType.F32])
def test_rows_are_rounded_to_the_nearest(dtype):
    rng, kind = np.random.default_rng(0), DType(dtype)
    width = 3 * kind.block if kind.is_quantised else 37
    rows = rng.standard_normal((8, width)).astype(np.float32) * 10.0 ** rng.integers(-6, 4, (8, width))
    rows = rows.astype(np.float32)
    rows[0, :6] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38]
    rows[1, 32:], rows[2, :3], rows[3] = 0.0, [1e-7, -1e-7, 2e-9], rows[3] * 1e-9
    old = state("s", (9, width), dtype)
    new = ops.set_rows(old, input("rows", (8, width)), input("ids", (8,), "i32"))
    run = hocket.load(hocket.plan(Graph({"y": new}, {old: new}), "cpu:0"), {})
    with np.errstate(over="ignore"):
        run.run({"rows": rows, "ids": np.arange(8, dtype=np.int32)})
        expected = decode_array(encode_array(rows, kind), kind)
    assert np.array_equal(np.array(run.store.state("s"))[:8], expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [str(dtype) for dtype in STATE_DTYPES if dtype.is_quantised])
def test_other_rows_keep_their_bits(dtype):
    """Some dtypes would not keep rows that are decoded and encoded again."""
    rng, width = np.random.default_rng(0), 256
    old = state("s", (5, width), dtype)
    new = ops.set_rows(old, input("rows", (4, width)), input("ids", (4,), "i32"))
    run = hocket.load(hocket.plan(Graph({"y": new}, {old: new}), "cpu:0"), {})
    run.run({"rows": rng.standard_normal((4, width)).astype(np.float32), "ids": np.arange(4, dtype=np.int32)})
    before = np.array(run.store.state("s"))
    run.run({"rows": np.zeros((4, width), np.float32), "ids": np.full(4, 4, np.int32)})
    after = np.array(run.store.state("s"))
    assert before[:4].any()
    assert np.array_equal(after[:4], before[:4])
    assert not after[4].any()


def in_eight_bits(x):
    """Return groups of 32 numbers as integers up to 127, ties away from zero."""
    blocks = x.reshape(-1, 32)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    q = blocks * (np.float32(1) / scale)
    q = np.sign(q) * np.floor(np.abs(q).astype(np.float64) + 0.5)
    return (q * scale).reshape(x.shape)


@pytest.mark.nightly(cases=18)
@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize(
    ("sizes", "keys", "values"),
    [
        *[(sizes, "f16", "f16") for sizes in [(64, 64), (40, 24), (5, 130)]],
        *[((40, 24), "bf16", "f32"), ((5, 130), "bf16", "f32"), ((40, 24), "f32", "bf16")],
        *[((64, 96), "q8_0", "q4_0"), ((32, 128), "q8_0", "q4_0"), ((96, 32), "q4_0", "q8_0")],
        *[((64, 96), "q4_1", "q5_0"), ((32, 128), "q5_0", "q5_1"), ((96, 32), "q5_1", "iq4_nl")],
        ((160, 64), "iq4_nl", "q4_1"),
    ],
)
def test_attention_reads_keys_and_values_as_they_are_stored(sizes, keys, values, tokens):
    """Compiled, over both: no copy in float32 is made."""
    (size, width), cells, rng = sizes, 70, np.random.default_rng(0)
    k, v = state("k", (2 * cells + 1, 3 * size), keys), state("v", (2 * cells + 1, 3 * width), values)
    q, mask = input("q", (2, tokens, 6, size)), input("mask", (2, tokens, cells))

    def slice_visible(x, columns):
        known = ops.slice_(x, axis=0, start=0, stop=2 * cells)
        return ops.reshape(known, shape=(2, cells, 3, columns))

    graph = Graph({"y": ops.attention(q, slice_visible(k, size), slice_visible(v, width), mask, scale=0.3)})
    run = hocket.load(hocket.plan(graph, "cpu:0"), {})
    for name in ("k", "v"):
        run.store.state(name)[...] = rng.standard_normal(run.store.state(name).shape)
    inputs = {"q": rng.standard_normal(q.shape).astype(np.float32)}
    inputs["mask"] = np.where(rng.random(mask.shape) < 0.3, -np.inf, 0.0).astype(np.float32)
    states = [
        np.array(run.store.state(name), np.float64)[: 2 * cells].reshape(2, cells, 3, columns)
        for name, columns in (("k", size), ("v", width))
    ]
    y = run.run(inputs)["y"]
    assert "NumPy" not in {step.kernel for step in run.time_kernels()[0]}
    if keys in INTEGER_KEYS and tokens < 16:  # which meet keys as integers
        inputs["q"] = in_eight_bits(inputs["q"])
    q64, mask64 = (inputs[name].astype(np.float64) for name in ("q", "mask"))
    rounding = CpuBackend().tolerance(graph.outputs["y"].node) or 0.0
    assert nmse(y, REGISTRY["attention"].reference(q64, *states, mask64, scale=0.3)) <= max(1e-11, rounding**2)
