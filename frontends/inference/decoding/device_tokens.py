"""Decode steps that choose tokens, or select the tokens that may be chosen, on the device.

- The token that step n chooses is an operand of step n + 1. It stays in a state of the graph (`NEXT_TOKEN_STATE`).
- The most probable token: the host reads the token and its logit, eight bytes for each sequence.
- A sampled token: the host also reads the candidates, a few hundred tokens with their logits, and chooses among them in
  float64 as among all tokens. The choice of the host is the token of the text. The device has chosen the same token, or
  a launched step is undone (`launch_ahead`). So a seed gives the same text on all devices.
- A token of a grammar: the host computes the mask of allowed tokens while the model runs. A second step masks the
  logits and selects candidates, and the host chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....backends.capabilities import HasSeparateMemory
from ....graph.errors import HocketError
from ....ops.reduction.token_sampling import SAMPLING_NUMBERS
from ....scheduler import DeferredInterrupts
from ...models import Batch, Step
from ...models.inputs.step import MASKED_KIND, SAMPLED_KIND, TOKEN_KIND, UNMASKED_KIND
from ..prefill_chunks import F32, PrefillChunk, next_power_of_two
from ..session import Session

MIN_CANDIDATES, MAX_CANDIDATES = 64, 512
"""Tokens that a step selects as candidates. More would be sorted and read for little: all logits are read then."""


class DeviceArgmaxToken(NamedTuple):
    """The most probable token of a sequence, and its logit. The first token wins among equal logits.

    A NaN counts as the largest logit.
    """

    token: int
    logit: float


class TokenCandidates(NamedTuple):
    """The possible next tokens of a sequence: the tokens with the largest logits, and tokens that the host named.

    - `largest`: the token with the largest logit, or a NaN.
    - `ids`, `logits`: the tokens in no order, some of them twice, and their logits.
    - `mask_error`: the error of the mask of allowed tokens, which the choice raises.
    """

    largest: DeviceArgmaxToken
    ids: npt.NDArray[np.int32]
    logits: F32
    mask_error: HocketError | None = None

    def list_in_token_order(self) -> tuple[npt.NDArray[np.int32], F32]:
        """Return the tokens in ascending order, each once, and their logits."""
        ids, places = np.unique(self.ids, return_index=True)
        return ids, self.logits[places]


class TokenChoice(NamedTuple):
    """The sampling parameters with which a device chooses the next token of a sequence.

    - `limit`: how many of the largest logits the choice reads, after biases and penalties.
    - `numbers`: the numbers `SAMPLING_NUMBERS`.
    - `changed`, `bias`, `occurrences`: tokens that have a bias or a penalty, the bias, and the number of occurrences
      among the recent tokens. A token may occur several times. `changed` is None if the choice changes no logit.
    - `counts_read_token`: whether the token that the step reads is a recent token. `occurrences` leaves it out.
    """

    limit: int
    numbers: Sequence[float] = (0.0,) * len(SAMPLING_NUMBERS)
    changed: Sequence[int] | None = None
    bias: Sequence[float] = ()
    occurrences: Sequence[int] = ()
    counts_read_token: bool = False


class CandidateCount(NamedTuple):
    """The sizes of a step that selects candidates: `largest` logits and `named` further tokens, for each sequence."""

    largest: int
    named: int


def can_choose_tokens_on_device(session: object) -> bool:
    """Whether decode steps of a session can choose tokens on its device, and save time by it.

    The model has to be causal, without MTP blocks and without inputs that the host computes from tokens. The session
    has one device with a memory of its own and no value watch.
    """
    return (
        isinstance(session, Session)
        and len(session.group) == 1
        and isinstance(session.group[0][0], HasSeparateMemory)
        and session.world.size == 1
        and session.model.is_causal
        and not session.model.mtp_block_count
        and not session.model.ngram_history_token_count
        and session.watch is None
        and session.min_tokens == 1
    )


def make_step_choosing_tokens_on_device(session: Session, length: int) -> Step:
    """Return the decode step that chooses tokens on the device, in the context bucket of `length`."""
    return session.make_step(1, length, session.sequences, kind=TOKEN_KIND)


def choose_candidate_count(session: Session, largest: int | None, named: int) -> CandidateCount | None:
    """Choose the sizes of a step that selects candidates; None if all logits must be read.

    Few sizes occur, because each needs a plan.

    Args:
        session: The session.
        largest: How many of the largest logits the choice reads; None if it may read all.
        named: How many tokens have a bias or a penalty.
    """
    named = next_power_of_two(max(named, MIN_CANDIDATES)) if named else 0
    if largest is None or (count := next_power_of_two(max(largest + named, MIN_CANDIDATES))) > MAX_CANDIDATES:
        return None
    return CandidateCount(min(count, session.model.vocabulary_size), named)


@lru_cache(maxsize=64)
def _with_candidates(step: Step, kind: str, count: CandidateCount) -> Step:
    return replace(step, output_kind=kind, candidate_count=count.largest, named_token_count=count.named)


def make_device_sampling_step(
    session: Session, length: int, choices: Sequence[TokenChoice | None]
) -> tuple[Step, dict[str, npt.NDArray[Any]]] | None:
    """Make the decode step in which the device samples tokens, with its further inputs; None if it cannot.

    Args:
        session: A session that `can_choose_tokens_on_device`.
        length: The largest length after the step.
        choices: The choice for each sequence, None for an idle one.
    """
    known = [TokenChoice(1) if choice is None else choice for choice in choices]
    changes_logits = any(choice.changed is not None for choice in known)
    named = max(len(choice.changed or ()) for choice in known)
    largest = max(choice.limit for choice in known) + changes_logits  # the token that the step reads is a candidate
    if (count := choose_candidate_count(session, largest, max(named, changes_logits))) is None:
        return None
    inputs: dict[str, npt.NDArray[Any]] = {
        "limit": np.array([choice.limit for choice in known], np.int32),
        "numbers": np.array([choice.numbers for choice in known], np.float64).view(np.int64),
    }
    if changes_logits:
        rows = session.sequences
        ids, bias = np.zeros((rows, count.named), np.int32), np.zeros((rows, count.named + 1), np.float32)
        occurrences = np.zeros(bias.shape, np.int32)
        for i, choice in enumerate(known):
            end = len(choice.changed or ())
            ids[i, :end], bias[i, :end], occurrences[i, :end] = choice.changed or (), choice.bias, choice.occurrences
            occurrences[i, -1] = choice.counts_read_token
        inputs |= {"named_ids": ids, "bias": bias, "occurrences": occurrences}
    step = session.make_step(1, length, session.sequences, kind="logits")
    return _with_candidates(step, SAMPLED_KIND, count), inputs


def evaluate_to_masked_candidates(
    session: Session,
    tokens: PrefillChunk,
    choices: Sequence[TokenChoice | None],
    compute_mask: Callable[[int], npt.NDArray[np.uint32]],
) -> list[TokenCandidates] | None:
    """Append at most one token to each sequence, and return the candidates among the tokens that a mask allows.

    The masks are computed while the device runs the model. An error of one is a part of the candidates.

    Args:
        session: A session that `can_choose_tokens_on_device`.
        tokens: The new token of each sequence; an idle sequence has none, and its candidates have no meaning.
        choices: The choice for each sequence, None for an idle one.
        compute_mask: Returns the mask of a sequence that is not idle, with a bit for each allowed token.

    Returns:
        The candidates, or None, without a step, if all logits must be read.
    """
    with session.store.device_lock:
        session.require_evaluable_tokens(tokens)
        steps = make_masked_steps(session, find_longest_length_after(session.lengths, tokens), choices)
        if steps is None:
            return None
        executor, selection = map(session.executor, steps)
        inputs = session.model.inputs(steps[0], Batch(tokens, session.lengths, tables=session.tables))
        ids = np.zeros((session.sequences, steps[1].named_token_count), np.int32)
        for row, choice, new in zip(ids, choices, tokens, strict=True):
            if choice is not None and choice.changed is not None:
                row[: len(choice.changed) + len(new)] = *choice.changed, *new
        with DeferredInterrupts():  # states and lengths belong together
            run = executor.launch(inputs)
            session.reversible_step = None
            try:
                bits = np.full((session.sequences, -(-session.model.vocabulary_size // 32)), -1, np.int32)
                errors: dict[int, HocketError] = {}
                for i in (i for i, new in enumerate(tokens) if new):
                    try:
                        mask = compute_mask(i).view(np.int32)
                    except HocketError as error:
                        errors[i] = error
                    else:
                        bits[i, : mask.size], bits[i, mask.size :] = mask, 0
                chosen = selection.launch({"token_bits": bits} | ({"named_ids": ids} if ids.size else {}))
            except BaseException:
                run.undo()
                raise
            run.finish(chosen)
            session.record_evaluated_chunk(tokens)
            rows = split_candidates_by_sequence(chosen.finish(), ids)
            return [row._replace(mask_error=errors.get(i)) for i, row in enumerate(rows)]


def make_masked_steps(session: Session, length: int, choices: Sequence[TokenChoice | None]) -> tuple[Step, Step] | None:
    """Return the step that stores its logits, and the step that selects candidates among them.

    The second step is the same in all context buckets. The result is None if all logits must be read.

    Args:
        session: A session that `can_choose_tokens_on_device`.
        length: The largest length after the step.
        choices: The choice for each sequence, None for an idle one.
    """
    largest = max(1 if choice is None else choice.limit for choice in choices)
    named = max(0 if choice is None or choice.changed is None else len(choice.changed) + 1 for choice in choices)
    if (count := choose_candidate_count(session, largest, named)) is None:
        return None
    first = session.make_step(1, 1, session.sequences, kind="logits")
    unmasked = session.make_step(1, length, session.sequences, kind=UNMASKED_KIND)
    return unmasked, _with_candidates(first, MASKED_KIND, count)


def find_longest_length_after(lengths: Sequence[int], tokens: PrefillChunk) -> int:
    """Return the length of the longest sequence after a step with these new tokens."""
    return max(length + len(new) for length, new in zip(lengths, tokens, strict=True))


def split_candidates_by_sequence(
    results: Mapping[str, npt.NDArray[Any]], named_ids: npt.NDArray[np.int32]
) -> list[TokenCandidates]:
    """Split the outputs of a candidate step into the candidates of each sequence.

    `named_ids` are the further tokens of the step.
    """
    candidates = []
    for token, top, own, logits in zip(
        results["token"].tolist(), results["ids"], named_ids, results["logits"], strict=True
    ):
        logit = float(logits[0]) if token == top[0] else np.nan  # only a NaN comes before the largest number
        candidates.append(TokenCandidates(DeviceArgmaxToken(token, logit), np.concatenate((top, own)), logits))
    return candidates
