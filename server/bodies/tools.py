"""Tools of a request: their checks, and the JSON schema of a forced tool call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ..errors import make_bad_request_error
from .schemas import FunctionBody, NamedTool, Objects, ToolBody

TOOL_CHOICES = ("none", "auto", "required")
NO_PARAMETERS: Objects = {"type": "object", "properties": {}, "additionalProperties": False}
"""JSON schema of the arguments of a function without parameters: ``{}``."""
DEFINITIONS = ("$defs", "definitions")
"""Keywords of a JSON schema that hold the definitions for references."""


def read_tools(tools: Sequence[Objects]) -> list[FunctionBody]:
    """Return the functions in the field ``tools``.

    Raises:
        ApiError: A tool is malformed or is no function.
    """
    functions = []
    for i, tool in enumerate(tools):
        try:
            read = msgspec.convert({name: value for name, value in tool.items() if value is not None}, ToolBody)
        except msgspec.ValidationError as error:
            raise make_bad_request_error(f"tools[{i}]: {error}", "tools") from None
        if read.type != "function":
            raise make_bad_request_error(f"tools[{i}].type is {read.type!a:.40}; need function", "tools")
        functions.append(read.function)
    return functions


def resolve_tool_choice(choice: str | NamedTool, functions: Sequence[FunctionBody]) -> tuple[str, list[FunctionBody]]:
    """Return the mode of the field ``tool_choice``, and the functions that the answer may call.

    Returns:
        The mode, which is ``none``, ``auto`` or ``required``, and the functions.

    Raises:
        ApiError: The choice is unknown, or names no tool.
    """
    if isinstance(choice, NamedTool):
        named = [function for function in functions if function.name == choice.function.name]
        if not named:
            raise make_bad_request_error(
                f"tool_choice names {choice.function.name!a:.80}, which is no tool", "tool_choice"
            )
        return "required", named[:1]
    if choice not in TOOL_CHOICES:
        raise make_bad_request_error(
            f"tool_choice is {choice!a:.40}; need one of {', '.join(TOOL_CHOICES)}", "tool_choice"
        )
    if choice == "required" and not functions:
        raise make_bad_request_error("tool_choice is required, but there are no tools", "tool_choice")
    return (choice, list(functions)) if functions else ("none", [])


def build_tool_call_schema(functions: Sequence[FunctionBody]) -> Objects:
    """Build the JSON schema of a tool call ``{"name": ..., "arguments": {...}}`` for any of the functions.

    The definitions of all parameters move to the root, because references begin there.
    """
    definitions: Objects = {}
    calls = []
    for i, function in enumerate(functions):
        parameters = _move_schema_definitions(function.parameters or NO_PARAMETERS, f"tool{i}_", definitions)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: Objects = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, "$defs": definitions} if definitions else schema


def _move_schema_definitions(schema: Objects, prefix: str, definitions: Objects) -> Objects:
    """Move the definitions of a JSON schema to `definitions` with prefixed names, and return the rest of the schema."""
    for keyword in DEFINITIONS:
        moved = schema.get(keyword)
        if isinstance(moved, dict):
            for name, definition in moved.items():
                definitions[prefix + str(name)] = _rename_references(definition, prefix)
    rest = {name: value for name, value in schema.items() if name not in DEFINITIONS}
    renamed = _rename_references(rest, prefix)
    assert isinstance(renamed, dict)
    return renamed


def _rename_references(schema: object, prefix: str) -> object:
    if isinstance(schema, list):
        return [_rename_references(item, prefix) for item in schema]
    if not isinstance(schema, dict):
        return schema
    renamed: Objects = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str):
            for keyword in DEFINITIONS:
                if value.startswith(f"#/{keyword}/"):
                    value = f"#/$defs/{prefix}{value.removeprefix(f'#/{keyword}/')}"
                    break
        renamed[name] = _rename_references(value, prefix)
    return renamed


def list_string_parameters(functions: Sequence[FunctionBody]) -> Mapping[str, frozenset[str]]:
    """Return the names of the string parameters of each function, by function name."""
    found = {}
    for function in functions:
        properties = (function.parameters or {}).get("properties")
        parameters = properties.items() if isinstance(properties, dict) else ()
        found[function.name] = frozenset(
            name for name, schema in parameters if isinstance(schema, dict) and schema.get("type") == "string"
        )
    return found
