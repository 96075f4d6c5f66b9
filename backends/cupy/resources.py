"""What every kernel takes of a device: ``python -m hocket.backends.cupy.resources`` writes it anew with NVRTC.

The file ``resources.json`` beside this one has a line for each kernel: registers of a thread and declared bytes of
shared memory, for each architecture.  No kernel spills registers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .driver import Source
from .nvrtc import Resources, compile
from .table import SOURCES

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100")
FILE = Path(__file__).with_suffix(".json")
Table = Mapping[str, Mapping[str, tuple[int, int]]]
"""By ``file: kernel``, then by architecture: registers, bytes."""


def recorded() -> Table:
    """The table as it was last written."""
    lines = json.loads(FILE.read_text("utf-8"))
    return {name: {arch: (row[0], row[1]) for arch, row in rows.items()} for name, rows in lines.items()}


def measured(source: Source, arch: str) -> dict[str, Resources]:
    """What the kernels of a source take.  Raises `BackendError` if it does not compile."""
    return {f"{source.file}: {name}": found for name, found in compile(source, arch).resources.items()}


def write() -> None:
    """Compile everything and keep what it takes."""
    jobs = [(source, arch) for source in SOURCES for arch in ARCHITECTURES]
    table: dict[str, dict[str, list[int]]] = {}
    with ThreadPoolExecutor(2) as pool:
        for (_, arch), found in zip(jobs, pool.map(lambda job: measured(*job), jobs), strict=True):
            for name, r in found.items():
                table.setdefault(name, {})[arch] = [r.registers, r.shared]
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(table.items()))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    write()
