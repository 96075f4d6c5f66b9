"""The Python signature of an op, for `help`, editors and type checkers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...graph.attrs import Attrs
from ...graph.errors import GraphError
from .signature import Signature

EMPTY = inspect.Parameter.empty
"""The mark of a parameter without a default."""


def read_attributes(function: Callable[..., object]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the attributes of an op from the keyword-only parameters of its function: annotations, and defaults.

    Attributes without a default come first. `inspect.signature` takes ten times as long.

    Raises:
        GraphError: a parameter has no annotation.
    """
    code, defaults = function.__code__, function.__kwdefaults__ or {}
    keywords = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    ordered = sorted(keywords, key=lambda keyword: keyword in defaults)
    if missing := [keyword for keyword in ordered if keyword not in function.__annotations__]:
        raise GraphError(f"{function.__name__}: attribute {missing[0]} has no annotation; add one, such as float")
    types = {keyword: _format_annotation(function.__annotations__[keyword]) for keyword in ordered}
    return types, {keyword: defaults[keyword] for keyword in keywords if keyword in defaults}


def _format_annotation(annotation: Any) -> str:
    """Return a type annotation as text; without ``from __future__ import annotations`` it is a type object."""
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def returns_scalar(function: Callable[..., object]) -> bool:
    """Return whether a function is annotated to return a `Scalar`, so that it declares an op in the scalar language."""
    return _format_annotation(function.__annotations__.get("return", "")) == "Scalar"


def build_call_signature(
    longest: Signature, min_operand_count: int, attribute_types: Mapping[str, str], defaults: Attrs
) -> inspect.Signature:
    """Build the Python signature of an op, from its operands and attributes.

    Operands come by position or by name; attributes and the name of the node come by name.

    Args:
        longest: the signature of the op with the most operands.
        min_operand_count: number of first operands that all signatures of the op have.
        attribute_types: annotations of the attributes by name.
        defaults: attributes with a default.
    """
    operands, may_end = [], False
    for i, operand in enumerate(longest.operands):
        lacking = operand.optional or i >= min_operand_count
        may_end |= lacking
        kind, default = "Value | None" if lacking else "Value", None if may_end else EMPTY
        operands.append(
            inspect.Parameter(operand.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
        )
    named = {
        **{
            name: (widen_annotation_for_callers(kind), defaults.get(name, EMPTY))
            for name, kind in attribute_types.items()
        },
        "name": ("str", ""),
    }
    attributes = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in named.items()
    ]
    count = len(longest.results)
    returns = "Value" if count == 1 else f"tuple[{', '.join(['Value'] * count)}]"
    return inspect.Signature([*operands, *attributes], return_annotation=returns)


def widen_annotation_for_callers(annotation: str) -> str:
    """Return the type annotation of an attribute with all types that a caller may pass.

    Callers may pass sequences for tuples, and dtype names for dtypes.
    """
    return re.sub(r"tuple\[(\w+), \.\.\.\]", r"Sequence[\1]", re.sub(r"\bDType\b", "DTypeLike", annotation))


def format_untyped_signature(signature: inspect.Signature) -> str:
    """Return a signature as ``(parameters) -> result``, parameters without types, on one line."""
    return f"({', '.join(format_parameters(signature, types=False))}) -> {signature.return_annotation}"


def format_parameters(signature: inspect.Signature, *, types: bool = True) -> Iterator[str]:
    """Yield each parameter of a signature as text, with or without its type."""
    by_name = False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not by_name:
            by_name = True
            yield "*"
        equals, kind = (" = ", f": {p.annotation}") if types else ("=", "")
        default = f'"{p.default}"' if isinstance(p.default, str) else repr(p.default)
        yield f"{p.name}{kind}" + ("" if p.default is EMPTY else f"{equals}{default}")
