"""Models that turn text into tokens: HF ``tokenizers``, given what of a vocabulary a text can use, or `LongestMatch`.

To build the model of a whole vocabulary takes a tenth of a second or more, which a short prompt need not wait for:
a token that is no part of a text is never merged to, so a model without it gives the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from ....backends.cache import cache_folder, keep, recalled
from ..metadata import MetadataArray
from .dna_tokenizer import CLOSE_TAG, OPEN_TAG, UNKNOWN_KMER, DnaTokenizer
from .plamo2_tokenizer import MinCostTokenizer, build_min_cost_tokenizer
from .pretokenizers import PreTokenizer
from .rwkv_tokenizer import LongestMatchTokenizer
from .sentencepiece_bpe import ScoreMerger
from .vocabulary import KEY_PREFIX, derive_merges, read_merges, read_scalar, read_scores
from .wordpiece_unigram import UnigramByteFallback, build_unigram_model, build_wordpiece_model

if TYPE_CHECKING:
    import tokenizers

TokenizerModel: TypeAlias = (
    "tokenizers.Tokenizer | ScoreMerger | UnigramByteFallback | LongestMatchTokenizer | MinCostTokenizer | DnaTokenizer"
)
SPACE_MARK = "▁"
SPACE_MARKING_KINDS = ("bert", "t5")
"""The models of these kinds mark spaces by themselves."""
MAX_PARTIAL_LOOKUPS = 20_000
"""After so many parts of texts have been looked up, the whole vocabulary is worth its time."""
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""What raw text falls back to where it has no token."""
BPE_KINDS = ("gpt2", "llama", "gemma4", "hybriddna", "whitespace")
"""BPE as ``tokenizer.ggml.pre`` says, SentencePiece, BPE on raw text, BPE with `Kmers`, and BPE without white space."""
TOKENIZER_MODELS = (*BPE_KINDS, "rwkv", "bert", "t5", "plamo2")
"""Every ``tokenizer.ggml.model``: the kinds that merge, the longest token each time, WordPiece, unigrams and the lowest
cost."""
NO_TOKEN = "\0\0nothing"
"""Stands, behind the last token, for characters that have no token at all, so that nothing is merged across them."""


