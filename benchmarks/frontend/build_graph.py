"""Measure the time to build, order, verify, hash, dump and parse a transformer graph of 15,000 nodes.

Run ``python benchmarks/frontend/build_graph.py``; it needs only hocket and prints medians.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from statistics import median
from time import perf_counter

from hocket import ops
from hocket.graph import Graph, Value, format_graph, from_json, input, parse, state, to_json, weight

NODE_COUNT = 15_000
MAX_SECONDS = 0.3
"""The limit for building, in seconds."""


def build_layer(i: int, x: Value, pos: Value, mask: Value, updates: dict[Value, Value]) -> Value:
    """Build one layer of a dense decoder: 36 nodes, leaves and views included.

    Args:
        i: The index of the layer.
        x: The hidden states [tokens, width].
        pos: The positions of the tokens.
        mask: The attention mask.
        updates: State updates, to which the updates of the KV cache are added.
    """
    t, width, heads, groups, size, cells, ffn = 4, 256, 8, 2, 32, 64, 512

    def w(name: str, *shape: int) -> Value:
        return weight(f"blk.{i}.{name}.weight", shape, "q8_0" if len(shape) > 1 else "f32")

    h = ops.mul(ops.rms_norm(x, eps=1e-5), w("attn_norm", width), name=f"norm.{i}")
    q = ops.reshape(ops.mul_mat(w("attn_q", heads * size, width), h), shape=(t, heads, size), name=f"q.{i}")
    k = ops.reshape(ops.mul_mat(w("attn_k", groups * size, width), h), shape=(t, groups, size))
    q = ops.rope(q, pos, n_dims=size, mode="neox", base=500000.0)
    k = ops.reshape(ops.rope(k, pos, n_dims=size, mode="neox", base=500000.0), shape=(t, groups * size))
    v = ops.mul_mat(w("attn_v", groups * size, width), h)
    caches = []
    for name, new in (("k", k), ("v", v)):
        cache = state(f"cache.{name}.{i}", (cells, groups * size), "f16")
        updates[cache] = ops.set_rows(cache, new, pos)
        caches.append(ops.reshape(updates[cache], shape=(cells, groups, size)))
    o = ops.reshape(ops.attention(q, *caches, mask, scale=size**-0.5), shape=(t, heads * size))
    x = ops.add(x, ops.mul_mat(w("attn_output", width, heads * size), o), name=f"attn.{i}")
    h = ops.mul(ops.rms_norm(x, eps=1e-5), w("ffn_norm", width))
    gate, up = (ops.mul_mat(w(name, ffn, width), h) for name in ("ffn_gate", "ffn_up"))
    return ops.add(x, ops.mul_mat(w("ffn_down", width, ffn), ops.swiglu(gate, up)), name=f"out.{i}")


def build_graph(nodes: int = NODE_COUNT) -> Graph:
    """Build layers until the graph has at least `nodes` nodes."""
    x, pos = input("x", (4, 256)), input("pos", (4,), "i32")
    mask = ops.causal_mask(pos, cells=64)
    updates: dict[Value, Value] = {}
    per_layer = 36
    for i in range(-(-(nodes - 3) // per_layer)):
        x = build_layer(i, x, pos, mask, updates)
    return Graph({"hidden": x}, updates)


def measure_call_seconds(work: Callable[[], object], runs: int = 7) -> float:
    """Return the median wall time of one call, in seconds; each call starts after a garbage collection."""
    times = []
    for _ in range(runs):
        gc.collect()
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)


def main() -> None:
    graph = build_graph()
    text, document = format_graph(graph), to_json(graph)
    rows: dict[str, Callable[[], object]] = {
        "build": build_graph,
        "verify": lambda: ops.verify(graph),
        "digest": graph.digest,
        "dump": lambda: format_graph(graph),
        "parse": lambda: parse(text),
        "to_json": lambda: to_json(graph),
        "from_json": lambda: from_json(document),
    }
    print(f"{len(graph.nodes)} nodes")
    times = {name: measure_call_seconds(work) for name, work in rows.items()}
    for name, time in times.items():
        print(f"{name:<10} {time * 1e3:8.1f} ms   {time / len(graph.nodes) * 1e6:6.2f} µs a node")
    print(f"limit for building {MAX_SECONDS * 1e3:.0f} ms: {'met' if times['build'] < MAX_SECONDS else 'MISSED'}")


if __name__ == "__main__":
    main()
