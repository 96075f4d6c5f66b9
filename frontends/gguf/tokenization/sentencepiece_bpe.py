"""BPE of SentencePiece in the order of token scores, for vocabularies with tokens of equal score.

Each step merges the pair with the highest score; of pairs with equal scores it merges the leftmost one. HF
``tokenizers`` orders merges by rank instead, so it would always prefer the same one of two tokens with equal scores.

Example: the tokens ``ab`` and ``bc`` have score 0, and ``abc`` is no token. The text ``abc`` becomes ``ab``, ``c``,
because the pair ``ab`` is further left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush

from .rwkv_tokenizer import Encoding


class ScoreOrderedBpeTokenizer:
    """A BPE tokenizer that merges the pair of neighbours with the highest token score first.

    A character without a token becomes the tokens of its bytes. If a byte has no token, the character becomes
    `unknown`.
    """

    def __init__(self, token_ids: Mapping[str, int], scores: Sequence[float], unknown: int | None) -> None:
        self._token_ids, self._scores, self._unknown_id = token_ids, scores, unknown

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoding:
        """Encode a text: return its token ids. ``add_special_tokens`` has no effect."""
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
                merged = pieces[left] + pieces[right]
                if merged in self._token_ids:
                    heappush(pairs, (-self._scores[self._token_ids[merged]], left, right, merged))

        for left in range(len(pieces) - 1):
            push_pair(left, left + 1)
        while pairs:
            _, left, right, merged = heappop(pairs)
            if not pieces[right] or after[left] != right or pieces[left] + pieces[right] != merged:
                continue  # an earlier merge has used one of them
            pieces[left], pieces[right] = merged, ""
            after[left] = after[right]
            if after[left] < len(pieces):
                before[after[left]] = left
            push_pair(before[left], left)
            push_pair(left, after[left])
        return filter(None, pieces)

    def _find_tokens(self, pieces: Iterator[str]) -> Iterator[int | None]:
        for piece in pieces:
            token = self._token_ids.get(piece)
            byte_ids = [self._token_ids.get(f"<0x{byte:02X}>") for byte in piece.encode()]
            yield from [token] if token is not None else [self._unknown_id] if None in byte_ids else byte_ids
