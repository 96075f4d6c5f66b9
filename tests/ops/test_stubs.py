"""What editors, `help` and type checkers see of ops is what the registry says."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys

import pytest

import hocket
from hocket import GraphError, ops
from hocket.ops import stubs

from ..given.models.goldens import ROOT

RIGHT = """
import numpy as np
import hocket
from hocket import ops

x = hocket.input("x", (3, 4), np.float32)
w = hocket.weight("w", (5, 4), "q8_0")
y: hocket.Value = ops.rms_norm(x @ w.T, eps=1e-6, name="y") * 2 + x[0, None]
out, state = ops.gated_delta_net(x, x, x, x, x, x, heads="tiled")
"""
WRONG = """
import hocket
from hocket import ops

x = hocket.input("x", (3, 4))
ops.rms_norm(x, epsilon=3)
ops.mul_mat(x)
ops.rope(x, x, n_dims="4")
ops.matmul(x, x)
hocket.input("x", (3, 4), 1.5)
x + "text"
"""


def test_the_stub_is_up_to_date():
    assert (ROOT / "ops" / "__init__.pyi").read_text("utf-8") == stubs.page(), (
        "run python -m hocket.ops.stubs, and put what it writes into ops/__init__.pyi"
    )


def test_help_says_what_an_op_does_and_how_it_is_called():
    said = pydoc.render_doc(ops.rope, renderer=pydoc.plaintext)
    assert 'rope(x, pos, factors=None, *, n_dims, mode="normal"' in said
    assert ops.rope.documentation.splitlines()[0] in said
    assert len(said.splitlines()) < 20
    assert (
        str(inspect.signature(ops.clamp)) == "(x: 'Value', *, min: 'float', max: 'float', name: 'str' = '') -> 'Value'"
    )


@pytest.mark.parametrize(
    ("asked", "near"), [("matmul", "mul_mat"), ("rmsnorm", "rms_norm"), ("rope_multy", "rope_multi")]
)
def test_an_op_that_is_not_there_is_answered_with_the_nearest(asked, near):
    with pytest.raises(AttributeError, match=f"no op '{asked}'; near it: {near}"):
        getattr(ops, asked)


def test_an_op_is_registered_once_and_with_attributes_that_graphs_keep():
    def twice(x):
        """``2 x``."""
        return 2 * x

    def add(x):
        return x

    def strange(x, *, how: complex = 1j):
        return x

    with pytest.raises(GraphError, match="there is an op 'add' already"):
        hocket.register(ops.op("x[...] -> [...]")(add))
    with pytest.raises(GraphError, match="attribute how is annotated 'complex'; need int, float"):
        hocket.register(ops.op("x[...] -> [...]")(strange))
    with pytest.raises(GraphError, match="op is <function"):
        hocket.register(twice)
    assert hocket.register(ops.add) is ops.add


@pytest.mark.long
@pytest.mark.parametrize("checker", [("mypy", "--strict"), ("pyright", "--level", "error")], ids=["mypy", "pyright"])
def test_a_type_checker_finds_every_wrong_line_and_no_other(checker, tmp_path):
    pytest.importorskip(checker[0])
    (tmp_path / "hocket").symlink_to(ROOT)  # as it lies where it is installed
    for name, text in (("right.py", RIGHT), ("wrong.py", WRONG)):
        (tmp_path / name).write_text(text.lstrip("\n"), "utf-8")
    (tmp_path / "example_right.py").write_bytes((ROOT / "examples" / "04_model.py").read_bytes())
    command = [sys.executable, "-m", *checker, "right.py", "example_right.py", "wrong.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    blamed = re.findall(r"(right|wrong)\.py:(\d+).*error", said)  # of hocket's own files only their types count here
    assert {(file, int(line)) for file, line in blamed} == {("wrong", n) for n in range(5, 11)}, said
