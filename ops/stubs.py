"""The type stub of all ops, for editors and type checkers: ``python -m hocket.ops.stubs > ops/__init__.pyi``."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from .declaration.call_signature import format_parameters
from .declaration.op import Op

WIDTH = 120
"""Columns of a line."""
HEAD = '''"""All ops with their types and docstrings, written from the registry by `python -m hocket.ops.stubs`."""

from collections.abc import Sequence

from ..graph.dtypes import DTypeLike
from ..graph.node import Value
'''


def build_ops_stub() -> str:
    """Return the type stub of `hocket.ops`: the imports of its ``__init__.py``, and its ops as functions."""
    package = import_module(__package__)
    tree = ast.parse(Path(str(package.__file__)).read_bytes())
    others = [
        f"from .{node.module} import {alias.name} as {alias.asname}\n"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
        if not str(alias.asname).startswith("_")
    ]
    ops = {name: thing for name, thing in vars(package).items() if isinstance(thing, Op)}
    entries = "".join(line for name in sorted(ops) for line in format_op_stub(name, ops[name]))
    return HEAD + "".join(others) + "\n" + entries.rstrip("\n") + "\n"


def format_op_stub(name: str, op: Op[Any]) -> Iterator[str]:
    """Yield the stub of one op as text: a function with its docstring, formatted as by ruff."""
    signature = inspect.signature(op)
    listed, end = list(format_parameters(signature)), f") -> {signature.return_annotation}:"
    joined = ", ".join(listed)
    lines = [f"def {name}({joined}{end}"]
    if len(lines[0]) > WIDTH:
        lines = [f"def {name}(", f"    {joined}", end]
    if len(lines[1:]) and len(lines[1]) > WIDTH:
        lines = [f"def {name}(", *(f"    {p}," for p in listed), end]
    text = op.documentation
    docstring = f'"""{text}"""' if "\n" not in text else f'"""{text}\n"""'
    yield "\n".join(lines) + "\n" + textwrap.indent(docstring, "    ") + "\n\n"


if __name__ == "__main__":
    sys.stdout.write(build_ops_stub())
