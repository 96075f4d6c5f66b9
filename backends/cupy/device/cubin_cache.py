"""Caches compiled kernels on disk, so that a machine compiles a source once per architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

from ....graph.storage.disk_cache import make_cache_path, read_cached_or_make
from ...compile_log import log_compilation
from . import nvrtc
from .driver import KernelSource


class CompilerOutput(Protocol):
    """The output of a compiler module: machine code and mangled kernel names."""

    @property
    def image(self) -> bytes:
        """The machine code."""

    @property
    def mangled_names(self) -> Mapping[str, str]:
        """The mangled name of each requested kernel; keys are the C++ expressions of the kernels."""


class CompilerModule(Protocol):
    """The interface of a compiler module: `nvrtc` or `hiprtc`."""

    @property
    def OPTIONS(self) -> tuple[str, ...]:  # noqa: N802
        """Compiler options, without the architecture."""

    def version(self) -> tuple[int, int]:
        """Return the version of the compiler library."""

    def compile(self, source: KernelSource, arch: str) -> CompilerOutput:
        """Compile a source for an architecture, or raise `BackendError`."""


def load_or_compile_cubin(
    source: KernelSource, arch: str, compiler: CompilerModule = nvrtc
) -> tuple[bytes, dict[str, str]]:
    """Return the machine code of a source from the disk cache; if it is not there, compile the source and store it.

    Args:
        source: The source.
        arch: The architecture, such as ``sm_90a``.
        compiler: The compiler module.

    Returns:
        The machine code, and the mangled name of each kernel.

    Raises:
        BackendError: The source does not compile.
    """

    def compile_source() -> bytes:
        with log_compilation(source.file):
            compiled = compiler.compile(source, arch)
        return json.dumps(dict(compiled.mangled_names)).encode() + b"\n" + compiled.image

    file = make_cache_path("cubins", source.text, source.names, arch, compiler.version(), compiler.OPTIONS)
    names, image = read_cached_or_make(file, compile_source).split(b"\n", 1)
    return image, json.loads(names)
