"""Faults in formulas of single elements: constants, ranges where they overflow, ties, attributes ignored."""

from __future__ import annotations

import math

import numpy as np

from hocket.ops import REGISTRY
from hocket.ops.declaration.broadcasting import tile_to_shape

from .site import INFINITE, NAN, NO_ZEROS, WRONG_SIGN, FaultSite, fault_after_result, fault_in_result, round_to_half


def _naive_sigmoid(x):
    e = np.exp(x.astype(np.float32))
    return e / (1 + e)


def _tanh_by_exp(site: FaultSite):
    e = np.exp(2 * site.exact(0).astype(np.float32))
    return (e - 1) / (e + 1)


def _gelu_of_half(site: FaultSite):
    """A table of float16, as one finds for speed."""
    return site.right([round_to_half(site.src[0])])


def _swap_operands(site: FaultSite):
    return site.right([site.src[1], site.src[0]])


def _clamp_both(site: FaultSite):
    """The gate clamped from below as well, which only `up` should be."""
    limit = site.attrs["limit"]
    return site.right([np.clip(site.src[0], -limit, limit), site.src[1]])


def _last_row(site: FaultSite) -> None:
    site.dst[0].reshape(-1)[-1] *= np.float32(1.001)


def _one_row_of_many(site: FaultSite) -> None:
    """Past 4,096 rows a grid dimension wraps, and one row is wrong by a little."""
    rows = site.dst[0].reshape(-1, site.dst[0].shape[-1]) if site.dst[0].ndim else site.dst[0].reshape(1, 1)
    if len(rows) > 4096:
        rows[4097] *= np.float32(1.0 + 1e-4)


def _matching_infinity(site: FaultSite) -> None:
    """Wrong only in tensors that hold an infinity elsewhere, where a pooled NMSE is NaN and compares as good."""
    out = site.dst[0]
    if np.isinf(out).any():
        out[np.isfinite(out)] *= np.float32(1.5)


def _nearly_zero(site: FaultSite, operand: int):
    """Add a number that is too small to be wrong, and too large for a partial sum of another device."""
    return np.where(site.exact(operand) == 0, 1e-30, site.right()[0])


def _flush_subnormals(site: FaultSite) -> None:
    """Flush subnormal results to zero, as some processors do."""
    out = site.dst[0]
    if out.dtype.kind == "f":
        out[np.abs(out) < np.finfo(np.float32).tiny] *= 0


def _first_of_equals(site: FaultSite):
    a = site.exact(0)
    b = tile_to_shape(site.exact(1), a.shape)
    return np.where((a >= b) | np.isnan(a), a, b)


