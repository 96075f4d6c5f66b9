"""Errors for texts without tokens, and for texts with more tokens than the context holds."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import ModelError
from .models import Model


def check_texts(texts: Sequence[Sequence[int]], context: int, noun: str) -> None:
    """Require texts that have tokens and fit the context. Messages call a text `noun`, with its number from 1.

    Raises:
        ModelError: A text does not.
    """
    for number, text in enumerate(texts, 1):
        if not text:
            raise ModelError(f"{noun} {number} of {len(texts)} has no tokens; give some text to embed")
        if len(text) > context:
            raise ModelError(
                f"{noun} {number} of {len(texts)} has {len(text)} tokens, but the context holds {context}; "
                "shorten it, or give a larger context=N if the model allows more"
            )


def check_room(model: Model, context: int, text: str, count: int) -> None:
    """Require that a context of `context` tokens holds `text`, which would have `count` tokens.

    Raises:
        ModelError: It does not.
    """
    if count > context:
        longer = ", give a larger context=N" if context < model.context_length else ""
        shift = ", or go on with context_shift=True" if model.is_causal else ""
        raise ModelError(
            f"{text} would have {count} tokens, but the context holds {context}; shorten the text{longer}{shift}"
        )
