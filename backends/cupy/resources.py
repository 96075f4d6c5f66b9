"""What every kernel takes of a device: ``python -m hocket.backends.cupy.resources`` writes it anew with NVRTC.

The file ``resources.json`` beside this one has a line for each source, the digest of what was compiled for every
architecture, and one for each kernel: registers of a thread and declared bytes of shared memory, for each architecture.
No kernel spills registers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .device.driver import Source
from .device.nvrtc import OPTIONS, Resources, compile
from .table import SOURCES

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100")
FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True, slots=True)
class Table:
    """By ``file: kernel``, then by architecture: registers, bytes; and digests of the sources that were compiled."""

    kernels: Mapping[str, Mapping[str, tuple[int, int]]]
    digests: Sequence[str]


def recorded() -> Table:
    """The table as it was last written."""
    document = json.loads(FILE.read_text("utf-8"))
    rows = document["kernels"].items()
    kernels = {name: {arch: (row[0], row[1]) for arch, row in archs.items()} for name, archs in rows}
    return Table(kernels, document["digests"])


def digest(source: Source) -> str:
    """Changes with everything of ours that decides the code of a source."""
    parts = (source.text, *source.names, *OPTIONS)
    return f"{source.file} {hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def measured(source: Source, arch: str) -> dict[str, Resources]:
    """What the kernels of a source take.  Raises `BackendError` if it does not compile."""
    return {f"{source.file}: {name}": found for name, found in compile(source, arch).resources.items()}


def write() -> None:
    """Compile what has changed since the table was written, and keep what it takes."""
    before = recorded()
    stale = [source for source in SOURCES if digest(source) not in before.digests]
    jobs = [(source, arch) for source in stale for arch in ARCHITECTURES]
    kept = {f"{source.file}: {name}" for source in SOURCES if source not in stale for name in source.names}
    table = {name: {arch: [*row] for arch, row in before.kernels[name].items()} for name in kept}
    with ThreadPoolExecutor(2) as pool:
        for (_, arch), found in zip(jobs, pool.map(lambda job: measured(*job), jobs), strict=True):
            for name, r in found.items():
                table.setdefault(name, {})[arch] = [r.registers, r.shared]
    digests = ",\n".join(map(json.dumps, map(digest, SOURCES)))
    kernels = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(table.items()))
    FILE.write_text(f'{{"digests": [\n{digests}\n], "kernels": {{\n{kernels}\n}}}}\n', "utf-8")


if __name__ == "__main__":
    write()
