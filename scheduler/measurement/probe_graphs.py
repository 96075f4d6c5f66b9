"""Graphs of the probe runs. In each graph, one kind of work dominates the time."""

from __future__ import annotations

import numpy as np

from ...graph import DType, Graph, Value, constant, input, state, weight
from ...ops import add, attention, causal_mask, gated_delta_net, mul_mat, reshape, rms_norm, swiglu

WEIGHT_WIDTH, PROMPT_ROWS, PROMPT_MATMUL_COUNT = 2048, 512, 2
"""Rows and columns of a weight; token rows of a prompt; the number of weights that multiply these rows."""
SHORT_CHAIN_WIDTH, LONG_CHAIN_WIDTH, CHAIN_STEPS, ACTIVATION_LAYERS = 64, 1 << 18, 384, 3
"""Elements of a value for latency probes, and for bandwidth probes; nodes of a chain; layers of an activation graph.

A node over `SHORT_CHAIN_WIDTH` elements takes only the time of its launch. A message of `LONG_CHAIN_WIDTH` elements
takes only the time of its bytes."""
SUMMED_WIDTH, SHARDED_HIDDEN_WIDTH = 256, 512
"""Elements of a value that devices sum; elements between two products, which the devices shard."""


def build_matvec_chain_graph(kind: DType, nbytes: int) -> Graph:
    """Build the probe of matrix-vector products: a chain of products that read about `nbytes` bytes of weights.

    Args:
        kind: Dtype of the weights.
        nbytes: Bytes of all weights together. There is at least one weight.
    """
    return build_matmul_chain_graph(
        kind, max(1, nbytes // weight("w", (WEIGHT_WIDTH, WEIGHT_WIDTH), kind).spec.nbytes), 1
    )


def build_launch_and_message_chain_graph(length: int) -> Graph:
    """Build the probe of kernel launches and of messages: a chain of small nodes over `length` elements.

    Half of the nodes reduce a row, and half are element-wise. Names begin alternately with ``a.`` and ``b.``. So
    placement rules can put neighbours on different devices, which then exchange messages.
    """
    x: Value = input("x", (1, length))
    for n in range(CHAIN_STEPS):
        name = f"{'ab'[n % 2]}.{n}"
        x = rms_norm(x, eps=1e-6, name=name) if n % 4 < 2 else add(x, x, name=name)
    return Graph({"y": x})


def build_prefill_activation_graph() -> Graph:
    """Build the probe of activations in prefill: the ops of decoder layers over a prompt, without matrix products."""
    x: Value = input("x", (PROMPT_ROWS, WEIGHT_WIDTH))
    for _ in range(ACTIVATION_LAYERS):
        x = add(x, swiglu(rms_norm(x, eps=1e-6), x))
    return Graph({"y": x})


def build_matmul_chain_graph(kind: DType, number: int, rows: int) -> Graph:
    """Build the probe of matrix products: a chain of products, each with a weight of its own.

    Args:
        kind: Dtype of the weights.
        number: Number of weights and products.
        rows: Token rows of the activations.
    """
    x: Value = input("x", (rows, WEIGHT_WIDTH))
    for n in range(number):
        x = mul_mat(weight(f"w{n}", (WEIGHT_WIDTH, WEIGHT_WIDTH), kind), x)
    return Graph({"y": x})


def build_collective_matmul_graph(hidden: int) -> Graph:
    """Build the probe of collectives: pairs of matrix products that two devices shard over `hidden` elements.

    The devices sum the results of each pair with a collective, as in the layers of a model. Sums are measured instead
    of messages, because plans have far more sums. A message would take longer, because its receiver sleeps while it
    waits.
    """
    x: Value = input("x", (1, SUMMED_WIDTH))
    up, down = weight("up", (hidden, SUMMED_WIDTH), DType.F32), weight("down", (SUMMED_WIDTH, hidden), DType.F32)
    for _ in range(CHAIN_STEPS // 2):
        x = mul_mat(down, mul_mat(up, x))
    return Graph({"y": x})


def build_prefill_attention_graph() -> Graph:
    """Build the probe of attention in prefill: the tokens of the second half of a prompt attend to both halves.

    The graph has no weights. Keys and values are states, because a backend keeps states in the dtype that they have in
    models.
    """
    q = input("q", (PROMPT_ROWS, 8, 64))
    k, v = _build_key_value_states()
    places = constant("places", np.arange(PROMPT_ROWS, 2 * PROMPT_ROWS, dtype=np.int32))
    mask = causal_mask(places, cells=2 * PROMPT_ROWS)
    return Graph({f"y{n}": attention(q, k, v, mask, scale=0.125 + n / 8) for n in range(PROMPT_MATMUL_COUNT)})


def build_decode_attention_graph(nbytes: int) -> Graph:
    """Build the probe of decode attention: one token attends to a full context, in successive layers.

    Args:
        nbytes: Bytes of the keys and values of all layers together.
    """
    q: Value = input("q", (1, 8, 64))
    places = constant("places", np.array([2 * PROMPT_ROWS - 1], np.int32))
    mask = causal_mask(places, cells=2 * PROMPT_ROWS)
    for n in range(nbytes // (2 * 2 * PROMPT_ROWS * 2 * 64 * 2)):
        k, v = _build_key_value_states(f".{n}")
        q = attention(q, k, v, mask, scale=0.125)
    return Graph({"y": q})


def _build_key_value_states(layer: str = "") -> tuple[Value, Value]:
    """Return the states with the keys and the values of one layer, in float16: [tokens, heads, head width]."""
    k, v = (
        reshape(state(name + layer, (2 * PROMPT_ROWS, 2 * 64), "f16"), shape=(2 * PROMPT_ROWS, 2, 64)) for name in "kv"
    )
    return k, v


def build_delta_rule_graph() -> Graph:
    """Build the probe of recurrent ops: the gated delta rule over a prompt, where each token reads the last state."""
    q, k, v = (input(name, (PROMPT_ROWS, 8, 128)) for name in "qkv")
    g, beta = input("g", (PROMPT_ROWS, 8, 1)), input("beta", (PROMPT_ROWS, 8))
    y, _ = gated_delta_net(q, k, v, g, beta, input("state", (8, 128, 128)))
    return Graph({"y": y})
