"""Machine code of kernels kept on disk, so that a machine compiles a source once for each architecture."""

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
    """What a compiler made."""

    @property
    def image(self) -> bytes:
        """Machine code."""

    @property
    def lowered(self) -> Mapping[str, str]:
        """What names of the source are called in it."""


class Compiler(Protocol):
    """A module such as `nvrtc`."""

    @property
    def OPTIONS(self) -> tuple[str, ...]:  # noqa: N802
        """What it is told beside the architecture."""

    def version(self) -> tuple[int, int]:
        """Of the library."""

    def compile(self, source: Source, arch: str) -> Made:
        """Raises `BackendError`."""


def cubin(source: Source, arch: str, compiler: Compiler = nvrtc) -> tuple[bytes, dict[str, str]]:
    """The code of a source, and what each of its names is called there.  Raises `BackendError` if it does not
    compile."""
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
    """Named by everything that decides the code."""
    parts = (source.text, *source.names, arch, repr(compiler.version()), *compiler.OPTIONS)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache_folder() / "cubins" / f"{Path(source.file).stem}-{arch}-{key[:32]}.cubin"
