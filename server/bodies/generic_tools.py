"""Tools for chat templates that have none: functions, calls and results become plain text in the form of Hermes models.

The answers have the same form, so `AnswerParser` finds the calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from .schemas import Objects

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
OPEN_RESULT, CLOSE_RESULT = "<tool_response>", "</tool_response>"
TOOLS_PROMPT = (
    "You can call functions. Here is a list of them, one JSON object per line:\n<tools>\n{tools}\n</tools>\n\n"
    f"To call a function, write a JSON object with its name and its arguments between {OPEN_CALL} and {CLOSE_CALL}:\n"
    f'{OPEN_CALL}\n{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}\n{CLOSE_CALL}\n\n'
    f"The result follows between {OPEN_RESULT} and {CLOSE_RESULT}. If no function helps, answer without a call."
)
"""The description of tools for a model; ``{tools}`` is replaced."""


def has_tool_messages(messages: Sequence[Mapping[str, object]]) -> bool:
    """Return whether a chat contains tool calls or tool results."""
    return any(message["role"] in ("tool", "function") or message.get("tool_calls") for message in messages)


def describe_tools(tools: Sequence[Objects]) -> str:
    """Describe tools for a model as the text of a system message."""
    lines = (json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return TOOLS_PROMPT.replace("{tools}", "\n".join(lines))


def write_tools_as_text(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Objects], *, has_system_role: bool
) -> list[Objects]:
    """Rewrite a chat for a template without tools: tool calls, tool results and tool descriptions become plain text.

    The description of the tools is added to the system message, or to the first message of the user.

    Args:
        messages: The messages, from `normalise_message`.
        tools: The tools of the request; an empty list adds no description.
        has_system_role: Whether the template accepts a system message.
    """
    written: list[Objects] = []
    for message in messages:
        text = str(message["content"])
        if message["role"] in ("tool", "function"):
            result = f"{OPEN_RESULT}\n{text}\n{CLOSE_RESULT}"
            if written and written[-1].get("has_results"):
                written[-1]["content"] = f"{written[-1]['content']}\n{result}"
            else:
                written.append({"role": "user", "content": result, "has_results": True})
            continue
        calls = message.get("tool_calls")
        lines = [_write_call(call) for call in calls] if isinstance(calls, list) else []
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        written.append({**rest, "content": "\n".join(filter(None, [text, *lines]))})
    if tools:
        _add_description(written, describe_tools(tools), has_system_role)
    return [{name: value for name, value in message.items() if name != "has_results"} for message in written]


def _add_description(messages: list[Objects], description: str, has_system_role: bool) -> None:
    role = "system" if has_system_role else "user"
    target = next((message for message in messages if message["role"] == role), None)
    if has_system_role and (target is None or target is not messages[0]):
        messages.insert(0, {"role": "system", "content": description})
    elif target is None:
        messages.insert(0, {"role": "user", "content": description})
    elif has_system_role:
        target["content"] = f"{target['content']}\n\n{description}"
    else:
        target["content"] = f"{description}\n\n{target['content']}"


def _write_call(call: Mapping[str, object]) -> str:
    function = call["function"]
    assert isinstance(function, dict)
    body = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN_CALL}\n{json.dumps(body, ensure_ascii=False)}\n{CLOSE_CALL}"
