"""Bodies of OpenAI's responses API, and their conversion to chats.

An input of the responses API is a list of items: messages, thoughts, function calls and results. A chat has messages
alone, so thoughts and calls become fields of the next or the last message of the assistant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from ..errors import make_bad_request_error
from .messages import join_content
from .schemas import (
    ChatBody,
    NamedFunction,
    NamedSchema,
    NamedTool,
    Objects,
    ResponseFormat,
    SamplingBody,
    ShortText,
    TopCount,
)

LOGPROBS_INCLUDE = "message.output_text.logprobs"
STATE_ERROR = "is not supported, because this server stores no responses; send the whole conversation in input"
"""End of the message for fields that name a stored response."""
FORMAT_TYPES = ("text", "json_object", "json_schema")
Struct = TypeVar("Struct", bound=msgspec.Struct)


class TextFormat(msgspec.Struct):
    """The object ``text.format``: the form of the answer."""

    type: str = "text"
    name: str = ""
    schema: Objects | bool | None = None
    description: str = ""
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The object ``text`` of a body."""

    format: TextFormat | None = None
    verbosity: str = "medium"


class ReasoningOptions(msgspec.Struct):
    """The object ``reasoning`` of a body. The server writes no summaries of thoughts."""

    effort: ShortText | None = None


class FunctionTool(msgspec.Struct):
    """An entry of ``tools``: a function and its type."""

    type: str
    name: Annotated[str, Meta(max_length=128)] = ""
    description: str | None = None
    parameters: Objects | None = None
    strict: bool | None = None


