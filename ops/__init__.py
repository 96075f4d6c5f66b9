"""All ops: reference function, signature, sharding, cost and samples. A call of an op builds a node."""

from typing import Any as _Any

from .declaration.op import Op as Op
from .declaration.op import op as op
from .declaration.samples import LegalRange as LegalRange
from .elementwise.activations import elu as elu
from .elementwise.activations import gelu as gelu
from .elementwise.activations import gelu_erf as gelu_erf
from .elementwise.activations import gelu_quick as gelu_quick
from .elementwise.activations import hardsigmoid as hardsigmoid
from .elementwise.activations import hardswish as hardswish
from .elementwise.activations import leaky_relu as leaky_relu
from .elementwise.activations import relu as relu
from .elementwise.activations import sigmoid as sigmoid
from .elementwise.activations import silu as silu
from .elementwise.activations import softplus as softplus
from .elementwise.activations import tanh as tanh
from .elementwise.activations import xielu as xielu
from .elementwise.binary import add as add
from .elementwise.binary import cast as cast
from .elementwise.binary import clamp as clamp
from .elementwise.binary import cont as cont
from .elementwise.binary import div as div
from .elementwise.binary import mul as mul
from .elementwise.binary import scale as scale
from .elementwise.binary import sub as sub
from .elementwise.comparisons import compare as compare
from .elementwise.comparisons import maximum as maximum
from .elementwise.comparisons import minimum as minimum
from .elementwise.comparisons import power as power
from .elementwise.comparisons import where as where
from .elementwise.gated_units import geglu as geglu
from .elementwise.gated_units import geglu_erf as geglu_erf
from .elementwise.gated_units import geglu_quick as geglu_quick
from .elementwise.gated_units import glu as glu
from .elementwise.gated_units import reglu as reglu
from .elementwise.gated_units import swiglu as swiglu
from .elementwise.gated_units import swiglu_clamp as swiglu_clamp
from .elementwise.gated_units import swiglu_oai as swiglu_oai
from .elementwise.generators import arange as arange
from .elementwise.generators import fill as fill
from .elementwise.generators import timestep_embedding as timestep_embedding
from .elementwise.integers import calculate as calculate
from .elementwise.unary import abs_ as abs_
from .elementwise.unary import arccos as arccos
from .elementwise.unary import arccosh as arccosh
from .elementwise.unary import arcsin as arcsin
from .elementwise.unary import arcsinh as arcsinh
from .elementwise.unary import arctan as arctan
from .elementwise.unary import arctanh as arctanh
from .elementwise.unary import ceil as ceil
from .elementwise.unary import cos as cos
from .elementwise.unary import cosh as cosh
from .elementwise.unary import erf as erf
from .elementwise.unary import exp as exp
from .elementwise.unary import expm1 as expm1
from .elementwise.unary import floor as floor
from .elementwise.unary import log as log
from .elementwise.unary import log1p as log1p
from .elementwise.unary import neg as neg
from .elementwise.unary import round_ as round_
from .elementwise.unary import sgn as sgn
from .elementwise.unary import sin as sin
from .elementwise.unary import sinh as sinh
from .elementwise.unary import sqr as sqr
from .elementwise.unary import sqrt as sqrt
from .elementwise.unary import step as step
from .elementwise.unary import tan as tan
from .elementwise.unary import trunc as trunc
from .matrix.attention import attention as attention
from .matrix.attention import causal_mask as causal_mask
from .matrix.experts import add_id as add_id
from .matrix.experts import mul_mat_id as mul_mat_id
from .matrix.matmul import mul_mat as mul_mat
from .matrix.rope import rope as rope
from .matrix.rope import rope_multi as rope_multi
from .matrix.sparse_indexer import dsv4_hc_comb as dsv4_hc_comb
from .matrix.sparse_indexer import dsv4_hc_post as dsv4_hc_post
from .matrix.sparse_indexer import dsv4_hc_pre as dsv4_hc_pre
from .matrix.sparse_indexer import lightning_indexer as lightning_indexer
from .movement.arrange import acc as acc
from .movement.arrange import pad as pad
from .movement.arrange import pad_reflect_1d as pad_reflect_1d
from .movement.arrange import repeat as repeat
from .movement.arrange import roll as roll
from .movement.arrange import set_ as set_
from .movement.gather_scatter import gather as gather
from .movement.gather_scatter import scatter as scatter
from .movement.rows import concat as concat
from .movement.rows import get_rows as get_rows
from .movement.rows import set_rows as set_rows
from .movement.sliding_windows import windows as windows
from .movement.triangular import diag as diag
from .movement.triangular import diag_mask_inf as diag_mask_inf
from .movement.triangular import solve_tri as solve_tri
from .movement.triangular import tri as tri
from .movement.views import broadcast as broadcast
from .movement.views import permute as permute
from .movement.views import reshape as reshape
from .movement.views import slice_ as slice_
from .movement.views import transpose as transpose
from .recurrent.gated_delta_net import gated_delta_net as gated_delta_net
from .recurrent.gated_delta_net import ssm_conv as ssm_conv
from .recurrent.linear_attention import gated_linear_attn as gated_linear_attn
from .recurrent.linear_attention import rwkv_wkv6 as rwkv_wkv6
from .recurrent.linear_attention import rwkv_wkv7 as rwkv_wkv7
from .recurrent.linear_attention import ssm_scan as ssm_scan
from .reduction.norms import group_norm as group_norm
from .reduction.norms import l2_norm as l2_norm
from .reduction.norms import norm as norm
from .reduction.norms import rms_norm as rms_norm
from .reduction.norms import softmax as softmax
from .reduction.reductions import accumulate as accumulate
from .reduction.reductions import argmax as argmax
from .reduction.reductions import count_equal as count_equal
from .reduction.reductions import cumsum as cumsum
from .reduction.reductions import mean as mean
from .reduction.reductions import reduce as reduce
from .reduction.reductions import sum_ as sum_
from .reduction.reductions import sum_rows as sum_rows
from .reduction.sorting import argsort as argsort
from .reduction.sorting import top_k as top_k
from .reference_run import as_reference_array as as_reference_array
from .reference_run import evaluate as evaluate
from .registry import OP_RULES as OP_RULES
from .registry import REGISTRY as REGISTRY
from .registry import op_of as op_of
from .registry import register as register
from .registry import verify as verify

_OLD_NAMES = {"Range": "LegalRange", "RULES": "OP_RULES", "exact": "as_reference_array"}
"""Names before 0.2, which packages may use until 0.3."""


def __getattr__(name: str) -> _Any:
    """Return an op of another package, which is registered or installed, or an export under its old name."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _OLD_NAMES:
        return globals()[_OLD_NAMES[name]]
    if name in REGISTRY:
        return REGISTRY[name]
    from ..graph.validation import did_you_mean
    from .other_names import OPS_BY_OTHER_NAME

    named = OPS_BY_OTHER_NAME.get(name, (name,))
    hint = f"; use {', then '.join(named)}" if len(named) > 1 else did_you_mean(named[0], REGISTRY)
    hint = hint or "; `hocket ops` lists all"
    raise AttributeError(f"there is no op {name!r}{hint}")
