"""Checks of text lengths: a text must have tokens and fit the context."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.errors import format_count
from .errors import ModelError
from .models import Model


def require_nonempty_texts_fit(texts: Sequence[Sequence[int]], context: int, noun: str) -> None:
    """Require that each text has tokens and fits the context.

    Args:
        texts: The tokens of each text.
        context: Maximum tokens of a text.
        noun: The word for a text in messages; its number from 1 follows.

    Raises:
        ModelError: A text has no tokens, or too many.
    """
    for number, text in enumerate(texts, 1):
        if not text:
            raise ModelError(f"{noun} {number} of {len(texts)} has no tokens; give some text to embed")
        if len(text) > context:
            raise ModelError(
                f"{noun} {number} of {len(texts)} has {format_count(len(text), 'token')}, but the context holds "
                f"{context}; "
                "shorten it, or give a larger context=N if the model allows more"
            )


def require_tokens_fit_context(model: Model, context: int, text: str, count: int) -> None:
    """Require that a text of `count` tokens fits a context of `context` tokens.

    `text` is the name of the text in the error message.

    Raises:
        ModelError: The context is too short.
    """
    if count > context:
        longer = ", give a larger context=N" if context < model.context_length else ""
        shift = ", or go on with context_shift=True" if model.is_causal else ""
        raise ModelError(
            f"{text} would have {format_count(count, 'token')}, but the context holds {context}; shorten the "
            f"text{longer}{shift}"
        )


def require_next_token_logits(model: Model) -> None:
    """Raise `ModelError` for an encoder, which has no logits of a next token."""
    if model.is_encoder_without_logits:
        what = f"{model.architecture} is an encoder: it makes vectors of whole texts"
        raise ModelError(f"{what} and has no logits of what follows; use `hocket embed`")


def make_non_causal_append_error(sequence: int) -> ModelError:
    """Return the error for a sequence that gets more tokens, though the model sees all tokens at once."""
    return ModelError(
        f"sequence {sequence} would grow in steps, but this model sees all tokens at once; "
        "evaluate whole texts in one batch, as `hocket logits` and `hocket embed` do"
    )
