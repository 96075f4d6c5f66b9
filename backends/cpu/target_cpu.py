"""The target processor of compiled kernels: the host, the host with fewer features, or a target of the wheels.

- ``HOCKET_WITHOUT=avx512,avxvnni`` disables every feature with such a prefix, to run the kernels of older processors.
- ``HOCKET_TARGET=x86-64-v3`` selects one of `PRECOMPILED_TARGETS` in place of the host.
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
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import llvmlite

from ...graph.errors import BackendError
from ...graph.lazy_dataclass import dataclass
from ...graph.storage.disk_cache import make_cache_path, read_cached_or_make


@dataclass(frozen=True, slots=True)
class Target:
    """A compile target in LLVM's terms, and whether kernels may use each CPU feature."""

    name: str
    triple: str
    cpu: str
    features: Mapping[str, bool]

    def format_llvm_features(self) -> str:
        """Return the CPU features as LLVM's feature string, such as ``+avx2,-amx-tile``."""
        return ",".join(f"{'+' if there else '-'}{name}" for name, there in self.features.items())

    def can_run_on(self, other: Target) -> bool:
        """Return whether a processor `other` has all features that code for this target uses."""
        same = self.triple.partition("-")[0] == other.triple.partition("-")[0]
        return same and all(other.features.get(name) for name, there in self.features.items() if there)


X86_64_V3_FEATURES = (
    "64bit avx avx2 bmi bmi2 cmov crc32 cx16 cx8 f16c fma fxsr lzcnt mmx movbe popcnt sahf sse sse2 sse3 sse4.1 sse4.2 "
    "ssse3 xsave"
)
X86_64_V4_FEATURES = f"{X86_64_V3_FEATURES} avx512bw avx512cd avx512dq avx512f avx512vl"


def _make_target(name: str, triple: str, cpu: str, features: str) -> Target:
    return Target(name, triple, cpu, MappingProxyType(dict.fromkeys(features.split(), True)))


PRECOMPILED_TARGETS = (
    _make_target(
        "avx512-vnni-bf16", "x86_64-unknown-linux-gnu", "x86-64-v4", f"{X86_64_V4_FEATURES} avx512vnni avx512bf16"
    ),
    _make_target("x86-64-v3", "x86_64-unknown-linux-gnu", "x86-64-v3", X86_64_V3_FEATURES),
    _make_target("aarch64", "aarch64-unknown-linux-gnu", "generic", "fp-armv8 neon"),
)
"""Targets with kernels in the Linux wheels, the best first."""


@cache
def find_host_or_requested_target() -> Target:
    """Return the target for which kernels are compiled: the host, or the target of ``HOCKET_TARGET``.

    Raises `BackendError` for a name that is not in `PRECOMPILED_TARGETS`.
    """
    if asked := os.environ.get("HOCKET_TARGET"):
        known = {t.name: t for t in PRECOMPILED_TARGETS}
        if asked not in known:
            raise BackendError(f"HOCKET_TARGET is {asked!r:.60}; one of {', '.join(known)}, or leave it out")
        return known[asked]
    without = tuple(name for name in os.environ.get("HOCKET_WITHOUT", "").split(",") if name)
    host = _find_host_cpu()
    features = MappingProxyType({n: there and not n.startswith(without) for n, there in host.features.items()})
    what = (host.cpu, sorted(features.items()), os.environ.get("HOCKET_AMX", ""))  # all that code depends on
    digest = hashlib.sha256(repr(what).encode()).hexdigest()
    return Target(f"{host.cpu}-{digest[:12]}", host.triple, host.cpu, features)


class HostCpu(NamedTuple):
    """The processor of this machine in LLVM's terms."""

    triple: str
    cpu: str
    features: Mapping[str, bool]


@cache
def _find_host_cpu() -> HostCpu:
    """Return the processor of this machine.

    The description comes from LLVM or from the cache of an earlier process. To load LLVM takes 40 MB of memory.
    """
    return HostCpu(**json.loads(read_cached_or_make(_find_host_cpu_cache_file(), _describe_host_cpu)))


def _describe_host_cpu() -> bytes:
    import llvmlite.binding as llvm

    host = HostCpu(llvm.get_default_triple(), str(llvm.get_host_cpu_name()), dict(llvm.get_host_cpu_features()))
    return json.dumps(host._asdict()).encode()


def _find_host_cpu_cache_file() -> Path | None:
    """Return the cache file for LLVM's description of the host processor.

    The result is None without ``/proc/cpuinfo``.
    """
    try:
        first = Path("/proc/cpuinfo").read_text("utf-8", "replace").partition("\n\n")[0]
    except OSError:
        return None
    cpu_lines = [
        line for line in first.splitlines() if not line.startswith(("cpu MHz", "bogomips", "apicid", "core id"))
    ]
    return make_cache_path("processors", cpu_lines, platform.machine(), llvmlite.__version__, HostCpu._fields)


def list_runnable_precompiled_targets() -> tuple[Target, ...]:
    """Return the targets of the precompiled kernels that this processor can run, the compile target first."""
    mine = find_host_or_requested_target()
    others = (t for t in PRECOMPILED_TARGETS if sys.platform == "linux" and t != mine and t.can_run_on(mine))
    return (mine, *others)


def is_target_of_host_architecture() -> bool:
    """Return whether the compile target has the architecture of this machine."""
    return find_host_or_requested_target().triple.partition("-")[0] == _find_host_cpu().triple.partition("-")[0]


AMX, EMULATED = "amx", "emulated"
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILES = 158, 0x1023, 18
"""A system call of Linux on x86-64, the code of a permission request, and the number of the tile registers."""


@cache
def find_native_or_emulated_amx() -> str | None:
    """Return how kernels may use AMX tiles: `AMX` (instructions), `EMULATED` (plain vector code), or None."""
    if asked := os.environ.get("HOCKET_AMX"):
        if asked != EMULATED:
            raise BackendError(f"HOCKET_AMX is {asked!r:.60}; it may be {EMULATED}, or leave it out")
        return EMULATED
    there = all(find_features_of_compile_target().get(name) for name in ("amx-tile", "amx-bf16", "avx512bf16"))
    return AMX if there and is_target_of_host_architecture() and _request_amx_permission() else None


def _request_amx_permission() -> bool:
    """Request permission for AMX tile registers from Linux, and return whether Linux gave it.

    Linux saves the tile registers only for processes that ask.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILES) == 0


def find_features_of_compile_target() -> Mapping[str, bool]:
    """Return a dict from the LLVM name of each CPU feature to whether kernels for the compile target may use it."""
    return find_host_or_requested_target().features
