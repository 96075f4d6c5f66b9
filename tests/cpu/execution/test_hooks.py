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
from hocket.frontends.tensors.convolutions import convolution
from hocket.frontends.tensors.tensor import as_tensor
from hocket.graph.dtypes import DType
from hocket.ops.quantisation import dequantise

from ...given.calls import count_calls
from ...given.models.goldens import path_of, tokens_of
from ...given.random_rows import load, random_values

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


def round_a_product_and_a_sum(x: hocket.Value, dtype: DType) -> hocket.Value:
    """Two results of one kernel are rounded for other products."""
    y = product("w", x, dtype, COLUMNS)
    return ops.add(product("v", y, dtype, COLUMNS), product("u", ops.add(y, x), dtype, COLUMNS))


def multiply_by_number_per_row(x: hocket.Value, dtype: DType) -> hocket.Value:
    return ops.mul(product("w", x, dtype), ops.exp(hocket.weight("n", (x.shape[0], 1))))


BUILDERS: list[Callable[[hocket.Value, DType], hocket.Value]] = [
    add_residual,
    scale_and_bias,
    norm_heads_with_gate,
    gate_two_products,
    read_twice,
    residual_is_the_product_of_before,
    gate_attention,
    round_a_product_and_a_sum,
    multiply_by_number_per_row,
]


def count_hooks(graph: hocket.Graph) -> int:
    backend = CpuBackend(1)
    program = hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]).device_plans[0].program
    return sum(len(kernel.stages) - 1 for kernel in backend.describe_fusion(program).hooked)


def leave_out_hooks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(program_binding, "choose_hooked_bodies", lambda flow, groups, patterns: [])
    patch.setattr(binding_cache, "find_binding_file", lambda *args: None)  # the cache has them


@pytest.mark.long(cases=8)
@pytest.mark.parametrize("dtype", [DType.Q4_K, DType.F32], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 40, 530])
@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_hooks_give_the_bits_of_separate_steps(build, rows: int, dtype: DType, monkeypatch: pytest.MonkeyPatch):
    graph = hocket.Graph({"y": build(hocket.input("x", (rows, COLUMNS)), dtype)})
    assert count_hooks(graph) > 0
    values, x = random_values(graph, RNG), RNG.standard_normal((rows, COLUMNS))
    hooked = [load(graph, values, threads).run({"x": x})["y"] for threads in (1, 2, 7) for _ in range(2)]
    leave_out_hooks(monkeypatch)
    assert count_hooks(graph) == 0
    plain = load(graph, values, 1).run({"x": x})["y"]
    assert np.isfinite(plain).all()
    assert all(np.array_equal(y.view(np.uint32), plain.view(np.uint32)) for y in hooked)


def normalise_channels(x: hocket.Value) -> hocket.Value:
    """A convolution with one scale and bias for each channel."""
    scale, bias = (hocket.weight(name, (1, 20, 1, 1)) for name in ("scale", "bias"))
    return ops.relu(ops.add(ops.mul(convolve(x, 20), scale), bias))


def convolve_channels_alone_and_add(x: hocket.Value) -> hocket.Value:
    return ops.add(ops.silu(convolve(x, x.shape[1], groups=x.shape[1])), x)


