"""The imports of the package as a graph, and the table of permitted imports, `import_rules.toml`.

```
python tests/repository/imports.py             print the forbidden imports
python tests/repository/imports.py --update    write the rules anew from the present imports, without the exceptions
```

A *room* is a folder without folders of its own, or a single module of a folder that has some. Rooms have an order: no
room imports one that imports it. Exceptions are the imports against this order, and imports that close a circle of
modules.
"""

from __future__ import annotations

import argparse
import ast
import sys
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

import networkx as nx

from hocket.tests.repository.files import ROOT, list_sources

IMPORT_RULES = ROOT / "tests/repository/import_rules.toml"
Import = tuple[str, str]
"""The module that imports, and the imported one: ``("ops.norms", "ops.declaring.op")``."""


class Rules(NamedTuple):
    """The folders and modules that each folder may import, and the imports that are known to break the order."""

    permitted: Mapping[str, tuple[str, ...]]
    exceptions: frozenset[Import]
    exception_count: int


def read_rules(text: str) -> Rules:
    """Parse the table of permitted imports."""
    table = tomllib.loads(text)
    permitted = {folder: tuple(entries) for folder, entries in table["rules"].items()}
    known = frozenset((module, target) for module, targets in table["exceptions"].items() for target in targets)
    return Rules(permitted, known, table["exception_count"])


def format_rules(rules: Rules) -> str:
    """Return the table of permitted imports as TOML."""

    def rows(table: Mapping[str, Iterable[str]]) -> Iterator[str]:
        for name, targets in sorted(table.items()):
            row = f'"{name}" = [' + ", ".join(f'"{target}"' for target in sorted(targets)) + "]"
            if len(row) > 120:
                inside = textwrap.fill(row.partition("[")[2][:-1] + ",", 116, break_on_hyphens=False)
                row = f'"{name}" = [\n{textwrap.indent(inside, "    ")}\n]'
            yield row

    known = defaultdict(list)
    for module, target in rules.exceptions:
        known[module].append(target)
    lines = [
        "# The imports that the modules of each folder may have, apart from those of their own folder. An entry is a",
        "# folder, for the modules in it but not in its folders, or one module. The root may import everything.",
        "# `python tests/repository/imports.py --update` adds and removes entries: a new one is a decision about the",
        "# architecture.",
        "",
        "exception_count = " + str(rules.exception_count),
        "",
        "[rules]",
        *rows(rules.permitted),
        "",
        "# Imports against the order of the rooms, or that close a circle of modules. Their number may only fall.",
        "[exceptions]",
        *rows(known),
    ]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------------- graph


def find_imports(module: str, is_package: bool, source: str, modules: frozenset[str]) -> set[str]:
    """Return the modules of ours that a module imports, at its top, in functions and for types.

    Args:
        module: Name from the root, such as ``ops.norms``; the root itself has the empty name.
        is_package: Whether the module is the `__init__.py` of a folder.
        source: Text of the module.
        modules: Names of all modules; ``from package import name`` is an import of ``package.name`` if that is one.
    """
    here = module.split(".") if module else []
    here = here if is_package else here[:-1]
    targets = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            parts = here[: len(here) + 1 - node.level] if node.level else []
            parts = [*parts, *(node.module.split(".") if node.module else [])]
            if not node.level and parts[:1] != ["hocket"]:
                continue
            base = ".".join(parts if node.level else parts[1:])
            names = (f"{base}.{alias.name}".lstrip(".") for alias in node.names)
            targets |= {name if name in modules else base for name in names}
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names if alias.name.split(".")[0] == "hocket")
            targets |= {name.removeprefix("hocket").lstrip(".") for name in names}
    return targets


