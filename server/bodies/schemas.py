"""Schemas of request bodies as msgspec structs: the type and the bounds of each field.

`decode_body` sorts the fields of a body into four kinds:

1. Fields of the struct: converted.
2. Fields of samplers that hocket lacks: accepted at their neutral value, refused by name at another value.
3. Fields without influence on the text: accepted, and listed in the header ``X-Hocket-Ignored``.
4. All others: refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from ..errors import make_bad_request_error

MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 256
MAX_CHOICES = 16
MAX_GRAMMAR_CHARACTERS = 1 << 16
"""Maximum characters of a grammar or JSON schema."""

Temperature = Annotated[float, Meta(ge=0, le=100)]
Share = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
Penalty = Annotated[float, Meta(ge=-100, le=100)]
RepeatPenalty = Annotated[float, Meta(gt=0, le=100)]
TokenCount = Annotated[int, Meta(ge=-1, lt=1 << 31)]
"""Number of tokens; -1 is unlimited."""
Seed = Annotated[int, Meta(ge=-(1 << 63), lt=(1 << 63) - 1)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
ShortText = Annotated[str, Meta(max_length=256)]
StopText = Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)]
TopCount = Annotated[int, Meta(ge=0, le=20)]
ChoiceCount = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
GrammarText = Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARACTERS)]
Bias = Annotated[float, Meta(ge=-1e30, le=1e30)]
BiasPair = tuple[int | ShortText, Bias | bool]
Objects = dict[str, object]
Prompt = str | list[object] | dict[str, object]
"""A text, a list of tokens, or a list of both; `RequestBuilder.encode_prompts` reads it."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The object ``stream_options`` of a request."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingBody(msgspec.Struct, kw_only=True):
    """Sampling fields of a request body, common to all endpoints that generate."""

    model: ShortText = ""
    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    top_p: Share | None = None
    min_p: BelowOne | None = None
    repeat_penalty: RepeatPenalty | None = None
    repeat_last_n: TokenCount | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[ShortText, Bias | bool] | list[BiasPair] = msgspec.field(default_factory=dict)
    seed: Seed | None = None
    stop: StopText | StopTexts = ""
    ignore_eos: bool = False
    grammar: GrammarText = ""
    json_schema: Objects | bool | GrammarText | None = None
    cache_prompt: bool = True
    id_slot: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    stream: bool = False
    return_progress: bool = False
    timings_per_token: bool = False

    @property
    def nonempty_stop_strings(self) -> tuple[str, ...]:
        """The stop strings of the request, without empty ones."""
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop))


class FunctionBody(msgspec.Struct):
    """The object ``function`` of a tool: a function that the model may call."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    parameters: Objects | None = None
    description: str | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct):
    """An entry of ``tools`` in a request body."""

    function: FunctionBody
    type: str = "function"


class NamedFunction(msgspec.Struct):
    """The object ``function`` of a ``tool_choice``, which names one function."""

    name: str


class NamedTool(msgspec.Struct):
    """A ``tool_choice`` that requires a call of one named tool."""

    function: NamedFunction
    type: str = "function"


class NamedSchema(msgspec.Struct):
    """The object ``json_schema`` of a ``response_format``: a JSON schema with its name."""

    schema: Objects | bool | None = None
    name: str = ""
    description: str = ""
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The object ``response_format``; llama-server adds the field `schema`."""

    type: str
    json_schema: NamedSchema | None = None
    schema: Objects | bool | None = None


class ChatBody(SamplingBody, kw_only=True):
    """The body of ``POST /v1/chat/completions``. The messages are checked when they are rendered."""

    messages: Annotated[list[Objects], Meta(min_length=1, max_length=4096)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    n: ChoiceCount = 1
    logprobs: bool = False
    top_logprobs: TopCount | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Objects], Meta(max_length=128)] = msgspec.field(default_factory=list)
    tool_choice: str | NamedTool = "auto"
    parallel_tool_calls: bool = True
    parse_tool_calls: bool = True
    chat_template_kwargs: Objects = msgspec.field(default_factory=dict)
    reasoning_effort: ShortText | None = None
    reasoning_format: ShortText = "auto"
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    verbose: bool = False


class TemplateBody(msgspec.Struct, kw_only=True):
    """The body of ``POST /apply-template``. The token counts of a chat have the same body."""

    messages: Annotated[list[Objects], Meta(min_length=1, max_length=4096)]
    model: ShortText = ""
    tools: Annotated[list[Objects], Meta(max_length=128)] = msgspec.field(default_factory=list)
    chat_template_kwargs: Objects = msgspec.field(default_factory=dict)
    reasoning_effort: ShortText | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TextCompletionBody(SamplingBody, kw_only=True):
    """The body of ``POST /v1/completions`` of OpenAI."""

    prompt: Prompt
    max_tokens: TokenCount | None = None
    n_predict: TokenCount | None = None
    n: ChoiceCount = 1
    echo: bool = False
    logprobs: TopCount | None = None
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)


class NativeCompletionBody(SamplingBody, kw_only=True):
    """The body of ``POST /completion`` of llama-server."""

    prompt: Prompt
    n_predict: TokenCount | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    n: ChoiceCount = 1
    n_cmpl: ChoiceCount | None = None
    n_probs: TopCount | None = None
    logprobs: TopCount | None = None
    return_tokens: bool = False
    response_fields: Annotated[list[ShortText], Meta(max_length=256)] = msgspec.field(default_factory=list)


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """The body of ``POST /v1/embeddings``. The name of the input in llama-server is ``content``."""

    input: Prompt | None = None
    content: Prompt | None = None
    model: ShortText = ""
    encoding_format: str = "float"
    dimensions: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    embd_normalize: Annotated[int, Meta(ge=-1, le=2)] = 2


