"""Documentation that is generated, or that names things, stays true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hocket import ops
from hocket.ops.page import page

DOCS = Path(__file__).parent.parent / "docs"


def test_the_op_reference_is_up_to_date():
    assert (DOCS / "ops.md").read_text("utf-8") == page(), "run python -m hocket.ops.page > docs/ops.md"


def test_the_op_of_the_guide_can_be_declared_as_it_is_written():
    code = re.search(r"```python\n(.*?)```", (DOCS / "add-an-op.md").read_text("utf-8"), re.DOTALL)[1]
    space: dict[str, object] = {}
    lines = [line.removeprefix("   ") for line in code.splitlines()]
    head = ["from hocket.ops.op import Array, op", "from hocket.ops.samples import grid", "import numpy as np"]
    exec(compile("\n".join([*head, *lines]), "add-an-op.md", "exec"), space)
    centre = space["centre"]
    assert isinstance(centre, ops.Op)
    assert centre.samples[0] == "x=f32[7]"


@pytest.mark.parametrize("name", ["add-an-op.md", "add-a-backend.md", "environment.md"])
def test_files_that_a_page_names_exist(name):
    text = (DOCS / name).read_text("utf-8")
    root = DOCS.parent
    for path in re.findall(r"`((?:ops|tests|backends|examples|docs|scheduler)/[\w./-]+)`", text):
        assert (root / path).exists(), path
