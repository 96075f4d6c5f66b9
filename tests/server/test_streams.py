"""Text of tokens: stop strings and characters cut at every place, and the tokens that belong to a part."""

from __future__ import annotations

import random

import pytest

from hocket.frontends.gguf.tokenization.tokenizer import Tokenizer, tokenizer_from_metadata
from hocket.frontends.serving.requests import TokenEvent
from hocket.server.endpoints.logprobs import decode_or_escape_token_bytes, describe_chat_logprobs
from hocket.server.streams import StopStringTextBuffer, TokenDecoder

from ..given.fakes.fake_service import build_metadata

TOKENIZER: Tokenizer = tokenizer_from_metadata(build_metadata())


def byte_tokens(text: str) -> list[int]:
    """Return one token for each byte of a text."""
    return [
        TOKENIZER.encode_continuation(bytes([byte]).decode())[0] if byte < 128 else _byte_token(byte)
        for byte in text.encode()
    ]


def _byte_token(byte: int) -> int:
    return next(i for i in range(TOKENIZER.n_tokens) if TOKENIZER.token_bytes(i) == bytes([byte]))


def read(tokens: list[int], stops: tuple[str, ...] = ()) -> tuple[str, list[int], StopStringTextBuffer]:
    """Return the text, the tokens that came with it, and the state."""
    text = StopStringTextBuffer(0, TokenDecoder(TOKENIZER), stops)
    parts = [text.feed(TokenEvent("r", token)) for token in tokens] + [text.finish()]
    found = [part for part in parts if part]
    return "".join(p.text for p in found), [e.token for p in found for e in p.tokens], text


@pytest.mark.parametrize("seed", range(20))
def test_the_stop_string_that_is_complete_first_ends_the_text(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        whole = "".join(rng.choices("abé😀", k=12))
        stops = tuple("".join(rng.choices("abé😀", k=rng.randrange(1, 4))) for _ in range(rng.randrange(1, 3)))
        complete = [(at + len(stop), at, stop) for stop in stops if (at := whole.find(stop)) >= 0]
        want = whole[: min(complete)[1]] if complete else whole
        text, tokens, state = read(byte_tokens(whole), stops)
        assert text == want, (whole, stops)
        assert state.stop_string == (min(complete)[2] if complete else "")
        assert b"".join(map(TOKENIZER.token_bytes, tokens)).decode() == want


def test_every_character_is_whole() -> None:
    text = StopStringTextBuffer(0, TokenDecoder(TOKENIZER), ())
    parts = [text.feed(TokenEvent("r", token)) for token in byte_tokens("a😀b")]
    assert [part.text if part else None for part in parts] == ["a", None, None, None, "😀", "b"]
    assert [len(part.tokens) if part else 0 for part in parts] == [1, 0, 0, 0, 4, 1]


def test_tokens_wait_with_the_text_that_may_begin_a_stop_string() -> None:
    text = StopStringTextBuffer(0, TokenDecoder(TOKENIZER), ("stop",))
    sizes = [
        (p.text, len(p.tokens)) if p else ("", 0)
        for p in [text.feed(TokenEvent("r", t)) for t in byte_tokens("a sto b")]
    ]
    assert sizes == [("a", 1), (" ", 1), ("", 0), ("", 0), ("", 0), ("sto ", 4), ("b", 1)]


def test_half_a_character_at_the_end_is_a_replacement() -> None:
    text, tokens, _ = read(byte_tokens("a😀")[:-1])
    assert (text, len(tokens)) == ("a\ufffd", 4)


def test_no_text_follows_a_stop_string() -> None:
    text, tokens, state = read(byte_tokens("one stop two"), ("stop",))
    assert (text, len(tokens), state.token_count) == ("one ", 4, 8)


def test_a_token_that_contains_the_stop_string_and_text_before_it_counts() -> None:
    stop = TOKENIZER.tokens.index("stop")
    text, tokens, _ = read([stop], ("op",))
    assert (text, tokens) == ("st", [stop])


def test_control_tokens_are_visible_if_they_are_named() -> None:
    think = TOKENIZER.tokens.index("<think>")
    assert TokenDecoder(TOKENIZER).feed(think) == ""
    assert TokenDecoder(TOKENIZER, frozenset([think])).feed(think) == "<think>"


def test_bytes_that_are_no_text_are_written_as_openai_does() -> None:
    assert decode_or_escape_token_bytes(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
    (entry,) = describe_chat_logprobs(TOKENIZER, [TokenEvent("r", _byte_token(0xF0), float("-inf"), ((0, -1.0),))])
    assert (entry["bytes"], entry["logprob"], entry["token"]) == ([0xF0], -9999.0, "bytes:\\xf0")
