"""Products of matrices, attention, softmax, and norms with weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod

import numpy as np

from ... import ops
from ...graph import Value
from ..errors import ModelError
from .arithmetic import add, compare, maximum, mul, real, rsqrt, scaled, sub, unary, where
from .reducing import extreme, total
from .shapes import expand, moved, permuted, reshape, squeeze, transpose, unsqueeze
from .tensor import Tensor, literal, reshaped, tensor


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` with leading axes broadcast; vectors as NumPy has them."""
    if a.rank == 1 and b.rank == 1:
        return reshape(matmul(unsqueeze(a, 0), unsqueeze(b, 1)), ())
    if a.rank == 1:
        return squeeze(matmul(unsqueeze(a, 0), b), [-2])
    if b.rank == 1:
        return squeeze(matmul(a, unsqueeze(b, 1)), [-1])
    a, b = real(a), real(b)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if b.shape[-2] != k:
        raise ModelError(f"a product of {list(a.shape)} and {list(b.shape)}: {k} columns meet {b.shape[-2]} rows")
    ahead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if len(ahead) > 3:
        a, b = expand(a, (*ahead, m, k)), expand(b, (*ahead, k, n))
        a, b = reshape(a, (prod(ahead), m, k)), reshape(b, (prod(ahead), k, n))
    elif a.shape[:-2] != ahead:
        a = expand(a, (*ahead, m, k))
    weight = transpose(b, -1, -2)
    return reshape(tensor(ops.mul_mat(weight.value, a.value)), (*ahead, m, n))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``."""
    rows = x if 2 <= x.rank <= 5 else reshape(x, (prod(x.shape[:-1]), x.shape[-1]))
    out = reshape(tensor(ops.mul_mat(real(weight).value, real(rows).value)), (*x.shape[:-1], weight.shape[0]))
    return out if bias is None else add(out, bias)


def plus_product(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta bias + alpha a @ b``."""
    product = scaled(matmul(a, b), float(alpha))
    return product if beta == 0 else add(product, scaled(real(bias), float(beta)))


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """``exp(x) / sum(exp(x))`` along an axis; a row of -inf alone gives NaN."""
    if not prod(x.shape):
        return real(x)
    return add(masked_softmax(x, axis), scaled(extreme("max", x, axis, keepdim=True), 0.0))


def masked_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """`softmax` where a row of -inf alone, which is masked completely, gives zeros."""
    if not x.rank:
        return reshape(masked_softmax(reshape(x, (1,)), 0), ())
    last = moved(real(x), axis, -1)
    rows = reshape(last, (1, prod(last.shape[:-1]), last.shape[-1])) if not 3 <= last.rank <= 5 else last
    return moved(reshape(tensor(ops.softmax(rows.value)), last.shape), -1, axis)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """The logarithm of `softmax`."""
    below = sub(x, extreme("max", x, axis, keepdim=True))
    return sub(below, unary(ops.log, total(unary(ops.exp, below), axis, keepdim=True)))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of q [..., heads, t, d] over k, v [..., heads, s, d], which may have fewer heads.

    The mask is what is added to the scores, or whether a token sees another.
    """
    if q.rank == 2:
        return squeeze(
            attention(unsqueeze(q, 0), unsqueeze(k, 0), unsqueeze(v, 0), mask, causal=causal, scale=scale), [0]
        )
    t, s, heads = q.shape[-2], k.shape[-2], q.shape[-3]
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    if causal:
        seen = np.tril(np.ones((t, s), bool))
        mask = literal(seen) if mask is None else add_masks(mask, seen)
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    flat = (prod(batch),) if len(batch) > 2 else batch
    parts = [reshape(expand(x, (*batch, *x.shape[-3:])), (*flat, *x.shape[-3:])) for x in (q, k, v)]
    order = (*range(len(flat)), len(flat) + 1, len(flat), len(flat) + 2)
    seen_by, each = (None, False) if mask is None else _mask_of(mask, batch, heads, t, s)
    q_first, k_first, v_first = (permuted(real(x).value, order) for x in parts)
    how = "each" if each else "one"
    out = ops.attention(q_first, k_first, v_first, seen_by, scale=float(scale), mask_heads=how)
    return reshape(tensor(permuted(out, order)), (*batch, heads, t, v.shape[-1]))


def add_masks(mask: Tensor, seen: np.ndarray) -> Tensor:
    """A mask in which, besides, a token sees only what `seen` says."""
    return where(literal(seen), mask, False if mask.truth else -math.inf)


def _bounded(mask: Tensor) -> Tensor:
    """A mask whose finite entries stay finite when a kernel scales them."""
    return where(compare("eq", mask, -math.inf), -math.inf, maximum(mask, literal(np.float32(-1e30))))


def _mask_of(mask: Tensor, batch: Sequence[int], heads: int, t: int, s: int) -> tuple[Value, bool]:
    """A mask as the op reads it, and whether each head has its own."""
    added = where(mask, 0.0, -math.inf) if mask.truth else _bounded(real(mask))
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
    return reshaped(whole.value, shape), per_head


# ---------------------------------------------------------------------------------------------------------- norms


def _weighted(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = mul(x, weight)
    return x if bias is None else add(x, bias)


def layer_norm(
    x: Tensor, axes: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Less the mean, over the deviation of the last so many axes; times a weight, plus a bias."""
    last = prod(x.shape[x.rank - axes :])
    rows = reshape(x, (*x.shape[: x.rank - axes], last) if x.rank - axes < 5 else (-1, last))
    return _weighted(reshape(tensor(ops.norm(rows.value, eps=float(eps))), x.shape), weight, bias)


def rms_norm(x: Tensor, axes: int, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Over the root of the mean square of the last so many axes; times a weight."""
    last = prod(x.shape[x.rank - axes :])
    rows = reshape(x, (*x.shape[: x.rank - axes], last) if x.rank - axes < 5 else (-1, last))
    return _weighted(reshape(tensor(ops.rms_norm(rows.value, eps=float(eps))), x.shape), weight, None)


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """`layer_norm` over each of `groups` runs of channels of x [images, channels, ...]."""
    n = x.shape[0]
    runs = reshape(x, (n, groups, prod(x.shape[1:]) // groups))
    out = reshape(tensor(ops.norm(runs.value, eps=float(eps))), x.shape)
    return _weighted(out, *(None if p is None else per_channel(p, x.rank) for p in (weight, bias)))


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float = 1e-5
) -> Tensor:
    """Each channel of x [images, channels, ...] less a mean that is given, over a deviation that is given."""
    factor = rsqrt(add(variance, float(eps)))
    factor = factor if weight is None else mul(factor, weight)
    less = mul(mean, factor)
    shift = sub(0.0, less) if bias is None else sub(bias, less)
    return _weighted(x, per_channel(factor, x.rank), per_channel(shift, x.rank))


def per_channel(p: Tensor, rank: int) -> Tensor:
    """A number a channel, to be broadcast over the axes behind channels."""
    return reshape(p, p.shape + (1,) * (rank - 2))
