"""Converters of ONNX's reductions, sorts, matrix products and normalisations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ... import ops
from ...graph import DType
from ...graph.errors import format_count
from ..errors import ModelError
from ..tensors import arithmetic as arith
from ..tensors import indexing, matmul, reductions, shapes
from ..tensors.tensor import Tensor, constant_tensor
from .op_calls import OpConverter, OptionalIntegers, as_integers_or_none, as_number_or_default, flatten


def make_reduction_converter(kind: Callable[[Tensor, list[int], bool], Tensor]) -> OpConverter:
    """Make the converter of a reduction over axes, which are an input or the attribute ``axes``.

    Without axes the reduction is over all axes. With ``noop_with_empty_axes`` and no axes, each entry is reduced alone.

    Args:
        kind: The reduction of a tensor over a list of axes; the boolean keeps the reduced axes with size 1.
    """

    def row(
        x: Tensor,
        axes_input: OptionalIntegers = None,
        *,
        axes: OptionalIntegers = None,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        over = as_integers_or_none(axes_input if axes is None else axes)
        if not over and noop_with_empty_axes:
            return kind(shapes.unsqueeze(x, -1), [x.rank], False)
        if not x.rank:
            return kind(shapes.reshape(x, (1,)), [0], False)
        return kind(x, over or list(range(x.rank)), bool(keepdims))

    return row


def _take_mean(x: Tensor, over: list[int], keep: bool) -> Tensor:
    return reductions.mean(x, over, keep)


reduce_sum = make_reduction_converter(lambda x, over, keep: reductions.sum_over(x, over, keep))
reduce_mean = make_reduction_converter(_take_mean)
reduce_square_sum = make_reduction_converter(lambda x, over, keep: reductions.sum_over(arith.mul(x, x), over, keep))
reduce_l1 = make_reduction_converter(lambda x, over, keep: reductions.sum_over(arith.absolute(x), over, keep))
reduce_l2 = make_reduction_converter(
    lambda x, over, keep: arith.apply_unary_op(
        ops.sqrt, arith.as_float(reductions.sum_over(arith.mul(x, x), over, keep))
    )
)
reduce_log_sum = make_reduction_converter(
    lambda x, over, keep: arith.apply_unary_op(ops.log, arith.as_float(reductions.sum_over(x, over, keep)))
)
reduce_log_sum_exp = make_reduction_converter(
    lambda x, over, keep: reductions.log_sum_exp(arith.as_float(x), over, keep)
)


def make_max_min_prod_converter(kind: str) -> OpConverter:
    """Make the converter of ``ReduceMax``, ``ReduceMin`` or ``ReduceProd``, by `kind`: ``max``, ``min`` or ``prod``."""
    return make_reduction_converter(lambda x, over, keep: reductions.reduce_max_min_or_prod(kind, x, over, keep))


def make_argmax_argmin_converter(kind: Callable[..., Tensor]) -> OpConverter:
    """Make the converter of ``ArgMax`` or ``ArgMin``, which returns the index of the first largest or smallest entry.

    With ``select_last_index`` the converter returns the last one, by a search of the reversed axis.
    """

    def row(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        if not select_last_index:
            return kind(x, axis, bool(keepdims))
        return arith.sub(x.shape[x.normalise_axis(axis)] - 1, kind(shapes.flip(x, [axis]), axis, bool(keepdims)))

    return row


def make_cumulative_converter(kind: str) -> OpConverter:
    """Make the converter of ``CumSum`` or ``CumProd`` along an axis, by `kind`: ``sum`` or ``prod``.

    With ``exclusive`` an entry excludes itself. With ``reverse`` the accumulation starts at the end.
    """

    def row(x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
        at = x.normalise_axis(int(as_number_or_default(axis, 0)))
        x = shapes.flip(x, [at]) if reverse else x
        out = reductions.accumulate_along_axis(kind, x, at)
        if exclusive:
            front = [(1, 0) if a == at else (0, 0) for a in range(x.rank)]
            out = shapes.pad(shapes.slice_range(out, at, 0, x.shape[at] - 1), front, 0 if kind == "sum" else 1)
        return shapes.flip(out, [at]) if reverse else out

    return row


def top_k(x: Tensor, count: Any = None, *, k: Any = None, axis: int = -1, largest: int = 1, sorted: int = 1) -> Any:
    """Convert ``TopK``: return the largest or smallest entries along an axis, and their indices."""
    n = int(as_number_or_default(count if k is None else k, 0))
    if not 0 <= n <= x.shape[x.normalise_axis(axis)]:
        raise ModelError(f"the {n} first of {x.shape[x.normalise_axis(axis)]} entries")
    if x.dtype in (DType.I32, DType.I64):
        raise ModelError(f"an order of {x.dtype} numbers; hocket orders what a float32 holds")
    ids = reductions.argsort(x, axis, bool(largest), n)
    return indexing.gather(x, axis, ids), ids


def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Convert ``Hardmax``: return 1 in place of the first largest entry along an axis, and 0 elsewhere."""
    at = x.normalise_axis(axis)
    places = constant_tensor(np.arange(x.shape[at]).reshape(-1, *(1,) * (x.rank - 1 - at)))
    return arith.compare("eq", reductions.argmax(x, at, True), places)


