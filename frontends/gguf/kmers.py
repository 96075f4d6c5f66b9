"""HybridDNA vocabularies: inside ``<dna>`` and ``</dna>`` each six bases are a token; other text is byte-level BPE.

A file writes U+E000 behind those tokens, as a token of the text may read the same.  A remainder is filled up with A.
A character that is no base makes its six ``<oov>``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from .longest_match import Ids

OPEN, CLOSE, OTHER = "<dna>", "</dna>", "<oov>"
MARK = "\ue000"
LENGTH = 6
UPPER = bytes.maketrans(bytes(range(ord("a"), ord("z") + 1)), bytes(range(ord("A"), ord("Z") + 1)))


class Kmers:
    """Encodes sequences of bases by itself, other text by ``merge``."""

    def __init__(self, where: Mapping[str, int], merge: Callable[[str], Iterable[int]]) -> None:
        self._where, self._merge = where, merge

    def encode(self, text: str, add_special_tokens: bool = False) -> Ids:
        """The ids of a text; a sequence that is not closed reaches to its end."""
        return Ids([*self._parts(text)])

    def _parts(self, text: str) -> Iterator[int]:
        while text:
            plain, tag, rest = text.partition(OPEN)
            if plain:
                yield from self._merge(plain)
            if tag:
                bases, end, rest = rest.partition(CLOSE)
                yield self._where[OPEN]
                yield from self._bases(bases.encode().translate(UPPER))
                if end:
                    yield self._where[CLOSE]
            text = rest

    def _bases(self, bases: bytes) -> Iterator[int]:
        for at in range(0, len(bases), LENGTH):
            kmer = bases[at : at + LENGTH].ljust(LENGTH, b"A")
            yield self._where.get(kmer.decode("utf-8", "replace") + MARK, self._where[OTHER])
