"""The tokenizer of HybridDNA: between ``<dna>`` and ``</dna>`` six bases are one token; other text is byte-level BPE.

In the file U+E000 follows the text of a six-base token, because a text token may have the same letters. The last group
is padded with A. A group with a character that is no base becomes ``<oov>``. Example: ``<dna>ACGTACGT</dna>`` becomes
the tokens ``<dna>``, ``ACGTAC``, ``GTAAAA`` and ``</dna>``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from .rwkv_tokenizer import Encoding

OPEN_TAG, CLOSE_TAG, UNKNOWN_KMER = "<dna>", "</dna>", "<oov>"
KMER_SUFFIX = "\ue000"
KMER_LENGTH = 6
TO_UPPER_CASE = bytes.maketrans(bytes(range(ord("a"), ord("z") + 1)), bytes(range(ord("A"), ord("Z") + 1)))


class DnaTokenizer:
    """A tokenizer of DNA sequences: each group of six bases is one token.

    `encode_text` encodes the text outside of the sequences.
    """

    def __init__(self, token_ids: Mapping[str, int], encode_text: Callable[[str], Iterable[int]]) -> None:
        self._token_ids, self._encode_text = token_ids, encode_text

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoding:
        """Encode a text: return its token ids. ``add_special_tokens`` has no effect.

        A DNA sequence without a closing tag extends to the end of the text.
        """
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
        for start in range(0, len(bases), KMER_LENGTH):
            kmer = bases[start : start + KMER_LENGTH].ljust(KMER_LENGTH, b"A")
            yield self._token_ids.get(kmer.decode("utf-8", "replace") + KMER_SUFFIX, self._token_ids[UNKNOWN_KMER])
