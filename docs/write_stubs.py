"""Write the type stubs of `hocket` and `hocket.scheduler`, which import their names at first use, from their tables."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {"hocket": ROOT / "__init__.pyi", "hocket.scheduler": ROOT / "scheduler" / "__init__.pyi"}
"""The stub of each package that has a table `LAZY_NAMES`."""


def list_exports(package: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of each export: the names of the table, and the imports of ``__init__.py``."""
    module = import_module(package)
    for node in ast.parse(Path(str(module.__file__)).read_bytes()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield from ((f".{node.module}", alias.name) for alias in node.names if alias.asname == alias.name)
    for name, source in module.LAZY_NAMES.items():
        yield "." if source == f".{name}" else source, name


def build_stub(package: str) -> str:
    """Return the expected text of a stub."""

    def order(export: tuple[str, str]) -> tuple[str, int, str]:
        module, name = export
        return module, 0 if name.isupper() else 1 if name[0].isupper() else 2, name

    lines = [f"from {module} import {name} as {name}\n" for module, name in sorted(list_exports(package), key=order)]
    version = "\n__version__: str\n" if package == "hocket" else ""
    return f'"""The exports of `{package}`, written by `python docs/write_stubs.py`."""\n\n' + "".join(lines) + version


def pages() -> dict[Path, str]:
    """Return the expected text of each stub by its path."""
    return {path: build_stub(package) for package, path in PACKAGES.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, "utf-8")
        sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
