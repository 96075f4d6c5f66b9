"""Hyper-connections: n residual streams that mix before and after a layer (Xie et al., mHC, 2025).

ggml: ``DSV4_HC_PRE``, ``DSV4_HC_POST`` and ``DSV4_HC_COMB``.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from .....ops.declaration import scalar
from .....ops.declaration.attributes import float_attribute
from ....fusion.operands import BoundInstruction, Operand, float32_bits
from ...compilation.compiler import Kernel, kernel
from ...compilation.kernel_args import declare_args
from ...simd.vectors import (
    LANES,
    add,
    div,
    fma,
    lane_max_without_nan,
    lane_sum,
    load,
    load_first_lanes,
    mask_with_negative_infinity,
    mul,
    splat,
    splat_from,
    store,
    store_first_lanes,
    sub,
    zeros,
)
from ...steps.partition import compute_thread_range
from ...steps.step_table import StepTableBuilder
from ..vector.elementwise import load_lanes, store_lanes
from ..vector.lower_expressions import make_lane_function
from ..vector.vector_functions import exp

sigmoid = make_lane_function(scalar.logistic, 1)

PRE = declare_args("tokens streams columns x x_row weights weights_row y y_row scale:f32")
POST = declare_args("tokens streams columns x x_row residual residual_row post post_row comb comb_row y y_row scratch")
COMB = declare_args("tokens streams iterations mixes mixes_row scale base y eps:f32")
"""Rows of `x` (`PRE`) and of `residual` and `y` (`POST`) are streams of tokens; `..._row` are bytes from row to row."""


@cache
def make_combine_residual_streams_kernel(gated: bool) -> Kernel:
    """Make the kernel that combines several residual streams to one: ``y = scale * sum over h of x[h] * weights[h]``.

    If `gated` is true, each element has its own weight: the sigmoid of the number in `weights`.
    """

    def body(a, thread, threads):
        streams, n, scale = PRE.streams(a), PRE.columns(a), splat(PRE.scale(a))
        first, last = compute_thread_range(PRE.tokens(a), thread, threads)
        for t in range(first, last):
            x, y = PRE.x(a) + t * streams * PRE.x_row(a), PRE.y(a) + t * PRE.y_row(a)
            weights = PRE.weights(a) + t * PRE.weights_row(a) * (streams if gated else 1)
            for c in range(0, n, LANES):
                acc = zeros()
                for h in range(streams):
                    if gated:
                        weight = sigmoid(load_lanes(weights + h * PRE.weights_row(a), c, n, 4))
                    else:
                        weight = splat_from(weights + 4 * h)
                    acc = fma(load_lanes(x + h * PRE.x_row(a), c, n, 4), weight, acc)
                store_lanes(y, c, n, mul(scale, acc))
        return 0

    return Kernel(f"hyper_connections.combine_streams.{'gated' if gated else 'plain'}", body)


@cache
def make_update_residual_streams_kernel(mixes: bool) -> Kernel:
    """Make the kernel that updates residual streams: ``y[to] = x post[to] + sum_from residual[from] comb[from, to]``.

    If `mixes` is false, comb is the identity. `y` and `residual` may be the same memory, because 16 columns of all
    streams are copied to the thread's scratch first.
    """

    def body(a, thread, threads):
        streams, n = POST.streams(a), POST.columns(a)
        block = POST.scratch(a) + thread * 4 * LANES * streams
        first, last = compute_thread_range(POST.tokens(a), thread, threads)
        for t in range(first, last):
            x, post = POST.x(a) + t * POST.x_row(a), POST.post(a) + t * POST.post_row(a)
            residual = POST.residual(a) + t * streams * POST.residual_row(a)
            comb, y = POST.comb(a) + t * streams * POST.comb_row(a), POST.y(a) + t * streams * POST.y_row(a)
            for c in range(0, n, LANES):
                new = load_lanes(x, c, n, 4)
                for h in range(streams):
                    store(block + 4 * LANES * h, load_lanes(residual + h * POST.residual_row(a), c, n, 4))
                for to in range(streams):
                    acc = mul(new, splat_from(post + 4 * to))
                    if mixes:
                        for h in range(streams):
                            acc = fma(
                                load(block + 4 * LANES * h), splat_from(comb + h * POST.comb_row(a) + 4 * to), acc
                            )
                    else:
                        acc = add(acc, load(block + 4 * LANES * to))
                    store_lanes(y + to * POST.y_row(a), c, n, acc)
        return 0

    return Kernel(f"hyper_connections.update_streams.{'mixed' if mixes else 'apart'}", body)


@kernel
def compute_stream_mixing_matrices(a, thread, threads):
    """Compute the matrices that mix at most 16 residual streams: a softmax of each row, then Sinkhorn iterations.

    An iteration divides by the sums of rows, then by the sums of columns. The first one only divides by the sums of
    columns.
    """
    n, iterations, eps = COMB.streams(a), COMB.iterations(a), splat(COMB.eps(a))
    scale, base = splat_from(COMB.scale(a) + 8), COMB.base(a) + 8 * n
    first, last = compute_thread_range(COMB.tokens(a), thread, threads)
    for t in range(first, last):
        logits, y = COMB.mixes(a) + t * COMB.mixes_row(a) + 8 * n, COMB.y(a) + 4 * n * n * t
        for h in range(n):
            x = mask_with_negative_infinity(
                fma(load_first_lanes(logits + 4 * n * h, n), scale, load_first_lanes(base + 4 * n * h, n)), n
            )
            e = exp(sub(x, splat(lane_max_without_nan(x))))
            store_first_lanes(y + 4 * n * h, add(div(e, splat(lane_sum(e))), eps), n)
        for i in range(iterations):
            if i > 0:
                for h in range(n):
                    x = load_first_lanes(y + 4 * n * h, n)
                    store_first_lanes(y + 4 * n * h, div(x, add(splat(lane_sum(x)), eps)), n)
            sums = zeros()
            for h in range(n):
                sums = add(sums, load_first_lanes(y + 4 * n * h, n))
            sums = add(sums, eps)
            for h in range(n):
                store_first_lanes(y + 4 * n * h, div(load_first_lanes(y + 4 * n * h, n), sums), n)
    return 0


def _are_float_rows(*operands: Operand) -> bool:
    return all(o.is_float and o.has_uniform_row_stride for o in operands)


def _bind_combine_streams(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    x, weights, y = call.operand(0), call.operand(1), call.out
    if not _are_float_rows(x, weights, y):
        return False
    block = PRE(
        tokens=math.prod(x.shape[:-2]),
        streams=x.shape[-2],
        columns=x.shape[-1],
        x=x.address,
        x_row=x.row_stride_bytes,
        weights=weights.address,
        weights_row=weights.row_stride_bytes,
        y=y.address,
        y_row=y.row_stride_bytes,
        scale=float32_bits(float_attribute(call.attrs, "scale")),
    )
    steps.add(make_combine_residual_streams_kernel(bool(call.attrs["gated"])), block, reads=[x, weights], writes=[y])
    return True


def _bind_update_streams(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    x, residual, post, comb, y = (*(call.operand(i) for i in range(3)), call.optional_operand(3), call.out)
    operands = [x, residual, post] + ([] if comb is None else [comb])
    if not _are_float_rows(*operands, y):
        return False
    nbytes = 4 * LANES * residual.shape[-2] * steps.threads
    scratch = steps.scratch(f"streams {nbytes}", nbytes)
    block = POST(
        tokens=math.prod(x.shape[:-1]),
        streams=residual.shape[-2],
        columns=x.shape[-1],
        x=x.address,
        x_row=x.row_stride_bytes,
        residual=residual.address,
        residual_row=residual.row_stride_bytes,
        post=post.address,
        post_row=post.row_stride_bytes,
        comb=0 if comb is None else comb.address,
        comb_row=0 if comb is None else comb.row_stride_bytes,
        y=y.address,
        y_row=y.row_stride_bytes,
        scratch=scratch.address,
    )
    steps.add(make_update_residual_streams_kernel(comb is not None), block, reads=operands, writes=[y])
    return True


def _bind_stream_mixing(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    mixes, scale, base, y = (*(call.operand(i) for i in range(3)), call.out)
    n = y.shape[-1]
    plain = _are_float_rows(mixes, scale, base) and y.is_float and y.is_dense
    if not plain or n > LANES:
        return False
    block = COMB(
        tokens=math.prod(mixes.shape[:-1]),
        streams=n,
        iterations=int(np.asarray(call.attrs["n_iter"])),
        mixes=mixes.address,
        mixes_row=mixes.row_stride_bytes,
        scale=scale.address,
        base=base.address,
        y=y.address,
        eps=call.float_attribute_bits("eps"),
    )
    steps.add(compute_stream_mixing_matrices, block, reads=[mixes, scale, base], writes=[y])
    return True


BINDINGS = {
    "dsv4_hc_pre": _bind_combine_streams,
    "dsv4_hc_post": _bind_update_streams,
    "dsv4_hc_comb": _bind_stream_mixing,
}
