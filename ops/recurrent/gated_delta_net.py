"""Causal depthwise convolution and the gated delta net; `linear_attention` has further recurrences."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ...graph.attrs import Attr
from ..declaration.op import Array, op
from ..declaration.samples import LegalRange, expand_template
from ..declaration.signature import SignatureMismatch
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


@op(
    "x[..., *s, c], w[c, *taps] -> [..., t, c]: f32",
    linear=("x", "w"),
    derived_sizes={"t": lambda s, taps, **_: s - taps + 1},
    check=lambda s, taps, **_: f"x has {s} rows for {taps} taps of w" if not 0 < taps <= s else None,
    flops=lambda t, c, taps, **_: 2 * t * c * taps,
    samples=expand_template("x=f32[{x},12], w=f32[12,{k}]", x=("4", "7", "2,9"), k=(1, 4)),
    errors=(("x=f32[3,12], w=f32[12,4]", "3 rows for 4 taps"), ("x=f32[7,12], w=f32[11,4]", "c is 12")),
    sequential="s",
    signed_zeros=False,
)
def ssm_conv(x: Array, w: Array) -> Array:
    """Apply a causal depthwise convolution over tokens: ``out[t, c] = sum_j w[c, j] x[t + j, c]``. ggml: ``SSM_CONV``.

    The first ``taps - 1`` rows of `x` belong to earlier tokens.
    """
    taps = w.shape[-1]
    length = x.shape[-2] - taps + 1
    out = np.zeros((*x.shape[:-2], length, x.shape[-1]))
    for j in range(taps):
        out += x[..., j : j + length, :] * w[:, j]
    return out


_HEADS: Mapping[str, str] = {"tiled": "(value_heads key_heads)", "interleaved": "(key_heads value_heads)"}


def _build_signatures_by_state_layout(heads: str) -> dict[str, str]:
    """Return the signatures of `gated_delta_net` for states of sequences and for pools of states, by layout.

    `heads` is the dimension of value heads.
    """
    operands = (
        f"q[..., *t, key_heads, *d], k[..., *t, key_heads, *d], v[..., *t, {heads}, e], g[..., *t, {heads}, 1|*d],"
        f" beta[..., *t, {heads}]"
    )
    return build_recurrence_signatures(operands, f"[..., t, {heads}, e]", f"{heads}, e, *d")


def _join_head_order_and_state_layout(attrs: Mapping[str, Attr]) -> str:
    """Return the key of the signature for the attributes: the order of value heads, then the state layout."""
    heads = str(attrs["heads"])
    if heads not in _HEADS:
        raise SignatureMismatch(f"heads is {heads!r}; one of {', '.join(_HEADS)}")
    return f"{heads} {choose_recurrence_signature_key(attrs)}"


_INPUTS = "q=f32[{n}{t},2,8], k=f32[{n}{t},2,8], v=f32[{n}{t},4,{e}], g=f32[{n}{t},4,{g}], beta=f32[{n}{t},4]"
_DELTA_CASE = (
    "q=f32[{t},{h},{d}], k=f32[{t},{h},{d}], v=f32[{t},4,{e}], g=f32[{t},4,{g}], beta=f32[{t},4], state=f32[4,{e},{d}]"
    ', heads="{m}"'
)
_SHORT = _INPUTS.format(n="", t=3, e=8, g=1)


def _check_delta_net(d: int, snapshots: int, saved: int | None = None, **_: object) -> str | None:
    return check_snapshot_count(snapshots, saved) if d else "d is 0, but the output is divided by its root"


@op(
    {
        f"{name} {form}": text
        for name, hv in _HEADS.items()
        for form, text in _build_signatures_by_state_layout(hv).items()
    },
    signature_key=_join_head_order_and_state_layout,
    linear=("v+state",),
    inplace=state_inplace_pairs,
    overwrites=state_overwritten_entries,
    check=_check_delta_net,
    flops=lambda t, key_heads, value_heads, d, e, seqs=1, **_: seqs * t * key_heads * value_heads * e * (7 * d + 3),
    traffic=make_recurrence_byte_counter(5),
    sequential="t",
    ranges={
        "g": LegalRange(-4.0, -1e-4),
        "beta": LegalRange(0.0, 1.0),
        "q": LegalRange(-0.3, 0.3),
        "k": LegalRange(-0.3, 0.3),
        **SLOT_RANGES,
    },
    samples=(
        *expand_template(_DELTA_CASE, t=(1, 5), h=(2, 4), d=(16,), e=(16,), g=(1, 16), m=("tiled", "interleaved")),
        *expand_template(_DELTA_CASE, t=(0, 3), h=(2,), d=(8,), e=(12,), g=(1,), m=("tiled",)),
        _INPUTS.format(n="2,", t=3, e=8, g=1) + ", state=f32[2,4,8,8]",
        *expand_template(
            _INPUTS + ", state=f32[{n}4,12,8], snapshots={k}", n=("", "2,"), t=(1, 5), e=(12,), g=(8,), k=(2, 3)
        ),
        *expand_template(
            _INPUTS + ', state=f32[7,4,5,8], slots_in=i32[2], slots_out=i32[2], pool="update"',
            n=("2,",),
            t=(0, 1, 4),
            e=(5,),
            g=(1, 8),
        ),
        _INPUTS.format(n="1,", t=3, e=5, g=1)
        + ', state=f32[7,4,5,8], slots_in=i32[1], slots_out=i32[1,4], pool="update", snapshots=4, heads="interleaved"',
        *expand_template(
            _INPUTS + ', state=f32[2,4,5,8], slots_in=i32[2], pool="read", snapshots={k}',
            n=("2,",),
            t=(3,),
            e=(5,),
            g=(1,),
            k=(1, 2),
        ),
        *expand_template(_DELTA_CASE + ", snapshots={t}", t=(4,), h=(2,), d=(16,), e=(40,), g=(1, 16), m=("tiled",)),
        *expand_template(_DELTA_CASE, t=(4, 8, 9), h=(2,), d=(32,), e=(40,), g=(1, 32), m=("interleaved",)),
        *expand_template(_DELTA_CASE + ", exact=false", t=(70,), h=(2,), d=(64,), e=(16,), g=(1, 64), m=("tiled",)),
    ),
    errors=(
        ("q=f32[3,2,8], k=f32[3,2,8], v=f32[3,3,8], g=f32[3,3,1], beta=f32[3,3], state=f32[3,8,8]", "no product"),
        ("q=f32[3,2,8], k=f32[3,2,8], v=f32[3,4,8], g=f32[3,4,4], beta=f32[3,4], state=f32[4,8,8]", "d is 8"),
        (_SHORT, "operand state is missing"),
        (_SHORT + ', state=f32[4,8,8], heads="odd"', "one of tiled, interleaved"),
        (_SHORT + ", state=f32[4,8,8], snapshots=0", "at least 1"),
        (_SHORT + ', state=f32[4,8,8], pool="ring"', "one of none, read, update"),
        (_SHORT + ", state=f32[4,8,8], slots_in=i32[1]", "takes 6 operands"),
        (
            _INPUTS.format(n="2,", t=3, e=8, g=1)
            + ', state=f32[7,4,8,8], slots_in=i32[2], slots_out=i32[2,3], snapshots=2, pool="update"',
            "slots_out has 3 rows",
        ),
    ),
    signed_zeros=False,
)
def gated_delta_net(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    slots_in: Array | None = None,
    slots_out: Array | None = None,
    *,
    heads: str = "tiled",
    snapshots: int = 1,
    pool: str = "none",
    exact: bool = True,
) -> tuple[Array, Array]:
    """Apply the gated delta rule to all tokens in order; return the outputs and the state after the last token.

    Per token and value head: ``S *= exp(g)``; ``S += beta (v - S k) k^T``; ``o = S q / sqrt(d)``. `S` is [value,
    key]. `g` is a log decay per head, or per key channel (KDA). Value head j reads key head ``j mod h`` (tiled) or
    ``j div r`` (interleaved). Rows of q and k are normalised by the caller. ggml: ``GATED_DELTA_NET``; Yang et al.,
    2024.

    With `snapshots` K > 1 the second result is [..., K, heads, e, d]. Snapshot s is the state s tokens before the
    end; snapshots before the first token are zeros, which ggml leaves unwritten. With `pool` ``"update"``, `state` is
    a pool of states. The result is the pool with new rows ``slots_out[i]`` or ``slots_out[i, s]``; see
    `ops.recurrent.state_pools`.

    Without `exact`, a backend may round the factors of its products to bfloat16.
    """
    repeat = v.shape[-2] // q.shape[-2] if q.shape[-2] else 1

    def spread(x: Array) -> Array:
        return np.tile(x, (repeat, 1)) if heads == "tiled" else np.repeat(x, repeat, axis=-2)

    q, k = spread(q), spread(k)
    out = np.empty(v.shape, np.result_type(v, state))

    def step(t: int, s: Array) -> Array:
        at = (..., t, slice(None), slice(None))
        s = s * np.exp(g[at])[..., None, :]
        delta = (v[at] - np.einsum("...ed,...d->...e", s, k[at])) * beta[..., t, :, None]
        s = s + delta[..., :, None] * k[at][..., None, :]
        out[at] = np.einsum("...ed,...d->...e", s, q[at])
        return s

    new = run_recurrence_and_return_state(step, v.shape[-3], state, slots_in, slots_out, snapshots)
    return out / math.sqrt(q.shape[-1]), new
