"""A thin layer over hiprtc, the compiler of HIP as a library: it needs neither a GPU nor CuPy."""

from __future__ import annotations

import ctypes
from dataclasses import replace

from ....graph.errors import BackendError
from ...once import once
from .driver import HIP, Source
from .rtc import Compiled, Compiler

OPTIONS = ("-std=c++17", "-O3")
FILES = ("libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6", "libamdhip64.so", "libamdhip64.so.5")
"""Where it may be, first to last: a library of its own since ROCm 5.3, a part of the runtime before."""
INSTALL = "install ROCm, or apt install libamdhip64-5"


@once
def hiprtc() -> ctypes.CDLL:
    """The library.  Raises `BackendError` if it is not installed."""
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
    """Machine code for `arch`, such as ``gfx90a``, of a source in ``hip.cuh``.  Raises `BackendError` with the
    compiler's first error."""
    return _compiler().compile(source, arch, OPTIONS)


def written(source: Source) -> Source:
    """The source in the instructions of these devices."""
    return replace(source, instructions=HIP)