class ResponsesBody(SamplingBody, kw_only=True):
    """The body of ``POST /v1/responses``. The token counts of its input have the same body."""

    input: str | Annotated[list[Objects], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    tools: Annotated[list[Objects], Meta(max_length=128)] = msgspec.field(default_factory=list)
    tool_choice: str | Objects = "auto"
    parallel_tool_calls: bool = True
    text: Objects = msgspec.field(default_factory=dict)
    reasoning: Objects = msgspec.field(default_factory=dict)
    include: Annotated[list[ShortText], Meta(max_length=64)] = msgspec.field(default_factory=list)
    top_logprobs: TopCount | None = None
    previous_response_id: str | None = None
    conversation: str | Objects | None = None
    chat_template_kwargs: Objects = msgspec.field(default_factory=dict)

    @property
    def has_logprobs(self) -> bool:
        """Whether the client asks for the logprobs of the tokens of messages."""
        return LOGPROBS_INCLUDE in self.include


def convert_to_chat(body: ResponsesBody) -> ChatBody:
    """Convert a body of the responses API to a chat body.

    Raises:
        ApiError: An item, a tool or an option has an unknown form, or needs a stored response.
    """
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise make_bad_request_error(f"{name} {STATE_ERROR}", name)
    if body.top_logprobs is not None and not body.has_logprobs:
        raise make_bad_request_error(f"top_logprobs needs {LOGPROBS_INCLUDE} in include", "top_logprobs")
    text = _convert_to_struct(body.text, TextOptions, "text")
    if text.verbosity != "medium":
        raise make_bad_request_error("text.verbosity is not supported; leave it out", "text")
    messages = convert_items(body.input)
    if body.instructions:
        _insert_instructions_into_system_message(messages, body.instructions)
    sampling = {name: getattr(body, name) for name in SamplingBody.__struct_fields__}
    return ChatBody(
        **sampling,
        messages=messages,
        max_tokens=body.max_output_tokens,
        response_format=_convert_format(text.format or TextFormat()),
        tools=[_convert_tool(tool, i) for i, tool in enumerate(body.tools)],
        tool_choice=_convert_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=_convert_to_struct(body.reasoning, ReasoningOptions, "reasoning").effort,
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=False,
        logprobs=body.has_logprobs,
        top_logprobs=body.top_logprobs,
    )


def convert_items(items: str | Sequence[Objects]) -> list[Objects]:
    """Convert the input items of a response to chat messages.

    Raises:
        ApiError: An item has an unknown type, or a field is missing.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Objects] = []
    thoughts: list[str] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item:
            case {"type": "reasoning"}:
                fields = [parts for parts in (item.get("content"), item.get("summary")) if parts not in (None, [])]
                thoughts.append(_join_reasoning_texts(fields[0] if fields else [], where))
                continue
            case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
                call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                message = _open_assistant_message(messages)
                message["tool_calls"] = [*_list_calls(message), call]
            case {"type": "function_call_output", "call_id": str(id), "output": output}:
                text = join_content(output, f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": id, "content": text})
                continue
            case {"role": str(role), "content": content} if item.get("type", "message") == "message":
                message = {"role": role, "content": join_content(content, where)}
                messages.append(message)
                if role != "assistant":
                    continue
            case {"type": "item_reference"}:
                raise make_bad_request_error(f"{where}: item_reference {STATE_ERROR}", "input")
            case _:
                kind = item.get("type", "message")
                raise make_bad_request_error(f"{where}: an item of type {kind!a:.40} is not supported here", "input")
        if any(thoughts):
            message["reasoning_content"] = "\n".join(filter(None, thoughts))
        thoughts = []
    if not messages:
        raise make_bad_request_error("input has no message; give some text", "input")
    return messages


def _open_assistant_message(messages: list[Objects]) -> Objects:
    """Return the last message if its role is assistant; otherwise append a new assistant message and return it."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _list_calls(message: Mapping[str, object]) -> list[object]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _join_reasoning_texts(parts: object, where: str) -> str:
    """Join the texts of the parts of a reasoning item; raise `ApiError` if a part has no text."""
    listed = parts if isinstance(parts, list) else [parts]
    texts = [part.get("text") if isinstance(part, dict) else None for part in listed]
    if not all(isinstance(text, str) for text in texts):
        raise make_bad_request_error(f"{where}: need a list of parts with a text", "input")
    return "\n".join(map(str, texts))


def _insert_instructions_into_system_message(messages: list[Objects], instructions: str) -> None:
    """Put the instructions of a response into the system message, before its text; add one if there is none."""
    if messages[0]["role"] in ("system", "developer"):
        messages[0]["content"] = f"{instructions}\n\n{messages[0]['content']}"
    else:
        messages.insert(0, {"role": "system", "content": instructions})


def _convert_to_struct(fields: Objects, struct: type[Struct], name: str) -> Struct:
    """Convert an object of the body to a struct.

    Args:
        fields: The object.
        struct: The type of the struct.
        name: The field of the body with the object, for errors.
    """
    try:
        return msgspec.convert({key: value for key, value in fields.items() if value is not None}, struct)
    except msgspec.ValidationError as error:
        raise make_bad_request_error(f"{name}: {error}", name.partition("[")[0]) from None


def _convert_format(format: TextFormat) -> ResponseFormat | None:
    if format.type not in FORMAT_TYPES:
        known = ", ".join(FORMAT_TYPES)
        raise make_bad_request_error(f"text.format.type is {format.type!a:.40}; need one of {known}", "text")
    if format.type == "text":
        return None
    if format.type == "json_object":
        return ResponseFormat("json_object")
    return ResponseFormat("json_schema", NamedSchema(format.schema, format.name, format.description, format.strict))


def _convert_tool(tool: Objects, index: int) -> Objects:
    function = _convert_to_struct(tool, FunctionTool, f"tools[{index}]")
    if function.type != "function":
        raise make_bad_request_error(
            f"tools[{index}].type is {function.type!a:.40}; this server runs no tools", "tools"
        )
    fields = ("name", "description", "parameters", "strict")
    values = {name: getattr(function, name) for name in fields}
    return {"type": "function", "function": {name: value for name, value in values.items() if value is not None}}


def _convert_tool_choice(choice: str | Objects) -> str | NamedTool:
    match choice:
        case str():
            return choice
        case {"type": "function", "name": str(name)}:
            return NamedTool(NamedFunction(name))
    kind = choice.get("type")
    raise make_bad_request_error(f"tool_choice.type is {kind!a:.40}; need function with a name", "tool_choice")
