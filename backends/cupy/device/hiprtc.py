"""A thin wrapper of hiprtc, the HIP compiler library, which needs neither a GPU nor CuPy."""

from __future__ import annotations

import ctypes
from dataclasses import replace

from ....graph.errors import BackendError
from ...thread_safe_cache import thread_safe_cache
from .driver import HIP_HEADER, KernelSource
from .runtime_compiler import CompiledCode, RuntimeCompilerLibrary

OPTIONS = ("-std=c++17", "-O3")
LIBRARY_FILE_NAMES = ("libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6", "libamdhip64.so", "libamdhip64.so.5")
"""Possible library files, in order of preference: until ROCm 5.2, hiprtc was a part of the runtime."""
HIPRTC_INSTALL_HINT = "install ROCm, or apt install libamdhip64-5"


@thread_safe_cache
def load_hiprtc() -> ctypes.CDLL:
    """Load the hiprtc library. Raises `BackendError` if it is not installed."""
    for file in LIBRARY_FILE_NAMES:
        try:
            found = ctypes.CDLL(file)
        except OSError:
            continue
        if hasattr(found, "hiprtcCompileProgram"):
            return found
    raise BackendError(f"hiprtc, which compiles kernels for devices of AMD, is not installed; {HIPRTC_INSTALL_HINT}")


def _make_compiler() -> RuntimeCompilerLibrary:
    return RuntimeCompilerLibrary("hiprtc", "hiprtc", "Code", load_hiprtc())


def version() -> tuple[int, int]:
    return _make_compiler().version()


def compile(source: KernelSource, arch: str) -> CompiledCode:
    """Compile a source with the HIP header for an architecture such as ``gfx90a``.

    Raises:
        BackendError: The source does not compile; the message has the first error.
    """
    return _make_compiler().compile(source, arch, OPTIONS)


def prepend_hip_header(source: KernelSource) -> KernelSource:
    """Return the kernel source with the HIP header, which has the device instructions of AMD devices."""
    return replace(source, instructions=HIP_HEADER)
