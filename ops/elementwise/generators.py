"""Ops that generate values from attributes: ranges, constants, timestep embeddings."""

from __future__ import annotations

import math

import numpy as np

from ...graph.attrs import Attrs
from ...graph.spec import Spec
from ..declaration.attributes import float_attribute
from ..declaration.op import Array, OperandSpecs, op
from ..declaration.samples import LegalRange, expand_template
from ..declaration.scalar import Scalar, as_scalar
from ..declaration.signature import SignatureMismatch


def _count_steps(start: float, stop: float, step: float) -> int:
    return max(0, math.ceil((stop - start) / step))


def _infer_arange(specs: OperandSpecs, attrs: Attrs) -> Spec:
    start, stop, step = (float(float_attribute(attrs, k)) for k in ("start", "stop", "step"))
    if step == 0.0 or not all(map(math.isfinite, (start, stop, step, (stop - start) / step))):
        raise SignatureMismatch(f"start {start}, stop {stop}, step {step}: they must be finite, and step not 0")
    return Spec((_count_steps(start, stop, step),))


@op(
    " -> [n]: f32",
    infer=_infer_arange,
    links=lambda specs, attrs: (),
    samples=(
        *("start=0.0, stop=10.0", "start=2.0, stop=3.1, step=0.25", "start=5.0, stop=-1.0, step=-2.0"),
        *("start=1.0, stop=1.0", "start=-3, stop=4, step=1"),
    ),
    errors=(
        ("start=0.0, stop=4.0, step=0.0", "step not 0"),
        ("start=0.0", "stop is missing"),
        ("start=0.0, stop=1e+300", "at most 3.4028235e38"),
        ("start=0.0, stop=1e+38", "more than 2^63"),
    ),
    is_required=False,
)
def arange(*, start: float, stop: float, step: float = 1.0) -> Array:
    """Return the numbers ``start + i * step`` from `start` to before `stop`. ggml: ``ARANGE``.

    Their count is ``ceil((stop - start) / step)``, computed in float64; ggml computes it in float32.
    """
    return start + step * np.arange(_count_steps(start, stop, step))


@op(
    "x[...] -> [...]",
    inplace="x",
    flops=lambda **_: 0,
    traffic=lambda sources, results, attrs: results[0].nbytes,
    samples=(
        *expand_template("x={x}[{shape}], value=2.5", x=("f32", "f16"), shape=("7", "2,0,4", "2,3,4,5")),
        "x=f32[], value=-1.0",
        "x=f32[3], value=-0.0",
    ),
    errors=(("x=f32[3]", "value is missing"), ("x=i32[3], value=1.0", "x is i32")),
)
def fill(x: Scalar, *, value: float) -> Scalar:
    """Return an array filled with `value`, with the shape and dtype of `x`; `x` is not read. ggml: ``FILL``."""
    return as_scalar(value)


@op(
    "timesteps[...] -> [..., dim]: f32",
    flops=lambda dim, **_: 3 * dim,
    ranges={"timesteps": LegalRange(0.0, 100.0)},
    check=lambda dim, max_period, **_: (
        f"dim is {dim} and max_period {max_period}; they must be at least 0 and 1"
        if dim < 0 or max_period < 1
        else None
    ),
    samples=(
        *expand_template("timesteps=f32[{n}], dim={dim}", n=(1, 5), dim=(2, 7, 32)),
        *("timesteps=f32[2,3], dim=6, max_period=100", "timesteps=f32[0], dim=4", "timesteps=f32[3], dim=1"),
    ),
    errors=(
        ("timesteps=f32[3]", "dim is missing"),
        ("timesteps=f32[3], dim=-2", "dim is -2"),
        ("timesteps=i32[3], dim=4", "timesteps is i32"),
    ),
    is_required=False,
)
def timestep_embedding(timesteps: Array, *, dim: int, max_period: int = 10000) -> Array:
    """Compute the sinusoidal embedding of timesteps: `dim` cosines and sines for each timestep.

    The first half has the cosines of ``t max_period^(-j / h)`` for j below ``h = dim // 2``, the second half their
    sines. If `dim` is odd, a 0 follows. ggml: ``TIMESTEP_EMBEDDING``; Nichol and Dhariwal, GLIDE, 2021.
    """
    half = dim // 2
    angle = timesteps[..., None] * np.exp(-math.log(max_period) * np.arange(half) / max(1, half))
    return np.concatenate([np.cos(angle), np.sin(angle), np.zeros((*timesteps.shape, dim % 2))], axis=-1)
