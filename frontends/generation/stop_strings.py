"""Stop strings: text ends before the first of them."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Passes text through in pieces until a stop string occurs; the stop string and all later text are dropped.

    The end of a piece is held back if it may be the beginning of a stop string. Example: with the stop string ``END``
    the pieces ``the E`` and ``ND`` become ``the`` and a space, then nothing.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stop_strings, self.pending_text, self.has_matched = tuple(filter(None, stops)), "", False

    def feed(self, new_text: str) -> str:
        """Add the next piece of text, and return the text that is now known to come before any stop string."""
        text = self.pending_text + new_text
        ends = [at for stop in self.stop_strings if (at := text.find(stop)) >= 0]
        self.has_matched = bool(ends)
        safe_length = (
            min(ends)
            if ends
            else len(text) - max((_partial_match_length(text, stop) for stop in self.stop_strings), default=0)
        )
        self.pending_text = "" if ends else text[safe_length:]
        return text[:safe_length]


def _partial_match_length(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` with which `text` ends; 0 if there is none."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
