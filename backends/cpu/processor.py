"""The processor that kernels are compiled for: this machine's, a lesser one, or one of those that wheels have them for.

``HOCKET_WITHOUT=avx512,avxvnni`` leaves out every feature whose name begins so: kernels run as they would where the
processor lacks them.  ``HOCKET_TARGET=x86-64-v3`` takes one of `SHIPPED` instead of this machine's.
``HOCKET_AMX=emulated`` lets kernels for tiles of AMX run in plain vector code where the processor has none: slowly, to
test them.
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
    """A processor as LLVM knows it, and whether each of its features may be used."""

    name: str
    triple: str
    cpu: str
    features: Mapping[str, bool]

    def flattened(self) -> str:
        """Features as LLVM reads them."""
        return ",".join(f"{'+' if there else '-'}{name}" for name, there in self.features.items())

    def runs_on(self, other: Target) -> bool:
        """Whether that processor runs what is compiled for this one."""
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
"""What wheels have kernels for, on Linux; the best first."""


@cache
def target() -> Target:
    """What kernels are compiled for.  Raises `BackendError` for a name that is none of `SHIPPED`."""
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
    """This machine's processor as LLVM knows it."""

    triple: str
    cpu: str
    features: Mapping[str, bool]


@cache
def _host() -> Host:
    """What LLVM says, or has said to an earlier process of a processor of which the system tells the same: to load LLVM
    takes 40 MB of memory."""
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
    """Where it is kept; None where the system does not tell of its processor."""
    try:
        first = Path("/proc/cpuinfo").read_text("utf-8", "replace").partition("\n\n")[0]
    except OSError:
        return None
    told = [line for line in first.splitlines() if not line.startswith(("cpu MHz", "bogomips", "apicid", "core id"))]
    digest = hashlib.sha256(repr((told, platform.machine(), llvmlite.__version__)).encode()).hexdigest()
    return cache_folder() / "processors" / f"{digest[:40]}.json"


def fitting() -> tuple[Target, ...]:
    """The targets whose kernels run here: this processor itself, then those of `SHIPPED`."""
    mine = target()
    others = (t for t in SHIPPED if sys.platform == "linux" and t != mine and t.runs_on(mine))
    return (mine, *others)


def is_native() -> bool:
    """Whether kernels are compiled for a processor of this machine's kind."""
    return target().triple.partition("-")[0] == _host().triple.partition("-")[0]


AMX, EMULATED = "amx", "emulated"
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILES = 158, 0x1023, 18
"""A system call of Linux on x86-64, what it is asked for, and the number of the registers of tiles."""


@cache
def tiles() -> str | None:
    """Who multiplies tiles of bfloat16: `AMX`, plain vector code (`EMULATED`), or nobody."""
    if asked := os.environ.get("HOCKET_AMX"):
        if asked != EMULATED:
            raise BackendError(f"HOCKET_AMX is {asked!r:.60}; it may be {EMULATED}, or leave it out")
        return EMULATED
    there = all(features().get(name) for name in ("amx-tile", "amx-bf16", "avx512bf16"))
    return AMX if there and is_native() and _may_use_tiles() else None


def _may_use_tiles() -> bool:
    """Ask the system for the registers of tiles, which it saves for processes alone that have asked."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILES) == 0


def features() -> Mapping[str, bool]:
    """What LLVM calls the processor's features, and whether kernels may use them."""
    return target().features