def convolve(x: hocket.Value, channels: int, groups: int = 1) -> hocket.Value:
    weight = as_tensor(hocket.weight("w", (channels, x.shape[1] // groups, 3, 3)))
    return convolution(as_tensor(x), weight, None, (1, 1), ((1, 1), (1, 1)), (1, 1), groups).value


def attend_by_products(x: hocket.Value) -> hocket.Value:
    """Scores of 16 keys are in one panel; their softmax is a hook."""
    rows = ops.reshape(x, shape=(math.prod(x.shape[:2]), *x.shape[2:]))
    scores = ops.mul_mat(ops.permute(rows, axes=(0, 2, 1)), rows)
    weights = ops.softmax(ops.mul(scores, hocket.weight("s", (1,))))
    return ops.mul_mat(ops.permute(rows, axes=(0, 2, 1)), weights)


def add_bias_to_product_with_columns(x: hocket.Value) -> hocket.Value:
    by_columns = ops.permute(hocket.weight("w", (x.shape[-1], 24)), axes=(1, 0))
    return ops.relu(ops.add(ops.mul_mat(by_columns, x), hocket.weight("b", (24,))))


def add_positions(x: hocket.Value) -> hocket.Value:
    return ops.add(product("w", x, DType.F32, 24), hocket.weight("positions", (x.shape[1], 24)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("build", "shape", "hooks"),
    [
        (normalise_channels, (2, 3, 17, 19), 1),
        (convolve_channels_alone_and_add, (2, 4, 9, 8), 1),
        (attend_by_products, (2, 3, 16, 16), 1),
        (add_bias_to_product_with_columns, (1, 2, 1100, 33), 1),
        (add_positions, (3, 20, 32), 1),
    ],
)
def test_hooks_of_other_products_give_the_bits_of_separate_steps(
    build, shape: tuple[int, ...], hooks: int, monkeypatch: pytest.MonkeyPatch
):
    """Convolutions are products of two values. All images of a batch share the numbers of a channel or a position."""
    graph = hocket.Graph({"y": build(hocket.input("x", shape))})
    assert count_hooks(graph) == hooks
    values, x = random_values(graph, RNG), RNG.standard_normal(shape)
    hooked = [load(graph, values, threads).run({"x": x})["y"] for threads in (1, 7)]
    leave_out_hooks(monkeypatch)
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


def test_sums_of_rows_that_a_product_reads_rounded_are_all_there() -> None:
    """A group with fewer results than elements: its rounded result is a row of sums."""
    sums = ops.reshape(ops.reduce(ops.exp(hocket.input("x", (COLUMNS, 32))), kind="sum"), shape=(1, COLUMNS))
    graph = hocket.Graph({"y": product("w", sums, DType.Q8_0, 64), "sums": ops.neg(sums)})
    values, x = random_values(graph, RNG), RNG.standard_normal((COLUMNS, 32))
    weights = dequantise(values["w"], DType.Q8_0)
    for threads in (1, 3):
        got = load(graph, values, threads).run({"x": x})
        want = weights @ np.exp(x).sum(-1)
        np.testing.assert_allclose(got["y"][0], want, atol=0.02 * np.abs(want).max())


def test_attention_without_a_kernel_has_no_hooks() -> None:
    """Packed keys are dequantised in Python."""
    q, r = (hocket.input(name, (2, 4, 64)) for name in "qr")
    keys, values = (hocket.weight(name, (9, 2, 64), DType.Q8_0) for name in "kv")
    graph = hocket.Graph({"y": ops.add(ops.attention(q, keys, values, scale=0.25), r)})
    inputs = {name: RNG.standard_normal((2, 4, 64)) for name in "qr"}
    weights = random_values(graph, RNG)
    assert count_hooks(graph) == 0
    y = load(graph, weights, 1).run(inputs)["y"]
    alone = load(hocket.Graph({"y": ops.attention(q, keys, values, scale=0.25)}), weights, 1).run({"q": inputs["q"]})
    np.testing.assert_allclose(y, alone["y"] + inputs["r"], rtol=1e-6, atol=1e-6)


def test_a_hook_of_whole_rows_leaves_no_thread_without_work() -> None:
    """A norm over all columns of one row is a kernel of its own, which threads share."""
    x, w = hocket.input("x", (1, COLUMNS)), hocket.weight("w", (8192, COLUMNS))
    assert count_hooks(hocket.Graph({"y": ops.l2_norm(ops.mul_mat(w, x))})) == 0


@pytest.mark.long
def test_elements_with_trailing_axes_of_size_one_are_hooks() -> None:
    image, w, bias = (
        hocket.input("x", (1, 40, 1, 1)),
        hocket.weight("w", (24, 40, 1, 1)),
        hocket.weight("b", (24, 1, 1)),
    )
    graph = hocket.Graph({"y": ops.silu(ops.add(ops.convolution(image, w), bias))})
    backend = CpuBackend(2)
    program = hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]).device_plans[0].program
    assert [call.op for call in program.instructions] == ["mul_mat", "add", "silu"]
    assert len(backend.list_kernels(program, backend.device(0))) == 1
    rng = np.random.default_rng(7)
    x, values = rng.standard_normal((1, 40, 1, 1)).astype(np.float32), random_values(graph, rng)
    y = load(graph, values, 2).run({"x": x})["y"]
    total = np.einsum("ncij,ocij->no", x.astype(np.float64), values["w"].astype(np.float64)) + values["b"][:, 0, 0]
    assert np.abs(y[..., 0, 0] - total / (1 + np.exp(-total))).max() < 1e-5


def test_planning_a_product_that_each_layer_reads_is_linear() -> None:
    def plan(layers: int) -> None:
        x = hocket.input("x", (1, 64))
        read_by_all = ops.mul_mat(hocket.weight("e", (64, 64)), x)
        for layer in range(layers):
            x = ops.add(ops.mul_mat(hocket.weight(f"w{layer}", (64, 64)), x), read_by_all)
        count_hooks(hocket.Graph({"y": x}))

    few, many = (count_calls(lambda layers=layers: plan(layers))[1] for layers in (60, 120))
    assert many < 2.5 * few


@pytest.mark.parametrize(
    "build", [lambda x: ops.pad(x, left=(0, 3), right=(1, 0)), lambda x: ops.concat(x, ops.exp(x), axis=1)]
)
def test_programs_with_placed_operands_are_cached(build) -> None:
    backend = CpuBackend(1)
    graph = hocket.Graph({"y": build(hocket.input("x", (4, 8)))})
    program = hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]).device_plans[0].program
    assert program_binding.bind_relocatable_program(program, 1)[0] is not None
