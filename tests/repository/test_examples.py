"""The examples run as a newcomer would run them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from hocket.cli import build_parser

from ..given.models import ROOT, TINY

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_an_example_runs(path):
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("number", "printed"), [(0, "all_reduce"), (1, " ")], ids=["graph", "model"])
def test_a_python_block_of_the_readme_runs(number, printed):
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[number].replace('"model.gguf"', repr(TINY))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_every_command_of_the_readme_has_the_flags_that_it_shows():
    lines = re.findall(r"^(?:mpiexec -n \d+ )?hocket (.*?)(?:  +#.*)?$", README, re.MULTILINE)
    assert len(lines) >= 8
    for words in map(shlex.split, lines):
        assert build_parser(words).parse_args(words).run


def test_ci_runs_the_two_commands_of_the_readme():
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
    for command in ('python -m pip install -e ".[test]"', "python -m pytest"):
        assert command in README
        assert command.removeprefix("python") in ci.replace("'", '"')
