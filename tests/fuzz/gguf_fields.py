"""The fields of a GGUF file, with their meaning and position.

This reader is independent of the package, so that it can damage a field on purpose and read a damaged file. A file
decides the time and memory of this reader, so it reads only content that fits the file.
"""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .damage import INTEGERS, bytes_damaged

STRING, ARRAY = 8, 9
CODES = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class Field:
    """Bytes of the header with one meaning.

    Kinds: ``u32``, ``u64``, ``text`` (its length is in the 8 bytes before it) and ``number``.
    """

    kind: str
    start: int
    size: int


@dataclass(slots=True)
class Header:
    """The readable content of a file.

    Pairs are (type, value): a string is its bytes, an array is (type, [values]). Tensors are (name, shape of the
    file, ggml type, offset).
    """

    version: int = 0
    pairs: list[tuple[bytes, int, Any]] = field(default_factory=list)
    tensors: list[tuple[bytes, tuple[int, ...], int, int]] = field(default_factory=list)
    fields: list[Field] = field(default_factory=list)
    entries: list[tuple[int, int]] = field(default_factory=list)
    """Where each pair and each tensor begins and ends."""
    first_tensor: int = 0
    """How many of the entries are pairs."""
    end: int = 0
    is_whole: bool = False


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.header = data, 0, Header()

    def number(self, code: str, kind: str) -> Any:
        size = struct.calcsize(code)
        (value,) = struct.unpack_from(code, self.data, self.at)
        if len(self.header.fields) < 4096:
            self.header.fields.append(Field(kind, self.at, size))
        self.at += size
        return value

    def text(self) -> bytes:
        size = self.number("<Q", "u64")
        if size > len(self.data) - self.at:
            raise ValueError
        self.header.fields.append(Field("text", self.at, size))
        self.at += size
        return self.data[self.at - size : self.at]

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.number("<I", "u32"), self.number("<Q", "u64")
            if count > len(self.data) or depth > 8:
                raise ValueError
            return inner, [self.value(inner, depth + 1) for _ in range(count)]
        return self.number(CODES[kind], "number")

    def read(self) -> None:
        header = self.header
        self.at = 4
        header.version = self.number("<I", "u32")
        tensors, pairs = self.number("<Q", "u64"), self.number("<Q", "u64")
        for _ in range(pairs):
            start, key, kind = self.at, self.text(), self.number("<I", "u32")
            header.pairs.append((key, kind, self.value(kind)))
            header.entries.append((start, self.at))
            header.first_tensor, header.end = len(header.entries), self.at
        for _ in range(tensors):
            start, name, axes = self.at, self.text(), self.number("<I", "u32")
            if axes > 8:
                raise ValueError
            shape = tuple(self.number("<Q", "u64") for _ in range(axes))
            header.tensors.append((name, shape, self.number("<I", "u32"), self.number("<Q", "u64")))
            header.entries.append((start, self.at))
            header.end = self.at
        header.is_whole = True


def header_of(data: bytes) -> Header:
    """Return the content of `data`; after an invalid field, only the content before it."""
    cursor = _Cursor(data)
    with suppress(struct.error, ValueError, KeyError):
        cursor.read()
    cursor.header.end = max(cursor.header.end, min(24, len(data)))
    return cursor.header


def entries_of(data: bytes) -> list[bytes]:
    """The bytes of every pair of a sound file."""
    header = header_of(data)
    return [data[start:end] for start, end in header.entries[: header.first_tensor]]


def with_pairs(data: bytes, pairs: list[bytes]) -> bytes:
    """A sound file with these pairs in place of its own."""
    header = header_of(data)
    damaged = _splice_header(data, header, 24, header.entries[header.first_tensor - 1][1], b"".join(pairs))
    return _splice_bytes(damaged, 16, 24, struct.pack("<Q", len(pairs)))


def gguf_damaged(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """One field, string, pair or tensor of a file changed, or some bytes."""
    header = header_of(data)
    if not header.fields or not header.entries or rng.random() < 0.15:
        return bytes_damaged(data, other, rng, end=min(len(data), header.end + 64))
    edits = (_field_changed, _field_changed, _field_changed, _text_changed, _entries_changed, _alignment_set)
    return rng.choice(edits)(data, header, rng)


def _field_changed(data: bytes, header: Header, rng: random.Random) -> bytes:
    """A count, length, size, type, offset or number."""
    kind = rng.choice(("u32", "u64", "number"))
    chosen = rng.choice([f for f in header.fields if f.kind == kind] or header.fields)
    if chosen.kind == "text":
        return bytes_damaged(data, data, rng, end=header.end)
    old = int.from_bytes(data[chosen.start : chosen.start + chosen.size], "little")
    new = rng.choice(
        (
            old + 1,
            old - 1,
            2 * old,
            old // 2,
            old ^ (1 << rng.randrange(64)),
            rng.choice(INTEGERS),
            rng.randrange(45),
            len(data),
        )
    )
    room = 1 << (8 * chosen.size)
    return _splice_bytes(data, chosen.start, chosen.start + chosen.size, (new % room).to_bytes(chosen.size, "little"))


def _text_changed(data: bytes, header: Header, rng: random.Random) -> bytes:
    """A string and its length, with the data moved to where the header then ends."""
    texts = [f for f in header.fields if f.kind == "text"]
    chosen, theirs = rng.choice(texts), rng.choice(texts)
    old, their = (data[f.start : f.start + f.size] for f in (chosen, theirs))
    new = rng.choice(
        (
            their,
            old + b"\n",
            b"",
            b"\xff" + old,
            old * 2,
            bytes_damaged(old, their, rng),
            b"x" * 5000,
            "é中🎵\0".encode(),
        )
    )
    return _splice_header(data, header, chosen.start - 8, chosen.start + chosen.size, struct.pack("<Q", len(new)) + new)


def _entries_changed(data: bytes, header: Header, rng: random.Random) -> bytes:
    """A pair or tensor left out or said twice; the count in the header follows, most of the time."""
    number = rng.randrange(len(header.entries))
    start, end = header.entries[number]
    times = rng.choice((0, 0, 2))
    damaged = _splice_header(data, header, start, end, data[start:end] * times)
    if rng.random() < 0.8:
        at = 16 if number < header.first_tensor else 8
        count = (int.from_bytes(damaged[at : at + 8], "little") + times - 1) % (1 << 64)
        damaged = _splice_bytes(damaged, at, at + 8, struct.pack("<Q", count))
    return damaged


def _alignment_set(data: bytes, header: Header, rng: random.Random) -> bytes:
    """One more pair, which says how data is aligned."""
    key, value = b"general.alignment", rng.choice((0, 1, 2, 3, 8, 31, 64, 4096, 1 << 31, (1 << 32) - 1))
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<II", rng.choice((4, 4, 4, 5, 6)), value)
    damaged = _splice_header(data, header, 24, 24, pair)
    count = int.from_bytes(damaged[16:24], "little") + 1
    return _splice_bytes(damaged, 16, 24, struct.pack("<Q", count % (1 << 64)))


def _splice_bytes(data: bytes, start: int, end: int, new: bytes) -> bytes:
    return data[:start] + new + data[end:]


def _splice_header(data: bytes, header: Header, start: int, end: int, new: bytes) -> bytes:
    """A splice in the header, with the data again where it ends, aligned to 32 bytes."""
    before, after = -(-header.end // 32) * 32, header.end + len(new) - (end - start)
    changed = data[:start] + new + data[end : header.end]
    return changed + b"\0" * (-after % 32) + data[before:]
