"""Graphs of chains that CUDA devices run in one launch, and runs of them: chains, or instructions one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from hocket import ops
from hocket.backends.cupy import program_binding
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.device.driver import KernelLaunch
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.graph import DType, Graph, Value, constant, input, state, weight
from hocket.scheduler import load, plan_for_group

from ..random_rows import random_rows
from .routing_graphs import choose_experts, routed_products, router


@dataclass(frozen=True)
class Chain:
    """A graph of one chain; in `forbidden` another node reads a value that only the chain should read."""

    graph: Callable[[bool], Graph]
    launches: tuple[int, int]
    """Fused, and one by one."""
    tolerance: float = 0.0
    """The relative error against one by one; the same bits if it is 0."""
    forbids: bool = True
    writes: bool = False
    """Whether the launch also writes the value that another node reads, so that the chain is as long."""


def both(y: Value, also: Value, forbidden: bool, updates: dict[Value, Value] | None = None) -> Graph:
    return Graph({"y": y, **({"also": ops.neg(also)} if forbidden else {})}, updates or {})


def norm(forbidden: bool) -> Graph:
    inner = ops.rms_norm(input("x", (3, 70)), eps=1e-6)
    return both(ops.mul(inner, weight("w", (70,))), inner, forbidden)


def sum_and_norm(columns: int = 70) -> Callable[[bool], Graph]:
    def graph(forbidden: bool) -> Graph:
        total = ops.add(input("x", (3, columns)), input("z", (3, columns)))
        inner = ops.rms_norm(total, eps=1e-6)
        normed = ops.mul(inner, weight("w", (columns,)))
        return both(ops.sub(total, ops.scale(normed, scale=2.0)), inner, forbidden)

    return graph


def gated_norm(forbidden: bool) -> Graph:
    inner = ops.rms_norm(input("x", (1, 2, 3, 64)), eps=1e-6)
    gate = ops.silu(ops.reshape(input("z", (2, 192)), shape=(1, 2, 3, 64)))
    return both(ops.mul(ops.mul(inner, weight("w", (64,))), gate), gate, forbidden)


def times(activation: Callable[[Value], Value], columns: int = 20) -> Callable[[bool], Graph]:
    def graph(forbidden: bool) -> Graph:
        gate = activation(ops.slice_(input("z", (3, 2 * columns)), axis=-1, start=columns, stop=2 * columns))
        return both(ops.mul(input("x", (3, columns)), gate), gate, forbidden)

    return graph


def unit(
    join: Callable[[Value, Value], Value], dtype: DType, rows: int = 70, columns: int = 128
) -> Callable[[bool], Graph]:
    def graph(forbidden: bool) -> Graph:
        x = input("x", (2, columns))
        gate, up = (ops.mul_mat(weight(n, (rows, columns), dtype), x) for n in ("gate", "up"))
        return both(join(gate, up), up, forbidden)

    return graph


def products(dtype: DType) -> Callable[[bool], Graph]:
    def graph(forbidden: bool) -> Graph:
        x = ops.scale(input("x", (1, 128)), scale=2.0)
        q, k, v = (ops.mul_mat(weight(n, (rows, 128), dtype), x) for n, rows in (("q", 70), ("k", 32), ("v", 100)))
        return Graph({"q": q, "k": k, "v": v})

    return graph


def norm_before_products(dtype: DType, tokens: int = 3, columns: int = 256) -> Callable[[bool], Graph]:
    """A sum, its norm and factor before two products; something else reads the sum, and perhaps the factor's result."""

    def graph(forbidden: bool) -> Graph:
        total = ops.add(input("x", (tokens, columns)), input("z", (tokens, columns)))
        x = ops.mul(ops.rms_norm(total, eps=1e-6), weight("norm", (columns,)))
        q, k = (ops.mul_mat(weight(n, (rows, columns), dtype), x) for n, rows in (("q", 70), ("k", 32)))
        outputs = {"q": q, "k": k, "total": ops.neg(total)}
        return Graph(outputs | ({"also": ops.neg(x)} if forbidden else {}))

    return graph


def heads_before_product(dtype: DType, heads: int = 6, size: int = 64, tokens: int = 1) -> Callable[[bool], Graph]:
    """The gated norm of heads before a product."""

    def graph(forbidden: bool) -> Graph:
        inner = ops.rms_norm(input("x", (tokens, heads, size)), eps=1e-6)
        gate = ops.silu(ops.reshape(input("z", (tokens, heads * size)), shape=(tokens, heads, size)))
        y = ops.reshape(ops.mul(ops.mul(inner, weight("norm", (size,))), gate), shape=(tokens, heads * size))
        return both(ops.mul_mat(weight("w", (70, heads * size), dtype), y), gate, forbidden)

    return graph


