"""Atomic writes of files; only a plain file is ever replaced.

Every module of the package that writes a file calls this one; a test searches the sources for others.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PUBLIC, PRIVATE = 0o666, 0o600
"""Modes of a new file before the umask: for all users, and for its owner only."""
BEFORE_NAME = ".hocket-"
"""The prefix of the names of unfinished files."""


@contextmanager
def replacing(path: str | Path, *, mode: int = PUBLIC, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` once it is complete; after an error nothing has changed.

    A symbolic link is followed, and an existing file keeps its mode. A pipe or a device such as /dev/null is written
    to, never replaced.

    Args:
        path: The file to write.
        mode: The mode of a new file, before the umask.
        durable: Whether the bytes are on the disk before the file has its name, so that a crash leaves no empty file.

    Raises:
        OSError: The file cannot be written; the error names `path`.
    """
    part = None
    try:
        target, known = _resolve(path)
        if target is None:
            with open(path, "wb") as file:
                yield file
            return
        part = _open_beside(target, mode, known)
        with part:
            yield part
            if durable:
                part.flush()
                os.fsync(part.fileno())
        os.replace(part.name, target)
    except BaseException as error:
        if part is not None:
            with suppress(OSError):
                os.unlink(part.name)
        if isinstance(error, OSError):
            _set_filename(error, path)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8 in place of `path`, as `replacing` does. Raises `OSError`."""
    with replacing(path) as file:
        file.write(text.encode())


def check_writable(path: str | Path) -> None:
    """Raise `OSError` before the work, not after it, if `replacing` cannot write a file. Nothing changes.

    A pipe is not opened, since that waits for a reader.
    """
    try:
        target, known = _resolve(path)
        if target is not None:
            part = _open_beside(target, PRIVATE, known)
            part.close()
            os.unlink(part.name)
        elif known is None or not stat.S_ISFIFO(known.st_mode):
            open(path, "ab").close()
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        _set_filename(error, path)
        raise


def _resolve(path: str | Path) -> tuple[str | None, os.stat_result | None]:
    """Return the plain file or free name at the end of all links, None for others, and the status of an existing file.

    Links such as /dev/stdout may lead to a pipe or a deleted file, which no path names. Raises `OSError`.
    """
    target = os.path.realpath(path)
    try:
        known = os.stat(path)
    except FileNotFoundError:
        return target, None
    with suppress(OSError):
        if stat.S_ISREG(known.st_mode) and os.path.samestat(known, os.stat(target)):
            return target, known
    return None, known


def _open_beside(target: str, mode: int, known: os.stat_result | None) -> BinaryIO:
    """Open a new file in the folder of `target`, which becomes `target` by a rename. Raises `OSError`."""
    if known is not None:
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), target)
        mode = stat.S_IMODE(known.st_mode)
    name = os.path.join(os.path.dirname(target), f"{BEFORE_NAME}{os.urandom(8).hex()}.part")
    file = open(name, "xb", opener=lambda path, flags: os.open(path, flags, mode))  # noqa: SIM115  # the caller closes it
    if known is not None and stat.S_IMODE(os.fstat(file.fileno()).st_mode) != mode:  # the umask took some of it
        os.fchmod(file.fileno(), mode)
    return file


def _set_filename(error: OSError, path: str | Path) -> None:
    """Let an error name `path`: a full disk names no file, and other errors an unfinished one."""
    named = str(error.filename)
    if error.filename is None or named == os.path.realpath(path) or os.path.basename(named).startswith(BEFORE_NAME):
        error.filename = str(path)
        del error.filename2  # None would be a part of the message
