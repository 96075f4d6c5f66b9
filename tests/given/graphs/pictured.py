"""Graphs other than language models, for tests of views: a vision transformer, a mixer, an encoder-decoder."""

from __future__ import annotations

import random

from hocket import ops
from hocket.graph import Graph, Value, input, weight

WIDTH = 32


def linear(name: str, x: Value, n: int) -> Value:
    return ops.add(ops.mul_mat(weight(f"{name}.weight", (n, x.shape[-1])), x), weight(f"{name}.bias", (n,)))


def add_norm(name: str, x: Value) -> Value:
    return ops.mul(ops.norm(x, eps=1e-6), weight(f"{name}.scale", (x.shape[-1],)))


def add_attention(name: str, x: Value, memory: Value, heads: int = 4) -> Value:
    (t, n), s = x.shape, memory.shape[0]
    q = ops.permute(ops.reshape(linear(f"{name}.q", x, n), shape=(t, heads, n // heads)), axes=(1, 0, 2))
    k = ops.permute(ops.reshape(linear(f"{name}.k", memory, n), shape=(s, heads, n // heads)), axes=(1, 0, 2))
    v = ops.permute(ops.reshape(linear(f"{name}.v", memory, n), shape=(s, heads, n // heads)), axes=(1, 2, 0))
    mixed = ops.permute(ops.mul_mat(v, ops.softmax(ops.mul_mat(k, q))), axes=(1, 0, 2))
    return linear(f"{name}.out", ops.reshape(ops.cont(mixed), shape=(t, n)), n)


def perceptron(name: str, x: Value) -> Value:
    return linear(f"{name}.down", ops.gelu(linear(f"{name}.up", x, 2 * WIDTH)), x.shape[-1])


def vision_transformer(layers: int = 6) -> Graph:
    x = linear("patches", input("image", (16, 12)), WIDTH)
    for i in range(layers):
        a = add_norm(f"encoder.{i}.norm1", x)
        x = ops.add(x, add_attention(f"encoder.{i}.attention", a, a))
        x = ops.add(x, perceptron(f"encoder.{i}.mlp", add_norm(f"encoder.{i}.norm2", x)))
    return Graph({"classes": linear("head", add_norm("norm", x), 10)})


def mixer(layers: int = 5) -> Graph:
    x = linear("stem", input("image", (16, 12)), WIDTH)
    for i in range(layers):
        transposed = ops.cont(ops.transpose(add_norm(f"mix.{i}.tokens.norm", x)))
        x = ops.add(x, ops.cont(ops.transpose(perceptron(f"mix.{i}.tokens", transposed))))
        x = ops.add(x, perceptron(f"mix.{i}.channels", add_norm(f"mix.{i}.channels.norm", x)))
    return Graph({"classes": linear("head", x, 10)})


def encoder_decoder(layers: int = 4) -> Graph:
    x = linear("embed.source", input("source", (8, WIDTH)), WIDTH)
    for i in range(layers):
        a = add_norm(f"encoder.{i}.norm1", x)
        x = ops.add(x, add_attention(f"encoder.{i}.own", a, a))
        x = ops.add(x, perceptron(f"encoder.{i}.mlp", add_norm(f"encoder.{i}.norm2", x)))
    y = linear("embed.target", input("target", (4, WIDTH)), WIDTH)
    for i in range(layers):
        a = add_norm(f"decoder.{i}.norm1", y)
        y = ops.add(y, add_attention(f"decoder.{i}.own", a, a))
        y = ops.add(y, add_attention(f"decoder.{i}.cross", add_norm(f"decoder.{i}.norm2", y), x))
        y = ops.add(y, perceptron(f"decoder.{i}.mlp", add_norm(f"decoder.{i}.norm3", y)))
    return Graph({"words": linear("head", y, 16)})


def without_names(graph: Graph) -> Graph:
    """The same graph, weights by number and nodes without names."""
    new: dict[Value, Value] = {}
    for number, node in enumerate(graph.nodes):
        src = tuple(None if s is None else new[s] for s in node.src)
        name = f"v{number}" if node.is_leaf else ""
        copy = type(node)(node.op, src, node.attrs, node.specs, name)
        new.update(zip(node.results, copy.results, strict=True))
    return Graph(
        {name: new[v] for name, v in graph.outputs.items()}, {new[a]: new[b] for a, b in graph.updates.items()}
    )


def random_nodes(count: int = 2000, seed: int = 3) -> Graph:
    """Sums and products of values that came shortly before, now and then of one from long ago."""
    pick = random.Random(seed)
    values = [input("x", (4, 8)), weight("w", (4, 8))]
    while len(values) < count:
        recent_value, any_value = values[-1 - pick.randrange(min(12, len(values)))], values[pick.randrange(len(values))]
        a, b = (recent_value, any_value) if pick.random() < 0.1 else (recent_value, values[-1])
        values.append(pick.choice([ops.add, ops.mul, ops.sub])(a, b))
    used = {s for v in values for s in v.node.inputs}
    return Graph({f"y{i}": v for i, v in enumerate(v for v in values if v not in used)})


PICTURED = {"vision": vision_transformer, "mixer": mixer, "translation": encoder_decoder, "random": random_nodes}
