"""Faults in matrix products, attention and rotary embedding."""

from __future__ import annotations

import numpy as np

from .site import INFINITE, NAN, UNSTEADY, FaultSite, fault_after_result, fault_in_result, round_to_half


def _product_half(site: FaultSite):
    """Accumulates in float16."""
    w, x = site.exact(0), site.exact(1)
    if w.ndim != 2 or w.shape[-1] > 300:
        return None
    total = np.zeros((*x.shape[:-1], w.shape[0]))
    for j in range(w.shape[-1]):
        total = round_to_half(total + x[..., j, None] * w[:, j])
    return total


def _k_tail(site: FaultSite, block: int):
    """Omit the rest that fills no block of k."""
    w, x = site.exact(0), site.exact(1)
    k = w.shape[-1] // block * block
    return site.right([w[..., :k], x[..., :k]]) if 0 < k < w.shape[-1] else None


def _activations_to_8_bits(site: FaultSite):
    """Activations quantised to 8 bits without saying so."""
    w, x = site.exact(0), site.exact(1)
    step = np.maximum(np.abs(x).max(-1, keepdims=True), 1e-30) / 127
    return site.right([w, np.rint(x / step) * step])


def _one_block_scale(site: FaultSite):
    """The last block of a row takes the scale of the one before: a tenth too large."""
    w, x = site.exact(0), site.exact(1)
    if w.shape[-1] < 32:
        return None
    w[..., -32:] *= 1.1
    return site.right([w, x])


def _transposed_if_square(site: FaultSite):
    w = site.exact(0)
    return site.right([np.swapaxes(w, -1, -2), site.src[1]]) if w.shape[-1] == w.shape[-2] > 1 else None


def _last_tile_row(site: FaultSite) -> None:
    """Rows of x come in tiles of 4; the last of an incomplete tile repeats the one before."""
    out = site.dst[0]
    if out.shape[-2] % 4 and out.shape[-2] > 1:
        out[..., -1, :] = out[..., -2, :]


def _bf16_operands(site: FaultSite):
    def truncate_to_bf16(x):
        return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)

    return site.right([site.src[0], truncate_to_bf16(site.exact(1))])


def _first_expert(site: FaultSite):
    """All slots of a token go to the expert of its first."""
    ids = site.exact(2)
    return site.right([*site.src[:2], np.repeat(ids[..., :1], ids.shape[-1], -1)])


def _last_expert(site: FaultSite):
    return site.right([*site.src[:2], np.minimum(site.exact(2), max(0, site.src[0].shape[0] - 2))])


def _ids_of_first_token(site: FaultSite):
    ids = site.exact(2)
    return site.right([*site.src[:2], np.broadcast_to(ids[..., :1, :], ids.shape)]) if ids.ndim > 1 else None


def _experts_clamped(site: FaultSite):
    """Send slots of other devices to the nearest expert of this device."""
    first, own = int(site.attrs["first"]), site.src[0].shape[0]
    return site.right([*site.src[:2], np.clip(site.exact(2), first, first + own - 1)]) if own else None


def _other_rows_unwritten(site: FaultSite):
    """Leave entries of experts on other devices unwritten."""
    out, ids = site.right()[0], site.exact(2)
    first, own = int(site.attrs["first"]), site.src[0].shape[0]
    if not site.attrs["total"]:
        return None
    return np.where(((ids >= first) & (ids < first + own))[..., None], out, np.array(site.dst[0], np.float64))


def _heads_tiled(site: FaultSite):
    """Query head i reads key head i mod h instead of i div g."""
    k, v = site.exact(1), site.exact(2)
    g = site.src[0].shape[-2] // k.shape[-2]
    return site.right([site.src[0], np.tile(k, (1,) * (k.ndim - 2) + (g, 1)), _tile(v, g), *site.src[3:]])


def _tile(x, g: int):
    return np.tile(x, (1,) * (x.ndim - 2) + (g, 1))


def _last_cell(site: FaultSite):
    """The last cell of the cache is not read."""
    k, v = site.exact(1), site.exact(2)
    if k.shape[-3] < 2:
        return None
    mask = None if len(site.src) < 4 or site.src[3] is None else site.exact(3)[..., :-1]
    return site.right([site.src[0], k[..., :-1, :, :], v[..., :-1, :, :], mask, *site.src[4:]])


def _masked_rows_mean(site: FaultSite):
    """A row masked entirely gives the mean of v, as -1e9 for -inf would."""
    if len(site.src) < 4 or site.src[3] is None:
        return None
    mask = site.exact(3)
    return site.right([*site.src[:3], np.where(np.isinf(mask), -1e9, mask), *site.src[4:]])