class RerankBody(msgspec.Struct, kw_only=True):
    """The body of ``POST /rerank``, with the documents to score.

    They are documents of Jina's API, or texts of TEI (text embeddings inference).
    """

    query: str
    documents: Annotated[list[str], Meta(min_length=1, max_length=2048)] | None = None
    texts: Annotated[list[str], Meta(min_length=1, max_length=2048)] | None = None
    top_n: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    return_documents: bool = False
    return_text: bool = False
    model: ShortText = ""


class SlotFileBody(msgspec.Struct, kw_only=True):
    """The body of ``POST /slots/ID``: the name of the file."""

    filename: ShortText


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The body of ``POST /tokenize``."""

    content: Prompt = ""
    add_special: bool = False
    parse_special: bool = True
    adds_texts: bool = msgspec.field(default=False, name="with_pieces")


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The body of ``POST /detokenize``."""

    tokens: list[TokenId] = msgspec.field(default_factory=list)


Body = TypeVar("Body", bound=msgspec.Struct)


def _equals(*values: object) -> Callable[[object], bool]:
    return lambda value: any(value == neutral and type(value) is not str for neutral in values)


def _is_empty(value: object) -> bool:
    return value in ("", [], {})


def _is_zero_or_negative(value: object) -> bool:
    return isinstance(value, int | float) and value <= 0


NEUTRAL_VALUES: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("typical_p", "typical", "best_of"), _equals(1)),
    **dict.fromkeys(
        ("dynatemp_range", "mirostat", "xtc_probability", "dry_multiplier", "n_keep", "n_indent", "min_keep"),
        _equals(0),
    ),
    **dict.fromkeys(("top_n_sigma", "adaptive_target", "t_max_predict_ms"), _is_zero_or_negative),
    "post_sampling_probs": _equals(False),
    "grammar_lazy": _equals(False),
    "store": _equals(False),
    "suffix": _is_empty,
    "lora": _is_empty,
    "samplers": _is_empty,
    "grammar_triggers": _is_empty,
    "preserved_tokens": _is_empty,
    "functions": _is_empty,
    "modalities": lambda value: value == ["text"],
    "function_call": lambda value: value == "none",
    "verbosity": lambda value: value == "medium",
    "truncation": lambda value: value == "disabled",
    "background": _equals(False),
    **dict.fromkeys(("web_search_options", "audio"), lambda value: False),
}
"""Unsupported fields that would change the text, each with a test for the value that has no effect."""
DEPENDENT_FIELDS: Mapping[str, str] = {
    "mirostat_tau": "mirostat",
    "mirostat_eta": "mirostat",
    "xtc_threshold": "xtc_probability",
    "dynatemp_exponent": "dynatemp_range",
    "dry_base": "dry_multiplier",
    "dry_allowed_length": "dry_multiplier",
    "dry_penalty_last_n": "dry_multiplier",
    "dry_sequence_breakers": "dry_multiplier",
    "adaptive_decay": "adaptive_target",
}
"""Fields without effect while another field has its neutral value, by name; the value is the other field."""
HARMLESS_FIELDS = frozenset(
    (
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "id_slot",
        "n_cache_reuse",
        "n_discard",
        "backend_sampling",
        "sse_ping_interval",
        "verbose",
        "speculative.n_max",
        "speculative.n_min",
        "speculative.p_min",
        "speculative.type",
        "return_text",
        "stream_options",
        "cache_control",
        "betas",
        "context_management",
        "diagnostics",
        "inference_geo",
        "moderation",
        "prompt_cache_options",
        "speed",
        "user_profile_id",
        "workspace_id",
        "max_tool_calls",
    )
)
"""Fields that change no text."""


def parse_json_object(data: bytes) -> dict[str, object]:
    """Parse a request body as a JSON object.

    Raises:
        ApiError: The body is no JSON object, or has NaN, numbers out of range, lone surrogates or too many levels.
    """
    if not data.strip():
        raise make_bad_request_error("the body is empty; send a JSON object")
    try:
        body = msgspec.json.decode(data)
    except RecursionError:
        raise make_bad_request_error("the body is nested too deeply") from None
    except ValueError as error:
        raise make_bad_request_error(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise make_bad_request_error("the body is not a JSON object")
    return body


def decode_body(data: bytes, body_type: type[Body]) -> tuple[Body, tuple[str, ...]]:
    """Decode a JSON body to a struct of type `body_type`, and return it with the names of its ignored fields.

    Raises:
        ApiError: A field is unknown, is unsupported, or has a wrong value; `ApiError.param` names it.
    """
    body = {name: value for name, value in parse_json_object(data).items() if value is not None}
    known = set(body_type.__struct_encode_fields__)
    ignored = []
    for name in body.keys() - known:
        if is_neutral := NEUTRAL_VALUES.get(name):
            if not is_neutral(body[name]):
                raise make_bad_request_error(f"{name} is not supported; leave it out", name)
        elif name in DEPENDENT_FIELDS or name in HARMLESS_FIELDS:
            ignored.append(name)
        else:
            raise make_bad_request_error(f"there is no field {name!a:.80} here; leave it out", name[:80])
    try:
        return msgspec.convert({name: body[name] for name in known & body.keys()}, body_type), tuple(sorted(ignored))
    except RecursionError:
        raise make_bad_request_error("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        param = path.strip("`.").partition("[")[0].partition(".")[0] or None
        raise make_bad_request_error(f"{path.strip('`.') or 'the body'}: {reason}", param) from None
