"""Names in backquotes in docstrings exist, so that a reader finds them."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache

import pytest

from .files import ROOT, list_files, list_sources, parse_matching

NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`(?!`)")
OTHER_NAMES = {"G_r", "from"}  # a matrix in a formula; an attribute in a formula
"""Names in backquotes that no code defines."""


@cache
def list_known_names() -> frozenset[str]:
    """Return the modules, folders and identifiers of the package, the words of CUDA files, and Python's modules."""
    known = {*sys.stdlib_module_names, *OTHER_NAMES}
    for path in list_sources():
        known.update((path.stem, *path.relative_to(ROOT).parent.parts))
        for node in ast.walk(ast.parse(path.read_bytes())):
            known.update(list_identifiers(node))
    for path in list_files():
        if path.suffix in (".cu", ".cuh"):
            known.update(re.findall(r"\w+", path.read_text("utf-8")))
    return frozenset(known)


def list_identifiers(node: ast.AST) -> Iterator[str]:
    """Yield the identifiers of one syntax node; texts that are identifiers count, as dictionary keys."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.alias(name=name, asname=other):
            yield from (name.partition(".")[0], other or name)
        case ast.keyword(arg=str(name)):
            yield name
        case ast.Constant(value=str(text)) if text.isidentifier():
            yield text


def list_unknown_names(tree: ast.AST) -> list[str]:
    """List the unknown names in backquotes in the docstrings of a module."""
    texts = (
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    names = (name for text in texts for name in NAME.findall(text))
    return [
        name
        for name in names
        if not list_known_names().issuperset(name.split(".")) and name.partition(".")[0] not in sys.stdlib_module_names
    ]


@pytest.mark.long
def test_docstrings_name_things_that_exist() -> None:
    trees = parse_matching(NAME.pattern, list_sources())
    unknown = {path: names for path, tree in trees if (names := list_unknown_names(tree))}
    assert not unknown


@pytest.mark.long
def test_a_name_that_does_not_exist_is_found() -> None:
    docstring = "`Graph`, `graph.node`, `functools.cache`, `telling`, `graph.no_such_name`, ``x y``."
    assert list_unknown_names(ast.parse(f'"""{docstring}"""')) == [
        "telling",
        "graph.no_such_name",
    ]
