"""The code blocks of these pages run one after the other.  A Python block prints the text below it; a console block has
commands, and lines of their output that are compared except for their numbers."""

from __future__ import annotations

import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from hocket.cli import main
from hocket.ops.registry import REGISTRY

from ..given.models.goldens import ROOT

BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?", re.DOTALL | re.MULTILINE)
OF_THE_MACHINE = re.compile(r" *[\d.]+ [KMGT]iB$", re.MULTILINE)
"""The free memory of a device, the last column of `explain`."""


def as_it_prints(page: str) -> str:
    """Return a page with the output below each block, when all run in order as one program."""
    space: dict[str, object] = {"__name__": "page"}

    def rewritten(block: re.Match[str]) -> str:
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(block["code"], "page", "exec"), space)
        text = printed.getvalue()
        same = OF_THE_MACHINE.sub("", text) == OF_THE_MACHINE.sub("", block["printed"] or "")
        expected_lines = block["printed"] or "" if same else text
        return f"```python\n{block['code']}```\n" + (f"\n```text\n{expected_lines}```\n" if expected_lines else "")

    return BLOCK.sub(rewritten, page)


NAMES = ("tutorial", "concepts", "cookbook", "simulate", "why-is-it-slow")
PAGES = ("README.md", *(f"docs/{name}.md" for name in NAMES))
CONSOLE = re.compile(r"^```console\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"[+-]?\d[\d,.]*( ?([num]?s|µs|[KMGT]i?B|[KMGT]B/s|[KMGT]?FLOP/s))?\b")


@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_print_what_stands_below_them(name, monkeypatch, update_golden):
    monkeypatch.setattr(REGISTRY, "_ops", dict(REGISTRY._ops))  # a page may register an op
    path: Path = ROOT / name
    page = path.read_text("utf-8")
    printed = as_it_prints(page)
    if update_golden:
        path.write_text(printed, "utf-8")
    else:
        assert printed == page, "run this test with --update-golden"


def without_numbers(line: str) -> str:
    """A line of output without numbers, their units and its padding."""
    return " ".join(NUMBER.sub("N", line).split())


@pytest.mark.parametrize("name", [name for name in PAGES if CONSOLE.search((ROOT / name).read_text("utf-8"))])
def test_the_commands_of_a_page_print_the_lines_below_them(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    for block in CONSOLE.findall((ROOT / name).read_text("utf-8")):
        for command in re.split(r"^\$ hocket ", block, flags=re.MULTILINE)[1:]:
            words, *expected_lines = command.splitlines()
            assert main(shlex.split(words)) == 0, words
            captured = capsys.readouterr()
            printed = {without_numbers(line) for line in (captured.out + captured.err).splitlines()}
            missing = [line for line in map(without_numbers, expected_lines) if line not in {*printed, "..."}]
            assert not missing, words
