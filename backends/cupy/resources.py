"""What every kernel takes of a device, and what its machine code does: ``python -m hocket.backends.cupy.resources``
writes it anew with NVRTC and nvdisasm.

The file ``resources.json`` beside this one has a line for each source, the digest of what was compiled for every
architecture, and one for each kernel with a `Row` for each architecture: a change that makes one worse shows in the
diff.  No kernel spills registers, and none waits for products where its source does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...graph.errors import BackendError
from ...graph.files import write_text
from .device.disassembly import disassembled
from .device.driver import Source
from .device.limits import MULTIPROCESSORS
from .device.nvrtc import MOST_THREADS, OPTIONS, Resources, compile
from .table import SOURCES

ARCHITECTURES = tuple(MULTIPROCESSORS)
FILE = Path(__file__).with_suffix(".json")
USUAL = 256
"""Threads of most blocks that are launched of kernels without bounds."""


class Row(NamedTuple):
    """Of a kernel for one architecture: registers of a thread, declared bytes of shared memory, instructions in all, in
    its longest loop that has no other in it, and of tensor cores; how many instructions load how many bits of
    global memory for a thread; the threads that a block may have; and the warps that a multiprocessor holds at once in
    blocks of so many, or of `USUAL` threads where the source sets no bounds, if a launch sizes no shared memory."""

    registers: int
    shared: int
    instructions: int
    loop: int
    products: int
    loads: Mapping[str, int]
    threads: int
    warps: int


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by ``file: kernel``, then by architecture; and digests of the sources that were compiled."""

    kernels: Mapping[str, Mapping[str, Row]]
    digests: Sequence[str]


def recorded() -> Table:
    """The table as it was last written."""
    document = json.loads(FILE.read_text("utf-8"))
    rows = document["kernels"].items()
    kernels = {name: {arch: Row(*row) for arch, row in archs.items()} for name, archs in rows}
    return Table(kernels, document["digests"])


def digest(source: Source) -> str:
    """Changes with everything of ours that decides the code of a source."""
    parts = (source.text, *source.names, *OPTIONS, *source.architectures)
    return f"{source.file} {hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def architectures(source: Source) -> tuple[str, ...]:
    """Those that a source is compiled for."""
    return source.architectures or ARCHITECTURES


def warps(takes: Resources, arch: str) -> int:
    """Those that a multiprocessor holds at once."""
    block = USUAL if takes.threads == MOST_THREADS else takes.threads
    return MULTIPROCESSORS[arch].holds(block, takes.registers, takes.shared) * block // 32


def measured(source: Source, arch: str) -> dict[str, tuple[Row, int]]:
    """The row of each kernel of a source, and the bytes of registers that it spills.  Raises `BackendError` if it does
    not compile, or only with waits for products that it does not have."""
    cubin = compile(source, arch)
    if cubin.waits:
        raise BackendError(f"{source.file} for {arch}: {cubin.waits[0]}")
    does, rows = disassembled(cubin.image), {}
    for name, takes in cubin.resources.items():
        code = does[cubin.lowered[name]]
        loads = {str(bits): count for bits, count in code.loads.items()}
        row = Row(
            takes.registers,
            takes.shared,
            code.instructions,
            code.loop,
            code.products,
            loads,
            takes.threads,
            warps(takes, arch),
        )
        rows[f"{source.file}: {name}"] = row, takes.spilled
    return rows


def write() -> None:
    """Compile what has changed since the table was written, and keep what it takes, unless a kernel spills."""
    before = recorded()
    known = [source for source in SOURCES if digest(source) in before.digests]
    kept = {f"{source.file}: {name}" for source in known for name in source.names}
    table = {name: dict(before.kernels[name]) for name in kept}
    compiled = {arch for rows in table.values() for arch in rows}
    jobs = [(s, arch) for s in SOURCES for arch in architectures(s) if s not in known or arch not in compiled]
    with ThreadPoolExecutor(2) as pool:
        for (_, arch), found in zip(jobs, pool.map(lambda job: measured(*job), jobs), strict=True):
            for name, (row, spilled) in found.items():
                if spilled:
                    raise SystemExit(f"{name} spills {spilled} bytes for {arch}; nothing was written")
                table.setdefault(name, {})[arch] = row
    digests = ",\n".join(map(json.dumps, map(digest, SOURCES)))
    ordered = {
        name: {arch: table[name][arch] for arch in ARCHITECTURES if arch in table[name]} for name in sorted(table)
    }
    kernels = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in ordered.items())
    write_text(FILE, f'{{"digests": [\n{digests}\n], "kernels": {{\n{kernels}\n}}}}\n')


if __name__ == "__main__":
    write()
