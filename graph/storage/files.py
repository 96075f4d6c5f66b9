"""Atomic writes: a file is replaced only after its new content is complete. Pipes and devices are never replaced.

Every module of the package that writes a file calls this module; a test searches the sources for other writes.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO, cast

PUBLIC, PRIVATE = 0o666, 0o600
"""Modes of a new file before the umask: for all users, and for its owner only."""
UNFINISHED_FILE_PREFIX = ".hocket-"
"""The prefix of the names of unfinished files."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""The signals that end a process without an exception, so that no context of Python ends."""
_unfinished_files: set[str] = set()


@contextmanager
def replacing(path: str | Path, *, mode: int = PUBLIC, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the place of `path` when the context ends without an error.

    After an error `path` is unchanged. A symbolic link is followed, and an existing file keeps its mode. A pipe or a
    device such as /dev/null is written directly.

    Args:
        path: The file to write.
        mode: The mode of a new file, before the umask.
        durable: Whether the bytes are on the disk before the file gets its name, so that a crash leaves no empty file.

    Raises:
        OSError: The file cannot be written; the error names `path`.
    """
    part = None
    try:
        target, known = _resolve_file_or_unused_path(path)
        if target is None:
            with open(path, "wb") as file:
                yield file
            return
        part = _open_temporary_file(target, mode, known)
        with _removed_at_stop_signal(part.name):
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
            _set_error_filename(error, path)
        raise


@contextmanager
def _removed_at_stop_signal(name: str) -> Iterator[None]:
    """Remove the unfinished file `name` if a stop signal ends this process during the context.

    Only a context of the main thread can handle signals; it removes the files of other threads too. A signal for which
    the program has a handler is left to that handler.
    """
    process = os.getpid()

    def remove_files_and_end(number: int, frame: FrameType | None) -> None:
        for unfinished in _unfinished_files if os.getpid() == process else ():  # a forked process has its own signals
            with suppress(OSError):
                os.unlink(unfinished)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    is_main = threading.current_thread() is threading.main_thread()
    handled = [number for number in STOP_SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    _unfinished_files.add(name)
    try:
        for number in handled:
            signal.signal(number, remove_files_and_end)
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        _unfinished_files.discard(name)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8 to the file `path`, atomically as in `replacing`. Raises `OSError`."""
    with replacing(path) as file:
        file.write(text.encode())


def open_log(path: str | Path) -> BinaryIO:
    """Open a file to append lines, without a buffer; a new file is for its owner only.

    If a crash has cut the last line, a line end is added, so that the next write begins a new line.

    Raises:
        OSError: The file cannot be written; the error names `path`.
    """
    with ExitStack() as on_error:
        try:
            file = on_error.enter_context(
                open(path, "a+b", buffering=0, opener=lambda path, flags: os.open(path, flags, PRIVATE))
            )
            known = os.fstat(file.fileno())
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
            part = _open_temporary_file(target, PRIVATE, known)
            part.close()
            os.unlink(part.name)
        elif known is None or not stat.S_ISFIFO(known.st_mode):
            open(path, "ab").close()
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        _set_error_filename(error, path)
        raise


def is_same_file(path: str | Path, other: str | Path) -> bool:
    """Whether `replacing` at one path would replace the existing file at the other path."""
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


def _open_temporary_file(target: str, mode: int, existing: os.stat_result | None) -> BinaryIO:
    """Open a new temporary file in the folder of `target`; a rename makes it `target` later. Raises `OSError`.

    Args:
        target: The path of the final file.
        mode: The mode of the file, before the umask.
        existing: The status of an existing `target`, if any.
    """
    if existing is not None:
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), target)
        mode = stat.S_IMODE(existing.st_mode)
    name = os.path.join(os.path.dirname(target), f"{UNFINISHED_FILE_PREFIX}{os.urandom(8).hex()}.part")
    file = open(name, "xb", opener=lambda path, flags: os.open(path, flags, mode))  # noqa: SIM115  # the caller closes it
    if existing is not None and stat.S_IMODE(os.fstat(file.fileno()).st_mode) != mode:  # the umask took some of it
        os.fchmod(file.fileno(), mode)
    return file


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
