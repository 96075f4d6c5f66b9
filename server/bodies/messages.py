"""Chat messages in the form that chat templates read, and the prompt that a template renders."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ...frontends.errors import ModelError
from ...frontends.gguf.chat import choose_chat_template_and_variables
from ...frontends.gguf.tokenization.tokenizer import Tokenizer
from ...graph.lazy_dataclass import dataclass
from ..errors import make_bad_request_error
from .generic_tools import OPEN_CALL, has_tool_messages, write_tools_as_text
from .schemas import ChatBody, Objects, TemplateBody

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
OPEN_THOUGHT, CLOSE_THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a chat, as its chat template renders it.

    - `text`: the prompt.
    - `template`: the chat template.
    - `continues_message`: whether the prompt ends with the beginning of the answer, which is the last message.
    - `has_generic_tools`: whether the template supports no tools, so that the prompt describes them as text.
    """

    text: str
    template: str
    continues_message: bool = False
    has_generic_tools: bool = False

    @property
    def opens_thought(self) -> bool:
        """Whether the answer begins inside a thought, because the prompt ends with ``<think>``."""
        return self.text.rstrip().endswith(OPEN_THOUGHT)

    @property
    def can_answer_with_thoughts(self) -> bool:
        """Whether answers of the model may contain thoughts."""
        return CLOSE_THOUGHT in self.template

    @property
    def has_marker_before_each_call(self) -> bool:
        """Whether the model writes a marker before each tool call."""
        return self.has_generic_tools or OPEN_CALL in self.template


def render_messages(
    body: ChatBody | TemplateBody,
    metadata: Mapping[str, object],
    tokenizer: Tokenizer,
    *,
    template: str | None = None,
    variables: Mapping[str, object] | None = None,
    uses_tools: bool = True,
) -> ChatPrompt:
    """Render the messages of a chat to a prompt with the chat template.

    Args:
        body: The messages, tools and template variables.
        metadata: The metadata of the model file.
        tokenizer: The tokenizer of the model.
        template: A template that replaces the template of the model.
        variables: Template variables that the body does not set.
        uses_tools: Whether the template gets the tools.

    Raises:
        ApiError: A message is malformed.
        ModelError: There is no template, or it refuses the messages.
    """
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    all_variables = {**make_date_variables(), **(variables or {}), **effort, **body.chat_template_kwargs}
    tools = body.tools if uses_tools and body.tools else None
    format = choose_chat_template_and_variables(metadata, template=template, tools=tools, variables=all_variables)
    messages = [normalise_message(message, i, format.template) for i, message in enumerate(body.messages)]
    prefix = _take_answer_prefix(body, messages)
    begins_answer = {"add_generation_prompt": body.add_generation_prompt is not False or prefix is not None}
    format = replace(format, variables={**begins_answer, **format.variables})
    render = partial(format.render, bos=tokenizer.bos_text, eos=tokenizer.eos_text)
    is_generic = bool(tools or has_tool_messages(messages)) and "tools" not in format.template
    text = _render_generic_tools(render, messages, tools or []) if is_generic else render(messages)
    return ChatPrompt(text + (prefix or ""), format.template, prefix is not None, is_generic)


def _render_generic_tools(
    render: Callable[[Sequence[Objects]], str], messages: Sequence[Objects], tools: Sequence[Objects]
) -> str:
    """Render messages with a template that has no tools: the prompt describes the tools as text.

    If the template refuses a system message, the description is in a message of the user.
    """
    try:
        return render(write_tools_as_text(messages, tools, has_system_role=True))
    except ModelError:
        return render(write_tools_as_text(messages, tools, has_system_role=False))


def make_date_variables() -> dict[str, object]:
    """Make the template variables with today's date, as llama-server does."""
    today = datetime.date.today()
    month = MONTHS[today.month - 1]  # strftime would use the language of the machine
    return {
        "date_string": f"{today.day:02} {month} {today.year}",
        "datetime": f"{month} {today.day:02} {today.year}",
    }


def _take_answer_prefix(body: ChatBody | TemplateBody, messages: list[dict[str, object]]) -> str | None:
    """Remove a last message of the assistant from `messages`, and return its text; the model continues this text.

    ``continue_final_message: false`` keeps the message as a complete one. llama-server has the same rule.
    """
    is_answer = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    if body.continue_final_message and not is_answer:
        raise make_bad_request_error("the last message is not a text of the assistant", "continue_final_message")
    if not is_answer or body.continue_final_message is False:
        return None
    if body.continue_final_message and body.add_generation_prompt:
        raise make_bad_request_error(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    if body.add_generation_prompt is False and not body.continue_final_message:
        return None
    if len(messages) == 1:
        raise make_bad_request_error(
            "the only message is an answer of the assistant; give a message before it", "messages"
        )
    if messages[-2]["role"] == "assistant":
        raise make_bad_request_error("the last two messages are of the assistant; join them", "messages")
    return str(messages.pop()["content"])


def normalise_message(message: Mapping[str, object], index: int, template: str) -> dict[str, object]:
    """Normalise a message to the form that the chat template expects.

    - Text parts are joined by line breaks.
    - The role ``developer`` becomes ``system`` unless the template knows it.
    - The arguments of tool calls are objects unless the template tests for strings.

    Raises:
        ApiError: The message is malformed.
    """
    where = f"messages[{index}]"
    role = message.get("role")
    if role not in ROLES:
        raise make_bad_request_error(f"{where}.role is {role!a:.40}; need one of {', '.join(ROLES)}", "messages")
    if role == "developer" and "developer" not in template:
        role = "system"
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list) or role != "assistant"):
        raise make_bad_request_error(f"{where}.tool_calls: need a list, in a message of the assistant", "messages")
    content = message.get("content")
    if content is None and role != "assistant":
        raise make_bad_request_error(f"{where}.content is missing", "messages")
    read = {**message, "role": role, "content": "" if content is None else join_content(content, where)}
    if calls:
        keeps_text = "arguments is string" in template
        read["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{i}]", keeps_text) for i, call in enumerate(calls)]
    else:
        read.pop("tool_calls", None)
    return read


def join_content(content: object, where: str) -> str:
    """Join the content of a message, a text or a list of text parts, to one text.

    Raises:
        ApiError: The content has another form, or a part is an image, sound or file.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise make_bad_request_error(f"{where}.content: need a text or a list of text parts", "messages")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text"):
            raise make_bad_request_error(
                f"{where}.content[{i}] has type {kind!a:.40}; this model reads text alone", "messages"
            )
        if not isinstance(text, str):
            raise make_bad_request_error(f"{where}.content[{i}].text is missing", "messages")
        texts.append(text)
    return "\n".join(texts)


def _read_call(call: object, where: str, keeps_text: bool) -> Objects:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise make_bad_request_error(f"{where}: need an object with function.name", "messages")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and not keeps_text:
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise make_bad_request_error(f"{where}.function.arguments are not JSON", "messages") from None
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
