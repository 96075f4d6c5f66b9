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

from ...backends.cache import cache_folder, keep, recalled
from .kmers import CLOSE, OPEN, OTHER, Kmers
from .longest_match import LongestMatch
from .metadata import Array
from .min_cost import MinCost, build_min_cost
from .pretokenizers import PreTokenizer
from .score_merging import ScoreMerger
from .vocabulary import PREFIX, derived_merges, read_scalar, read_scores, stored_merges
from .words import UnigramsOrBytes, unigrams, wordpiece

if TYPE_CHECKING:
    import tokenizers

Model: TypeAlias = "tokenizers.Tokenizer | ScoreMerger | UnigramsOrBytes | LongestMatch | MinCost | Kmers"
SPACE = "▁"
MARKING = ("bert", "t5")
"""The models of these kinds mark spaces by themselves."""
ENOUGH = 20_000
"""After so many parts of texts have been looked up, the whole vocabulary is worth its time."""
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""What raw text falls back to where it has no token."""
MERGED = ("gpt2", "llama", "gemma4", "hybriddna", "whitespace")
"""BPE as ``tokenizer.ggml.pre`` says, SentencePiece, BPE on raw text, BPE with `Kmers`, and BPE without white space."""
TOKENIZER_MODELS = (*MERGED, "rwkv", "bert", "t5", "plamo2")
"""Every ``tokenizer.ggml.model``: the kinds that merge, the longest token each time, WordPiece, unigrams and the lowest
cost."""
NOTHING = "\0\0nothing"
"""Stands, behind the last token, for characters that have no token at all, so that nothing is merged across them."""


class Merger:
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
        self._metadata, self._kind, self._tokens, self._where, self._rule = metadata, kind, tokens, where, rule
        self._unk, self._unknown = unk, NOTHING if unk is None else self._tokens[unk]
        self._is_dna = kind == "hybriddna" and {OPEN, CLOSE, OTHER} <= where.keys()
        self._looked_up = 0

    def prepare_text(self, text: str, begins: bool = True) -> str:
        """A text as the tokens spell it; `begins` is false inside another text."""
        if self._lowers:
            text = "".join(char.lower() for char in text)
        if self._rule.marks_spaces and self._kind not in MARKING:
            text = text.replace(" ", SPACE)
        if start := self._rule.line_start:
            lines = text.split("\n")
            for i in range(0 if begins else 1, len(lines)):
                if lines[i] and not lines[i].startswith(start):
                    lines[i] = start + lines[i]
            text = "\n".join(lines)
        return text

    def model_for(self, text: str, begins: bool = True) -> Model:
        """A model that gives a prepared text the ids that the whole vocabulary does."""
        if self._kind == "t5" and not begins:
            return self._continuing
        if self._is_dna and OPEN in text:
            return Kmers(self._where, lambda part: self.model_for(part).encode(part, add_special_tokens=False).ids)
        if self._kind in MERGED and len(text) <= ENOUGH and self._looked_up <= ENOUGH:
            parts = self._parts(text)
            self._looked_up += len(parts)
            if self._looked_up <= ENOUGH:
                always = () if self._rule.letters else (*BYTES, self._unknown)
                return self._model({part: self._where[part] for part in (*parts, *always) if part in self._where})
        return self._whole

    @cached_property
    def _whole(self) -> Model:
        if self._kind in MERGED:
            return self._model(self._where)
        if self._kind == "rwkv":
            return LongestMatch(self._tokens, self._unk)
        if self._kind == "plamo2":
            return build_min_cost(self._metadata, self._where, self._unk or 0)  # files without one have 0
        return (wordpiece if self._kind == "bert" else unigrams)(self._metadata, self._where, self._unk)

    @cached_property
    def _continuing(self) -> tokenizers.Tokenizer | UnigramsOrBytes:
        """The unigrams without a space before the text."""
        return unigrams(self._metadata, self._where, self._unk, begins=False)

    def _parts(self, text: str) -> set[str]:
        """All that stands in one of the pieces into which a text is cut, until it is too much."""
        pieces = [text] if self._cut is None else [piece for piece, _ in self._cut.pre_tokenize_str(text)]
        parts: set[str] = set()
        for piece in dict.fromkeys(pieces):
            for start in range(len(piece)):
                parts.update(piece[start:end] for end in range(start + 1, min(len(piece), start + self._longest) + 1))
                if len(parts) > ENOUGH:
                    return parts
        return parts

    @cached_property
    def _lowers(self) -> bool:
        """Whether a text becomes lower case; ``whitespace`` as a name, unlike as a kind, leaves it as it is."""
        named = self._metadata.get(PREFIX + "pre") == "whitespace"
        return self._kind == "whitespace" and read_scalar(self._metadata, "normalizer.lowercase", bool, not named)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._where))

    @cached_property
    def _cut(self) -> tokenizers.pre_tokenizers.PreTokenizer | None:
        """What cuts a text into pieces, inside which is merged; None if all of it is one."""
        from tokenizers import Regex, pre_tokenizers

        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self._rule.patterns
        ]
        if self._kind == "whitespace":
            steps.insert(0, pre_tokenizers.WhitespaceSplit())
        if self._rule.letters:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps) if steps else None

    def _model(self, vocabulary: Mapping[str, int]) -> tokenizers.Tokenizer | ScoreMerger:
        from tokenizers import Tokenizer, models

        merges, vocab = self._merges_to(vocabulary), dict(vocabulary)
        if self._kind == "llama":
            wholes = {left + right for left, right in merges}
            if len({self._scores[self._where[whole]] for whole in wholes}) < len(wholes):
                return ScoreMerger(self._where, self._scores, self._unk)
        if self._rule.letters:
            model = models.BPE(vocab, merges, ignore_merges=self._rule.ignore_merges)
        else:
            vocab.setdefault(self._unknown, len(self._tokens))
            model = models.BPE(vocab, merges, unk_token=self._unknown, fuse_unk=True, byte_fallback=True)
        built = Tokenizer(model)
        if self._cut is not None:
            built.pre_tokenizer = self._cut
        return built

    def _merges_to(self, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
        """The merges that make one of these tokens, the first first."""
        if self._kind == "llama":
            return derived_merges(vocabulary, self._scores)
        wanted = np.zeros(len(self._tokens), bool)
        wanted[[*vocabulary.values()]] = True
        left, right, _ = self._stored[wanted[self._stored[:, 2]]].T.tolist()
        return [(self._tokens[a], self._tokens[b]) for a, b in zip(left, right, strict=True)]

    @cached_property
    def _scores(self) -> Sequence[float]:
        return read_scores(self._metadata, self._where)

    @cached_property
    def _stored(self) -> npt.NDArray[np.int32]:
        """What `stored_merges` gives, kept on disk once it has checked them."""
        file = self._file()
        if file is not None and (data := recalled(file)) is not None:
            return np.frombuffer(data, np.int32).reshape(-1, 3)
        merges = stored_merges(self._metadata, self._where)
        if file is not None:
            keep(file, merges.tobytes())
        return merges

    def _file(self) -> Path | None:
        """Where the merges of a file are kept: named by the bytes there, and by the code that reads them."""
        from hashlib import sha256  # loads OpenSSL

        digest = sha256((Path(__file__).parent / "vocabulary.py").read_bytes())
        for name in ("tokens", "merges"):
            array = self._metadata.get(PREFIX + name)
            if not isinstance(array, Array):
                return None
            digest.update(array.digest())
        return cache_folder() / "merges" / f"{digest.hexdigest()[:40]}.i32"
