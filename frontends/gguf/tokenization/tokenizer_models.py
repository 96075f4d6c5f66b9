"""Models of HF ``tokenizers`` that turn text into token ids, built from the part of a vocabulary that a text can use.

The model of a whole vocabulary takes a tenth of a second or more to build. For a short text a smaller model has equal
results: BPE never merges to a token that is no substring of the text. Example: for the text ``hat`` the model needs
only the tokens among ``h``, ``a``, ``t``, ``ha``, ``at`` and ``hat``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from ....graph.storage.disk_cache import make_cache_path, read_cached_or_make
from ..metadata import LazyMetadataArray
from .dna_tokenizer import CLOSE_TAG, OPEN_TAG, UNKNOWN_KMER, DnaTokenizer
from .plamo2_tokenizer import MinCostTokenizer, build_min_cost_tokenizer
from .pretokenizers import PreTokenizerRule
from .rwkv_tokenizer import LongestMatchTokenizer
from .sentencepiece_bpe import ScoreOrderedBpeTokenizer
from .vocabulary import (
    KEY_PREFIX,
    derive_merges_from_scores,
    read_merges_by_priority,
    read_required_token_scores,
    read_scalar_or_default,
)
from .wordpiece_unigram import UnigramByteFallbackTokenizer, build_unigram_model, build_wordpiece_model

if TYPE_CHECKING:
    import tokenizers

TokenizerModel: TypeAlias = (
    "tokenizers.Tokenizer | ScoreOrderedBpeTokenizer | UnigramByteFallbackTokenizer | LongestMatchTokenizer "
    "| MinCostTokenizer | DnaTokenizer"
)
SPACE_MARK = "▁"
SPACE_MARKING_KINDS = ("bert", "t5")
"""Kinds with models that replace spaces by `SPACE_MARK` themselves."""
MAX_PARTIAL_LOOKUPS = 20_000
"""Substrings that are looked up before the model of the whole vocabulary is built instead."""
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""Texts of the tokens that replace the bytes of a character without a token."""
BPE_KINDS = ("gpt2", "llama", "gemma4", "hybriddna", "whitespace")
"""Kinds that merge: BPE by ``tokenizer.ggml.pre``, SentencePiece, BPE on raw text, BPE with DNA, BPE by white space."""
TOKENIZER_MODELS = (*BPE_KINDS, "rwkv", "bert", "t5", "plamo2")
"""All values of ``tokenizer.ggml.model``: BPE, then longest match, WordPiece, unigrams and lowest cost."""
NO_TOKEN = "\0\0nothing"
"""Text of an additional last token for characters without any token, so that no merge crosses them."""


