"""Vocabularies without merges as models of HF ``tokenizers``: WordPiece (``bert``) and unigrams (``t5``).

Sources: Wu et al., Google's neural machine translation system, 2016; Kudo, Subword regularization, 2018.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from ...errors import ModelError
from .rwkv_tokenizer import Encoding
from .special_tokens import BYTE, NORMAL, UNUSED, USER
from .vocabulary import (
    KEY_PREFIX,
    read_byte_array,
    read_numbers_per_token_or_none,
    read_required_token_scores,
    read_scalar_or_default,
)

if TYPE_CHECKING:
    import tokenizers

BRACKETED_TOKEN = re.compile(r"\[.*\]", re.DOTALL)
"""Pattern of the WordPiece tokens outside words, such as ``[CLS]``."""
MATCHABLE_TYPES = (NORMAL, USER, UNUSED)
"""Token types that the unigram model may match in a text."""


def build_wordpiece_model(
    metadata: Mapping[str, object], token_ids: Mapping[str, int], unknown_id: int | None
) -> tokenizers.Tokenizer:
    """Build a WordPiece model: the longest token at the start of a word, then the longest token of the rest.

    Files mark tokens at the start of a word with ``▁``; the model marks the other tokens with ``##``. By default
    words are in lower case and without accents.

    Raises:
        ModelError: The unknown token is missing.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    if unknown_id is None:
        raise ModelError(f"{KEY_PREFIX}unknown_token_id is missing; a vocabulary of kind 'bert' needs one")
    texts = [
        text if BRACKETED_TOKEN.fullmatch(text) else text[1:] if text[0] == "▁" else "##" + text for text in token_ids
    ]
    tokenizer = Tokenizer(models.WordPiece({text: i for i, text in enumerate(texts)}, unk_token=texts[unknown_id]))
    lower = read_scalar_or_default(metadata, "normalizer.lowercase", bool, True)
    strips_accents = read_scalar_or_default(metadata, "normalizer.strip_accents", bool, lower)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=strips_accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def build_unigram_model(
    metadata: Mapping[str, object], token_ids: Mapping[str, int], unknown_id: int | None, *, begins: bool = True
) -> tokenizers.Tokenizer | UnigramByteFallbackTokenizer:
    """Build a unigram model, which splits a text into the tokens with the greatest sum of scores.

    The character map of the file normalises the text first. A character without a token becomes the tokens of its
    bytes, if the vocabulary has all 256.

    Args:
        metadata: The keys of the model file.
        token_ids: Token ids by text.
        unknown_id: Id of the unknown token, or None.
        begins: False for texts that continue another one: their leading white space stays, and none is added.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers

    scores = read_required_token_scores(metadata, token_ids, "t5")
    types = read_numbers_per_token_or_none(metadata, "token_type", len(token_ids)) or (NORMAL,) * len(token_ids)
    min_score = min(
        (score for score, type_ in zip(scores, types, strict=True) if type_ in MATCHABLE_TYPES), default=0.0
    )
    # Tokens of other types get a text that does not occur.
    pieces = [
        (text, score) if type_ in MATCHABLE_TYPES else (f"\0\0{i}", min_score)
        for i, (text, score, type_) in enumerate(zip(token_ids, scores, types, strict=True))
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=unknown_id, byte_fallback=False))
    steps: list[normalizers.Normalizer] = []
    if metadata.get(KEY_PREFIX + "precompiled_charsmap") is not None:
        steps.append(normalizers.Precompiled(read_byte_array(metadata, "precompiled_charsmap")))
    if read_scalar_or_default(metadata, "remove_extra_whitespaces", bool, False):
        steps += [normalizers.Strip(left=begins), normalizers.Replace(Regex(" {2,}"), " ")]
    if begins and read_scalar_or_default(metadata, "add_space_prefix", bool, True):
        steps.append(normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    byte_ids = [token_ids.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
    has_bytes = unknown_id is not None and all(i >= 0 and types[i] == BYTE for i in byte_ids)
    return (
        UnigramByteFallbackTokenizer(tokenizer, unknown_id, byte_ids)
        if has_bytes and unknown_id is not None
        else tokenizer
    )


class UnigramByteFallbackTokenizer:
    """A unigram tokenizer in which an unknown character becomes the tokens of its bytes (byte fallback).

    HF ``tokenizers`` also has a byte fallback. It is not used, because it would match texts such as ``<0x41>`` in the
    input, which SentencePiece does not.

    Args:
        tokenizer: The unigram model without byte fallback.
        unknown_id: Id of the unknown token, which is replaced.
        byte_ids: Token id of each byte [256].
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, unknown_id: int, byte_ids: Sequence[int]) -> None:
        self._tokenizer, self._unknown_id, self._byte_ids = tokenizer, unknown_id, byte_ids

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Encoding:
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if self._unknown_id in ids:
            tokens = self._tokenizer.model.tokenize(self._tokenizer.normalizer.normalize_str(text))
            id_lists = [
                self._encode_bytes(token.value) if token.id == self._unknown_id else (token.id,) for token in tokens
            ]
            ids = list(chain.from_iterable(id_lists))
        return Encoding(ids)

    def _encode_bytes(self, text: str) -> list[int]:
        return [self._byte_ids[byte] for byte in text.encode()]
