"""PLaMo 2's vocabularies: of all ways to write a text in tokens, the one with the highest sum of scores.

From the end of the text backwards, each place keeps the lowest cost of the rest (the algorithm of the tokenizer that
Preferred Networks publishes with the models).  Of two ways with one sum the one with the longer first token counts.
A character may also be spelled in bytes, at `SPELLED`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .rwkv_tokenizer import PREFIX_LENGTH, Encoding
from .special_tokens import BYTE, UNUSED
from .vocabulary import read_numbers, read_scores

STEPS_PER_SCORE = 10_000
"""Scores are integers, in steps of 1 / SCORE_STEPS."""
BYTE_FALLBACK_COST = 1000 * STEPS_PER_SCORE
"""The cost of a character that no token writes."""
UNUSABLE_COST = 2000 * STEPS_PER_SCORE
"""A token with this cost is in no text."""


class MinCostTokenizer:
    """Cuts texts into tokens with the lowest sum of `costs`.  ``bytes_`` has the token of each byte, or -1.

    ``unknown`` stands for a character that has neither a token nor all of its bytes.
    """

    def __init__(self, where: Mapping[str, int], costs: Mapping[str, int], bytes_: Sequence[int], unknown: int) -> None:
        self._token_ids, self._costs, self._byte_ids, self._unknown_id = where, costs, bytes_, unknown
        lengths: dict[str, set[int]] = {}
        for text in costs:
            lengths.setdefault(text[:PREFIX_LENGTH], set()).add(len(text))
        for start, each in lengths.items():
            if start[0] in costs:
                each.add(1)
        self._lengths_by_prefix: dict[str, Sequence[int]] = {
            s: sorted(each, reverse=True) for s, each in lengths.items()
        }

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoding:
        """The ids of a text."""
        end = len(text)
        totals, sizes = [0] * (end + 1), [0] * end
        for at in range(end - 1, -1, -1):
            best, size = totals[at + 1] + BYTE_FALLBACK_COST, 0
            for length in self._lengths_by_prefix.get(text[at : at + PREFIX_LENGTH]) or self._lengths_by_prefix.get(
                text[at], ()
            ):
                cost = self._costs.get(text[at : at + length]) if at + length <= end else None
                if cost is None:
                    continue
                cost += totals[at + length]
                if cost < best or (cost == best and not size):
                    best, size = cost, length
            totals[at], sizes[at] = best, size
        ids, at = list[int](), 0
        while at < end:
            size = sizes[at]
            ids += [self._token_ids[text[at : at + size]]] if size else self._encode_bytes(text[at])
            at += size or 1
        return Encoding(ids)

    def _encode_bytes(self, char: str) -> list[int]:
        ids = [self._byte_ids[byte] for byte in char.encode()]
        return [self._unknown_id] if -1 in ids else ids


def build_min_cost_tokenizer(
    metadata: Mapping[str, object], where: Mapping[str, int], unknown: int
) -> MinCostTokenizer:
    """The tokenizer of a file.  Rows that only fill the vocabulary up to its size in the model are no tokens."""
    scores = np.clip(np.array(read_scores(metadata, where, "plamo2")) * STEPS_PER_SCORE, -UNUSABLE_COST, 2.0**31)
    costs = -(np.sign(scores) * np.floor(np.abs(scores) + 0.5)).astype(np.int64)
    types = read_numbers(metadata, "token_type", len(where)) or (1,) * len(where)
    usable = {
        text: cost
        for text, cost, type_ in zip(where, costs.tolist(), types, strict=True)
        if type_ not in (BYTE, UNUSED) and cost < UNUSABLE_COST
    }
    return MinCostTokenizer(where, usable, [where.get(f"<0x{byte:02X}>", -1) for byte in range(256)], unknown)
