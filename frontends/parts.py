"""Tokens that are read in parts, which follow each other through the devices of a session: a part is on the first of
them while the one before it is on the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from ..graph.array_checks import as_number_array
from ..graph.lazy_dataclass import dataclass
from ..scheduler import Plan
from .errors import ModelError
from .step import Step

F32 = npt.NDArray[np.float32]

FEWEST = 64
"""Tokens of a part at least: a product of fewer takes longer for each of them."""
STEPS = (4, 6)
"""Sizes of parts, in quarters of `FEWEST` doubled again and again: each has a plan, so they are few."""

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


def sizes_of(most: int) -> tuple[int, ...]:
    """Numbers of tokens that a part may have, ascending, where it has so many at most."""
    grown = (FEWEST * step * 2**times // 4 for times in range(most.bit_length()) for step in STEPS)
    return (*sorted({size for size in grown if size < most}), most)


def room_of(tokens: int, most: int) -> int:
    """The tokens of the run that reads a part of so many."""
    return next(size for size in sizes_of(most) if size >= tokens) if are_several(tokens) else bucket(tokens)


def bucket(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def equal_sizes(tokens: int, most: int) -> tuple[int, ...]:
    """Parts of so many tokens each, but for the last."""
    return tuple(min(most, tokens - start) for start in range(0, tokens, most))


def sizes_in_turn(
    tokens: int, behind: int, most: int, cells_of: Callable[[int], int], plan_of: Callable[[int, int], Plan]
) -> tuple[int, ...]:
    """The parts, of so many tokens each, of a prompt behind other tokens that follow each other.

    ``plan_of(tokens, length)`` is the plan of a run at whose end a sequence has that length, `cells_of` which it sees.
    """
    from ..scheduler import Predicted, in_parts

    sizes = sizes_of(most)
    ends = [behind + min(sizes[0], tokens), behind + tokens]
    cells = {cells_of(length): length for length in ends}
    predicted = Predicted(
        lambda count, seen: plan_of(count, cells[seen]), (sizes[0], sizes[-1]), (min(cells), max(cells))
    )
    return in_parts(tokens, behind, sizes, predicted).sizes


def told(tokens: int, whole: Plan, plan_of: Callable[[int], Plan]) -> str:
    """How so many tokens of a prompt are read, why so, and what that takes as predicted; `whole` is the plan that reads
    all of them at once, ``plan_of(n)`` that of `n`."""
    from ..scheduler import Predicted, in_parts, time_text
    from ..scheduler.succession import GAIN, followed, gain, stages_text

    stages, at_once = followed(whole), time_text(whole.cost.total)
    if stages == 1:
        why = "all devices meet, so that none can begin with other tokens"
    elif not are_several(tokens):
        why = f"parts have {FEWEST} tokens at least"
    elif (times := gain(plan_of(1))) < GAIN:
        why = f"steps that follow each other are {times:.2f} times as fast, and have to be {GAIN} times as fast"
    else:
        sizes = sizes_of(tokens)
        predicted = Predicted(lambda count, cells: plan_of(count), (sizes[0], sizes[-1]), (tokens, tokens))
        way = in_parts(tokens, 0, sizes, predicted)
        if len(way.sizes) > 1:
            each = ", ".join(map(str, dict.fromkeys(way.sizes)))
            return (
                f"{tokens} tokens are read in {len(way.sizes)} parts of {each}, "
                f"that follow each other through {stages_text(stages, len(whole.lanes))}, "
                f"predicted to take {time_text(way.seconds)}; as one {at_once}"
            )
        why = "parts take longer"
    return f"{tokens} tokens are read as one, predicted to take {at_once}; {why}"


def parts_of(given: Part, sizes: Iterable[int]) -> list[Part]:
    """So many tokens of each sequence, one part after the other."""
    ends = [*accumulate(sizes, initial=0)]
    return [[new[start:end] for new in given] for start, end in pairwise(ends)]


def outputs_of(parts: Sequence[Part], every_position: bool, hidden: bool) -> list[str]:
    """What each part gives: logits only where somebody asks for them, since the output matrix is large."""
    last = {at for new in zip(*parts, strict=True) for at in [at for at, own in enumerate(new) if own][-1:]}
    asked = [not hidden and (every_position or at in last) for at in range(len(parts))]
    return ["logits" if logits else "hidden" for logits in asked]


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
    outputs: Sequence[str]
    every_position: bool
    lengths: list[int]
    recent: list[list[int]]

    def rows_of(self, given: Iterable[Mapping[str, F32]], idle: Sequence[F32]) -> list[list[F32]]:
        """What each part gives for each sequence; those that are given for one that idles."""
        outputs = zip(given, self.outputs, self.parts, strict=True)
        return [split_rows(one[name], part, self.every_position, idle) for one, name, part in outputs]


def wanted(part: Part) -> list[tuple[int, int]]:
    """Every new token of every sequence."""
    return [(i, t) for i, new in enumerate(part) for t in range(len(new))]


def split_rows(rows: F32, part: Part, every_position: bool, idle: Sequence[F32]) -> list[F32]:
    """The rows of each sequence; those that are given for one that idles."""
    lengths = [len(new) if every_position else 1 for new in part]
    ends = accumulate(lengths)
    return [rows[end - n : end] if new else i for end, n, new, i in zip(ends, lengths, part, idle, strict=True)]


def joined(
    given: Part, parts: Sequence[Part], runs: Iterable[Sequence[F32]], every_position: bool, nothing: F32
) -> list[F32]:
    """What runs of parts gave for each sequence: all rows, or those of its last token; `nothing` for one that idles."""
    rows_of: list[list[F32]] = [[] for _ in given]
    ends = accumulate(max(map(len, part)) for part in parts)
    for end, part, logits in zip(ends, parts, runs, strict=True):
        for rows, one, mine, new in zip(rows_of, logits, part, given, strict=True):
            if mine and (every_position or end >= len(new)):
                rows.append(one)
    return [np.concatenate(rows) if len(rows) > 1 else rows[0] if rows else nothing for rows in rows_of]


def token_ids(sequence: int, given: Sequence[int]) -> list[int]:
    """Tokens of a sequence that a caller gives, as a list.  Raises `ModelError` unless they are integers."""
    if type(given) is list and all(type(token) is int for token in given):
        return given
    ids = as_number_array(f"tokens of sequence {sequence}", given, ModelError)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ModelError(
            f"tokens of sequence {sequence}: got {ids.dtype}{list(ids.shape)}; need integers in one dimension"
        )
    return list(map(int, ids))
