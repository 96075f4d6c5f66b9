"""Fused ops in terms of simpler ones, for rewrites and for the conformance kit.

A decomposition builds, on the operands of an op, a graph of other ops with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ..graph.attrs import Attrs
from ..graph.node import Value, constant
from .chunked_delta_rule import build_chunked_delta_rule
from .declaration.op import Op
from .elementwise.activations import gelu, gelu_erf, gelu_quick, relu, silu, tanh
from .elementwise.binary import mul, scale
from .elementwise.gated_units import geglu, geglu_erf, geglu_quick, reglu, swiglu, swiglu_clamp, swiglu_oai
from .matrix.attention import attention
from .matrix.matmul import mul_mat
from .movement.rows import concat, set_rows
from .movement.views import permute, reshape, slice_, transpose
from .reduction.norms import softmax

Operands = Mapping[str, Value]
Decomposition = Callable[[Operands, Attrs], tuple[Value, ...]]
"""A function of operands by name and attributes that returns the results of the op."""

_PAIRS: Mapping[str, Op[Value]] = {
    op.name: op for op in (reglu, geglu, geglu_erf, geglu_quick, swiglu, swiglu_oai, swiglu_clamp)
}


def _make_gated_unit_decomposition(activation: Op[Value]) -> Decomposition:
    """Return a function that decomposes a gated unit into ``activation(gate) * up``."""
    return lambda operands, attrs: (mul(activation(operands["gate"]), operands["up"]),)


def _decompose_one_operand_glu(operands: Operands, attrs: Attrs) -> tuple[Value, ...]:
    """Split the operand of `glu` into gate and up projection, and apply the gated unit that has two operands."""
    x, pair = operands["x"], _PAIRS[str(attrs["kind"])]
    n = x.shape[-1] // 2
    first, second = (slice_(x, axis=-1, start=i * n, stop=(i + 1) * n) for i in range(2))
    gate, up = (second, first) if attrs["swapped"] else (first, second)
    settings: dict[str, Any] = {name: attrs[name] for name in pair.attribute_types}
    return (pair(gate, up, **settings),)


def _decompose_attention(operands: Operands, attrs: Attrs) -> tuple[Value, ...]:
    """Decompose attention into matrix products and a softmax.

    Query heads that share a key/value head are neighbours.
    """
    q, k, v = operands["q"], operands["k"], operands["v"]
    rank = len(q.shape)
    heads_first = (*range(rank - 3), rank - 2, rank - 3, rank - 1)
    scores = mul_mat(permute(k, axes=heads_first), permute(q, axes=heads_first))
    factor, cap = attrs["scale"], attrs["softcap"]
    assert isinstance(factor, float)
    assert isinstance(cap, float)
    if cap:
        scores, factor = scale(tanh(scale(scores, scale=factor / cap)), scale=cap), 1.0
    p = softmax(scores, operands.get("mask"), operands.get("sinks"), scale=factor, max_bias=attrs["max_bias"])
    return (permute(mul_mat(transpose(permute(v, axes=heads_first)), p), axes=heads_first),)


def _decompose_attention_per_token_over_cache(operands: Operands, attrs: Attrs) -> tuple[Value, ...]:
    """Decompose attention into one `attention` call per token, over a KV cache that two row updates fill."""
    q, k, v, mask = operands["q"], operands["k"], operands["v"], operands.get("mask")
    keys, values = _write_zero_cache_later_half_first(k, "k"), _write_zero_cache_later_half_first(v, "v")
    settings: dict[str, Any] = dict(attrs)
    rows = []
    for t in range(q.shape[-3]):
        one = slice_(q, axis=-3, start=t, stop=t + 1)
        seen = None if mask is None else slice_(mask, axis=-2, start=t, stop=t + 1)
        rows.append(attention(one, keys, values, seen, operands.get("sinks"), **settings))
    out = rows[0]
    for row in rows[1:]:
        out = concat(out, row, axis=-3)
    return (out,)


def _write_zero_cache_later_half_first(x: Value, name: str) -> Value:
    """Write all rows of `x` [..., s, h, d] into a cache of zeros with two row updates, the later half first.

    Args:
        x: keys or values.
        name: name prefix of the constants with row numbers.
    """
    flat = reshape(x, shape=(*x.shape[:-2], x.shape[-2] * x.shape[-1]))
    cache, cells = scale(flat, scale=0.0), x.shape[-3]
    for half, start, stop in (("late", cells // 2, cells), ("early", 0, cells // 2)):
        ids = constant(f"{name}.{half}", np.arange(start, stop, dtype=np.int32))
        cache = set_rows(cache, slice_(flat, axis=-2, start=start, stop=stop), ids)
    return reshape(cache, shape=x.shape)


DECOMPOSITIONS: Mapping[str, Mapping[str, Decomposition]] = MappingProxyType(
    {
        "reglu": {"unfused": _make_gated_unit_decomposition(relu)},
        "geglu": {"unfused": _make_gated_unit_decomposition(gelu)},
        "geglu_erf": {"unfused": _make_gated_unit_decomposition(gelu_erf)},
        "geglu_quick": {"unfused": _make_gated_unit_decomposition(gelu_quick)},
        "swiglu": {"unfused": _make_gated_unit_decomposition(silu)},
        "glu": {"unfused": _decompose_one_operand_glu},
        "attention": {"unfused": _decompose_attention, "cached": _decompose_attention_per_token_over_cache},
        "gated_delta_net": {"unfused": build_chunked_delta_rule},
    }
)
"""Decompositions by op. ``unfused`` uses simpler ops; the others rearrange calls of the same op."""


def list_applicable_decompositions(op: str, operands: Mapping[str, object], attrs: Attrs) -> tuple[str, ...]:
    """Return the names of all decompositions that compute the same as a call of `op` with these operands.

    A call with one mask per head, or with a pool of states, has none.
    """
    if attrs.get("mask_heads", "one") != "one" or attrs.get("pool", "none") != "none":
        return ()
    return tuple(DECOMPOSITIONS.get(op, {}))