class TokenizerModelCache:
    """Builds the models that encode text with one vocabulary, when they are needed, and keeps them.

    A short text uses a small model that is built fast. Longer texts use the model of the full vocabulary.

    Args:
        metadata: The keys of the model file.
        kind: Value of ``tokenizer.ggml.model``.
        tokens: Token texts by id.
        token_ids: Token ids by text, in the order of the ids.
        rule: The rule that splits text into words.
        unknown_id: Id of the unknown token, or None.
    """

    def __init__(
        self,
        metadata: Mapping[str, object],
        kind: str,
        tokens: tuple[str, ...],
        token_ids: Mapping[str, int],
        rule: PreTokenizerRule,
        unknown_id: int | None,
    ) -> None:
        self._metadata, self._kind, self._tokens, self._token_ids, self._rule = metadata, kind, tokens, token_ids, rule
        self._unknown_id, self._unknown_text = unknown_id, NO_TOKEN if unknown_id is None else self._tokens[unknown_id]
        self._has_dna_tags = kind == "hybriddna" and {OPEN_TAG, CLOSE_TAG, UNKNOWN_KMER} <= token_ids.keys()
        self._lookup_count = 0

    def normalise_text(self, text: str, begins: bool = True) -> str:
        """Normalise a text to the spelling of the tokens: lower case, space marks and line prefixes.

        `begins` is false for the continuation of another text.
        """
        if self._lower_cases_text:
            text = "".join(char.lower() for char in text)
        if self._rule.uses_space_marks and self._kind not in SPACE_MARKING_KINDS:
            text = text.replace(" ", SPACE_MARK)
        if start := self._rule.line_prefix:
            lines = text.split("\n")
            for i in range(0 if begins else 1, len(lines)):
                if lines[i] and not lines[i].startswith(start):
                    lines[i] = start + lines[i]
            text = "\n".join(lines)
        return text

    def choose_fastest_exact_model(self, text: str, begins: bool = True) -> TokenizerModel:
        """Choose the fastest tokenizer model that encodes this normalised text exactly as the full model does.

        A short text gets a small BPE model that has only the tokens which occur in the text.

        Args:
            text: The normalised text.
            begins: False for the continuation of another text.
        """
        if self._kind == "t5" and not begins:
            return self._unigram_continuation_model
        if self._has_dna_tags and OPEN_TAG in text:
            return DnaTokenizer(
                self._token_ids,
                lambda part: self.choose_fastest_exact_model(part).encode(part, add_special_tokens=False).ids,
            )
        if self._kind in BPE_KINDS and len(text) <= MAX_PARTIAL_LOOKUPS and self._lookup_count <= MAX_PARTIAL_LOOKUPS:
            substrings = self._list_limited_word_substrings(text)
            self._lookup_count += len(substrings)
            if self._lookup_count <= MAX_PARTIAL_LOOKUPS:
                always = () if self._rule.uses_byte_letters else (*BYTE_TOKENS, self._unknown_text)
                return self._build_model(
                    {part: self._token_ids[part] for part in (*substrings, *always) if part in self._token_ids}
                )
        return self._full_model

    @cached_property
    def _full_model(self) -> TokenizerModel:
        if self._kind in BPE_KINDS:
            return self._build_model(self._token_ids)
        if self._kind == "rwkv":
            return LongestMatchTokenizer(self._tokens, self._unknown_id)
        if self._kind == "plamo2":
            return build_min_cost_tokenizer(
                self._metadata, self._token_ids, self._unknown_id or 0
            )  # the default unknown id is 0
        return (build_wordpiece_model if self._kind == "bert" else build_unigram_model)(
            self._metadata, self._token_ids, self._unknown_id
        )

    @cached_property
    def _unigram_continuation_model(self) -> tokenizers.Tokenizer | UnigramByteFallbackTokenizer:
        """The unigram model for texts that continue another text, without a space before the text."""
        return build_unigram_model(self._metadata, self._token_ids, self._unknown_id, begins=False)

    def _list_limited_word_substrings(self, text: str) -> set[str]:
        """List the substrings of all words of a text that could be tokens, to build a small vocabulary for the text.

        The search stops as soon as there are more than `MAX_PARTIAL_LOOKUPS` substrings; the result is then
        incomplete.
        """
        pieces = (
            [text]
            if self._pre_tokenizer is None
            else [piece for piece, _ in self._pre_tokenizer.pre_tokenize_str(text)]
        )
        substrings: set[str] = set()
        for piece in dict.fromkeys(pieces):
            for start in range(len(piece)):
                substrings.update(
                    piece[start:end] for end in range(start + 1, min(len(piece), start + self._max_token_length) + 1)
                )
                if len(substrings) > MAX_PARTIAL_LOOKUPS:
                    return substrings
        return substrings

    @cached_property
    def _lower_cases_text(self) -> bool:
        """Whether texts are converted to lower case before they are encoded.

        Only the kind ``whitespace`` does this, unless the file says no. If the file says nothing, a pre-tokenizer named
        ``whitespace`` also prevents it.
        """
        named = self._metadata.get(KEY_PREFIX + "pre") == "whitespace"
        return self._kind == "whitespace" and read_scalar_or_default(
            self._metadata, "normalizer.lowercase", bool, not named
        )

    @cached_property
    def _max_token_length(self) -> int:
        return max(map(len, self._token_ids))

    @cached_property
    def _pre_tokenizer(self) -> tokenizers.pre_tokenizers.PreTokenizer | None:
        """The pre-tokenizer that splits a text into words. It is None if the whole text is one word."""
        from tokenizers import Regex, pre_tokenizers

        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self._rule.patterns
        ]
        if self._kind == "whitespace":
            steps.insert(0, pre_tokenizers.WhitespaceSplit())
        if self._rule.uses_byte_letters:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps) if steps else None

    def _build_model(self, vocabulary: Mapping[str, int]) -> tokenizers.Tokenizer | ScoreOrderedBpeTokenizer:
        from tokenizers import Tokenizer, models

        merges, vocab = self._select_merges(vocabulary), dict(vocabulary)
        if self._kind == "llama":
            results = {left + right for left, right in merges}
            if len({self._scores[self._token_ids[result]] for result in results}) < len(results):
                return ScoreOrderedBpeTokenizer(self._token_ids, self._scores, self._unknown_id)
        if self._rule.uses_byte_letters:
            model = models.BPE(vocab, merges, ignore_merges=self._rule.ignore_merges)
        else:
            vocab.setdefault(self._unknown_text, len(self._tokens))
            model = models.BPE(vocab, merges, unk_token=self._unknown_text, fuse_unk=True, byte_fallback=True)
        tokenizer = Tokenizer(model)
        if self._pre_tokenizer is not None:
            tokenizer.pre_tokenizer = self._pre_tokenizer
        return tokenizer

    def _select_merges(self, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
        """Select the BPE merges (left, right) with a result in `vocabulary`, in order of priority."""
        if self._kind == "llama":
            return derive_merges_from_scores(vocabulary, self._scores)
        is_result = np.zeros(len(self._tokens), bool)
        is_result[[*vocabulary.values()]] = True
        left, right, _ = self._cached_merges[is_result[self._cached_merges[:, 2]]].T.tolist()
        return [(self._tokens[a], self._tokens[b]) for a, b in zip(left, right, strict=True)]

    @cached_property
    def _scores(self) -> Sequence[float]:
        return read_required_token_scores(self._metadata, self._token_ids)

    @cached_property
    def _cached_merges(self) -> npt.NDArray[np.int32]:
        """The checked merges int32[merges, 3] of `read_merges_by_priority`, cached on disk."""
        merges = read_cached_or_make(
            self._find_merges_cache_file(), lambda: read_merges_by_priority(self._metadata, self._token_ids).tobytes()
        )
        return np.frombuffer(merges, np.int32).reshape(-1, 3)

    def _find_merges_cache_file(self) -> Path | None:
        """Return the path of the disk cache of the merges, or None if the file has no arrays of tokens and merges.

        The cache key has both arrays and the source code of `read_merges_by_priority`.
        """
        tokens, merges = (self._metadata.get(KEY_PREFIX + name) for name in ("tokens", "merges"))
        if not isinstance(tokens, LazyMetadataArray) or not isinstance(merges, LazyMetadataArray):
            return None
        source = (Path(__file__).parent / "vocabulary.py").read_bytes()
        return make_cache_path("merges", source, tokens.compute_digest(), merges.compute_digest())
