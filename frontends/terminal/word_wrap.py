"""Word wrap of generated text on a terminal: lines break between words at the width of the terminal.

A word is held back until its end is known. This is simpler than to erase a growing word at the edge and to write it
again: such control sequences need the position of the cursor, which is unknown after a resize.

Widths are numbers of terminal columns. East Asian characters and emoji have two, and lines break between them.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Iterable

from .output import write_to_stdout_unless_closed

SPACES = " \t\u3000"
"""Characters between words; the last one is the ideographic space."""
TAB_COLUMNS = 8
ZERO_WIDTH_JOINER = "\u200d"
OPENING_CATEGORIES = frozenset({"Ps", "Pi"})
"""Unicode categories of characters that end no line."""
CLOSING_CATEGORIES = frozenset({"Pe", "Pf", "Po", "Lm", "Sk"})
"""Unicode categories of characters that begin no line: closing punctuation, marks of length, and skin tones."""
FENCE_START = re.compile(r"[ \t]*```")
FENCE_LINE = re.compile(r"[ \t]*(?P<marks>`{3,})(?P<language>[^`]*)")
"""The first or the last line of a code block in Markdown; the last line names no language."""


def write_wrapped_to_stdout(texts: Iterable[str]) -> None:
    """Write the parts of a text to stdout as they come, with word wrap if stdout is a terminal of known width.

    The held-back part of a word is written also if an error or Ctrl-C ends the text.
    """
    wrapper = WordWrapper()
    try:
        for text in texts:
            write_to_stdout_unless_closed(wrapper.wrap(text, find_stdout_columns()))
    finally:
        write_to_stdout_unless_closed(wrapper.finish(find_stdout_columns()))


def find_stdout_columns() -> int:
    """Find the present width of the terminal that is stdout; 0 if stdout is no terminal or the width is unknown."""
    try:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        return os.get_terminal_size(sys.stdout.fileno()).columns if is_terminal else 0
    except (OSError, ValueError):  # stdout is closed, or has no file descriptor
        return 0


class WordWrapper:
    """Inserts line breaks into a text that arrives in parts; with a width of 0 the text stays as it is.

    - Line breaks and indentation of the text remain. Spaces beyond the width are left out, as a line break follows.
    - Lines of code blocks in triple backticks remain as they are.
    - A word that is longer than a line begins a line, and breaks at the width.
    """

    def __init__(self) -> None:
        self._line = ""  # the text since its own last line break
        self._column = 0  # columns of the written line
        self._word = ""  # the text that is held back
        self._word_columns = 0
        self._is_long_word = False  # the present word is longer than a line, so that nothing is held back
        self._fence = ""  # the backticks at the start of the present code block

    def wrap(self, text: str, width: int) -> str:
        """Return the text that can be written after one more part, for lines of `width` columns."""
        return "".join(self._add_character(char, width) for char in text) if width > 0 else self.finish(0) + text

    def finish(self, width: int) -> str:
        """Return the text that is still held back, for lines of `width` columns."""
        word, columns = self._word, self._word_columns
        self._word, self._word_columns, self._is_long_word = "", 0, False
        is_beyond = 0 < width < self._column + columns and self._column > 0 and word != ""
        self._column = columns if is_beyond else self._column + columns
        return "\n" + word if is_beyond else word

    def _add_character(self, char: str, width: int) -> str:
        """Return the text that can be written after one more character."""
        if char in "\r\n":
            written = self.finish(width) + char
            self._update_code_block_state()
            return written
        before, self._line = self._line[-1:], self._line + char
        if self._fence or FENCE_START.match(self._line):
            return self.finish(0) + char
        columns = _count_columns(char)
        if char in SPACES:
            word = self.finish(width)
            if char == "\t":
                columns = TAB_COLUMNS - self._column % TAB_COLUMNS
            if self._column + columns > width:
                self._column = max(self._column, width)
                return word
            self._column += columns
            return word + char
        written = self.finish(width) if can_break_between(before, char) else ""
        self._word, self._word_columns = self._word + char, self._word_columns + columns
        if self._is_long_word or self._word_columns > width:
            written += self._release_long_word(width)
        return written

    def _update_code_block_state(self) -> None:
        """Update, at the end of a line, whether the text is inside a code block."""
        if fence := FENCE_LINE.fullmatch(self._line):
            if not self._fence:
                self._fence = fence["marks"]
            elif fence["marks"].startswith(self._fence) and not fence["language"].strip():
                self._fence = ""
        self._line, self._column = "", 0

    def _release_long_word(self, width: int) -> str:
        """Return the held-back part of a word that is longer than a line, with line breaks at the width."""
        word, self._word, self._word_columns = self._word, "", 0
        characters = list[str]()
        for char in word:
            columns = _count_columns(char)
            if self._column > 0 and (not self._is_long_word or self._column + columns > width):
                characters.append("\n")
                self._column = 0
            self._is_long_word = True
            characters.append(char)
            self._column += columns
        return "".join(characters)


def can_break_between(before: str, after: str) -> bool:
    """Return whether a line may break between two characters that are no spaces: next to a wide character.

    Korean text has spaces between words, so its syllables count as letters. Punctuation, joined emoji and flags do not
    break.
    """
    if not before or before == ZERO_WIDTH_JOINER or _count_columns(after) == 0:
        return False
    if unicodedata.category(before) in OPENING_CATEGORIES or unicodedata.category(after) in CLOSING_CATEGORIES:
        return False
    if all(_is_regional_indicator(char) for char in (before, after)):
        return False
    return any(_count_columns(char) == 2 and not "가" <= char <= "힣" for char in (before, after))


def _is_regional_indicator(char: str) -> bool:
    """Return whether a character is a regional indicator; two of them are a flag."""
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def _count_columns(char: str) -> int:
    from prompt_toolkit.utils import get_cwidth  # takes 0.1 s to import

    return get_cwidth(char)
