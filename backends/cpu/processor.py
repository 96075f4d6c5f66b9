"""The target processor of kernels: this machine's, one with fewer features, or a target of the wheels.

- ``HOCKET_WITHOUT=avx512,avxvnni`` disables every feature with such a prefix, to run the kernels of lesser processors.
- ``HOCKET_TARGET=x86-64-v3`` selects one of `PRECOMPILED_TARGETS` instead of this machine.
- ``HOCKET_AMX=emulated`` runs kernels for AMX tiles as plain vector code, slowly, for tests without AMX.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import llvmlite

from ...graph.errors import BackendError
from ...graph.lazy_dataclass import dataclass
from ..cache import cache_folder, keep, recalled


@dataclass(frozen=True, slots=True)
class Target:
    """A processor in LLVM's terms, and whether each of its features may be used."""

    name: str
    triple: str
    cpu: str
    features: Mapping[str, bool]

    def flattened(self) -> str:
        """Return the features in LLVM's notation."""
        return ",".join(f"{'+' if there else '-'}{name}" for name, there in self.features.items())

    def runs_on(self, other: Target) -> bool:
        """Return whether another processor can run code that is compiled for this one."""
        same = self.triple.partition("-")[0] == other.triple.partition("-")[0]
        return same and all(other.features.get(name) for name, there in self.features.items() if there)


V3 = (
    "64bit avx avx2 bmi bmi2 cmov crc32 cx16 cx8 f16c fma fxsr lzcnt mmx movbe popcnt sahf sse sse2 sse3 sse4.1 sse4.2 "
    "ssse3 xsave"
)
V4 = f"{V3} avx512bw avx512cd avx512dq avx512f avx512vl"


def _of(name: str, triple: str, cpu: str, features: str) -> Target:
    return Target(name, triple, cpu, MappingProxyType(dict.fromkeys(features.split(), True)))


SHIPPED = (
    _of("avx512-vnni-bf16", "x86_64-unknown-linux-gnu", "x86-64-v4", f"{V4} avx512vnni avx512bf16"),
    _of("x86-64-v3", "x86_64-unknown-linux-gnu", "x86-64-v3", V3),
    _of("aarch64", "aarch64-unknown-linux-gnu", "generic", "fp-armv8 neon"),
)
"""Targets with kernels in the Linux wheels, the best first."""


@cache
def target() -> Target:
    """Return the compile target. Raises `BackendError` for a name that is not in `PRECOMPILED_TARGETS`."""
    if asked := os.environ.get("HOCKET_TARGET"):
        known = {t.name: t for t in SHIPPED}
        if asked not in known:
            raise BackendError(f"HOCKET_TARGET is {asked!r:.60}; one of {', '.join(known)}, or leave it out")
        return known[asked]
    without = tuple(name for name in os.environ.get("HOCKET_WITHOUT", "").split(",") if name)
    host = _host()
    features = MappingProxyType({n: there and not n.startswith(without) for n, there in host.features.items()})
    what = (host.cpu, sorted(features.items()), os.environ.get("HOCKET_AMX", ""))  # all that code depends on
    digest = hashlib.sha256(repr(what).encode()).hexdigest()
    return Target(f"{host.cpu}-{digest[:12]}", host.triple, host.cpu, features)


class Host(NamedTuple):
    """The processor of this machine in LLVM's terms."""

    triple: str
    cpu: str
    features: Mapping[str, bool]


@cache
def _host() -> Host:
    """Return the processor, from LLVM or from the cache of an earlier process; loading LLVM takes 40 MB of memory."""
    file = _host_file()
    with suppress(TypeError, ValueError):
        if file is not None and (data := recalled(file)) is not None:
            return Host(**json.loads(data))
    import llvmlite.binding as llvm

    host = Host(llvm.get_default_triple(), str(llvm.get_host_cpu_name()), dict(llvm.get_host_cpu_features()))
    if file is not None:
        keep(file, json.dumps(host._asdict()).encode())
    return host


def _host_file() -> Path | None:
    """Return the cache file for the processor; None if the system does not describe its processor."""
    try:
        first = Path("/proc/cpuinfo").read_text("utf-8", "replace").partition("\n\n")[0]
    except OSError:
        return None
    told = [line for line in first.splitlines() if not line.startswith(("cpu MHz", "bogomips", "apicid", "core id"))]
    digest = hashlib.sha256(repr((told, platform.machine(), llvmlite.__version__)).encode()).hexdigest()
    return cache_folder() / "processors" / f"{digest[:40]}.json"


def fitting() -> tuple[Target, ...]:
    """Return the targets with kernels that run here: this processor, then `PRECOMPILED_TARGETS` in their order."""
    mine = target()
    others = (t for t in SHIPPED if sys.platform == "linux" and t != mine and t.runs_on(mine))
    return (mine, *others)


def is_native() -> bool:
    """Return whether kernels are compiled for the architecture of this machine."""
    return target().triple.partition("-")[0] == _host().triple.partition("-")[0]


AMX, EMULATED = "amx", "emulated"
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILES = 158, 0x1023, 18
"""A system call of Linux on x86-64, its request code, and the number of the tile registers."""


@cache
def tiles() -> str | None:
    """Return how bfloat16 tiles are multiplied: `AMX`, `EMULATED` (plain vector code), or None."""
    if asked := os.environ.get("HOCKET_AMX"):
        if asked != EMULATED:
            raise BackendError(f"HOCKET_AMX is {asked!r:.60}; it may be {EMULATED}, or leave it out")
        return EMULATED
    there = all(features().get(name) for name in ("amx-tile", "amx-bf16", "avx512bf16"))
    return AMX if there and is_native() and _may_use_tiles() else None


def _may_use_tiles() -> bool:
    """Request the tile registers from the system, which saves them only for processes that ask."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILES) == 0


def features() -> Mapping[str, bool]:
    """Return LLVM's features of the target, and whether kernels may use them."""
    return target().features
