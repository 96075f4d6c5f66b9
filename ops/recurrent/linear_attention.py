"""Recurrences with a matrix state: selective state spaces, RWKV 6 and 7, gated linear attention."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..declaration.op import Array, op
from ..declaration.samples import LegalRange, expand_template
from .state_pools import (
    SLOT_RANGES,
    build_recurrence_signatures,
    check_snapshot_count,
    choose_recurrence_signature_key,
    make_recurrence_byte_counter,
    run_recurrence_and_return_state,
    state_inplace_pairs,
    state_overwritten_entries,
)

_SCAN = (
    "x=f32[{n}{t},{h},{e}], dt=f32[{n}{t},{h}], a=f32[{h},{a}], b=f32[{n}{t},{g},{d}], c=f32[{n}{t},{g},{d}],"
    " state=f32[{s}{h},{e},{d}]"
)
_ONE = _SCAN.format(n="", t=3, h=4, e=5, a=1, g=2, d=8, s="")
_MANY = _SCAN.format(n="2,", t=3, h=4, e=5, a=1, g=2, d=8, s="7,")


@op(
    build_recurrence_signatures(
        "x[..., *t, (g r), e], dt[..., *t, (g r)], a[(g r), 1|*d], b[..., *t, g, *d], c[..., *t, g, *d]",
        "[..., t, (g r), e]",
        "(g r), e, *d",
    ),
    signature_key=choose_recurrence_signature_key,
    linear=("x+state",),
    inplace=state_inplace_pairs,
    overwrites=state_overwritten_entries,
    check=check_snapshot_count,
    flops=lambda t, g, r, e, d, seqs=1, **_: seqs * t * g * r * e * (6 * d + 1),
    traffic=make_recurrence_byte_counter(5),
    sequential="t",
    is_required=False,
    ranges={"a": LegalRange(-1.0, -0.01), **SLOT_RANGES},
    samples=(
        *expand_template(_SCAN, n=("",), t=(1, 5), h=(4,), e=(1, 8), a=(1, 16), g=(1, 2, 4), d=(16,), s=("",)),
        *expand_template(_SCAN, n=("2,",), t=(0, 3), h=(6,), e=(5,), a=(1,), g=(3,), d=(7,), s=("2,",)),
        _ONE + ", snapshots=2",
        _MANY + ', slots_in=i32[2], pool="read"',
        _MANY + ', slots_in=i32[2], slots_out=i32[2], pool="update"',
        _SCAN.format(n="1,", t=3, h=4, e=5, a=8, g=2, d=8, s="7,")
        + ', slots_in=i32[1], slots_out=i32[1,2], pool="update", snapshots=2',
    ),
    errors=(
        (_SCAN.format(n="", t=3, h=4, e=5, a=1, g=3, d=8, s=""), "no product"),
        (_SCAN.format(n="", t=3, h=4, e=5, a=4, g=2, d=8, s=""), "d is 4"),
        (_ONE + ", snapshots=-1", "at least 1"),
        (_MANY + ', pool="read"', "operand slots_in is missing"),
    ),
    signed_zeros=False,
)
def ssm_scan(
    x: Array,
    dt: Array,
    a: Array,
    b: Array,
    c: Array,
    state: Array,
    slots_in: Array | None = None,
    slots_out: Array | None = None,
    *,
    snapshots: int = 1,
    pool: str = "none",
) -> tuple[Array, Array]:
    """Apply a selective state space model (Mamba) to all tokens; return the outputs and the state after the last token.

    Per token and head, with ``dt = softplus(dt)``: ``S = exp(dt a) S + dt x b^T``; ``y = S c``. `S` is [channel,
    state]. `a` has one number per head (Mamba-2: Dao and Gu, 2024) or one per column of `S` (Mamba-1: Gu and Dao,
    2023, with one channel per head). Of the heads, r neighbours share `b` and `c`. `snapshots` and `pool` are as in
    `gated_delta_net`. ggml: ``SSM_SCAN``; its ids are `slots_in` with `pool` ``"read"``.
    """
    step_size = np.logaddexp(0.0, dt)
    repeat = x.shape[-2] // b.shape[-2] if b.shape[-2] else 1
    b, c = np.repeat(b, repeat, axis=-2), np.repeat(c, repeat, axis=-2)
    out = np.empty(x.shape, np.result_type(x, state))

    def step(t: int, s: Array) -> Array:
        at = (..., t, slice(None), slice(None))
        size = step_size[..., t, :, None]
        s = s * np.exp(size * a)[..., None, :] + (size * x[at])[..., :, None] * b[at][..., None, :]
        out[at] = np.einsum("...ed,...d->...e", s, c[at])
        return s

    return out, run_recurrence_and_return_state(step, x.shape[-3], state, slots_in, slots_out, snapshots)


_KEYED: Mapping[str, tuple[object, ...]] = {
    "n": ("", "2,"),
    "t": (0, 1, 5),
    "h": (1, 3),
    "d": (8,),
    "e": (1, 7),
}
_LONG: Mapping[str, tuple[object, ...]] = {"n": ("2,",), "t": (1, 4), "h": (3,), "d": (16,), "e": (48,)}
"""Sizes of full SIMD vectors of 16 elements."""
_WKV6 = (
    "k=f32[{n}{t},{h},{d}], v=f32[{n}{t},{h},{e}], r=f32[{n}{t},{h},{d}], bonus=f32[{h},{d}],"
    " decay=f32[{n}{t},{h},{d}], state=f32[{n}{h},{d},{e}]"
)


@op(
    "k[..., *t, h, *d], v[..., *t, h, e], r[..., *t, h, *d], bonus[h, *d], decay[..., *t, h, *d], state[..., h, *d, e]"
    " -> [..., t, h, e]: f32, [..., h, d, e]: f32",
    linear=("v+state",),
    inplace=state_inplace_pairs,
    flops=lambda t, h, d, e, **_: 7 * t * h * d * e,
    sequential="t",
    is_required=False,
    ranges={"decay": LegalRange(0.0, 1.0)},
    samples=(*expand_template(_WKV6, **_KEYED), *expand_template(_WKV6, **_LONG)),
    errors=(
        (_WKV6.format(n="", t=3, h=2, d=4, e=5).replace("r=f32[3", "r=f32[2"), "t is 3"),
        (_WKV6.format(n="", t=3, h=2, d=4, e=5).replace("bonus=f32[2,4", "bonus=f32[2,5"), "d is 4"),
        (_WKV6.format(n="", t=3, h=2, d=4, e=5).replace("state=f32[2,4,5", "state=f32[2,5,4"), "d is 4"),
    ),
    signed_zeros=False,
)
def rwkv_wkv6(k: Array, v: Array, r: Array, bonus: Array, decay: Array, state: Array) -> tuple[Array, Array]:
    """Apply the token mixing of RWKV 6 to all tokens; return the outputs and the state after the last token.

    Per token and head: ``y = (S + (bonus * k) v^T)^T r``; ``S = decay * S + k v^T``, `decay` and `bonus` per key
    channel; `S` is [key, value]. ggml: ``RWKV_WKV6`` (bonus: ``tf``, decay: ``td``); Peng et al., 2024.
    """
    out = np.empty(v.shape, np.result_type(v, state))

    def step(t: int, s: Array) -> Array:
        at = (..., t, slice(None), slice(None))
        write = k[at][..., :, None] * v[at][..., None, :]
        out[at] = np.einsum("...de,...d->...e", s + bonus[..., None] * write, r[at])
        return s * decay[at][..., :, None] + write

    return out, run_recurrence_and_return_state(step, v.shape[-3], state)


_WKV7 = (
    "r=f32[{n}{t},{h},{d}], decay=f32[{n}{t},{h},{d}], k=f32[{n}{t},{h},{d}], v=f32[{n}{t},{h},{e}],"
    " a=f32[{n}{t},{h},{d}], b=f32[{n}{t},{h},{d}], state=f32[{n}{h},{e},{d}]"
)


@op(
    "r[..., *t, h, *d], decay[..., *t, h, *d], k[..., *t, h, *d], v[..., *t, h, e], a[..., *t, h, *d],"
    " b[..., *t, h, *d], state[..., h, e, *d] -> [..., t, h, e]: f32, [..., h, e, d]: f32",
    linear=("v+state",),
    inplace=state_inplace_pairs,
    flops=lambda t, h, d, e, **_: 9 * t * h * d * e,
    sequential="t",
    is_required=False,
    # Larger a and b make the state grow without bound.
    ranges={"decay": LegalRange(0.0, 1.0), "a": LegalRange(-0.3, 0.3), "b": LegalRange(-0.3, 0.3)},
    samples=(*expand_template(_WKV7, **_KEYED), *expand_template(_WKV7, **_LONG)),
    errors=(
        (_WKV7.format(n="", t=3, h=2, d=4, e=5).replace(" a=f32[3", " a=f32[2"), "t is 3"),
        (_WKV7.format(n="", t=3, h=2, d=4, e=5).replace("state=f32[2,5,4", "state=f32[2,4,5"), "e is 5"),
        (_WKV7.format(n="", t=3, h=2, d=4, e=5).replace(" b=f32[3,2", " b=f32[3,1"), "h is 2"),
    ),
    signed_zeros=False,
)
def rwkv_wkv7(r: Array, decay: Array, k: Array, v: Array, a: Array, b: Array, state: Array) -> tuple[Array, Array]:
    """Apply the token mixing of RWKV 7 to all tokens; return the outputs and the state after the last token.

    It is a generalised delta rule. Per token and head: ``S = S diag(decay) + (S a) b^T + v k^T``; ``y = S r``; `S` is
    [value, key]. ggml: ``RWKV_WKV7`` (decay: ``w``); Peng et al., 2025.
    """
    out = np.empty(v.shape, np.result_type(v, state))

    def step(t: int, s: Array) -> Array:
        at = (..., t, slice(None), slice(None))
        read = np.einsum("...ed,...d->...e", s, a[at])
        s = (
            s * decay[at][..., None, :]
            + read[..., :, None] * b[at][..., None, :]
            + v[at][..., :, None] * k[at][..., None, :]
        )
        out[at] = np.einsum("...ed,...d->...e", s, r[at])
        return s

    return out, run_recurrence_and_return_state(step, v.shape[-3], state)


_GLA = (
    "k=f32[{n}{t},{h},{d}], v=f32[{n}{t},{h},{e}], q=f32[{n}{t},{h},{d}], g=f32[{n}{t},{h},{d}],"
    " state=f32[{n}{h},{d},{e}], scale=0.5"
)


@op(
    "k[..., *t, h, *d], v[..., *t, h, e], q[..., *t, h, *d], g[..., *t, h, *d], state[..., h, *d, e]"
    " -> [..., t, h, e]: f32, [..., h, d, e]: f32",
    linear=("v+state",),
    inplace=state_inplace_pairs,
    flops=lambda t, h, d, e, **_: 5 * t * h * d * e,
    sequential="t",
    is_required=False,
    ranges={"g": LegalRange(0.0, 1.0)},
    samples=(*expand_template(_GLA, **_KEYED), *expand_template(_GLA, **_LONG)),
    errors=(
        (_GLA.format(n="", t=3, h=2, d=4, e=5).replace("g=f32[3,2,4", "g=f32[3,2,1"), "d is 4"),
        (_GLA.format(n="", t=3, h=2, d=4, e=5).replace(", scale=0.5", ""), "scale is missing"),
    ),
    signed_zeros=False,
)
def gated_linear_attn(k: Array, v: Array, q: Array, g: Array, state: Array, *, scale: float) -> tuple[Array, Array]:
    """Apply linear attention with a decay per key channel; return the outputs and the state after the last token.

    Per token and head: ``S = g * S + k v^T``; ``y = scale S^T q``; `S` is [key, value]. `g` is the decay
    itself, not its logarithm. ggml: ``GATED_LINEAR_ATTN``; Yang et al., 2023.
    """
    out = np.empty(v.shape, np.result_type(v, state))

    def step(t: int, s: Array) -> Array:
        at = (..., t, slice(None), slice(None))
        s = s * g[at][..., :, None] + k[at][..., :, None] * v[at][..., None, :]
        out[at] = np.einsum("...de,...d->...e", s, q[at]) * scale
        return s

    return out, run_recurrence_and_return_state(step, v.shape[-3], state)
