"""A thin layer over NVRTC, the CUDA compiler as a library: it needs neither a GPU nor CuPy."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ....graph.errors import BackendError
from ...once import once
from .driver import Source
from .rtc import Compiler

OPTIONS = ("-std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")
INSTALL = "pip install nvidia-cuda-nvrtc"


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread of a kernel takes, and one block: 32-bit registers, bytes spilled from them to memory, bytes of
    shared memory that are declared (what a launch sizes comes on top)."""

    registers: int
    spilled: int
    shared: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """The code of a source for one architecture; names and resources by the names of the source."""

    image: bytes
    lowered: Mapping[str, str]
    resources: Mapping[str, Resources]


@once
def nvrtc() -> ctypes.CDLL:
    """The library, from its wheel or from a CUDA toolkit.  Raises `BackendError` if neither is installed."""
    if paths := installed():
        path = paths[0]
        for part in path.parent.glob("libnvrtc-builtins.so.*"):  # it looks for this in system folders only
            ctypes.CDLL(str(part))
        return ctypes.CDLL(str(path))
    raise BackendError(f"libnvrtc, which compiles CUDA kernels, is not installed; {INSTALL}")


def installed() -> list[Path]:
    """Libraries in the wheels of NVIDIA, and that of the system, newest first: an old one does not know new devices."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    wheels = [p for f in folders for p in Path(f).glob("*/lib/libnvrtc.so.*") if ".alt." not in p.name]
    of_system = find_library("nvrtc")
    return sorted((*sorted(wheels), *([Path(of_system)] if of_system else [])), key=_release, reverse=True)


def _release(path: Path) -> tuple[int, ...]:
    """The numbers behind ``.so``: folders of wheels are named by two customs, of which the older sorts higher."""
    return tuple(int(part) for part in path.name.partition(".so.")[2].split(".") if part.isdecimal())


def _compiler() -> Compiler:
    return Compiler("NVRTC", "nvrtc", "CUBIN", nvrtc())


def version() -> tuple[int, int]:
    return _compiler().version()


def compile(source: Source, arch: str, options: Sequence[str] = OPTIONS) -> Cubin:
    """Machine code for `arch`, such as ``sm_90a``.  Raises `BackendError` with the compiler's first error."""
    made = _compiler().compile(source, arch, options)
    return Cubin(made.image, made.lowered, _resources(made.log, made.lowered))


_ENTRY = re.compile(
    r"Compiling entry function '(\w+)'"
    r".*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)
_SHARED = re.compile(r"(\d+) bytes smem")


def _resources(log: str, lowered: Mapping[str, str]) -> Mapping[str, Resources]:
    """What ptxas says of each kernel."""
    called = {low: name for name, low in lowered.items()}
    resources = {}
    for entry, stores, loads, registers, rest in _ENTRY.findall(log):
        if entry not in called:
            continue  # a kernel of the file that is not asked for
        shared = _SHARED.search(rest)
        resources[called[entry]] = Resources(int(registers), int(stores) + int(loads), int(shared[1]) if shared else 0)
    return MappingProxyType(resources)
