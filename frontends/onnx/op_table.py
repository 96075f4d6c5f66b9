"""The op table of ONNX models: the converter of each op.

A converter gets the inputs as `Tensor`, with None for absent ones, and the attributes of the node as keywords. The
importer casts its results to the dtypes of ONNX, so a converter does not handle dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from ... import ops
from ..tensors import arithmetic as arith
from ..tensors import matmul, reductions
from . import convolutions, op_calls, recurrent_cells
from . import reductions as sums

_UNARY_OPS: Mapping[str, Callable[..., Any]] = {
    **{name.capitalize(): getattr(ops, name) for name in ("sqrt", "exp", "log", "sin", "cos", "tan", "tanh", "erf")},
    **{name.capitalize(): getattr(ops, name) for name in ("sigmoid", "relu", "sinh", "cosh", "floor", "ceil")},
    **{f"A{name}": getattr(ops, f"arc{name}") for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    "Softplus": ops.softplus,
    "HardSwish": ops.hardswish,
}
"""Ops of hocket by the ONNX op of one operand that has the same meaning."""

_COMPARISONS = {"Equal": "eq", "Less": "lt", "LessOrEqual": "le", "Greater": "gt", "GreaterOrEqual": "ge"}
"""Comparison kinds of `frontends.tensors.arithmetic.compare`, by ONNX op."""

OP_TABLE: Mapping[str, op_calls.OpConverter] = MappingProxyType(
    {
        **{name: partial(arith.apply_unary_op, op) for name, op in _UNARY_OPS.items()},
        **{name: partial(arith.compare, kind) for name, kind in _COMPARISONS.items()},
        **{name: getattr(arith, f"logical_{name.lower()}") for name in ("And", "Or", "Xor", "Not")},
        **{f"Bitwise{kind.capitalize()}": partial(arith.apply_bitwise_op, kind) for kind in ("and", "or", "xor")},
        **dict.fromkeys(("Identity", "Cast", "CastLike"), arith.return_unchanged),
        "BitwiseNot": arith.bitwise_not,
        "Add": arith.add,
        "Sub": arith.sub,
        "Mul": arith.mul,
        "Div": op_calls.div,
        "Mod": op_calls.mod,
        "Pow": op_calls.power,
        "Max": op_calls.make_variadic_converter(arith.maximum),
        "Min": op_calls.make_variadic_converter(arith.minimum),
        "Sum": op_calls.make_variadic_converter(arith.add),
        "Mean": op_calls.mean,
        "Neg": arith.negative,
        "Abs": arith.absolute,
        "Sign": arith.sign,
        "Round": arith.round_even,
        "Reciprocal": lambda x: arith.div(1.0, x),
        "Clip": op_calls.clip,
        "Gelu": op_calls.gelu,
        "Elu": op_calls.elu,
        "Selu": op_calls.selu,
        "HardSigmoid": op_calls.hard_sigmoid,
        "LeakyRelu": lambda x, *, alpha=0.01: arith.apply_unary_op(ops.leaky_relu, x, negative_slope=alpha),
        "PRelu": op_calls.prelu,
        "Softsign": lambda x: arith.div(x, arith.add(arith.absolute(x), 1.0)),
        "IsNaN": arith.is_nan,
        "IsInf": op_calls.is_infinite,
        "Where": arith.where,
        "Dropout": op_calls.dropout,
        "Trilu": op_calls.keep_triangle,
        # shapes
        "Reshape": op_calls.reshape,
        "Flatten": op_calls.flatten,
        "Transpose": op_calls.transpose,
        "Squeeze": op_calls.squeeze,
        "Unsqueeze": op_calls.unsqueeze,
        "Concat": op_calls.concat,
        "Split": op_calls.split,
        "Slice": op_calls.slice_,
        "Pad": op_calls.pad,
        "Tile": op_calls.tile,
        "Expand": op_calls.expand,
        "Shape": op_calls.shape_of,
        "Size": lambda x: op_calls.constant(value=math.prod(x.shape)),
        "Constant": op_calls.constant,
        "ConstantOfShape": op_calls.constant_of_shape,
        "Range": op_calls.range_,
        "EyeLike": op_calls.eye_like,
        "OneHot": op_calls.one_hot,
        "SpaceToDepth": op_calls.space_to_depth,
        "DepthToSpace": op_calls.depth_to_space,
        # reductions
        "ReduceSum": sums.reduce_sum,
        "ReduceMean": sums.reduce_mean,
        "ReduceMax": sums.make_max_min_prod_converter("max"),
        "ReduceMin": sums.make_max_min_prod_converter("min"),
        "ReduceProd": sums.make_max_min_prod_converter("prod"),
        "ReduceSumSquare": sums.reduce_square_sum,
        "ReduceL1": sums.reduce_l1,
        "ReduceL2": sums.reduce_l2,
        "ReduceLogSum": sums.reduce_log_sum,
        "ReduceLogSumExp": sums.reduce_log_sum_exp,
        "ArgMax": sums.make_argmax_argmin_converter(reductions.argmax),
        "ArgMin": sums.make_argmax_argmin_converter(reductions.argmin),
        "CumSum": sums.make_cumulative_converter("sum"),
        "CumProd": sums.make_cumulative_converter("prod"),
        "TopK": sums.top_k,
        "Softmax": lambda x, *, axis=-1: matmul.softmax(x, axis),
        "LogSoftmax": lambda x, *, axis=-1: matmul.log_softmax(x, axis),
        "Hardmax": sums.hardmax,
        "LpNormalization": sums.lp_norm,
        # products
        "MatMul": matmul.matmul,
        "Gemm": sums.gemm,
        "Einsum": sums.einsum,
        "LayerNormalization": sums.layer_norm,
        "BatchNormalization": sums.batch_norm,
        "InstanceNormalization": sums.instance_norm,
        "LRN": sums.local_response_norm,
        "RNN": recurrent_cells.rnn,
        "GRU": recurrent_cells.gru,
        "LSTM": recurrent_cells.lstm,
        # entries by number
        "Gather": op_calls.gather,
        "GatherElements": op_calls.gather_elements,
        "GatherND": op_calls.gather_nd,
        "Scatter": op_calls.scatter_elements,
        "ScatterElements": op_calls.scatter_elements,
        "ScatterND": op_calls.scatter_nd,
        # spatial
        "Conv": convolutions.convolution,
        "ConvTranspose": convolutions.transposed_convolution,
        "Col2Im": convolutions.column_to_image,
        "MaxPool": convolutions.max_pool,
        "AveragePool": convolutions.average_pool,
        "LpPool": convolutions.power_pool,
        "GlobalAveragePool": convolutions.make_global_pool_converter("mean"),
        "GlobalMaxPool": convolutions.make_global_pool_converter("max"),
        "Resize": convolutions.resize,
        "Upsample": convolutions.upsample,
    }
)
"""Converters by op name of ONNX's own domain."""

OLDER_OPSET_ROWS: Mapping[str, tuple[int, op_calls.OpConverter]] = MappingProxyType(
    {name: (13, sums.make_flattened_axes_converter(OP_TABLE[name])) for name in ("Softmax", "LogSoftmax", "Hardmax")}
)
"""For ops with another meaning before an opset: the opset, and the converter for older opsets."""

CONSTANT_FOLDED_OPS = frozenset(
    (
        *(
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Mod",
            "Neg",
            "Abs",
            "Min",
            "Max",
            "Floor",
            "Ceil",
            "Sqrt",
            "Pow",
            "Sign",
            "Round",
        ),
        *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not", "Where", "Cast", "CastLike"),
        *("Identity", "Gather", "GatherND", "Concat", "Slice", "Split", "Squeeze", "Unsqueeze", "Reshape", "Transpose"),
        *("ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin", "Flatten", "NonZero", "CumSum", "Reciprocal"),
    )
)
"""Ops of shape arithmetic that onnx's reference evaluator computes during the import if all inputs are constants."""

CONSTANT_INPUT_OPS = ("Resize", "Upsample", "Range")
"""Ops with float inputs that the converter reads during the import; these inputs do not become weights."""
