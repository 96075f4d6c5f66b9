"""Speculative decoding: a drafter proposes the next tokens, and the model evaluates all of them in one run.

The drafter is a small model, or an MTP block of the model itself. Every token is sampled from the logits of the large
model, so the text is the same as without a drafter. An accepted draft token saves one run. Source: Leviathan et al.,
2023.

Example: the drafter proposes ``b c d`` after ``a``. One run gives the logits after ``a``, ``b``, ``c`` and ``d``. If
the samples are ``b`` and ``x``, then ``b`` is accepted, and ``c`` and ``d`` are dropped from the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from ..gguf import LazyMetadataArray
from ..inference.rewind import keep_first_tokens_of_last_step, make_checkpoint, restore_checkpoint
from ..inference.session import Session
from ..models import Batch, Model, Step

DEFAULT_DRAFT_TOKENS = 4
"""Default number of draft tokens per run."""


@dataclass(slots=True)
class DraftAcceptanceCounts:
    """Counts of speculative decoding: runs of the large model, draft tokens, and accepted draft tokens."""

    run_count: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def __str__(self) -> str:
        rate = self.accepted_tokens / self.run_count if self.run_count else 0.0
        return f"draft: {self.accepted_tokens} of {self.drafted_tokens} tokens accepted, {rate:.2f} a step"


class Drafter(Protocol):
    """Proposes the next tokens of a text (draft tokens), which the model then checks.

    `session` runs a small draft model, or the model itself.
    """

    session: Session

    def draft_tokens(self, known: Sequence[int], count: int) -> list[int]:
        """Propose up to `count` draft tokens that are likely to follow the tokens `known`."""

    def compile_plans(self, prompt_tokens: int, count: int) -> None:
        """Compile the plans and kernels for `count` draft tokens after a prompt of `prompt_tokens` tokens."""


class ModelDrafter:
    """A drafter that proposes the most probable tokens of a small draft model, in a session of one sequence."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._read_tokens: list[int] = []
        self._checkpoint = make_checkpoint(session)

    def draft_tokens(self, known: Sequence[int], count: int) -> list[int]:
        """Propose the `count` most probable tokens after the tokens `known`; none if the context is too short."""
        session = self.session
        if count < 1 or len(known) + count > session.context:
            return []
        restore_checkpoint(session, self._checkpoint)
        if list(known[: len(self._read_tokens)]) != self._read_tokens:
            session.reset(0)
            self._read_tokens = []
        logits = session.evaluate([list(known[len(self._read_tokens) :])])[0][-1]
        self._read_tokens, self._checkpoint = list(known), make_checkpoint(session)
        tokens = [int(logits.argmax())]
        while len(tokens) < count:
            tokens.append(int(session.evaluate([tokens[-1:]])[0][-1].argmax()))
        return tokens

    def compile_plans(self, prompt_tokens: int, count: int) -> None:
        self.session.compile_plans_for_tokens(prompt_tokens)
        for tokens in range(1, count + 2):
            self.session.compile_plans_for_tokens(tokens, behind=prompt_tokens)


