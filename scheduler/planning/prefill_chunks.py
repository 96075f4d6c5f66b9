"""Prefill chunks: the tokens of a prompt in several runs that pass through the pipeline stages one after the other.

While the second stage computes a chunk, the first stage computes the next chunk. A prompt takes the time of one stage
for all chunks, and on the other stages the time of the slowest chunk. A token that sees more tokens takes longer, so
chunks of equal time become smaller towards the end. Each chunk reads all weights, so a large number of chunks takes
longer in total.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import lt

from ...graph.errors import PlanError
from ...graph.lazy_dataclass import dataclass
from ...graph.validation import CALLABLE, ArgumentKind, instance_of, integer_between, pair_of, validate_arguments
from ..ir.execution_plan import Plan
from ..pipelining.stage_times import StageTime, estimate_stage_times

PlanForChunk = Callable[[int, int], Plan]
"""Return the plan of a run; the arguments are its token count and the number of visible cells of the context."""


FEWER_CHUNKS_TOLERANCE = 1.005
"""The largest ratio of the time of fewer chunks to the least time; each chunk has costs that no plan knows.

With 1.03, prompts of 2,048 tokens on two devices were read in 9 chunks, and took 3 % longer than in 14 (Emerald
Rapids).
"""

CALIBRATED_VISIBLE_SHARE = 0.75
"""The share of the attention cells of a plan that tokens saw when the attention speed was measured."""

MAX_TOKENS = 1 << 40
"""The largest accepted token count."""
PAIR_OF_COUNTS = pair_of(integer_between(1, MAX_TOKENS), integer_between(1, MAX_TOKENS))
CHUNK_SIZES = ArgumentKind(
    "a sequence of ascending integers above zero",
    lambda v: (
        isinstance(v, Sequence)
        and len(v) > 0
        and all(map(integer_between(1, MAX_TOKENS).accepts, v))
        and all(map(lt, v, v[1:]))
    ),
)


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """The chunks of a prompt, and the predicted seconds of the prefill.

    - `chunk_sizes` has the token count of each chunk, in order.
    - `seconds` is the time until the last pipeline stage has computed the last chunk.
    """

    chunk_sizes: tuple[int, ...]
    seconds: float


class ChunkTimeModel:
    """A model of the time of a prefill chunk on each pipeline stage.

    The time is interpolated from four plans. These plans combine few or many tokens with few or many cells of the KV
    cache. Between them, the time is bilinear in tokens and cells.

    Args:
        plan_of: Returns the plan of a run with a token count and a cell count.
        token_counts: The smaller and the larger token count of the plans.
        cell_counts: The smaller and the larger cell count of the plans.
    """

    @validate_arguments(PlanError, plan_of=CALLABLE, token_counts=PAIR_OF_COUNTS, cell_counts=PAIR_OF_COUNTS)
    def __init__(self, plan_of: PlanForChunk, token_counts: tuple[int, int], cell_counts: tuple[int, int]) -> None:
        self._min_tokens, self._token_span = token_counts[0], max(1, token_counts[1] - token_counts[0])
        self._min_cells, self._cell_span = cell_counts[0], max(1, cell_counts[1] - cell_counts[0])
        of = {
            asked: estimate_stage_times(plan_of(*asked))
            for asked in {(t, c) for t in token_counts for c in cell_counts}
        }
        stops = [*zip(*(of[t, c] for c in cell_counts for t in token_counts), strict=True)]
        self._message_coefficients = [
            _compute_bilinear_coefficients(*(stage_time.message_seconds for stage_time in corners)) for corners in stops
        ]
        self._work_coefficients = [
            _compute_bilinear_coefficients(*(stage_time.compute_seconds for stage_time in corners)) for corners in stops
        ]

    def _compute_interpolation_coordinates(self, token_count: int, end_token: int) -> tuple[float, float]:
        """Compute where a run lies between the four plans: the pair (tokens, cells) for the bilinear interpolation.

        A coordinate is 0 at the smaller count of the plans and 1 at the larger one. A token reads all cells before the
        run, and on average half of the cells of the run.

        Args:
            token_count: The tokens of the run.
            end_token: The sequence length at the end of the run.
        """
        cells = (end_token - token_count / 2) / CALIBRATED_VISIBLE_SHARE
        return (token_count - self._min_tokens) / self._token_span, (cells - self._min_cells) / self._cell_span

    def predict_stage_times(self, token_count: int, end_token: int) -> list[StageTime]:
        """Predict the time of each pipeline stage for one chunk: its messages and its compute.

        Args:
            token_count: The tokens of the chunk.
            end_token: The sequence length at the end of the chunk.
        """
        m, n = self._compute_interpolation_coordinates(token_count, end_token)
        message_seconds, work = (
            [max(0.0, a + b * m + c * n + d * m * n) for a, b, c, d in of]
            for of in (self._message_coefficients, self._work_coefficients)
        )
        return [*map(StageTime, message_seconds, work)]

    def predict_slowest_stage_seconds(self, token_count: int, end_token: int) -> float:
        """Predict the compute seconds of the slowest pipeline stage for one chunk.

        This function is fast, because it is called some hundred times before a prompt begins.

        Args:
            token_count: The tokens of the chunk.
            end_token: The sequence length at the end of the chunk.
        """
        m, n = self._compute_interpolation_coordinates(token_count, end_token)
        return max(0.0, *(a + b * m + c * n + d * m * n for a, b, c, d in self._work_coefficients))


def _compute_bilinear_coefficients(
    few_tokens_few_cells: float,
    many_tokens_few_cells: float,
    few_tokens_many_cells: float,
    many_tokens_many_cells: float,
) -> tuple[float, float, float, float]:
    """Compute the coefficients a, b, c, d of the bilinear function a + b x + c y + d x y from four corner values.

    x is 0 for few tokens and 1 for many tokens. y is 0 for few cells and 1 for many cells.
    """
    return (
        few_tokens_few_cells,
        many_tokens_few_cells - few_tokens_few_cells,
        few_tokens_many_cells - few_tokens_few_cells,
        many_tokens_many_cells - few_tokens_many_cells - many_tokens_few_cells + few_tokens_few_cells,
    )


@validate_arguments(
    PlanError,
    token_count=integer_between(0, MAX_TOKENS),
    past_tokens=integer_between(0, MAX_TOKENS),
    allowed_sizes=CHUNK_SIZES,
    time_model=instance_of(ChunkTimeModel),
)
def choose_prefill_chunks(
    token_count: int, past_tokens: int, allowed_sizes: Sequence[int], time_model: ChunkTimeModel
) -> PrefillChunks:
    """Choose the prefill chunks of a prompt: the fewest chunks that take about the shortest time.

    Several ways to divide the prompt are compared. Each has a time limit, and chunks as large as the limit allows. The
    limits are the times of a chunk of each allowed size, at the beginning and at the end of the prompt.

    Args:
        token_count: Tokens of the prompt that are not in the KV cache yet.
        past_tokens: Tokens that are already in the KV cache.
        allowed_sizes: The chunk sizes with a plan, ascending. The last chunk may be smaller; it costs as much as the
            next size.
        time_model: The model of the stage times.
    """
    end = past_tokens + token_count
    times = {
        time_model.predict_slowest_stage_seconds(size, cells)
        for size in allowed_sizes
        for cells in (past_tokens + min(size, token_count), end)
    }
    splits = {
        _split_within_time_of_slowest_stage(seconds, past_tokens, end, allowed_sizes, time_model) for seconds in times
    }
    candidates = [
        PrefillChunks(
            chunk_sizes, compute_pipelined_prefill_seconds(chunk_sizes, past_tokens, allowed_sizes, time_model)
        )
        for chunk_sizes in splits
    ]
    max_seconds = FEWER_CHUNKS_TOLERANCE * min(parts.seconds for parts in candidates)
    good = [parts for parts in candidates if parts.seconds <= max_seconds]
    return min(good, key=lambda parts: (len(parts.chunk_sizes), parts.seconds))


def _split_within_time_of_slowest_stage(
    max_seconds: float, past_tokens: int, end_token: int, allowed_sizes: Sequence[int], time_model: ChunkTimeModel
) -> tuple[int, ...]:
    """Split a prompt into the largest chunks that take at most `max_seconds` each on the slowest pipeline stage.

    If even a chunk of the smallest allowed size takes longer, this size is used. Returns the token counts of the
    chunks.

    Args:
        max_seconds: The time limit of a chunk.
        past_tokens: Tokens that are already in the KV cache.
        end_token: The sequence length at the end of the prompt.
        allowed_sizes: The chunk sizes with a plan, ascending.
        time_model: The model of the stage times.
    """
    chunk_sizes: list[int] = []
    while past_tokens < end_token:
        fitting = bisect_right(
            allowed_sizes,
            max_seconds,
            key=lambda size: time_model.predict_slowest_stage_seconds(size, min(past_tokens + size, end_token)),
        )
        chunk_sizes.append(min(allowed_sizes[max(0, fitting - 1)], end_token - past_tokens))
        past_tokens += chunk_sizes[-1]
    return tuple(chunk_sizes)


def compute_pipelined_prefill_seconds(
    chunk_sizes: Sequence[int], past_tokens: int, allowed_sizes: Sequence[int], time_model: ChunkTimeModel
) -> float:
    """Compute the seconds of a prompt's prefill in pipelined chunks, until the last stage has computed the last chunk.

    Args:
        chunk_sizes: The token counts of the chunks.
        past_tokens: Tokens that are already in the KV cache.
        allowed_sizes: The chunk sizes with a plan, ascending.
        time_model: The model of the stage times.
    """
    done: list[float] = []
    for size, end in zip(chunk_sizes, accumulate(chunk_sizes, initial=past_tokens), strict=False):
        here, there = 0.0, time_model.predict_stage_times(round_up_to_chunk_size(size, allowed_sizes), end + size)
        done = done or [0.0] * len(there)
        for at, stage_time in enumerate(there):
            here = done[at] = max(done[at], here + stage_time.message_seconds) + stage_time.compute_seconds
    return max(done, default=0.0)


def round_up_to_chunk_size(token_count: int, allowed_sizes: Sequence[int]) -> int:
    """Round a token count up to the next allowed chunk size."""
    return allowed_sizes[bisect_left(allowed_sizes, token_count)]
