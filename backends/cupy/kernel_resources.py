"""Compiles all kernels and stores their device resources and machine-code statistics in ``resources.json``.

``python -m hocket.backends.cupy.kernel_resources`` updates the file with NVRTC and nvdisasm. The file has a digest for
each source over all architectures, and a line for each kernel with a `ResourceRow` for each architecture. So the diff
shows a change that makes a kernel worse. No kernel spills registers. No kernel has warpgroup waits that its source does
not have.
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
from ...graph.storage.files import write_text
from .device.device_limits import MULTIPROCESSORS
from .device.disassembly import disassemble_kernels
from .device.driver import KernelSource
from .device.nvrtc import MAX_BLOCK_THREADS, OPTIONS, KernelResources, compile
from .kernel_table import SOURCES

ARCHITECTURES = tuple(MULTIPROCESSORS)
RESOURCE_FILE = Path(__file__).parent / "resources.json"
DEFAULT_BLOCK_THREADS = 256
"""Threads of a typical block of a kernel without launch bounds."""


class ResourceRow(NamedTuple):
    """Resources and machine-code statistics of one kernel on one architecture.

    - `registers`: 32-bit registers of a thread.
    - `shared_bytes`: declared bytes of shared memory.
    - `instructions`: the number of instructions.
    - `loop`: the number of instructions in the longest inner loop.
    - `products`: the number of tensor-core instructions.
    - `loads`: the number of global loads, by the bits that one load reads for a thread.
    - `threads`: the maximum block size.
    - `warps`: warps that are resident on a multiprocessor at once, with blocks of `threads` threads and without dynamic
      shared memory. A kernel without a maximum counts with `DEFAULT_BLOCK_THREADS`.
    """

    registers: int
    shared_bytes: int
    instructions: int
    loop: int
    products: int
    loads: Mapping[str, int]
    threads: int
    warps: int


@dataclass(frozen=True, slots=True)
class ResourceTable:
    """The stored resource table.

    It has a row for each kernel (``file: kernel``) and architecture, and the digest of each compiled source.
    """

    kernels: Mapping[str, Mapping[str, ResourceRow]]
    digests: Sequence[str]


def read_resource_table() -> ResourceTable:
    """Read the resource table from ``resources.json``."""
    document = json.loads(RESOURCE_FILE.read_text("utf-8"))
    rows = document["kernels"].items()
    kernels = {name: {arch: ResourceRow(*row) for arch, row in archs.items()} for name, archs in rows}
    return ResourceTable(kernels, document["digests"])


def compute_source_digest(source: KernelSource) -> str:
    """Return a digest of all that determines the machine code of a source: text, kernel names and compiler options."""
    parts = (source.text, *source.names, *OPTIONS, *source.architectures)
    return f"{source.file} {hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def list_architectures(source: KernelSource) -> tuple[str, ...]:
    """List the architectures for which a source is compiled."""
    return source.architectures or ARCHITECTURES


def compute_resident_warps(resources: KernelResources, arch: str) -> int:
    """Compute the number of warps of a kernel that are resident on one multiprocessor at once."""
    block = DEFAULT_BLOCK_THREADS if resources.threads == MAX_BLOCK_THREADS else resources.threads
    return (
        MULTIPROCESSORS[arch].compute_resident_blocks(block, resources.registers, resources.shared_bytes) * block // 32
    )


def compile_resource_rows(source: KernelSource, arch: str) -> dict[str, tuple[ResourceRow, int]]:
    """Compile a source for an architecture, and return the resource row and the spilled bytes of each kernel.

    Raises:
        BackendError: The source does not compile, or the compiler adds waits for warpgroup products.
    """
    cubin = compile(source, arch)
    if cubin.serialisation_warnings:
        raise BackendError(f"{source.file} for {arch}: {cubin.serialisation_warnings[0]}")
    does, rows = disassemble_kernels(cubin.image), {}
    for name, takes in cubin.resources.items():
        code = does[cubin.mangled_names[name]]
        loads = {str(bits): count for bits, count in code.loads.items()}
        row = ResourceRow(
            takes.registers,
            takes.shared_bytes,
            code.instructions,
            code.loop,
            code.products,
            loads,
            takes.threads,
            compute_resident_warps(takes, arch),
        )
        rows[f"{source.file}: {name}"] = row, takes.spilled_bytes
    return rows


def recompile_changed_and_update_resource_table() -> None:
    """Update ``resources.json``: recompile the sources that changed. Fail if a kernel spills registers."""
    before = read_resource_table()
    known = [source for source in SOURCES if compute_source_digest(source) in before.digests]
    known_names = {f"{source.file}: {name}" for source in known for name in source.names}
    table = {name: dict(before.kernels[name]) for name in known_names}
    compiled = {arch for rows in table.values() for arch in rows}
    jobs = [(s, arch) for s in SOURCES for arch in list_architectures(s) if s not in known or arch not in compiled]
    with ThreadPoolExecutor(2) as pool:
        for (_, arch), found in zip(jobs, pool.map(lambda job: compile_resource_rows(*job), jobs), strict=True):
            for name, (row, spilled_bytes) in found.items():
                if spilled_bytes:
                    raise SystemExit(f"{name} spills {spilled_bytes} bytes for {arch}; nothing was written")
                table.setdefault(name, {})[arch] = row
    digests = ",\n".join(map(json.dumps, map(compute_source_digest, SOURCES)))
    ordered = {
        name: {arch: table[name][arch] for arch in ARCHITECTURES if arch in table[name]} for name in sorted(table)
    }
    kernels = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in ordered.items())
    write_text(RESOURCE_FILE, f'{{"digests": [\n{digests}\n], "kernels": {{\n{kernels}\n}}}}\n')


if __name__ == "__main__":
    recompile_changed_and_update_resource_table()
