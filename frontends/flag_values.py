"""Parsing of the values of command-line flags, with one-line messages for wrong values."""

from __future__ import annotations

import argparse
import json
import math
import re


def parse_devices(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def parse_shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need numbers, as 3,1") from None


def parse_placement(text: str) -> tuple[str, str]:
    pattern, _, device = text.rpartition("=")
    if not pattern or not device:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need a regular expression and a device, as ffn_up=cpu:1")
    return pattern, device


def parse_scaled_file(text: str) -> tuple[str, float]:
    """Parse ``FILE`` or ``FILE:SCALE``; the default scale is 1."""
    path, _, scale = text.rpartition(":")
    try:
        factor = float(scale)
    except ValueError:
        path, factor = text, 1.0  # a colon of the file name
    if not path or not math.isfinite(factor):
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need a file and perhaps a number, as tone.gguf:0.5")
    return path, factor


def parse_logit_bias(text: str) -> tuple[int, float]:
    """Parse ``15043=-2.5``, or ``15043-2.5`` of llama.cpp, as a token id and a logit bias."""
    parts = re.fullmatch(r"(\d{1,10})(?:=|(?=[+-]))(\S+)", text)
    try:
        if parts is None:
            raise ValueError
        return int(parts[1]), float(parts[2])
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need a token id and a number, as 15043=-2.5") from None


def parse_json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need a JSON object, as '{{\"enable_thinking\": false}}'")
    return value


def parse_token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need token ids, as 1,2,3") from None


def parse_naturals(text: str) -> list[int]:
    return [parse_natural(part) for part in text.split(",")]


def parse_positives(text: str) -> list[int]:
    return [parse_positive(part) for part in text.split(",")]


def parse_regular_expression(text: str) -> str:
    """Return the text after a check that it is a regular expression; otherwise raise `argparse.ArgumentTypeError`."""
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as why:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need a regular expression ({why})") from None
    return text


def parse_seed(text: str) -> int:
    """Parse the seed of random numbers; -1 is a random one."""
    value = parse_natural_or_minus_one(text)
    if value >= 2**64:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need an integer from -1 to {2**64 - 1}")
    return value


def parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need a number") from None


def parse_positive(text: str) -> int:
    return _parse_integer(text, 1)


def parse_natural(text: str) -> int:
    return _parse_integer(text, 0)


def parse_top_k_or_all(text: str) -> int:
    """Parse a top-k number of tokens; -1, which means all tokens in llama.cpp, becomes 0, which means all in hocket."""
    return max(parse_natural_or_minus_one(text), 0)


def parse_natural_or_minus_one(text: str) -> int:
    return _parse_integer(text, -1)


def _parse_integer(text: str, minimum: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need an integer of at least {minimum}")
    return value
