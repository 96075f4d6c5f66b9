"""Write docs/python.md: every public name of `import hocket`, with its signature and docstring."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "python.md"
HEAD = """# Python

`python docs/write_python.py` writes this page from the code; it has everything that `import hocket` provides. The
[ops](ops.md) have a page of their own. Every error is a `hocket.HocketError` with a message of one line.

"""
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Language models": ("Model", "Completion", "Options", "Sampling", "Token"),
    "Building graphs": ("input", "weight", "state", "constant", "Graph", "Value", "Node", "Spec", "DType", "register"),
    "Planning and running": ("run", "plan", "Plan", "load", "Executor", "Store", "Trace"),
    "Reading and writing graphs": ("verify", "dump", "parse", "to_json", "from_json", "to_dot", "to_networkx"),
    "Programs of others": ("from_torch", "from_onnx"),
    "Errors": ("HocketError", "GraphError", "PlanError", "BackendError", "ModelError"),
}


class UnquotedText(str):
    """An annotation or a default that is printed without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def as_markdown(docstring: str) -> str:
    """Return a docstring with its doctest examples as code blocks."""
    text = inspect.cleandoc(docstring)
    return re.sub(r"(?m)^(>>>.*(?:\n(?!\n).+)*)", r"```pycon\n\1\n```", text)


def as_printed_parameter(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter as it is printed; a default that is no short literal becomes ``...``."""
    if parameter.default is not parameter.empty and re.match("<|.{40}", repr(parameter.default)):
        parameter = parameter.replace(default=UnquotedText("..."))
    return parameter.replace(annotation=UnquotedText(parameter.annotation)) if parameter.annotation else parameter


def format_signature(name: str, function: Any) -> str:
    """Return a code block with a signature, without `self`; a long signature has one parameter per line."""
    signature = inspect.signature(function)
    own = [as_printed_parameter(parameter) for parameter in signature.parameters.values() if parameter.name != "self"]
    returns = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    text = f"{name}{signature.replace(parameters=own, return_annotation=signature.empty)}{returns}"
    if len(text) > 110:
        words, starred = [], False
        for parameter in own:
            if parameter.kind is parameter.KEYWORD_ONLY and not starred:
                words, starred = [*words, "*"], True
            words.append(str(parameter))
        text = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){returns}"
    return f"```python\n{text}\n```\n"


def list_fields(kind: type) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and docstring of each public annotated field of a class, from its source."""
    (body,) = (n.body for n in ast.parse(textwrap.dedent(inspect.getsource(kind))).body if isinstance(n, ast.ClassDef))
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            constant = after.value if isinstance(after, ast.Expr) else None
            says = constant.value if isinstance(constant, ast.Constant) and isinstance(constant.value, str) else ""
            yield node.target.id, ast.unparse(node.annotation), " ".join(says.split())


def format_name_section(name: str, thing: Any) -> Iterator[str]:
    """Yield the section of one name."""
    if not inspect.isclass(thing):
        yield f"### `hocket.{name}`\n\n{format_signature(f'hocket.{name}', thing)}\n{as_markdown(thing.__doc__)}\n\n"
        return
    is_called = "__init__" in vars(thing) and not issubclass(thing, Enum | dict | BaseException)
    yield f"### `hocket.{name}`\n\n"
    if is_called:
        yield format_signature(f"hocket.{name}", thing.__init__).replace(") -> None\n", ")\n") + "\n"
    yield f"{as_markdown(thing.__doc__)}\n\n"
    rows = [] if issubclass(thing, BaseException) else list(list_fields(thing))
    if rows and (not is_called or any(says for *_, says in rows)):
        cells = "".join("| `{}` | `{}` | {} |\n".format(*(c.replace("|", "\\|") for c in row)) for row in rows)
        yield f"| field | type | |\n|---|---|---|\n{cells}\n"
    for member, value in vars(thing).items():
        if member[0] != "_" and not isinstance(value, thing):
            yield from format_member(name, member, value)


def format_member(name: str, member: str, value: Any) -> Iterator[str]:
    """Yield the section of a property or a method of a class; nothing for other members."""
    read = value.fget if isinstance(value, property) else value.func if isinstance(value, cached_property) else None
    if read is not None:
        returns = inspect.signature(read).return_annotation
        yield f"#### `{name}.{member}`\n\n`{returns}`: {as_markdown(value.__doc__)}\n\n"
    elif inspect.isfunction(value):
        yield f"#### `{name}.{member}`\n\n{format_signature(member, value)}\n{as_markdown(value.__doc__ or '')}\n\n"


def format_sections() -> Iterator[str]:
    """Yield a section for each group of names."""
    import hocket

    for title, names in SECTIONS.items():
        yield f"## {title}\n\n"
        for name in names:
            yield from format_name_section(name, getattr(hocket, name))


def page() -> str:
    """Return the expected text of the page."""
    return HEAD + "".join(format_sections()).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
