"""Recurrences with a matrix as state: selective state spaces, RWKV 6 and 7, gated linear attention."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .declaring.op import Array, op
from .declaring.samples import Range, grid
from .states import (
    SLOT_RANGES,
    carry,
    state_form,
    state_inplace,
    state_needs,
    state_overwrites,
    state_signatures,
    state_traffic,
)

_SCAN = (
    "x=f32[{n}{t},{h},{e}], dt=f32[{n}{t},{h}], a=f32[{h},{a}], b=f32[{n}{t},{g},{d}], c=f32[{n}{t},{g},{d}],"
    " state=f32[{s}{h},{e},{d}]"
)
_ONE = _SCAN.format(n="", t=3, h=4, e=5, a=1, g=2, d=8, s="")
_MANY = _SCAN.format(n="2,", t=3, h=4, e=5, a=1, g=2, d=8, s="7,")


@op(
    state_signatures(
        "x[..., *t, (g r), e], dt[..., *t, (g r)], a[(g r), 1|*d], b[..., *t, g, *d], c[..., *t, g, *d]",
        "[..., t, (g r), e]",
        "(g r), e, *d",
    ),
    form=state_form,
    linear=("x+state",),
    inplace=state_inplace,
    overwrites=state_overwrites,
    needs=state_needs,
    flops=lambda t, g, r, e, d, seqs=1, **_: seqs * t * g * r * e * (6 * d + 1),
    traffic=state_traffic(5),
    sequential="t",
    must=False,
    ranges={"a": Range(-1.0, -0.01), **SLOT_RANGES},
    samples=(
        *grid(_SCAN, n=("",), t=(1, 5), h=(4,), e=(1, 8), a=(1, 16), g=(1, 2, 4), d=(16,), s=("",)),
        *grid(_SCAN, n=("2,",), t=(0, 3), h=(6,), e=(5,), a=(1,), g=(3,), d=(7,), s=("2,",)),
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
    """A selective state space model over all tokens; returns the outputs and the state after the last token.

    Per token and head, with ``dt = softplus(dt)``: ``S = exp(dt a) S + dt x b^T``; ``y = S c``.  `S` is kept as
    [channel, state]; `a` is one number for a head (Mamba-2: Dao and Gu, 2024) or one for each column of `S` (Mamba-1:
    Gu and Dao, 2023; its heads have one channel).  r neighbouring heads share `b` and `c`.  ggml: ``SSM_SCAN``, whose
    ids are `slots_in` with `pool` ``"read"``.  `snapshots` and pools are those of `gated_delta_net`.
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

    return out, carry(step, x.shape[-3], state, slots_in, slots_out, snapshots)


_KEYED: Mapping[str, tuple[object, ...]] = {
    "n": ("", "2,"),
    "t": (0, 1, 5),
    "h": (1, 3),
    "d": (8,),
    "e": (1, 7),
}
_LONG: Mapping[str, tuple[object, ...]] = {"n": ("2,",), "t": (1, 4), "h": (3,), "d": (16,), "e": (48,)}
"""Sizes that fill vectors of 16."""
_WKV6 = (
    "k=f32[{n}{t},{h},{d}], v=f32[{n}{t},{h},{e}], r=f32[{n}{t},{h},{d}], bonus=f32[{h},{d}],"
    " decay=f32[{n}{t},{h},{d}], state=f32[{n}{h},{d},{e}]"
)


@op(
    "k[..., *t, h, *d], v[..., *t, h, e], r[..., *t, h, *d], bonus[h, *d], decay[..., *t, h, *d], state[..., h, *d, e]"
    " -> [..., t, h, e]: f32, [..., h, d, e]: f32",
    linear=("v+state",),
    inplace=state_inplace,
    flops=lambda t, h, d, e, **_: 7 * t * h * d * e,
    sequential="t",
    must=False,
    ranges={"decay": Range(0.0, 1.0)},
    samples=(*grid(_WKV6, **_KEYED), *grid(_WKV6, **_LONG)),
    errors=(
        (_WKV6.format(n="", t=3, h=2, d=4, e=5).replace("r=f32[3", "r=f32[2"), "t is 3"),
        (_WKV6.format(n="", t=3, h=2, d=4, e=5).replace("bonus=f32[2,4", "bonus=f32[2,5"), "d is 4"),
        (_WKV6.format(n="", t=3, h=2, d=4, e=5).replace("state=f32[2,4,5", "state=f32[2,5,4"), "d is 4"),
    ),
    signed_zeros=False,
)
def rwkv_wkv6(k: Array, v: Array, r: Array, bonus: Array, decay: Array, state: Array) -> tuple[Array, Array]:
    """The token mixing of RWKV 6; returns the outputs and the state after the last token.

    Per token and head: ``y = (S + (bonus * k) v^T)^T r``; ``S = decay * S + k v^T``, `decay` and `bonus` per key
    channel; `S` is kept as [key, value].  ggml: ``RWKV_WKV6`` (bonus: ``tf``, decay: ``td``); Peng et al., 2024.
    """
    out = np.empty(v.shape, np.result_type(v, state))

    def step(t: int, s: Array) -> Array:
        at = (..., t, slice(None), slice(None))
        write = k[at][..., :, None] * v[at][..., None, :]
        out[at] = np.einsum("...de,...d->...e", s + bonus[..., None] * write, r[at])
        return s * decay[at][..., :, None] + write

    return out, carry(step, v.shape[-3], state)


