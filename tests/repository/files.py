"""The files of the repository, as the tests of it read them."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NOT_PACKAGE = {".build", ".ci", "tests", "examples", "docs", "benchmarks"}
"""Top-level folders with Python files that are not part of the package."""
UNTRACKED = re.compile(r"(^|/)(\.[a-z]\w*_?cache|\.git|\.venv|\.hypothesis|__pycache__|build|dist|\w+\.egg-info)/")


def run_git(*arguments: str) -> str | None:
    """Return the output of a git command in the repository, or None without git or without a repository."""
    command = ["git", *arguments]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def list_files() -> tuple[Path, ...]:
    """Return the files of the repository, without virtual environments.

    Without git, return the files of the folder, as an sdist has them.
    """
    output = run_git("ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if output is None:
        found = (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file())
        names = [name for name in found if not UNTRACKED.search(name) and name != "PKG-INFO"]
    else:
        names = [name for name in output.split("\0") if name]
    environments = tuple(f"{path.parent.name}/" for path in ROOT.glob("*/pyvenv.cfg"))
    return tuple(ROOT / name for name in sorted(names) if not name.startswith(environments) and (ROOT / name).is_file())


def list_sources(folder: str = "") -> list[Path]:
    """Return the Python files of the package, or of one folder of it, such as `ops.declaration`."""
    parts = {path: path.relative_to(ROOT).parts for path in list_files() if path.suffix == ".py"}
    inside = tuple(folder.split(".")) if folder else ()
    return [path for path, at in parts.items() if at[0] not in NOT_PACKAGE and at[: len(inside)] == inside]


def parse_matching(pattern: str, paths: Iterable[Path]) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the path and the syntax tree of each Python file in which a line matches; to parse all takes seconds."""
    for path in paths:
        source = path.read_text("utf-8")
        if re.search(pattern, source, re.MULTILINE):
            yield path, ast.parse(source)
