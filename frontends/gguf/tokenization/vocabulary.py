"""Reading ``tokenizer.ggml.*``: every value checked before HF ``tokenizers`` sees it.

The metadata may come from a damaged or hostile file; whatever is wrong with it is one ModelError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from ...errors import ModelError
from ..mapped_file import STRINGS_PER_READ
from .pretokenizers import GEMMA4, PreTokenizer, select_pre_tokenizer

KEY_PREFIX = "tokenizer.ggml."
MAX_TOKEN_CHARACTERS = 1024
"""Characters of the longest token whose merges are derived: cutting one at every place costs its length squared."""
_ABSENT_IDS = (-1, 0xFFFFFFFF)
"""How some converters write that there is no such token."""
_BYTE_TOKEN_PATTERN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Scalar = TypeVar("Scalar", str, bool)


def read_scalar(metadata: Mapping[str, object], name: str, kind: type[Scalar], default: Scalar) -> Scalar:
    """The value of one key, or ``default`` if it is missing; ModelError if it is of another type."""
    value = metadata.get(KEY_PREFIX + name)
    if value is None:
        return default
    if type(value) is not kind:
        raise ModelError(f"{KEY_PREFIX}{name} is a {type(value).__name__}; need a {kind.__name__}")
    return value


def read_id(metadata: Mapping[str, object], name: str, n_tokens: int) -> int | None:
    """The token id under one key, None if it is missing or says "none"; ModelError if no such token exists."""
    value = metadata.get(KEY_PREFIX + name)
    if value is None or (type(value) is int and value in _ABSENT_IDS):
        return None
    if type(value) is not int or not 0 <= value < n_tokens:
        raise ModelError(f"{KEY_PREFIX}{name} is {str(value)[:40]}; need a token id of 0 to {n_tokens - 1}")
    return value


def read_tokens(metadata: Mapping[str, object]) -> tuple[tuple[str, ...], dict[str, int]]:
    """The tokens, and the id of each by its text, in order; ModelError if there are none, if two are equal, or if one
    is not Unicode text."""
    strings = _read_strings(metadata, "tokens")
    if not strings:
        raise ModelError(f"{KEY_PREFIX}tokens is empty; need a vocabulary")
    tokens = tuple(text or f"[EMPTY_{i}]" for i, text in enumerate(strings)) if "" in strings else strings
    where = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(where) < len(tokens):
        first: dict[str, int] = {}
        for i, text in enumerate(tokens):
            if first.setdefault(text, i) != i:
                raise ModelError(
                    f"{KEY_PREFIX}tokens: {first[text]} and {i} are both {text[:40]!a}; need each text once"
                )
    return tokens, where


def read_numbers(metadata: Mapping[str, object], name: str, length: int) -> tuple[float, ...] | None:
    """The numbers of an array beside the tokens, None if it is missing; ModelError if it has another length."""
    if metadata.get(KEY_PREFIX + name) is None:
        return None
    values = cast("tuple[float, ...]", _read_array(metadata, name))  # what is no number is refused below
    if len(values) != length:
        raise ModelError(f"{KEY_PREFIX}{name} has {len(values)} values, {KEY_PREFIX}tokens {length}; need as many")
    kinds = {*map(type, values)}  # vocabularies are long: types are looked at in C, and values only where need be
    odd = [v for v in values if type(v) not in (int, float)] if kinds - {int, float} else []
    if not odd and float in kinds:
        odd = [v for v in values if not math.isfinite(v)]
    if odd:
        raise ModelError(f"{KEY_PREFIX}{name} holds {str(odd[0])[:40]}; need finite numbers")
    return values


def read_rule(metadata: Mapping[str, object], kind: str) -> PreTokenizer:
    """How text is cut before merging; only kinds of `PRE_KINDS` look at ``tokenizer.ggml.pre``."""
    if kind in PRE_KINDS:
        return select_pre_tokenizer(read_scalar(metadata, "pre", str, "default") or "default")
    return {
        "gemma4": GEMMA4,
        "rwkv": NO_SPLIT_RULE,
        "plamo2": NO_SPLIT_RULE,
        "t5": UNIGRAM_RULE,
        "bert": WORDPIECE_RULE,
    }.get(kind, SENTENCEPIECE_RULE)


PRE_KINDS = ("gpt2", "hybriddna", "whitespace")
"""Files of these kinds name their pre-tokenizer."""
NO_SPLIT_RULE = PreTokenizer((), uses_byte_letters=False)
"""Nothing is cut before."""
SENTENCEPIECE_RULE = PreTokenizer((), add_bos=True, uses_byte_letters=False, uses_space_marks=True)
"""SentencePiece merges over the whole text."""
UNIGRAM_RULE = PreTokenizer((), has_bos=False, uses_byte_letters=False, uses_space_marks=True)
"""The same for unigrams."""
WORDPIECE_RULE = PreTokenizer((), forces_bos=True, uses_byte_letters=False, uses_space_marks=True)
"""WordPiece cuts words by itself."""


def parse_byte_token(token: int, text: str) -> bytes:
    """The byte that a token of type byte stands for; ModelError if it is not written like ``<0x41>``."""
    match = _BYTE_TOKEN_PATTERN.fullmatch(text)
    if match is None:
        raise ModelError(f"{KEY_PREFIX}tokens: {token} is of type byte but reads {text[:40]!a}; need <0x00> to <0xFF>")
    return bytes.fromhex(match[1])


def require_unicode(who: str, text: str) -> None:
    """ModelError unless ``text`` can be written as UTF-8: HF panics on a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{who} is not valid Unicode at character {error.start}; need UTF-8 text") from None


