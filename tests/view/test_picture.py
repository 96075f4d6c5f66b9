"""The picture in the README is of the plan that the tool makes today."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.long
def test_the_picture_of_a_page_is_of_the_plan_of_today(tmp_path):
    drawing = runpy.run_path(str(DOCS / "draw_page.py"))
    today = drawing["write_page"](tmp_path / "page.html")
    assert today == (DOCS / "page.sha256").read_text("utf-8").strip(), "run python docs/draw_page.py and look at it"
