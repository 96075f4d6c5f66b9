"""Prefill in chunks: a prompt is split into chunks that run pipelined through the devices of a session.

While one chunk is on the second device, the next chunk is on the first device. Example: 300 tokens in three chunks of
100 take 4 stage times on two devices instead of 6.
"""

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
"""Minimum tokens of a chunk; a matrix product with fewer rows takes more time per row."""
STEPS = (4, 6)
"""Chunk sizes, as quarters of `MIN_CHUNK_TOKENS` times a power of two. Each size has a plan, so there are few."""

Part = Sequence[list[int]]
"""The tokens of each sequence that run together."""


def are_several(tokens: int) -> bool:
    """Return whether `tokens` tokens are enough for more than one chunk."""
    return tokens > FEWEST


def stages_that_follow(plan: Plan) -> int:
    """Return the number of pipeline stages of a plan, or 1 if pipelining gains nothing."""
    if len(plan.lanes) == 1:
        return 1
    from ..scheduler.succession import GAIN, followed, gain

    return followed(plan) if gain(plan) >= GAIN else 1


def sizes_of(most: int) -> tuple[int, ...]:
    """Return the allowed chunk sizes in tokens, ascending, up to `most`.

    Up to 300 tokens these are 64, 96, 128, 192, 256 and 300.
    """
    grown = (FEWEST * step * 2**times // 4 for times in range(most.bit_length()) for step in STEPS)
    return (*sorted({size for size in grown if size < most}), most)


def room_of(tokens: int, most: int) -> int:
    """Return the allowed chunk size for a chunk of `tokens` tokens, at most `most`."""
    return next(size for size in sizes_of(most) if size >= tokens) if are_several(tokens) else bucket(tokens)


def bucket(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def equal_sizes(tokens: int, most: int) -> tuple[int, ...]:
    """Return the sizes of chunks of `most` tokens each; the last one may be smaller."""
    return tuple(min(most, tokens - start) for start in range(0, tokens, most))


def sizes_in_turn(
    tokens: int, behind: int, most: int, cells_of: Callable[[int], int], plan_of: Callable[[int, int], Plan]
) -> tuple[int, ...]:
    """Return the sizes in tokens of the chunks of a prompt that run pipelined.

    Args:
        tokens: Tokens of the prompt.
        behind: Tokens that the sequence already has.
        most: Maximum tokens of a chunk.
        cells_of: The context bucket for a sequence length.
        plan_of: The plan of a run with a token count, after which a sequence has a given length.
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
    """Explain in one sentence how a prompt is split into chunks, the reason, and the predicted time.

    Args:
        tokens: Tokens of the prompt.
        whole: The plan that reads the whole prompt at once.
        plan_of: The plan that reads a given number of tokens.
    """
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
    """Split the tokens of each sequence into chunks of the given sizes, in order."""
    ends = [*accumulate(sizes, initial=0)]
    return [[new[start:end] for new in given] for start, end in pairwise(ends)]


def outputs_of(parts: Sequence[Part], every_position: bool, hidden: bool) -> list[str]:
    """Return the output kind of each chunk: ``logits`` only if a caller needs them, as the output matrix is large."""
    last = {at for new in zip(*parts, strict=True) for at in [at for at, own in enumerate(new) if own][-1:]}
    asked = [not hidden and (every_position or at in last) for at in range(len(parts))]
    return ["logits" if logits else "hidden" for logits in asked]


def read_behind(
    part: Part, lengths: Sequence[int], recent: list[list[int]], remembers: int
) -> tuple[list[int], list[list[int]]]:
    """Return the lengths and the last `remembers` tokens of the sequences after a chunk has been read."""
    longer = [n + len(new) for n, new in zip(lengths, part, strict=True)]
    if not remembers:
        return longer, recent
    return longer, [[*old, *new][-remembers:] for old, new in zip(recent, part, strict=True)]


@dataclass(frozen=True, slots=True)
class Before:
    """A reversible step: the state of the session before it, and the tokens that it read."""

    step: Step
    lengths: Sequence[int]
    recent: Sequence[list[int]]
    part: Sequence[list[int]]


@dataclass(frozen=True, slots=True)
class Reading:
    """A prefill in chunks that run pipelined: the step, the inputs and the output kind of each chunk.

    `lengths` and `recent` are the state of the sequences after the last chunk.
    """

    parts: Sequence[Part]
    steps: Sequence[Step]
    inputs: Sequence[Mapping[str, npt.NDArray[np.generic]]]
    outputs: Sequence[str]
    every_position: bool
    lengths: list[int]
    recent: list[list[int]]

    def rows_of(self, given: Iterable[Mapping[str, F32]], idle: Sequence[F32]) -> list[list[F32]]:
        """Return the rows of each chunk per sequence; an idle sequence gets its rows of `idle`."""
        outputs = zip(given, self.outputs, self.parts, strict=True)
        return [split_rows(one[name], part, self.every_position, idle) for one, name, part in outputs]


def wanted(part: Part) -> list[tuple[int, int]]:
    """Return (sequence, token index) of every new token."""
    return [(i, t) for i, new in enumerate(part) for t in range(len(new))]


def split_rows(rows: F32, part: Part, every_position: bool, idle: Sequence[F32]) -> list[F32]:
    """Split output rows by sequence; an idle sequence gets its rows of `idle`."""
    lengths = [len(new) if every_position else 1 for new in part]
    ends = accumulate(lengths)
    return [rows[end - n : end] if new else i for end, n, new, i in zip(ends, lengths, part, idle, strict=True)]


def joined(
    given: Part, parts: Sequence[Part], runs: Iterable[Sequence[F32]], every_position: bool, nothing: F32
) -> list[F32]:
    """Join the rows of all chunks per sequence.

    Args:
        given: The new tokens of each sequence.
        parts: The same tokens in chunks.
        runs: Per chunk, the rows of each sequence.
        every_position: Join the rows of all chunks, instead of taking the row of the last token.
        nothing: The rows of an idle sequence.
    """
    rows_of: list[list[F32]] = [[] for _ in given]
    ends = accumulate(max(map(len, part)) for part in parts)
    for end, part, logits in zip(ends, parts, runs, strict=True):
        for rows, one, mine, new in zip(rows_of, logits, part, given, strict=True):
            if mine and (every_position or end >= len(new)):
                rows.append(one)
    return [np.concatenate(rows) if len(rows) > 1 else rows[0] if rows else nothing for rows in rows_of]


def token_ids(sequence: int, given: Sequence[int]) -> list[int]:
    """Return tokens from a caller as a list of integers; `sequence` names them in messages.

    Raises:
        ModelError: The tokens are not integers in one dimension.
    """
    if type(given) is list and all(type(token) is int for token in given):
        return given
    ids = as_number_array(f"tokens of sequence {sequence}", given, ModelError)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ModelError(
            f"tokens of sequence {sequence}: got {ids.dtype}{list(ids.shape)}; need integers in one dimension"
        )
    return list(map(int, ids))
