"""Preparation of a chat, from its body to engine requests, common to the APIs of OpenAI and Anthropic."""

from __future__ import annotations

from dataclasses import field

from ...frontends.generation.grammar import Grammar
from ...frontends.generation.lazy_grammar import LazyJsonGrammar
from ...frontends.serving.requests import GenerationRequest
from ...graph.errors import format_count
from ...graph.lazy_dataclass import dataclass
from ..bodies.answers import AnswerParser, AnswerParserOptions
from ..bodies.generic_tools import OPEN_CALL
from ..bodies.messages import CLOSE_THOUGHT, ChatPrompt
from ..bodies.schemas import ChatBody, FunctionBody
from ..bodies.tools import build_tool_call_schema, list_string_parameters, read_tools, resolve_tool_choice
from ..errors import ApiError, make_bad_request_error
from ..grammars import list_ignored_schema_keywords
from ..requests import create_random_id
from ..state import ServingState

REASONING_FORMATS = ("auto", "none", "deepseek")


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat that is ready to be submitted to the engine.

    - `id`: id of the response; `prompt_text`: the rendered chat; `requests`: one engine request for each choice.
    - `parser_options`: the parts that the text of a choice may have.
    - `ignored`: fields without effect.
    """

    id: str
    prompt_text: str
    requests: tuple[GenerationRequest, ...]
    parser_options: AnswerParserOptions
    ignored: tuple[str, ...] = field(default_factory=tuple)

    def make_parser(self) -> AnswerParser:
        """Make the parser of the text of one choice."""
        return AnswerParser(self.parser_options)


async def prepare_chat(state: ServingState, body: ChatBody, id_prefix: str) -> PreparedChat:
    """Prepare the engine requests of a chat: render and tokenize it, and compile its grammar.

    Raises:
        ApiError: A field contradicts another one, or is wrong.
        ModelError: The template refuses the messages, or an option does not fit the model.
    """
    builder = state.builder
    builder.require_served_model_if_strict(body.model)
    _check_fields(state, body)
    functions = read_tools(body.tools)
    choice, callable_functions = resolve_tool_choice(body.tool_choice, functions)
    prompt = await builder.render_chat(body, uses_tools=choice != "none")
    if body.reasoning_format not in REASONING_FORMATS:
        raise make_bad_request_error(
            f"reasoning_format: need one of {', '.join(REASONING_FORMATS)}", "reasoning_format"
        )
    grammar: Grammar | None
    if choice == "none":
        grammar = await builder.compile_requested_grammar(body, body.response_format)
    else:
        _check_no_grammar(body)
        grammar = None
        if choice == "required":
            is_strict = any(function.strict for function in callable_functions)
            grammar = await builder.compile_schema_in_worker(build_tool_call_schema(callable_functions), is_strict)
    lazy_grammar, problem = None, ""
    if choice == "auto" and body.parse_tool_calls and prompt.has_marker_before_each_call:
        lazy_grammar, problem = await _compile_lazy_grammar(state, prompt, callable_functions)
    text = prompt.text + _choose_prompt_suffix(prompt, grammar, choice == "required")
    ids = await builder.encode_chat(text)
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    chat_id = create_random_id(id_prefix)
    top = (body.top_logprobs or 0) if body.logprobs else None
    requests = tuple(
        builder.build_engine_request(
            ids,
            builder.build_generation_params(body, limit, grammar or lazy_grammar, i),
            top_logprobs=top,
            body=body,
            id=f"{chat_id}-{i}",
        )
        for i in range(body.n)
    )
    options = _choose_parser(body, prompt, choice, callable_functions, grammar is not None)
    ignored = [*list_ignored_schema_keywords(grammar or lazy_grammar), *filter(None, [problem])]
    if choice == "auto" and lazy_grammar is None and any(function.strict for function in functions):
        ignored.append("tools.function.strict")
    return PreparedChat(chat_id, text, requests, options, tuple(ignored))


async def _compile_lazy_grammar(
    state: ServingState, prompt: ChatPrompt, functions: list[FunctionBody]
) -> tuple[LazyJsonGrammar | None, str]:
    """Compile a grammar that constrains the answer only after each tool-call marker.

    If a schema cannot be compiled and no function has ``strict``, the tool calls are not constrained.

    Returns:
        The grammar, or None. The text is an entry for the header of ignored fields if there is no grammar.

    Raises:
        ApiError: The schemas cannot be compiled, and a function has ``strict``.
    """
    is_strict = any(function.strict for function in functions)
    try:
        grammar = await state.builder.compile_call_schema(build_tool_call_schema(functions), is_strict)
    except ApiError as error:
        if is_strict:
            raise
        return None, f"tools.function.parameters ({error.message})"
    begins_in_thought = prompt.can_answer_with_thoughts and prompt.opens_thought
    lazy = LazyJsonGrammar(state.service.tokenizer, grammar, OPEN_CALL, begins_in_thought=begins_in_thought)
    return lazy, ""


def _check_fields(state: ServingState, body: ChatBody) -> None:
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if limit == 0:
        raise make_bad_request_error("max_tokens is 0; need 1 or more", "max_tokens")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise make_bad_request_error(
            "max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens"
        )
    require_slots_for_choices(state, body.n)
    if body.top_logprobs is not None and not body.logprobs:
        raise make_bad_request_error("top_logprobs needs logprobs: true", "top_logprobs")


def require_slots_for_choices(state: ServingState, count: int) -> None:
    """Require at most as many choices as slots, so that all choices can run at once.

    Raises:
        ApiError: There are more choices than slots.
    """
    if count > state.service.status.slots:
        raise make_bad_request_error(
            f"n is {count}, but the server has {format_count(state.service.status.slots, 'slot')}", "n"
        )


def _check_no_grammar(body: ChatBody) -> None:
    format = body.response_format
    if body.grammar or body.json_schema is not None or (format is not None and format.type != "text"):
        raise make_bad_request_error(
            "tools and a grammar or response_format exclude each other; give one of them", "tools"
        )


def _choose_prompt_suffix(prompt: ChatPrompt, grammar: Grammar | None, is_forced_call: bool) -> str:
    """Return text to append to the prompt, so that a grammar or a forced tool call can begin after it.

    The text ends an open thought before a grammar. Before a forced tool call, it has the marker of a tool call.
    """
    start = f"\n{CLOSE_THOUGHT}\n\n" if grammar is not None and prompt.opens_thought else ""
    return f"{start}{OPEN_CALL}\n" if is_forced_call and prompt.has_marker_before_each_call else start


def _choose_parser(
    body: ChatBody, prompt: ChatPrompt, choice: str, functions: list[FunctionBody], has_grammar: bool
) -> AnswerParserOptions:
    splits_thoughts = body.reasoning_format != "none" and prompt.can_answer_with_thoughts and not has_grammar
    has_calls = choice == "auto" and body.parse_tool_calls
    return AnswerParserOptions(
        has_thoughts=splits_thoughts and not prompt.continues_message,
        opens_thought=splits_thoughts and prompt.opens_thought,
        has_calls=has_calls and prompt.has_marker_before_each_call,
        has_bare_calls=has_calls and not prompt.has_marker_before_each_call,
        is_call=choice == "required" and body.parse_tool_calls,
        max_calls=128 if body.parallel_tool_calls else 1,
        text_parameters=list_string_parameters(functions),
    )