class ImportGraph(NamedTuple):
    """Modules, those among them that are folders, and the imports between them.

    Python executes the `__init__.py` of a folder before its modules. An import of the own folder is no edge.
    """

    modules: frozenset[str]
    folders: frozenset[str]
    imports: frozenset[Import]

    @classmethod
    def from_sources(cls, sources: Mapping[str, str]) -> ImportGraph:
        """Build the graph from texts by path, such as ``ops/__init__.py``."""
        paths = {".".join(path.removesuffix(".py").split("/")): path for path in sources}
        folders = {name.removesuffix("__init__").rstrip(".") for name in paths if name.endswith("__init__")}
        named = {name.removesuffix("__init__").rstrip("."): path for name, path in paths.items()}
        modules = frozenset(named)
        imports = set()
        for module, path in named.items():
            targets = find_imports(module, module in folders, sources[path], modules)
            imports |= {(module, target) for target in targets if not f"{module}.".startswith(f"{target}.")}
        return cls(modules, frozenset(folders), frozenset((a, b) for a, b in imports if b))

    def folder_of(self, module: str) -> str:
        """Return the folder that has a module; a folder is its own."""
        return module if module in self.folders else module.rpartition(".")[0]

    def room_of(self, module: str) -> str:
        """Return the room of a module: its folder, or the module itself if the folder has folders."""
        folder = self.folder_of(module)
        return module if any(f.startswith(f"{folder}.") or not folder for f in self.folders if f) else folder

    def room_imports(self, imports: Iterable[Import]) -> Iterator[Import]:
        """Yield the imports from room to room."""
        pairs = {(self.room_of(module), self.room_of(target)) for module, target in imports}
        yield from ((room, target) for room, target in pairs if room != target)

    def find_circles(self, imports: Iterable[Import]) -> list[list[str]]:
        """Return the sets of modules, and of rooms, that import each other in a circle, each sorted."""
        imports = tuple(imports)
        found = set()
        for edges in (imports, self.room_imports(imports)):
            found |= {tuple(sorted(c)) for c in nx.strongly_connected_components(nx.DiGraph(edges)) if len(c) > 1}
        return [list(circle) for circle in sorted(found)]

    def find_entry(self, target: str, entries: Iterable[str]) -> str | None:
        """Return the entry of a rule that permits the import of a module, or None."""
        return next((entry for entry in entries if entry in (target, self.folder_of(target))), None)

    def list_imports_of_folders(self, exceptions: frozenset[Import]) -> list[tuple[str, Import]]:
        """Return the imports that need a permission, each with the folder of the importing module."""
        pairs = [(self.folder_of(module), (module, target)) for module, target in sorted(self.imports - exceptions)]
        return [(folder, pair) for folder, pair in pairs if folder and self.folder_of(pair[1]) != folder]

    def find_forbidden(self, rules: Rules) -> list[str]:
        """Return the imports that are neither in a rule nor in an exception."""
        return [
            f"{module} imports {target}: {folder} may not"
            for folder, (module, target) in self.list_imports_of_folders(rules.exceptions)
            if self.find_entry(target, rules.permitted.get(folder, ())) is None
        ]

    def update_permitted(self, rules: Rules) -> dict[str, tuple[str, ...]]:
        """Return the rules that permit the present imports; entries that are still used stay as they are."""
        permitted: dict[str, set[str]] = {folder: set() for folder in self.folders if folder}
        for folder, (_, target) in self.list_imports_of_folders(rules.exceptions):
            entry = self.find_entry(target, rules.permitted.get(folder, ()))
            permitted[folder].add(entry or self.room_of(target))
        return {folder: tuple(sorted(entries)) for folder, entries in sorted(permitted.items())}


@cache
def read_package() -> ImportGraph:
    """Return the import graph of the package; the imports of a stub are imports of its module."""
    stubs = {p: p.with_suffix(".pyi") for p in list_sources()}
    return ImportGraph.from_sources(
        {
            p.relative_to(ROOT).as_posix(): p.read_text("utf-8") + (stub.read_text("utf-8") if stub.exists() else "")
            for p, stub in stubs.items()
        }
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if an import is not permitted or closes a circle."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="write the rules anew from the present imports")
    update = parser.parse_args(arguments).update
    graph, rules = read_package(), read_rules(IMPORT_RULES.read_text("utf-8"))
    if update:
        known = rules.exceptions & graph.imports
        rules = Rules(graph.update_permitted(rules), known, len(known))
        IMPORT_RULES.write_text(format_rules(rules), "utf-8")
    wrong = [*graph.find_forbidden(rules), *map(str, graph.find_circles(graph.imports - rules.exceptions))]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
