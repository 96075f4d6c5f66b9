"""The tokenizer of PLaMo 2: the token sequence of a text with the highest sum of scores, by dynamic programming.

Costs are negative scores. From the end of the text backwards, each position stores the lowest cost of the text after
it, and the length of the first token. On equal costs the longer token wins. A character may become its bytes, at
`BYTE_FALLBACK_COST`. The algorithm is from the tokenizer that Preferred Networks publishes with the models.

Example: the costs are 3 for ``a``, 4 for ``b`` and 5 for ``ab``. The text ``ab`` becomes one token, as 5 is below 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .rwkv_tokenizer import PREFIX_LENGTH, Encoding
from .special_tokens import BYTE, UNUSED
from .vocabulary import read_numbers_per_token_or_none, read_required_token_scores

STEPS_PER_SCORE = 10_000
"""Integer costs per unit of score; scores are rounded to multiples of the reciprocal."""
BYTE_FALLBACK_COST = 1000 * STEPS_PER_SCORE
"""Cost of a character that becomes its bytes."""
UNUSABLE_COST = 2000 * STEPS_PER_SCORE
"""Cost from which on a token is never used."""


class MinCostTokenizer:
    """A tokenizer that splits a text into the tokens with the lowest sum of costs.

    Args:
        token_ids: Token ids by text.
        costs: Costs by text of the tokens that a text may use.
        byte_ids: Token id of each byte [256]; -1 for a byte without a token.
        unknown: Token id for a character that has no token, if one of its bytes also has no token.
    """

    def __init__(
        self, token_ids: Mapping[str, int], costs: Mapping[str, int], byte_ids: Sequence[int], unknown: int
    ) -> None:
        self._token_ids, self._costs, self._byte_ids, self._unknown_id = token_ids, costs, byte_ids, unknown
        lengths: dict[str, set[int]] = {}
        for text in costs:
            lengths.setdefault(text[:PREFIX_LENGTH], set()).add(len(text))
        for start, sizes in lengths.items():
            if start[0] in costs:
                sizes.add(1)
        self._lengths_by_prefix: dict[str, Sequence[int]] = {
            s: sorted(sizes, reverse=True) for s, sizes in lengths.items()
        }

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoding:
        """Encode a text: return its token ids. ``add_special_tokens`` has no effect."""
        end = len(text)
        totals, sizes = [0] * (end + 1), [0] * end
        for position in range(end - 1, -1, -1):
            best, size = totals[position + 1] + BYTE_FALLBACK_COST, 0
            for length in self._lengths_by_prefix.get(
                text[position : position + PREFIX_LENGTH]
            ) or self._lengths_by_prefix.get(text[position], ()):
                cost = self._costs.get(text[position : position + length]) if position + length <= end else None
                if cost is None:
                    continue
                cost += totals[position + length]
                if cost < best or (cost == best and not size):
                    best, size = cost, length
            totals[position], sizes[position] = best, size
        ids, position = list[int](), 0
        while position < end:
            size = sizes[position]
            ids += [self._token_ids[text[position : position + size]]] if size else self._encode_bytes(text[position])
            position += size or 1
        return Encoding(ids)

    def _encode_bytes(self, char: str) -> list[int]:
        ids = [self._byte_ids[byte] for byte in char.encode()]
        return [self._unknown_id] if -1 in ids else ids


def build_min_cost_tokenizer(
    metadata: Mapping[str, object], token_ids: Mapping[str, int], unknown: int
) -> MinCostTokenizer:
    """Build the min-cost tokenizer of a file from its token scores; a cost is a negative score.

    Padding rows of the vocabulary are no tokens.
    """
    scores = np.clip(
        np.array(read_required_token_scores(metadata, token_ids, "plamo2")) * STEPS_PER_SCORE, -UNUSABLE_COST, 2.0**31
    )
    costs = -(np.sign(scores) * np.floor(np.abs(scores) + 0.5)).astype(np.int64)
    types = read_numbers_per_token_or_none(metadata, "token_type", len(token_ids)) or (1,) * len(token_ids)
    usable = {
        text: cost
        for text, cost, type_ in zip(token_ids, costs.tolist(), types, strict=True)
        if type_ not in (BYTE, UNUSED) and cost < UNUSABLE_COST
    }
    return MinCostTokenizer(token_ids, usable, [token_ids.get(f"<0x{byte:02X}>", -1) for byte in range(256)], unknown)
