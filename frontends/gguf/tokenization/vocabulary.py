"""Reads the ``tokenizer.ggml.*`` keys and checks every value before HF ``tokenizers`` gets it.

The metadata may come from a damaged or hostile file. Every fault raises `ModelError`. Functions take the name of a
key without this prefix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from ....graph.errors import format_count
from ...errors import ModelError
from ..mapped_file import STRINGS_PER_READ
from .pretokenizers import GEMMA4, PreTokenizerRule, select_pre_tokenizer_rule

KEY_PREFIX = "tokenizer.ggml."
MAX_TOKEN_CHARACTERS = 1024
"""Characters of the longest token with derived merges; the splits of a token take time quadratic in its length."""
_ABSENT_IDS = (-1, 0xFFFFFFFF)
"""Values of some converters for an absent token."""
_BYTE_TOKEN_PATTERN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Scalar = TypeVar("Scalar", str, bool)


def read_scalar_or_default(metadata: Mapping[str, object], name: str, kind: type[Scalar], default: Scalar) -> Scalar:
    """Read the scalar value of one key, or return `default` if it is missing; raise `ModelError` for another type."""
    value = metadata.get(KEY_PREFIX + name)
    if value is None:
        return default
    if type(value) is not kind:
        raise ModelError(f"{KEY_PREFIX}{name} is a {type(value).__name__}; need a {kind.__name__}")
    return value


def read_token_id_or_none(metadata: Mapping[str, object], name: str, n_tokens: int) -> int | None:
    """Read the token id of one key, such as ``eos_token_id``; return None if it is missing or marked as absent.

    `n_tokens` is the size of the vocabulary.

    Raises:
        ModelError: The vocabulary has no such token.
    """
    value = metadata.get(KEY_PREFIX + name)
    if value is None or (type(value) is int and value in _ABSENT_IDS):
        return None
    if type(value) is not int or not 0 <= value < n_tokens:
        raise ModelError(f"{KEY_PREFIX}{name} is {str(value)[:40]}; need a token id of 0 to {n_tokens - 1}")
    return value


def read_vocabulary(metadata: Mapping[str, object]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Read the vocabulary: the token texts by id, and the token ids by text.

    Raises:
        ModelError: There are no tokens, two are equal, or one is not valid Unicode.
    """
    strings = _read_strings(metadata, "tokens")
    if not strings:
        raise ModelError(f"{KEY_PREFIX}tokens is empty; need a vocabulary")
    tokens = tuple(text or f"[EMPTY_{i}]" for i, text in enumerate(strings)) if "" in strings else strings
    token_ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(token_ids) < len(tokens):
        first: dict[str, int] = {}
        for i, text in enumerate(tokens):
            if first.setdefault(text, i) != i:
                raise ModelError(
                    f"{KEY_PREFIX}tokens: {first[text]} and {i} are both {text[:40]!a}; need each text once"
                )
    return tokens, token_ids


def read_numbers_per_token_or_none(metadata: Mapping[str, object], name: str, length: int) -> tuple[float, ...] | None:
    """Read an array with one number per token; return None if it is missing.

    Raises:
        ModelError: The array has another length than `length`, or elements that are not finite numbers.
    """
    if metadata.get(KEY_PREFIX + name) is None:
        return None
    values = cast("tuple[float, ...]", _read_array(metadata, name))  # other elements are refused below
    if len(values) != length:
        raise ModelError(
            f"{KEY_PREFIX}{name} has {format_count(len(values), 'value')}, {KEY_PREFIX}tokens {length}; need as many"
        )
    kinds = {*map(type, values)}  # fast for long vocabularies: the loop over types runs in C
    wrong = [v for v in values if type(v) not in (int, float)] if kinds - {int, float} else []
    if not wrong and float in kinds:
        wrong = [v for v in values if not math.isfinite(v)]
    if wrong:
        raise ModelError(f"{KEY_PREFIX}{name} holds {str(wrong[0])[:40]}; need finite numbers")
    return values


def read_pre_tokenizer_rule(metadata: Mapping[str, object], kind: str) -> PreTokenizerRule:
    """Read the pre-tokenizer rule of a vocabulary, which splits text into words before BPE merges.

    Only the kinds in `PRE_KINDS` depend on the key ``tokenizer.ggml.pre``.
    """
    if kind in PRE_KINDS:
        return select_pre_tokenizer_rule(read_scalar_or_default(metadata, "pre", str, "default") or "default")
    return {
        "gemma4": GEMMA4,
        "rwkv": NO_SPLIT_RULE,
        "plamo2": NO_SPLIT_RULE,
        "t5": UNIGRAM_RULE,
        "bert": WORDPIECE_RULE,
    }.get(kind, SENTENCEPIECE_RULE)


PRE_KINDS = ("gpt2", "hybriddna", "whitespace")
"""Kinds with a pre-tokenizer named in the file."""
NO_SPLIT_RULE = PreTokenizerRule((), uses_byte_letters=False)
"""The text is not split."""
SENTENCEPIECE_RULE = PreTokenizerRule((), add_bos=True, uses_byte_letters=False, uses_space_marks=True)
"""SentencePiece merges in the whole text."""
UNIGRAM_RULE = PreTokenizerRule((), has_bos=False, uses_byte_letters=False, uses_space_marks=True)
"""Unigrams are searched in the whole text."""
WORDPIECE_RULE = PreTokenizerRule((), forces_bos=True, uses_byte_letters=False, uses_space_marks=True)
"""The WordPiece model splits words itself."""


