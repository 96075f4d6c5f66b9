"""Faults in how operands are addressed: strides, offsets, broadcasting."""

from __future__ import annotations

import numpy as np

from .site import READS_ELSEWHERE, FaultSite, KernelFault, fault_in_result


def _as_if_dense(site: FaultSite, operand: int):
    """The operand read from its first byte on as if it had no gaps."""
    tensor = site.call.src[operand]
    if tensor is None:
        return site.src
    memory, start = site.memory(tensor)
    count = site.src[operand].size
    dense = np.take(memory, np.arange(start, start + count), mode="clip").reshape(tensor.shape)
    if dense.dtype.kind in "iu" and count:  # other numbers, but none that would crash
        dense = dense % (site.src[operand].max() + 1)
    return [*site.src[:operand], dense, *site.src[operand + 1 :]]


def _from_buffer_start(site: FaultSite, operand: int):
    """The operand's offset within its leaf forgotten, by one row or one element."""
    tensor = site.call.src[operand]
    memory, start = site.memory(tensor)
    if start == 0:
        return site.src
    shifted = np.lib.stride_tricks.as_strided(
        memory[start - 1 :], tensor.shape, [s * memory.itemsize for s in tensor.strides], writeable=False
    )
    moved = np.array(shifted)
    return [*site.src[:operand], moved, *site.src[operand + 1 :]]


def ignores_strides(op: str, operand: int, name: str) -> KernelFault:
    return fault_in_result(
        op, f"strides of {name} ignored", lambda s: s.right(_as_if_dense(s, operand)), symptom=READS_ELSEWHERE
    )


def ignores_offset(op: str, operand: int, name: str) -> KernelFault:
    """Only where the operand does not begin on 64 bytes, as with vector loads that round an address down."""

    def compute(site: FaultSite):
        return site.right(_from_buffer_start(site, operand)) if site.call.src[operand].offset % 64 else None

    return fault_in_result(op, f"address of {name} rounded down", compute, symptom=READS_ELSEWHERE)


def _grouped_not_tiled(site: FaultSite, function):
    """Index divided by the ratio where it is modulo the size."""
    a, b = site.exact(0), site.exact(1)
    b = b.reshape((1,) * (a.ndim - b.ndim) + b.shape)
    for axis, n in enumerate(a.shape):
        b = np.repeat(b, n // b.shape[axis], axis=axis)
    return function(a, b)


def _only_size_one(site: FaultSite, function):
    """Broadcasts axes of size 1 only; other tiles are read on past their end, which is clipped."""
    a, b = site.exact(0), site.exact(1)
    b = b.reshape((1,) * (a.ndim - b.ndim) + b.shape)
    for axis, n in enumerate(a.shape):
        b = np.take(b, np.arange(n), axis=axis, mode="clip")
    return function(a, b)


def _leading_ratio(site: FaultSite):
    """Weights of a batch taken modulo instead of in runs."""
    w, x = site.exact(0), site.exact(1)
    leading = x.shape[:-2]
    w = w.reshape((1,) * (len(leading) + 2 - w.ndim) + w.shape)
    w = np.tile(w, [m // n for n, m in zip(w.shape, leading, strict=False)] + [1, 1])
    return x @ np.swapaxes(w, -1, -2)


def _first_mask(site: FaultSite, where: int):
    """The mask of the first batch entry used for all."""
    mask = site.src[where]
    if mask is None or mask.ndim < 3:
        return None
    first = np.broadcast_to(mask[:1], mask.shape)
    return site.right([*site.src[:where], first, *site.src[where + 1 :]])


FAULTS = (
    ignores_strides("add", 0, "a"),
    ignores_strides("div", 1, "b"),
    ignores_strides("gelu", 0, "x"),
    ignores_strides("mul_mat", 1, "x"),
    ignores_strides("softmax", 1, "the mask"),
    ignores_strides("attention", 1, "k"),
    ignores_strides("attention", 2, "v"),
    ignores_strides("rope", 1, "the positions"),
    ignores_strides("get_rows", 1, "the ids"),
    ignores_strides("set_rows", 1, "the rows"),
    ignores_strides("gated_delta_net", 3, "g"),
    ignores_strides("cumsum", 0, "x"),
    ignores_offset("sub", 0, "a"),
    ignores_offset("l2_norm", 0, "x"),
    fault_in_result("mul", "broadcast by runs instead of modulo", lambda s: _grouped_not_tiled(s, np.multiply)),
    fault_in_result("add", "broadcasts axes of size 1 only", lambda s: _only_size_one(s, np.add)),
    fault_in_result("mul_mat", "weights of a batch by modulo instead of runs", _leading_ratio),
    fault_in_result("softmax", "mask of the first entry used for all", lambda s: _first_mask(s, 1)),
    fault_in_result("attention", "mask of the first sequence used for all", lambda s: _first_mask(s, 3)),
)