def make_flattened_axes_converter(converter: OpConverter) -> OpConverter:
    """Make the converter of an op in an older opset, where the op treats `axis` and all later axes as one axis.

    `converter` is the converter of the newer opset, which works on one axis.
    """
    return lambda x, *, axis=1: shapes.reshape(converter(flatten(x, axis=axis), axis=1), x.shape)


def lp_norm(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """Convert ``LpNormalization``: divide by the p-norm along an axis. Vectors of norm 0 stay 0."""
    size = reductions.vector_norm(x, p, axis, True)
    return arith.where(arith.compare("eq", size, 0.0), 0.0, arith.div(x, size))


# ---------------------------------------------------------------------------------------------------------- products


def gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0,
    transB: int = 0,
) -> Tensor:  # fmt: skip
    """Convert ``Gemm``: return ``alpha * a @ b + beta * c``.

    `transA` and `transB` transpose `a` and `b` before the product.
    """
    out = matmul.matmul(shapes.transpose(a, 0, 1) if transA else a, shapes.transpose(b, 0, 1) if transB else b)
    out = arith.scale_and_shift(out, alpha)
    return out if c is None else arith.add(out, arith.scale_and_shift(arith.as_float(c), beta))


def einsum(*xs: Tensor, equation: str) -> Tensor:
    """Convert ``Einsum``: return the sums of products that an einsum equation describes.

    Two operands become one matrix product. For another number of operands, all axes are broadcast, multiplied
    element-wise and summed.
    """
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    names = left.split(",")
    if len(names) != len(xs):
        raise ModelError(f"{equation!r} has {format_count(len(names), 'operand')}, the call {len(xs)}")
    letters = sorted(set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz") - set(text))
    dots = max((x.rank - len(n.replace("...", "")) for x, n in zip(xs, names, strict=True) if "..." in n), default=0)
    spare = "".join(letters[:dots])
    names = [
        n.replace("...", spare[dots - (x.rank - len(n.replace("...", ""))) :]) for x, n in zip(xs, names, strict=True)
    ]
    counts = "".join(names)
    result_letters = right.replace("...", spare) if arrow else spare + "".join(
        sorted(c for c in set(counts) - set(spare) if counts.count(c) == 1)
    )  # fmt: skip
    parts = [_take_repeated_letter_diagonals(x, name) for x, name in zip(xs, names, strict=True)]
    sizes = {c: n for x, name in parts for c, n in zip(name, x.shape, strict=True) if n != 1}
    every = [*result_letters, *(c for c in dict.fromkeys(counts) if c not in result_letters)]
    whole: Tensor | None = None
    if len(parts) == 2:
        return _compute_pair_einsum(parts, result_letters, sizes)
    for x, name in parts:
        here = shapes.permute(x, [name.index(c) for c in every if c in name])
        here = shapes.reshape(here, [x.shape[name.index(c)] if c in name else 1 for c in every])
        whole = here if whole is None else arith.mul(whole, here)
    assert whole is not None
    summed = list(range(len(result_letters), len(every)))
    return reductions.sum_over(whole, summed) if summed else whole


def _take_repeated_letter_diagonals(x: Tensor, name: str) -> tuple[Tensor, str]:
    """Replace axes of a tensor that have the same einsum letter by their diagonal, so that each letter occurs once.

    Returns:
        The tensor, and the letters of its axes.
    """
    for c in dict.fromkeys(name):
        while name.count(c) > 1:
            i = name.index(c)
            j = name.index(c, i + 1)
            ends = shapes.move_axis(shapes.move_axis(x, i, -1), j - 1, -1)
            n = ends.shape[-1]
            flat = shapes.reshape(ends, (*ends.shape[:-2], n * n))
            x, name = shapes.take_at_constant_indices(flat, -1, np.arange(n) * (n + 1)), name.replace(c, "") + c
            break
    return (x, name) if len(set(name)) == len(name) else _take_repeated_letter_diagonals(x, name)


def _compute_pair_einsum(parts: Sequence[tuple[Tensor, str]], result_letters: str, sizes: dict[str, int]) -> Tensor:
    """Compute an einsum of two operands as one batched matrix product.

    Axes of both operands are batch axes if the result has them; otherwise they are contracted. Other axes that the
    result lacks are summed first.

    Args:
        parts: The operands, each with the letters of its axes.
        result_letters: The letters of the result.
        sizes: The size of each letter, without sizes of 1.
    """
    (a, first), (b, second) = parts
    both = [c for c in first if c in second]
    batch = [c for c in both if c in result_letters]
    inner = [c for c in both if c not in result_letters]
    mine, other = ([c for c in name if c not in both and c in result_letters] for name in (first, second))
    lone = [[i for i, c in enumerate(name) if c not in both and c not in result_letters] for name in (first, second)]
    a, b = (reductions.sum_over(x, over) if over else x for x, over in zip((a, b), lone, strict=True))
    first, second = ("".join(c for c in n if c in both or c in result_letters) for n in (first, second))

    def arrange_axes(x: Tensor, name: str, groups: Sequence[Sequence[str]]) -> Tensor:
        x = shapes.expand(x, [sizes.get(c, 1) for c in name])
        x = shapes.permute(x, [name.index(c) for g in groups for c in g])
        return shapes.reshape(x, [math.prod(sizes.get(c, 1) for c in g) for g in groups])

    product = matmul.matmul(
        arrange_axes(a, first, (batch, mine, inner)), arrange_axes(b, second, (batch, inner, other))
    )
    order = [*batch, *mine, *other]
    out = shapes.reshape(product, [sizes.get(c, 1) for c in order])
    return shapes.permute(out, [order.index(c) for c in result_letters])


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    over = list(range(x.normalise_axis(axis), x.rank))
    mean_value = reductions.mean(x, over, True)
    spread = arith.rsqrt(arith.add(reductions.variance(x, over, 0, True), epsilon))
    return matmul.layer_norm(x, len(over), weight, bias, epsilon), mean_value, spread


def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *, epsilon: float = 1e-5,
    momentum: float = 0.9, training_mode: int = 0, spatial: int = 1,
) -> Tensor:  # fmt: skip
    if training_mode or not spatial:
        raise ModelError("batch norm over the batch itself, as in training; export the model for inference")
    return matmul.batch_norm(x, weight, bias, mean, variance, epsilon)


def instance_norm(x: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return matmul.group_norm(x, x.shape[1], weight, bias, epsilon)


def local_response_norm(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    """Convert ``LRN``: divide each entry by a power of the sum of squares over `size` neighbouring channels.

    The divisor is ``(bias + alpha / size * sum) ** beta``.
    """
    c = x.shape[1]
    i = np.arange(c)
    is_neighbour = (i[None] >= i[:, None] - (size - 1) // 2) & (i[None] <= i[:, None] + size // 2)
    rows = shapes.reshape(x, (x.shape[0], c, -1))
    sums = shapes.reshape(
        matmul.matmul(constant_tensor(is_neighbour.astype(np.float32)), arith.mul(rows, rows)), x.shape
    )
    return arith.div(x, arith.power(arith.scale_and_shift(sums, alpha / size, bias), beta))
