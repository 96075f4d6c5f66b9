"""Draw docs/page.png, docs/pytorch.png and docs/graph.svg with hocket itself: ``python docs/draw_page.py [NAME]``.

``page`` shows two layers of a hybrid model on two simulated devices, as ``hocket view`` writes it. ``pytorch`` shows
the model of docs/pytorch.md on three. The file NAME.sha256 has the digest of the plan in a picture, so that a test
finds an outdated picture. For the PyTorch model it also has the versions of the packages that exported it. Chromium and
Graphviz draw.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import hocket
from hocket import ops

HERE = Path(__file__).parent
ROOT = HERE.parent
MODEL = ROOT / "data" / "hocket-tiny-q8_0.gguf"
WINDOW_SIZE = (1120, 640)
CLICK_SELECTORS = {
    "page": (".fold button.gutter", ".group.open .row.work .cell.work"),
    "pytorch": (".fold button.gutter",),
}
"""CSS selectors that are clicked before a screenshot: a layer, and the first work in it; a layer."""


def build_tutorial_graph() -> hocket.Graph:
    """Build the graph of the tutorial."""
    x = hocket.input("x", (3, 64))
    up, gate = hocket.weight("up", (256, 64)), hocket.weight("gate", (256, 64))
    h = ops.rms_norm(x, eps=1e-6)
    h = ops.swiglu(ops.mul_mat(gate, h), ops.mul_mat(up, h))
    return hocket.Graph({"y": ops.add(x, ops.mul_mat(hocket.weight("down", (64, 256)), h))})


def write_page(page: Path, model: Path = MODEL, devices: int = 2) -> str:
    """Write the page of a picture, and return the digest of its plan.

    Args:
        page: The HTML file to write.
        model: The model or the graph file.
        devices: The number of simulated CPU devices.
    """
    command = ["-m", "hocket", "view", str(model), "--simulate", f"cpu:{devices}", "--split-mode", "tensor"]
    subprocess.run([sys.executable, *command, "-o", str(page)], check=True)
    script = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert script is not None
    drawn = json.loads(script[1])["shown"][0]["plan"]
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()


def describe_versions() -> str:
    """Return the versions of the packages that export the model of docs/pytorch.md."""
    return " ".join(f"{name}-{importlib.metadata.version(name)}" for name in ("torch", "transformers"))


def write_pytorch_page(page: Path) -> str:
    """Write the page of the first model of docs/pytorch.md.

    Returns:
        The versions of the packages that exported the model, and the digest of its plan.
    """
    import torch

    code = re.search(r"```python\n(.*?)\nprogram =", (HERE / "pytorch.md").read_text("utf-8"), re.DOTALL)
    assert code is not None
    space: dict[str, Any] = {}
    exec(compile(code[1], "pytorch.md", "exec"), space)
    exported = torch.export.export(space["model"], (space["ids"],), kwargs={"use_cache": False}, strict=False)
    file = page.with_name("llama.txt")
    file.write_text(str(hocket.from_torch(exported).graph), "utf-8")
    return f"{describe_versions()} {write_page(page, file, 3)}"


PAGE_WRITERS = {"page": write_page, "pytorch": write_pytorch_page}
"""Functions that write a page and return its digest, by picture name."""


def compute_graph_digest() -> str:
    """Return the digest of the input of Graphviz; its output differs between versions of Graphviz."""
    return hashlib.sha256(hocket.to_dot(build_tutorial_graph()).encode()).hexdigest()


def draw_graph() -> None:
    """Draw the graph of the tutorial with Graphviz."""
    svg = subprocess.run(
        ["dot", "-Tsvg"], input=hocket.to_dot(build_tutorial_graph()), capture_output=True, text=True, check=True
    )
    (HERE / "graph.svg").write_text(svg.stdout, "utf-8")
    (HERE / "graph.sha256").write_text(compute_graph_digest() + "\n", "utf-8")


def draw_page(name: str) -> None:
    """Take a screenshot of a page in Chromium, and store the digest of its plan."""
    sys.path.insert(0, str(ROOT.parent))
    from hocket.tests.given.browser import browser

    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        digest = PAGE_WRITERS[name](page)
        with browser(Path(folder) / "profile", *WINDOW_SIZE) as chromium:
            chromium.get(page.as_uri())
            for selector in CLICK_SELECTORS[name]:
                chromium.execute_script("document.querySelector(arguments[0]).click()", selector)
            chromium.save_screenshot(str(HERE / f"{name}.png"))
    (HERE / f"{name}.sha256").write_text(digest + "\n", "utf-8")


if __name__ == "__main__":
    if not sys.argv[1:]:
        draw_graph()
    for name in sys.argv[1:] or PAGE_WRITERS:
        draw_page(name)
