"""Products of many rows of activations with weights of float16 or bfloat16 by tiles of AMX, in terms of bfloat16.

Activations are the sum of three terms.  A weight of bfloat16 is one term, which meets all; one of float16 is exactly
two, of which the second meets the first two terms of activations: what is left out is 2^-24 of a product at most, as in
float32.  Terms are columns of their own.
"""

from __future__ import annotations

import math
from functools import cache

from ....graph.dtypes import DType
from ...operands import Bound
from .. import processor
from ..compiler import Kernel, part
from ..simd.bf16 import turn_left, turn_nearest
from ..simd.order import turn_floats
from ..simd.vectors import LANES
from ..steps import Steps
from .formats import COLUMNS
from .rounding import LINE, TERMS, TERMS_AGAIN
from .tiled import BLOCK, LEAST, add, product_of


@part
def expand_bf16(to, group, stride, left, first, last, n):
    """Each block for all terms of activations."""
    for block in range(first, last):
        turn_floats(group + block // 3 * LINE, stride, left, LANES, to)
        to += BLOCK


@part
def expand_f16(to, group, stride, left, first, last, n):
    """The first term of each block for all of activations, and the second for the first two of these."""
    for block in range(first, last):
        if block % 5 >= 3:
            turn_left(group + block // 5 * LINE, stride, left, to)
        else:
            turn_nearest(group + block // 5 * LINE, stride, left, to)
        to += BLOCK


KINDS = {DType.BF16: (TERMS, expand_bf16), DType.F16: (TERMS_AGAIN, expand_f16)}
"""How activations are rounded that meet a type, and how its weights are expanded."""


@cache
def product(dtype: DType) -> Kernel:
    return product_of(f"tiled_dense.product.{dtype}", KINDS[dtype][1])


def fits(call: Bound) -> bool:
    """Whether this is such a product, of whole blocks of columns."""
    w, rows = call.operand(0), math.prod(call.out.shape[:-1])
    whole = w.dtype in KINDS and w.shape[-1] % COLUMNS == 0 and w.shape[-1] > 0
    return whole and call.op == "mul_mat" and rows >= LEAST and processor.tiles() is not None


def bind(steps: Steps, call: Bound) -> None:
    """A product whose rows of weights may lie apart."""
    w = call.operand(0)
    add(steps, call, product(w.dtype), w.dtype.storage.itemsize * w.strides[0], KINDS[w.dtype][0])