class MtpDrafter:
    """A drafter that uses the multi-token prediction (MTP) blocks of the model itself.

    Block 0 proposes the first draft token, block 1 the second, and so on. `session` has one sequence and a model from
    `Model.with_mtp_blocks`.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    def draft_tokens(self, known: Sequence[int], count: int) -> list[int]:
        """Propose `count` tokens that may follow the tokens `known`.

        The session must have evaluated all tokens of `known` except the last one.
        """
        session = self.session
        (tokens,) = draft_tokens_with_mtp(session, [known[-1:]], session.lengths, session.mtp_rows[0][-1:], count)
        return tokens

    def compile_plans(self, prompt_tokens: int, count: int) -> None:
        for length in (1, prompt_tokens + count):
            for step in list_mtp_draft_steps(self.session, self.session.lengths[0] + length, count):
                self.session.executor(step)


def make_mtp_draft_step(session: Session, length: int, draft_index: int) -> Step:
    """Return the step that drafts the token `draft_index` (from 0) of each sequence with an MTP block.

    Each block drafts one token. The last block also drafts all later ones.

    Args:
        session: The session; its model has MTP blocks.
        length: The tokens of the longest sequence after the step.
        draft_index: The number of the draft token.
    """
    block = min(draft_index, session.model.mtp_block_count - 1)
    return session.make_step(1, length, session.sequences, "guess", block)


def list_mtp_draft_steps(session: Session, length: int, count: int) -> list[Step]:
    """List the steps that draft `count` tokens, with a longest sequence of `length` tokens after each of them."""
    return [make_mtp_draft_step(session, length, draft_index) for draft_index in range(count)]


def draft_tokens_with_mtp(
    session: Session,
    tokens: Sequence[Sequence[int]],
    lengths: Sequence[int],
    draft_inputs: npt.NDArray[np.float32],
    count: int,
) -> list[list[int]]:
    """Draft the most probable next tokens of each sequence with the MTP blocks of the model.

    Args:
        session: The session; its model has MTP blocks.
        tokens: The sampled token of each sequence, which is not evaluated yet; none for an idle sequence.
        lengths: The evaluated tokens of each sequence.
        draft_inputs: The rows that the blocks read with the sampled tokens, f32[sequences, draft_input_columns].
        count: The draft tokens of each sequence.

    Returns:
        `count` tokens for each sequence; none for an idle one.
    """
    drafts: list[list[int]] = [[] for _ in tokens]
    new, lengths = [list(one) for one in tokens], list(lengths)
    with session.store.device_lock:
        for draft_index in range(count):
            longest = max(length + len(one) for length, one in zip(lengths, new, strict=True))
            step = make_mtp_draft_step(session, longest, draft_index)
            inputs = session.model.inputs(step, Batch(new, lengths, draft_inputs=draft_inputs))
            outputs = session.executor(step).run(inputs)
            draft_inputs = outputs["hidden"]
            for i in [i for i, one in enumerate(new) if one]:
                new[i] = [int(outputs["logits"][i].argmax())]
                drafts[i] += new[i]
                lengths[i] += 1
    return drafts


class SpeculativeDecoder:
    """Generates text with fewer runs of a large model: each run checks draft tokens that a faster drafter has proposed.

    A run evaluates the newly sampled token together with the draft tokens after it. A draft token is accepted if the
    same token is sampled at its position. The session has one sequence.

    Args:
        session: The session of the large model.
        draft: The drafter.
        max_draft_tokens: Largest number of draft tokens per run.

    Raises:
        ModelError: The models have different vocabularies.
    """

    def __init__(self, session: Session, draft: Drafter, max_draft_tokens: int) -> None:
        self.session, self.drafter, self.max_draft_tokens = session, draft, min(max_draft_tokens, session.batch - 1)
        self.counts = DraftAcceptanceCounts()
        require_same_vocabulary(session.model, draft.session.model)
        self._evaluated_tokens: list[int] = []
        """The tokens of the last run: one sampled token, then the draft tokens."""
        self._accepted_count = 0
        """Tokens of the last run that have been sampled."""
        self._logits: npt.NDArray[np.float32] = np.zeros((0, session.model.vocabulary_size), np.float32)

    def compute_next_logits(self, known: Sequence[int]) -> npt.NDArray[np.float32]:
        """Compute the logits f32[1, vocabulary] after the tokens `known`; the last of them is newly sampled.

        If this token equals the next draft token, its logits are known already. Otherwise the rejected draft tokens
        are discarded, and a run evaluates the token with new draft tokens.
        """
        if (
            self._accepted_count < len(self._evaluated_tokens)
            and self._evaluated_tokens[self._accepted_count] == known[-1]
        ):
            self._accepted_count += 1
            self.counts.accepted_tokens += 1
            return self._logits[self._accepted_count - 1 : self._accepted_count]
        self.discard_rejected_drafts()
        room = self.session.context - self.session.lengths[0] - 1
        draft_tokens = self.drafter.draft_tokens(known, min(self.max_draft_tokens, room))
        self._evaluated_tokens, self._accepted_count = [known[-1], *draft_tokens], 1
        self._logits = self.session.evaluate([self._evaluated_tokens], every_position=True, reversible=True)[0]
        self.counts.run_count += 1
        self.counts.drafted_tokens += len(draft_tokens)
        return self._logits[:1]

    def discard_rejected_drafts(self) -> None:
        """Discard the rejected draft tokens of the last run from the session."""
        if self._accepted_count < len(self._evaluated_tokens):
            keep_first_tokens_of_last_step(self.session, self._accepted_count)
        self._evaluated_tokens, self._accepted_count = [], 0

    def compile_plans(self, prompt_tokens: int) -> None:
        """Compile the plans and kernels of runs with draft tokens after a prompt of `prompt_tokens` tokens."""
        self.drafter.compile_plans(prompt_tokens, self.max_draft_tokens)
        for count in range(1, self.max_draft_tokens + 2):
            self.session.compile_plans_for_tokens(count, behind=prompt_tokens, every_position=True, reversible=True)


def require_same_vocabulary(model: Model, draft: Model) -> None:
    """Raise `ModelError` unless a draft model has the same vocabulary as the model."""
    if draft is model:
        return
    sizes = model.vocabulary_size, draft.vocabulary_size
    token_arrays = [m.gguf.metadata.get("tokenizer.ggml.tokens") for m in (model, draft)]
    tokens_of_model, tokens_of_draft = (
        list(array) if isinstance(array, LazyMetadataArray) else [] for array in token_arrays
    )
    if sizes[0] != sizes[1] or tokens_of_model != tokens_of_draft:
        raise ModelError(
            f"{draft.gguf.path}: its {sizes[1]} tokens are not the {sizes[0]} tokens of {model.gguf.path}; "
            "a draft model needs the same vocabulary"
        )