_WKV7 = (
    "r=f32[{n}{t},{h},{d}], decay=f32[{n}{t},{h},{d}], k=f32[{n}{t},{h},{d}], v=f32[{n}{t},{h},{e}],"
    " a=f32[{n}{t},{h},{d}], b=f32[{n}{t},{h},{d}], state=f32[{n}{h},{e},{d}]"
)


@op(
    "r[..., *t, h, *d], decay[..., *t, h, *d], k[..., *t, h, *d], v[..., *t, h, e], a[..., *t, h, *d],"
    " b[..., *t, h, *d], state[..., h, e, *d] -> [..., t, h, e]: f32, [..., h, e, d]: f32",
    linear=("v+state",),
    inplace=state_inplace,
    flops=lambda t, h, d, e, **_: 9 * t * h * d * e,
    sequential="t",
    must=False,
    # Longer a and b make the state grow without bound.
    ranges={"decay": Range(0.0, 1.0), "a": Range(-0.3, 0.3), "b": Range(-0.3, 0.3)},
    samples=(*grid(_WKV7, **_KEYED), *grid(_WKV7, **_LONG)),
    errors=(
        (_WKV7.format(n="", t=3, h=2, d=4, e=5).replace(" a=f32[3", " a=f32[2"), "t is 3"),
        (_WKV7.format(n="", t=3, h=2, d=4, e=5).replace("state=f32[2,5,4", "state=f32[2,4,5"), "e is 5"),
        (_WKV7.format(n="", t=3, h=2, d=4, e=5).replace(" b=f32[3,2", " b=f32[3,1"), "h is 2"),
    ),
    signed_zeros=False,
)
def rwkv_wkv7(r: Array, decay: Array, k: Array, v: Array, a: Array, b: Array, state: Array) -> tuple[Array, Array]:
    """The token mixing of RWKV 7, a generalised delta rule; returns the outputs and the state after the last token.

    Per token and head: ``S = S diag(decay) + (S a) b^T + v k^T``; ``y = S r``; `S` is kept as [value, key].
    ggml: ``RWKV_WKV7`` (decay: ``w``); Peng et al., 2025.
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

    return out, carry(step, v.shape[-3], state)


_GLA = (
    "k=f32[{n}{t},{h},{d}], v=f32[{n}{t},{h},{e}], q=f32[{n}{t},{h},{d}], g=f32[{n}{t},{h},{d}],"
    " state=f32[{n}{h},{d},{e}], scale=0.5"
)


@op(
    "k[..., *t, h, *d], v[..., *t, h, e], q[..., *t, h, *d], g[..., *t, h, *d], state[..., h, *d, e]"
    " -> [..., t, h, e]: f32, [..., h, d, e]: f32",
    linear=("v+state",),
    inplace=state_inplace,
    flops=lambda t, h, d, e, **_: 5 * t * h * d * e,
    sequential="t",
    must=False,
    ranges={"g": Range(0.0, 1.0)},
    samples=(*grid(_GLA, **_KEYED), *grid(_GLA, **_LONG)),
    errors=(
        (_GLA.format(n="", t=3, h=2, d=4, e=5).replace("g=f32[3,2,4", "g=f32[3,2,1"), "d is 4"),
        (_GLA.format(n="", t=3, h=2, d=4, e=5).replace(", scale=0.5", ""), "scale is missing"),
    ),
    signed_zeros=False,
)
def gated_linear_attn(k: Array, v: Array, q: Array, g: Array, state: Array, *, scale: float) -> tuple[Array, Array]:
    """Linear attention with a decay per key channel; returns the outputs and the state after the last token.

    Per token and head: ``S = g * S + k v^T``; ``y = scale S^T q``; `S` is kept as [key, value], `g` is the decay
    itself and no logarithm.  ggml: ``GATED_LINEAR_ATTN``; Yang et al., 2023.
    """
    out = np.empty(v.shape, np.result_type(v, state))

    def step(t: int, s: Array) -> Array:
        at = (..., t, slice(None), slice(None))
        s = s * g[at][..., :, None] + k[at][..., :, None] * v[at][..., None, :]
        out[at] = np.einsum("...de,...d->...e", s, q[at]) * scale
        return s

    return out, carry(step, v.shape[-3], state)
