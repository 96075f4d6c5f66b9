"""The table of ATen ops, a row each: what makes the results of a call from its arguments.

A row is called with the arguments of the ATen op, its tensors as `Tensor`.  What it gives is cast to the type that
PyTorch says the result has, so a row need not speak of types, and layouts, devices and memory formats are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from ... import ops
from ..errors import ModelError
from ..tensors import arithmetic as arith
from ..tensors import indexing, products, reducing, shapes, sliding
from ..tensors.tensor import Operand, Tensor, literal

Row: TypeAlias = Callable[..., Any]


def _ints(x: int | Sequence[int], count: int) -> tuple[int, ...]:
    """One number for each of `count` axes."""
    given = (x,) if isinstance(x, int) else tuple(x)
    return given * count if len(given) == 1 else given


def _both_ends(pads: Sequence[int]) -> list[tuple[int, int]]:
    return [(p, p) for p in pads]


def _padding(x: Tensor, pads: Sequence[int]) -> list[tuple[int, int]]:
    """PyTorch's flat list, which begins with the last axis, as a pair for each axis."""
    pairs = list(zip(pads[::2], pads[1::2], strict=True))[::-1]
    return [(0, 0)] * (x.rank - len(pairs)) + pairs


# ---------------------------------------------------------------------------------------------------- entry by entry


def _rsub(x: Tensor, other: Operand, alpha: float = 1) -> Tensor:
    return arith.sub(other, x, alpha=alpha)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return arith.unary(ops.gelu_erf if approximate == "none" else ops.gelu, x)


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    smooth = arith.scaled(arith.unary(ops.softplus, arith.scaled(x, beta)), 1 / beta)
    return arith.where(arith.compare("gt", arith.scaled(x, beta), float(threshold)), x, smooth)


def _elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    low = arith.scaled(arith.unary(ops.expm1, arith.scaled(arith.clamp(x, max=0.0), input_scale)), alpha * scale)
    return arith.where(arith.compare("gt", x, 0.0), arith.scaled(x, scale), low)


def _log(base: float) -> Row:
    return lambda x: arith.scaled(arith.unary(ops.log, x), 1 / math.log(base))


def _addcmul(x: Tensor, a: Tensor, b: Tensor, value: float = 1) -> Tensor:
    return arith.add(x, arith.mul(arith.mul(a, b), value))


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, value: float = 1) -> Tensor:
    return arith.add(x, arith.mul(arith.div(a, b), value))


def _like(value: float) -> Row:
    return lambda x, *_: literal(np.full(x.shape, value, np.float32))


def _full_like(x: Tensor, value: float) -> Tensor:
    return literal(np.full(x.shape, value, np.int64 if isinstance(value, int) else np.float32))


def _new(value: float) -> Row:
    return lambda x, size: literal(np.full(size, value, np.float32))


def _new_full(x: Tensor, size: Sequence[int], value: float) -> Tensor:
    return literal(np.full(size, value, np.int64 if isinstance(value, int) else np.float32))


def _triangle(keep: Callable[..., np.ndarray]) -> Row:
    def row(x: Tensor, diagonal: int = 0) -> Tensor:
        return arith.filled(x, literal(~keep(np.ones(x.shape[-2:], bool), diagonal)), 0)

    return row


# ------------------------------------------------------------------------------------------------------------ shapes


def _expand(x: Tensor, size: Sequence[int], implicit: bool = False) -> Tensor:
    return shapes.expand(x, size)


def _squeeze(x: Tensor, axes: int | Sequence[int] | None = None) -> Tensor:
    return shapes.squeeze(x, [axes] if isinstance(axes, int) else axes)


