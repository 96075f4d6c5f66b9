"""The results of a generation in the Python API: tokens with log probabilities, and whole completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..graph.validation import TEXT, ArgumentKind, instance_of, integer_between, tuple_of, validate_constructor
from .errors import ModelError
from .generation.generate import stream_text
from .generation.stop_strings import StopStringFilter
from .gguf.tokenization.tokenizer import Tokenizer, TokenToTextStream
from .serving.requests import TokenEvent

FinishReason = Literal["stop", "length"]


@validate_constructor(
    ModelError, id=integer_between(0), text=TEXT, logprob=instance_of(float), alternatives=instance_of(tuple)
)
@dataclass(frozen=True, slots=True)
class Token:
    """A generated token: its id, the text that it completes, and the natural logarithm of its probability.

    `alternatives` has the most probable tokens at this position as pairs of an id and a log probability, best first. It
    is empty unless `top_logprobs` is given.
    """

    id: int
    text: str
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@validate_constructor(
    ModelError,
    text=TEXT,
    tokens=tuple_of(instance_of(Token), "a tuple of tokens"),
    finish_reason=ArgumentKind("stop or length", lambda v: isinstance(v, str) and v in ("stop", "length")),
    prompt_tokens=integer_between(0),
)
@dataclass(frozen=True, slots=True)
class Completion:
    """A text that a model has completed, with the reason why it ended.

    - `text`: the generated text without the stop string; empty for a model without a vocabulary.
    - `tokens`: the generated tokens, without the end token.
    - `finish_reason`: ``length`` if the text reached `max_tokens` or filled the context; ``stop`` after an end token, a
      stop string or a complete grammar.
    - `prompt_tokens`: number of tokens of the prompt.
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    prompt_tokens: int


def decode_tokens(samples: Iterable[TokenEvent], tokenizer: Tokenizer | None, stops: Sequence[str]) -> Iterator[Token]:
    """Yield the sampled tokens with the texts that they complete, until the text has one of `stops`.

    Without a tokenizer the texts are empty.
    """
    decoder, until = tokenizer and TokenToTextStream(tokenizer), StopStringFilter(stops)
    for one in samples:
        text = decoder.feed(one.token) if decoder else ""
        until.feed(text)
        yield Token(one.token, text, one.logprob or 0.0, one.top)
        if until.has_matched:
            return


def complete_text(
    tokens: Iterable[Token], tokenizer: Tokenizer | None, stops: Sequence[str], *, limit: int, prompt_tokens: int
) -> Completion:
    """Return the completion of the generated tokens.

    Args:
        tokens: The tokens as `decode_tokens` yields them.
        tokenizer: The tokenizer; `None` for a model without a vocabulary.
        stops: Strings that end the text.
        limit: The number of tokens after which a text ends for its length; -1 if there is none.
        prompt_tokens: Number of tokens of the prompt.
    """
    read = tuple(tokens)
    text = "".join(stream_text((one.id for one in read), tokenizer, stops)) if tokenizer else ""
    whole = "".join(one.text for one in read)
    has_stopped = len(read) != limit or any(stop in whole for stop in stops if stop)
    return Completion(text, read, "stop" if has_stopped else "length", prompt_tokens)


def compute_logprobs(logits: npt.NDArray[np.float32], ids: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the natural log probability of token ``ids[i]`` in row i of the logits, float64 ``[rows]``."""
    rows = logits.astype(np.float64)
    row_max = rows.max(-1, keepdims=True, initial=-np.inf)
    chosen = np.take_along_axis(rows, np.array(ids, np.int64).reshape(-1, 1), -1)
    return np.asarray((chosen - row_max)[:, 0] - np.log(np.exp(rows - row_max).sum(-1)))