def parse_byte_token(token: int, text: str) -> bytes:
    """Parse the text of a byte token, such as ``<0x41>``; raise `ModelError` for another text."""
    match = _BYTE_TOKEN_PATTERN.fullmatch(text)
    if match is None:
        raise ModelError(f"{KEY_PREFIX}tokens: {token} is of type byte but reads {text[:40]!a}; need <0x00> to <0xFF>")
    return bytes.fromhex(match[1])


def require_utf8_encodable(subject: str, text: str) -> None:
    """Raise `ModelError` unless `text` can be encoded as UTF-8; HF ``tokenizers`` panics on a lone surrogate.

    `subject` names the text in the error.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{subject} is not valid Unicode at character {error.start}; need UTF-8 text") from None


def read_merges_by_priority(metadata: Mapping[str, object], token_ids: Mapping[str, int]) -> npt.NDArray[np.int32]:
    """Read the BPE merges of a file in order of priority: int32[merges, 3].

    Each row has three token ids: the left part, the right part and the result.

    Raises:
        ModelError: A merge is not a pair of tokens with a third token as their concatenation.
    """
    merges = _read_strings(metadata, "merges")
    # The left part may start with a space, so the separator is the first space after it.
    pairs = [(merge[:gap], merge[gap + 1 :]) for merge in merges for gap in (merge.find(" ", 1),)]
    ids = [
        (token_ids.get(left, -1), token_ids.get(right, -1), token_ids.get(left + right, -1)) for left, right in pairs
    ]
    if not all(" " in merge[1:] for merge in merges) or any(-1 in merge_ids for merge_ids in ids):
        i = next(i for i, merge in enumerate(merges) if -1 in ids[i] or " " not in merge[1:])
        raise ModelError(f"{KEY_PREFIX}merges: {i}, {merges[i][:40]!a}, is not two tokens that together are a third")
    return np.array([*dict.fromkeys(ids)], np.int32).reshape(-1, 3)


def derive_merges_from_scores(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Derive the BPE merges from token scores: all pairs of tokens that form a token, the highest score first.

    SentencePiece vocabularies store no merges.
    """
    merges = []
    # For one result the longer left part comes first: merging goes from left to right.
    for text, _ in sorted(vocabulary.items(), key=lambda token: (-scores[token[1]], token[1])):
        lengths = range(len(text) - 1, 0, -1)
        merges += [
            (text[:length], text[length:])
            for length in lengths
            if text[:length] in vocabulary and text[length:] in vocabulary
        ]
    return merges


def read_required_token_scores(
    metadata: Mapping[str, object], token_ids: Mapping[str, int], kind: str = "llama"
) -> tuple[float, ...]:
    """Read one score per token.

    Args:
        metadata: The keys of the model file.
        token_ids: Token ids by text.
        kind: Kind of the tokenizer, for the error message.

    Raises:
        ModelError: Scores are missing, or a token is too long for `derive_merges_from_scores`.
    """
    scores = read_numbers_per_token_or_none(metadata, "scores", len(token_ids))
    if scores is None:
        raise ModelError(f"{KEY_PREFIX}scores is missing; a vocabulary of kind {kind!r} needs one score a token")
    if (longest := max(map(len, token_ids))) > MAX_TOKEN_CHARACTERS:
        raise ModelError(f"{KEY_PREFIX}tokens holds one of {longest} characters; at most {MAX_TOKEN_CHARACTERS} can be")
    return scores


def read_byte_array(metadata: Mapping[str, object], name: str) -> bytes:
    """Read an array of 8-bit integers, signed or unsigned, as bytes; raise `ModelError` for other elements."""
    values = cast("tuple[int, ...]", _read_array(metadata, name))  # other elements are refused below
    if not all(type(value) is int and -128 <= value < 256 for value in values):
        raise ModelError(f"{KEY_PREFIX}{name} holds something else than bytes; need an array of them")
    return bytes(value & 255 for value in values)


def _read_strings(metadata: Mapping[str, object], name: str) -> tuple[str, ...]:
    values = _read_array(metadata, name)
    for i, value in enumerate(() if {*map(type, values)} <= {str} else values):
        if type(value) is not str:
            raise ModelError(f"{KEY_PREFIX}{name}: {i} is a {type(value).__name__}; need strings")
    strings: tuple[str, ...] = values  # type: ignore[assignment]  # checked one by one above
    for first in range(0, len(strings), STRINGS_PER_READ):
        require_utf8_encodable(f"{KEY_PREFIX}{name}", "".join(strings[first : first + STRINGS_PER_READ]))
    return strings


def _read_array(metadata: Mapping[str, object], name: str) -> tuple[object, ...]:
    values = metadata.get(KEY_PREFIX + name)
    if values is None:
        raise ModelError(f"{KEY_PREFIX}{name} is missing; need an array")
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ModelError(f"{KEY_PREFIX}{name} is a {type(values).__name__}; need an array")
    return tuple(values[:])  # a slice, since a lazy array then decodes all elements at once
