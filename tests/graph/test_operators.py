"""Python's operators on values have their meaning for NumPy's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hocket
from hocket import GraphError, ops

rng = np.random.default_rng(0)
ARRAYS = {
    "x": rng.uniform(1, 2, (3, 4)).astype(np.float32),
    "w": rng.normal(size=(4, 5)).astype(np.float32),
    "row": rng.normal(size=4).astype(np.float32),
    "column": rng.normal(size=(3, 1)).astype(np.float32),
    "deep": rng.normal(size=(2, 3, 4)).astype(np.float32),
}
EXPRESSIONS: tuple[Callable[..., Any], ...] = (
    lambda x, w, row, column, deep: (x + row) * 2 - 1,
    lambda x, w, row, column, deep: 1 - x / column + 3 * x,
    lambda x, w, row, column, deep: 2 / x - (-x) ** 2 + x**0.5,
    lambda x, w, row, column, deep: row - x,
    lambda x, w, row, column, deep: row + deep * column,
    lambda x, w, row, column, deep: (column + row) / 4,
    lambda x, w, row, column, deep: x @ w + (x @ w)[0],
    lambda x, w, row, column, deep: row @ w,
    lambda x, w, row, column, deep: deep @ row,
    lambda x, w, row, column, deep: deep @ w,
    lambda x, w, row, column, deep: x @ x.T,
    lambda x, w, row, column, deep: x @ deep.reshape(2, 4, 3) if isinstance(x, np.ndarray) else x @ four(deep),
    lambda x, w, row, column, deep: deep[0, -1] + deep[..., 1:3][1, 2, 0],
    lambda x, w, row, column, deep: deep[:, None, 1, 2:] * x[1:2, :2],
    lambda x, w, row, column, deep: x[5:] + 1,
    lambda x, w, row, column, deep: x[...],
    lambda x, w, row, column, deep: np.float32(2) * x + np.int64(1),
)


def four(deep: hocket.Value) -> hocket.Value:
    return ops.reshape(deep, shape=(2, 4, 3))


@pytest.mark.parametrize("number", range(len(EXPRESSIONS)))
def test_an_expression_is_what_numpy_says(number):
    expression = EXPRESSIONS[number]
    leaves = {name: hocket.input(name, array.shape) for name, array in ARRAYS.items()}
    graph = hocket.Graph({"y": expression(**leaves)})
    inputs = {v.node.name: ARRAYS[v.node.name] for v in graph.inputs}
    expected = expression(**ARRAYS)
    got = hocket.run(graph, inputs, devices="numpy:0")["y"]
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


x, w, ids = hocket.input("x", (3, 4)), hocket.weight("w", (5, 4)), hocket.input("i", (2,), "i32")


def test_a_product_with_a_transposed_weight_is_one_node():
    assert (x @ w.T).node.src == (w, x)
    with pytest.raises(GraphError, match=r"write ops.mul_mat\(w, x\)"):
        hocket.weight("packed", (5, 32), "q4_0").T  # noqa: B018


def test_a_value_of_numbers_picks_rows():
    table = np.arange(20, dtype=np.float32).reshape(5, 4)
    got = hocket.run(hocket.Graph({"y": w[ids]}), {"i": [4, 0]}, {"w": table}, devices="numpy:0")["y"]
    assert np.array_equal(got, table[[4, 0]])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: x + None, "None is no graph value"),
        (lambda: np.ones(4) + x, "make a leaf with constant"),
        (lambda: x + w, r"shapes \[3, 4\] and \[5, 4\] do not broadcast"),
        (lambda: x @ w, "rows hold 4 values, columns 5"),
        (lambda: x @ 2, "2 is no graph value"),
        (lambda: x / 0, "need another"),
        (lambda: x**3, "must be 2 or 0.5"),
        (lambda: x[3], "index 3 of axis 0; need an integer from -3 to 2"),
        (lambda: x[::2], "a slice of step 1"),
        (lambda: x[True], "index True"),
        (lambda: x["a"], "index 'a'"),
        (lambda: x[0, 0, 0], "3 entries for 2 axes"),
        (lambda: x[..., ...], "more than one"),
        (lambda: ops.reshape(x, shape=(3, 2, 2)).T, "rank 3, not 2"),
        (lambda: bool(x), "choose with ops.where"),
        (lambda: x < w, "compare with ops.compare"),
        (lambda: x == 1.0, "== 1.0: a graph has no numbers yet"),
        (lambda: np.ones(4) == x, "a graph has no numbers yet"),
        (lambda: float(x), "hocket.run gives those of an output"),
        (lambda: np.asarray(x), "hocket.run gives those of an output"),
        (lambda: list(x), "take parts of it by index"),
    ],
)
def test_what_has_no_meaning_is_refused(wrong, message):
    with pytest.raises(GraphError, match=message):
        wrong()


def test_a_value_is_a_key_and_knows_where_its_methods_are():
    assert {x: 1}[hocket.Value(x.node)] == 1
    assert x != w
    for name, message in (("reshape", r"write ops.reshape\(x, ...\)"), ("shap", "did you mean shape")):
        with pytest.raises(AttributeError, match=message):
            getattr(x, name)


@pytest.mark.parametrize("dtype", ["f16", "float16", np.float16, np.dtype("float16"), hocket.DType.F16])
def test_a_dtype_has_the_names_of_ggml_and_of_numpy(dtype):
    assert hocket.input("x", (3,), dtype).dtype is hocket.DType.F16
    assert ops.cast(x, dtype=dtype).dtype is hocket.DType.F16


@pytest.mark.parametrize("dtype", [float, "f4", np.floating, np.complex64, 3, None])
def test_what_is_no_dtype_is_refused(dtype):
    with pytest.raises(GraphError, match="dtype"):
        hocket.input("x", (3,), dtype)
