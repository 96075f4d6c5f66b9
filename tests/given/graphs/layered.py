"""Decoders of many layers that are alike, with caches: graphs that repeat themselves."""

from __future__ import annotations

from hocket import ops
from hocket.graph import Graph, Value, input, state, weight

T, E, H, KV, D, F, C = 2, 16, 8, 4, 4, 24, 6


def decoder(layers: int, *, kv_heads: int = KV) -> Graph:
    """Build a decoder of `layers` layers with caches; the last layer selects rows, as models of files do."""
    x, pos, slots = input("x", (T, E)), input("pos", (1, T), "i32"), input("slots", (T,), "i32")
    mask = ops.causal_mask(ops.reshape(pos, shape=(T,)), cells=C, name="mask")
    updates: dict[Value, Value] = {}
    for layer in range(layers):
        at = f"blk.{layer}."
        h = ops.mul(ops.rms_norm(x), weight(f"{at}norm", (E,)), name=f"{at}normed")
        q = ops.reshape(ops.mul_mat(weight(f"{at}q", (H * D, E)), h), shape=(T, H, D))
        cached = []
        for name in ("k", "v"):
            cache = state(f"{at}cache_{name}", (C, kv_heads * D))
            new = ops.mul_mat(weight(f"{at}{name}", (kv_heads * D, E)), h, name=f"{at}{name}_made")
            updates[cache] = ops.set_rows(cache, new, slots, name=f"{at}{name}_new")
            cached.append(ops.reshape(updates[cache], shape=(C, kv_heads, D)))
        a = ops.attention(q, *cached, mask, scale=0.5, name=f"{at}attended")
        x = ops.add(x, ops.mul_mat(weight(f"{at}o", (E, H * D)), ops.reshape(a, shape=(T, H * D))), name=f"{at}mixed")
        if layer == layers - 1:
            x = ops.get_rows(x, input("wanted", (1,), "i32"), name="chosen")
        h = ops.rms_norm(x)
        g, u = (ops.mul_mat(weight(f"{at}{n}", (F, E)), h, name=f"{at}{n}ed") for n in ("gate", "up"))
        x = ops.add(x, ops.mul_mat(weight(f"{at}down", (E, F)), ops.swiglu(g, u)), name=f"{at}out")
    return Graph({"y": ops.mul_mat(weight("head", (20, E)), ops.rms_norm(x), name="logits")}, updates)


def perceptron(layers: int) -> Graph:
    """Products and residuals alone: nothing is summed yet before the first layer."""
    x = input("x", (T, E))
    for layer in range(layers):
        h = ops.silu(ops.mul_mat(weight(f"up.{layer}", (F, E)), ops.rms_norm(x)))
        x = ops.add(x, ops.mul_mat(weight(f"down.{layer}", (E, F)), h), name=f"out.{layer}")
    return Graph({"y": ops.rms_norm(x)})
