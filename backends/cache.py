"""What is kept on disk for later processes, as kernels and plans: where, how much, and what is said about it."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..graph.files import PRIVATE, replacing

COMPILING, COMPILED = "compiling %s", "compiled %s"
"""What is logged, at level INFO, before and after a kernel is compiled."""
MISSING = "%d kernels to compile"
"""And before several are."""
UNWRITABLE = "kernels and plans cannot be kept in %s (%s), so each start makes them anew; choose another --cache-dir"
"""At level WARNING, once."""
ROOMS = ("bindings", "cubins", "kernels", "merges", "plans", "processors")
"""Folders of what can be made anew."""
MOST = 512 << 20
"""Bytes that are kept there in all; what has been used least lately makes room."""
DAY = 86_400
"""Seconds after which a file that is read is marked as used again."""
CHECK = 32
"""Bytes of the digest before what is kept."""
log = logging.getLogger("hocket.kernels")


def cache_folder() -> Path:
    """Where all of it is kept: $HOCKET_CACHE_DIR, else the user's cache folder."""
    if chosen := os.environ.get("HOCKET_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hocket"


def recalled(file: Path) -> bytes | None:
    """What `keep` put there; None if there is nothing, or it is damaged, or was kept under another name."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    if _digest(file, data[CHECK:]) != data[:CHECK]:
        return None
    with suppress(OSError):  # a folder that cannot be written is only read
        if time.time() - file.stat().st_mtime > DAY:
            os.utime(file)
    return data[CHECK:]


def keep(file: Path, data: bytes) -> None:
    """Keep data for later processes, if the folder can be written; if not, that is said once.

    It is written beside and renamed, so that any number of processes may do so at once.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(file, mode=PRIVATE) as whole:
            whole.write(_digest(file, data) + data)
    except OSError as why:
        _say_unwritable(str(file.parent.parent), why.strerror or str(why))
        return
    if file.parent.parent == cache_folder():
        make_room(cache_folder(), MOST)


@cache
def make_room(folder: Path, most: int) -> None:
    """Leave out what has been used least lately, until so many bytes are left: at the first thing that a process keeps,
    so what it keeps itself may lie beyond.  Others may do the same, and read meanwhile: what they open stays readable,
    and what they miss they make anew."""
    files: list[tuple[float, int, str]] = []
    for room in ROOMS:
        with suppress(OSError), os.scandir(folder / room) as entries:
            for entry in entries:
                with suppress(OSError):  # another process was quicker
                    of = entry.stat(follow_symlinks=False)
                    files.append((of.st_mtime, of.st_size, entry.path))
    excess = sum(size for _, size, _ in files) - most
    for _, size, path in sorted(files):
        if excess <= 0:
            break
        with suppress(OSError):
            os.unlink(path)
        excess -= size


def _digest(file: Path, data: bytes) -> bytes:
    """Of the data and the name, which says what they are for."""
    from hashlib import sha256  # loads OpenSSL, which `import hocket` need not do

    return sha256(file.name.encode() + b"\0" + data).digest()


@cache
def _say_unwritable(folder: str, why: str) -> None:
    log.warning(UNWRITABLE, folder, why)
