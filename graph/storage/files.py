"""Atomic writes: a file is replaced only after its new content is complete. Pipes and devices are never replaced.

Every module of the package that writes a file calls this module; a test searches the sources for other writes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

PUBLIC, PRIVATE = 0o666, 0o600
"""Modes of a new file before the umask: for all users, and for its owner only."""
UNFINISHED_FILE_PREFIX = ".hocket-"
"""The prefix of the names of unfinished files."""
_FILE_OF_DESCRIPTOR = "/proc/self/fd/{}"
"""The path of the link to an open file, by its descriptor."""


@contextmanager
def replacing(path: str | Path, *, mode: int = PUBLIC, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a file to write that replaces `path` only when the context ends without an error, completely or not at all.

    The file has no name before that where the file system allows it, so a killed process leaves nothing. After an
    error `path` is unchanged. A symbolic link is followed, and an existing file keeps its mode. A pipe or a device
    such as /dev/null is written directly.

    Args:
        path: The file to write.
        mode: The mode of a new file, before the umask.
        durable: Whether the bytes are on the disk before the file gets its name, so that a crash leaves no empty
            file.

    Raises:
        OSError: The file cannot be written; the error names `path`.
    """
    name = None
    try:
        target, known = _resolve_file_or_unused_path(path)
        if target is None:
            with open(path, "wb") as file:
                yield file
            return
        part, name = _open_temporary_file(target, mode, known)
        with part:
            yield part
            part.flush()
            if durable:
                os.fsync(part.fileno())
            name = name or _give_temporary_name(part, os.path.dirname(target))
        os.replace(name, target)
    except BaseException as error:
        if name is not None:
            with suppress(OSError):
                os.unlink(name)
        if isinstance(error, OSError):
            _set_error_filename(error, path)
        raise


def _give_temporary_name(part: BinaryIO, folder: str) -> str:
    """Give a file that `_open_file_without_name` has opened in a folder a temporary name there, and return its path."""
    name = _make_temporary_name(folder)
    descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:  # without a descriptor of the folder, Python links to the link itself
        os.link(_FILE_OF_DESCRIPTOR.format(part.fileno()), os.path.basename(name), dst_dir_fd=descriptor)
    finally:
        os.close(descriptor)
    return name


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8 to the file `path`, atomically as in `replacing`. Raises `OSError`."""
    with replacing(path) as file:
        file.write(text.encode())


def open_log(path: str | Path) -> BinaryIO:
    """Open a file to append lines, without a buffer; a new file is for its owner only.

    If a crash has cut the last line, a line end is added, so that the next write begins a new line. A write to a full
    pipe does not wait for its reader; it returns None, or the number of bytes that it could write.

    Raises:
        OSError: The file cannot be written; the error names `path`.
    """
    with ExitStack() as on_error:
        try:
            file = on_error.enter_context(
                open(path, "a+b", buffering=0, opener=lambda path, flags: os.open(path, flags, PRIVATE))
            )
            known = os.fstat(file.fileno())
            if stat.S_ISFIFO(known.st_mode):
                os.set_blocking(file.fileno(), False)
            if stat.S_ISREG(known.st_mode) and known.st_size:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
        except OSError as error:
            _set_error_filename(error, path)
            raise
        on_error.pop_all()
    return cast(BinaryIO, file)


def require_writable(path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
    """Require that `replacing` can write the file `path`; raise `OSError` if it cannot. Nothing changes on the disk.

    Commands call this function before long work. A pipe is not opened, because opening waits for a reader.

    Args:
        path: The file to write.
        inputs: Files that the command reads; `path` must be none of them.
    """
    try:
        if any(is_same_file(path, source) for source in inputs):
            raise FileExistsError(errno.EEXIST, "would replace a file that is read here; give another file")
        target, known = _resolve_file_or_unused_path(path)
        if target is not None:
            part, name = _open_temporary_file(target, PRIVATE, known)
            with part:
                os.unlink(name or _give_temporary_name(part, os.path.dirname(target)))
        elif known is None or not stat.S_ISFIFO(known.st_mode):
            open(path, "ab").close()
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        _set_error_filename(error, path)
        raise


def open_partial_file(path: str, mode: int | None) -> BinaryIO:
    """Open a regular file to read and write that keeps its contents, without following a link; create it if needed.

    Args:
        path: The file.
        mode: The mode of the file; None for the mode of a new file of all users.

    Raises:
        OSError: The file cannot be opened, or it is no regular file of this user.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PUBLIC if mode is None else mode)
    file = os.fdopen(descriptor, "r+b")
    known = os.fstat(descriptor)
    if not stat.S_ISREG(known.st_mode) or known.st_uid != os.geteuid() or known.st_nlink > 1:
        file.close()
        raise FileExistsError(errno.EEXIST, "is no regular file of this user alone; remove it", path)
    if mode is not None:
        os.fchmod(descriptor, mode)
    return file


