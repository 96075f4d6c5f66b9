"""The code blocks of these pages run one after the other.  A Python block prints the text below it; a console block has
commands, and lines of their output that are compared except for their numbers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hocket.cli import main
from hocket.ops.registry import REGISTRY

from ..given.models.goldens import ROOT
from ..given.pages import as_it_prints, without_numbers

NAMES = ("tutorial", "concepts", "cookbook", "simulate", "why-is-it-slow")
PAGES = ("README.md", *(f"docs/{name}.md" for name in NAMES))
CONSOLE = re.compile(r"^```console\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


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


@pytest.mark.long
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
