"""The pictures in the README and in the docs equal the output of the present tool."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_picture_of_a_graph_is_of_the_graph_of_today():
    today = runpy.run_path(str(DOCS / "draw_page.py"))["compute_graph_digest"]()
    assert today == (DOCS / "graph.sha256").read_text("utf-8").strip(), "run python docs/draw_page.py and look at it"


@pytest.mark.long
def test_the_picture_of_a_page_is_of_the_plan_of_today(tmp_path):
    script = runpy.run_path(str(DOCS / "draw_page.py"))
    today = script["write_page"](tmp_path / "page.html")
    assert today == (DOCS / "page.sha256").read_text("utf-8").strip(), "run python docs/draw_page.py and look at it"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of its own deprecations
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))), reason="PyTorch or transformers is not installed"
)
def test_the_picture_of_a_pytorch_model_is_of_the_plan_of_today(tmp_path):
    from ..given.models.vision_models import make_importable

    make_importable()
    script = runpy.run_path(str(DOCS / "draw_page.py"))
    digest = (DOCS / "pytorch.sha256").read_text("utf-8").strip()
    if not digest.startswith(script["describe_versions"]()):
        pytest.skip(f"the picture is of what {digest.rpartition(' ')[0]} exported")
    assert script["write_pytorch_page"](tmp_path / "page.html") == digest, "run python docs/draw_page.py pytorch"
