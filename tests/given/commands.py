"""The commands of hocket, in this process and in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hocket.cli import main

from .models.goldens import TINY

Capture = pytest.CaptureFixture[str]


def main_ids(capsys: Capture, text: str) -> list[int]:
    """Token ids of a text, from the command."""
    assert main(["tokenize", TINY, "-p", text, "--json"]) == 0
    return list(json.loads(capsys.readouterr().out))


def hocket_process(*args: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own."""
    return subprocess.run([sys.executable, "-m", "hocket", *args], capture_output=True, **options)
