"""The measured times of the steps of an engine, and the sizes of prompt chunks that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..inference.prefill_chunks import next_power_of_two
from .running_requests import RunningRequest
from .step_history import update_running_mean
from .step_runner import StepRunner
from .windows.mixed_steps import MAX_MIXED_TOKENS
from .windows.slot_windows import MIN_PROMPT_TOKENS


class StepTimes:
    """Keeps the mean seconds of steps by their size, and chooses the size of the next prompt chunk.

    Args:
        pool: Predicts the times that were not measured.
        max_gap_seconds: Largest predicted time of a chunk while requests decode.
        idle_chunk_seconds: Largest predicted time of a chunk while no request decodes; infinity needs no prediction.
        mixes_steps: Whether a step may read a chunk and decode tokens.
    """

    def __init__(
        self, pool: StepRunner, *, max_gap_seconds: float, idle_chunk_seconds: float, mixes_steps: bool
    ) -> None:
        self._pool, self._mixes_steps = pool, mixes_steps
        self._max_gap_seconds, self._idle_chunk_seconds = max_gap_seconds, idle_chunk_seconds
        self._chunk_seconds, self._decode_seconds = dict[int, float](), dict[int, float]()
        self._planned_seconds: dict[int, float] = {}
        """The seconds of chunks by their plans."""

    def record_chunk(self, tokens: int, seconds: float) -> None:
        """Record the seconds of a step that has read `tokens` prompt tokens.

        A larger size with a time that its plan cannot explain by this step gets nearer to that time. Otherwise one slow
        chunk, such as the first one with cold weights, would keep all later chunks smaller.
        """
        size = next_power_of_two(max(tokens, MIN_PROMPT_TOKENS))
        update_running_mean(self._chunk_seconds, size, seconds)
        for larger, known in self._chunk_seconds.items():
            if larger > size and known > (expected := seconds * self._compute_plan_ratio(larger, size)):
                update_running_mean(self._chunk_seconds, larger, expected)

    def record_decode(self, requests: int, seconds: float) -> None:
        """Record the seconds of a step that has decoded a token of each of `requests` requests."""
        update_running_mean(self._decode_seconds, next_power_of_two(requests), seconds)

    def record_mixed(self, tokens: int, requests: int, seconds: float) -> None:
        """Record the seconds of a mixed step: the share of the chunk, as predicted, is the time of a chunk.

        So the sizes of chunks follow the measured times also while all steps are mixed.

        Args:
            tokens: The prompt tokens of the step.
            requests: The number of requests that have decoded a token.
            seconds: The duration of the step.
        """
        chunk = self._predict_chunk_seconds(next_power_of_two(max(tokens, MIN_PROMPT_TOKENS)))
        self.record_chunk(tokens, seconds * chunk / (chunk + self.get_decode_seconds(requests)))

    def get_decode_seconds(self, requests: int) -> float:
        """Return the mean seconds of a decode step of about `requests` requests; 0 before the first one."""
        return self._decode_seconds.get(next_power_of_two(requests), 0.0)

    def choose_power_of_two_chunk_size(self, decoding: int) -> int:
        """Choose how many prompt tokens the next chunk reads at most: a power of two, or a batch.

        A chunk takes about the predicted time of a decode step, and at most `max_gap_seconds`, if other requests
        decode.

        Args:
            decoding: The number of requests that decode.
        """
        if decoding:
            step = self.get_decode_seconds(decoding)
            budget = min(max(step, self._predict_chunk_seconds(MIN_PROMPT_TOKENS)), self._max_gap_seconds)
        else:
            budget = self._idle_chunk_seconds
        size = MIN_PROMPT_TOKENS if budget < math.inf else self._pool.batch
        while size * 2 <= self._pool.batch and self._predict_chunk_seconds(size * 2) <= budget:
            size *= 2
        return min(size, self._pool.batch)

    def is_mixing_faster(
        self, reading: RunningRequest, chunk: Sequence[int], decoding: Sequence[RunningRequest]
    ) -> bool:
        """Whether a mixed step is predicted to take less time than a decode step and a chunk.

        The first decode step of a number of requests is not mixed, because its time limits the chunks.

        Args:
            reading: The request that reads its prompt.
            chunk: The next tokens of its prompt.
            decoding: The requests that have a next token.
        """
        if not self._mixes_steps or len(chunk) > MAX_MIXED_TOKENS or not decoding:
            return False
        if next_power_of_two(len(decoding)) not in self._decode_seconds:
            return False
        longest = max(len(reading.tokens) + len(chunk), *(len(one.tokens) + 1 for one in decoding))
        slots = [one.slot for one in decoding]
        return self._pool.predict_seconds_saved_by_mixing(slots, reading.slot, len(chunk), longest) > 0.0

    def _predict_chunk_seconds(self, size: int) -> float:
        """Predict the seconds of a prompt chunk of `size` tokens.

        The prediction is the measured time of the nearest size, times the ratio of the plans of both sizes. Before the
        first measurement, it comes from the plan alone.
        """
        if size in self._chunk_seconds:
            return self._chunk_seconds[size]
        if not self._chunk_seconds:
            return self._predict_planned_seconds(size)
        nearest = min(self._chunk_seconds, key=lambda known: abs(math.log2(known / size)))
        return self._chunk_seconds[nearest] * self._compute_plan_ratio(size, nearest)

    def _compute_plan_ratio(self, size: int, other_size: int) -> float:
        """Return the planned time of a chunk of `size` tokens, as a multiple of a chunk of `other_size` tokens."""
        return self._predict_planned_seconds(size) / self._predict_planned_seconds(other_size)

    def _predict_planned_seconds(self, size: int) -> float:
        if size not in self._planned_seconds:
            self._planned_seconds[size] = max(self._pool.predict_prompt_seconds(size), 1e-9)
        return self._planned_seconds[size]
