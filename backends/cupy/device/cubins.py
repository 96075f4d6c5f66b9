"""Caches compiled kernels on disk, so that a machine compiles a source once per architecture."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ...cache import COMPILED, COMPILING, cache_folder, keep, recalled
from . import nvrtc
from .driver import Source

log = logging.getLogger("hocket.kernels")


class Made(Protocol):
    """The output of a compiler."""

    @property
    def image(self) -> bytes:
        """Machine code."""

    @property
    def lowered(self) -> Mapping[str, str]:
        """The mangled name of each requested kernel name."""


class Compiler(Protocol):
    """The interface of the modules `nvrtc` and `hiprtc`."""

    @property
    def OPTIONS(self) -> tuple[str, ...]:  # noqa: N802
        """Compiler options, without the architecture."""

    def version(self) -> tuple[int, int]:
        """Return the version of the compiler library."""

    def compile(self, source: Source, arch: str) -> Made:
        """Compile a source, or raise `BackendError`."""


def cubin(source: Source, arch: str, compiler: Compiler = nvrtc) -> tuple[bytes, dict[str, str]]:
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
    target = _file(source, arch, compiler)
    if (kept := recalled(target)) is not None:
        names, image = kept.split(b"\n", 1)
        return image, json.loads(names)
    log.info(COMPILING, source.file)
    made = compiler.compile(source, arch)
    log.info(COMPILED, source.file)
    names = json.dumps(dict(made.lowered)).encode()
    keep(target, names + b"\n" + made.image)
    return made.image, dict(made.lowered)


def _file(source: Source, arch: str, compiler: Compiler) -> Path:
    """Return the cache path. Its name depends on everything that determines the code."""
    parts = (source.text, *source.names, arch, repr(compiler.version()), *compiler.OPTIONS)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache_folder() / "cubins" / f"{Path(source.file).stem}-{arch}-{key[:32]}.cubin"
