"""From a source of kernels to a library: g++ compiles it once a machine, a folder keeps it."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ....graph.errors import BackendError
from ...cache import COMPILED, COMPILING, cache_folder
from ...once import once
from ..device.driver import Source

HEADER_FOLDER = Path(__file__).parent
GXX_OPTIONS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fopenmp", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w")
"""With -O2 a kernel takes half as long again to compile and a tenth less to run, and most run a few times."""
CHECK_OPTIONS = ("-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error")
"""What a device traps, or would not notice, and cuda.h reports."""
ACCESS_HOOK_OPTIONS = (
    *("-g1", "-fsanitize=kernel-address", "-fno-tree-sra", "-fno-tree-vectorize"),
    *("--param", "asan-instrumentation-with-call-threshold=0", "--param", "asan-stack=0", "--param", "asan-globals=0"),
)
"""In place of the checks: a call for each load and store, which keeps the width that the source gives it."""
COUNTER_OPTIONS = (*ACCESS_HOOK_OPTIONS, '-DHOCKET_SEEN="counters.h"')
ACCESS_LOG_OPTIONS = (*ACCESS_HOOK_OPTIONS, '-DHOCKET_SEEN="order.h"')
STDIN_OPTIONS = (f"-I{HEADER_FOLDER}", "-x", "c++", "-")
PRECOMPILED_HEADER = "cuda.h.gch"
"""The precompiled header that every source includes."""
LOCK_FILE = ".lock"
log = logging.getLogger("hocket.kernels")
_build_lock = threading.Lock()


def require_compiler() -> str:
    """The path of g++.  Raises `BackendError` if there is none."""
    path = shutil.which("g++")
    if path is None:
        raise BackendError(
            "emulated devices compile their kernels with g++, which is not installed; install g++ 12 or newer"
        )
    return path


def to_cpp(source: Source) -> str:
    """The C++ of a source: one C function for each instantiation, ``launch_0``, ``launch_1``, ..."""
    entries = (
        f'extern "C" void launch_{i}(const emulation::Launch *l, emulation::Report *r)'
        f" {{ emulation::launch(&{name}, *l, *r); }}\n"
        for i, name in enumerate(source.names)
    )
    return f'#include "cuda.h"\n{source.text}\n#line 1 "launches"\n{"".join(entries)}'


@once
def load_library(source: Source, extra: tuple[str, ...] = CHECK_OPTIONS) -> ctypes.CDLL:
    """The compiled library of a source, checked or counted.  Raises `BackendError` with the first error of the
    compiler."""
    return _load_or_rebuild(
        source.file, to_cpp(source), (*GXX_OPTIONS, *extra), (f"-I{_build_headers(extra)}", *STDIN_OPTIONS)
    )


@once
def load_race_detector() -> ctypes.CDLL:
    """The compiled code that finds accesses in no order."""
    file = HEADER_FOLDER / "disorder.cpp"
    return _load_or_rebuild(file.name, file.read_text("utf-8"), GXX_OPTIONS, STDIN_OPTIONS)


def _load_or_rebuild(file: str, text: str, options: tuple[str, ...], inputs: tuple[str, ...]) -> ctypes.CDLL:
    with _build_lock:
        path = _build(file, text, options, inputs)
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # damaged
            path.unlink()
            return ctypes.CDLL(str(_build(file, text, options, inputs)))


@once
def _build_headers(extra: tuple[str, ...]) -> Path:
    """The folder of the precompiled header."""
    with _build_lock:
        return _build(
            PRECOMPILED_HEADER, "", (*GXX_OPTIONS, *extra), ("-x", "c++-header", str(HEADER_FOLDER / "cuda.h"))
        ).parent


@cache
def _read_build_inputs(command: str, options: tuple[str, ...]) -> bytes:
    """Everything besides the source that decides its code."""
    version = subprocess.run([command, "--version"], capture_output=True, check=True).stdout
    return b"\0".join((*(h.read_bytes() for h in sorted(HEADER_FOLDER.glob("*.h"))), version, repr(options).encode()))


def _build(file: str, text: str, options: tuple[str, ...], inputs: tuple[str, ...]) -> Path:
    """`inputs` say where g++ finds the text and its headers, whose contents are part of the key."""
    command = require_compiler()
    key = hashlib.sha256(_read_build_inputs(command, options) + text.encode()).hexdigest()
    name = Path(key[:32], file) if file == PRECOMPILED_HEADER else f"{Path(file).stem}-{key[:32]}.so"
    target = cache_folder() / "emulated" / name
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        (target.parent / LOCK_FILE).touch()
    except OSError:  # it cannot be kept
        target = Path(tempfile.mkdtemp(prefix="hocket-")) / target.name
    with _lock_build(target.parent, int(key[:8], 16)):
        if not target.exists():  # no other process was first
            _run_compiler(file, (command, *options, *inputs), text, target)
    return target


@contextmanager
def _lock_build(folder: Path, number: int) -> Iterator[None]:
    """No other process is here for the same folder and number."""
    with open(folder / LOCK_FILE, "ab") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, number)
        yield


def _run_compiler(file: str, command: Sequence[str], text: str, target: Path) -> None:
    log.info(COMPILING, file)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        done = subprocess.run([*command, "-o", str(made)], input=text, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise BackendError(f"{file} does not compile: {errors[0] if errors else 'g++ gives no reason'}")
        os.replace(made, target)  # other processes see all of it or nothing
    log.info(COMPILED, file)
