"""Hooks of matrix products: groups of ops that run on each panel of a product give the bits of separate steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.cpu.execution import binding_cache, program_binding
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.graph.dtypes import DType

from ...given.models.goldens import path_of, tokens_of
from ...given.random_rows import random_rows

RNG = np.random.default_rng(50)
COLUMNS, HEADS, HEAD = 256, 8, 64
INNER_WIDTH = HEADS * HEAD


def product(name: str, x: hocket.Value, dtype: DType, rows: int = INNER_WIDTH) -> hocket.Value:
    return ops.mul_mat(hocket.weight(name, (rows, x.shape[-1]), dtype), x)


def add_residual(x: hocket.Value, dtype: DType) -> hocket.Value:
    return ops.add(product("w", x, dtype, COLUMNS), x)


def scale_and_bias(x: hocket.Value, dtype: DType) -> hocket.Value:
    biased = ops.add(product("w", x, dtype, 200), hocket.weight("b", (200,)))
    return ops.mul(ops.softplus(biased), hocket.weight("s", (200,)))


def norm_heads_with_gate(x: hocket.Value, dtype: DType) -> hocket.Value:
    """A gated norm of heads, as after a delta net, and a product that reads it rounded."""
    inner, gate = (ops.reshape(product(n, x, dtype), shape=(x.shape[0], HEADS, HEAD)) for n in ("inner", "gate"))
    normed = ops.mul(ops.rms_norm(inner, eps=1e-6), hocket.weight("scale", (HEAD,)))
    return add_residual_of(
        "out", ops.reshape(ops.mul(normed, ops.silu(gate)), shape=(x.shape[0], INNER_WIDTH)), x, dtype
    )


def add_residual_of(name: str, x: hocket.Value, residual: hocket.Value, dtype: DType) -> hocket.Value:
    return ops.add(product(name, x, dtype, COLUMNS), residual)


def gate_two_products(x: hocket.Value, dtype: DType) -> hocket.Value:
    return ops.mul(ops.sigmoid(product("gate", x, dtype)), product("up", x, dtype))


def read_twice(x: hocket.Value, dtype: DType) -> hocket.Value:
    """The product itself and the sum are read later: both are written."""
    y = product("w", x, dtype, COLUMNS)
    return ops.sub(ops.mul_mat(hocket.weight("v", (COLUMNS, COLUMNS)), ops.add(y, x)), ops.tanh(y))


def residual_is_the_product_of_before(x: hocket.Value, dtype: DType) -> hocket.Value:
    first = add_residual(x, dtype)
    return add_residual_of("second", first, first, dtype)


def gate_attention(x: hocket.Value, dtype: DType) -> hocket.Value:
    """Attention with a gate per element, and a product that reads it rounded."""
    rows = x.shape[0]
    heads = (ops.reshape(product(n, x, dtype), shape=(1, rows, HEADS, HEAD)) for n in "qkv")
    mixed = ops.reshape(ops.attention(*heads, scale=0.1), shape=(rows, INNER_WIDTH))
    return add_residual_of("out", ops.mul(mixed, ops.sigmoid(product("gate", x, dtype))), x, dtype)


BUILDERS: list[Callable[[hocket.Value, DType], hocket.Value]] = [
    add_residual,
    scale_and_bias,
    norm_heads_with_gate,
    gate_two_products,
    read_twice,
    residual_is_the_product_of_before,
    gate_attention,
]


def random_values(graph: hocket.Graph) -> dict[str, np.ndarray]:
    def random_weight(w: hocket.Value) -> np.ndarray:
        if w.dtype.is_quantised:
            return random_rows(w.dtype, math.prod(w.shape[:-1]), w.shape[-1], RNG).reshape(*w.shape[:-1], -1)
        return RNG.standard_normal(w.shape).astype(w.dtype.storage)

    return {w.node.name: random_weight(w) for w in graph.weights}


def load(graph: hocket.Graph, values: dict[str, np.ndarray], threads: int):
    backend = CpuBackend(threads)
    return hocket.load(hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]), values)


def count_hooks(graph: hocket.Graph) -> int:
    backend = CpuBackend(1)
    program = hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]).device_plans[0].program
    return sum(len(kernel.stages) - 1 for kernel in backend.describe_fusion(program).hooked)


def leave_out_hooks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(program_binding, "choose_hooked_bodies", lambda flow, groups: [])
    patch.setattr(binding_cache, "find_binding_file", lambda *args: None)  # the cache has them


@pytest.mark.long(cases=8)
@pytest.mark.parametrize("dtype", [DType.Q4_K, DType.F32], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 40, 530])
@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_hooks_give_the_bits_of_separate_steps(build, rows: int, dtype: DType, monkeypatch: pytest.MonkeyPatch):
    graph = hocket.Graph({"y": build(hocket.input("x", (rows, COLUMNS)), dtype)})
    assert count_hooks(graph) > 0
    values, x = random_values(graph), RNG.standard_normal((rows, COLUMNS))
    hooked = [load(graph, values, threads).run({"x": x})["y"] for threads in (1, 2, 7) for _ in range(2)]
    leave_out_hooks(monkeypatch)
    assert count_hooks(graph) == 0
    plain = load(graph, values, 1).run({"x": x})["y"]
    assert np.isfinite(plain).all()
    assert all(np.array_equal(y.view(np.uint32), plain.view(np.uint32)) for y in hooked)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["llama-rope-freqs", "qwen3-q4_k_m", "qwen35", "qwen35moe"])
def test_a_model_computes_the_same_bits_without_hooks(name: str, threads: int, monkeypatch: pytest.MonkeyPatch):
    model, tokens = open_model(path_of(name)), tokens_of(name)

    def logits() -> np.ndarray:
        session = Session(model, on=DeviceGroup(threads=threads))
        return np.concatenate([session.evaluate([part])[0] for part in (tokens[:9], tokens[9:10], tokens[10:11])])

    hooked = logits()
    leave_out_hooks(monkeypatch)
    assert np.array_equal(hooked, logits())
