"""Files that a later process can complete: finished sections survive a killed process or a full disk.

Two files are in the folder of the final file until it is complete:

- ``NAME.partial`` has the bytes.
- ``NAME.partial.record`` has a first line with the key, a digest of everything that determines the bytes. Each further
  line has the end of a finished section and the SHA-256 of its bytes. The first line precedes all bytes, so files
  without it are of another program.

A later process with the same key keeps the leading sections that have the noted digests, and cuts the file after
them. So damaged or outdated partial files never become a part of the result.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from .files import find_replaced_file_and_mode, open_partial_file, rename_complete_file, replacing

MAX_NAME_BYTES = 238
"""Bytes of a file name in the name of its partial file. File systems accept 255 bytes with both suffixes."""
PARTIAL_SUFFIX, RECORD_SUFFIX = ".partial", ".record"
READ_BYTES = 1 << 20
"""Bytes that are read at a time for a digest."""
MAX_RECORD_BYTES = 1 << 24
"""Bytes of a record that are read, more than 160,000 sections need."""
RESUMABLE_ERRORS = (OSError, MemoryError, KeyboardInterrupt)
"""Errors after which partial files stay, because the same work may succeed later."""
KEY_LINE = re.compile(rb"hocket sections [0-9a-f]{64}")
SECTION_LINE = re.compile(rb"([0-9]{1,18}) ([0-9a-f]{64})")


def list_partial_files(path: str | Path) -> tuple[str, ...]:
    """Return the paths of the partial file and of its record; a pipe or a device has none.

    Raises:
        OSError: The file `path` exists and cannot be written.
    """
    target, _ = find_replaced_file_and_mode(path)
    return () if target is None else _name_partial_files(target)


def _name_partial_files(target: str) -> tuple[str, str]:
    folder, name = os.path.split(target)
    partial = os.path.join(folder, os.fsdecode(os.fsencode(name)[:MAX_NAME_BYTES]) + PARTIAL_SUFFIX)
    return partial, partial + RECORD_SUFFIX


class ResumableFile:
    """A file of sections that are written in a fixed order; the first `finished_sections` of them are written.

    Attributes:
        finished_sections: Number of complete sections, which the caller leaves out.
        is_restarted: Whether partial files were found that have no intact section of this key.
    """

    def __init__(
        self, file: BinaryIO, record: BinaryIO | None = None, finished_sections: int = 0, *, is_restarted: bool = False
    ) -> None:
        self.finished_sections, self.is_restarted = finished_sections, is_restarted
        self._file, self._record, self._digest = file, record, sha256()

    @property
    def is_resumable(self) -> bool:
        """Whether finished sections survive; sections of a pipe or a device do not."""
        return self._record is not None

    def write(self, data: bytes | memoryview) -> None:
        """Write bytes of the present section. Raises `OSError`."""
        self._file.write(data)
        if self._record is not None:
            self._digest.update(data)

    def finish_section(self) -> None:
        """Note in the record that the present section is complete; the next write begins another one.

        Raises:
            OSError: The bytes cannot be written.
        """
        if self._record is not None:
            self._file.flush()
            self._record.write(b"%d %s\n" % (self._file.tell(), self._digest.hexdigest().encode()))
            self._record.flush()
            self._digest = sha256()
        self.finished_sections += 1


@contextmanager
def resuming(path: str | Path, key: str) -> Iterator[ResumableFile]:
    """Open a file in sections that replaces `path` only when the context ends without an error.

    After an error of `RESUMABLE_ERRORS`, or if the process is killed, finished sections stay in partial files. The
    next call with the same key continues after them. After another error, nothing stays. Links, modes, pipes and
    devices are treated as in `replacing`; a pipe or a device cannot be resumed.

    Args:
        path: The file to write.
        key: SHA-256, in hexadecimal digits, of everything that determines the bytes of the file.

    Raises:
        OSError: The file cannot be written, another process is writing it, or a file of another program has the name of
            a partial file.
    """
    target, mode = find_replaced_file_and_mode(path)
    if target is None:
        with replacing(path) as file:
            yield ResumableFile(file)
        return
    names = _name_partial_files(target)
    with ExitStack() as stack:
        file = stack.enter_context(_open_locked(names[0], mode))
        record = stack.enter_context(open_partial_file(names[1], mode))
        resumable = _continue_after_intact_sections(file, record, f"hocket sections {key}".encode(), names)
        try:
            yield resumable
            rename_complete_file(file, names[0], target)
            _remove(names[1:])
        except RESUMABLE_ERRORS as error:
            if not resumable.finished_sections:
                _remove(names)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(path)
            raise
        except BaseException:
            _remove(names)
            raise


def _open_locked(name: str, mode: int | None) -> BinaryIO:
    """Open a partial file that no other process has locked; raise `OSError` if one has."""
    while True:
        file = open_partial_file(name, mode)
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise OSError(errno.EBUSY, "another process is writing this file; wait for its end", name) from None
        except OSError:  # a file system without locks
            return file
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(name)):
                return file
        file.close()  # the other process has renamed the file before this one had the lock


def _continue_after_intact_sections(
    file: BinaryIO, record: BinaryIO, key_line: bytes, names: tuple[str, str]
) -> ResumableFile:
    """Cut both files after the last intact section, and return the file at this position."""
    record_bytes = min(MAX_RECORD_BYTES, os.fstat(record.fileno()).st_size)  # Python allocates all that it may read
    first, *lines = record.read(record_bytes).split(b"\n")
    has_bytes, has_key = os.fstat(file.fileno()).st_size > 0, KEY_LINE.fullmatch(first) is not None
    if not has_key and (has_bytes or first or lines):
        raise FileExistsError(errno.EEXIST, "is not of an interrupted run; remove it", names[0 if has_bytes else 1])
    end, intact_lines = 0, [key_line]
    if first == key_line:
        for line in lines:
            match = SECTION_LINE.fullmatch(line)
            if match is None or _compute_digest(file, end, int(match[1])) != match[2]:
                break
            end = int(match[1])
            intact_lines.append(line)
    file.seek(end)
    file.truncate()
    record.seek(0)  # a record without its first line, as after a truncation to 0 bytes, would be refused later
    record.write(b"\n".join(intact_lines) + b"\n")
    record.truncate()
    record.flush()
    return ResumableFile(file, record, len(intact_lines) - 1, is_restarted=has_key and len(intact_lines) == 1)


def _compute_digest(file: BinaryIO, start: int, end: int) -> bytes | None:
    """Return the SHA-256 of the bytes from `start` to `end` in hexadecimal digits; None if the file ends before."""
    file.seek(start)
    digest, left = sha256(), end - start
    while left > 0:
        data = file.read(min(left, READ_BYTES))
        if not data:
            return None
        digest.update(data)
        left -= len(data)
    return digest.hexdigest().encode() if left == 0 else None


def _remove(names: tuple[str, ...]) -> None:
    for name in names:
        with suppress(OSError):
            os.unlink(name)
