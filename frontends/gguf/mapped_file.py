"""A file mapped into memory, and a cursor that reads its header with checks against the end of the file."""

from __future__ import annotations

import mmap
import os
import stat
import struct
from codecs import getincrementaldecoder
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError

LENGTH_FIELD = struct.Struct("<Q")
COUNT_FIELD = struct.Struct("<I")
DIRECT_READ_BYTES = 1 << 12
MAX_STRING_BYTES = 1 << 26
"""Bytes of the longest accepted string; Python may need four times as many for it."""
SCAN_BLOCK_BYTES = 1 << 18
"""Bytes that `HeaderCursor` scans at a time for the lengths of strings."""
STRINGS_PER_READ = 1 << 13
"""Strings that are read at a time; arrays for a whole vocabulary would need several times its bytes."""
DOWNLOAD_AGAIN_HINT = "download or convert the file again"


@dataclass(frozen=True, slots=True, eq=False)
class MappedFile:
    """A regular file that is mapped read-only into memory. The mapping lives as long as any array over its bytes."""

    path: Path
    data: mmap.mmap
    size: int
    modified_ns: int
    """Time of the last modification, in nanoseconds."""
    inode: str = ""
    """Device and inode number of the file; empty if unknown."""

    def release_memory(self, start: int, end: int) -> None:
        """Release the memory pages of the bytes `start` to `end`; a later read loads them from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = start // mmap.PAGESIZE * mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, start, end - start)

    def make_error(self, problem: str, remedy: str = DOWNLOAD_AGAIN_HINT) -> ModelError:
        """Make a one-line error about this file: its path, the problem and a remedy."""
        return ModelError(f"{format_name_for_message(str(self.path))}: {problem}; {remedy}")


def format_name_for_message(name: str, limit: int = 120) -> str:
    """Format a name for a one-line message, with escaped control characters and at most about `limit` characters.

    The middle of a longer name becomes an ellipsis.
    """
    if len(name) > limit:
        name = f"{name[: limit // 2]}…{name[-limit // 2 :]}"
    return name if name.isprintable() else repr(name)


def map_file(path: Path) -> MappedFile:
    """Map a regular file into memory, read-only.

    Raises:
        ModelError: The path is no regular file, is empty or cannot be opened. Pipes are refused before a read blocks.
    """
    name = format_name_for_message(str(path))
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise ModelError(f"{name}: is {kind}; give the path of a .gguf file")
        if status.st_size == 0:
            raise ModelError(f"{name}: is empty; {DOWNLOAD_AGAIN_HINT}")
        with open(path, "rb") as file:
            data, file_status = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), os.fstat(file.fileno())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(
            f"{name}: cannot be opened ({format_name_for_message(reason)}); give the path of a readable .gguf file"
        ) from error
    return MappedFile(path, data, len(data), file_status.st_mtime_ns, f"{file_status.st_dev}:{file_status.st_ino}")


class HeaderCursor:
    """A read position that moves forward through the header of a file.

    Every read raises `ModelError` if the file ends first. `section` names the current part of the file in errors.
    """

    __slots__ = ("file", "position", "section")

    def __init__(self, file: MappedFile, at: int = 0, where: str = "header") -> None:
        self.file = file
        self.position = at
        self.section = where

    def error(self, problem: str, remedy: str = DOWNLOAD_AGAIN_HINT) -> ModelError:
        return self.file.make_error(f"{self.section} {problem}", remedy)

    def skip_and_return_start(self, size: int) -> int:
        """Skip `size` bytes, and return the position of the first skipped byte from the start of the file."""
        start = self.position
        if size > self.file.size - start:
            raise self.error(f"needs {size} bytes at byte {start}, but the file ends at byte {self.file.size}")
        self.position = start + size
        return start

    def read_u32(self) -> int:
        return int(COUNT_FIELD.unpack_from(self.file.data, self.skip_and_return_start(4))[0])

    def read_u64(self) -> int:
        return int(LENGTH_FIELD.unpack_from(self.file.data, self.skip_and_return_start(8))[0])

    def read_string(self) -> str:
        """Read a string: its length as u64, then its bytes in UTF-8.

        In a short string, bytes that are not UTF-8 become U+FFFD, because a lone surrogate would fail later, far from
        the file. Such bytes occur only in damaged files. A long string that is not UTF-8 is an error: most likely its
        length is damaged, and it reaches into the weights.
        """
        size = self.read_u64()
        start = self.skip_and_return_start(size)
        if size > DIRECT_READ_BYTES:
            return self._read_long_string(start, size)
        return str(self.file.data[start : start + size], "utf-8", "replace")

    def read_strings(self, count: int) -> list[str]:
        """Read `count` strings at once, faster than by one call of `read_string` for each."""
        return [
            text
            for first in range(0, count, STRINGS_PER_READ)
            for text in self._read_short_strings(min(STRINGS_PER_READ, count - first))
        ]

    def _read_short_strings(self, count: int) -> list[str]:
        at, lengths = self.position, self._find_string_lengths(count)
        if lengths is None:
            return [self.read_string() for _ in range(count)]
        self.position += 8 * count + int(lengths.sum())
        bytes_ = np.frombuffer(self.file.data, np.uint8, self.position - at, at)
        starts = np.cumsum(lengths + 8) - lengths - 8
        keep = np.ones(len(bytes_), bool)
        for i in range(7):  # one zero byte of each length stays, as the separator before its string
            keep[starts + i] = False
        joined = bytes_[keep]
        try:
            texts = str(joined.data, "utf-8").split("\0")[1:]
        except UnicodeDecodeError:
            texts = []
        if len(texts) != count:  # damaged text, or strings that contain zeros
            self.position = at
            return [self.read_string() for _ in range(count)]
        return texts

    def _read_long_string(self, start: int, size: int) -> str:
        if size > MAX_STRING_BYTES:
            raise self.error(f"has a string of {size} bytes; at most {MAX_STRING_BYTES} are accepted")
        # The check is incremental: a failed decoding of the whole string would need its memory twice.
        check = getincrementaldecoder("utf-8")().decode
        end = start + size
        try:
            for at in range(start, end, DIRECT_READ_BYTES):
                check(self.file.data[at : min(at + DIRECT_READ_BYTES, end)], at + DIRECT_READ_BYTES >= end)
        except UnicodeDecodeError as error:
            raise self.error(f"has a string of {size} bytes that is not UTF-8 ({error.reason})") from None
        return str(memoryview(self.file.data)[start:end], "utf-8")

    def read_name(self) -> str:
        """Read the name of a metadata pair or of a tensor: UTF-8, 1 to 65,535 bytes (a limit of the specification)."""
        size = self.read_u64()
        if not 1 <= size <= 0xFFFF:
            raise self.error(f"has a name of {size} bytes; need 1 to 65,535")
        start = self.skip_and_return_start(size)
        if size > DIRECT_READ_BYTES:
            return self._read_long_string(start, size)
        try:
            return str(self.file.data[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"has a name that is not UTF-8 ({error.reason})") from None

    def skip_strings_undecoded(self, count: int) -> None:
        """Move the cursor over the next `count` strings without decoding their text.

        Each string begins with its length, so the lengths must be found one after the other. This takes most of the
        time.
        """
        lengths = self._find_string_lengths(count)
        if lengths is not None:
            self.position += 8 * count + int(lengths.sum())
            return
        data, at, last = self.file.data, self.position, self.file.size - LENGTH_FIELD.size
        length = LENGTH_FIELD.unpack_from
        for i in range(count):
            if at > last:
                raise self.error(f"ends inside string {i} of {count}, past the end of the file at {self.file.size}")
            at += 8 + length(data, at)[0]
        if at > self.file.size:
            raise self.error(f"has a last string that ends at byte {at}, but the file ends at byte {self.file.size}")
        self.position = at

    def _find_string_lengths(self, count: int) -> npt.NDArray[np.int64] | None:
        """Find the lengths in bytes of the next `count` strings at once, without a loop over them: int64[count].

        A length below 256 is one byte and seven zero bytes. So each run of seven zeros may be a length. The found
        lengths are right if each string ends where the next one starts. Example: ``03 00 00 00 00 00 00 00 61 62 63``
        is the string ``abc``.

        Returns:
            The lengths, or None if a string is empty or longer than 255 bytes, or if the file is damaged.
        """
        at, left, lengths = self.position, count, [np.zeros(0, np.int64)]
        while left:
            if at >= self.file.size:
                return None
            part = np.frombuffer(self.file.data, np.uint8, min(SCAN_BLOCK_BYTES, self.file.size - at), at)
            zeros = np.flatnonzero(part == 0)
            starts = zeros[:-6][zeros[6:] - zeros[:-6] == 6][:left] - 1
            if not len(starts) or starts[0] != 0:
                return None
            lengths.append(part[starts].astype(np.int64))
            ends = starts + 8 + lengths[-1]
            if (ends[:-1] != starts[1:]).any():
                return None
            at, left = at + int(ends[-1]), left - len(starts)
        return np.concatenate(lengths) if at <= self.file.size else None
