"""A thin wrapper of hiprtc, the HIP compiler library, which needs neither a GPU nor CuPy."""

from __future__ import annotations

import ctypes
from dataclasses import replace

from ....graph.errors import BackendError
from ...once import once
from .driver import HIP, Source
from .rtc import Compiled, Compiler

OPTIONS = ("-std=c++17", "-O3")
FILES = ("libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6", "libamdhip64.so", "libamdhip64.so.5")
"""Possible library files, in order of preference: until ROCm 5.2, hiprtc was a part of the runtime."""
INSTALL = "install ROCm, or apt install libamdhip64-5"


@once
def hiprtc() -> ctypes.CDLL:
    """Load the library. Raises `BackendError` if it is not installed."""
    for file in FILES:
        try:
            found = ctypes.CDLL(file)
        except OSError:
            continue
        if hasattr(found, "hiprtcCompileProgram"):
            return found
    raise BackendError(f"hiprtc, which compiles kernels for devices of AMD, is not installed; {INSTALL}")


def _compiler() -> Compiler:
    return Compiler("hiprtc", "hiprtc", "Code", hiprtc())


def version() -> tuple[int, int]:
    return _compiler().version()


def compile(source: Source, arch: str) -> Compiled:
    """Compile a source in ``hip.cuh`` for `arch`, such as ``gfx90a``. Raises `BackendError` with the first error."""
    return _compiler().compile(source, arch, OPTIONS)


def written(source: Source) -> Source:
    """Return the source with the instructions of AMD devices."""
    return replace(source, instructions=HIP)
