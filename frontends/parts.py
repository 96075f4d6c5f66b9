"""Tokens that are read in parts, which follow each other through the devices of a session: a part is on the first of
them while the one before it is on the next."""

from __future__ import annotations

from collections.abc import Sequence

from ..scheduler import Plan

FEWEST = 64
"""Tokens of a part at least: a product of fewer takes longer for each of them."""
A_DEVICE = 10
"""Parts for each device: while a pipeline fills and empties not all are busy, a tenth of the time at most."""
GAIN = 1.1
"""How many times as fast a pipeline has to be predicted to be."""

Part = Sequence[list[int]]
"""The tokens of each sequence that are read together."""


def are_several(tokens: int) -> bool:
    """Whether so many tokens may be more than one part."""
    return tokens > FEWEST


def devices_that_follow(plan: Plan) -> int:
    """The devices through which runs like that of `plan` follow each other; 1 where that gains nothing."""
    if len(plan.lanes) == 1:
        return 1
    from ..scheduler import gain

    return len(plan.lanes) if gain(plan) >= GAIN else 1


def tokens_of_part(tokens: int, devices: int, most: int) -> int:
    """How many of so many tokens are read together, a power of two or `most`, where parts follow each other through so
    many devices."""
    nearest = 1 << (tokens // (A_DEVICE * devices) * 2 // 3).bit_length()
    return most if devices == 1 else min(most, max(FEWEST, nearest))


def parts_of(given: Part, size: int) -> list[Part]:
    """So many tokens of each sequence after the other."""
    return [[new[start : start + size] for new in given] for start in range(0, max(map(len, given)), size)]


def read_behind(
    part: Part, lengths: Sequence[int], recent: list[list[int]], remembers: int
) -> tuple[list[int], list[list[int]]]:
    """Lengths of sequences, and their last tokens, so many, once a part has been read."""
    longer = [n + len(new) for n, new in zip(lengths, part, strict=True)]
    if not remembers:
        return longer, recent
    return longer, [[*old, *new][-remembers:] for old, new in zip(recent, part, strict=True)]
