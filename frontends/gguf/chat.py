"""Chat templates: messages in, the prompt text the model was trained on out.

A template is a jinja2 program out of the model file, hence hostile: it runs in the sandbox of ``chat_sandbox``, with
the variables and functions that HF ``transformers`` gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError

CHAT_TEMPLATE_KEY = "tokenizer.chat_template"
MAX_TEMPLATE_CHARACTERS = 1 << 20
"""Characters of the largest template; the longest in use has about 30,000."""
RESERVED_VARIABLES = ("template", "messages", "bos", "eos", "bos_token", "eos_token")
"""Names that no further variable can have."""

NAMED_TEMPLATES: Mapping[str, str] = {
    "rwkv-world": "{% for message in messages %}"
    "{{ {'system': 'System', 'user': 'User'}.get(message['role'], 'Assistant') }}: {{ message['content'] | trim }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}",
}
"""Templates that files only name, since llama.cpp knows them."""


def select_chat_template(metadata: Mapping[str, object], name: str | None = None) -> str:
    """The chat template of a GGUF file: the default one, or the one called ``name`` (such as ``tool_use``).

    ModelError if the file has none, not that one, or one that is not text.
    """
    key = CHAT_TEMPLATE_KEY if name is None else f"{CHAT_TEMPLATE_KEY}.{name}"
    template = metadata.get(key)
    if isinstance(template, str) and template:
        return NAMED_TEMPLATES.get(template, template)
    if template:
        raise ModelError(f"{key} is a {type(template).__name__}; need a string")
    others = sorted(k.removeprefix(f"{CHAT_TEMPLATE_KEY}.") for k in metadata if k.startswith(f"{CHAT_TEMPLATE_KEY}."))
    remedy = (
        f"this model has those named {', '.join(others)}"
        if others
        else "give plain text, or --chat-template (Python: chat_template)"
    )
    raise ModelError(f"the model has no {'chat template' if name is None else f'chat template {name!a}'}; {remedy}")


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How messages become a prompt: a template and its further variables, such as `tools`."""

    template: str
    variables: Mapping[str, object]

    def render(self, messages: Sequence[Mapping[str, object]], *, bos: str, eos: str) -> str:
        return render_chat(self.template, messages, bos=bos, eos=eos, **self.variables)  # type: ignore[arg-type]


def choose_chat_format(
    metadata: Mapping[str, object],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, object]] | None = None,
    documents: Sequence[Mapping[str, object]] | None = None,
    variables: Mapping[str, object] | None = None,
) -> ChatFormat:
    """Choose the template of a chat, and its variables.

    Args:
        metadata: The keys of the model file.
        template: A template to use in place of the model's.
        tools: Descriptions of functions. With them the model's template named ``tool_use`` is taken, if it has one.
        documents: Texts that the answer may cite.
        variables: Further variables, such as ``enable_thinking``.

    Raises:
        ModelError: There is no template, or a variable has a name that is taken.
    """
    further = dict(variables or {})
    if taken := [name for name in further if name in RESERVED_VARIABLES]:
        raise ModelError(f"chat template variable {taken[0]!r} is set by hocket; leave it out")
    standard = {"tools": tools, "documents": documents}
    further = {name: value for name, value in standard.items() if value is not None} | further
    name = "tool_use" if further.get("tools") is not None and f"{CHAT_TEMPLATE_KEY}.tool_use" in metadata else None
    return ChatFormat(select_chat_template(metadata, name) if template is None else template, MappingProxyType(further))


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, object]],
    *,
    bos: str,
    eos: str,
    add_generation_prompt: bool = True,
    **extra: object,
) -> str:
    """The prompt for ``messages`` (each with ``role`` and ``content``), ready for ``Tokenizer.encode_chat``.

    ``extra`` are further variables some templates know, such as ``enable_thinking``; ``tools`` and ``documents`` are
    None unless given.  ModelError, one
    line, if the template is empty, broken, refuses the messages, or needs more time or memory than any sane one does.

    Source: ``apply_chat_template`` of HF ``transformers``.
    """
    if not template or len(template) > MAX_TEMPLATE_CHARACTERS:
        raise ModelError(f"the chat template has {len(template)} characters; need 1 to {MAX_TEMPLATE_CHARACTERS}")
    variables = {
        "tools": None,
        "documents": None,
        **extra,
        "messages": [dict(message) for message in messages],
        "bos_token": bos,
        "eos_token": eos,
        "add_generation_prompt": add_generation_prompt,
    }
    from .chat_sandbox import ChatEnvironment

    try:
        return ChatEnvironment().render_text(template, variables)
    except ModelError:
        raise
    except Exception as error:  # a template is a program of somebody else
        # Whatever else the template does wrong surfaces here: it may call, index and add anything it was given.
        line = getattr(error, "lineno", None)
        where = f" at line {line}" if isinstance(line, int) else ""
        said = " ".join(str(error).split())[:200]
        raise ModelError(f"the chat template fails{where}: {type(error).__name__}: {said}") from error
