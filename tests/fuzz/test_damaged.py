"""Damaged inputs are refused in one line, or read right: some of each kind, always the same ones.

``python -m tests.fuzz`` is the long run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .__main__ import TARGETS

ROOT = Path(__file__).parents[2]
CASES = 100


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_damaged_inputs_are_refused_in_one_line_or_read_right(target, tmp_path):
    """In a process of its own, which may crash."""
    command = [sys.executable, "-m", "tests.fuzz", target, f"--cases={CASES}"]
    run = subprocess.run([*command, "--engine=lines", f"--keep={tmp_path}"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr + "".join(p.read_text() for p in tmp_path.glob("*.log"))
    assert f"{target}: {CASES} cases" in run.stdout
    assert " 0 faults" in run.stdout
