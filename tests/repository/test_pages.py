"""Pages whose Python blocks run one after the other, each printing what stands below it."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from hocket.ops.declaring.registry import REGISTRY

from ..given.models.goldens import ROOT

BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?", re.DOTALL | re.MULTILINE)
OF_THE_MACHINE = re.compile(r" *[\d.]+ [KMGT]iB$", re.MULTILINE)
"""What is free on a device, the last column of `explain`."""


def as_it_prints(page: str) -> str:
    """A page in which each block has below it what it prints, when all are run in order as one program."""
    space: dict[str, object] = {"__name__": "page"}

    def rewritten(block: re.Match[str]) -> str:
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(block["code"], "page", "exec"), space)
        text = printed.getvalue()
        same = OF_THE_MACHINE.sub("", text) == OF_THE_MACHINE.sub("", block["printed"] or "")
        shown = block["printed"] or "" if same else text
        return f"```python\n{block['code']}```\n" + (f"\n```text\n{shown}```\n" if shown else "")

    return BLOCK.sub(rewritten, page)


@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md", "docs/concepts.md"])
def test_the_blocks_of_a_page_print_what_stands_below_them(name, monkeypatch, update_golden):
    monkeypatch.setattr(REGISTRY, "_ops", dict(REGISTRY._ops))  # a page may register an op
    path: Path = ROOT / name
    page = path.read_text("utf-8")
    printed = as_it_prints(page)
    if update_golden:
        path.write_text(printed, "utf-8")
    else:
        assert printed == page, "run this test with --update-golden"
