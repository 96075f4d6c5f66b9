"""Every op, declared once: meaning, shapes, sharding, cost, samples.  Calling one builds a node."""

from typing import Any as _Any

from .arrange import acc as acc
from .arrange import pad as pad
from .arrange import pad_reflect_1d as pad_reflect_1d
from .arrange import repeat as repeat
from .arrange import roll as roll
from .arrange import set_ as set_
from .attend import attention as attention
from .attend import causal_mask as causal_mask
from .choosing import compare as compare
from .choosing import maximum as maximum
from .choosing import minimum as minimum
from .choosing import power as power
from .choosing import where as where
from .declaring.op import Op as Op
from .declaring.op import op as op
from .declaring.oracle import as_reference_array as as_reference_array
from .declaring.oracle import evaluate as evaluate
from .declaring.registry import OP_RULES as OP_RULES
from .declaring.registry import REGISTRY as REGISTRY
from .declaring.registry import op_of as op_of
from .declaring.registry import register as register
from .declaring.registry import verify as verify
from .declaring.samples import LegalRange as LegalRange
from .elementwise import add as add
from .elementwise import cast as cast
from .elementwise import clamp as clamp
from .elementwise import cont as cont
from .elementwise import div as div
from .elementwise import mul as mul
from .elementwise import scale as scale
from .elementwise import sub as sub
from .experts import add_id as add_id
from .experts import mul_mat_id as mul_mat_id
from .gated import geglu as geglu
from .gated import geglu_erf as geglu_erf
from .gated import geglu_quick as geglu_quick
from .gated import glu as glu
from .gated import reglu as reglu
from .gated import swiglu as swiglu
from .gated import swiglu_clamp as swiglu_clamp
from .gated import swiglu_oai as swiglu_oai
from .generators import arange as arange
from .generators import fill as fill
from .generators import timestep_embedding as timestep_embedding
from .indexer import dsv4_hc_comb as dsv4_hc_comb
from .indexer import dsv4_hc_post as dsv4_hc_post
from .indexer import dsv4_hc_pre as dsv4_hc_pre
from .indexer import lightning_indexer as lightning_indexer
from .integers import calculate as calculate
from .lookups import gather as gather
from .lookups import scatter as scatter
from .moves import concat as concat
from .moves import get_rows as get_rows
from .moves import set_rows as set_rows
from .norms import group_norm as group_norm
from .norms import l2_norm as l2_norm
from .norms import norm as norm
from .norms import rms_norm as rms_norm
from .norms import softmax as softmax
from .products import mul_mat as mul_mat
from .recurrent import gated_delta_net as gated_delta_net
from .recurrent import ssm_conv as ssm_conv
from .reductions import accumulate as accumulate
from .reductions import argmax as argmax
from .reductions import count_equal as count_equal
from .reductions import cumsum as cumsum
from .reductions import mean as mean
from .reductions import reduce as reduce
from .reductions import sum_ as sum_
from .reductions import sum_rows as sum_rows
from .rotary import rope as rope
from .rotary import rope_multi as rope_multi
from .scans import gated_linear_attn as gated_linear_attn
from .scans import rwkv_wkv6 as rwkv_wkv6
from .scans import rwkv_wkv7 as rwkv_wkv7
from .scans import ssm_scan as ssm_scan
from .sliding import windows as windows
from .sorting import argsort as argsort
from .sorting import top_k as top_k
from .triangular import diag as diag
from .triangular import diag_mask_inf as diag_mask_inf
from .triangular import solve_tri as solve_tri
from .triangular import tri as tri
from .unary import abs_ as abs_
from .unary import arccos as arccos
from .unary import arccosh as arccosh
from .unary import arcsin as arcsin
from .unary import arcsinh as arcsinh
from .unary import arctan as arctan
from .unary import arctanh as arctanh
from .unary import ceil as ceil
from .unary import cos as cos
from .unary import cosh as cosh
from .unary import elu as elu
from .unary import erf as erf
from .unary import exp as exp
from .unary import expm1 as expm1
from .unary import floor as floor
from .unary import gelu as gelu
from .unary import gelu_erf as gelu_erf
from .unary import gelu_quick as gelu_quick
from .unary import hardsigmoid as hardsigmoid
from .unary import hardswish as hardswish
from .unary import leaky_relu as leaky_relu
from .unary import log as log
from .unary import log1p as log1p
from .unary import neg as neg
from .unary import relu as relu
from .unary import round_ as round_
from .unary import sgn as sgn
from .unary import sigmoid as sigmoid
from .unary import silu as silu
from .unary import sin as sin
from .unary import sinh as sinh
from .unary import softplus as softplus
from .unary import sqr as sqr
from .unary import sqrt as sqrt
from .unary import step as step
from .unary import tan as tan
from .unary import tanh as tanh
from .unary import trunc as trunc
from .unary import xielu as xielu
from .views import broadcast as broadcast
from .views import permute as permute
from .views import reshape as reshape
from .views import slice_ as slice_
from .views import transpose as transpose

_NAMES_IN_OTHER_LIBRARIES = {
    "matmul": "mul_mat", "dot": "mul_mat", "linear": "mul_mat", "embedding": "get_rows", "take": "get_rows",
}  # fmt: skip
"""The op of hocket for names that other libraries use."""

_OLD_NAMES = {"Range": "LegalRange", "RULES": "OP_RULES", "exact": "as_reference_array"}
"""Names before 0.2, which packages may use until 0.3."""


def __getattr__(name: str) -> _Any:
    """An op of another package, which has been registered or is installed."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _OLD_NAMES:
        return globals()[_OLD_NAMES[name]]
    if name in REGISTRY:
        return REGISTRY[name]
    from ..graph.validation import did_you_mean

    hint = did_you_mean(_NAMES_IN_OTHER_LIBRARIES.get(name, name), REGISTRY) or "; `hocket ops` lists all"
    raise AttributeError(f"there is no op {name!r}{hint}")
