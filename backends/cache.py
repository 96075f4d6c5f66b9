"""The disk cache for later processes, such as kernels and plans: its folder, its size limit and its log messages."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..graph.files import PRIVATE, replacing

COMPILING_MESSAGE, COMPILED_MESSAGE = "compiling %s", "compiled %s"
"""Logged at level INFO before and after a kernel is compiled."""
MISSING_KERNELS_MESSAGE = "%d kernels to compile"
"""Logged at level INFO before several kernels are compiled."""
UNWRITABLE_FOLDER_MESSAGE = (
    "kernels and plans cannot be kept in %s (%s), so each start makes them anew; choose another --cache-dir"
)
"""Logged once, at level WARNING."""
CACHE_FOLDERS = ("bindings", "cubins", "kernels", "merges", "plans", "processors")
"""Folders with files that can be created again."""
MAX_CACHE_BYTES = 512 << 20
"""Maximum bytes of all cached files; the least recently used files are deleted."""
REUSE_MARK_SECONDS = 86_400
"""Seconds after which a file that is read is marked as used again."""
DIGEST_BYTES = 32
"""Bytes of the digest at the start of each file."""
log = logging.getLogger("hocket.kernels")


def cache_folder() -> Path:
    """Return the root of the cache: $HOCKET_CACHE_DIR, else the cache folder of the user."""
    if chosen := os.environ.get("HOCKET_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hocket"


def read_cached(file: Path) -> bytes | None:
    """Return the data that `write_cached` wrote; None if the file is missing, damaged or renamed."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    if _compute_digest(file, data[DIGEST_BYTES:]) != data[:DIGEST_BYTES]:
        return None
    with suppress(OSError):  # a folder that cannot be written is only read
        if time.time() - file.stat().st_mtime > REUSE_MARK_SECONDS:
            os.utime(file)
    return data[DIGEST_BYTES:]


def write_cached(file: Path, data: bytes) -> None:
    """Write data for later processes; if the folder cannot be written, log that once.

    The file is written under another name and then renamed, so that several processes may write it at the same time.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(file, mode=PRIVATE) as whole:
            whole.write(_compute_digest(file, data) + data)
    except OSError as why:
        _warn_unwritable_once(str(file.parent.parent), why.strerror or str(why))
        return
    if file.parent.parent == cache_folder():
        evict_oldest_files(cache_folder(), MAX_CACHE_BYTES)


@cache
def evict_oldest_files(folder: Path, max_bytes: int) -> None:
    """Delete the least recently used files until at most `max_bytes` bytes are left.

    A process does this when it first writes a file, so its own files may exceed the limit. Other processes may delete
    and read at the same time. A file that is open stays readable, and a missing file is created again.
    """
    files: list[tuple[float, int, str]] = []
    for room in CACHE_FOLDERS:
        with suppress(OSError), os.scandir(folder / room) as entries:
            for entry in entries:
                with suppress(OSError):  # another process was quicker
                    of = entry.stat(follow_symlinks=False)
                    files.append((of.st_mtime, of.st_size, entry.path))
    excess = sum(size for _, size, _ in files) - max_bytes
    for _, size, path in sorted(files):
        if excess <= 0:
            break
        with suppress(OSError):
            os.unlink(path)
        excess -= size


def _compute_digest(file: Path, data: bytes) -> bytes:
    """Return the digest of the data and the file name, which identifies the purpose of the data."""
    from hashlib import sha256  # loads OpenSSL, which `import hocket` need not do

    return sha256(file.name.encode() + b"\0" + data).digest()


@cache
def _warn_unwritable_once(folder: str, why: str) -> None:
    log.warning(UNWRITABLE_FOLDER_MESSAGE, folder, why)
