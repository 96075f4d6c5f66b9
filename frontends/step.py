"""The fixed shape of one run, and the arrays that fill it: a graph is built for a `Step` and replayed with batches.

Everything that varies from run to run (tokens, positions, cache rows, lengths, wanted rows) is an input of fixed shape,
so that one plan per `Step` serves every batch that fits into it; sequences that are shorter are padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..graph.dtypes import DType
from ..graph.lazy_dataclass import dataclass
from ..graph.validation import format_value
from .errors import ModelError

LARGEST_ROW = 2**31 - 1
"""Cache rows are numbered in i32."""


@dataclass(frozen=True, slots=True)
class Step:
    """The shape of a run: what a plan depends on, and the key under which to keep it.

    ``sequences`` run side by side (B), each with up to ``tokens`` new tokens (T); attention reads the first ``cells``
    cache cells of the ``context`` cells that each sequence owns; ``outputs`` rows come out.  Where no run of a session
    adds more than ``most`` tokens, layers with a window keep as many cells as that takes.  ModelError unless all are
    positive and cells <= context.
    """

    sequences: int
    tokens: int
    cells: int
    context: int
    outputs: int
    gives: str = "logits"
    """Of each row ``logits``; ``hidden``, what the output matrix reads of it; ``both``, with what the blocks that guess
    further tokens are to read next, while they read the same tokens; ``guess``, both of one of these blocks, whose
    ``turn`` it is; or ``all`` of this."""
    most: int = 0
    """0 if that is not known: then all layers keep the whole context."""
    reversible: bool = False
    """Whether recurrent states are kept as they are behind each of the tokens, see `Frame.update`."""
    turn: int = 0
    keys: DType = DType.F32
    values: DType = DType.F32
    """What caches hold of a token: keys, or what keys and values are made of, and values."""

    def __post_init__(self) -> None:
        for name in ("sequences", "tokens", "cells", "context", "outputs"):
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size <= LARGEST_ROW:
                raise ModelError(f"step: {name} is {format_value(size)}; need an integer from 1 to {LARGEST_ROW}")
        if self.cells > self.context:
            raise ModelError(f"step: reads {self.cells} cells of {self.context}; need cells of at most the context")
        if self.sequences * self.context > LARGEST_ROW:
            raise ModelError(
                f"step: {self.sequences} sequences of {self.context} cells; need at most {LARGEST_ROW} in all; "
                "use a smaller context"
            )

    def ring(self, window: int) -> int:
        """Cells of a sequence that are written in turn where tokens see the last ``window`` ones; 0 if each token has
        a cell of its own."""
        cells = window + self.most
        return cells if window and self.most and cells < self.context else 0

    @property
    def rows(self) -> int:
        """Tokens of all sequences, padding included."""
        return self.sequences * self.tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """What one run adds: for each sequence its new tokens (none if it idles) and its length so far.

    ``wanted`` lists the rows whose logits should come out, as (sequence, index of the new token), in that order.
    None means the last new token of each sequence, so that logits row i belongs to sequence i (an idle sequence has
    a row too, without meaning).  ``before`` holds, for each sequence, the tokens that it has already, or the last
    `Model.remembers` of them, and ``seen`` f32[B, `Model.handed`] what blocks that guess read of the very last.
    """

    tokens: Sequence[Sequence[int]]
    lengths: Sequence[int]
    wanted: Sequence[tuple[int, int]] | None = None
    before: Sequence[Sequence[int]] = ()
    seen: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Ring:
    """The cells that layers with a window write, in turn: input ``ring_slot.W`` i32[B*T]; padding writes the spare
    row."""

    window: int

    @property
    def name(self) -> str:
        return f"ring_slot.{self.window}"

    def arrays(self, step: Step, batch: Batch) -> Mapping[str, npt.NDArray[np.generic]]:
        """Nothing where each token has a cell of its own."""
        if not (cells := step.ring(self.window)):
            return {}
        slot: list[int] = []
        for i, (new, length) in enumerate(zip(batch.tokens, batch.lengths, strict=True)):
            slot += [i * cells + at % cells for at in range(length, length + len(new))]
            slot += [step.sequences * cells] * (step.tokens - len(new))
        return {self.name: np.array(slot, np.int32)}


def step_inputs(step: Step, batch: Batch, *, taps: int = 0, causal: bool = True) -> dict[str, npt.NDArray[np.generic]]:
    """The input arrays of a graph built for ``step``; ``taps`` of the convolutions if the model is recurrent, else 0.

    tokens i32[B*T]; pos i32[B,T], 0 for padding; slot i32[B*T], the cache row each token writes (sequence * context +
    position; padding writes the spare row B * context); out_ids i32[outputs], repeating row 0 behind the wanted ones.
    With taps also valid f32[B,T,1], 0 for padding, and conv_rows i32[B,taps-1], the rows of [state, new tokens] that
    become the next convolution state; unless ``causal`` also last i32[B,T], the last position of the sequence.
    ModelError if the batch does not fit the step.
    """
    _check_fit(step, batch)
    shape, spare = (step.sequences, step.tokens), step.sequences * step.context
    tokens: list[int] = []
    pos: list[int] = []
    slot: list[int] = []
    for i, (new, length) in enumerate(zip(batch.tokens, batch.lengths, strict=True)):
        end, padding = length + len(new), step.tokens - len(new)
        tokens += [*new, *[0] * padding]
        pos += [*range(length, end), *[0] * padding]
        slot += [*range(i * step.context + length, i * step.context + end), *[spare] * padding]
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "tokens": np.array(tokens, np.int32),
        "pos": np.array(pos, np.int32).reshape(shape),
        "slot": np.array(slot, np.int32),
        **_of_counts(step, tuple(map(len, batch.tokens)), taps, batch.wanted is None),
    }
    if (wanted := batch.wanted) is not None:
        if bad := [(i, t) for i, t in wanted if not (0 <= i < step.sequences and 0 <= t < len(batch.tokens[i]))]:
            raise ModelError(f"batch: wants the logits of {bad[0]}; need (sequence, index of one of its new tokens)")
        arrays["out_ids"] = _output_rows(step, wanted)
    if not causal:
        ends = [length + len(new) - 1 for new, length in zip(batch.tokens, batch.lengths, strict=True)]
        arrays["last"] = np.repeat(np.array(ends, np.int32)[:, None], step.tokens, axis=1)
    return arrays


def _check_fit(step: Step, batch: Batch) -> None:
    if len(batch.tokens) != step.sequences or len(batch.lengths) != step.sequences:
        raise ModelError(
            f"batch: has tokens of {len(batch.tokens)} and lengths of {len(batch.lengths)} sequences, the step runs "
            f"{step.sequences}; give an idle sequence no tokens"
        )
    for i, (new, length) in enumerate(zip(batch.tokens, batch.lengths, strict=True)):
        if len(new) > step.tokens:
            raise ModelError(
                f"batch: sequence {i} has {len(new)} new tokens, the step takes {step.tokens}; "
                "split them or use a larger step"
            )
        if length < 0 or (new and length + len(new) > step.cells):
            raise ModelError(
                f"batch: sequence {i} would grow from {length} to {length + len(new)} tokens, the step reads "
                f"{step.cells} cells; use a step with more cells"
            )


@lru_cache(maxsize=64)
def _of_counts(
    step: Step, counts: tuple[int, ...], taps: int, last_only: bool
) -> Mapping[str, npt.NDArray[np.generic]]:
    """What follows from how many new tokens each sequence has, the same token after token; nobody may write it."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    if last_only:
        arrays["out_ids"] = _output_rows(step, [(i, max(n - 1, 0)) for i, n in enumerate(counts)])
    if taps:
        column = np.array(counts, np.int32)[:, None]
        arrays["valid"] = (np.arange(step.tokens) < column).astype(np.float32)[:, :, None]
        arrays["conv_rows"] = column + np.arange(taps - 1, dtype=np.int32)
    for array in arrays.values():
        array.setflags(write=False)
    return arrays


def _output_rows(step: Step, wanted: Sequence[tuple[int, int]]) -> npt.NDArray[np.int32]:
    if len(wanted) > step.outputs:
        raise ModelError(
            f"batch: wants {len(wanted)} rows of logits, the step gives {step.outputs}; use a step with more outputs"
        )
    rows = [i * step.tokens + t for i, t in wanted]
    return np.array([*rows, *[0] * (step.outputs - len(rows))], np.int32)
