"""In what a kernel is worse than what was recorded of it: of its machine code, or of what it asks of memory."""

from __future__ import annotations

import re

from hocket.backends.cupy.emulation.main_path import rows

from ..models.goldens import ROOT

SLACK, MORE = 8, 1.1
"""Registers and instructions by which compilers of other versions may differ, and the part of them, or of accesses."""
PAGE = ROOT / "benchmarks" / "kernels_cuda.md"
"""What kernels ask of memory; docs/add-a-cuda-kernel.md says how it is written."""


def worse(now, before):
    """In what a row is worse than the one that is recorded."""
    if now.registers > before.registers + SLACK:
        yield f"{now.registers} registers in place of {before.registers}"
    if now.shared != before.shared:
        yield f"{now.shared} bytes of shared memory in place of {before.shared}"
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


def requests():
    """Those recorded, by kernel and kind of access."""
    row = re.compile(r"\| `(.+?)` \| ((?:global|shared) .+?) \| (\d+) \|")
    return {(m[1], m[2]): int(m[3]) for line in PAGE.read_text("utf-8").splitlines() if (m := row.match(line))}


def asked_more(counted):
    """What a launch asks for more often than is recorded."""
    known = requests()
    for row in rows(counted):
        if row.requests > MORE * known.get((row.kernel, row.what), 0):
            yield f"{row.kernel}: {row.requests} requests for a {row.what}"