FAULTS = (
    fault_after_result("mul", "subnormal results flushed", _flush_subnormals),
    fault_after_result("silu", "subnormal results flushed", _flush_subnormals),
    fault_after_result("cont", "subnormal numbers flushed", _flush_subnormals),
    fault_after_result("where", "subnormal numbers flushed", _flush_subnormals),
    fault_in_result("neg", "subtracts from zero", lambda s: 0.0 - s.exact(0), symptom=WRONG_SIGN),
    fault_in_result("scale", "adds a bias of zero", lambda s: s.exact(0) * s.attrs["scale"] + 0.0, symptom=WRONG_SIGN),
    fault_in_result("relu", "lets -0 through", lambda s: np.where(s.exact(0) < 0, 0.0, s.exact(0)), symptom=WRONG_SIGN),
    fault_in_result("maximum", "the first of zeros", _first_of_equals, symptom=WRONG_SIGN),
    fault_in_result(
        "div", "zero for a zero divisor", lambda s: np.nan_to_num(s.right()[0], posinf=0.0), symptom=INFINITE
    ),
    fault_in_result("ceil", "+0 above -1", lambda s: np.ceil(s.exact(0)) + 0.0, symptom=WRONG_SIGN),
    fault_after_result("add", "last element wrong by a thousandth", _last_row),
    fault_after_result("sub", "one row of 4,099 wrong", _one_row_of_many),
    fault_after_result("add", "wrong beside infinities only", _matching_infinity),
    fault_in_result("scale", "applied twice", lambda s: s.exact(0) * s.attrs["scale"] ** 2 + s.attrs["bias"]),
    fault_in_result("scale", "bias added before scaling", lambda s: (s.exact(0) + s.attrs["bias"]) * s.attrs["scale"]),
    fault_in_result("scale", "bias ignored", lambda s: s.right(bias=0.0)),
    fault_in_result(
        "div",
        "reciprocal in float16",
        lambda s: s.exact(0) * round_to_half(1 / REGISTRY["add"].run_reference(_b(s), {})[0]),
    ),
    fault_in_result("clamp", "lower bound ignored", lambda s: np.minimum(s.exact(0), s.attrs["max"])),
    fault_in_result("sigmoid", "NaN for large x", lambda s: _naive_sigmoid(s.exact(0)), symptom=NAN),
    fault_in_result("tanh", "NaN for large x", _tanh_by_exp),
    fault_in_result(
        "softplus", "overflows for large x", lambda s: np.log1p(np.exp(s.exact(0).astype(np.float32))), symptom=INFINITE
    ),
    fault_in_result("silu", "0 below -20", lambda s: np.where(s.exact(0) < -8, 0.0, s.right()[0])),
    fault_in_result("gelu", "erf instead of tanh", lambda s: REGISTRY["gelu_erf"].run_reference([s.exact(0)], {})),
    fault_in_result("gelu_erf", "tanh instead of erf", lambda s: REGISTRY["gelu"].run_reference([s.exact(0)], {})),
    fault_in_result("gelu_quick", "1.7 instead of 1.702", lambda s: s.exact(0) / (1 + np.exp(-1.7 * s.exact(0)))),
    fault_in_result("gelu", "argument rounded to float16", _gelu_of_half),
    fault_in_result("exp", "in float16", lambda s: round_to_half(np.exp(round_to_half(s.src[0])))),
    fault_in_result("expm1", "subtracts 1 in float32", lambda s: np.exp(s.exact(0).astype(np.float32)) - np.float32(1)),
    fault_in_result("log", "by the base-2 constant of 4 digits", lambda s: np.log2(s.exact(0)) * 0.6931),
    fault_in_result("cos", "argument without reduction", lambda s: 1 - s.exact(0) ** 2 / 2 + s.exact(0) ** 4 / 24),
    fault_in_result("relu", "cut at a small threshold", lambda s: np.where(s.exact(0) > 1e-3, s.exact(0), 0.0)),
    fault_in_result("abs", "sign bit of float16 only", lambda s: round_to_half(np.abs(s.exact(0)))),
    fault_in_result("leaky_relu", "slope also above 0", lambda s: s.exact(0) * s.attrs["negative_slope"]),
    fault_in_result(
        "elu", "alpha of 1.05", lambda s: np.where(s.exact(0) > 0, s.exact(0), 1.05 * np.expm1(s.exact(0)))
    ),
    fault_in_result("hardswish", "divides by 6.0 and multiplies by 0.166", lambda s: s.right()[0] * 6 * 0.166),
    fault_in_result("sgn", "1 for zero", lambda s: np.where(s.exact(0) >= 0, 1.0, -1.0)),
    fault_in_result("step", "1 for zero", lambda s: np.where(s.exact(0) >= 0, 1.0, 0.0)),
    fault_in_result("round", "halves to even", lambda s: np.rint(s.exact(0))),
    fault_in_result("floor", "truncates negative numbers", lambda s: np.trunc(s.exact(0))),
    fault_in_result("ceil", "adds 1 to whole numbers", lambda s: np.floor(s.exact(0)) + 1),
    fault_in_result("trunc", "rounds", lambda s: np.rint(s.exact(0))),
    fault_in_result("sqr", "keeps the sign", lambda s: s.exact(0) * np.abs(s.exact(0))),
    fault_in_result("sqrt", "by a float16 estimate", lambda s: round_to_half(np.sqrt(s.exact(0)))),
    fault_in_result("swiglu", "gate and up exchanged", _swap_operands),
    fault_in_result("swiglu", "a gate of zero lets a trace through", lambda s: _nearly_zero(s, 0), symptom=NO_ZEROS),
    fault_in_result("swiglu_clamp", "an up of zero lets a trace through", lambda s: _nearly_zero(s, 1)),
    fault_in_result("silu", "a trace for zero", lambda s: _nearly_zero(s, 0), symptom=NO_ZEROS),
    fault_in_result("geglu", "gate and up exchanged", _swap_operands),
    fault_in_result("reglu", "negative gates let through", lambda s: s.exact(0) * s.exact(1)),
    fault_in_result("swiglu_oai", "gate clamped from below too", _clamp_both),
    fault_in_result("swiglu_oai", "alpha of silu", lambda s: s.right(alpha=1.0)),
    fault_in_result("swiglu_clamp", "limit ignored", lambda s: s.right(limit=math.inf)),
    fault_in_result("glu", "`swapped` ignored", lambda s: s.right(swapped=False)),
    fault_in_result("xielu", "eps ignored", lambda s: s.right(eps=0.0) if s.attrs["eps"] else s.right(eps=-1e-2)),
)


def _b(site: FaultSite) -> list:
    """`b` tiled to the shape of `a`, by adding it to zeros."""
    return [np.zeros(site.src[0].shape), site.exact(1)]