def gates_before_unit(dtype: DType, size: int = 64) -> Callable[[bool], Graph]:
    """The sigmoid of a part of each head times values, before a gated unit."""

    def graph(forbidden: bool) -> Graph:
        gate = ops.slice_(input("z", (2, 4, 2 * size)), axis=-1, start=size, stop=2 * size)
        y = ops.mul(input("x", (2, 4, size)), ops.sigmoid(gate))
        x = ops.reshape(y, shape=(2, 4 * size))
        return both(
            ops.swiglu(*(ops.mul_mat(weight(n, (70, 4 * size), dtype), x) for n in ("gate", "up"))), y, forbidden
        )

    return graph


def experts(dtype: DType) -> Callable[[bool], Graph]:
    """Two tokens, each to three of twelve."""

    def graph(forbidden: bool) -> Graph:
        x, ids = input("x", (2, 1, 128)), choose_experts(3, input("scores", (2, 12)))
        gate, up = (ops.mul_mat_id(weight(n, (12, 40, 128), dtype), x, ids) for n in ("gate", "up"))
        return both(ops.swiglu(gate, up), up, forbidden)

    return graph


def all_experts(dtype: DType, rows: int = 40, columns: int = 160) -> Callable[[bool], Graph]:
    """The units of two experts of twelve, and of one that both tokens have."""

    def graph(forbidden: bool) -> Graph:
        x, ids = ops.scale(input("x", (2, columns)), scale=2.0), choose_experts(2, input("scores", (2, 12)))
        row = ops.reshape(x, shape=(2, 1, columns))
        y = ops.swiglu(*(ops.mul_mat_id(weight(n, (12, rows, columns), dtype), row, ids) for n in ("gate", "up")))
        gate, up = (ops.mul_mat(weight(n, (rows, columns), dtype), x) for n in ("shared_gate", "shared_up"))
        return Graph({"y": y, "z": ops.swiglu(gate, up), **({"also": ops.neg(up)} if forbidden else {})})

    return graph


def answers(
    dtype: DType, other: str = "", columns: int = 128, used: int = 3, rows: int = 40
) -> Callable[[bool], Graph]:
    """Two tokens of many experts, and perhaps another one that is added as it is, or gated."""
    count = 4 * used

    def graph(forbidden: bool) -> Graph:
        x, ids = input("x", (2, used, columns)), choose_experts(used, input("scores", (2, count)))
        y = ops.mul_mat_id(weight("down", (count, rows, columns), dtype), x, ids)
        inner = ops.reshape(ops.mul_mat(ops.transpose(y), input("shares", (2, 1, used))), shape=(2, rows))
        if other:
            more = ops.mul_mat(weight("shared", (rows, columns), dtype), input("z", (2, columns)))
            if other == "gated":
                more = ops.mul(more, ops.sigmoid(input("gate", (2, 1))))
            return both(ops.add(inner, more), inner, forbidden)
        return both(inner, y, forbidden)

    return graph


def norm_and_rope(
    tokens: int, normed: bool, stored: bool, mode: str = "neox", dtype: str = "f32"
) -> Callable[[bool], Graph]:
    """Heads through norm and RoPE, perhaps into a cache."""

    def graph(forbidden: bool) -> Graph:
        x = input("x", (1, tokens, 2, 24))
        inner = ops.mul(ops.rms_norm(x, eps=1e-6), weight("w", (24,))) if normed else ops.neg(x)
        rotate_heads = ops.rope(inner, input("pos", (1, tokens), "i32"), n_dims=16, mode=mode, offset=4)
        if not stored:
            return both(rotate_heads, inner, forbidden)
        cache = state("cache", (9, 48), dtype)
        new = ops.set_rows(
            cache, ops.reshape(rotate_heads, shape=(tokens, 48)), input("ids", (tokens,), "i32"), name="new"
        )
        read = new if dtype == "f32" else ops.cast(new, dtype="f32")
        return both(ops.neg(read), rotate_heads if forbidden else inner, forbidden, {cache: new})

    return graph