def read_merges(metadata: Mapping[str, object], where: Mapping[str, int]) -> npt.NDArray[np.int32]:
    """The merges that a file lists, the first first [merges, 3]: ids of the left part, the right part and the whole.
    ModelError for one that is not two tokens that together are a third."""
    merges = _read_strings(metadata, "merges")
    # The first part may itself start with a space, so that one does not separate.
    pairs = [(merge[:cut], merge[cut + 1 :]) for merge in merges for cut in (merge.find(" ", 1),)]
    ids = [(where.get(left, -1), where.get(right, -1), where.get(left + right, -1)) for left, right in pairs]
    if not all(" " in merge[1:] for merge in merges) or any(-1 in three for three in ids):
        i = next(i for i, merge in enumerate(merges) if -1 in ids[i] or " " not in merge[1:])
        raise ModelError(f"{KEY_PREFIX}merges: {i}, {merges[i][:40]!a}, is not two tokens that together are a third")
    return np.array([*dict.fromkeys(ids)], np.int32).reshape(-1, 3)


def derive_merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the highest score first: SentencePiece stores no merges."""
    merges = []
    # On equal scores the longer left part first: merging goes from left to right.
    for text, _ in sorted(vocabulary.items(), key=lambda token: (-scores[token[1]], token[1])):
        cuts = range(len(text) - 1, 0, -1)
        merges += [(text[:cut], text[cut:]) for cut in cuts if text[:cut] in vocabulary and text[cut:] in vocabulary]
    return merges


def read_scores(metadata: Mapping[str, object], where: Mapping[str, int], kind: str = "llama") -> tuple[float, ...]:
    """A score for each token; ModelError where they are missing, or a token is too long for `derived_merges`."""
    scores = read_numbers(metadata, "scores", len(where))
    if scores is None:
        raise ModelError(f"{KEY_PREFIX}scores is missing; a vocabulary of kind {kind!r} needs one score a token")
    if (longest := max(map(len, where))) > MAX_TOKEN_CHARACTERS:
        raise ModelError(f"{KEY_PREFIX}tokens holds one of {longest} characters; at most {MAX_TOKEN_CHARACTERS} can be")
    return scores


def read_bytes(metadata: Mapping[str, object], name: str) -> bytes:
    """Bytes from an array of integers, signed or not; ModelError for another one."""
    values = cast("tuple[int, ...]", _read_array(metadata, name))  # what is no byte is refused below
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
        require_unicode(f"{KEY_PREFIX}{name}", "".join(strings[first : first + STRINGS_PER_READ]))
    return strings


def _read_array(metadata: Mapping[str, object], name: str) -> tuple[object, ...]:
    values = metadata.get(KEY_PREFIX + name)
    if values is None:
        raise ModelError(f"{KEY_PREFIX}{name} is missing; need an array")
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ModelError(f"{KEY_PREFIX}{name} is a {type(values).__name__}; need an array")
    return tuple(values[:])  # one slice: a lazy array decodes all at once
