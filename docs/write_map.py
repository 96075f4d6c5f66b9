"""Write docs/modules.md: every module of the package and of benchmarks/, with the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "modules.md"
FOLDERS = (
    ".",
    "graph",
    "ops",
    "backends",
    "scheduler",
    "distributed",
    "view",
    "frontends",
    "server",
    "conformance",
    "benchmarks",
)
HEAD = """# Modules

`python docs/write_map.py` writes this page from the first sentence of each module. [Architecture](architecture.md)
explains the connections between the modules, and [where to begin a
change](architecture.md#find-the-place-of-a-change).

"""
SENTENCE_END = re.compile(r"(?<=[.?])\s+(?=[A-Z0-9`\"'(])")
"""White space between two sentences."""


def read_first_sentence(path: Path) -> str:
    """Return the first sentence of a module docstring as one line of a table, without its last period."""
    paragraph = " ".join((ast.get_docstring(ast.parse(path.read_bytes())) or "").partition("\n\n")[0].split())
    return SENTENCE_END.split(paragraph, maxsplit=1)[0].rstrip(".:").replace("|", "\\|")


def format_tables() -> Iterator[str]:
    """Yield a table for each folder that has modules."""
    for folder in FOLDERS:
        inside = [ROOT] if folder == "." else sorted({p.parent for p in (ROOT / folder).rglob("*.py")})
        for place in inside:
            modules = [p for p in sorted(place.glob("*.py")) if p.name != "__init__.py"]
            package = place / "__init__.py"
            says = read_first_sentence(package) if package.is_file() else ""
            title = "The root" if place == ROOT else f"`{place.relative_to(ROOT).as_posix()}/`"
            yield f"## {title}\n" + (f"\n{says}.\n" if says else "")
            if modules:
                rows = [f"| `{p.name}` | {read_first_sentence(p)} |" for p in modules]
                yield "\n".join(["| module | contents |", "|---|---|", *rows]) + "\n"


def page() -> str:
    """Return the expected text of the page."""
    return HEAD + "\n".join(format_tables())


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
