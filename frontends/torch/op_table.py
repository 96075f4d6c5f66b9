"""The op table of PyTorch programs: the converter of each ATen op.

A converter gets the arguments of the ATen op, with tensors as `Tensor`. The importer casts its results to the dtypes of
PyTorch, so a converter does not handle dtypes. The importer drops layouts, devices and memory formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from ... import ops
from ..tensors import arithmetic as arith
from ..tensors import indexing, matmul, reductions, shapes
from . import convolutions, op_calls

_UNARY_OPS: Mapping[str, Callable[..., Any]] = {
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
"""Ops of hocket by the ATen op of one operand that has the same meaning."""

_IDENTITY_OPS = ("clone", "alias", "detach", "_to_copy", "to", "contiguous", "lift_fresh_copy", "lift_fresh", "type_as")
"""ATen ops that return their operand, possibly in another dtype."""
_RESHAPE_OPS = ("view", "reshape", "_unsafe_view", "view_copy", "_reshape_alias")
"""ATen ops that change only the shape."""

OP_TABLE: Mapping[str, op_calls.OpConverter] = MappingProxyType(
    {
        **dict.fromkeys(_IDENTITY_OPS, arith.return_unchanged),
        **{name: partial(arith.apply_unary_op, op) for name, op in _UNARY_OPS.items()},
        **{kind: partial(arith.compare, kind) for kind in ("eq", "ne", "lt", "le", "gt", "ge")},
        **{f"logical_{kind}": getattr(arith, f"logical_{kind}") for kind in ("and", "or", "xor", "not")},
        **{f"bitwise_{kind}": partial(arith.apply_bitwise_op, kind) for kind in ("and", "or", "xor")},
        "bitwise_not": arith.bitwise_not,
        "add": arith.add,
        "sub": arith.sub,
        "rsub": op_calls.rsub,
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
        "erfc": lambda x: arith.sub(1.0, arith.apply_unary_op(ops.erf, x)),
        "exp2": lambda x: arith.apply_unary_op(ops.exp, arith.scale_and_shift(x, math.log(2))),
        "log2": op_calls.make_log_converter(2),
        "log10": op_calls.make_log_converter(10),
        "gelu": op_calls.gelu,
        "softplus": op_calls.softplus,
        "elu": op_calls.elu,
        "leaky_relu": lambda x, slope=0.01: arith.apply_unary_op(ops.leaky_relu, x, negative_slope=float(slope)),
        "relu6": lambda x: arith.clamp(x, 0.0, 6.0),
        "hardtanh": lambda x, low=-1, high=1: arith.clamp(x, float(low), float(high)),
        "log_sigmoid": lambda x: arith.apply_unary_op(
            ops.neg, arith.apply_unary_op(ops.softplus, arith.apply_unary_op(ops.neg, x))
        ),
        "clamp": arith.clamp,
        "clip": arith.clamp,
        "clamp_min": lambda x, low: arith.clamp(x, min=low),
        "clamp_max": lambda x, high: arith.clamp(x, max=high),
        "addcmul": op_calls.addcmul,
        "addcdiv": op_calls.addcdiv,
        "isnan": arith.is_nan,
        "isinf": arith.is_infinite,
        "where": arith.where,
        "masked_fill": arith.masked_fill,
        "fill": op_calls.full_like,
        "full_like": op_calls.full_like,
        "zeros_like": op_calls.make_float32_constant_like_converter(0.0),
        "ones_like": op_calls.make_float32_constant_like_converter(1.0),
        "empty_like": op_calls.make_float32_constant_like_converter(0.0),
        "new_zeros": op_calls.make_float32_constant_of_size_converter(0.0),
        "new_ones": op_calls.make_float32_constant_of_size_converter(1.0),
        "new_empty": op_calls.make_float32_constant_of_size_converter(0.0),
        "new_full": op_calls.new_full,
        "tril": op_calls.make_triangle_converter(np.tril),
        "triu": op_calls.make_triangle_converter(np.triu),
        "dropout": op_calls.dropout,
        "native_dropout": op_calls.native_dropout,
        "copy": op_calls.broadcast_copy_source,
        # shapes
        **dict.fromkeys(_RESHAPE_OPS, shapes.reshape),
        "flatten": op_calls.flatten,
        "unflatten": op_calls.unflatten,
        "permute": shapes.permute,
        "transpose": shapes.transpose,
        "t": lambda x: shapes.transpose(x, 0, -1),
        "movedim": shapes.move_axis,
        "expand": op_calls.expand,
        "squeeze": op_calls.squeeze,
        "unsqueeze": shapes.unsqueeze,
        "slice": shapes.slice_,
        "narrow": lambda x, axis, start, length: shapes.slice_range(x, axis, start, start + length),
        "select": shapes.select,
        "cat": shapes.cat,
        "stack": shapes.stack,
        "split": shapes.split,
        "split_with_sizes": shapes.split,
        "chunk": op_calls.chunk,
        "unbind": shapes.unbind,
        "flip": shapes.flip,
        "roll": op_calls.roll,
        "repeat": shapes.repeat,
        "unfold": op_calls.unfold,
        "diagonal": op_calls.diagonal,
        "constant_pad_nd": op_calls.constant_pad,
        **{f"reflection_pad{n}d": op_calls.make_reflect_or_edge_pad_converter("reflect") for n in (1, 2, 3)},
        **{f"replication_pad{n}d": op_calls.make_reflect_or_edge_pad_converter("edge") for n in (1, 2, 3)},
        "slice_scatter": op_calls.slice_scatter,
        "select_scatter": op_calls.select_scatter,
        # reductions
        "sum": op_calls.sum_,
        "mean": op_calls.mean,
        "var": op_calls.variance_over,
        "std": op_calls.standard_deviation,
        "var_mean": op_calls.variance_and_mean,
        "max": op_calls.make_max_min_converter("max"),
        "min": op_calls.make_max_min_converter("min"),
        "amax": op_calls.make_reduction_converter_without_indices("max"),
        "amin": op_calls.make_reduction_converter_without_indices("min"),
        "prod": op_calls.make_reduction_converter_without_indices("prod"),
        "any": reductions.any_of,
        "all": reductions.all_of,
        "argmax": reductions.argmax,
        "argmin": reductions.argmin,
        "cumsum": op_calls.make_cumulative_converter("sum"),
        "cumprod": op_calls.make_cumulative_converter("prod"),
        "sort": op_calls.sort,
        "argsort": op_calls.argsort,
        "topk": op_calls.top_k,
        "logsumexp": reductions.log_sum_exp,
        "linalg_vector_norm": op_calls.norm,
        "norm": op_calls.norm,
        # products
        "mm": matmul.matmul,
        "bmm": matmul.matmul,
        "mv": matmul.matmul,
        "dot": matmul.matmul,
        "matmul": matmul.matmul,
        "linear": matmul.linear,
        "addmm": op_calls.addmm,
        "baddbmm": op_calls.addmm,
        "scaled_dot_product_attention": op_calls.attention,
        "_scaled_dot_product_flash_attention_for_cpu": op_calls.attention_with_logsumexp,
        "_softmax": op_calls.softmax,
        "softmax": op_calls.softmax,
        "_safe_softmax": op_calls.masked_softmax,
        "_log_softmax": op_calls.log_softmax,
        "log_softmax": op_calls.log_softmax,
        "layer_norm": op_calls.layer_norm,
        "native_layer_norm": op_calls.native_layer_norm,
        "rms_norm": op_calls.rms_norm,
        "group_norm": op_calls.group_norm,
        "native_group_norm": op_calls.native_group_norm,
        "batch_norm": op_calls.batch_norm,
        "_native_batch_norm_legit_no_training": op_calls.native_batch_norm,
        # entries by number
        "embedding": op_calls.embedding,
        "index": indexing.index,
        "_unsafe_index": indexing.index,
        "index_put": op_calls.index_put,
        "index_select": op_calls.index_select,
        "index_add": op_calls.index_add,
        "index_copy": op_calls.index_copy,
        "gather": op_calls.gather,
        "scatter": op_calls.scatter,
        "scatter_add": op_calls.scatter_add,
        "scatter_reduce": op_calls.scatter_reduce,
        # spatial
        "convolution": convolutions.convolution,
        **{f"max_pool{n}d": convolutions.make_max_pool_converter(n) for n in (1, 2, 3)},
        **{f"max_pool{n}d_with_indices": convolutions.make_max_pool_converter(n, with_indices=True) for n in (2, 3)},
        **{f"avg_pool{n}d": convolutions.make_average_pool_converter(n) for n in (1, 2, 3)},
        **{f"adaptive_avg_pool{n}d": convolutions.make_adaptive_average_pool_converter(n) for n in (1, 2, 3)},
        **{f"_adaptive_avg_pool{n}d": convolutions.make_adaptive_average_pool_converter(n) for n in (2, 3)},
        **{
            f"{name}{n}d": convolutions.make_nearest_upsample_converter(mode)
            for name, mode in (("upsample_nearest", "nearest"), ("_upsample_nearest_exact", "nearest-exact"))
            for n in (1, 2, 3)
        },
        "upsample_linear1d": convolutions.make_linear_or_cubic_upsample_converter("linear"),
        "upsample_bilinear2d": convolutions.make_linear_or_cubic_upsample_converter("linear"),
        "upsample_trilinear3d": convolutions.make_linear_or_cubic_upsample_converter("linear"),
        "upsample_bicubic2d": convolutions.make_linear_or_cubic_upsample_converter("cubic"),
    }
)
"""Converters by the name of the ATen op, for all of its overloads."""

CAST_OPERAND_OPS = frozenset(
    {
        *("sum", "mean", "prod", "cumsum", "cumprod", "linalg_vector_norm", "norm"),
        *("_softmax", "softmax", "_log_softmax", "log_softmax", "_safe_softmax"),
    }
)
"""Ops for which PyTorch casts the operand to the dtype of the result before the computation."""
