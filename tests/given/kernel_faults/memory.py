"""Faults in which memory is touched: guards, poison, scratch, replays, operands."""

from __future__ import annotations

import numpy as np

from .site import (
    BEFORE_THE_START,
    NAN,
    OPERAND_CHANGED,
    PAST_THE_END,
    UNSTEADY,
    WEIGHT_WRITTEN,
    FaultSite,
    KernelFault,
    fault_after_result,
)


def _unwritten_tail(site: FaultSite):
    """The last elements that fill no vector of 8 are never written."""

    def run() -> None:
        old_entries = site.dst[0].copy()
        site.real()
        tail = site.dst[0].size % 8
        if tail:
            site.dst[0].reshape(-1)[-tail:] = old_entries.reshape(-1)[-tail:]

    return run


def _one_unwritten(site: FaultSite):
    def run() -> None:
        old_entries = site.dst[0].copy()
        site.real()
        if site.dst[0].size:
            site.dst[0].reshape(-1)[-1] = old_entries.reshape(-1)[-1]

    return run


def _past_the_end(site: FaultSite) -> None:
    """A whole vector is stored where only part of it belongs."""
    memory, start = site.memory(site.call.dst[0])
    end = start + site.dst[0].size
    over = -site.dst[0].size % 4 or 4
    memory[end : end + over] = 0


def _before_the_start(site: FaultSite) -> None:
    memory, start = site.memory(site.call.dst[0])
    memory[start - 1] = memory[start]


def _far_row(site: FaultSite) -> None:
    """One row too many is written, one row past the end."""
    memory, start = site.memory(site.call.dst[0])
    width = site.dst[0].shape[-1] if site.dst[0].ndim else 1
    memory[start + site.dst[0].size + width - 1] = 1


def _scratch_past_end(site: FaultSite) -> None:
    if site.call.scratch is not None:
        end = site.call.scratch.offset + site.call.scratch.shape[0]
        site.buffers[site.call.scratch.buffer][end : end + 4] = 0


def _changes_operand(site: FaultSite) -> None:
    if not np.shares_memory(site.src[0], site.dst[0]):
        site.src[0].reshape(-1)[:1] = 0 if site.src[0].flags.c_contiguous else site.src[0].reshape(-1)[:1]


def _weight_changed(site: FaultSite) -> None:
    if site.call.src[0].buffer != site.call.dst[0].buffer:
        site.src[0][...] *= np.float32(0.5)


def _wrong_from(first_wrong: int):
    """Right the first times, wrong from run number `first_wrong` on."""

    def plant(site: FaultSite):
        runs = [0]

        def run() -> None:
            site.real()
            runs[0] += 1
            if runs[0] >= first_wrong and site.dst[0].size:
                site.dst[0].reshape(-1)[0] += np.float32(1)

        return run

    return plant


def _first_results_reused(site: FaultSite):
    """Results are computed once and handed out again."""
    results: list = []

    def run() -> None:
        if not results:
            site.real()
            results.extend(d.copy() for d in site.dst)
        for target, old in zip(site.dst, results, strict=True):
            target[...] = old

    return run


def _accumulates(site: FaultSite):
    """Add to the old content of the result, which is zero in a fresh allocation."""

    def run() -> None:
        old_entries = site.dst[0].copy()
        site.real()
        if not np.shares_memory(site.src[0], site.dst[0]):
            site.dst[0][...] += old_entries

    return run


def _stale_scratch(site: FaultSite):
    """The sum of squares is taken once and found again in the scratch at the next run."""

    def run() -> None:
        scratch = site.call.scratch
        bytes_ = site.buffers[scratch.buffer][scratch.offset : scratch.offset + scratch.shape[0]]
        marked = bytes_.view(np.float32)
        if marked.size and marked[0] == 12345.0 and not np.shares_memory(site.src[0], site.dst[0]):
            site.dst[0][...] = site.src[0] * marked[-1]
            return
        x = np.array(site.src[0])
        site.real()
        if marked.size > 1 and x.size:
            marked[0] = 12345.0
            marked[-1] = site.dst[0].reshape(-1)[0] / (x.reshape(-1)[0] or 1)

    return run


def _inplace_read_late(site: FaultSite):
    """In place, the row is overwritten while later elements still need the old one."""

    def run() -> None:
        if not np.shares_memory(site.src[0], site.dst[0]) or not site.dst[0].size:
            site.real()
            return
        x = site.dst[0].reshape(-1, site.dst[0].shape[-1])
        eps = float(site.attrs["eps"])
        for j in range(x.shape[-1]):  # each divides by the changed row
            x[:, j] /= np.sqrt((x * x).mean(-1) + eps)

    return run


def _inplace_ignored(site: FaultSite):
    """In place nothing is done at all."""

    def run() -> None:
        if not np.shares_memory(site.src[0], site.dst[0]):
            site.real()

    return run


def _nan_once(site: FaultSite) -> None:
    flat = site.dst[0].reshape(-1)
    flat[flat.size // 2] = np.nan


FAULTS = (
    KernelFault("mul", "tail of a vector not written", _unwritten_tail, symptom=UNSTEADY),
    KernelFault("argsort", "last index not written", _one_unwritten, symptom=UNSTEADY),
    KernelFault("get_rows", "last element not written", _one_unwritten, symptom=UNSTEADY),
    KernelFault("ssm_conv", "tail of a vector not written", _unwritten_tail, symptom=UNSTEADY),
    fault_after_result("add", "whole vector stored past the end", _past_the_end, symptom=PAST_THE_END),
    fault_after_result("cont", "one element before the start written", _before_the_start, symptom=BEFORE_THE_START),
    fault_after_result("softmax", "a row past the end written", _far_row, symptom=PAST_THE_END),
    fault_after_result("rms_norm", "writes past its scratch", _scratch_past_end, symptom=PAST_THE_END),
    fault_after_result("silu", "changes its operand", _changes_operand, symptom=OPERAND_CHANGED),
    fault_after_result("mul_mat", "scales its weight in place", _weight_changed, symptom=WEIGHT_WRITTEN),
    KernelFault("scale", "wrong on the second run", _wrong_from(2)),
    KernelFault("attention", "wrong on the third run", _wrong_from(3), symptom=UNSTEADY),
    KernelFault("rope", "hands out the first results again", _first_results_reused),
    KernelFault("swiglu", "adds to what the result held", _accumulates, symptom=UNSTEADY),
    KernelFault("rms_norm", "finds stale numbers in its scratch", _stale_scratch, symptom=UNSTEADY),
    KernelFault("rms_norm", "in place, reads what it has overwritten", _inplace_read_late),
    KernelFault("neg", "does nothing in place", _inplace_ignored),
    fault_after_result("exp", "NaN for one element", _nan_once, symptom=NAN),
)
