"""Matrix products, attention, softmax and normalisation of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod

import numpy as np

from ... import ops
from ...graph import Value
from ...graph.errors import format_count
from ..errors import ModelError
from .arithmetic import add, apply_unary_op, as_float, compare, maximum, mul, rsqrt, scale_and_shift, sub, where
from .reductions import reduce_max_min_or_prod, sum_over
from .shapes import expand, move_axis, permute_value, reshape, squeeze, transpose, unsqueeze
from .tensor import Tensor, as_tensor, constant_tensor, reshape_value


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product ``a @ b`` with broadcast leading axes; vectors are treated as in NumPy.

    Raises:
        ModelError: The inner dimensions differ.
    """
    if a.rank == 1 and b.rank == 1:
        return reshape(matmul(unsqueeze(a, 0), unsqueeze(b, 1)), ())
    if a.rank == 1:
        return squeeze(matmul(unsqueeze(a, 0), b), [-2])
    if b.rank == 1:
        return squeeze(matmul(a, unsqueeze(b, 1)), [-1])
    a, b = as_float(a), as_float(b)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if b.shape[-2] != k:
        raise ModelError(
            f"a product of {list(a.shape)} and {list(b.shape)}: {format_count(k, 'column')} against "
            f"{format_count(b.shape[-2], 'row')}"
        )
    ahead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if len(ahead) > 3:
        a, b = expand(a, (*ahead, m, k)), expand(b, (*ahead, k, n))
        a, b = reshape(a, (prod(ahead), m, k)), reshape(b, (prod(ahead), k, n))
    elif a.shape[:-2] != ahead:
        a = expand(a, (*ahead, m, k))
    weight = transpose(b, -1, -2)
    return reshape(as_tensor(ops.mul_mat(weight.value, a.value)), (*ahead, m, n))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``."""
    rows = x if 2 <= x.rank <= 5 else reshape(x, (prod(x.shape[:-1]), x.shape[-1]))
    out = reshape(
        as_tensor(ops.mul_mat(as_float(weight).value, as_float(rows).value)), (*x.shape[:-1], weight.shape[0])
    )
    return out if bias is None else add(out, bias)


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``beta * bias + alpha * (a @ b)``."""
    product = scale_and_shift(matmul(a, b), float(alpha))
    return product if beta == 0 else add(product, scale_and_shift(as_float(bias), float(beta)))


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return ``exp(x) / sum(exp(x))`` along an axis. A row of only -inf gives NaN."""
    if not prod(x.shape):
        return as_float(x)
    scores = as_float(x)
    nan_or_zero = scale_and_shift(reduce_max_min_or_prod("max", scores, axis, keepdim=True), 0.0)
    return masked_softmax(add(scores, nan_or_zero), axis)


def masked_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return the softmax along an axis; a row in which all entries are masked (-inf) becomes zeros instead of NaN."""
    if not x.rank:
        return reshape(masked_softmax(reshape(x, (1,)), 0), ())
    last = move_axis(as_float(x), axis, -1)
    rows = reshape(last, (1, prod(last.shape[:-1]), last.shape[-1])) if not 3 <= last.rank <= 5 else last
    return move_axis(reshape(as_tensor(ops.softmax(rows.value)), last.shape), -1, axis)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return the logarithm of the softmax along an axis."""
    below = sub(x, reduce_max_min_or_prod("max", x, axis, keepdim=True))
    return sub(below, apply_unary_op(ops.log, sum_over(apply_unary_op(ops.exp, below), axis, keepdim=True)))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return scaled dot-product attention, [..., heads, t, v_d].

    Args:
        q: Queries [..., heads, t, d].
        k: Keys [..., kv_heads, s, d]; `kv_heads` may be smaller than `heads`.
        v: Values [..., kv_heads, s, v_d].
        mask: Numbers that are added to the scores, or booleans that permit scores; broadcast to [..., heads, t, s].
        causal: Whether query i attends to keys 0 to i only.
        scale: Factor of the scores; by default ``1 / sqrt(d)``.
    """
    if q.rank == 2:
        return squeeze(
            attention(unsqueeze(q, 0), unsqueeze(k, 0), unsqueeze(v, 0), mask, causal=causal, scale=scale), [0]
        )
    k, v = _remove_repeated_heads(q, k, v)
    if q.shape[-3] == 1:  # it broadcasts, as all leading axes do
        q = expand(q, (*q.shape[:-3], k.shape[-3], *q.shape[-2:]))
    t, s, heads = q.shape[-2], k.shape[-2], q.shape[-3]
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    if causal:
        seen = np.tril(np.ones((t, s), bool))
        mask = constant_tensor(seen) if mask is None else restrict_attention_mask(mask, seen)
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    flat = (prod(batch),) if len(batch) > 2 else batch
    parts = [reshape(expand(x, (*batch, *x.shape[-3:])), (*flat, *x.shape[-3:])) for x in (q, k, v)]
    order = (*range(len(flat)), len(flat) + 1, len(flat), len(flat) + 2)
    seen_by, each = (None, False) if mask is None else _convert_mask_and_detect_per_head_masks(mask, batch, heads, t, s)
    q_first, k_first, v_first = (permute_value(as_float(x).value, order) for x in parts)
    how = "each" if each else "one"
    out = ops.attention(q_first, k_first, v_first, seen_by, scale=float(scale), mask_heads=how)
    return reshape(as_tensor(permute_value(out, order)), (*batch, heads, t, v.shape[-1]))


