"""The disk cache: files that later processes read instead of making the same data again.

1. The path of a file has a folder for the kind of data, and a digest of the key as its name (`make_cache_path`).
2. Each file starts with a digest of its name and data. A file with a wrong digest counts as missing.
3. In a mapped file, the digest is after the data and covers the name and a note. A digest of the data would read the
   whole file.
4. A file is written under another name and then renamed, so several processes may write it at the same time.
5. If a folder cannot be written, or the disk is full, one warning is logged, and each process makes the data.
6. The least recently used files of `EVICTED_KINDS` are deleted above `MAX_CACHE_BYTES`.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from .files import PRIVATE, replacing

UNWRITABLE_FOLDER_MESSAGE = (
    "%s cannot be kept in %s (%s), so each start makes them anew; free space, or set HOCKET_CACHE_DIR"
)
"""The warning that a cache folder cannot be written."""
EVICTED_KINDS = ("bindings", "cubins", "kernels", "merges", "plans", "prefetch", "processors")
"""Kinds of small files that can be created again."""
MAX_CACHE_BYTES = 512 << 20
"""Maximum bytes of all files of `EVICTED_KINDS`."""
REUSE_MARK_SECONDS = 86_400
"""Seconds after which a file that is read is marked as used again."""
DIGEST_BYTES = 32
"""Bytes of the digest of a file."""
log = logging.getLogger("hocket.kernels")


def cache_folder() -> Path:
    """Return the root folder of the disk cache: $HOCKET_CACHE_DIR, or the folder for caches of the user."""
    if chosen := os.environ.get("HOCKET_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hocket"


def hash_key_to_file_name(*key: object) -> str:
    """Return the hash of a cache key as a file name: 40 hexadecimal digits of the SHA-256 of its `repr`."""
    from hashlib import sha256  # loads OpenSSL, which `import hocket` need not do

    return sha256(repr(key).encode()).hexdigest()[:40]


def make_cache_path(kind: str, *key: object) -> Path:
    """Return the path of the cache file for data of one kind.

    Args:
        kind: The kind of the data, which is the name of the folder.
        *key: Everything that determines the data.
    """
    return cache_folder() / kind / hash_key_to_file_name(*key)


def read_cached(file: Path) -> bytes | None:
    """Read the data of a cache file that `write_cached` wrote.

    The function returns None if the file is missing, damaged or renamed. It marks a file as used at most once a day.
    """
    try:
        data = _read_data_after_digest(file, file.read_bytes())
    except OSError:
        return None
    with suppress(OSError):  # a folder that cannot be written is only read
        if data is not None and time.time() - file.stat().st_mtime > REUSE_MARK_SECONDS:
            os.utime(file)
    return data


def write_cached(file: Path, data: bytes) -> None:
    """Write data and their digest to a cache file for later processes.

    If the folder cannot be written, one warning is logged. After the first file of a process, old files are evicted.
    """
    folder = file.parents[1]
    _write_file(file, (_compute_digest_of_name_and_data(file, data), data), "kernels and plans", folder)
    if folder == cache_folder():
        evict_longest_unused_files(folder, MAX_CACHE_BYTES)


def read_cached_or_make(file: Path | None, make: Callable[[], bytes]) -> bytes:
    """Read the data of a cache file, or make the data and write the file.

    Args:
        file: The cache file. Without a file, the data are always made.
        make: The function that makes the data.
    """
    if file is not None and (data := read_cached(file)) is not None:
        return data
    data = make()
    if file is not None:
        write_cached(file, data)
    return data


def map_cached_file(file: Path, nbytes: int) -> tuple[mmap.mmap, bytes] | None:
    """Map a cache file that `write_mappable_file` wrote into memory, and return the mapped memory and the note.

    The first `nbytes` bytes of the memory are the data. The function returns None if the file is missing, renamed, of
    another size, or damaged after the data.
    """
    try:
        with open(file, "rb") as handle:
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    note = _read_data_after_digest(file, mapped[nbytes:])
    return None if note is None else (mapped, note)


def write_mappable_file(file: Path, data: memoryview, note: bytes, content_noun: str, folder: Path) -> None:
    """Write data and a note to a cache file, in the form that `map_cached_file` maps into memory.

    The bytes are on the disk before the file gets its name.

    Args:
        file: The file to write.
        data: The data.
        note: A short text about the data.
        content_noun: A noun for the data in the warning that the file cannot be written.
        folder: The folder that the warning names.
    """
    _write_file(file, (data, _compute_digest_of_name_and_data(file, note), note), content_noun, folder, durable=True)


@cache
def evict_longest_unused_files(folder: Path, max_bytes: int) -> None:
    """Delete the least recently used cache files until the folder has at most `max_bytes` bytes.

    A process calls this function once, at its first write, so its own files may exceed the limit. Other processes may
    delete and read at the same time. An open file stays readable, and a missing file is made again.
    """
    files: list[tuple[float, int, str]] = []
    for kind in EVICTED_KINDS:
        with suppress(OSError), os.scandir(folder / kind) as entries:
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


def _write_file(
    file: Path, parts: tuple[bytes | memoryview, ...], content: str, folder: Path, *, durable: bool = False
) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(file, mode=PRIVATE, durable=durable) as whole:
            for part in parts:
                whole.write(part)
    except OSError as why:
        _warn_unwritable_once(content, str(folder), why.strerror or str(why))


def _compute_digest_of_name_and_data(file: Path, data: bytes) -> bytes:
    """Compute the digest of a cache file: the SHA-256 of its name, which depends on the key, and its data."""
    from hashlib import sha256

    return sha256(file.name.encode() + b"\0" + data).digest()


def _read_data_after_digest(file: Path, content: bytes) -> bytes | None:
    """Return the data after the digest of a cache file, or None if the digest does not match the data and file name.

    Args:
        file: The file, for its name.
        content: The digest and the data.
    """
    data = content[DIGEST_BYTES:]
    return data if _compute_digest_of_name_and_data(file, data) == content[:DIGEST_BYTES] else None


@cache
def _warn_unwritable_once(content: str, folder: str, why: str) -> None:
    log.warning(UNWRITABLE_FOLDER_MESSAGE, content, folder, why)
