"""SentencePiece's merging by scores, for vocabularies in which tokens have equal scores.

Of the pairs with the highest score the leftmost one is merged first. HF ``tokenizers`` ranks merges instead: of two
tokens with one score it would always take the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush

from .rwkv_tokenizer import Encoding


class ScoreMerger:
    """Merges the characters of a text into tokens. A character without a token becomes its bytes, else `unknown`."""

    def __init__(self, where: Mapping[str, int], scores: Sequence[float], unknown: int | None) -> None:
        self._token_ids, self._scores, self._unknown_id = where, scores, unknown

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoding:
        """Return the ids of a text."""
        ids: list[int] = []
        for token in self._find_tokens(self._merge_characters(text)):
            if token is not None and not (token == self._unknown_id and ids[-1:] == [token]):
                ids.append(token)
        return Encoding(ids)

    def _merge_characters(self, text: str) -> Iterator[str]:
        pieces, after, before = list(text), [*range(1, len(text) + 1)], [*range(-1, len(text) - 1)]
        pairs: list[tuple[float, int, int, str]] = []

        def push_pair(left: int, right: int) -> None:
            if left >= 0 and right < len(pieces):
                whole = pieces[left] + pieces[right]
                if whole in self._token_ids:
                    heappush(pairs, (-self._scores[self._token_ids[whole]], left, right, whole))

        for left in range(len(pieces) - 1):
            push_pair(left, left + 1)
        while pairs:
            _, left, right, whole = heappop(pairs)
            if not pieces[right] or after[left] != right or pieces[left] + pieces[right] != whole:
                continue  # one of them has been merged otherwise
            pieces[left], pieces[right] = whole, ""
            after[left] = after[right]
            if after[left] < len(pieces):
                before[after[left]] = left
            push_pair(before[left], left)
            push_pair(left, after[left])
        return filter(None, pieces)

    def _find_tokens(self, pieces: Iterator[str]) -> Iterator[int | None]:
        for piece in pieces:
            token = self._token_ids.get(piece)
            spelled = [self._token_ids.get(f"<0x{byte:02X}>") for byte in piece.encode()]
            yield from [token] if token is not None else [self._unknown_id] if None in spelled else spelled
