"""Batched matmuls that write the permuted copy of their result, in one kernel, with the bits of two."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

import hocket
from hocket import ops

from ...given.plans.cpu_runs import list_cpu_kernels, run_on_cpu

RNG = np.random.default_rng(62)
ROW_ORDERS = [(*axes, 3) for axes in permutations(range(3))]
"""Orders of axes that keep the rows of a product."""


def build_product(rows: int, axes: tuple[int, ...]) -> tuple[hocket.Value, hocket.Value]:
    """The product [2, 3, rows, 9] of two inputs, and its copy with permuted axes."""
    product = ops.mul_mat(hocket.input("k", (2, 3, 9, 7)), hocket.input("q", (2, 3, rows, 7)))
    return product, ops.cont(ops.permute(product, axes=axes))


def make_inputs(rows: int) -> dict[str, np.ndarray]:
    shapes = {"k": (2, 3, 9, 7), "q": (2, 3, rows, 7)}
    return {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("axes", ROW_ORDERS)
def test_a_product_writes_its_permuted_copy(axes: tuple[int, ...], rows: int, threads: int):
    product, copy = build_product(rows, axes)
    flat = ops.reshape(copy, shape=(copy.shape[0] * copy.shape[1], copy.shape[2] * 9))
    graph, inputs = hocket.Graph({"y": ops.neg(flat)}), make_inputs(rows)
    assert list_cpu_kernels(graph) == ["mul_mat cont", "neg"]
    y = run_on_cpu(graph, {}, inputs, threads)["y"]
    alone = run_on_cpu(hocket.Graph({"y": product}), {}, inputs, threads)["y"]
    assert np.array_equal(y.reshape(copy.shape), -alone.transpose(axes))
    expected = np.einsum("bhtk,bhdk->bhtd", inputs["q"], inputs["k"], dtype=np.float64)
    assert np.abs(alone - expected).max() < 1e-4


def test_a_copy_that_divides_rows_stays_a_kernel():
    graph = hocket.Graph({"y": build_product(5, (0, 1, 3, 2))[1]})
    assert list_cpu_kernels(graph) == ["mul_mat", "cont"]


@pytest.mark.parametrize("reader", ["output", "second reader", "part"])
def test_a_product_that_something_else_reads_is_written(reader: str):
    product, copy = build_product(5, (0, 2, 1, 3))
    outputs = {"y": copy}
    if reader == "output":
        outputs["product"] = product
    elif reader == "second reader":
        outputs["z"] = ops.sum_rows(product)
    else:
        outputs = {"y": ops.cont(ops.permute(ops.slice(product, axis=1, start=1, stop=3), axes=(0, 2, 1, 3)))}
    graph, inputs = hocket.Graph(outputs), make_inputs(5)
    assert "mul_mat cont" not in list_cpu_kernels(graph)
    expected = np.einsum("bhtk,bhdk->bthd", inputs["q"], inputs["k"], dtype=np.float64)
    y = run_on_cpu(graph, {}, inputs, 1)["y"]
    assert np.abs(y - (expected[:, :, 1:] if reader == "part" else expected)).max() < 1e-4


def test_a_product_of_weights_keeps_its_kernel():
    product = ops.mul_mat(hocket.weight("w", (9, 7)), hocket.input("q", (2, 3, 5, 7)))
    graph = hocket.Graph({"y": ops.cont(ops.permute(product, axes=(0, 2, 1, 3)))})
    assert list_cpu_kernels(graph) == ["mul_mat", "cont"]
