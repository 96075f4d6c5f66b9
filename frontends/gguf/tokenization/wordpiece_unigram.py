"""Vocabularies without merges: WordPiece (``bert``) and unigrams (``t5``), as models of HF ``tokenizers``.

Wu et al., Google's neural machine translation system, 2016; Kudo, Subword regularization, 2018.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from ...errors import ModelError
from .rwkv_tokenizer import Encoding
from .special_tokens import BYTE, NORMAL, UNUSED, USER
from .vocabulary import KEY_PREFIX, read_bytes, read_numbers, read_scalar, read_scores

if TYPE_CHECKING:
    import tokenizers

BRACKETED_TOKEN = re.compile(r"\[.*\]", re.DOTALL)
"""Tokens of WordPiece that are no part of words, such as ``[CLS]``."""
MATCHABLE_TYPES = (NORMAL, USER, UNUSED)
"""Types of tokens that unigrams are."""


def build_wordpiece_model(
    metadata: Mapping[str, object], where: Mapping[str, int], unk: int | None
) -> tokenizers.Tokenizer:
    """Of each word the longest token that begins it, and so on.  Files mark tokens that begin a word with ``▁``, models
    those that do not with ``##``.  Words are in lower case and without accents unless the file says otherwise."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    if unk is None:
        raise ModelError(f"{KEY_PREFIX}unknown_token_id is missing; a vocabulary of kind 'bert' needs one")
    spelled = [
        text if BRACKETED_TOKEN.fullmatch(text) else text[1:] if text[0] == "▁" else "##" + text for text in where
    ]
    built = Tokenizer(models.WordPiece({text: i for i, text in enumerate(spelled)}, unk_token=spelled[unk]))
    lower = read_scalar(metadata, "normalizer.lowercase", bool, True)
    plain = read_scalar(metadata, "normalizer.strip_accents", bool, lower)
    built.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=plain)
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return built


def build_unigram_model(
    metadata: Mapping[str, object], where: Mapping[str, int], unk: int | None, *, begins: bool = True
) -> tokenizers.Tokenizer | UnigramByteFallback:
    """The tokens whose scores have the greatest sum, of text that a map of characters, stored with them, has
    normalised. Texts that do not begin, but continue one, keep the white space before them and get none.

    A character without a token becomes the tokens of its bytes, if the vocabulary has all 256.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers

    scores = read_scores(metadata, where, "t5")
    types = read_numbers(metadata, "token_type", len(where)) or (NORMAL,) * len(where)
    least = min((score for score, type_ in zip(scores, types, strict=True) if type_ in MATCHABLE_TYPES), default=0.0)
    # Other tokens are never found in a text.
    pieces = [
        (text, score) if type_ in MATCHABLE_TYPES else (f"\0\0{i}", least)
        for i, (text, score, type_) in enumerate(zip(where, scores, types, strict=True))
    ]
    built = Tokenizer(models.Unigram(pieces, unk_id=unk, byte_fallback=False))
    steps: list[normalizers.Normalizer] = []
    if metadata.get(KEY_PREFIX + "precompiled_charsmap") is not None:
        steps.append(normalizers.Precompiled(read_bytes(metadata, "precompiled_charsmap")))
    if read_scalar(metadata, "remove_extra_whitespaces", bool, False):
        steps += [normalizers.Strip(left=begins), normalizers.Replace(Regex(" {2,}"), " ")]
    if begins and read_scalar(metadata, "add_space_prefix", bool, True):
        steps.append(normalizers.Prepend("▁"))
    built.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    bytes_ = [where.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
    has_bytes = unk is not None and all(i >= 0 and types[i] == BYTE for i in bytes_)
    return UnigramByteFallback(built, unk, bytes_) if has_bytes and unk is not None else built


class UnigramByteFallback:
    """Unigrams with a token for each byte, `bytes_`, where a text has only the token `unk`.

    HF ``tokenizers`` has this too, but then finds the names of these tokens in texts, as SentencePiece does not.
    """

    def __init__(self, built: tokenizers.Tokenizer, unk: int, bytes_: Sequence[int]) -> None:
        self._tokenizer, self._unknown_id, self._byte_ids = built, unk, bytes_

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Encoding:
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if self._unknown_id in ids:
            tokens = self._tokenizer.model.tokenize(self._tokenizer.normalizer.normalize_str(text))
            spelled = [
                self._encode_bytes(token.value) if token.id == self._unknown_id else (token.id,) for token in tokens
            ]
            ids = list(chain.from_iterable(spelled))
        return Encoding(ids)

    def _encode_bytes(self, text: str) -> list[int]:
        return [self._byte_ids[byte] for byte in text.encode()]
