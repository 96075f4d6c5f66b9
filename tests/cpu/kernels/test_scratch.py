"""Kernels write nothing behind the memory that belongs to their tables."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.cpu.steps import step_table

from ...given.random_rows import random_rows

RNG = np.random.default_rng(0)
GUARD = b"\xa5" * 4096
TOKENS, COLUMNS = 520, 1184
"""More rows than a chunk has, a last tile that is not full, and more columns than are expanded at a time."""


def build_product(dtype: str) -> hocket.Graph:
    x, w = hocket.input("x", (TOKENS, COLUMNS)), hocket.weight("w", (72, COLUMNS), dtype)
    return hocket.Graph({"y": ops.mul_mat(w, x)})


def build_gated_unit(dtype: str) -> hocket.Graph:
    x = hocket.input("x", (TOKENS, COLUMNS))
    gate, up = (ops.mul_mat(hocket.weight(name, (72, COLUMNS), dtype), x) for name in ("gate", "up"))
    return hocket.Graph({"y": ops.swiglu(gate, up)})


def build_experts(dtype: str) -> hocket.Graph:
    x, ids = hocket.input("x", (TOKENS, 1, COLUMNS)), hocket.input("ids", (TOKENS, 2), "i32")
    return hocket.Graph({"y": ops.mul_mat_id(hocket.weight("w", (3, 40, COLUMNS), dtype), x, ids)})


def build_matrices(dtype: str) -> hocket.Graph:
    x, w = hocket.input("x", (2, TOKENS, COLUMNS)), hocket.input("w", (2, 72, COLUMNS), dtype)
    return hocket.Graph({"y": ops.mul_mat(w, x)})


def random_weight(value: hocket.Value) -> np.ndarray:
    *rows, columns = value.shape
    raw = random_rows(value.dtype, math.prod(rows), columns, RNG)
    return (raw if value.dtype.is_quantised else raw.view(value.dtype.storage)).reshape(*rows, -1)


SCRATCH_CASES = [
    *((build, dtype) for build in (build_product, build_gated_unit, build_experts) for dtype in ("f32", "f16", "q8_0")),
    (build_product, "bf16"),
    (build_product, "q4_0"),
    (build_matrices, "f32"),
]


@pytest.mark.long(cases=4)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("build", "dtype"), SCRATCH_CASES, ids=lambda value: getattr(value, "__name__", value))
def test_no_kernel_writes_behind_its_scratch_memory(build, dtype, threads, monkeypatch):
    guards, take = [], step_table.TableMemory.allocate_zeroed

    def take_with_guard(self: step_table.Owned, nbytes: int) -> int:
        address = take(self, nbytes + len(GUARD))
        ctypes.memmove(address + nbytes, GUARD, len(GUARD))
        guards.append(address + nbytes)
        return address

    monkeypatch.setattr(step_table.TableMemory, "allocate_zeroed", take_with_guard)
    graph = build(dtype)
    weights = {w.node.name: random_weight(w) for w in graph.weights}
    inputs = {
        v.node.name: RNG.integers(0, 3, v.shape, np.int32) if v.dtype.text == "i32" else RNG.standard_normal(v.shape)
        for v in graph.inputs
    }
    executor = hocket.load(hocket.plan(graph, "cpu:0", threads=threads), weights)
    executor.run(inputs)
    assert guards
    assert all(ctypes.string_at(at, len(GUARD)) == GUARD for at in guards)
