"""Speculative decoding: a small model, or a block of the model itself, guesses the next tokens, and the model reads
them all in one run.

Each token is drawn from the logits that the large model has for it, and a guess only saves the run that would have
computed them; so the text is the one that is written without guesses.  Leviathan et al., 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from ..gguf import MetadataArray
from ..models import Batch, Model
from ..rewinding import back, mark, take_back
from ..session import Session

DEFAULT_DRAFT_TOKENS = 4
"""Tokens that a draft guesses each time, unless somebody says otherwise."""


@dataclass(slots=True)
class AcceptanceCounts:
    """How often guesses were right: runs of the large model, tokens guessed, and those of them that were drawn."""

    run_count: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def __str__(self) -> str:
        rate = self.accepted_tokens / self.run_count if self.run_count else 0.0
        return f"draft: {self.accepted_tokens} of {self.drafted_tokens} tokens accepted, {rate:.2f} a step"


class Drafter(Protocol):
    """What guesses the next tokens of a text with a session of its own, or of the model for which it guesses."""

    session: Session

    def draft_tokens(self, known: Sequence[int], count: int) -> list[int]: ...

    def prepare(self, prompt: int, count: int) -> None:
        """Make the plans and kernels of so many guesses behind a prompt of so many tokens."""


class ModelDrafter:
    """Guesses what follows a text: the likeliest tokens of a session of its own, of one sequence."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._read_tokens: list[int] = []
        self._checkpoint = mark(session)

    def draft_tokens(self, known: Sequence[int], count: int) -> list[int]:
        """So many tokens behind those that are `known`, none if the context is too short for them."""
        session = self.session
        if count < 1 or len(known) + count > session.context:
            return []
        back(session, self._checkpoint)
        if list(known[: len(self._read_tokens)]) != self._read_tokens:
            session.reset(0)
            self._read_tokens = []
        logits = session.evaluate([list(known[len(self._read_tokens) :])])[0][-1]
        self._read_tokens, self._checkpoint = list(known), mark(session)
        tokens = [int(logits.argmax())]
        while len(tokens) < count:
            tokens.append(int(session.evaluate([tokens[-1:]])[0][-1].argmax()))
        return tokens

    def prepare(self, prompt: int, count: int) -> None:
        self.session.prepare(prompt)
        for tokens in range(1, count + 2):
            self.session.prepare(tokens, behind=prompt)


class MtpDrafter:
    """Guesses by the blocks of a model itself that predict further tokens (MTP), in turn; `session` is of one sequence
    and of a model made with `Model.guessing`."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def draft_tokens(self, known: Sequence[int], count: int) -> list[int]:
        """So many tokens behind those that are `known`, of which the session has read all but the last."""
        session, token, tokens = self.session, known[-1], list[int]()
        seen, at = session.seen[0][-1:], session.lengths[0]
        with session.store.turn:
            while len(tokens) < count:
                step = session.step(1, at + 1, 1, "guess", self.block_for_draft(len(tokens)))
                given = session.executor(step).run(session.model.inputs(step, Batch([[token]], [at], seen=seen)))
                token, seen, at = int(given["logits"].argmax()), given["hidden"], at + 1
                tokens.append(token)
        return tokens

    def prepare(self, prompt: int, count: int) -> None:
        for length in (1, prompt + count):
            for turn in {self.block_for_draft(guess) for guess in range(count)}:
                self.session.executor(self.session.step(1, self.session.lengths[0] + length, 1, "guess", turn))

    def block_for_draft(self, guess: int) -> int:
        """Which block makes a guess: each makes one, and the last one all others."""
        return min(guess, self.session.model.guessers - 1)


class SpeculativeDecoder:
    """A session of one sequence that reads up to `most` guesses of a draft with each token that is drawn.

    Raises `ModelError` unless both models have the same tokens.
    """

    def __init__(self, session: Session, draft: Drafter, most: int) -> None:
        self.session, self.drafter, self.max_draft_tokens = session, draft, min(most, session.batch - 1)
        self.counts = AcceptanceCounts()
        require_same_vocabulary(session.model, draft.session.model)
        self._evaluated_tokens: list[int] = []
        """The last token drawn before the guesses, and the guesses."""
        self._accepted_count = 0
        """How many of these have been drawn."""
        self._logits: npt.NDArray[np.float32] = np.zeros((0, session.model.vocabulary_size), np.float32)

    def next_logits(self, known: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits f32[1, vocabulary] behind the tokens that are `known`, the last of which was drawn just now."""
        if (
            self._accepted_count < len(self._evaluated_tokens)
            and self._evaluated_tokens[self._accepted_count] == known[-1]
        ):
            self._accepted_count += 1
            self.counts.accepted_tokens += 1
            return self._logits[self._accepted_count - 1 : self._accepted_count]
        self.discard_rejected()
        room = self.session.context - self.session.lengths[0] - 1
        guesses = self.drafter.draft_tokens(known, min(self.max_draft_tokens, room))
        self._evaluated_tokens, self._accepted_count = [known[-1], *guesses], 1
        self._logits = self.session.evaluate([self._evaluated_tokens], every_position=True, reversible=True)[0]
        self.counts.run_count += 1
        self.counts.drafted_tokens += len(guesses)
        return self._logits[:1]

    def discard_rejected(self) -> None:
        """Take back the guesses that were not drawn, as if the session had not read them."""
        if self._accepted_count < len(self._evaluated_tokens):
            take_back(self.session, self._accepted_count)
        self._evaluated_tokens, self._accepted_count = [], 0

    def prepare(self, prompt: int) -> None:
        """Make the plans and kernels that runs with guesses need behind a prompt of so many tokens."""
        self.drafter.prepare(prompt, self.max_draft_tokens)
        for count in range(1, self.max_draft_tokens + 2):
            self.session.prepare(count, behind=prompt, every_position=True, reversible=True)


def require_same_vocabulary(model: Model, draft: Model) -> None:
    """Raises `ModelError` unless a draft model has the tokens of the model for which it guesses."""
    if draft is model:
        return
    sizes = model.vocabulary_size, draft.vocabulary_size
    lists = [m.gguf.metadata.get("tokenizer.ggml.tokens") for m in (model, draft)]
    words, others = (list(tokens) if isinstance(tokens, MetadataArray) else [] for tokens in lists)
    if sizes[0] != sizes[1] or words != others:
        raise ModelError(
            f"{draft.gguf.path}: its {sizes[1]} tokens are not the {sizes[0]} tokens of {model.gguf.path}; "
            "a draft model needs the same vocabulary"
        )
