"""Compiles kernel sources with g++ to shared libraries for the emulator. The cache folder keeps the libraries."""

from __future__ import annotations

import ctypes
import fcntl
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ....graph.errors import BackendError
from ....graph.storage.disk_cache import make_cache_path
from ....graph.storage.files import replacing
from ...compile_log import log_compilation
from ...thread_safe_cache import thread_safe_cache
from ..device.driver import KernelSource

HEADER_FOLDER = Path(__file__).parent
GXX_OPTIONS = ("-std=c++17", "-Og", "-fPIC", "-shared", "-fopenmp", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w")
"""With -O1 kernels compile 35 to 60 % longer. Products run 30 % faster then, but most kernels run only a few times."""
CHECK_OPTIONS = ("-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error")
"""Options for checks of alignment and array bounds. cuda.h reports their traps."""
ACCESS_HOOK_OPTIONS = (
    *("-O1", "-g1", "-fsanitize=kernel-address", "-fno-tree-sra", "-fno-tree-vectorize"),
    *("--param", "asan-instrumentation-with-call-threshold=0", "--param", "asan-stack=0", "--param", "asan-globals=0"),
)
"""Options for a function call at each load and store, which keep the access width of the source.

They replace `CHECK_OPTIONS`. With -O1, values that a GPU has in registers are not in memory here either.
"""
COUNTER_OPTIONS = (*ACCESS_HOOK_OPTIONS, '-DHOCKET_SEEN="counters.h"')
ACCESS_LOG_OPTIONS = (*ACCESS_HOOK_OPTIONS, '-DHOCKET_SEEN="order.h"')
STDIN_OPTIONS = (f"-I{HEADER_FOLDER}", "-x", "c++", "-")
PRECOMPILED_HEADER = "cuda.h.gch"
"""The precompiled header that every source includes."""
LOCK_FILE = ".lock"
_build_lock = threading.Lock()


def require_gxx_path() -> str:
    """Require g++ and return its path. Raises `BackendError` if g++ is not installed."""
    path = shutil.which("g++")
    if path is None:
        raise BackendError(
            "emulated devices compile their kernels with g++, which is not installed; install g++ 12 or newer"
        )
    return path


def to_host_cpp(source: KernelSource) -> str:
    """Convert a kernel source to C++ for the host, with one C function per kernel: ``launch_0``, ``launch_1``, ...

    Nothing else is visible to other libraries. Otherwise device functions of one name in several libraries would share
    the memory of their declarations, although its size may differ.
    """
    entries = (
        f'extern "C" void launch_{i}(const emulation::Launch *l, emulation::Report *r)'
        f" {{ emulation::launch(&{name}, *l, *r); }}\n"
        for i, name in enumerate(source.names)
    )
    return (
        f'#include "cuda.h"\n#pragma GCC visibility push(hidden)\n{source.text}\n#pragma GCC visibility pop\n'
        f'#line 1 "launches"\n{"".join(entries)}'
    )


@thread_safe_cache
def load_emulated_library(source: KernelSource, extra: tuple[str, ...] = CHECK_OPTIONS) -> ctypes.CDLL:
    """Load the host library of a kernel source; compile the library with g++ if the cache folder does not have it.

    Args:
        source: Kernel source.
        extra: Options for checks, counters or the access log.

    Raises:
        BackendError: The source does not compile. The message has the first error of the compiler.
    """
    return _load_or_rebuild(
        source.file,
        to_host_cpp(source),
        (*GXX_OPTIONS, *extra),
        (f"-I{_find_or_build_precompiled_header(extra)}", *STDIN_OPTIONS),
    )


@thread_safe_cache
def load_race_detector() -> ctypes.CDLL:
    """Load the library of the race detector; compile the library if the cache folder does not have it."""
    file = HEADER_FOLDER / "disorder.cpp"
    return _load_or_rebuild(file.name, file.read_text("utf-8"), (*GXX_OPTIONS, "-O1"), STDIN_OPTIONS)


def _load_or_rebuild(file: str, text: str, options: tuple[str, ...], inputs: tuple[str, ...]) -> ctypes.CDLL:
    with _build_lock:
        path = _build_if_not_cached(file, text, options, inputs)
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # a damaged file
            path.unlink()
            return ctypes.CDLL(str(_build_if_not_cached(file, text, options, inputs)))


@thread_safe_cache
def _find_or_build_precompiled_header(extra: tuple[str, ...]) -> Path:
    """Build the precompiled header if the cache folder does not have it, and return its folder."""
    with _build_lock:
        return _build_if_not_cached(
            PRECOMPILED_HEADER, "", (*GXX_OPTIONS, *extra), ("-x", "c++-header", str(HEADER_FOLDER / "cuda.h"))
        ).parent


@cache
def _read_cache_key_inputs(command: str, options: tuple[str, ...]) -> bytes:
    """Return all inputs of a build except the source, as bytes for the cache key.

    These are the headers, the compiler version and the options.
    """
    version = subprocess.run([command, "--version"], capture_output=True, check=True).stdout
    return b"\0".join((*(h.read_bytes() for h in sorted(HEADER_FOLDER.glob("*.h"))), version, repr(options).encode()))


def _build_if_not_cached(file: str, text: str, options: tuple[str, ...], inputs: tuple[str, ...]) -> Path:
    """Return the path of a library or header in the cache folder; build it if it is not there.

    Args:
        file: Name of the source, for messages and for the name of the compiled file in the folder of the cache key.
        text: C++ text; empty if `inputs` names a file.
        options: Compiler options, which are part of the cache key.
        inputs: Arguments that name the input and the header folders. Header contents are part of the cache key.
    """
    command = require_gxx_path()
    name = file if file == PRECOMPILED_HEADER else f"{Path(file).stem}.so"
    target = make_cache_path("emulated", name, _read_cache_key_inputs(command, options), text) / name
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        (target.parent / LOCK_FILE).touch()
    except OSError:  # the cache folder is not writable
        target = Path(tempfile.mkdtemp(prefix="hocket-")) / target.name
    with _lock_build_folder(target.parent):
        if not target.exists():  # another process may have compiled it meanwhile
            with replacing(target) as output, tempfile.TemporaryDirectory() as folder, log_compilation(file):
                built = Path(folder) / name
                _run_compiler(file, (command, *options, *inputs, "-o", str(built)), text)
                output.write(built.read_bytes())
    return target


@contextmanager
def _lock_build_folder(folder: Path) -> Iterator[None]:
    """Lock a build folder against other processes, through its lock file."""
    with open(folder / LOCK_FILE, "ab") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _run_compiler(file: str, command: Sequence[str], text: str) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BackendError(f"{file} does not compile: {errors[0] if errors else 'g++ gives no reason'}")
