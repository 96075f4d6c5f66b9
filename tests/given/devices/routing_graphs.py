"""Graphs that choose experts: by scores that are inputs, or by the scores of a product."""

from __future__ import annotations

from collections.abc import Callable

from hocket import ops
from hocket.graph import DType, Graph, Value, input, weight


def choose_experts(k: int, scores: Value) -> Value:
    return ops.top_k(ops.reshape(scores, shape=(scores.shape[0], scores.shape[-1])), k=k)


def router(
    gating: Callable[[Value], Value],
    biased: bool = False,
    normalised: bool = True,
    count: int = 70,
    used: int = 5,
    scores: Value | None = None,
) -> Callable[[bool], Graph]:
    """The routing of three tokens, or of as many as have scores [tokens, 1, count]."""

    def graph(forbidden: bool) -> Graph:
        shares = gating(input("x", (3, 1, count)) if scores is None else scores)
        tokens = shares.shape[0]
        ids = choose_experts(used, ops.add(shares, weight("b", (count,))) if biased else shares)
        taken = ops.reshape(ops.get_rows(ops.reshape(shares, shape=(tokens, count, 1)), ids), shape=(tokens, 1, used))
        if normalised:
            taken = ops.div(taken, ops.clamp(ops.sum_rows(taken), min=0.25, max=float("inf")))
        else:
            taken = ops.scale(taken, scale=2.5)
        return Graph({"ids": ids, "shares": taken, **({"also": ops.neg(shares)} if forbidden else {})})

    return graph


def routed_products(
    gating: Callable[[Value], Value],
    count: int = 70,
    columns: int = 96,
    dtype: DType = DType.F32,
    biased: bool = False,
    normalised: bool = True,
    norm: bool = True,
    tokens: int = 3,
    used: int = 5,
    factors: Value | None = None,
) -> Callable[[bool], Graph]:
    """The routing by the scores of a product; another product has the same rows: a norm, or products.

    With `factors`, the rows are inputs times these factors instead.
    """

    def graph(forbidden: bool) -> Graph:
        x = input("x", (tokens, 1, columns))
        if factors is not None:
            x = ops.mul(x, factors)
        elif norm:
            x = ops.mul(ops.rms_norm(x, eps=1e-6), weight("norm", (columns,)))
        else:
            x = ops.mul_mat(weight("before", (columns, columns)), x)
        scores = ops.mul_mat(weight("router", (count, columns), dtype), x)
        routed = router(gating, biased, normalised, count, used, scores)(forbidden)
        return Graph({**routed.outputs, "gate": ops.mul_mat(weight("gate", (1, columns), dtype), x)})

    return graph
