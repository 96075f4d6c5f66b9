"""PLaMo 2's vocabularies: of all ways to write a text in tokens, the one with the highest sum of scores.

From the end of the text backwards, each place keeps the lowest cost of the rest (the algorithm of the tokenizer that
Preferred Networks publishes with the models).  Of two ways with one sum the one with the longer first token counts.
A character may also be spelled in bytes, at `SPELLED`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .longest_match import START, Ids
from .special_tokens import BYTE, UNUSED
from .vocabulary import read_numbers, read_scores

SCORE_STEPS = 10_000
"""Scores are integers, in steps of 1 / SCORE_STEPS."""
SPELLED = 1000 * SCORE_STEPS
"""The cost of a character that no token writes."""
NEVER = 2000 * SCORE_STEPS
"""A token with this cost is in no text."""


class MinCost:
    """Cuts texts into tokens with the lowest sum of `costs`.  ``bytes_`` has the token of each byte, or -1.

    ``unknown`` stands for a character that has neither a token nor all of its bytes.
    """

    def __init__(self, where: Mapping[str, int], costs: Mapping[str, int], bytes_: Sequence[int], unknown: int) -> None:
        self._where, self._costs, self._bytes, self._unknown = where, costs, bytes_, unknown
        lengths: dict[str, set[int]] = {}
        for text in costs:
            lengths.setdefault(text[:START], set()).add(len(text))
        for start, each in lengths.items():
            if start[0] in costs:
                each.add(1)
        self._lengths: dict[str, Sequence[int]] = {s: sorted(each, reverse=True) for s, each in lengths.items()}

    def encode(self, text: str, add_special_tokens: bool = False) -> Ids:
        """The ids of a text."""
        end = len(text)
        totals, sizes = [0] * (end + 1), [0] * end
        for at in range(end - 1, -1, -1):
            best, size = totals[at + 1] + SPELLED, 0
            for length in self._lengths.get(text[at : at + START]) or self._lengths.get(text[at], ()):
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
            ids += [self._where[text[at : at + size]]] if size else self._spell_bytes(text[at])
            at += size or 1
        return Ids(ids)

    def _spell_bytes(self, char: str) -> list[int]:
        ids = [self._bytes[byte] for byte in char.encode()]
        return [self._unknown] if -1 in ids else ids


def build_min_cost(metadata: Mapping[str, object], where: Mapping[str, int], unknown: int) -> MinCost:
    """The tokenizer of a file.  Rows that only fill the vocabulary up to its size in the model are no tokens."""
    scores = np.clip(np.array(read_scores(metadata, where, "plamo2")) * SCORE_STEPS, -NEVER, 2.0**31)
    costs = -(np.sign(scores) * np.floor(np.abs(scores) + 0.5)).astype(np.int64)
    types = read_numbers(metadata, "token_type", len(where)) or (1,) * len(where)
    usable = {
        text: cost
        for text, cost, type_ in zip(where, costs.tolist(), types, strict=True)
        if type_ not in (BYTE, UNUSED) and cost < NEVER
    }
    return MinCost(where, usable, [where.get(f"<0x{byte:02X}>", -1) for byte in range(256)], unknown)