def _chunk(x: Tensor, chunks: int, axis: int = 0) -> tuple[Tensor, ...]:
    return shapes.split(x, max(1, -(-x.shape[x.axis(axis)] // chunks)), axis)


def _flatten(x: Tensor, start: int = 0, end: int = -1) -> Tensor:
    a, b = x.axis(start), x.axis(end)
    return shapes.reshape(x, (*x.shape[:a], math.prod(x.shape[a : b + 1]), *x.shape[b + 1 :]))


def _unflatten(x: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    a = x.axis(axis)
    known = math.prod(n for n in sizes if n != -1)
    return shapes.reshape(x, (*x.shape[:a], *(x.shape[a] // known if n == -1 else n for n in sizes), *x.shape[a + 1 :]))


def _roll(x: Tensor, shifts: int | Sequence[int], axes: int | Sequence[int] = ()) -> Tensor:
    over = [axes] if isinstance(axes, int) else list(axes)
    return shapes.roll(x, [shifts] if isinstance(shifts, int) else shifts, over)


def _constant_pad(x: Tensor, pads: Sequence[int], value: float = 0) -> Tensor:
    return shapes.pad(x, _padding(x, pads), value)


def _own_pad(mode: str) -> Row:
    return lambda x, pads: shapes.pad_with_own(x, _padding(x, pads), mode)


def _unfold(x: Tensor, axis: int, size: int, step: int) -> Tensor:
    """Windows of one axis, their entries as a last axis."""
    at = x.axis(axis)
    starts = range(0, x.shape[at] - size + 1, step)
    return shapes.moved(shapes.stack([shapes.cut(x, at, s, s + size) for s in starts], at), at + 1, -1)


def _diagonal(x: Tensor, offset: int = 0, first: int = 0, second: int = 1) -> Tensor:
    a, b = x.axis(first), x.axis(second)
    rows = np.arange(x.shape[a])
    rows = rows[(rows + offset >= 0) & (rows + offset < x.shape[b])]
    axes = [i for i in range(x.rank) if i not in (a, b)]
    front = shapes.permute(x, [*axes, a, b])
    flat = shapes.reshape(front, (*front.shape[:-2], x.shape[a] * x.shape[b]))
    return shapes.take(flat, -1, rows * x.shape[b] + rows + offset)


def _select_scatter(x: Tensor, src: Tensor, axis: int, index: int) -> Tensor:
    i = index % x.shape[x.axis(axis)]
    return indexing.set_slice(x, shapes.unsqueeze(src, x.axis(axis)), axis, i, i + 1)


def _slice_scatter(
    x: Tensor, src: Tensor, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> Tensor:
    return indexing.set_slice(x, src, axis, start, stop, step)


# -------------------------------------------------------------------------------------------------------- reductions


def _sum(x: Tensor, axes: Any = None, keepdim: bool = False) -> Tensor:
    return reducing.total(x, axes, keepdim)


def _mean(x: Tensor, axes: Any = None, keepdim: bool = False) -> Tensor:
    return reducing.mean(x, axes, keepdim)


def _spread(
    x: Tensor, *args: Any, correction: float | None = None, keepdim: bool = False, unbiased: bool = True
) -> Any:
    """The overloads of var: (unbiased) or (axes, unbiased, keepdim), or (axes) and keywords."""
    axes: Any = None
    if len(args) == 1 and isinstance(args[0], bool):
        unbiased = args[0]
    elif args:
        axes = args[0]
        unbiased = args[1] if len(args) > 1 else unbiased
        keepdim = args[2] if len(args) > 2 else keepdim
    return reducing.variance(x, axes, float(unbiased) if correction is None else correction, keepdim)


def _deviation(x: Tensor, *args: Any, **more: Any) -> Tensor:
    return arith.unary(ops.sqrt, _spread(x, *args, **more))


def _spread_and_mean(x: Tensor, axes: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return (
        reducing.variance(x, axes, 1 if correction is None else correction, keepdim),
        reducing.mean(x, axes, keepdim),
    )


def _extreme(kind: str) -> Row:
    """The overloads of max and min: of all entries, of two tensors, along an axis with the places."""
    pair = arith.maximum if kind == "max" else arith.minimum

    def row(x: Tensor, other: Tensor | int | None = None, keepdim: bool = False) -> Any:
        if other is None:
            return reducing.extreme(kind, x)
        if isinstance(other, Tensor):
            return pair(x, other)
        return reducing.extreme_and_place(kind, x, other, keepdim)

    return row


def _each_extreme(kind: str) -> Row:
    return lambda x, axes=None, keepdim=False: reducing.extreme(kind, x, axes, keepdim)


def _running(kind: str) -> Row:
    return lambda x, axis: reducing.running(kind, x, axis)


def _sort(x: Tensor, *args: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """The overloads of sort: (axis, descending), or (stable, axis, descending)."""
    if args and isinstance(args[0], bool):
        args = args[1:]
    axis = args[0] if args else dim
    down = args[1] if len(args) > 1 else descending
    ids = reducing.order(x, axis, down)
    return indexing.gather(x, axis, ids), ids


def _argsort(x: Tensor, *args: Any, **more: Any) -> Tensor:
    return _sort(x, *args, **more)[1]


def _top_k(x: Tensor, k: int, axis: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    ids = shapes.cut(reducing.order(x, axis, largest), axis, 0, k)
    return indexing.gather(x, axis, ids), ids


def _norm(x: Tensor, power: float | None = 2, axes: Any = None, keepdim: bool = False) -> Tensor:
    return reducing.norm_of(x, 2 if power is None else power, axes, keepdim)


# ---------------------------------------------------------------------------------------------------------- products


def _addmm(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return products.plus_product(bias, a, b, beta=beta, alpha=alpha)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p:
        raise ModelError("attention drops entries by chance, as in training; export the model after model.eval()")
    return products.attention(q, k, v, attn_mask, causal=is_causal, scale=scale)


def _attention_with_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, None]:
    return _attention(q, k, v, attn_mask, dropout_p, is_causal, scale), None


def _softmax(x: Tensor, axis: int, *_: object) -> Tensor:
    return products.softmax(x, axis)


def _log_softmax(x: Tensor, axis: int, *_: object) -> Tensor:
    return products.log_softmax(x, axis)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: object
) -> Any:
    return products.layer_norm(x, len(shape), weight, bias, eps)


def _native_layer_norm(x: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    return products.layer_norm(x, len(shape), weight, bias, eps), None, None


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Tensor:
    return products.rms_norm(x, len(shape), weight, float(np.finfo(np.float32).eps) if eps is None else eps)


def _group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: object) -> Tensor:
    return products.group_norm(x, groups, weight, bias, eps)


def _native_group_norm(x: Tensor, weight: Any, bias: Any, n: int, c: int, rest: int, groups: int, eps: float) -> Any:
    return products.group_norm(x, groups, weight, bias, eps), None, None


def _native_batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> Any:
    return products.batch_norm(x, weight, bias, mean, variance, eps), None, None


def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float, *_: object
) -> Tensor:
    if training or mean is None:
        raise ModelError("batch norm over the batch itself, as in training; export the model after model.eval()")
    return products.batch_norm(x, weight, bias, mean, variance, eps)


# ----------------------------------------------------------------------------------------------------------- indices


def _embedding(weight: Tensor, ids: Tensor, *_: object) -> Tensor:
    return indexing.embedding(weight, ids)


def _index_select(x: Tensor, axis: int, ids: Tensor) -> Tensor:
    return indexing.index_select(x, axis, ids)


def _gather(x: Tensor, axis: int, ids: Tensor, sparse_grad: bool = False) -> Tensor:
    return indexing.gather(x, axis, ids)


_REDUCE = MappingProxyType({"add": "add", "multiply": "mul", "sum": "add", "prod": "mul", "amax": "max", "amin": "min"})


def _scatter(x: Tensor, axis: int, ids: Tensor, src: Operand, reduce: str | None = None) -> Tensor:
    return indexing.scatter(x, axis, ids, src, _REDUCE[reduce] if reduce else "set")


def _scatter_add(x: Tensor, axis: int, ids: Tensor, src: Tensor) -> Tensor:
    return indexing.scatter(x, axis, ids, src, "add")


def _scatter_reduce(x: Tensor, axis: int, ids: Tensor, src: Tensor, reduce: str, include_self: bool = True) -> Tensor:
    if not include_self or reduce not in _REDUCE:
        raise ModelError(
            f"scatter_reduce by {reduce!r} with include_self={include_self}; hocket has sum, prod, amax, amin of all"
        )
    return indexing.scatter(x, axis, ids, src, _REDUCE[reduce])


def _index_add(x: Tensor, axis: int, ids: Tensor, src: Tensor, alpha: float = 1) -> Tensor:
    front = shapes.moved(x, axis, 0)
    put = indexing.index_put(front, [ids], shapes.moved(arith.mul(src, alpha) if alpha != 1 else src, axis, 0), True)
    return shapes.moved(put, 0, axis)


def _index_copy(x: Tensor, axis: int, ids: Tensor, src: Tensor) -> Tensor:
    front = shapes.moved(x, axis, 0)
    return shapes.moved(indexing.index_put(front, [ids], shapes.moved(src, axis, 0)), 0, axis)


def _index_put(x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False, *_: object) -> Tensor:
    return indexing.index_put(x, indices, values, accumulate)


# ----------------------------------------------------------------------------------------------------------- spatial


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    n = weight.rank - 2
    steps, wide, pads = _ints(stride, n), _ints(dilation, n), _both_ends(_ints(padding, n))
    if transposed:
        more = _ints(output_padding, n)
        return sliding.transposed_convolution(x, weight, bias, steps, pads, wide, groups, more)
    return sliding.convolution(x, weight, bias, steps, pads, wide, groups)


def _max_pool(n: int, places: bool = False) -> Row:
    def row(
        x: Tensor, size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Any:
        size = _ints(size, n)
        rest = (_ints(stride, n) if stride else size, _both_ends(_ints(padding, n)), _ints(dilation, n), ceil_mode)
        best = sliding.max_pool(x, size, *rest)
        return (best, None) if places else best  # the places are for training

    return row


def _average_pool(n: int) -> Row:
    def row(
        x: Tensor,
        size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        size = _ints(size, n)
        steps, pads = _ints(stride, n) if stride else size, _both_ends(_ints(padding, n))
        return sliding.average_pool(x, size, steps, pads, ceil_mode, count_include_pad, divisor_override)

    return row


def _adaptive_average_pool(n: int) -> Row:
    def row(x: Tensor, sizes: Any) -> Tensor:
        wanted = [w or m for w, m in zip(_ints(sizes, n), x.shape[-n:], strict=True)]
        return sliding.adaptive_average_pool(x, wanted)

    return row


def _resized(mode: str) -> Row:
    """Upsampling whose last arguments are scales: (size, scales), or a scale for each axis."""

    def row(x: Tensor, size: Any, *scales: Any, **more: Any) -> Tensor:
        factors = scales[0] if len(scales) == 1 and isinstance(scales[0], list | tuple) else scales
        known = None if not factors or None in factors else [float(f) for f in factors]
        return sliding.interpolate(x, size, known, mode)

    return row


def _resized_smoothly(mode: str) -> Row:
    def row(x: Tensor, size: Any, align_corners: bool, *scales: Any) -> Tensor:
        factors = scales[0] if len(scales) == 1 and isinstance(scales[0], list | tuple) else scales
        known = None if not factors or None in factors else [float(f) for f in factors]
        return sliding.interpolate(x, size, known, mode, align_corners)

    return row


def _same(x: Tensor, *_: object, **__: object) -> Tensor:
    return x


def _replaced(x: Tensor, src: Tensor, *_: object) -> Tensor:
    return shapes.expand(src, x.shape)


def _dropout(x: Tensor, p: float, train: bool = False) -> Tensor:
    if train and p:
        raise ModelError("dropout by chance, as in training; export the model after model.eval()")
    return x


def _native_dropout(x: Tensor, p: float, train: bool = False) -> tuple[Tensor, None]:
    return _dropout(x, p, train), None


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(ops, name) for name in ("sqrt", "exp", "expm1", "log", "log1p", "sin", "cos", "tan", "tanh")},
    **{name: getattr(ops, name) for name in ("erf", "sigmoid", "relu", "silu", "hardswish", "hardsigmoid", "sinh")},
    **{name: getattr(ops, name) for name in ("cosh", "floor", "ceil", "trunc")},
    "asin": ops.arcsin,
    "acos": ops.arccos,
    "atan": ops.arctan,
    "asinh": ops.arcsinh,
    "acosh": ops.arccosh,
    "atanh": ops.arctanh,
}
"""ATen ops of one operand that hocket has as they are."""

_SAME = ("clone", "alias", "detach", "_to_copy", "to", "contiguous", "lift_fresh_copy", "lift_fresh", "type_as")
_RESHAPES = ("view", "reshape", "_unsafe_view", "view_copy", "_reshape_alias")

ROWS: Mapping[str, Row] = MappingProxyType(
    {
        **dict.fromkeys(_SAME, _same),
        **{name: partial(arith.unary, op) for name, op in _FUNCTIONS.items()},
        **{kind: partial(arith.compare, kind) for kind in ("eq", "ne", "lt", "le", "gt", "ge")},
        **{f"logical_{kind}": getattr(arith, f"logical_{kind}") for kind in ("and", "or", "xor", "not")},
        **{f"bitwise_{kind}": partial(arith.bitwise, kind) for kind in ("and", "or", "xor")},
        "bitwise_not": arith.bitwise_not,
        "add": arith.add,
        "sub": arith.sub,
        "rsub": _rsub,
        "mul": arith.mul,
        "div": arith.div,
        "true_divide": arith.div,
        "floor_divide": partial(arith.div, rounding_mode="floor"),
        "remainder": arith.remainder,
        "fmod": partial(arith.remainder, rounding_mode="trunc"),
        "pow": arith.power,
        "maximum": arith.maximum,
        "minimum": arith.minimum,
        "neg": arith.negative,
        "abs": arith.absolute,
        "sign": arith.sign,
        "sgn": arith.sign,
        "square": lambda x: arith.mul(x, x),
        "rsqrt": arith.rsqrt,
        "reciprocal": lambda x: arith.div(1.0, x),
        "round": arith.round_even,
        "erfc": lambda x: arith.sub(1.0, arith.unary(ops.erf, x)),
        "exp2": lambda x: arith.unary(ops.exp, arith.scaled(x, math.log(2))),
        "log2": _log(2),
        "log10": _log(10),
        "gelu": _gelu,
        "softplus": _softplus,
        "elu": _elu,
        "leaky_relu": lambda x, slope=0.01: arith.unary(ops.leaky_relu, x, negative_slope=float(slope)),
        "relu6": lambda x: arith.clamp(x, 0.0, 6.0),
        "hardtanh": lambda x, low=-1, high=1: arith.clamp(x, float(low), float(high)),
        "log_sigmoid": lambda x: arith.unary(ops.neg, arith.unary(ops.softplus, arith.unary(ops.neg, x))),
        "clamp": arith.clamp,
        "clip": arith.clamp,
        "clamp_min": lambda x, low: arith.clamp(x, min=low),
        "clamp_max": lambda x, high: arith.clamp(x, max=high),
        "addcmul": _addcmul,
        "addcdiv": _addcdiv,
        "isnan": arith.is_nan,
        "isinf": arith.is_infinite,
        "where": arith.where,
        "masked_fill": arith.filled,
        "fill": _full_like,
        "full_like": _full_like,
        "zeros_like": _like(0.0),
        "ones_like": _like(1.0),
        "empty_like": _like(0.0),
        "new_zeros": _new(0.0),
        "new_ones": _new(1.0),
        "new_empty": _new(0.0),
        "new_full": _new_full,
        "tril": _triangle(np.tril),
        "triu": _triangle(np.triu),
        "dropout": _dropout,
        "native_dropout": _native_dropout,
        "copy": _replaced,
        # shapes
        **dict.fromkeys(_RESHAPES, shapes.reshape),
        "flatten": _flatten,
        "unflatten": _unflatten,
        "permute": shapes.permute,
        "transpose": shapes.transpose,
        "t": lambda x: shapes.transpose(x, 0, -1),
        "movedim": shapes.moved,
        "expand": _expand,
        "squeeze": _squeeze,
        "unsqueeze": shapes.unsqueeze,
        "slice": shapes.slice_,
        "narrow": lambda x, axis, start, length: shapes.cut(x, axis, start, start + length),
        "select": shapes.select,
        "cat": shapes.cat,
        "stack": shapes.stack,
        "split": shapes.split,
        "split_with_sizes": shapes.split,
        "chunk": _chunk,
        "unbind": shapes.unbind,
        "flip": shapes.flip,
        "roll": _roll,
        "repeat": shapes.repeat,
        "unfold": _unfold,
        "diagonal": _diagonal,
        "constant_pad_nd": _constant_pad,
        **{f"reflection_pad{n}d": _own_pad("reflect") for n in (1, 2, 3)},
        **{f"replication_pad{n}d": _own_pad("edge") for n in (1, 2, 3)},
        "slice_scatter": _slice_scatter,
        "select_scatter": _select_scatter,
        # reductions
        "sum": _sum,
        "mean": _mean,
        "var": _spread,
        "std": _deviation,
        "var_mean": _spread_and_mean,
        "max": _extreme("max"),
        "min": _extreme("min"),
        "amax": _each_extreme("max"),
        "amin": _each_extreme("min"),
        "prod": _each_extreme("prod"),
        "any": reducing.any_of,
        "all": reducing.all_of,
        "argmax": reducing.argmax,
        "argmin": reducing.argmin,
        "cumsum": _running("sum"),
        "cumprod": _running("prod"),
        "sort": _sort,
        "argsort": _argsort,
        "topk": _top_k,
        "logsumexp": reducing.log_sum_exp,
        "linalg_vector_norm": _norm,
        "norm": _norm,
        # products
        "mm": products.matmul,
        "bmm": products.matmul,
        "mv": products.matmul,
        "dot": products.matmul,
        "matmul": products.matmul,
        "linear": products.linear,
        "addmm": _addmm,
        "baddbmm": _addmm,
        "scaled_dot_product_attention": _attention,
        "_scaled_dot_product_flash_attention_for_cpu": _attention_with_sums,
        "_softmax": _softmax,
        "softmax": _softmax,
        "_safe_softmax": _softmax,
        "_log_softmax": _log_softmax,
        "log_softmax": _log_softmax,
        "layer_norm": _layer_norm,
        "native_layer_norm": _native_layer_norm,
        "rms_norm": _rms_norm,
        "group_norm": _group_norm,
        "native_group_norm": _native_group_norm,
        "batch_norm": _batch_norm,
        "_native_batch_norm_legit_no_training": _native_batch_norm,
        # entries by number
        "embedding": _embedding,
        "index": indexing.index,
        "_unsafe_index": indexing.index,
        "index_put": _index_put,
        "index_select": _index_select,
        "index_add": _index_add,
        "index_copy": _index_copy,
        "gather": _gather,
        "scatter": _scatter,
        "scatter_add": _scatter_add,
        "scatter_reduce": _scatter_reduce,
        # spatial
        "convolution": _convolution,
        **{f"max_pool{n}d": _max_pool(n) for n in (1, 2, 3)},
        **{f"max_pool{n}d_with_indices": _max_pool(n, places=True) for n in (2, 3)},
        **{f"avg_pool{n}d": _average_pool(n) for n in (1, 2, 3)},
        **{f"adaptive_avg_pool{n}d": _adaptive_average_pool(n) for n in (1, 2, 3)},
        **{f"_adaptive_avg_pool{n}d": _adaptive_average_pool(n) for n in (2, 3)},
        **{f"upsample_nearest{n}d": _resized("nearest") for n in (1, 2, 3)},
        **{f"_upsample_nearest_exact{n}d": _resized("nearest-exact") for n in (1, 2, 3)},
        "upsample_linear1d": _resized_smoothly("linear"),
        "upsample_bilinear2d": _resized_smoothly("linear"),
        "upsample_trilinear3d": _resized_smoothly("linear"),
        "upsample_bicubic2d": _resized_smoothly("cubic"),
    }
)
"""By the name of the ATen op, whatever its overload."""
