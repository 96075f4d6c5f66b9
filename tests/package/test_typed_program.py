"""The public functions have types that mypy and pyright check strictly: they find all errors, and no others.

A checker reads the whole package, so it is run once over all programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from ..given.models.goldens import ROOT

PROGRAM = """import hocket

with hocket.Model("model.gguf", devices="cpu:0,cpu:1", split_mode="tensor", context=512) as model:
    text = "".join(model.generate("It is a truth", max_tokens=8, temperature=0.7, stop=["."]))
    ball, dance = model.embed(["a ball", "a dance"])
    print(text, float(ball @ dance), model.score(text).sum(), model.plan.count_collectives())
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
"""Parts of the program, and replacements that are errors."""

OPS_RIGHT = """import numpy as np
import hocket
from hocket import ops

x = hocket.input("x", (3, 4), np.float32)
w = hocket.weight("w", (5, 4), "q8_0")
y: hocket.Value = ops.rms_norm(x @ w.T, eps=1e-6, name="y") * 2 + x[0, None]
out, state = ops.gated_delta_net(x, x, x, x, x, x, heads="tiled")
"""
OPS_WRONG = """import hocket
from hocket import ops

x = hocket.input("x", (3, 4))
ops.rms_norm(x, epsilon=3)
ops.mul_mat(x)
ops.rope(x, x, n_dims="4")
ops.matmul(x, x)
hocket.input("x", (3, 4), 1.5)
x + "text"
"""
WRONG_LINES = range(5, 11)

pytestmark = pytest.mark.long


@pytest.fixture
def programs(tmp_path):
    """The program, and it with each error; an example, and calls of ops that are right and wrong; in a folder in which
    the package is called hocket."""
    (tmp_path / "types").mkdir()
    (tmp_path / "types" / "hocket").symlink_to(ROOT, target_is_directory=True)
    (tmp_path / "right.py").write_text(PROGRAM)
    for number, (part, fault) in enumerate(WRONG.items()):
        assert part in PROGRAM
        (tmp_path / f"wrong_{number}.py").write_text(PROGRAM.replace(part, fault))
    (tmp_path / "right_ops.py").write_text(OPS_RIGHT)
    (tmp_path / "right_example.py").write_bytes((ROOT / "examples" / "04_model.py").read_bytes())
    (tmp_path / "wrong_ops.py").write_text(OPS_WRONG)
    return tmp_path


def check_errors(errors: set[tuple[str, int]], output: object) -> None:
    """Errors are in the programs that are wrong, and of the calls of ops in each line that is."""
    assert {name for name, _ in errors} == {"wrong_ops.py", *(f"wrong_{n}.py" for n in range(len(WRONG)))}, output
    assert {line for name, line in errors if name == "wrong_ops.py"} == {*WRONG_LINES}, output


def run_checker(folder, *command) -> str:
    """Return the output of a checker."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr  # it found errors, exactly the expected ones
    return done.stdout


def test_mypy_finds_what_is_wrong_and_nothing_else(programs):
    (programs / "mypy.ini").write_text("[mypy]\nstrict = true\nfollow_imports = silent\nmypy_path = types\n")
    files = sorted(path.name for path in programs.glob("*.py"))
    options = ("--no-error-summary", "--cache-dir", os.devnull)
    output = run_checker(programs, "mypy", *options, *files).splitlines()
    check_errors({(line.split(":")[0], int(line.split(":")[1])) for line in output if ": error: " in line}, output)


def test_pyright_finds_what_is_wrong_and_nothing_else(programs):
    if find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    settings = {"include": ["*.py"], "extraPaths": ["types"], "typeCheckingMode": "strict"}
    (programs / "pyrightconfig.json").write_text(json.dumps(settings))
    output = run_checker(programs, "pyright", "--outputjson", "--pythonpath", sys.executable)
    found = [one for one in json.loads(output)["generalDiagnostics"] if one["severity"] == "error"]
    check_errors({(one["file"].rpartition("/")[2], one["range"]["start"]["line"] + 1) for one in found}, output)
