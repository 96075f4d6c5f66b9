"""Faults in gathers, scatters, casts, and ops that lay entries out anew."""

from __future__ import annotations

import numpy as np

from hocket.graph import DType

from .site import INFINITE, WRONG_INTEGER, FaultSite, fault_after_result, fault_in_result, round_to_half


def _ids_as_i32(site: FaultSite):
    """64-bit ids read as 32-bit ones: every second is the high half."""
    ids = site.exact(1)
    if ids.dtype != np.int64:
        return None
    flat = np.ascontiguousarray(ids).view(np.int32).reshape(-1)[: ids.size]
    return site.right([site.src[0], flat.reshape(ids.shape).astype(np.int64)])


def _neighbour(site: FaultSite):
    """The last id is taken for the one before it."""
    ids = site.exact(1)
    ids[..., -1] = ids[..., 0]
    return site.right([site.src[0], ids])


def _last_not_written(site: FaultSite):
    return site.right([site.src[0], site.exact(1)[..., :-1, :], site.exact(2)[..., :-1]])


def _clobbers_next(site: FaultSite) -> None:
    """Row id + 1 becomes 0 as well, where a store is too wide."""
    ids = site.src[2].reshape(-1)
    if ids.size and ids[0] + 1 < site.dst[0].shape[-2] and ids[0] + 1 not in ids:
        site.dst[0][..., int(ids[0]) + 1, 0] = 0


def _ids_of_first(site: FaultSite):
    ids = site.exact(2)
    if ids.ndim < 2:
        return None
    return site.right([*site.src[:2], np.broadcast_to(ids[:1], ids.shape)])


def _offset_by_one(site: FaultSite):
    out = site.right()[0]
    axis = int(site.attrs["axis"]) % out.ndim
    n = site.src[0].shape[axis]
    if not 0 < n < out.shape[axis]:
        return None
    return np.concatenate(
        [np.take(out, range(n), axis), np.roll(np.take(out, range(n, out.shape[axis]), axis), 1, axis)], axis
    )


def _truncate_bf16(site: FaultSite):
    """bf16 by cutting bits off instead of rounding."""
    if site.attrs["dtype"] is not DType.BF16 or site.src[0].dtype.kind != "f":
        return None
    bits = np.array(site.src[0], np.float32, order="C").view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def _rounds(site: FaultSite):
    to_integer = site.attrs["dtype"].is_integer and site.src[0].dtype.kind == "f"
    return np.rint(site.exact(0)) if to_integer else None


def _through_half(site: FaultSite):
    return round_to_half(site.src[0]) if site.attrs["dtype"] is DType.F32 and site.src[0].dtype.kind == "f" else None


def _interleave_repeats(site: FaultSite):
    """Repeats each entry in turn instead of the whole."""
    shape = site.dst[0].shape
    x = np.expand_dims(site.exact(0), tuple(range(len(shape) - site.src[0].ndim)))
    for axis, n in enumerate(shape):
        x = np.repeat(x, n // x.shape[axis], axis) if x.shape[axis] else x
    return x


def _edge_repeated(site: FaultSite):
    left, right = int(site.attrs["left"]), int(site.attrs["right"])
    x = site.exact(0)
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(left, right)], mode="symmetric")


def _set_swapped(site: FaultSite):
    offsets = site.attrs["offsets"][::-1]
    fits = all(o + n <= m for o, n, m in zip(offsets, site.src[1].shape, site.src[0].shape, strict=True))
    return site.right(offsets=offsets) if fits else None


def _acc_overwrites(site: FaultSite):
    from hocket.ops import REGISTRY

    return REGISTRY["set"].run_reference([site.exact(0), site.exact(1)], dict(site.attrs))


def _first_entries(site: FaultSite, limit: int) -> None:
    site.dst[0].reshape(-1)[limit:] = 0


FAULTS = (
    fault_in_result("get_rows", "64-bit ids read as 32-bit ones", _ids_as_i32),
    fault_in_result("get_rows", "last id is the first", _neighbour),
    fault_in_result("set_rows", "last row not written", _last_not_written),
    fault_after_result("set_rows", "store wider than the row", _clobbers_next),
    fault_in_result("set_rows", "ids of the first entry for all", _ids_of_first),
    fault_in_result("concat", "second half one too far", _offset_by_one),
    fault_in_result("cast", "bf16 cut instead of rounded", _truncate_bf16),
    fault_in_result("cast", "rounds to integers", _rounds, symptom=WRONG_INTEGER),
    fault_in_result("cast", "through float16", _through_half),
    fault_in_result(
        "cont", "through float16", lambda s: round_to_half(s.src[0]) if s.src[0].dtype.kind == "f" else None
    ),
    fault_in_result("repeat", "entries in turn instead of the whole", _interleave_repeats, symptom=WRONG_INTEGER),
    fault_in_result(
        "pad",
        "left and right exchanged",
        lambda s: s.right(left=s.attrs["right"], right=s.attrs["left"]),
        symptom=WRONG_INTEGER,
    ),
    fault_in_result("pad", "circular ignored", lambda s: s.right(circular=False)),
    fault_in_result("pad_reflect_1d", "outer entry repeated", _edge_repeated),
    fault_in_result(
        "roll", "the other way", lambda s: s.right(shifts=tuple(-n for n in s.attrs["shifts"])), symptom=INFINITE
    ),
    fault_in_result("set", "offsets of the axes exchanged", _set_swapped),
    fault_in_result("acc", "overwrites instead of adding", _acc_overwrites),
    fault_in_result(
        "diag_mask_inf", "the diagonal masked too", lambda s: s.right(n_past=s.attrs["n_past"] - 1), symptom=INFINITE
    ),
    fault_in_result(
        "tri", "the diagonal kept", lambda s: s.right(kind=s.attrs["kind"].removesuffix("_diag") + "_diag")
    ),
    fault_in_result("diag", "the other diagonal", lambda s: s.right()[0][..., ::-1]),
    fault_in_result("solve_tri", "diagonal taken as 1", lambda s: s.right([_unit(s.exact(0)), s.src[1]])),
    fault_in_result("arange", "steps added up in float16", lambda s: round_to_half(s.right()[0] * 1.001)),
    fault_after_result("fill", "first 64 only", lambda s: _first_entries(s, 64)),
    fault_in_result("timestep_embedding", "sines first", lambda s: np.roll(s.right()[0], int(s.attrs["dim"]) // 2, -1)),
)


def _unit(a):
    n = a.shape[-1]
    a[..., range(n), range(n)] = 1.0
    return a