def find_replaced_file_and_mode(path: str | Path) -> tuple[str | None, int | None]:
    """Return the file that writing `path` replaces, after all links, and its mode if it exists.

    The file is None for a pipe or a device, which is written directly.

    Raises:
        OSError: The file exists and cannot be written.
    """
    target, known = _resolve_file_or_unused_path(path)
    if target is None or known is None:
        return target, None
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return target, stat.S_IMODE(known.st_mode)


def rename_complete_file(file: BinaryIO, name: str, target: str) -> None:
    """Give a complete file its final name, after its bytes are on the disk. Raises `OSError`."""
    file.flush()
    os.fsync(file.fileno())
    os.replace(name, target)


def is_same_file(path: str | Path, other: str | Path) -> bool:
    """Return whether two paths lead to the same existing file, so that writing one replaces the other."""
    return os.path.isfile(other) and os.path.realpath(path) == os.path.realpath(other)


def _resolve_file_or_unused_path(path: str | Path) -> tuple[str | None, os.stat_result | None]:
    """Follow all links of `path`; return the plain file or unused name at their end, and the status of that file.

    The path is None for a pipe, a device, or a deleted file behind a link such as /dev/stdout. The status is None
    without a file. Raises `OSError`.
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


def _open_temporary_file(target: str, mode: int, existing: os.stat_result | None) -> tuple[BinaryIO, str | None]:
    """Open a new temporary file in the folder of `target`; a rename makes it `target` later. Raises `OSError`.

    The second result is its path; None for a file without a name.

    Args:
        target: The path of the final file.
        mode: The mode of the file, before the umask.
        existing: The status of an existing `target`, if any.
    """
    if existing is not None:
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), target)
        mode = stat.S_IMODE(existing.st_mode)
    folder, name = os.path.dirname(target), None
    file = _open_file_without_name(folder, mode)
    if file is None:
        name = _make_temporary_name(folder)
        file = os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb")
    if existing is not None and stat.S_IMODE(os.fstat(file.fileno()).st_mode) != mode:  # the umask took some of it
        os.fchmod(file.fileno(), mode)
    return file, name


def _open_file_without_name(folder: str, mode: int) -> BinaryIO | None:
    """Open a new file without a name in a folder: it is gone when the process ends, for any reason.

    The result is None where the system or the file system has no such files.
    """
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, mode)
    except (AttributeError, OSError):  # a folder that cannot be written fails for a file with a name, too
        return None
    if not os.path.exists(_FILE_OF_DESCRIPTOR.format(descriptor)):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "wb")


def _make_temporary_name(folder: str) -> str:
    return os.path.join(folder, f"{UNFINISHED_FILE_PREFIX}{os.urandom(8).hex()}.part")


def _set_error_filename(error: OSError, path: str | Path) -> None:
    """Set the file name of an error to `path`: some errors name no file or the temporary file."""
    named = str(error.filename)
    if (
        error.filename is None
        or named == os.path.realpath(path)
        or os.path.basename(named).startswith(UNFINISHED_FILE_PREFIX)
    ):
        error.filename = str(path)
        del error.filename2  # None would be a part of the message
