"""Wrong command lines are answered with the nearest right word, and texts end where they are asked to."""

from __future__ import annotations

import pytest

from hocket.cli import main

ONE = ("-p", "It is a truth", "--temp", "0", "-n", "8", "-c", "64")
TEXT = "It is a truth which I am not at all in love"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --prmpt a", "hocket run: there is no flag '--prmpt'; near it: --prompt; see hocket run --help"),
        ("plan m.gguf --slpit-mode=tensor", "there is no flag '--slpit-mode'; near it: --split-mode"),
        ("check --bakend cpu", "hocket check: there is no flag '--bakend'; near it: --backend"),
        ("rnu", "hocket: there is no command 'rnu'; near it: run; see hocket --help"),
        ("run a b c", "hocket run: there is no place for the argument 'b'"),
        ("--vrsion", "hocket: there is no flag '--vrsion'; near it: --version"),
        ("run --zzz", "hocket run: there is no flag '--zzz'; see hocket run --help"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ((), TEXT),
        (("-r", " at all"), TEXT[: TEXT.index(" at all")]),
        (("-r", "zzz", "-r", "I am"), "It is a truth which "),
        (("-r", "e"), TEXT[:-1]),
    ],
)
def test_a_text_ends_before_a_stop_string(more, text, capsys):
    assert main(["run", *ONE, *more]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_a_full_context_ends_in_one_line_or_shifts(capsys):
    long = ("run", "-p", "It is a truth", "--temp", "0", "-n", "40", "-c", "16", "--ignore-eos")
    assert main(long) == 2
    said = capsys.readouterr()
    assert "is full after 13 new ones" in said.err
    assert "--context-shift" in said.err
    assert main([*long, "--context-shift"]) == 0
    shifted = capsys.readouterr()
    assert shifted.out.startswith(said.out.rstrip("\n"))
    assert "decode 39 tokens" in shifted.err
