"""Small graphs whose seconds say how fast devices are: each is mostly about one thing that models do."""

from __future__ import annotations

import numpy as np

from ...graph import DType, Graph, Value, constant, input, state, weight
from ...ops import add, attention, causal_mask, gated_delta_net, mul_mat, reshape, rms_norm, swiglu

WIDTH, ROWS, PRODUCTS = 2048, 512, 2
"""Weights are square; so many rows are as of a prompt, which so many weights are multiplied with."""
SHORT, LONG, STEPS, LAYERS = 64, 1 << 18, 384, 3
"""Numbers of a value whose step is all launch, and of one whose message is all bandwidth; steps of a chain;
layers of what is no product."""
SUMMED, HIDDEN = 256, 512
"""Numbers of a value that devices sum, and those between two products, which they deal out."""


def build_matvec_graph(kind: DType, nbytes: int) -> Graph:
    """Products of a vector with weights of so many bytes, one at least."""
    return build_matmul_graph(kind, max(1, nbytes // weight("w", (WIDTH, WIDTH), kind).spec.nbytes), 1)


def build_launch_chain_graph(length: int) -> Graph:
    """Steps that follow each other, half of them sums of a row, half element by element."""
    x: Value = input("x", (1, length))
    for n in range(STEPS):
        name = f"{'ab'[n % 2]}.{n}"
        x = rms_norm(x, eps=1e-6, name=name) if n % 4 < 2 else add(x, x, name=name)
    return Graph({"y": x})


def build_activation_graph() -> Graph:
    """What layers do with the values of a prompt between products."""
    x: Value = input("x", (ROWS, WIDTH))
    for _ in range(LAYERS):
        x = add(x, swiglu(rms_norm(x, eps=1e-6), x))
    return Graph({"y": x})


def build_matmul_graph(kind: DType, number: int, rows: int) -> Graph:
    """Products of `rows` vectors with so many weights."""
    x: Value = input("x", (rows, WIDTH))
    for n in range(number):
        x = mul_mat(weight(f"w{n}", (WIDTH, WIDTH), kind), x)
    return Graph({"y": x})


def build_sharded_matmul_graph(hidden: int) -> Graph:
    """Pairs of products that two devices deal out, and whose results they sum, as the layers of a model: plans have far
    more sums than messages, and these take longer, since whoever waits for one goes to sleep."""
    x: Value = input("x", (1, SUMMED))
    up, down = weight("up", (hidden, SUMMED), DType.F32), weight("down", (SUMMED, hidden), DType.F32)
    for _ in range(STEPS // 2):
        x = mul_mat(down, mul_mat(up, x))
    return Graph({"y": x})


def build_prefill_attention_graph() -> Graph:
    """The second half of a prompt, which sees the first: arithmetic without weights.  Keys and values are states, since
    a backend keeps those in the dtype that they have in models."""
    q = input("q", (ROWS, 8, 64))
    k, v = _context()
    places = constant("places", np.arange(ROWS, 2 * ROWS, dtype=np.int32))
    mask = causal_mask(places, cells=2 * ROWS)
    return Graph({f"y{n}": attention(q, k, v, mask, scale=0.125 + n / 8) for n in range(PRODUCTS)})


def build_decode_attention_graph(nbytes: int) -> Graph:
    """A token that sees a full context in layer after layer, whose keys and values have so many bytes."""
    q: Value = input("q", (1, 8, 64))
    places = constant("places", np.array([2 * ROWS - 1], np.int32))
    mask = causal_mask(places, cells=2 * ROWS)
    for n in range(nbytes // (2 * 2 * ROWS * 2 * 64 * 2)):
        k, v = _context(f".{n}")
        q = attention(q, k, v, mask, scale=0.125)
    return Graph({"y": q})


def _context(layer: str = "") -> tuple[Value, Value]:
    k, v = (reshape(state(name + layer, (2 * ROWS, 2 * 64), "f16"), shape=(2 * ROWS, 2, 64)) for name in "kv")
    return k, v


def build_recurrence_graph() -> Graph:
    """A prompt whose tokens follow each other through a state."""
    q, k, v = (input(name, (ROWS, 8, 128)) for name in "qkv")
    g, beta = input("g", (ROWS, 8, 1)), input("beta", (ROWS, 8))
    y, _ = gated_delta_net(q, k, v, g, beta, input("state", (8, 128, 128)))
    return Graph({"y": y})
