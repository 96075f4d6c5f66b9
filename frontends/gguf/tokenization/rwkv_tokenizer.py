"""The tokenizer of RWKV: the longest token that matches at each position, from the start of the text.

Tokens are byte strings, and files spell them with the escapes of Python (``\\n``, ``\\x80``). Control tokens match too,
as in llama.cpp. Example: with the tokens ``a``, ``ab`` and ``c`` the text ``abc`` becomes ``ab``, ``c``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...errors import ModelError

ESCAPED_BYTES: Mapping[bytes, bytes] = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
ESCAPE_PATTERN = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([^x]))", re.DOTALL)
PREFIX_LENGTH = 2
"""Bytes (here) or characters (`plamo2_tokenizer`) of the prefix that groups token lengths."""


def unescape_token_to_bytes(text: str) -> bytes:
    """Return the bytes of a token from its text with the escapes of Python, such as ``\\x80``."""
    return ESCAPE_PATTERN.sub(
        lambda m: bytes.fromhex(m[1].decode()) if m[1] else ESCAPED_BYTES.get(m[2], m[2]), text.encode()
    )


class Encoding(NamedTuple):
    """The result of `encode`: the token ids, in a field `ids` as in HF ``tokenizers``."""

    ids: list[int]


class LongestMatchTokenizer:
    """A tokenizer that takes the longest matching token at each position of a text.

    `unknown` is the id of the token for a byte that begins no token, or None.
    """

    def __init__(self, tokens: Sequence[str], unknown: int | None) -> None:
        self._token_ids = {unescape_token_to_bytes(text): i for i, text in enumerate(tokens)}
        self._token_ids.pop(b"", None)
        lengths: dict[bytes, set[int]] = {}
        for token in self._token_ids:
            lengths.setdefault(token[:PREFIX_LENGTH], set()).add(len(token))
        self._lengths_by_prefix = {start: sorted(sizes, reverse=True) for start, sizes in lengths.items()}
        self._unknown_id = unknown

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoding:
        """Encode a text: return its token ids. ``add_special_tokens`` has no effect.

        Raises:
            ModelError: A byte begins no token, and there is no unknown token.
        """
        data, position, ids = text.encode(), 0, list[int]()
        while position < len(data):
            token, size = self._match_longest(data, position)
            ids.append(token)
            position += size
        return Encoding(ids)

    def _match_longest(self, data: bytes, position: int) -> tuple[int, int]:
        for start in (data[position : position + PREFIX_LENGTH], data[position : position + 1]):
            for size in self._lengths_by_prefix.get(start, ()):
                token = self._token_ids.get(data[position : position + size])
                if token is not None:
                    return token, size
        if self._unknown_id is None:
            raise ModelError(f"the vocabulary has no token for the byte 0x{data[position]:02x}; use a whole vocabulary")
        return self._unknown_id, 1
