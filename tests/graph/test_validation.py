"""Texts for messages."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hocket
from hocket.graph.errors import format_count

PACKAGE = Path(hocket.__file__).parent
WITHOUT_PACKAGE = ("tests", "benchmarks", "docs", "examples", ".ci")


@pytest.mark.parametrize(
    ("count", "nouns", "text"),
    [
        (0, ("token",), "0 tokens"),
        (1, ("token",), "1 token"),
        (2, ("more device",), "2 more devices"),
        (1, ("axis", "axes"), "1 axis"),
        (-1, ("entry", "entries"), "-1 entries"),
    ],
)
def test_a_count_has_its_noun(count, nouns, text):
    assert format_count(count, *nouns) == text


def find_chosen_endings(source: str) -> list[int]:
    """Return the lines of f-strings that choose the ending of a noun, as in ``token{'s' if n > 1 else ''}``."""
    return [
        part.lineno
        for part in ast.walk(ast.parse(source))
        if isinstance(part, ast.FormattedValue)
        for choice in [part.value]
        if isinstance(choice, ast.IfExp | ast.BinOp)
        and any(isinstance(text, ast.Constant) and text.value in ("s", "es") for text in ast.iter_child_nodes(choice))
    ]


@pytest.mark.parametrize("choice", ["'s' if n > 1 else ''", "'' if n == 1 else 's'", "'s' * (n > 1)"])
def test_a_chosen_ending_is_found(choice):
    assert find_chosen_endings(f'f"{{n}} token{{{choice}}}"') == [1]


def test_one_function_chooses_the_endings_of_counted_nouns():
    """`format_count` itself joins the noun and its ending, so no f-string of the package chooses an ending."""
    paths = [p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] not in WITHOUT_PACKAGE]
    assert len(paths) > 300
    assert not [f"{path}:{line}" for path in paths for line in find_chosen_endings(path.read_text(encoding="utf-8"))]
