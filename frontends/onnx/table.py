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
from . import calls, recurrences, spatial, sums

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

OP_TABLE: Mapping[str, calls.OpConverter] = MappingProxyType(
    {
        **{name: partial(arith.unary, op) for name, op in _UNARY_OPS.items()},
        **{name: partial(arith.compare, kind) for name, kind in _COMPARISONS.items()},
        **{name: getattr(arith, f"logical_{name.lower()}") for name in ("And", "Or", "Xor", "Not")},
        **{f"Bitwise{kind.capitalize()}": partial(arith.bitwise, kind) for kind in ("and", "or", "xor")},
        **dict.fromkeys(("Identity", "Cast", "CastLike"), arith.pass_through),
        "BitwiseNot": arith.bitwise_not,
        "Add": arith.add,
        "Sub": arith.sub,
        "Mul": arith.mul,
        "Div": calls.div,
        "Mod": calls.mod,
        "Pow": calls.power,
        "Max": calls.make_variadic_converter(arith.maximum),
        "Min": calls.make_variadic_converter(arith.minimum),
        "Sum": calls.make_variadic_converter(arith.add),
        "Mean": calls.mean,
        "Neg": arith.negative,
        "Abs": arith.absolute,
        "Sign": arith.sign,
        "Round": arith.round_even,
        "Reciprocal": lambda x: arith.div(1.0, x),
        "Clip": calls.clip,
        "Gelu": calls.gelu,
        "Elu": calls.elu,
        "Selu": calls.selu,
        "HardSigmoid": calls.hard_sigmoid,
        "LeakyRelu": lambda x, *, alpha=0.01: arith.unary(ops.leaky_relu, x, negative_slope=alpha),
        "PRelu": calls.prelu,
        "Softsign": lambda x: arith.div(x, arith.add(arith.absolute(x), 1.0)),
        "IsNaN": arith.is_nan,
        "IsInf": calls.is_infinite,
        "Where": arith.where,
        "Dropout": calls.dropout,
        "Trilu": calls.triangle,
        # shapes
        "Reshape": calls.reshape,
        "Flatten": calls.flatten,
        "Transpose": calls.transpose,
        "Squeeze": calls.squeeze,
        "Unsqueeze": calls.unsqueeze,
        "Concat": calls.concat,
        "Split": calls.split,
        "Slice": calls.slice_,
        "Pad": calls.pad,
        "Tile": calls.tile,
        "Expand": calls.expand,
        "Shape": calls.shape_of,
        "Size": lambda x: calls.constant(value=math.prod(x.shape)),
        "Constant": calls.constant,
        "ConstantOfShape": calls.constant_of_shape,
        "Range": calls.range_,
        "EyeLike": calls.eye_like,
        "OneHot": calls.one_hot,
        "SpaceToDepth": calls.space_to_depth,
        "DepthToSpace": calls.depth_to_space,
        # reductions
        "ReduceSum": sums.reduce_sum,
        "ReduceMean": sums.reduce_mean,
        "ReduceMax": sums.make_extreme_converter("max"),
        "ReduceMin": sums.make_extreme_converter("min"),
        "ReduceProd": sums.make_extreme_converter("prod"),
        "ReduceSumSquare": sums.reduce_square_sum,
        "ReduceL1": sums.reduce_l1,
        "ReduceL2": sums.reduce_l2,
        "ReduceLogSum": sums.reduce_log_sum,
        "ReduceLogSumExp": sums.reduce_log_sum_exp,
        "ArgMax": sums.make_arg_extreme_converter(reductions.argmax),
        "ArgMin": sums.make_arg_extreme_converter(reductions.argmin),
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
        "RNN": recurrences.rnn,
        "GRU": recurrences.gru,
        "LSTM": recurrences.lstm,
        # entries by number
        "Gather": calls.gather,
        "GatherElements": calls.gather_elements,
        "GatherND": calls.gather_nd,
        "Scatter": calls.scatter_elements,
        "ScatterElements": calls.scatter_elements,
        "ScatterND": calls.scatter_nd,
        # spatial
        "Conv": spatial.convolution,
        "ConvTranspose": spatial.transposed_convolution,
        "MaxPool": spatial.max_pool,
        "AveragePool": spatial.average_pool,
        "LpPool": spatial.power_pool,
        "GlobalAveragePool": spatial.make_global_pool_converter("mean"),
        "GlobalMaxPool": spatial.make_global_pool_converter("max"),
        "Resize": spatial.resize,
        "Upsample": spatial.upsample,
    }
)
"""Converters by op name of ONNX's own domain."""

OLDER_OPSET_ROWS: Mapping[str, tuple[int, calls.OpConverter]] = MappingProxyType(
    {name: (13, sums.with_flattened_axes(OP_TABLE[name])) for name in ("Softmax", "LogSoftmax", "Hardmax")}
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
