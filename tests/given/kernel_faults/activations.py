"""Faults in formulas of single elements: constants, ranges where they overflow, ties, attributes ignored."""

from __future__ import annotations

import math

import numpy as np

from hocket.ops import REGISTRY
from hocket.ops.declaration.broadcasting import tile_to_shape

from .site import INFINITE, NAN, NO_ZEROS, WRONG_SIGN, Site, after, half, wrong


def _naive_sigmoid(x):
    e = np.exp(x.astype(np.float32))
    return e / (1 + e)


def _tanh_by_exp(site: Site):
    e = np.exp(2 * site.exact(0).astype(np.float32))
    return (e - 1) / (e + 1)


def _gelu_of_half(site: Site):
    """A table of float16, as one finds for speed."""
    return site.right([half(site.src[0])])


def _swap_operands(site: Site):
    return site.right([site.src[1], site.src[0]])


def _clamp_both(site: Site):
    """The gate clamped from below as well, which only `up` should be."""
    limit = site.attrs["limit"]
    return site.right([np.clip(site.src[0], -limit, limit), site.src[1]])


def _last_row(site: Site) -> None:
    site.dst[0].reshape(-1)[-1] *= np.float32(1.001)


def _one_row_of_many(site: Site) -> None:
    """Past 4,096 rows a grid dimension wraps, and one row is wrong by a little."""
    rows = site.dst[0].reshape(-1, site.dst[0].shape[-1]) if site.dst[0].ndim else site.dst[0].reshape(1, 1)
    if len(rows) > 4096:
        rows[4097] *= np.float32(1.0 + 1e-4)


def _matching_infinity(site: Site) -> None:
    """Wrong only in tensors that hold an infinity elsewhere, where a pooled NMSE is NaN and compares as good."""
    out = site.dst[0]
    if np.isinf(out).any():
        out[np.isfinite(out)] *= np.float32(1.5)


def _nearly_zero(site: Site, operand: int):
    """Too little to be wrong, and too much for what another device is to add."""
    return np.where(site.exact(operand) == 0, 1e-30, site.right()[0])


def _flush_subnormals(site: Site) -> None:
    """Flush subnormal results to zero, as some processors do."""
    out = site.dst[0]
    if out.dtype.kind == "f":
        out[np.abs(out) < np.finfo(np.float32).tiny] *= 0


def _first_of_equals(site: Site):
    a = site.exact(0)
    b = tile_to_shape(site.exact(1), a.shape)
    return np.where((a >= b) | np.isnan(a), a, b)


