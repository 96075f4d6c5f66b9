"""HybridDNA vocabularies: inside ``<dna>`` and ``</dna>`` each six bases are a token; other text is byte-level BPE.

A file writes U+E000 behind those tokens, as a token of the text may read the same.  A remainder is filled up with A.
A character that is no base makes its six ``<oov>``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from .rwkv_tokenizer import Encoding

OPEN_TAG, CLOSE_TAG, UNKNOWN_KMER = "<dna>", "</dna>", "<oov>"
KMER_SUFFIX = "\ue000"
KMER_LENGTH = 6
TO_UPPER_CASE = bytes.maketrans(bytes(range(ord("a"), ord("z") + 1)), bytes(range(ord("A"), ord("Z") + 1)))


class DnaTokenizer:
    """Encodes sequences of bases by itself, other text by ``merge``."""

    def __init__(self, where: Mapping[str, int], merge: Callable[[str], Iterable[int]]) -> None:
        self._token_ids, self._encode_text = where, merge

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoding:
        """The ids of a text; a sequence that is not closed reaches to its end."""
        return Encoding([*self._encode_sections(text)])

    def _encode_sections(self, text: str) -> Iterator[int]:
        while text:
            plain, tag, rest = text.partition(OPEN_TAG)
            if plain:
                yield from self._encode_text(plain)
            if tag:
                bases, end, rest = rest.partition(CLOSE_TAG)
                yield self._token_ids[OPEN_TAG]
                yield from self._encode_bases(bases.encode().translate(TO_UPPER_CASE))
                if end:
                    yield self._token_ids[CLOSE_TAG]
            text = rest

    def _encode_bases(self, bases: bytes) -> Iterator[int]:
        for at in range(0, len(bases), KMER_LENGTH):
            kmer = bases[at : at + KMER_LENGTH].ljust(KMER_LENGTH, b"A")
            yield self._token_ids.get(kmer.decode("utf-8", "replace") + KMER_SUFFIX, self._token_ids[UNKNOWN_KMER])
