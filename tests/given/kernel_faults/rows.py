"""Faults in norms, softmax, reductions and orders."""

from __future__ import annotations

import numpy as np

from .site import NAN, WRONG_INTEGER, FaultSite, fault_in_result, round_to_half


def _rms(site: FaultSite, count=None, eps=None, outside=False):
    x = site.exact(0)
    n = count(x.shape[-1]) if count else x.shape[-1]
    mean = (x * x).sum(-1, keepdims=True) / n
    e = site.attrs["eps"] if eps is None else eps
    return x / (np.sqrt(mean) + e) if outside else x / np.sqrt(mean + e)


def _columns(site: FaultSite, limit: int):
    """Columns past the block size do not count."""
    x = site.exact(0)
    mean = (x[..., :limit] ** 2).sum(-1, keepdims=True) / x.shape[-1]
    return x / np.sqrt(mean + site.attrs["eps"])


def _half_sum(x):
    """A running sum along the last axis in float16."""
    total = np.zeros(x.shape[:-1])
    for j in range(x.shape[-1]):
        total = round_to_half(total + round_to_half(x[..., j]))
    return total


def _rms_half(site: FaultSite):
    x = site.exact(0)
    return x / np.sqrt(_half_sum(x * x)[..., None] / x.shape[-1] + site.attrs["eps"])


def _norm_unbiased(site: FaultSite):
    x = site.exact(0)
    if x.shape[-1] < 2:
        return None
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).sum(-1, keepdims=True) / (x.shape[-1] - 1) + site.attrs["eps"])


def _group_floor(site: FaultSite):
    """Round down the channels of a group; the remaining ones are copied."""
    x, groups = site.exact(0), int(site.attrs["groups"])
    run = max(1, x.shape[-3] // groups)
    usable = x.shape[-3] // run * run
    out = x.copy()
    out[..., :usable, :, :] = site.right([x[..., :usable, :, :]], groups=max(1, usable // run))[0]
    return out


def _softmax_parts(site: FaultSite):
    x = site.exact(0) * site.attrs["scale"]
    return x, site.exact(1), site.exact(2)


def _no_maximum(site: FaultSite):
    """Exponentials of the scores themselves."""
    x, mask, sinks = _softmax_parts(site)
    if mask is not None or sinks is not None:
        return None
    e = np.exp(x.astype(np.float32))
    return e / e.sum(-1, keepdims=True)


def _masked_rows_nan(site: FaultSite):
    out = site.right()[0]
    return np.where((out == 0).all(-1, keepdims=True), np.nan, out)


def _sink_only_in_maximum(site: FaultSite):
    return None if site.src[-1] is None or len(site.src) < 3 else site.right([*site.src[:2], None])


def _mask_scaled(site: FaultSite):
    """The mask added before scaling."""
    if len(site.src) < 2 or site.src[1] is None or site.attrs["scale"] == 1.0:
        return None
    return site.right([site.src[0], site.exact(1) * site.attrs["scale"], *site.src[2:]])


def _sum_tail(site: FaultSite):
    """Omit the rest that fills no vector of 4 from the sum."""
    x = site.exact(0)
    n = x.shape[-1] // 4 * 4 or x.shape[-1]
    return x[..., :n].sum(-1, keepdims=True)


def _restarts(site: FaultSite, block: int):
    x = site.exact(0)
    return np.concatenate([np.cumsum(x[..., i : i + block], -1) for i in range(0, x.shape[-1], block)], -1)


def _argmax(site: FaultSite, last: bool):
    x = site.exact(0)
    if last:
        return x.shape[-1] - 1 - np.argmax(x[..., ::-1], -1)
    return np.where((x == -np.inf).all(-1), -1, np.argmax(x, -1))


def _unstable(site: FaultSite):
    """Equal entries in reverse order."""
    x = site.exact(0)
    n = x.shape[-1]
    key = -x if site.attrs["descending"] else x
    return n - 1 - np.argsort(key[..., ::-1], -1, kind="stable")


def _last_of_ties(site: FaultSite):
    x, k = site.exact(0), int(site.attrs["k"])
    return x.shape[-1] - 1 - np.argsort(-x[..., ::-1], -1, kind="stable")[..., :k]


def _top_twice(site: FaultSite):
    """The largest found twice, the last of the k missed."""
    rows = np.array(site.right()[0])
    rows[..., -1:] = rows[..., :1]
    return rows


FAULTS = (
    fault_in_result("rms_norm", "eps ignored", lambda s: _rms(s, eps=0.0)),
    fault_in_result("rms_norm", "eps outside the root", lambda s: _rms(s, outside=True)),
    fault_in_result("rms_norm", "divides by the padded length", lambda s: _rms(s, count=lambda n: -(-n // 32) * 32)),
    fault_in_result("rms_norm", "columns past 256 not counted", lambda s: _columns(s, 256)),
    fault_in_result("rms_norm", "squares summed in float16", _rms_half),
    fault_in_result("l2_norm", "`clamp` ignored", lambda s: s.right(clamp=False)),
    fault_in_result("l2_norm", "eps squared", lambda s: s.right(eps=s.attrs["eps"] ** 2)),
    fault_in_result("norm", "divides by n - 1", _norm_unbiased),
    fault_in_result("norm", "mean not subtracted", _rms),
    fault_in_result("group_norm", "group size rounded down", _group_floor),
    fault_in_result("softmax", "maximum not subtracted", _no_maximum, symptom=NAN),
    fault_in_result("softmax", "NaN in a row masked entirely", _masked_rows_nan, symptom=NAN),
    fault_in_result("softmax", "sinks left out", _sink_only_in_maximum),
    fault_in_result("softmax", "mask added before scaling", _mask_scaled),
    fault_in_result("softmax", "ALiBi slope of 1 for all heads", lambda s: s.right(max_bias=0.0)),
    fault_in_result("sum_rows", "tail of a vector left out", _sum_tail),
    fault_in_result("sum_rows", "summed in float16", lambda s: _half_sum(s.exact(0))[..., None]),
    fault_in_result("mean", "a sum", lambda s: s.exact(0).sum(-1, keepdims=True)),
    fault_in_result("sum", "last element left out", lambda s: s.exact(0).reshape(-1)[:-1].sum()),
    fault_in_result("cumsum", "starts again every 256", lambda s: _restarts(s, 256)),
    fault_in_result("cumsum", "exclusive", lambda s: s.right()[0] - s.exact(0)),
    fault_in_result("argmax", "last of equal ones", lambda s: _argmax(s, last=True), symptom=WRONG_INTEGER),
    fault_in_result("argmax", "none found in a row of -inf", lambda s: _argmax(s, last=False), symptom=WRONG_INTEGER),
    fault_in_result(
        "count_equal",
        "last element not compared",
        lambda s: (s.exact(0) == s.exact(1)).reshape(-1)[:-1].sum(),
        symptom=WRONG_INTEGER,
    ),
    fault_in_result("argsort", "equal entries reversed", _unstable, symptom=WRONG_INTEGER),
    fault_in_result("argsort", "`descending` ignored", lambda s: s.right(descending=False), symptom=WRONG_INTEGER),
    fault_in_result("top_k", "last of equal ones at the border", _last_of_ties, symptom=WRONG_INTEGER),
    fault_in_result(
        "top_k", "the largest twice", lambda s: _top_twice(s) if s.attrs["k"] > 1 else None, symptom=WRONG_INTEGER
    ),
)