def attending(
    tokens: int,
    normed: bool,
    dtype: str,
    size: int = 24,
    mode: str = "normal",
    cells: int = 9,
    read: int = 0,
    queries: int = 4,
) -> Callable[[bool], Graph]:
    """Queries and keys through norm and RoPE, keys and values into caches, all of them to attention.

    It reads the first cells; others are stored that are `cells / 9` apart.
    """

    def graph(forbidden: bool) -> Graph:
        positions, ids = input("pos", (1, tokens), "i32"), input("ids", (tokens,), "i32")
        if cells > 9:
            table = constant("cells", np.arange(9, dtype=np.int32).reshape(9, 1) * (cells // 9))
            ids = ops.cast(ops.reshape(ops.get_rows(table, ids), shape=(tokens,)), dtype="i32")

        def rotate_heads(name: str, heads: int) -> Value:
            x = input(name, (1, tokens, heads, size))
            x = ops.mul(ops.rms_norm(x, eps=1e-6), weight(f"{name}_w", (size,))) if normed else ops.neg(x)
            return ops.rope(x, positions, n_dims=size // 16 * 16, mode=mode)

        def store_in_cache(name: str, y: Value) -> Value:
            cache = state(name, (cells, 2 * size), dtype)
            rows = ops.reshape(y, shape=(tokens, 2 * size))
            caches[cache] = new = ops.set_rows(cache, rows, ids, name=f"new_{name}")
            new = ops.slice_(new, axis=0, start=0, stop=read or cells)
            return ops.reshape(new, shape=(1, read or cells, 2, size))

        caches: dict[Value, Value] = {}
        q, k, v = rotate_heads("q", queries), rotate_heads("k", 2), ops.neg(input("v", (1, tokens, 2, size)))
        y = ops.attention(q, store_in_cache("keys", k), store_in_cache("values", v), scale=0.2)
        return both(y, k, forbidden, caches)

    return graph


def row(forbidden: bool) -> Graph:
    cache = state("cache", (9, 48))
    new = ops.set_rows(cache, input("x", (1, 48)), input("ids", (1,), "i32"), name="new")
    return Graph({"y": ops.neg(new)}, {cache: new})


def delta_layer(
    size: int,
    heads: str,
    computes_logits: bool,
    sequences: tuple[int, ...] = (1,),
    tokens: int = 1,
    also: str = "y",
    is_output: bool = False,
    exchanged: str = "",
) -> Callable[[bool], Graph]:
    """A gated delta net with two key heads and four value heads, perhaps with the products of the logits.

    Something else reads the value `also` if it is forbidden; or it is an output. Two axes of the same size may be
    `exchanged`: tokens and heads of queries and keys, or of marks for padding.
    """
    batch = math.prod(sequences)

    def graph(forbidden: bool) -> Graph:
        x, old = input("x", (batch, tokens, 8 * size)), state("rows", (batch, 3, 8 * size))
        both_rows = ops.concat(old, x, axis=1)
        ids = choose_experts(3, input("scores", (batch, tokens + 3)))
        next_rows = ops.get_rows(both_rows, ids, name="next_rows")
        y = ops.silu(ops.ssm_conv(both_rows, weight("taps", (8 * size, 4))))
        q, k, v = (
            ops.reshape(
                ops.slice_(y, axis=-1, start=start * size, stop=stop * size),
                shape=(*sequences, tokens, stop - start, size),
            )
            for start, stop in ((0, 2), (2, 4), (4, 8))
        )
        if exchanged == "queries and keys":
            q, k = (ops.permute(part, axes=(0, 2, 1, 3)) for part in (q, k))
        if computes_logits:
            h = ops.scale(input("h", (batch * tokens, 256)), scale=0.1)
            alpha, beta = (ops.mul_mat(weight(n, (4, 256)), h) for n in ("alpha", "beta"))
        else:
            alpha, beta = (ops.neg(input(n, (batch * tokens, 4))) for n in ("alpha", "beta"))
        valid = ops.sigmoid(input("valid", (4,) if exchanged == "padding" else (batch, tokens, 1)))
        steps = ops.mul(ops.softplus(ops.add(alpha, weight("dt", (4,)))), ops.neg(ops.exp(weight("a", (4,)))))
        decay = ops.mul(ops.reshape(steps, shape=(batch, tokens, 4)), valid)
        rates = ops.mul(ops.reshape(ops.sigmoid(beta), shape=(batch, tokens, 4)), valid)
        states = state("states", (*sequences, 4, size, size))
        q, k = (ops.l2_norm(part, eps=1e-6) for part in (q, k))
        decays, shares = (
            ops.reshape(part, shape=(*sequences, tokens, 4, *rest)) for part, rest in ((decay, (1,)), (rates, ()))
        )
        result, new = ops.gated_delta_net(q, k, v, decays, shares, states, heads=heads)
        other = {"y": y, "q": q, "k": k, "steps": steps, "decay": decay, "rates": rates}[also]
        updates = {old: next_rows, states: new}
        return Graph({"y": result, "also": other}, updates) if is_output else both(result, other, forbidden, updates)

    return graph


CHAINS = {
    "norm and factor": Chain(norm, (1, 2)),
    "sum, norm and factor": Chain(sum_and_norm(), (3, 5)),
    "gated norm": Chain(gated_norm, (1, 4), tolerance=1e-6),
    "times sigmoid": Chain(times(ops.sigmoid), (1, 2)),
    "times silu": Chain(times(ops.silu), (1, 2)),
    "gated unit, packed": Chain(unit(ops.swiglu, DType.Q4_0), (1, 3)),
    "gated unit, float": Chain(unit(ops.geglu, DType.F32), (1, 3)),
    "products, packed": Chain(products(DType.Q4_0), (1, 4), forbids=False),
    "products, float": Chain(products(DType.F32), (1, 4), forbids=False),
    "norm before products": Chain(norm_before_products(DType.Q4_0, columns=128), (2, 6), writes=True),
    "norm before products of long rows": Chain(
        norm_before_products(DType.Q4_K, 1, 12288), (2, 6), tolerance=1e-3, writes=True
    ),
    "norm before float products": Chain(norm_before_products(DType.BF16, 1, 1024), (2, 6), tolerance=1e-5, writes=True),
    "norm of heads before a product": Chain(heads_before_product(DType.Q8_0), (1, 5), tolerance=1e-4, writes=True),
    "norm of large heads before a product": Chain(
        heads_before_product(DType.Q4_K, 3, 256, 2), (1, 5), tolerance=1e-4, writes=True
    ),
    "gates before a unit": Chain(gates_before_unit(DType.Q4_K), (1, 5), tolerance=1e-4, writes=True),
    "gates before a float unit": Chain(gates_before_unit(DType.F16), (1, 5), tolerance=1e-4, writes=True),
    "delta rule and logits": Chain(delta_layer(64, "tiled", True), (6, 23), tolerance=1e-5),
    "delta rule of several sequences": Chain(delta_layer(64, "interleaved", False, (2,), 2), (7, 22), tolerance=1e-5),
    "router": Chain(router(ops.softmax), (1, 6), tolerance=1e-6),
    "router of many": Chain(router(ops.softmax, count=600), (1, 6), tolerance=1e-6),
    "router with a bias": Chain(router(ops.sigmoid, biased=True), (1, 7), tolerance=1e-6),
    "router of shares as they are": Chain(router(ops.sigmoid, normalised=False), (1, 4), tolerance=1e-6),
    "products and router": Chain(routed_products(ops.softmax), (1, 10), tolerance=1e-5),
    "products and router of many": Chain(
        routed_products(ops.softmax, 600, dtype=DType.BF16, norm=False), (2, 9), tolerance=1e-5
    ),
    "products and router with a bias": Chain(
        routed_products(ops.sigmoid, biased=True, dtype=DType.F16, normalised=False), (1, 9), tolerance=1e-5
    ),
    "unit of experts, packed": Chain(experts(DType.Q4_0), (2, 4)),
    "unit of experts, float": Chain(experts(DType.F32), (2, 4)),
    "unit of all experts, packed": Chain(all_experts(DType.Q4_0), (3, 8), tolerance=1e-5),
    "unit of all experts, float": Chain(all_experts(DType.F16), (3, 8), tolerance=1e-5),
    "answers, packed": Chain(answers(DType.Q4_0), (2, 3), tolerance=1e-5),
    "answers, packed, and another": Chain(answers(DType.Q4_K, "plain", 768, 2), (2, 5), tolerance=1e-4),
    "answers, packed, and a gated one": Chain(answers(DType.Q5_1, "gated", 160), (2, 7), tolerance=1e-5),
    "answers, float, and a gated one": Chain(answers(DType.BF16, "gated", 100), (2, 7), tolerance=1e-5),
    "answers of many, float": Chain(answers(DType.F32, used=14), (2, 3), tolerance=1e-5),
    "heads": Chain(norm_and_rope(3, True, False), (1, 3)),
    "heads of neighbours": Chain(norm_and_rope(3, True, False, "normal"), (1, 3)),
    "heads into a cache": Chain(norm_and_rope(3, True, True), (3, 6)),
    "a head into a cache": Chain(norm_and_rope(1, True, True), (2, 6)),
    "turned heads into a cache": Chain(norm_and_rope(1, False, True), (3, 5)),
    "heads into a cache of halves": Chain(norm_and_rope(3, True, True, dtype="f16"), (4, 7)),
    "a head into a cache of halves": Chain(norm_and_rope(1, True, True, dtype="bf16"), (3, 7)),
    "heads of attention": Chain(attending(3, True, "f32"), (5, 12)),
    "heads of attention to halves": Chain(attending(3, True, "f16"), (5, 12)),
    "turned heads of attention": Chain(attending(3, False, "bf16"), (7, 10)),
    "attention and its heads": Chain(attending(1, True, "f16", 64, cells=900, read=896), (4, 14)),
    "attention and its large heads": Chain(attending(1, True, "bf16", 256, "neox", 72, queries=16), (4, 14)),
    "attention and its turned heads": Chain(attending(1, False, "f16", 128), (4, 10)),
    "a row": Chain(row, (2, 3), forbids=False),
}


MEMORY_REQUESTS = {
    "rows.cu: scaled_norm": (sum_and_norm(512), 312),
    "short_convolution.cu: gated_norm<64>": (gated_norm, 17),
    "elementwise.cu: binary<function::swiglu>": (times(ops.silu, 64), 18),
    "packed_few.cu: few<Q4_0, 2>": (unit(ops.swiglu, DType.Q4_0, 64, 512), 700),
    "dense.cu: few<bf16_bits, 2>": (unit(ops.swiglu, DType.BF16, 64, 512), 896),
    "routing.cu: route<4>": (router(ops.softmax, count=128, used=8), 33),
    "dense.cu: few<float, 4>": (routed_products(ops.softmax, 128, 512, used=8), 3011),
    "packed_few.cu: few<Q4_0, 1>": (all_experts(DType.Q4_0, 64, 512), 2300),
    "dense.cu: few<bf16_bits, 1>": (all_experts(DType.BF16, 64, 512), 3716),
    "packed_few.cu: summed<Q4_K>": (answers(DType.Q4_K, "gated", 512, 4, rows=64), 1710),
    "dense.cu: summed<bf16_bits>": (answers(DType.BF16, "gated", 512, 4, rows=64), 4162),
    "gated_delta_net.cu: delta_net<64, false, true, 8, 1, true>": (delta_layer(64, "tiled", True), 2496),
    "rotary.cu: place_heads<float>": (attending(1, True, "f32", 64, "neox"), 125),
    "rotary.cu: place_heads<half_bits>": (attending(3, True, "f16", 64, "neox"), 330),
    "attention_cells.cu: attend_cells<half_bits, 64, 64, true>": (attending(1, True, "f16", 64, "neox"), 770),
}
"""The memory requests of chains in model-like sizes, by the kernel that they launch."""


class RecordingDriver(EmulatedDriver):
    """A driver that remembers recorded launches."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[KernelLaunch] = []

    def record(self, launches, on):
        self.launches += launches
        return super().record(launches, on)


@dataclass
class RunResult:
    outputs: list[dict[str, np.ndarray]] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)
    launches: int = 0


def run_graph(graph: Graph, fused: bool, devices: int = 1, backend: DriverBackend | None = None) -> RunResult:
    """Three runs of a graph with the same numbers, however it is bound."""
    rng, outcome, driver = np.random.default_rng(3), RunResult(), RecordingDriver()
    backend = backend or DriverBackend(driver)
    weights = {}
    for w in graph.weights:
        *leading, columns = w.shape
        rows = math.prod(leading)
        raw = random_rows(w.dtype, rows, columns, rng) if w.dtype.is_quantised else rng.standard_normal(w.shape)
        weights[w.node.name] = raw if w.dtype.is_quantised else raw.astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        if not fused:
            patch.setattr(program_binding, "FUSED", {})
        group = [(backend, backend.device(i)) for i in range(devices)]
        run = load(plan_for_group(graph, group, split_mode="tensor" if devices > 1 else "auto"), weights)
    for _ in range(3):
        inputs = {
            v.node.name: rng.permutation(9)[: v.spec.size].reshape(v.shape) if v.dtype is DType.I32
            else rng.standard_normal(v.shape).astype(np.float32)
            for v in graph.inputs
        }  # fmt: skip
        outcome.outputs.append(run.run(inputs))
        outcome.states.append(np.concatenate([np.ravel(run.store.state(s.node.name)) for s in graph.states] or [[]]))
    outcome.launches = len(driver.launches)
    return outcome


def assert_equal_runs(one: RunResult, other: RunResult, tolerance: float) -> None:
    numbers = [*((o[k], p[k]) for o, p in zip(one.outputs, other.outputs, strict=True) for k in o)]
    for got, want in [*numbers, *zip(one.states, other.states, strict=True)]:
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
