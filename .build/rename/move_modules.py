"""Moves modules to the paths of a table and rewrites all imports: ``python .build/rename/move_modules.py moves.tsv``.

A row of the table is the old and the new path of a file, separated by a tab and relative to the root.  Rows with an old
path that does not exist are skipped, so a second run changes nothing.  A module that is imported by name from its
package, ``from ..candidates import grow``, keeps the old name in that file by ``as``; such lines are printed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("*.md", "*.toml", "*.in", "*.yml", "*.py", "*.pyi", "*.tsv", "run", "*.sh")
"""Files in which paths and dotted names of modules are replaced as text."""


FUNCTIONS = {"hocket.scheduler.plan"}
"""Functions that a package has under the name of one of its modules."""


def list_files(*patterns: str) -> list[Path]:
    """Return the tracked files of these patterns."""
    found = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in found.stdout.split()]


def module_of(path: Path) -> tuple[str, bool]:
    """Return the dotted name of the module in a file, ``hocket.ops.norms``, and whether it is a package."""
    parts = [*path.relative_to(ROOT).with_suffix("").parts]
    is_package = parts[-1] == "__init__"
    return ".".join(["hocket", *(parts[:-1] if is_package else parts)]), is_package


def relative_name(target: str, module: str, is_package: bool) -> str:
    """Return the name under which `module` imports `target`, ``..graph.attrs``."""
    here = module.split(".") if is_package else module.split(".")[:-1]
    there = target.split(".")
    same = 0
    while same < min(len(here), len(there)) and here[same] == there[same]:
        same += 1
    return "." * (len(here) - same + 1) + ".".join(there[same:])


def rewrite_imports(path: Path, text: str, moves: dict[str, str]) -> str:
    """Return the text of a file with the imports that it needs after the moves."""
    module, is_package = module_of(path)
    own = moves.get(module, module)
    lines = text.splitlines(keepends=True)
    for node in sorted(ast.walk(ast.parse(text)), key=lambda n: -getattr(n, "lineno", 0)):
        if not isinstance(node, ast.ImportFrom):
            continue
        source = node.module or ""
        if node.level:
            here = module.split(".")
            here = here[: len(here) - node.level + is_package]
            source = ".".join([*here, source] if source else here)
        if not source.startswith("hocket"):
            continue
        by_source: dict[str, list[str]] = {}
        for alias in node.names:
            bound = alias.asname or alias.name
            name = f"{source}.{alias.name}"
            if name not in FUNCTIONS and (submodule := moves.get(name)) is not None:
                package, _, name = submodule.rpartition(".")
                if name != bound:
                    print(f"{path.relative_to(ROOT)}:{node.lineno}: {name} as {bound}")
            else:
                package, name = moves.get(source, source), alias.name
            by_source.setdefault(package, []).append(name if name == bound else f"{name} as {bound}")
        is_moved = any(
            f"{source}.{alias.name}" in moves and f"{source}.{alias.name}" not in FUNCTIONS for alias in node.names
        )
        if own == module and list(by_source) == [source] and not is_moved:
            continue
        indent = " " * node.col_offset
        end = node.end_lineno or node.lineno
        comment = lines[end - 1].encode()[node.end_col_offset or 0 :].decode().strip()
        statements = [
            f"{indent}from {relative_name(new, own, is_package) if node.level else new} import {', '.join(names)}"
            for new, names in by_source.items()
        ]
        lines[node.lineno - 1 : end] = [f"{s}  {comment}".rstrip() + "\n" for s in statements]
    return "".join(lines)


def compile_names(rows: dict[str, str]) -> tuple[re.Pattern[str], dict[str, str]]:
    """Return the pattern of all old paths and dotted names, and the new one of each."""
    names = dict(rows)
    for old, new in rows.items():
        if not old.endswith("__init__.py"):
            names[old.removesuffix(".py").replace("/", ".")] = new.removesuffix(".py").replace("/", ".")
    alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"(?<![\w/.])((?:hocket\.)?)({alternatives})(?!\w)"), names


def replace_paths(path: Path, text: str, pattern: re.Pattern[str], names: dict[str, str]) -> str:
    """Return `text` with the old paths and dotted names in strings and prose replaced; imports stay as they are."""
    imports: set[int] = set()
    if path.suffix in (".py", ".pyi"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = text.splitlines(keepends=True)
    changed = (
        line if number in imports else pattern.sub(lambda match: match[1] + names[match[2]], line)
        for number, line in enumerate(lines, 1)
    )
    return "".join(changed)


def main(table: str) -> None:
    """Move the files of the table."""
    rows = dict(line.split("\t") for line in Path(table).read_text().splitlines())
    rows = {old: new for old, new in rows.items() if (ROOT / old).exists()}
    moves = {module_of(ROOT / old)[0]: module_of(ROOT / new)[0] for old, new in rows.items()}
    pattern, names = compile_names(rows)
    for path in list_files(*TEXTS, "*.pyi"):
        if ".build/rename" in str(path) or path.name == "CHANGELOG.md":
            continue
        text = path.read_text()
        new = replace_paths(path, text, pattern, names)
        if path.suffix in (".py", ".pyi"):
            new = rewrite_imports(path, new, moves)
        if new != text:
            path.write_text(new)
    for old, new in rows.items():
        (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", old, new], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1])
