"""``hocket bench -np``: a benchmark of several sequences at a time, as in ``llama-batched-bench``.

The sequences read their prompts together. Then each step gives a token to each of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ...distributed import World
from ..errors import ModelError
from ..inference.micro_batches import MicroBatchedSession, make_session_micro_batched_if_faster, open_decode_schedule
from ..inference.session import DeviceGroup, Session
from ..models import Model
from ..open_model import open_session
from ..terminal.bench_rows import BenchRowFormat, Row
from ..terminal.output import write_line_to_stderr

BATCHED_HEAD = ("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s")
BATCHED_COLUMNS = ("pp", "tg", "pl", "n_kv", "t_pp", "speed_pp", "t_tg", "speed_tg", "t", "speed")


def _format_markdown_cells(row: Row) -> list[object]:
    """Format a row as cells of a Markdown table: seconds with three decimals, rates with two.

    These are the decimals of llama-batched-bench.
    """
    numbers = [(name, row[name]) for name in BATCHED_COLUMNS]
    digits = {name: 2 if name.startswith("speed") else 3 for name in BATCHED_COLUMNS}
    return [f"{number:.{digits[name]}f}" if isinstance(number, float) else number for name, number in numbers]


BATCHED_TABLE = BenchRowFormat("llama_batched_bench", BATCHED_HEAD, _format_markdown_cells)


@dataclass(frozen=True, slots=True)
class BatchedBenchmark:
    """A benchmark with several sequences at a time: each prompt length, count of new tokens and number of sequences.

    A run has at most `batch` tokens of all sequences. The result is the median of `repeats` runs.
    """

    model: Model
    prompt_lengths: Sequence[int]
    new_counts: Sequence[int]
    sequence_counts: Sequence[int]
    repeats: int
    batch: int
    world: World

    def measure_row_per_combination(self, on: DeviceGroup) -> Iterator[dict[str, object]]:
        """Measure all combinations on a device group, and yield a row for each of them.

        The columns have the names of llama-batched-bench. Repeats alternate between the numbers of sequences, since
        the load of a shared machine changes.

        Raises:
            ModelError: There is nothing to measure, or a number of sequences is 0.
        """
        if not any(self.prompt_lengths) and not any(self.new_counts):
            raise ModelError("there is nothing to measure; ask for a prompt with -p or for new tokens with -n")
        if 0 in self.sequence_counts:
            raise ModelError("got 0 sequences; -np takes numbers above 0, as 1,4,16")
        sessions = self.open_sessions_by_sequence_count(on)
        for prompt, new in product(self.prompt_lengths, self.new_counts):
            times: Mapping[int, list[tuple[float, float]]] = {count: [] for count in sessions}
            for _ in range(1 + self.repeats):  # the first one builds plans
                for count, session in sessions.items():
                    times[count].append(measure_batch_seconds(session, prompt, new))
            for count in self.sequence_counts:
                yield create_llama_batched_bench_row(
                    prompt, new, count, *sorted(times[count][1:], key=sum)[self.repeats // 2]
                )

    def open_sessions_by_sequence_count(self, on: DeviceGroup) -> dict[int, Session | MicroBatchedSession]:
        """Open a session for each number of sequences.

        All sessions share the weights.

        Raises:
            ModelError: The context of the model is too short.
        """
        prompt, new = max(self.prompt_lengths), max(self.new_counts)
        context = prompt + new
        self.model.require_context_within_training(context, f"the context of -p {prompt} and -n {new}")
        max_sequences = max(self.sequence_counts)
        one = open_session(
            self.model,
            on=on,
            sequences=max_sequences,
            context=context,
            batch=self._compute_max_tokens_per_sequence(max_sequences),
            world=self.world,
        )
        each = {
            n: make_session_micro_batched_if_faster(
                one, n, context=context, batch=self._compute_max_tokens_per_sequence(n)
            )
            for n in dict.fromkeys(self.sequence_counts)
        }
        for session in each.values():
            if isinstance(session, MicroBatchedSession):
                write_line_to_stderr(f"hocket: {session.choice}")
        return each

    def _compute_max_tokens_per_sequence(self, sequences: int) -> int:
        """Compute the maximum tokens of each sequence in one run."""
        return max(1, self.batch // sequences)


def measure_batch_seconds(session: Session | MicroBatchedSession, prompt: int, new: int) -> tuple[float, float]:
    """Measure the seconds to read the prompts of all sequences, and the seconds of `new` decode steps after them.

    Args:
        session: The session of all sequences.
        prompt: Tokens of each prompt.
        new: New tokens of each sequence.
    """
    count = session.sequences
    for sequence in range(count):
        session.reset(sequence)
    tokens = np.random.default_rng(0).integers(0, session.model.vocabulary_size, (count, prompt + new)).tolist()
    start = time.perf_counter()
    if prompt:
        session.evaluate([own[:prompt] for own in tokens])
    read = time.perf_counter()
    with open_decode_schedule(session) as steps:
        for turn in range(new + 1):
            for group, place in enumerate(steps.sequence_ranges):
                if turn:
                    steps.finish_oldest_step()
                if turn < new:
                    steps.begin_step(group, [[tokens[i][prompt + turn]] for i in place])
    return read - start, time.perf_counter() - read


def create_llama_batched_bench_row(
    prompt: int, new: int, count: int, prompt_seconds: float, new_seconds: float
) -> dict[str, object]:
    """Make the row of one batched measurement: token counts, seconds, and tokens per second of all sequences together.

    Args:
        prompt: Tokens of each prompt.
        new: New tokens of each sequence.
        count: Number of sequences.
        prompt_seconds: Seconds of all prompts.
        new_seconds: Seconds of all new tokens.
    """
    total = prompt_seconds + new_seconds
    return {
        **{"pp": prompt, "tg": new, "pl": count, "n_kv": count * (prompt + new)},
        **{"t_pp": prompt_seconds, "speed_pp": count * prompt / prompt_seconds if prompt else 0.0},
        **{"t_tg": new_seconds, "speed_tg": count * new / new_seconds if new else 0.0},
        **{"t": total, "speed": count * (prompt + new) / total},
    }
