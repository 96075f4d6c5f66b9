"""Machine code of kernels kept on disk, so that a machine compiles a source once for each architecture."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from ...cache import COMPILED, COMPILING, cache_folder
from . import nvrtc
from .driver import Source

log = logging.getLogger("hocket.kernels")


def cubin(source: Source, arch: str) -> tuple[bytes, dict[str, str]]:
    """The code of a source, and what each of its names is called there.  Raises `BackendError` if it does not
    compile."""
    target = _file(source, arch)
    with suppress(OSError, ValueError):
        digest, names, image = target.read_bytes().split(b"\n", 2)
        if hashlib.sha256(names + image).hexdigest().encode() == digest:
            return image, json.loads(names)
    log.info(COMPILING, source.file)
    made = nvrtc.compile(source, arch)
    log.info(COMPILED, source.file)
    names = json.dumps(dict(made.lowered)).encode()
    _store(target, b"\n".join((hashlib.sha256(names + made.image).hexdigest().encode(), names, made.image)))
    return made.image, dict(made.lowered)


def _file(source: Source, arch: str) -> Path:
    """Named by everything that decides the code."""
    parts = (source.text, *source.names, arch, repr(nvrtc.version()), *nvrtc.OPTIONS)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache_folder() / "cubins" / f"{Path(source.file).stem}-{arch}-{key[:32]}.cubin"


def _store(target: Path, data: bytes) -> None:
    """Keep it for later processes, if the folder can be written."""
    with suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, target)
