"""Metadata of tokenizers, and the texts of their tokens."""

from __future__ import annotations

from hocket.frontends.gguf.tokenization.tokenizer import Tokenizer


def with_prefix(**values: object) -> dict[str, object]:
    """Return metadata of a tokenizer without the values that are None."""
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def token_texts(tokenizer: Tokenizer, text: str, **flags: bool) -> list[str]:
    """Return the texts of the tokens of a text."""
    return [tokenizer.tokens[i] for i in tokenizer.encode(text, **flags)]
