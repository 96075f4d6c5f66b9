"""RWKV's vocabularies: text becomes, from its start on, each time the longest token that its bytes begin with.

Tokens are bytes, which files spell as Python does (``\\n``, ``\\x80``).  As in llama.cpp every token takes part, those
of control too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...errors import ModelError

ESCAPED_BYTES: Mapping[bytes, bytes] = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
ESCAPE_PATTERN = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([^x]))", re.DOTALL)
PREFIX_LENGTH = 2
"""Bytes by which the lengths of tokens are listed: few tokens share two."""


def unescape_token(text: str) -> bytes:
    """The bytes of a token, written as files write them."""
    return ESCAPE_PATTERN.sub(
        lambda m: bytes.fromhex(m[1].decode()) if m[1] else ESCAPED_BYTES.get(m[2], m[2]), text.encode()
    )


class Encoding(NamedTuple):
    """What HF ``tokenizers`` gives."""

    ids: list[int]


class LongestMatchTokenizer:
    """Cuts texts into the longest of ``tokens``; ``unknown`` stands for bytes that begin none."""

    def __init__(self, tokens: Sequence[str], unknown: int | None) -> None:
        self._token_ids = {unescape_token(text): i for i, text in enumerate(tokens)}
        self._token_ids.pop(b"", None)
        lengths: dict[bytes, set[int]] = {}
        for token in self._token_ids:
            lengths.setdefault(token[:PREFIX_LENGTH], set()).add(len(token))
        self._lengths_by_prefix = {start: sorted(each, reverse=True) for start, each in lengths.items()}
        self._unknown_id = unknown

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoding:
        """The ids of a text.  ModelError for a byte that begins no token where none stands for that."""
        data, at, ids = text.encode(), 0, list[int]()
        while at < len(data):
            token, size = self._match_longest(data, at)
            ids.append(token)
            at += size
        return Encoding(ids)

    def _match_longest(self, data: bytes, at: int) -> tuple[int, int]:
        for start in (data[at : at + PREFIX_LENGTH], data[at : at + 1]):
            for size in self._lengths_by_prefix.get(start, ()):
                token = self._token_ids.get(data[at : at + size])
                if token is not None:
                    return token, size
        if self._unknown_id is None:
            raise ModelError(f"the vocabulary has no token for the byte 0x{data[at]:02x}; use a whole vocabulary")
        return self._unknown_id, 1
