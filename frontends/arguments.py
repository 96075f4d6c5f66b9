"""How the arguments of commands are read, and what is said of wrong ones: one line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn


def one_line(text: str) -> str:
    """A message as one line that no terminal takes for commands, whatever names it quotes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Parser(argparse.ArgumentParser):
    """Wrong usage costs one line, as every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)}; see {self.prog} --help\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Say of words that are left over which flag was meant."""
        word = next((w for w in words if w.startswith("-")), words[0])
        flag = word.partition("=")[0]
        near = get_close_matches(flag, self._option_string_actions, n=1) if flag.startswith("-") else []
        kind = "flag" if flag.startswith("-") else "place for the argument"
        self.error(f"there is no {kind} {flag!r:.80}" + (f"; near it: {near[0]}" if near else ""))


def device_list(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need numbers, as 3,1") from None


def placement(text: str) -> tuple[str, str]:
    pattern, _, device = text.rpartition("=")
    if not pattern or not device:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need a regular expression and a device, as ffn_up=cpu:1")
    return pattern, device


def scaled_file(text: str) -> tuple[str, float]:
    """A file and how often it counts, once where that is not said."""
    path, _, scale = text.rpartition(":")
    try:
        factor = float(scale)
    except ValueError:
        path, factor = text, 1.0  # a colon of the name itself
    if not path or not math.isfinite(factor):
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need a file and perhaps a number, as tone.gguf:0.5")
    return path, factor


def logit_bias(text: str) -> tuple[int, float]:
    token, _, added = text.partition("=")
    try:
        return natural(token), float(added)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need a token id and a number, as 15043=-2.5") from None


def token_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need token ids, as 1,2,3") from None


def number_list(text: str) -> list[int]:
    return [natural(part) for part in text.split(",")]


def positive(text: str) -> int:
    return _integer(text, 1)


def natural(text: str) -> int:
    return _integer(text, 0)


def seed(text: str) -> int:
    return _integer(text, -1)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need an integer of at least {least}")
    return value
