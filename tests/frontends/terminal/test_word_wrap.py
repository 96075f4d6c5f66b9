"""Word wrap adds line breaks only, and only where a line would be wider than the terminal."""

from __future__ import annotations

import io
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.utils import get_cwidth

from hocket.frontends.terminal import word_wrap
from hocket.frontends.terminal.word_wrap import WordWrapper, write_wrapped_to_stdout

WORD_TEXTS = st.text("abc.,(é\u0301漢字。「가나😀\U0001f3fd\u200d\U0001f1e9\U0001f1ea", min_size=1, max_size=12)
SPACE_TEXTS = st.text(" \t\u3000", min_size=1, max_size=5)
PROSE_TEXTS = st.lists(
    st.one_of(WORD_TEXTS, SPACE_TEXTS, st.just("\n"), st.just("`"), st.just("\r\n")), max_size=30
).map("".join)
CODE_TEXTS = st.text("ab `\n漢", max_size=60).map(lambda text: text.replace("```", "x"))
CODE_FENCES = st.sampled_from(["```", "````"])
CODE_BLOCKS = st.tuples(CODE_FENCES, st.sampled_from(["", "python"]), CODE_TEXTS).map(
    lambda t: f"\n{t[0]}{t[1]}\n{t[2]}\n{t[0]}\n"
)
COLUMN_COUNTS = st.integers(4, 40)


def wrap(text: str, width: int, splits: tuple[int, ...] = ()) -> str:
    """Return a text after word wrap, which gets it in parts that end at `splits`."""
    wrapper, ends = WordWrapper(), sorted({min(split, len(text)) for split in splits} | {0, len(text)})
    parts = [text[a:b] for a, b in pairwise(ends)]
    return "".join(wrapper.wrap(part, width) for part in parts) + wrapper.finish(width)


def count_columns(line: str) -> int:
    column = 0
    for char in line:
        column += 8 - column % 8 if char == "\t" else get_cwidth(char)
    return column


def remove_inserted_line_breaks(written: str, text: str, width: int) -> str:
    """Return the written text without inserted line breaks, and with the spaces that were left out at full lines."""
    result, line, is_full, at = "", "", False, 0
    for char in text:
        if written[at : at + 1] == "\n" != char and char not in " \t\u3000":
            at, line, is_full = at + 1, "", False
        if char in " \t\u3000" and (is_full or count_columns(line + char) > width):
            is_full = True
        else:
            assert not is_full or char in "\r\n", "a line break is missing"
            assert written[at : at + 1] == char
            at, line = at + 1, "" if char in "\r\n" else line + char
            is_full = is_full and char not in "\r\n"
        result += char
    return result + written[at:]


@given(PROSE_TEXTS.filter(lambda text: "```" not in text), COLUMN_COUNTS)
def test_only_line_breaks_are_inserted_and_no_line_is_wider_than_the_terminal(text, width):
    written = wrap(text, width)
    assert remove_inserted_line_breaks(written, text, width) == text
    assert all(count_columns(line) <= width for line in written.replace("\r", "\n").split("\n"))


@given(st.lists(st.text("abc-", min_size=1, max_size=15), min_size=1), COLUMN_COUNTS)
def test_a_line_breaks_only_before_a_word_that_does_not_fit(words, width):
    lines, expected = wrap(" ".join(words), width).split("\n"), [""]
    for word in words:
        if expected[-1] and len(f"{expected[-1]} {word}") > width:
            expected.append("")
        parts = [word[start : start + width] for start in range(0, len(word), width)]
        expected[-1] += " " * bool(expected[-1]) + parts[0]
        expected += parts[1:]
    assert [line.removesuffix(" ") for line in lines] == expected


@given(PROSE_TEXTS, COLUMN_COUNTS, st.lists(st.integers(0, 200)).map(tuple))
def test_the_parts_of_a_text_do_not_matter(text, width, splits):
    assert wrap(text, width, splits) == wrap(text, width)


@given(
    PROSE_TEXTS.filter(lambda text: "```" not in text),
    CODE_BLOCKS,
    PROSE_TEXTS.filter(lambda text: "```" not in text),
    COLUMN_COUNTS,
)
def test_code_blocks_are_unchanged_and_text_behind_them_is_wrapped(before, block, after, width):
    assert wrap(before + block + after, width) == wrap(before, width) + block + wrap(after, width)


@given(PROSE_TEXTS, COLUMN_COUNTS)
def test_only_the_present_word_waits(text, width):
    for end in range(1, len(text) + 1):
        wrapper = WordWrapper()
        wrapper.wrap(text[:end], width)
        waiting = wrapper.finish(0)
        assert text[:end].endswith(waiting)
        assert count_columns(waiting) <= width
        assert not set(waiting) & set(" \t\n\r\u3000")


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("one two three", 8, "one two \nthree"),
        ("one two  three", 7, "one two\nthree"),
        ("a\n\n  - one two", 9, "a\n\n  - one \ntwo"),
        ("see abcdefghij, ok", 6, "see \nabcdef\nghij, \nok"),
        ("漢字漢字。漢", 8, "漢字漢\n字。漢"),
        ("ab 「漢字」", 8, "ab 「漢\n字」"),
        ("한국어 문장", 8, "한국어 \n문장"),
        ("go 👨\u200d👩 \U0001f1e9\U0001f1ea", 8, "go 👨\u200d👩 \n\U0001f1e9\U0001f1ea"),
        ("a ```b c``` d", 6, "a ```b\nc``` d"),
        ("漢", 1, "漢"),
    ],
)
def test_lines_break_where_readers_expect(text, width, lines):
    assert wrap(text, width) == lines


def test_the_width_is_read_again_for_each_part():
    wrapper = WordWrapper()
    written = [wrapper.wrap(part, width) for part, width in (("one two ", 20), ("three ", 9), ("four five ", 20))]
    assert "".join(written) == "one two \nthree four five "


def test_text_that_goes_to_no_terminal_of_known_width_is_unchanged(monkeypatch):
    assert [WordWrapper().wrap(part, 0) for part in ("one t", "wo")] == ["one t", "wo"]
    written = list[str]()
    stdout = SimpleNamespace(write=written.append, flush=lambda: None, isatty=lambda: False)
    monkeypatch.setattr("sys.stdout", stdout)
    write_wrapped_to_stdout(["one t", "wo " * 100])
    assert written == ["one t", "wo " * 100, ""]
    stdout.isatty = lambda: True
    stdout.fileno = io.StringIO().fileno  # raises
    assert word_wrap.find_stdout_columns() == 0


def test_an_interrupt_writes_the_word_that_waits(monkeypatch, capsys):
    monkeypatch.setattr(word_wrap, "find_stdout_columns", lambda: 10)

    def parts():
        yield "one tw"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_wrapped_to_stdout(parts())
    assert capsys.readouterr().out == "one tw"
