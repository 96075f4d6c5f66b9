"""Faults in convolutions, delta nets, scans and their states."""

from __future__ import annotations

import numpy as np

from .site import FaultSite, KernelFault, fault_in_result


def _other_heads(site: FaultSite):
    return site.right(heads="interleaved" if site.attrs["heads"] == "tiled" else "tiled")


def _gate_on_values(site: FaultSite):
    """A gate per key channel applied along the value axis: on a square state only its transpose differs."""
    q, _, v, g, *_ = site.src
    if g.shape[-1] == 1 or v.shape[-1] != q.shape[-1] or site.attrs["pool"] != "none":
        return None
    return _delta(site, transposed_gate=True)


def _delta(site: FaultSite, transposed_gate: bool = False):
    """The gated delta rule over plain states, with the gate on the wrong axis if asked."""
    q, k, v, g, beta, s = (site.exact(i) for i in range(6))
    if site.attrs["snapshots"] != 1:
        return None
    repeat = v.shape[-2] // q.shape[-2]
    tiled = site.attrs["heads"] == "tiled"
    q, k = (np.concatenate([x] * repeat, -2) if tiled else np.repeat(x, repeat, -2) for x in (q, k))
    out = np.empty(v.shape)
    for t in range(v.shape[-3]):
        at = (..., t, slice(None), slice(None))
        gate = np.exp(g[at])
        s = s * (gate[..., :, None] if transposed_gate else gate[..., None, :])
        delta = (v[at] - np.einsum("...ed,...d->...e", s, k[at])) * beta[..., t, :, None]
        s = s + delta[..., :, None] * k[at][..., None, :]
        out[at] = np.einsum("...ed,...d->...e", s, q[at])
    return out / np.sqrt(q.shape[-1]), s


def _state_transposed(site: FaultSite):
    out, state = site.right()
    return (out, np.swapaxes(state, -1, -2)) if state.shape[-1] == state.shape[-2] else None


def _snapshots_reversed(site: FaultSite):
    out, state = site.right()
    if site.attrs["snapshots"] == 1 or site.attrs["pool"] == "update":
        return None
    return out, np.flip(state, -4)


def _slots_of_first(operand: int):
    def compute(site: FaultSite):
        slots = site.exact(operand) if len(site.src) > operand else None
        if slots is None or not slots.size:
            return None
        same = np.full(slots.shape, slots.reshape(-1)[0])
        return site.right([*site.src[:operand], same, *site.src[operand + 1 :]])

    return compute


def _old_state(site: FaultSite):
    """The state handed back is the one before the last token."""
    out, state = site.right()
    if site.attrs.get("pool", "none") != "none" or site.attrs.get("snapshots", 1) != 1:
        return None
    return out, 0.5 * (state + site.exact(site.call.src.index(_state_tensor(site))))


def _state_tensor(site: FaultSite):
    return next(t for t in reversed(site.call.src) if t is not None and t.shape == site.dst[1].shape)


def _scaled_output(site: FaultSite, factor):
    out, state = site.right()
    return out * factor, state


def _operand(i: int, change):
    def compute(site: FaultSite):
        return site.right([*site.src[:i], change(site.exact(i)), *site.src[i + 1 :]])

    return compute


def _decayed_in_float16(x):
    with np.errstate(all="ignore"):
        return x.astype(np.float16).astype(np.float64)


def _shift_window(site: FaultSite):
    """The window begins one token late."""
    x = site.exact(0)
    return site.right([np.roll(x, -1, axis=-2), site.src[1]])


def _state_lost(site: FaultSite):
    """The second of several sequences begins with the state of the first."""
    if site.attrs.get("pool", "none") != "none" or site.attrs.get("snapshots", 1) != 1:
        return None
    i = site.call.src.index(_state_tensor(site))
    state = site.exact(i)
    if state.ndim <= 3 or state.shape[0] < 2:
        return None
    return site.right([*site.src[:i], np.broadcast_to(state[:1], state.shape), *site.src[i + 1 :]])


FAULTS: tuple[KernelFault, ...] = (
    fault_in_result("ssm_conv", "taps reversed", _operand(1, lambda w: w[:, ::-1])),
    fault_in_result("ssm_conv", "window one token late", _shift_window),
    fault_in_result("gated_delta_net", "heads interleaved for tiled", _other_heads),
    fault_in_result("gated_delta_net", "gate on the wrong axis", _gate_on_values),
    fault_in_result("gated_delta_net", "state transposed", _state_transposed),
    fault_in_result("gated_delta_net", "snapshots in reverse order", _snapshots_reversed),
    fault_in_result("gated_delta_net", "all sequences read the slot of the first", _slots_of_first(6)),
    fault_in_result("gated_delta_net", "beta applied twice", _operand(4, lambda b: b * b)),
    fault_in_result("gated_delta_net", "scale missing", lambda s: _scaled_output(s, np.sqrt(s.src[0].shape[-1]))),
    fault_in_result("gated_delta_net", "state of the token before", _old_state),
    fault_in_result("gated_delta_net", "gate in float16", _operand(3, _decayed_in_float16)),
    fault_in_result("gated_delta_net", "first sequence's state for all", _state_lost),
    fault_in_result("ssm_scan", "state of the token before", _old_state),
    fault_in_result("ssm_scan", "b and c exchanged", lambda s: s.right([*s.src[:3], s.src[4], s.src[3], *s.src[5:]])),
    fault_in_result("ssm_scan", "step in float16", _operand(1, _decayed_in_float16)),
    fault_in_result("rwkv_wkv6", "bonus left out", _operand(3, np.zeros_like)),
    fault_in_result("rwkv_wkv6", "decay of the token before", _operand(4, lambda x: np.roll(x, 1, axis=-3))),
    fault_in_result("rwkv_wkv7", "a and b exchanged", lambda s: s.right([*s.src[:4], s.src[5], s.src[4], *s.src[6:]])),
    fault_in_result("rwkv_wkv7", "state transposed", _state_transposed),
    fault_in_result("gated_linear_attn", "gate ignored", _operand(3, np.ones_like)),
    fault_in_result(
        "gated_linear_attn", "k and q exchanged", lambda s: s.right([s.src[2], s.src[1], s.src[0], *s.src[3:]])
    ),
    fault_in_result("lightning_indexer", "scores not cut at 0", _operand(2, np.abs)),
    fault_in_result("add_id", "part of the experts taken to begin at the first", lambda s: s.right(first=0)),
    fault_in_result(
        "add_id", "ids of the first token for all", _operand(2, lambda i: np.broadcast_to(i[..., :1], i.shape))
    ),
)
