"""Caches compiled kernels on disk, so that a machine compiles a source once per architecture."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ...cache import COMPILED_MESSAGE, COMPILING_MESSAGE, cache_folder, read_cached, write_cached
from . import nvrtc
from .driver import KernelSource

log = logging.getLogger("hocket.kernels")


class CompilerOutput(Protocol):
    """The output of a compiler."""

    @property
    def image(self) -> bytes:
        """Machine code."""

    @property
    def mangled_names(self) -> Mapping[str, str]:
        """The mangled name of each requested kernel name."""


class CompilerModule(Protocol):
    """The interface of the modules `nvrtc` and `hiprtc`."""

    @property
    def OPTIONS(self) -> tuple[str, ...]:  # noqa: N802
        """Compiler options, without the architecture."""

    def version(self) -> tuple[int, int]:
        """Return the version of the compiler library."""

    def compile(self, source: KernelSource, arch: str) -> CompilerOutput:
        """Compile a source, or raise `BackendError`."""


def load_or_compile_cubin(
    source: KernelSource, arch: str, compiler: CompilerModule = nvrtc
) -> tuple[bytes, dict[str, str]]:
    """Load the code of a source from the cache, or compile and store it.

    Args:
        source: The source.
        arch: The architecture, such as ``sm_90a``.
        compiler: The compiler module.

    Returns:
        The machine code, and the mangled name of each kernel.

    Raises:
        BackendError: The source does not compile.
    """
    target = _make_cache_path(source, arch, compiler)
    if (cached := read_cached(target)) is not None:
        names, image = cached.split(b"\n", 1)
        return image, json.loads(names)
    log.info(COMPILING_MESSAGE, source.file)
    compiled = compiler.compile(source, arch)
    log.info(COMPILED_MESSAGE, source.file)
    names = json.dumps(dict(compiled.mangled_names)).encode()
    write_cached(target, names + b"\n" + compiled.image)
    return compiled.image, dict(compiled.mangled_names)


def _make_cache_path(source: KernelSource, arch: str, compiler: CompilerModule) -> Path:
    """Return the cache path. Its name depends on everything that determines the code."""
    parts = (source.text, *source.names, arch, repr(compiler.version()), *compiler.OPTIONS)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache_folder() / "cubins" / f"{Path(source.file).stem}-{arch}-{key[:32]}.cubin"
