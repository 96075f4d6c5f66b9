"""The examples run as a newcomer would run them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ..given.models import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_an_example_runs(path):
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_example_of_the_readme_runs():
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "all_reduce" in done.stdout


def test_ci_runs_the_two_commands_of_the_readme():
    readme, ci = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", ".ci/run"))
    for command in ('python -m pip install -e ".[test]"', "python -m pytest"):
        assert command in readme
        assert command.removeprefix("python") in ci.replace("'", '"')
