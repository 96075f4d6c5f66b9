"""A program of ten lines that loads, generates, embeds and chats has types that mypy and pyright know, strictly."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from ..given.models.goldens import ROOT

PROGRAM = """import hocket

with hocket.Model("model.gguf", devices="cpu:0,cpu:1", split_mode="tensor", context=512) as model:
    text = "".join(model.generate("It is a truth", max_tokens=8, temperature=0.7, stop=["."]))
    ball, dance = model.embed(["a ball", "a dance"])
    print(text, float(ball @ dance), model.score(text).sum(), model.plan.collectives())
    for token in model.tokens("She was", max_tokens=2):
        print(token.id, token.text, token.logprob)
    for piece in model.chat([{"role": "user", "content": "Who are you?"}], max_tokens=32):
        print(piece, end="", flush=True)
"""
WRONG = {
    "context=512": 'context="512"',
    "max_tokens=8": "max_token=8",
    "temperature=0.7": 'temperature="hot"',
    "token.logprob": "token.probability",
}
"""Parts of the program, and what in their place is an error."""

pytestmark = pytest.mark.long


@pytest.fixture
def programs(tmp_path):
    """The program, and it with each error, in a folder in which the package is called hocket."""
    (tmp_path / "types").mkdir()
    (tmp_path / "types" / "hocket").symlink_to(ROOT, target_is_directory=True)
    (tmp_path / "right.py").write_text(PROGRAM)
    for number, (part, fault) in enumerate(WRONG.items()):
        assert part in PROGRAM
        (tmp_path / f"wrong_{number}.py").write_text(PROGRAM.replace(part, fault))
    return tmp_path


def told(folder, *command) -> str:
    """What a checker says."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr  # it found errors, those that are there
    return done.stdout


def test_mypy_finds_what_is_wrong_and_nothing_else(programs):
    (programs / "mypy.ini").write_text("[mypy]\nstrict = true\nfollow_imports = silent\nmypy_path = types\n")
    files = sorted(path.name for path in programs.glob("*.py"))
    said = told(programs, "mypy", "--no-error-summary", *files).splitlines()
    errors = {line.partition(":")[0] for line in said if ": error: " in line}
    assert errors == {*files} - {"right.py"}, said


def test_pyright_finds_what_is_wrong_and_nothing_else(programs):
    if find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    settings = {"include": ["*.py"], "extraPaths": ["types"], "typeCheckingMode": "strict"}
    (programs / "pyrightconfig.json").write_text(json.dumps(settings))
    said = told(programs, "pyright", "--outputjson", "--pythonpath", sys.executable)
    errors = {one["file"].rpartition("/")[2] for one in json.loads(said)["generalDiagnostics"]}
    assert errors == {path.name for path in programs.glob("*.py")} - {"right.py"}, said
