"""Draw docs/page.png and docs/graph.svg from the tool itself: ``python docs/draw_page.py`` (Chromium, Graphviz).

The page is that of two layers' worth of a hybrid model dealt to two simulated devices, as ``hocket view`` writes it.
docs/page.sha256 tells of which plan the picture is, so that a test sees when the tool would draw another.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import hocket
from hocket import ops

HERE = Path(__file__).parent
ROOT = HERE.parent
MODEL = ROOT / "data" / "hocket-tiny-q8_0.gguf"
SIZE = (1120, 640)
CLICKS = (".fold button.gutter", ".group.open .row.work .cell.work")
"""What is clicked before the picture is taken: a layer, and the first work in it."""


def block() -> hocket.Graph:
    """The graph of the README."""
    x = hocket.input("x", (3, 64))
    up, gate = hocket.weight("up", (256, 64)), hocket.weight("gate", (256, 64))
    h = ops.rms_norm(x, eps=1e-6)
    h = ops.swiglu(ops.mul_mat(gate, h), ops.mul_mat(up, h))
    return hocket.Graph({"y": ops.add(x, ops.mul_mat(hocket.weight("down", (64, 256)), h))})


def write_page(page: Path) -> str:
    """Write the page of the picture; the digest of its plan."""
    command = ["-m", "hocket", "view", str(MODEL), "--simulate", "cpu:2", "--split-mode", "tensor", "-o", str(page)]
    subprocess.run([sys.executable, *command], check=True)
    script = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert script is not None
    drawn = json.loads(script[1])["shown"][0]["plan"]
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()


def draw_graph() -> None:
    """Draw the graph of the README with Graphviz."""
    svg = subprocess.run(["dot", "-Tsvg"], input=hocket.to_dot(block()), capture_output=True, text=True, check=True)
    (HERE / "graph.svg").write_text(svg.stdout, "utf-8")


def draw_page() -> None:
    """Take the picture of the page in Chromium, and note of which plan it is."""
    sys.path.insert(0, str(ROOT.parent))
    from hocket.tests.given.browser import browser

    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        digest = write_page(page)
        with browser(Path(folder) / "profile", *SIZE) as chromium:
            chromium.get(page.as_uri())
            for selector in CLICKS:
                chromium.execute_script("document.querySelector(arguments[0]).click()", selector)
            chromium.save_screenshot(str(HERE / "page.png"))
    (HERE / "page.sha256").write_text(digest + "\n", "utf-8")


if __name__ == "__main__":
    draw_graph()
    draw_page()
