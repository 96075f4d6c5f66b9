"""Regressions of kernels against the recorded values of their machine code and memory accesses."""

from __future__ import annotations

import re
from functools import cache

from hocket.backends.cupy.emulation.access_budget import build_row_per_access_kind

from ..models.goldens import ROOT

SLACK, MORE = 8, 1.1
"""Allowed differences between compiler versions: registers or instructions, and the ratio of counts or accesses."""
PAGE = ROOT / "benchmarks" / "kernels_cuda.md"
"""The recorded memory accesses of kernels; docs/add-a-cuda-kernel.md describes how to write them."""


def find_resource_regressions(now, before):
    """Return the resources in which a row is worse than the recorded one."""
    if now.registers > before.registers + SLACK:
        yield f"{now.registers} registers in place of {before.registers}"
    if now.shared_bytes != before.shared_bytes:
        yield f"{now.shared_bytes} bytes of shared memory in place of {before.shared_bytes}"
    if now.loop > before.loop * MORE + SLACK:
        yield f"a loop of {now.loop} instructions in place of {before.loop}"
    if now.warps < before.warps:
        yield f"{now.warps} warps at once in place of {before.warps}"
    if now.products != before.products:
        yield f"{now.products} instructions of tensor cores in place of {before.products}"
    if width(now) < width(before) / MORE:
        yield f"loads of {width(now):.0f} bits in place of {width(before):.0f}"


def width(row):
    """The bits that a load brings on the average."""
    return sum(int(bits) * count for bits, count in row.loads.items()) / max(1, sum(row.loads.values()))


@cache
def requests():
    """Those recorded, by kernel and kind of access."""
    row = re.compile(r"\| `(.+?)` \| ((?:global|shared) .+?) \| (\d+) \|")
    return {(m[1], m[2]): int(m[3]) for line in PAGE.read_text("utf-8").splitlines() if (m := row.match(line))}


@cache
def at_once():
    """The threads of a block that are recorded, and the copies under way, by kernel."""
    row = re.compile(r"\| `(.+?)` \| \d+ \| [\d.]+ \| (\d+) \| (\d*) \|$", re.M)
    return {m[1]: (int(m[2]), int(m[3] or 0)) for m in row.finditer(PAGE.read_text("utf-8"))}


def find_access_regressions(counted):
    """Return the counters of a launch that exceed the recorded ones, and the counters that are smaller at the
    same time.
    """
    known, (threads, copies) = requests(), at_once().get(counted.kernel, (0, 0))
    for row in build_row_per_access_kind(counted):
        if row.requests > MORE * known.get((row.kernel, row.access_kind), 0):
            yield f"{row.kernel}: {row.requests} requests for a {row.access_kind}"
    if counted.block_threads != threads:
        yield f"{counted.kernel}: blocks of {counted.block_threads} threads in place of {threads}"
    if (counted.copies_in_flight or 0) < copies:
        yield f"{counted.kernel}: {counted.copies_in_flight or 0} copies under way in place of {copies}"
