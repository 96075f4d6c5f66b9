"""Normalisations over the last axis, and softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...graph.attrs import Attrs
from ..declaration import scalar
from ..declaration.attributes import float_attribute
from ..declaration.expression import trace
from ..declaration.interpreter import evaluate
from ..declaration.op import Array, op
from ..declaration.samples import expand_template
from ..declaration.scalar import Scalar

_ROWS = expand_template("x={x}[{shape}], eps={eps}", x=("f32",), shape=("7", "3,64", "2,3,33"), eps=(1e-06, 0.1))
_ERRORS = (("x=i32[4]", "x is i32"), ("x=f32[]", "at least 1"), ("x=f32[4], eps=-1.0", "eps is -1.0"))


def _check_eps(eps: float, **_: object) -> str | None:
    return None if 0 <= eps < math.inf else f"eps is {eps}; it must be a finite number of at least 0"


@op(
    "x[..., *c] -> [..., c]",
    inplace="x",
    flops=lambda c, **_: 4 * c,
    check=_check_eps,
    samples=_ROWS,
    errors=_ERRORS,
    signed_zeros=False,
)
def rms_norm(x: Scalar, *, eps: float = 1e-6) -> Scalar:
    """Normalise each row by its root mean square: ``x / sqrt(mean(x^2) + eps)``. ggml: ``RMS_NORM``.

    Rows are the last axis. Zhang and Sennrich, 2019.
    """
    return x * (1.0 / scalar.sqrt(scalar.row_dot(x, x) / scalar.row_count() + eps))


@op(
    "x[..., *c] -> [..., c]",
    inplace="x",
    flops=lambda c, **_: 4 * c,
    check=_check_eps,
    samples=_ROWS,
    errors=_ERRORS,
    signed_zeros=False,
)
def l2_norm(x: Scalar, *, eps: float = 1e-6, clamp: bool = False) -> Scalar:
    """Normalise each row to length 1: ``x / sqrt(sum(x^2) + eps)``.

    With `clamp`, the divisor is ``max(sqrt(sum(x^2)), eps)``, which is ggml's ``L2_NORM``. Delta nets use the form
    without `clamp` (llama.cpp: rms_norm, then scale). Rows are the last axis.
    """
    square = scalar.row_dot(x, x)
    return x * (1.0 / (scalar.larger_of(scalar.sqrt(square), eps) if clamp else scalar.sqrt(square + eps)))


@op(
    "x[..., *c] -> [..., c]",
    inplace="x",
    flops=lambda c, **_: 6 * c,
    check=_check_eps,
    samples=_ROWS,
    errors=_ERRORS,
    is_required=False,
    signed_zeros=False,
)
def norm(x: Scalar, *, eps: float = 1e-5) -> Scalar:
    """Normalise each row to mean 0 and variance 1 (layer norm without weights): ``(x - mean) / sqrt(variance + eps)``.

    Rows are the last axis. ggml: ``NORM``; Ba et al., 2016.
    """
    centred = x - scalar.row_sum(x) / scalar.row_count()
    return centred * (1.0 / scalar.sqrt(scalar.row_dot(centred, centred) / scalar.row_count() + eps))


@op(
    "x[..., *c, *h, *w] -> [..., c, h, w]",
    inplace="x",
    flops=lambda c, h, w, **_: 6 * c * h * w,
    check=lambda groups, eps, **_: f"groups is {groups}; it must be at least 1" if groups < 1 else _check_eps(eps),
    samples=(
        *expand_template("x=f32[{shape}], groups={groups}", shape=("8,3,5", "2,7,1,4"), groups=(1, 2, 4, 7)),
        "x=f32[6,2,3], groups=3, eps=0.1",
        "x=f32[2,4,0,3], groups=2",
        "x=f32[3,1,1], groups=5",
    ),
    errors=(
        ("x=f32[4,3], groups=2", "needs at least 3"),
        ("x=f32[4,3,3], groups=0", "groups is 0"),
        ("x=f32[4,3,3], groups=2, eps=-0.5", "eps is -0.5"),
        ("x=f32[4,3,3]", "groups is missing"),
    ),
    is_required=False,
    signed_zeros=False,
)
def group_norm(x: Array, *, groups: int, eps: float = 1e-6) -> Array:
    """Normalise groups of neighbouring channels to mean 0 and variance 1, as `norm`. ggml: ``GROUP_NORM``.

    A group is normalised over its channels and the last two axes; channels are the axis before these. If `groups` does
    not divide the channels, the last groups are smaller or empty, as in ggml. Wu and He, 2018.
    """
    channels = x.shape[-3]
    run = -(-channels // groups)
    out = np.empty_like(x)
    for start in range(0, channels, max(1, run)):
        part = x[..., start : start + run, :, :]
        flat = part.reshape(*x.shape[:-3], part.shape[-3] * part.shape[-2] * part.shape[-1])
        out[..., start : start + run, :, :] = np.asarray(norm.reference(flat, eps=eps)).reshape(part.shape)
    return out


def normalise_scores(scores: Scalar, sink: Scalar | None) -> Scalar:
    """Return the softmax of a row of scores.

    A row that is -inf everywhere gives zeros.

    Args:
        scores: scores, in float32 at least the lowest finite number where they are not -inf.
        sink: a further score, which adds to the denominator only.
    """
    top = scalar.larger_of(scalar.row_max(scores), LOWEST)
    if sink is not None:
        top = scalar.larger_of(top, sink)
    e = scalar.exp(scores - top)
    total = scalar.row_sum(e) if sink is None else scalar.row_sum(e) + scalar.exp(sink - top)
    return e * scalar.where(scalar.equal(total, 0.0), 0.0, 1.0 / total)


LOWEST = -3.4028234663852886e38
"""The lowest finite float32, the mask value of some models. A row of it has a softmax; only a row of -inf has none."""


def softmax_rows(scores: Array, sinks: Array | None) -> Array:
    """Return the softmax over the last axis of an array; `sinks` adds to the denominators only.

    A row that is -inf everywhere gives zeros.
    """
    expression = trace(normalise_scores, (True, sinks is not None), (), ())
    return evaluate(expression, (scores, sinks), {})


def _arrange_scores(operands: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    """Return the operands of the softmax expression: scores, mask, sinks and ALiBi slopes.

    All of them repeat as tiles to the axes of the scores, [..., heads, tokens, keys].
    """
    x, mask, sinks = (*operands, None, None)[:3]
    sinks = None if sinks is None else sinks[:, None, None]
    if mask is None:
        return x, None, sinks, None
    slopes = alibi_slopes(x.shape[-3], float_attribute(attrs, "max_bias")).astype(x.dtype)
    return x, mask[..., None, :, :] if attrs["mask_heads"] == "one" else mask, sinks, slopes[:, None, None]


def _check_mask_heads(h: int, m: int | None = None, **_: object) -> str | None:
    has_remainder = m is not None and (h % m if m else h)
    return f"mask has {m} heads, which do not divide the {h} of x" if has_remainder else None


@op(
    {
        name: f"x[..., h, t, *s], mask[~..., {axes}]?: float, sinks[h]? -> [..., h, t, s]"
        for name, axes in (("one", "t, s"), ("each", "h, t, s"), ("tiled", "*m, t, s"))
    },
    signature_key="mask_heads",
    inplace="x",
    check=_check_mask_heads,
    arrange=_arrange_scores,
    unsharded_dimensions=lambda attrs: ("h",) if attrs["max_bias"] or attrs["mask_heads"] == "tiled" else (),
    flops=lambda h, t, s, **_: 5 * h * t * s,
    samples=(
        "x=f32[2,3,5]",
        "x=f32[4,2,3,17], scale=0.25",
        "x=f32[2,3,5], mask=f32[3,5]",
        "x=f32[4,2,3,5], mask=f16[2,3,5], scale=0.5",
        "x=f32[2,3,5], mask=f32[3,5], sinks=f32[2]",
        "x=f32[2,3,5], mask=f32[3,5], sinks=f32[2], max_bias=8.0",
        *expand_template(
            'x=f32[4,6,3,5], mask={y}[{b},{m},3,5], mask_heads="{how}", max_bias={bias}',
            y=("f32", "f16"),
            b=(2,),
            m=(6,),
            how=("each", "tiled"),
            bias=(0.0, 8.0),
        ),
        *expand_template('x=f32[6,3,5], mask=f32[{m},3,5], sinks=f32[6], mask_heads="tiled"', m=(1, 2, 3)),
    ),
    errors=(
        ('x=f32[3,3,5], mask=f32[2,3,5], mask_heads="tiled"', "mask has 2 heads"),
        ('x=f32[3,3,5], mask=f32[2,3,5], mask_heads="each"', "h is 3"),
        ("x=f32[2,3,5], mask=f32[3,4]", "s is 5"),
        ("x=f32[2,3,5], sinks=f32[3]", "h is 2"),
        ("x=f32[5]", "rank 1"),
    ),
    infinite=("-x", "-mask"),
    signed_zeros=False,
)
def softmax(
    x: Scalar,
    mask: Scalar | None = None,
    sinks: Scalar | None = None,
    slopes: Scalar | None = None,
    *,
    scale: float = 1.0,
    max_bias: float = 0.0,
    mask_heads: str = "one",
) -> Scalar:
    """Compute the softmax of scaled and masked scores, ``softmax(x * scale + slope * mask)``. ggml: ``SOFT_MAX_EXT``.

    x: scores [..., heads, tokens, keys], at least three axes. `slope` is one factor for each head: 1, or the slope of
    ALiBi if `max_bias` > 0 (Press et al., 2022). `mask_heads` states the masks of heads: ``one`` mask for all heads,
    ``each`` head has its own, or ``tiled``: head i has mask ``i mod m``, as in ggml. A row that is masked completely
    gives zeros. A sink adds to the denominator of its head only.
    """
    scores = x * scale
    if mask is not None and slopes is not None:
        scores = scores + slopes * mask
    return normalise_scores(scores, sinks)


def alibi_slopes(heads: int, max_bias: float) -> Array:
    """Return the ALiBi slope of each head, float64 [heads].

    All slopes are 1 if `max_bias` is 0. Otherwise let n be the largest power of two up to `heads`. Head i below n has
    the slope ``2^(-max_bias (i + 1) / n)``. The other heads have slopes between these.
    """
    if max_bias <= 0.0 or not heads:
        return np.ones(heads)
    n = 1 << (heads.bit_length() - 1)
    i = np.arange(heads, dtype=np.float64)
    return np.where(i < n, 2.0 ** (-max_bias * (i + 1) / n), 2.0 ** (-max_bias / 2 * (2 * (i - n) + 1) / n))
