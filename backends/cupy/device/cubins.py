"""Machine code of kernels kept on disk, so that a machine compiles a source once for each architecture."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from ...cache import COMPILED, COMPILING, cache_folder, keep, recalled
from . import nvrtc
from .driver import Source

log = logging.getLogger("hocket.kernels")


def cubin(source: Source, arch: str) -> tuple[bytes, dict[str, str]]:
    """The code of a source, and what each of its names is called there.  Raises `BackendError` if it does not
    compile."""
    target = _file(source, arch)
    if (kept := recalled(target)) is not None:
        names, image = kept.split(b"\n", 1)
        return image, json.loads(names)
    log.info(COMPILING, source.file)
    made = nvrtc.compile(source, arch)
    log.info(COMPILED, source.file)
    names = json.dumps(dict(made.lowered)).encode()
    keep(target, names + b"\n" + made.image)
    return made.image, dict(made.lowered)


def _file(source: Source, arch: str) -> Path:
    """Named by everything that decides the code."""
    parts = (source.text, *source.names, arch, repr(nvrtc.version()), *nvrtc.OPTIONS)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache_folder() / "cubins" / f"{Path(source.file).stem}-{arch}-{key[:32]}.cubin"