def _remove_repeated_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values without adjacent copies of each head, because `ops.attention` repeats heads itself."""
    single = _find_heads_before_repetition(k), _find_heads_before_repetition(v)
    if single[0] is None or single[1] is None or not q.shape[-3] == k.shape[-3] == v.shape[-3]:
        return k, v
    if single[0].shape[-3] != single[1].shape[-3]:
        return k, v
    return single[0], single[1]


def _find_heads_before_repetition(x: Tensor) -> Tensor | None:
    """Return the tensor [..., heads, s, d] before `x` repeats each head by an expand and a reshape, or else None."""
    if x.value.node.op != "reshape" or x.exceeds_max_rank or x.rank < 3:
        return None
    (repeated,) = x.value.node.inputs
    if repeated.node.op != "broadcast" or len(repeated.shape) != x.rank + 1:
        return None
    (source,) = repeated.node.inputs
    *batch, heads, _, s, d = repeated.shape
    if (*batch, s, d) != (*x.shape[:-3], *x.shape[-2:]) or source.shape != (*batch, heads, 1, s, d):
        return None
    return as_tensor(reshape_value(source, (*batch, heads, s, d)))


def restrict_attention_mask(mask: Tensor, is_permitted: np.ndarray) -> Tensor:
    """Restrict an attention mask: also forbid the scores where `is_permitted` is false."""
    return where(constant_tensor(is_permitted), mask, False if mask.is_bool else -math.inf)


def _raise_finite_mask_entries_to_minimum(mask: Tensor) -> Tensor:
    """Raise the finite entries of an additive mask to at least -1e30, because kernels that scale lower ones overflow.

    Entries of -inf stay.
    """
    return where(compare("eq", mask, -math.inf), -math.inf, maximum(mask, constant_tensor(np.float32(-1e30))))


def _convert_mask_and_detect_per_head_masks(
    mask: Tensor, batch: Sequence[int], heads: int, t: int, s: int
) -> tuple[Value, bool]:
    """Convert an attention mask to the form of `ops.attention`; also return whether heads have different masks.

    A boolean mask becomes an additive one.

    Args:
        mask: The mask: numbers, or booleans that permit scores.
        batch: Sizes of the axes of the scores before the heads.
        heads: Number of heads.
        t: Number of queries.
        s: Number of keys.
    """
    added = where(mask, 0.0, -math.inf) if mask.is_bool else _raise_finite_mask_entries_to_minimum(as_float(mask))
    whole = reshape(added, (1,) * (2 - added.rank) + added.shape) if added.rank < 2 else added
    own = whole.shape[-3] if whole.rank > 2 else 1
    ahead = whole.shape[:-3]
    size = prod(ahead)
    if size not in (1, prod(batch)):
        ahead, size = tuple(batch), prod(batch)
        whole = expand(whole, (*batch, own, *whole.shape[-2:]))
    whole = expand(whole, (*ahead, own, t, s))
    per_head = own != 1
    flat = (prod(batch),) if len(batch) > 2 else tuple(batch)
    front = () if size == 1 else flat
    shape = (*front, heads, t, s) if per_head else (*front, t, s)
    return reshape_value(whole.value, shape), per_head


# ---------------------------------------------------------------------------------------------------------- norms


def _apply_weight_and_bias(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = mul(x, weight)
    return x if bias is None else add(x, bias)


def layer_norm(
    x: Tensor, axes: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise the last `axes` axes to mean 0 and variance 1, then multiply by a weight and add a bias."""
    last = prod(x.shape[x.rank - axes :])
    rows = reshape(x, (*x.shape[: x.rank - axes], last) if x.rank - axes < 5 else (-1, last))
    return _apply_weight_and_bias(reshape(as_tensor(ops.norm(rows.value, eps=float(eps))), x.shape), weight, bias)


def rms_norm(x: Tensor, axes: int, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Divide the last `axes` axes by their root mean square, then multiply by a weight."""
    last = prod(x.shape[x.rank - axes :])
    rows = reshape(x, (*x.shape[: x.rank - axes], last) if x.rank - axes < 5 else (-1, last))
    return _apply_weight_and_bias(reshape(as_tensor(ops.rms_norm(rows.value, eps=float(eps))), x.shape), weight, None)


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise each of `groups` groups of consecutive channels to mean 0 and variance 1.

    `x` is [images, channels, ...]. A weight and a bias per channel follow.
    """
    n = x.shape[0]
    runs = reshape(x, (n, groups, prod(x.shape[1:]) // groups))
    out = reshape(as_tensor(ops.norm(runs.value, eps=float(eps))), x.shape)
    return _apply_weight_and_bias(
        out, *(None if p is None else reshape_channel_vector(p, x.rank) for p in (weight, bias))
    )


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float = 1e-5
) -> Tensor:
    """Normalise each channel of x [images, channels, ...] by a given mean and variance."""
    factor = rsqrt(add(variance, float(eps)))
    factor = factor if weight is None else mul(factor, weight)
    less = mul(mean, factor)
    shift = sub(0.0, less) if bias is None else sub(bias, less)
    return _apply_weight_and_bias(x, reshape_channel_vector(factor, x.rank), reshape_channel_vector(shift, x.rank))


def reshape_channel_vector(p: Tensor, rank: int) -> Tensor:
    """Reshape a vector of one number per channel so that it broadcasts over [images, channels, ...] of rank `rank`."""
    return reshape(p, p.shape + (1,) * (rank - 2))
