"""The examples run as a newcomer would run them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from hocket.cli import build_parser_for_command

from ..given.models.goldens import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_an_example_runs(path):
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


SCREEN = 44
"""Lines of a terminal."""
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_fits_two_screens():
    assert len(README.splitlines()) <= 2 * SCREEN


def test_every_command_of_the_readme_has_the_flags_that_it_shows():
    lines = re.findall(r"^(?:mpiexec -n \d+ )?hocket (.*?)(?:  +#.*)?$", README, re.MULTILINE)
    assert len(lines) >= 5
    for words in map(shlex.split, lines):
        assert build_parser_for_command(words).parse_args(words).run


FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
COMMAND_LINE = re.compile(r"^ *(?:\$ |mpiexec [^#]*? |srun [^#]*? )?hocket ([a-z].*?)(?: +#.*| > .*)?$", re.MULTILINE)


def list_commands_of_code_blocks(page: str) -> list[list[str]]:
    """List the words of each command line in the code blocks of a page; messages of commands are no command lines."""
    lines = (line for block in FENCE.findall(page) for line in COMMAND_LINE.findall(block))
    return [words for words in map(shlex.split, lines) if not words[0].endswith(":")]


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.stem)
def test_every_command_in_a_code_block_of_a_page_has_the_flags_that_it_shows(path):
    for words in list_commands_of_code_blocks(path.read_text(encoding="utf-8")):
        assert build_parser_for_command(words).parse_args(words).run, words


def test_a_command_with_an_unknown_flag_in_a_code_block_is_found(capsys):
    (words,) = list_commands_of_code_blocks("hocket run\n```\n$ hocket run --no-such-flag  # text\nhocket: no\n```\n")
    with pytest.raises(SystemExit):
        build_parser_for_command(words).parse_args(words)


def test_ci_runs_the_two_commands_of_the_readme():
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
    for command in ('python -m pip install -e ".[test]"', "python -m pytest"):
        assert command in README
        assert command.removeprefix("python") in ci.replace("'", '"')