class TokenizerModelCache:
    """The merges of one vocabulary.  ``where`` gives the ids of ``tokens`` by their text, in order."""

    def __init__(
        self,
        metadata: Mapping[str, object],
        kind: str,
        tokens: tuple[str, ...],
        where: Mapping[str, int],
        rule: PreTokenizer,
        unk: int | None,
    ) -> None:
        self._metadata, self._kind, self._tokens, self._token_ids, self._rule = metadata, kind, tokens, where, rule
        self._unknown_id, self._unknown_text = unk, NO_TOKEN if unk is None else self._tokens[unk]
        self._has_dna_tags = kind == "hybriddna" and {OPEN_TAG, CLOSE_TAG, UNKNOWN_KMER} <= where.keys()
        self._lookup_count = 0

    def prepare_text(self, text: str, begins: bool = True) -> str:
        """A text as the tokens spell it; `begins` is false inside another text."""
        if self._uses_lower_case:
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

    def choose_model(self, text: str, begins: bool = True) -> TokenizerModel:
        """A model that gives a prepared text the ids that the whole vocabulary does."""
        if self._kind == "t5" and not begins:
            return self._continuation_model
        if self._has_dna_tags and OPEN_TAG in text:
            return DnaTokenizer(
                self._token_ids, lambda part: self.choose_model(part).encode(part, add_special_tokens=False).ids
            )
        if self._kind in BPE_KINDS and len(text) <= MAX_PARTIAL_LOOKUPS and self._lookup_count <= MAX_PARTIAL_LOOKUPS:
            parts = self._list_substrings(text)
            self._lookup_count += len(parts)
            if self._lookup_count <= MAX_PARTIAL_LOOKUPS:
                always = () if self._rule.uses_byte_letters else (*BYTE_TOKENS, self._unknown_text)
                return self._build_model(
                    {part: self._token_ids[part] for part in (*parts, *always) if part in self._token_ids}
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
            )  # files without one have 0
        return (build_wordpiece_model if self._kind == "bert" else build_unigram_model)(
            self._metadata, self._token_ids, self._unknown_id
        )

    @cached_property
    def _continuation_model(self) -> tokenizers.Tokenizer | UnigramByteFallback:
        """The unigrams without a space before the text."""
        return build_unigram_model(self._metadata, self._token_ids, self._unknown_id, begins=False)

    def _list_substrings(self, text: str) -> set[str]:
        """All that stands in one of the pieces into which a text is cut, until it is too much."""
        pieces = (
            [text]
            if self._pre_tokenizer is None
            else [piece for piece, _ in self._pre_tokenizer.pre_tokenize_str(text)]
        )
        parts: set[str] = set()
        for piece in dict.fromkeys(pieces):
            for start in range(len(piece)):
                parts.update(
                    piece[start:end] for end in range(start + 1, min(len(piece), start + self._max_token_length) + 1)
                )
                if len(parts) > MAX_PARTIAL_LOOKUPS:
                    return parts
        return parts

    @cached_property
    def _uses_lower_case(self) -> bool:
        """Whether a text becomes lower case; ``whitespace`` as a name, unlike as a kind, leaves it as it is."""
        named = self._metadata.get(KEY_PREFIX + "pre") == "whitespace"
        return self._kind == "whitespace" and read_scalar(self._metadata, "normalizer.lowercase", bool, not named)

    @cached_property
    def _max_token_length(self) -> int:
        return max(map(len, self._token_ids))

    @cached_property
    def _pre_tokenizer(self) -> tokenizers.pre_tokenizers.PreTokenizer | None:
        """What cuts a text into pieces, inside which is merged; None if all of it is one."""
        from tokenizers import Regex, pre_tokenizers

        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self._rule.patterns
        ]
        if self._kind == "whitespace":
            steps.insert(0, pre_tokenizers.WhitespaceSplit())
        if self._rule.uses_byte_letters:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps) if steps else None

    def _build_model(self, vocabulary: Mapping[str, int]) -> tokenizers.Tokenizer | ScoreMerger:
        from tokenizers import Tokenizer, models

        merges, vocab = self._select_merges(vocabulary), dict(vocabulary)
        if self._kind == "llama":
            wholes = {left + right for left, right in merges}
            if len({self._scores[self._token_ids[whole]] for whole in wholes}) < len(wholes):
                return ScoreMerger(self._token_ids, self._scores, self._unknown_id)
        if self._rule.uses_byte_letters:
            model = models.BPE(vocab, merges, ignore_merges=self._rule.ignore_merges)
        else:
            vocab.setdefault(self._unknown_text, len(self._tokens))
            model = models.BPE(vocab, merges, unk_token=self._unknown_text, fuse_unk=True, byte_fallback=True)
        built = Tokenizer(model)
        if self._pre_tokenizer is not None:
            built.pre_tokenizer = self._pre_tokenizer
        return built

    def _select_merges(self, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
        """The merges that make one of these tokens, the first first."""
        if self._kind == "llama":
            return derive_merges(vocabulary, self._scores)
        wanted = np.zeros(len(self._tokens), bool)
        wanted[[*vocabulary.values()]] = True
        left, right, _ = self._cached_merges[wanted[self._cached_merges[:, 2]]].T.tolist()
        return [(self._tokens[a], self._tokens[b]) for a, b in zip(left, right, strict=True)]

    @cached_property
    def _scores(self) -> Sequence[float]:
        return read_scores(self._metadata, self._token_ids)

    @cached_property
    def _cached_merges(self) -> npt.NDArray[np.int32]:
        """What `stored_merges` gives, kept on disk once it has checked them."""
        file = self._find_cache_file()
        if file is not None and (data := recalled(file)) is not None:
            return np.frombuffer(data, np.int32).reshape(-1, 3)
        merges = read_merges(self._metadata, self._token_ids)
        if file is not None:
            keep(file, merges.tobytes())
        return merges

    def _find_cache_file(self) -> Path | None:
        """Where the merges of a file are kept: named by the bytes there, and by the code that reads them."""
        from hashlib import sha256  # loads OpenSSL

        digest = sha256((Path(__file__).parent / "vocabulary.py").read_bytes())
        for name in ("tokens", "merges"):
            array = self._metadata.get(KEY_PREFIX + name)
            if not isinstance(array, MetadataArray):
                return None
            digest.update(array.compute_digest())
        return cache_folder() / "merges" / f"{digest.hexdigest()[:40]}.i32"
