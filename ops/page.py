"""The op reference page, written from the registry: ``python -m hocket.ops.page > docs/ops.md``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from itertools import groupby
from textwrap import fill
from typing import Any

from ..graph.attrs import Attrs, format_attribute
from .composite import COMPOSITE_OPS
from .declaration.call_signature import format_parameters
from .declaration.op import Op
from .other_names import OPS_BY_OTHER_NAME
from .registry import BUILTIN_OPS, OP_MODULES, REGISTRY

HEAD = """# Ops

All ops, written from their declarations by `python -m hocket.ops.page`; a test keeps this page up to date.

A signature names the axes of operands and results:

* a plain name is parallel: a shard of it gives a shard of the result;
* `+k` is contracted: shards give partial sums;
* `*c` is coupled: each device needs the whole axis;
* `e@ids` is indexed by the numbers in `ids`: a shard gives the entries of its rows, and zeros elsewhere;
* `(h g)` is a product of two axes, outer factor first;
* `...` are any leading axes, `+...` leading axes that are summed;
* `~...` are leading axes of an operand that repeats as tiles: index modulo size;
* `/...` are leading axes of an operand with entries that serve several neighbours each (grouped queries);
* `?` marks an optional operand.
"""

COMPOSITE_HEAD = """A composite op is a function that builds a graph of ops. The graph has nodes of these ops only, so
their declarations give the devices, the shards and the costs.
"""


def build_op_reference() -> str:
    """Return the reference page of all ops as Markdown."""
    sections = ("\n" + "\n".join(format_op_section(op)) + "\n" for _, op in sorted(REGISTRY.items()))
    start = (HEAD, *format_ops_by_family(), *format_other_names(), *format_composite_ops())
    return "".join([*start, *sections])


def format_ops_by_family() -> Iterator[str]:
    """Yield a list of the ops by family. A family is a module, described by the first sentence of its docstring."""
    yield "\n## Families\n\n"
    for module in OP_MODULES:
        family = [op.name for op in BUILTIN_OPS.values() if op.reference.__module__ == module.__name__]
        title = " ".join((module.__doc__ or "").split()).partition(". ")[0].replace("``", "`").rstrip(".")
        names = fill(", ".join(map(_link_op, family)), 120, initial_indent="  * ", subsequent_indent="    ")
        yield f"* {title}\n{names}\n"


def format_other_names() -> Iterator[str]:
    """Yield a table of names of NumPy, PyTorch and ggml, with the ops of hocket."""
    yield "\n## Names of NumPy, PyTorch and ggml\n\n| NumPy, PyTorch, ggml | ops |\n|---|---|\n"
    for ops, names in groupby(OPS_BY_OTHER_NAME, OPS_BY_OTHER_NAME.__getitem__):
        yield f"| {', '.join(f'`{name}`' for name in names)} | {', then '.join(map(_link_op, ops))} |\n"


def format_composite_ops() -> Iterator[str]:
    """Yield the sections about the composite ops: call and docstring."""
    yield f"\n## Composite ops\n\n{COMPOSITE_HEAD}"
    for name, function in COMPOSITE_OPS.items():
        parameters = "".join(f"    {p},\n" for p in format_parameters(inspect.signature(function)))
        text = (inspect.getdoc(function) or "").replace("``", "`")
        yield f"\n### {name}\n\n```python\n{name}(\n{parameters})\n```\n\n{text}\n"


def _link_op(name: str) -> str:
    return f"[{name}](#{name})"


def format_op_section(op: Op[Any]) -> Iterator[str]:
    """Yield the lines of the section about one op: docstring, signatures, attributes and properties."""
    yield f"## {op.name}"
    yield ""
    yield op.documentation.replace("``", "`")
    yield ""
    for form, signature in op.signatures.items():
        yield format_markdown_list_item(f"`{signature.text}`" + (f" ({form})" if form else ""))
    attrs = [f"{name}: {kind}{_format_default(op.defaults, name)}" for name, kind in op.attribute_types.items()]
    if attrs:
        yield format_markdown_list_item(f"attributes: `{', '.join(attrs)}`")
    yield from map(format_markdown_list_item, _format_formulas(op))
    yield format_markdown_list_item(", ".join(_format_op_properties(op)))


def _format_formulas(op: Op[Any]) -> Iterator[str]:
    """Yield the formulas of an op, one for each form.

    Only an op that is declared in the scalar language has formulas. A form has no formula if a required attribute
    selects it, such as the kind of a comparison.
    """
    for form in op.signatures if op.expression else ():
        attrs = {**op.defaults, **({op.signature_key: form} if isinstance(op.signature_key, str) else {})}
        if op.expression and op.expression.has_expression_selecting_attributes(attrs):
            yield f"formula{f' ({form})' if form else ''}: `{op.expression.format(attrs)}`"


def format_markdown_list_item(text: str) -> str:
    """Return `text` as an item of a Markdown list, wrapped at 120 columns."""
    return fill(text, 120, initial_indent="* ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _format_default(defaults: Attrs, name: str) -> str:
    return f" = {format_attribute(defaults[name])}" if name in defaults else ""


def _format_op_properties(op: Op[Any]) -> Iterator[str]:
    """Yield the properties of an op as phrases: its tier (``MUST`` or ``SHOULD``), linear and in-place operands."""
    yield "MUST" if op.is_required else "SHOULD"
    if op.is_view:
        yield "a view: it moves no element"
    if callable(op.linear):
        yield "linear under some attributes"
    elif op.linear:
        yield "linear in " + ", ".join(f"`{name}`" for name in op.linear)
    if op.zeros:
        yield "zeros give zeros in " + ", ".join(f"`{name}`" for name in op.zeros)
    if callable(op.inplace):
        yield "in place under some attributes"
    else:
        yield from (f"result {index} may overwrite `{name}`" for index, name in op.inplace)


if __name__ == "__main__":
    sys.stdout.write(build_op_reference())
