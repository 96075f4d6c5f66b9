"""Tokens that are read in parts, which follow each other through the devices of a session: a part is on the first of
them while the one before it is on the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ..graph.arrays import numbers
from ..graph.records import dataclass
from ..scheduler import Plan
from .errors import ModelError
from .step import Step

F32 = npt.NDArray[np.float32]

FEWEST = 64
"""Tokens of a part at least: a product of fewer takes longer for each of them."""
A_DEVICE = 10
"""Parts for each device: while a pipeline fills and empties not all are busy, a tenth of the time at most."""

Part = Sequence[list[int]]
"""The tokens of each sequence that are read together."""


def are_several(tokens: int) -> bool:
    """Whether so many tokens may be more than one part."""
    return tokens > FEWEST


def stages_that_follow(plan: Plan) -> int:
    """The devices or teams through which runs like that of `plan` follow each other; 1 where that gains nothing."""
    if len(plan.lanes) == 1:
        return 1
    from ..scheduler.succession import GAIN, followed, gain

    return followed(plan) if gain(plan) >= GAIN else 1


def tokens_of_part(tokens: int, devices: int, most: int) -> int:
    """How many of so many tokens are read together, a power of two or `most`, where parts follow each other through so
    many devices."""
    nearest = 1 << (tokens // (A_DEVICE * devices) * 2 // 3).bit_length()
    return most if devices == 1 else min(most, max(FEWEST, nearest))


def told(tokens: int, whole: Plan, plan_of: Callable[[int], Plan]) -> str:
    """How so many tokens of a prompt are read, why so, and what that takes as predicted; `whole` is the plan that reads
    all of them at once, ``plan_of(n)`` that of `n`."""
    from ..scheduler import time_text
    from ..scheduler.succession import GAIN, followed, gain, seconds_in_turn, stages_text

    stages, at_once = followed(whole), time_text(whole.cost.total)
    size = tokens_of_part(tokens, stages, tokens)
    if stages == 1:
        why = "all devices meet, so that none can begin with other tokens"
    elif size == tokens:
        why = f"parts have {FEWEST} tokens at least"
    elif (times := gain(plan_of(1))) < GAIN:
        why = f"steps that follow each other are {times:.2f} times as fast, and have to be {GAIN} times as fast"
    else:
        parts, through = -(-tokens // size), stages_text(stages, len(whole.lanes))
        many = "the least" if size == FEWEST else f"about {A_DEVICE} parts for each"
        return (
            f"{tokens} tokens are read in {parts} parts of {size}, {many}, that follow each other through {through}, "
            f"predicted to take {time_text(seconds_in_turn(plan_of(size), parts))}; as one {at_once}"
        )
    return f"{tokens} tokens are read as one, predicted to take {at_once}; {why}"


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


@dataclass(frozen=True, slots=True)
class Before:
    """A reversible step: what the session was before it, and what it has read."""

    step: Step
    lengths: Sequence[int]
    recent: Sequence[list[int]]
    part: Sequence[list[int]]


@dataclass(frozen=True, slots=True)
class Reading:
    """Parts as runs that follow each other: the step of each and its inputs, which of its outputs is wanted, and what
    lengths and last tokens of the sequences are behind them."""

    parts: Sequence[Part]
    steps: Sequence[Step]
    inputs: Sequence[Mapping[str, npt.NDArray[np.generic]]]
    output: str
    every_position: bool
    lengths: list[int]
    recent: list[list[int]]

    def rows_of(self, given: Iterable[Mapping[str, F32]], idle: Sequence[F32]) -> list[list[F32]]:
        """What each part gives for each sequence; those that are given for one that idles."""
        outputs = zip(given, self.parts, strict=True)
        return [split_rows(one[self.output], part, self.every_position, idle) for one, part in outputs]


def wanted(part: Part) -> list[tuple[int, int]]:
    """Every new token of every sequence."""
    return [(i, t) for i, new in enumerate(part) for t in range(len(new))]


def split_rows(rows: F32, part: Part, every_position: bool, idle: Sequence[F32]) -> list[F32]:
    """The rows of each sequence; those that are given for one that idles."""
    lengths = [len(new) if every_position else 1 for new in part]
    ends = accumulate(lengths)
    return [rows[end - n : end] if new else i for end, n, new, i in zip(ends, lengths, part, idle, strict=True)]


def joined(
    given: Part, size: int, parts: Sequence[Part], runs: Iterable[Sequence[F32]], every_position: bool, nothing: F32
) -> list[F32]:
    """What runs of parts, of so many tokens, gave for each sequence: all rows, or those of its last token."""
    rows_of: list[list[F32]] = [[] for _ in given]
    for end, (part, logits) in enumerate(zip(parts, runs, strict=True), 1):
        for rows, one, mine, new in zip(rows_of, logits, part, given, strict=True):
            if mine and (every_position or end * size >= len(new)):
                rows.append(one)
    return [rows[0] if len(rows) == 1 else np.concatenate([nothing, *rows]) for rows in rows_of]


def token_ids(sequence: int, given: Sequence[int]) -> list[int]:
    """Tokens of a sequence that a caller gives, as a list.  Raises `ModelError` unless they are integers."""
    if type(given) is list and all(type(token) is int for token in given):
        return given
    ids = numbers(f"tokens of sequence {sequence}", given, ModelError)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ModelError(
            f"tokens of sequence {sequence}: got {ids.dtype}{list(ids.shape)}; need integers in one dimension"
        )
    return list(map(int, ids))