FAULTS = (
    after("mul", "subnormal results flushed", _flush_subnormals),
    after("silu", "subnormal results flushed", _flush_subnormals),
    after("cont", "subnormal numbers flushed", _flush_subnormals),
    after("where", "subnormal numbers flushed", _flush_subnormals),
    wrong("neg", "subtracts from zero", lambda s: 0.0 - s.exact(0), symptom=WRONG_SIGN),
    wrong("scale", "adds a bias of zero", lambda s: s.exact(0) * s.attrs["scale"] + 0.0, symptom=WRONG_SIGN),
    wrong("relu", "lets -0 through", lambda s: np.where(s.exact(0) < 0, 0.0, s.exact(0)), symptom=WRONG_SIGN),
    wrong("maximum", "the first of zeros", _first_of_equals, symptom=WRONG_SIGN),
    wrong("div", "zero for a zero divisor", lambda s: np.nan_to_num(s.right()[0], posinf=0.0), symptom=INFINITE),
    wrong("ceil", "+0 above -1", lambda s: np.ceil(s.exact(0)) + 0.0, symptom=WRONG_SIGN),
    after("add", "last element wrong by a thousandth", _last_row),
    after("sub", "one row of 4,099 wrong", _one_row_of_many),
    after("add", "wrong beside infinities only", _matching_infinity),
    wrong("scale", "applied twice", lambda s: s.exact(0) * s.attrs["scale"] ** 2 + s.attrs["bias"]),
    wrong("scale", "bias added before scaling", lambda s: (s.exact(0) + s.attrs["bias"]) * s.attrs["scale"]),
    wrong("scale", "bias ignored", lambda s: s.right(bias=0.0)),
    wrong("div", "reciprocal in float16", lambda s: s.exact(0) * half(1 / REGISTRY["add"].run_reference(_b(s), {})[0])),
    wrong("clamp", "lower bound ignored", lambda s: np.minimum(s.exact(0), s.attrs["max"])),
    wrong("sigmoid", "NaN for large x", lambda s: _naive_sigmoid(s.exact(0)), symptom=NAN),
    wrong("tanh", "NaN for large x", _tanh_by_exp),
    wrong(
        "softplus", "overflows for large x", lambda s: np.log1p(np.exp(s.exact(0).astype(np.float32))), symptom=INFINITE
    ),
    wrong("silu", "0 below -20", lambda s: np.where(s.exact(0) < -8, 0.0, s.right()[0])),
    wrong("gelu", "erf instead of tanh", lambda s: REGISTRY["gelu_erf"].run_reference([s.exact(0)], {})),
    wrong("gelu_erf", "tanh instead of erf", lambda s: REGISTRY["gelu"].run_reference([s.exact(0)], {})),
    wrong("gelu_quick", "1.7 instead of 1.702", lambda s: s.exact(0) / (1 + np.exp(-1.7 * s.exact(0)))),
    wrong("gelu", "argument rounded to float16", _gelu_of_half),
    wrong("exp", "in float16", lambda s: half(np.exp(half(s.src[0])))),
    wrong("expm1", "subtracts 1 in float32", lambda s: np.exp(s.exact(0).astype(np.float32)) - np.float32(1)),
    wrong("log", "by the base-2 constant of 4 digits", lambda s: np.log2(s.exact(0)) * 0.6931),
    wrong("cos", "argument without reduction", lambda s: 1 - s.exact(0) ** 2 / 2 + s.exact(0) ** 4 / 24),
    wrong("relu", "cut at a small threshold", lambda s: np.where(s.exact(0) > 1e-3, s.exact(0), 0.0)),
    wrong("abs", "sign bit of float16 only", lambda s: half(np.abs(s.exact(0)))),
    wrong("leaky_relu", "slope also above 0", lambda s: s.exact(0) * s.attrs["negative_slope"]),
    wrong("elu", "alpha of 1.05", lambda s: np.where(s.exact(0) > 0, s.exact(0), 1.05 * np.expm1(s.exact(0)))),
    wrong("hardswish", "divides by 6.0 and multiplies by 0.166", lambda s: s.right()[0] * 6 * 0.166),
    wrong("sgn", "1 for zero", lambda s: np.where(s.exact(0) >= 0, 1.0, -1.0)),
    wrong("step", "1 for zero", lambda s: np.where(s.exact(0) >= 0, 1.0, 0.0)),
    wrong("round", "halves to even", lambda s: np.rint(s.exact(0))),
    wrong("floor", "truncates negative numbers", lambda s: np.trunc(s.exact(0))),
    wrong("ceil", "adds 1 to whole numbers", lambda s: np.floor(s.exact(0)) + 1),
    wrong("trunc", "rounds", lambda s: np.rint(s.exact(0))),
    wrong("sqr", "keeps the sign", lambda s: s.exact(0) * np.abs(s.exact(0))),
    wrong("sqrt", "by a float16 estimate", lambda s: half(np.sqrt(s.exact(0)))),
    wrong("swiglu", "gate and up exchanged", _swap_operands),
    wrong("swiglu", "a gate of zero lets a trace through", lambda s: _nearly_zero(s, 0), symptom=NO_ZEROS),
    wrong("swiglu_clamp", "an up of zero lets a trace through", lambda s: _nearly_zero(s, 1)),
    wrong("silu", "a trace for zero", lambda s: _nearly_zero(s, 0), symptom=NO_ZEROS),
    wrong("geglu", "gate and up exchanged", _swap_operands),
    wrong("reglu", "negative gates let through", lambda s: s.exact(0) * s.exact(1)),
    wrong("swiglu_oai", "gate clamped from below too", _clamp_both),
    wrong("swiglu_oai", "alpha of silu", lambda s: s.right(alpha=1.0)),
    wrong("swiglu_clamp", "limit ignored", lambda s: s.right(limit=math.inf)),
    wrong("glu", "`swapped` ignored", lambda s: s.right(swapped=False)),
    wrong("xielu", "eps ignored", lambda s: s.right(eps=0.0) if s.attrs["eps"] else s.right(eps=-1e-2)),
)


def _b(site: Site) -> list:
    """`b` tiled to the shape of `a`, by adding it to zeros."""
    return [np.zeros(site.src[0].shape), site.exact(1)]
