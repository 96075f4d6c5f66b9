"""Prefill in chunks: a prompt is split into chunks that run pipelined through the devices of a session.

While one chunk is on the second device, the next chunk is on the first device. Example: 300 tokens in three chunks of
100 take 4 stage times on two devices instead of 6. A row here is the logits or the hidden state of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...graph.array_checks import as_real_number_array
from ...graph.lazy_dataclass import dataclass
from ...scheduler import Plan
from ..errors import ModelError
from ..models.inputs.step import Step

F32 = npt.NDArray[np.float32]

MIN_CHUNK_TOKENS = 64
"""Minimum tokens of a chunk; a matrix product with fewer rows takes more time per row."""
CHUNK_SIZE_QUARTERS = (4, 6)
"""Chunk sizes, as quarters of `MIN_CHUNK_TOKENS` times a power of two. Each size needs a plan, so there are few."""

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]]"
"""Token ids of a text: a sequence of integers, or an integer array ``[tokens]``."""
PrefillChunk = Sequence[list[int]]
"""New tokens of each sequence that run together; an idle sequence has an empty list."""


def is_long_enough_to_chunk(tokens: int) -> bool:
    """Return whether a prompt of `tokens` tokens is long enough for more than one chunk."""
    return tokens > MIN_CHUNK_TOKENS


def count_useful_pipeline_stages(plan: Plan) -> int:
    """Return the number of pipeline stages of a plan; 1 if pipelined runs would hardly be faster."""
    if len(plan.device_plans) == 1:
        return 1
    from ...scheduler.pipelining.stage_times import (
        MIN_PIPELINE_SPEEDUP,
        count_pipeline_stages,
        estimate_pipeline_speedup,
    )

    return count_pipeline_stages(plan) if estimate_pipeline_speedup(plan) >= MIN_PIPELINE_SPEEDUP else 1


def list_allowed_chunk_sizes(max_tokens: int) -> tuple[int, ...]:
    """Return the allowed chunk sizes in tokens, ascending, up to `max_tokens`.

    Example: up to 300 tokens these are 64, 96, 128, 192, 256 and 300.
    """
    grown = (
        MIN_CHUNK_TOKENS * step * 2**times // 4
        for times in range(max_tokens.bit_length())
        for step in CHUNK_SIZE_QUARTERS
    )
    return (*sorted({size for size in grown if size < max_tokens}), max_tokens)


def round_up_to_chunk_size(tokens: int, max_tokens: int) -> int:
    """Return the smallest allowed chunk size that holds `tokens` tokens, at most `max_tokens`."""
    return (
        next(size for size in list_allowed_chunk_sizes(max_tokens) if size >= tokens)
        if is_long_enough_to_chunk(tokens)
        else next_power_of_two(tokens)
    )


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def split_into_full_chunks(tokens: int, max_tokens: int) -> tuple[int, ...]:
    """Split `tokens` tokens into chunks of `max_tokens` tokens, and return their sizes; the last one may be smaller."""
    return tuple(min(max_tokens, tokens - start) for start in range(0, tokens, max_tokens))


def choose_pipelined_chunks(
    prompt_tokens: int,
    past_tokens: int,
    max_tokens: int,
    context_bucket_of: Callable[[int], int],
    plan_of: Callable[[int, int], Plan],
) -> tuple[int, ...]:
    """Choose the chunk sizes in tokens of a prompt that runs pipelined, by predicted time.

    Args:
        prompt_tokens: Tokens of the prompt.
        past_tokens: Tokens that the sequence already has.
        max_tokens: Maximum tokens of a chunk.
        context_bucket_of: Returns the context bucket for a sequence length.
        plan_of: Returns the plan of a run with a token count, after which a sequence has a given length.
    """
    from ...scheduler import ChunkTimeModel, choose_prefill_chunks

    sizes = list_allowed_chunk_sizes(max_tokens)
    ends = [past_tokens + min(sizes[0], prompt_tokens), past_tokens + prompt_tokens]
    cells = {context_bucket_of(length): length for length in ends}
    predicted = ChunkTimeModel(
        lambda count, seen: plan_of(count, cells[seen]), (sizes[0], sizes[-1]), (min(cells), max(cells))
    )
    return choose_prefill_chunks(prompt_tokens, past_tokens, sizes, predicted).chunk_sizes


def explain_prefill_chunks(prompt_tokens: int, whole_plan: Plan, plan_of: Callable[[int], Plan]) -> str:
    """Explain in one sentence how a prompt is split into chunks, with the reason and the predicted time.

    Args:
        prompt_tokens: Tokens of the prompt.
        whole_plan: The plan that reads the whole prompt at once.
        plan_of: Returns the plan that reads a given number of tokens.
    """
    from ...scheduler import ChunkTimeModel, choose_prefill_chunks, format_seconds
    from ...scheduler.pipelining.stage_times import (
        MIN_PIPELINE_SPEEDUP,
        count_pipeline_stages,
        estimate_pipeline_speedup,
        format_stage_count,
    )

    stages, at_once = count_pipeline_stages(whole_plan), format_seconds(whole_plan.cost.total)
    if stages == 1:
        why = "all devices meet, so that none can begin with other tokens"
    elif not is_long_enough_to_chunk(prompt_tokens):
        why = f"parts have {MIN_CHUNK_TOKENS} tokens at least"
    elif (times := estimate_pipeline_speedup(plan_of(1))) < MIN_PIPELINE_SPEEDUP:
        why = (
            f"steps that follow each other are {times:.2f} times as fast, "
            f"and have to be {MIN_PIPELINE_SPEEDUP} times as fast"
        )
    else:
        sizes = list_allowed_chunk_sizes(prompt_tokens)
        predicted = ChunkTimeModel(
            lambda count, cells: plan_of(count), (sizes[0], sizes[-1]), (prompt_tokens, prompt_tokens)
        )
        choice = choose_prefill_chunks(prompt_tokens, 0, sizes, predicted)
        if len(choice.chunk_sizes) > 1:
            each = ", ".join(map(str, dict.fromkeys(choice.chunk_sizes)))
            return (
                f"{prompt_tokens} tokens are read in {len(choice.chunk_sizes)} parts of {each}, "
                f"that follow each other through {format_stage_count(stages, len(whole_plan.device_plans))}, "
                f"predicted to take {format_seconds(choice.seconds)}; as one {at_once}"
            )
        why = "parts take longer"
    return f"{prompt_tokens} tokens are read as one, predicted to take {at_once}; {why}"


def split_tokens_into_chunks(tokens: PrefillChunk, sizes: Iterable[int]) -> list[PrefillChunk]:
    """Split the new tokens of each sequence into chunks of the given sizes, in order."""
    ends = [*accumulate(sizes, initial=0)]
    return [[new[start:end] for new in tokens] for start, end in pairwise(ends)]


def choose_logits_or_only_hidden(chunks: Sequence[PrefillChunk], every_position: bool, hidden: bool) -> list[str]:
    """Choose for each chunk of a prompt whether it returns ``logits`` or only ``hidden`` rows.

    The output matrix is large, so a chunk returns logits only if the caller needs them.
    """
    last = {at for new in zip(*chunks, strict=True) for at in [at for at, own in enumerate(new) if own][-1:]}
    asked = [not hidden and (every_position or at in last) for at in range(len(chunks))]
    return ["logits" if logits else "hidden" for logits in asked]


def advance_lengths_and_recent_tokens(
    chunk: PrefillChunk, lengths: Sequence[int], recent_tokens: list[list[int]], recent_count: int
) -> tuple[list[int], list[list[int]]]:
    """Return the state of all sequences after a chunk: their lengths, and the last `recent_count` tokens of each.

    Args:
        chunk: The new tokens of each sequence.
        lengths: The lengths before the chunk.
        recent_tokens: The last tokens of each sequence before the chunk.
        recent_count: Number of last tokens to keep.
    """
    longer = [n + len(new) for n, new in zip(lengths, chunk, strict=True)]
    if not recent_count:
        return longer, recent_tokens
    return longer, [[*old, *new][-recent_count:] for old, new in zip(recent_tokens, chunk, strict=True)]


@dataclass(frozen=True, slots=True)
class ReversibleStep:
    """A step that can be undone in part: its tokens `chunk`, and the lengths and recent tokens before it."""

    step: Step
    lengths: Sequence[int]
    recent: Sequence[list[int]]
    chunk: Sequence[list[int]]


@dataclass(frozen=True, slots=True)
class PipelinedPrefill:
    """A prompt in chunks that run pipelined over the devices: the step, the inputs and the output kind of each chunk.

    `lengths` and `recent` are the lengths and the recent tokens of the sequences after the last chunk.
    """

    chunks: Sequence[PrefillChunk]
    steps: Sequence[Step]
    inputs: Sequence[Mapping[str, npt.NDArray[np.generic]]]
    outputs: Sequence[str]
    every_position: bool
    lengths: list[int]
    recent: list[list[int]]

    def split_chunk_rows_by_sequence(
        self, results: Iterable[Mapping[str, F32]], idle_rows: Sequence[F32]
    ) -> list[list[F32]]:
        """Split the output rows of each chunk by sequence.

        An idle sequence, which has no tokens in the prefill, gets its entry of `idle_rows`.
        """
        outputs = zip(results, self.outputs, self.chunks, strict=True)
        return [split_output_rows(one[name], part, self.every_position, idle_rows) for one, name, part in outputs]


def list_sequence_token_pairs(chunk: PrefillChunk) -> list[tuple[int, int]]:
    """List all new tokens of a chunk as pairs: the number of the sequence, and the index of the token in it."""
    return [(i, t) for i, new in enumerate(chunk) for t in range(len(new))]


def split_output_rows(rows: F32, chunk: PrefillChunk, every_position: bool, idle_rows: Sequence[F32]) -> list[F32]:
    """Split the output rows of a chunk by sequence.

    An idle sequence, which has no tokens in the chunk, gets its entry of `idle_rows`.
    """
    lengths = [len(new) if every_position else 1 for new in chunk]
    ends = accumulate(lengths)
    return [rows[end - n : end] if new else i for end, n, new, i in zip(ends, lengths, chunk, idle_rows, strict=True)]


def join_chunk_rows(
    tokens: PrefillChunk,
    chunks: Sequence[PrefillChunk],
    chunk_rows: Iterable[Sequence[F32]],
    every_position: bool,
    idle_rows: F32,
) -> list[F32]:
    """Join the output rows of all chunks, for each sequence.

    Args:
        tokens: The new tokens of each sequence.
        chunks: The same tokens in chunks.
        chunk_rows: Per chunk, the rows of each sequence.
        every_position: Join the rows of all chunks, instead of taking the row of the last token.
        idle_rows: The rows of an idle sequence.
    """
    rows_of: list[list[F32]] = [[] for _ in tokens]
    ends = accumulate(max(map(len, part)) for part in chunks)
    for end, part, logits in zip(ends, chunks, chunk_rows, strict=True):
        for rows, one, mine, new in zip(rows_of, logits, part, tokens, strict=True):
            if mine and (every_position or end >= len(new)):
                rows.append(one)
    return [np.concatenate(rows) if len(rows) > 1 else rows[0] if rows else idle_rows for rows in rows_of]


def convert_to_token_ids(sequence: int, tokens: TokenIds) -> list[int]:
    """Return the tokens from a caller as a list of integers; `sequence` names them in messages.

    Raises:
        ModelError: The tokens are not integers in one dimension.
    """
    if type(tokens) is list and all(type(token) is int for token in tokens):
        return tokens
    ids = as_real_number_array(f"tokens of sequence {sequence}", tokens, ModelError)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ModelError(
            f"tokens of sequence {sequence}: got {ids.dtype}{list(ids.shape)}; need integers in one dimension"
        )
    return list(map(int, ids))
