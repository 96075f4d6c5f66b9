"""Log probabilities of tokens in the formats of the APIs."""

from __future__ import annotations

from collections.abc import Sequence

from ...frontends.gguf.tokenization.tokenizer import Tokenizer
from ...frontends.serving.requests import TokenEvent

MIN_LOGPROB = -9999.0
"""Logprob of a token without probability, because JSON has no infinity; OpenAI uses the same number."""


def decode_or_escape_token_bytes(data: bytes) -> str:
    """Decode the bytes of a token as text; invalid UTF-8 becomes ``bytes:`` with escapes, as in OpenAI's API."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def describe_chat_logprobs(tokenizer: Tokenizer, events: Sequence[TokenEvent]) -> list[dict[str, object]]:
    """Return the logprobs of tokens in the format of chat completions and of llama-server's ``/completion``."""
    return [
        {
            **_describe_entry(tokenizer, event.token, event.logprob),
            "top_logprobs": [_describe_entry(tokenizer, token, logprob) for token, logprob in event.top],
        }
        for event in events
    ]


def _describe_entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, object]:
    data = tokenizer.token_bytes(token) if token < tokenizer.n_tokens else b""
    return {
        "id": token,
        "token": decode_or_escape_token_bytes(data),
        "bytes": list(data),
        "logprob": clip_logprob_to_minimum(logprob),
    }


def clip_logprob_to_minimum(logprob: float | None) -> float:
    """Return a logprob, but at least `MIN_LOGPROB`, because JSON has no infinity; None also gives `MIN_LOGPROB`."""
    return MIN_LOGPROB if logprob is None else max(float(logprob), MIN_LOGPROB)


def describe_legacy_logprobs(tokenizer: Tokenizer, events: Sequence[TokenEvent], offset: int) -> dict[str, object]:
    """Return the logprobs of tokens in the legacy format of text completions.

    Args:
        tokenizer: The tokenizer.
        events: The tokens.
        offset: Characters of the text before the first token.
    """
    texts = [decode_or_escape_token_bytes(tokenizer.token_bytes(event.token)) for event in events]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += 0 if text.startswith("bytes:") else len(text)
    return {
        "tokens": texts,
        "token_logprobs": [clip_logprob_to_minimum(event.logprob) for event in events],
        "top_logprobs": [
            {
                decode_or_escape_token_bytes(tokenizer.token_bytes(token)): clip_logprob_to_minimum(logprob)
                for token, logprob in event.top
            }
            for event in events
        ],
        "text_offset": offsets,
    }
