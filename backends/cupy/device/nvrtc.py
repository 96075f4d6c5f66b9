"""A thin wrapper of NVRTC, the CUDA compiler library, which needs neither a GPU nor CuPy."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ....graph.errors import BackendError
from ...thread_safe_cache import thread_safe_cache
from .driver import KernelSource
from .runtime_compiler import CompiledCode, RuntimeCompilerLibrary

OPTIONS = ("-std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")
NVRTC_INSTALL_HINT = "pip install nvidia-cuda-nvrtc"
MAX_BLOCK_THREADS, INFO_SECTION_PREFIX = 1024, ".nv.info."


@dataclass(frozen=True, slots=True)
class KernelResources:
    """The resources that the compiler gave to a kernel.

    - `registers`: 32-bit registers of a thread.
    - `spilled_bytes`: bytes of registers that are spilled to memory.
    - `shared_bytes`: bytes of declared shared memory, without the dynamic part that a launch adds.
    - `threads`: the maximum block size.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    threads: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """The compiled code of a source for one architecture; names and resources of kernels have C++ names as keys.

    `serialisation_warnings` are the compiler's warnings that it added waits between warpgroup products.
    """

    image: bytes
    mangled_names: Mapping[str, str]
    resources: Mapping[str, KernelResources]
    serialisation_warnings: Sequence[str]


@thread_safe_cache
def load_nvrtc() -> ctypes.CDLL:
    """Load the NVRTC library from a wheel or a CUDA toolkit. Raises `BackendError` if neither is installed."""
    if paths := list_nvrtc_libraries_newest_first():
        path = paths[0]
        for part in path.parent.glob("libnvrtc-builtins.so.*"):  # NVRTC searches for it in system folders only
            ctypes.CDLL(str(part))
        return ctypes.CDLL(str(path))
    raise BackendError(f"libnvrtc, which compiles CUDA kernels, is not installed; {NVRTC_INSTALL_HINT}")


def list_nvrtc_libraries_newest_first() -> list[Path]:
    """Return the installed NVRTC libraries, in wheels and in the system, newest first: old ones lack new devices."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    wheels = [p for f in folders for p in Path(f).glob("*/lib/libnvrtc.so.*") if ".alt." not in p.name]
    of_system = find_library("nvrtc")
    return sorted(
        (*sorted(wheels), *([Path(of_system)] if of_system else [])), key=_parse_library_version, reverse=True
    )


def _parse_library_version(path: Path) -> tuple[int, ...]:
    """Parse the version of a library from its file name, from the part after ``.so``.

    Sorting by path would be wrong, because the folders of wheels have two naming schemes.
    """
    return tuple(int(part) for part in path.name.partition(".so.")[2].split(".") if part.isdecimal())


def _make_compiler() -> RuntimeCompilerLibrary:
    return RuntimeCompilerLibrary("NVRTC", "nvrtc", "CUBIN", load_nvrtc())


def version() -> tuple[int, int]:
    return _make_compiler().version()


def compile(source: KernelSource, arch: str, options: Sequence[str] = OPTIONS) -> Cubin:
    """Compile a source for an architecture such as ``sm_90a``.

    Args:
        source: The source.
        arch: The architecture.
        options: Options of the compiler.

    Raises:
        BackendError: The source does not compile; the message has the first error.
    """
    compiled = _make_compiler().compile(source, arch, options)
    return Cubin(
        compiled.image,
        compiled.mangled_names,
        _parse_kernel_resources(compiled),
        _WAIT_WARNING_PATTERN.findall(compiled.log),
    )


_ENTRY_PATTERN = re.compile(
    r"Compiling entry function '(\w+)'"
    r".*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)
_SHARED_BYTES_PATTERN = re.compile(r"(\d+) bytes smem")
_WAIT_WARNING_PATTERN = re.compile(r"\(C75\d\d\) (.*)")


def _parse_kernel_resources(compiled: CompiledCode) -> Mapping[str, KernelResources]:
    """Parse the resources of each kernel from the log of ptxas and from the machine code."""
    called = {low: name for name, low in compiled.mangled_names.items()}
    threads, resources = read_max_block_threads(compiled.image), {}
    for entry, stores, loads, registers, rest in _ENTRY_PATTERN.findall(compiled.log):
        if entry not in called:
            continue  # a kernel that was not requested
        shared = _SHARED_BYTES_PATTERN.search(rest)
        resources[called[entry]] = KernelResources(
            int(registers),
            int(stores) + int(loads),
            int(shared[1]) if shared else 0,
            threads.get(entry, MAX_BLOCK_THREADS),
        )
    return MappingProxyType(resources)


def read_max_block_threads(image: bytes) -> Mapping[str, int]:
    """Return the maximum block size of each kernel in threads, by mangled name, from the launch bounds in a cubin.

    The sizes are attribute 5 in the ELF sections ``.nv.info``. A kernel without launch bounds is missing.
    """
    found = {}
    for name, data in _read_elf_sections(image):
        at = 0
        while name.startswith(INFO_SECTION_PREFIX) and at < len(data):
            form, attribute, size = struct.unpack_from("<BBH", data, at)
            if (form, attribute) == (4, 5):
                found[name.removeprefix(INFO_SECTION_PREFIX)] = math.prod(struct.unpack_from("<III", data, at + 4))
            at += 4 + (size if form == 4 else 0)  # other forms have a value instead of a size
    return MappingProxyType(found)


def _read_elf_sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", image, 40)
    step, count, of_names = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * step) for i in range(count)]
    names = headers[of_names][4]
    for name, _, _, _, start, size in headers:
        first = names + name
        yield image[first : image.index(b"\0", first)].decode(), image[start : start + size]
