"""Norms of rows, and fused norms with factors and quantisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial

import numpy as np

from ...chains import scaled_norm
from ...flow import Flow, apart
from ...operands import Bound, Operand, need
from ..compiler import Kernel, kernel, part
from ..pieces import pieces_of
from ..simd.vectors import LANES, add, first_lanes, fma, mul, splat, sqrt_scalar, sub, total, zeros
from ..steps import Binding, Chain, Fused, Share, Steps
from .packing import share
from .products.products import stand_ins, wanted_of
from .products.rounding import Target, round_row
from .rows import ELEMENTS, lanes, put, row_words, rows_of, whole_rows

ONE = np.float32(1)


@part
def sum_of_squares(x, n):
    """Return ``sum of x[c]^2`` over `n` float32."""
    first, second = zeros(), zeros()
    c = 0
    while c + 2 * LANES <= n:
        v, w = lanes(x, c, n, 4), lanes(x, c + LANES, n, 4)
        first, second = fma(v, v, first), fma(w, w, second)
        c += 2 * LANES
    while c < n:
        v = lanes(x, c, n, 4)
        first = fma(v, v, first)
        c += LANES
    return total(add(first, second))


@part
def rms_factor(squares, n, eps):
    """Return ``1 / sqrt(squares / n + eps)``."""
    return ONE / sqrt_scalar(squares / np.float32(n) + eps)


@part
def l2_factor(squares, n, eps):
    """Return ``1 / max(sqrt(squares), eps)``, the definition of ggml."""
    return ONE / max(sqrt_scalar(squares), eps)


@part
def l2_factor_added(squares, n, eps):
    """Return ``1 / sqrt(squares + eps)``."""
    return ONE / sqrt_scalar(squares + eps)


FACTORS = {"rms_norm": rms_factor, "l2_norm": l2_factor, "l2_norm_added": l2_factor_added}


PLAIN = row_words("x y", "eps:f32")


@cache
def norm(name: str) -> Kernel:
    """Make the kernel that multiplies each row by a factor of its sum of squares (`NORM_FACTORS`)."""
    factor = FACTORS[name]

    def body(a, thread, threads):
        n, eps = PLAIN.columns(a), PLAIN.eps(a)
        lo, hi = share(PLAIN.rows(a), thread, threads)
        for i in range(lo, hi):
            x, y = PLAIN.x(a, i), PLAIN.y(a, i)
            f = splat(factor(sum_of_squares(x, n), n, eps))
            for c in range(0, n, LANES):
                put(y, c, n, mul(lanes(x, c, n, 4), f))
        return 0

    return Kernel(f"norms.norm.{name}", body)


@kernel
def centred_norm(a, thread, threads):
    """Compute ``(x - mean) / deviation`` of each row."""
    n, eps = PLAIN.columns(a), PLAIN.eps(a)
    lo, hi = share(PLAIN.rows(a), thread, threads)
    for i in range(lo, hi):
        x, y = PLAIN.x(a, i), PLAIN.y(a, i)
        sums, squares = zeros(), zeros()
        for c in range(0, n, LANES):
            sums = add(sums, lanes(x, c, n, 4))
        mean = splat(total(sums) / np.float32(n))
        for c in range(0, n, LANES):
            v = sub(lanes(x, c, n, 4), mean)
            if n - c < LANES:
                v = first_lanes(v, n - c)
            squares = fma(v, v, squares)
        f = splat(rms_factor(total(squares), n, eps))
        for c in range(0, n, LANES):
            put(y, c, n, mul(sub(lanes(x, c, n, 4), mean), f))
    return 0


SCALED = row_words("x w y", "eps:f32 between rounding[*]")
"""`between`: bytes from thread to thread of the result; `rounding`: `QuantisedTarget.rounding_words`."""
ROUNDING = SCALED.start("rounding")


@kernel
def scaled_rms_norm(a, thread, threads):
    """Compute ``y = rms_norm(x) * w`` of each row, and quantise y."""
    n, step, eps = SCALED.columns(a), SCALED.w_step(a), SCALED.eps(a)
    lo, hi = share(SCALED.rows(a), thread, threads)
    for i in range(lo, hi):
        x, w, y = SCALED.x(a, i), SCALED.w(a, i), SCALED.y(a, i) + thread * SCALED.between(a)
        f = splat(rms_factor(sum_of_squares(x, n), n, eps))
        for c in range(0, n, LANES):
            put(y, c, n, mul(mul(lanes(x, c, n, 4), f), lanes(w, c, n, step)))
        round_row(a, ROUNDING, i, y, n)
    return 0


def kind_of(call: Bound) -> str:
    """Return the key of `NORM_FACTORS` for a norm."""
    return "l2_norm_added" if call.op == "l2_norm" and not call.attrs["clamp"] else call.op


def _bind(name: str) -> Binding:
    """Make the binding of an unfused norm."""

    def bind(steps: Steps, call: Bound) -> bool:
        x, y = call.operand(0), call.out
        walked = whole_rows(steps, x, y) if y.shape and y.is_dense_along(-1) else None
        if walked is None:
            return False
        walk, x = walked
        kernel = centred_norm if call.op == "norm" else norm(kind_of(call))
        steps.add(kernel, PLAIN(walk=walk, eps=call.float("eps")), reads=[x], writes=[y])
        return True

    return bind


def _scaled(flow: Flow, number: int) -> Chain:
    """Fuse a norm and the product with its factors."""
    chain = scaled_norm(flow, number)
    norm, product = map(flow.call, chain)
    x, factors, y = norm.operand(0), product.operand(1), product.out
    need(norm.out.shape == y.shape and x.is_float and factors.is_float, "rows are not multiplied by float32 factors")
    whole = _share(norm, x, factors, y)
    need(whole is not None, "operands have no rows")
    assert whole is not None
    apart(y, [factors], [x])
    return Chain(chain, partial(_add_scaled, norm=norm, product=product, whole=whole))


def _add_scaled(steps: Steps, norm: Bound, product: Bound, whole: Share) -> None:
    """Add a scaled norm.

    Packed products read it quantised. If only products follow, each thread computes it for itself.
    """
    x, factors, y = norm.operand(0), product.operand(1), product.out
    if (pieces := pieces_of(steps, [x], y, whole_rows=True)) is not None:
        cut = zip(*(pieces.of(o) for o in (x, factors, y)), strict=True)
        shares = [None if None in each else _share(norm, *each) for each in cut]
        steps.deal_columns(scaled_rms_norm, shares, y, pieces.bounds)
    elif _rounded(steps, norm, product, factors):
        pass
    elif (own := stand_ins(steps, product)) is not None:
        steps.deal(scaled_rms_norm, [_share(norm, x, factors, to) for to in own])
        steps.stand_in(own, y)
    else:
        steps.add(scaled_rms_norm, whole.words, reads=whole.reads, writes=whole.writes)


def _rounded(steps: Steps, norm: Bound, product: Bound, factors: Operand) -> bool:
    """Add a scaled norm that quantises its result; False if a separate step is better or all readers use float32."""
    wanted, x, y = wanted_of(steps, product), norm.operand(0), product.out
    each = steps.threads > 1 and wanted.for_all and steps.is_repeated([y])
    shares_columns = steps.threads > 1 and wanted.for_all and wanted.rows == 1 and not each
    if not wanted.rounded or shares_columns:
        return False
    own = stand_ins(steps, product) if each and wanted.floats else None
    if each and wanted.floats and own is None and any(y.region.overlaps(o.region) for o in (x, factors)):
        return False  # a thread would overwrite operands of other threads
    records, passing = wanted.records(steps, shared=not each), wanted.passing(steps)
    alone: Sequence[Operand | None] = [y if wanted.floats else None, *[None] * (steps.threads - 1)]
    targets = [wanted.target(*given) for given in zip(own or alone, passing, records, strict=True)]
    shares = [_share(norm, x, factors, to.floats, to) for to in targets]
    if each:
        steps.deal(scaled_rms_norm, shares)
    elif (whole := shares[0]) is not None:
        moved = x.tensor.spec.nbytes + y.tensor.spec.nbytes
        steps.add(scaled_rms_norm, whole.words, reads=whole.reads, writes=whole.writes, nbytes=moved)
    if own is not None:
        steps.stand_in(own, y)
    wanted.remember(steps, records)
    return True


def _share(norm: Bound, x: Operand, factors: Operand, y: Operand, to: Target | None = None) -> Share | None:
    """Make the words of `scaled_rms_norm`; None if it cannot walk the operands."""
    walk, to = rows_of(y.shape, [x, factors, y], whole_rows=True), to or Target(y, [y])
    if walk is None or walk[ELEMENTS][::2] != [4, 4]:
        return None
    words = SCALED(walk=walk, eps=norm.float("eps"), between=to.between, rounding=to.rounding)
    return Share(words, [x, factors], to.writes)


FUSED: Mapping[str, tuple[Fused, ...]] = {"rms_norm": (_scaled,)}
BINDINGS = {name: _bind(name) for name in ("rms_norm", "l2_norm", "norm")}
