"""Several sequences at once, which ``hocket bench -np`` measures as ``llama-batched-bench`` does: their prompts, then
steps in which each gets a token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ...distributed import World
from ..errors import ModelError
from ..microbatches import Microbatches, dealt, decoding
from ..models import Model
from ..open import open_session
from ..session import Group, Session
from ..terminal.bench_rows import Row, Table
from ..terminal.output import log

HEAD = ("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s")
NAMES = ("pp", "tg", "pl", "n_kv", "t_pp", "speed_pp", "t_tg", "speed_tg", "t", "speed")


def _cells(row: Row) -> list[object]:
    """Seconds and rates with three and two digits behind the point, as llama-batched-bench has them."""
    numbers = [(name, row[name]) for name in NAMES]
    digits = {name: 2 if name.startswith("speed") else 3 for name in NAMES}
    return [f"{number:.{digits[name]}f}" if isinstance(number, float) else number for name, number in numbers]


BATCHED = Table("llama_batched_bench", HEAD, _cells)


@dataclass(frozen=True, slots=True)
class Batched:
    """What to measure: for every number of sequences each prompt, and then so many new tokens, with at most `batch`
    tokens of all sequences in a run; the median of so many repeats."""

    model: Model
    prompts: Sequence[int]
    new: Sequence[int]
    sequences: Sequence[int]
    repeats: int
    batch: int
    world: World

    def rows(self, on: Group) -> Iterator[dict[str, object]]:
        """A row for each prompt, number of new tokens and number of sequences, by the names of llama-batched-bench.

        Repeats go through the numbers of sequences in turn, since a machine that others use does not stay the same.
        """
        if not any(self.prompts) and not any(self.new):
            raise ModelError("there is nothing to measure; ask for a prompt with -p or for new tokens with -n")
        if 0 in self.sequences:
            raise ModelError("got 0 sequences; -np takes numbers above 0, as 1,4,16")
        sessions = self.sessions(on)
        for prompt, new in product(self.prompts, self.new):
            times: Mapping[int, list[tuple[float, float]]] = {count: [] for count in sessions}
            for _ in range(1 + self.repeats):  # the first makes plans
                for count, session in sessions.items():
                    times[count].append(seconds(session, prompt, new))
            for count in self.sequences:
                yield row(prompt, new, count, *sorted(times[count][1:], key=sum)[self.repeats // 2])

    def sessions(self, on: Group) -> dict[int, Session | Microbatches]:
        """A session for each number of sequences; all read the same weights.  Raises `ModelError` if the model has not
        got the context."""
        context = max(self.prompts) + max(self.new)
        self.model.check_context(context)
        most = max(self.sequences)
        one = open_session(
            self.model, on=on, sequences=most, context=context, batch=self._batch(most), world=self.world
        )
        each = {n: dealt(one, n, context=context, batch=self._batch(n)) for n in dict.fromkeys(self.sequences)}
        for session in each.values():
            if isinstance(session, Microbatches):
                log(f"hocket: {session.dealing}")
        return each

    def _batch(self, sequences: int) -> int:
        """Tokens of each sequence in a run."""
        return max(1, self.batch // sequences)


def seconds(session: Session | Microbatches, prompt: int, new: int) -> tuple[float, float]:
    """What the prompts of all sequences take, and so many steps after them, each of which waits for the one before."""
    count = session.sequences
    for sequence in range(count):
        session.reset(sequence)
    tokens = np.random.default_rng(0).integers(0, session.model.vocabulary_size, (count, prompt + new)).tolist()
    start = time.perf_counter()
    if prompt:
        session.evaluate([own[:prompt] for own in tokens])
    read = time.perf_counter()
    with decoding(session) as steps:
        for turn in range(new + 1):
            for group, place in enumerate(steps.places):
                if turn:
                    steps.ended()
                if turn < new:
                    steps.begin(group, [[tokens[i][prompt + turn]] for i in place])
    return read - start, time.perf_counter() - read


def row(prompt: int, new: int, count: int, prompt_seconds: float, new_seconds: float) -> dict[str, object]:
    """One measurement: tokens, and tokens a second of all sequences together."""
    total = prompt_seconds + new_seconds
    return {
        **{"pp": prompt, "tg": new, "pl": count, "n_kv": count * (prompt + new)},
        **{"t_pp": prompt_seconds, "speed_pp": count * prompt / prompt_seconds if prompt else 0.0},
        **{"t_tg": new_seconds, "speed_tg": count * new / new_seconds if new else 0.0},
        **{"t": total, "speed": count * (prompt + new) / total},
    }