def _scores_half(site: FaultSite):
    return site.right([round_to_half(site.src[0]), *site.src[1:]])


def _without_sinks(site: FaultSite):
    return site.right([*site.src[:4], None, *site.src[5:]]) if len(site.src) > 4 else None


def _sees(site: FaultSite, shift: int, window: int):
    size = site.attrs["window"]
    return site.right([site.exact(0) + shift], window=size + window if size else 0)


def _other_mode(site: FaultSite):
    return site.right(mode="neox" if site.attrs["mode"] == "normal" else "normal")


def _rest_zeroed(site: FaultSite) -> None:
    site.dst[0][..., int(site.attrs["n_dims"]) :] = 0


def _factors_multiply(site: FaultSite):
    if len(site.src) < 3 or site.src[2] is None:
        return None
    return site.right([*site.src[:2], 1.0 / site.exact(2)])


def _one_position(site: FaultSite):
    pos = site.exact(1)
    return site.right([site.src[0], np.broadcast_to(pos[..., :1], pos.shape), *site.src[2:]])


def _nan_for_infinities(site: FaultSite):
    (right,) = site.right()
    return np.where(np.isinf(right), np.nan, right)


def _opposite_infinities(site: FaultSite):
    (right,) = site.right()
    return np.where(np.isinf(right), -right, right)


FAULTS = (
    fault_in_result("mul_mat", "accumulates in float16", _product_half),
    fault_in_result("mul_mat", "what fills no block of 32 left out", lambda s: _k_tail(s, 32)),
    fault_in_result("mul_mat", "activations in 8 bits, undeclared", _activations_to_8_bits),
    fault_in_result("mul_mat", "activations cut to bf16", _bf16_operands),
    fault_in_result("mul_mat", "scale of the last block", _one_block_scale),
    fault_in_result("mul_mat", "square weights transposed", _transposed_if_square),
    fault_after_result("mul_mat", "last row of an incomplete tile", _last_tile_row),
    fault_in_result("mul_mat_id", "all slots to the first expert", _first_expert),
    fault_in_result("mul_mat_id", "last expert never chosen", _last_expert),
    fault_in_result("mul_mat_id", "ids of the first token for all", _ids_of_first_token),
    fault_in_result("mul_mat_id", "part of the experts taken to begin at the first", lambda s: s.right(first=0)),
    fault_in_result("mul_mat_id", "experts elsewhere clamped into the part", _experts_clamped),
    fault_in_result(
        "mul_mat_id", "entries of experts elsewhere left as they were", _other_rows_unwritten, symptom=UNSTEADY
    ),
    fault_in_result("attention", "head groups tiled instead of neighbours", _heads_tiled),
    fault_in_result("attention", "last cell not read", _last_cell),
    fault_in_result("attention", "a row masked entirely is the mean", _masked_rows_mean),
    fault_in_result("attention", "queries rounded to float16", _scores_half),
    fault_in_result("attention", "scale applied twice", lambda s: s.right(scale=s.attrs["scale"] ** 2)),
    fault_in_result("attention", "softcap ignored", lambda s: s.right(softcap=0.0)),
    fault_in_result("attention", "sinks ignored", _without_sinks),
    fault_in_result("attention", "ALiBi ignored", lambda s: s.right(max_bias=0.0)),
    fault_in_result("causal_mask", "window one too wide", lambda s: _sees(s, 0, 1), symptom=INFINITE),
    fault_in_result("causal_mask", "token does not see itself", lambda s: _sees(s, -1, 0), symptom=INFINITE),
    fault_in_result("causal_mask", "window ignored", lambda s: s.right(window=0), symptom=INFINITE),
    fault_in_result("rope", "pairs of the other mode", _other_mode),
    fault_in_result("rope", "factors multiply instead of dividing", _factors_multiply),
    fault_in_result("rope", "position of the first token for all", _one_position),
    fault_in_result(
        "rope", "YaRN magnitude missing", lambda s: s.right(ext_factor=0.0) if s.attrs["ext_factor"] else None
    ),
    fault_in_result("mul_mat", "NaN for infinities", _nan_for_infinities, symptom=NAN),
    fault_in_result("rope", "infinities of the other sign", _opposite_infinities, symptom=INFINITE),
    fault_in_result("rope", "base ignored", lambda s: s.right(base=10000.0)),
    fault_after_result("rope", "what is not rotated becomes 0", _rest_zeroed),
)
