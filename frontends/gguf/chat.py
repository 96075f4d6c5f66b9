"""Chat templates: turn the messages of a chat into prompt text in the form of the training data.

A template is a jinja2 program from the model file and may be hostile. It runs in the sandbox of `chat_sandbox`, with
the variables and functions of HF ``transformers``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError

CHAT_TEMPLATE_KEY = "tokenizer.chat_template"
MAX_TEMPLATE_CHARACTERS = 1 << 20
"""Characters of the largest accepted template; the longest template in use has about 30,000."""
RESERVED_VARIABLES = ("template", "messages", "bos", "eos", "bos_token", "eos_token")
"""Variable names that hocket sets; callers cannot use them."""

NAMED_TEMPLATES: Mapping[str, str] = {
    "rwkv-world": "{% for message in messages %}"
    "{{ {'system': 'System', 'user': 'User'}.get(message['role'], 'Assistant') }}: {{ message['content'] | trim }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}",
}
"""Templates by name, for files that store only the name of a template of llama.cpp."""


def select_chat_template(metadata: Mapping[str, object], name: str | None = None) -> str:
    """Return the chat template of a GGUF file: the default one, or the one with the given name.

    Args:
        metadata: The keys of the model file.
        name: Name of a further template, such as ``tool_use``; None selects the default template.

    Raises:
        ModelError: The file has no such template, or the template is not text.
    """
    key = CHAT_TEMPLATE_KEY if name is None else f"{CHAT_TEMPLATE_KEY}.{name}"
    template = metadata.get(key)
    if isinstance(template, str) and template:
        return NAMED_TEMPLATES.get(template, template)
    if template:
        raise ModelError(f"{key} is a {type(template).__name__}; need a string")
    others = sorted(k.removeprefix(f"{CHAT_TEMPLATE_KEY}.") for k in metadata if k.startswith(f"{CHAT_TEMPLATE_KEY}."))
    remedy = (
        f"this model has those named {', '.join(others)}" if others else "give plain text, or chat_template=TEMPLATE"
    )
    raise ModelError(f"the model has no {'chat template' if name is None else f'chat template {name!a}'}; {remedy}")


@dataclass(frozen=True, slots=True)
class ChatTemplateWithVariables:
    """A chat template together with the values of additional template variables, such as `tools`."""

    template: str
    variables: Mapping[str, object]

    def render(self, messages: Sequence[Mapping[str, object]], *, bos: str, eos: str) -> str:
        return render_chat(self.template, messages, bos=bos, eos=eos, **self.variables)  # type: ignore[arg-type]


def choose_chat_template_and_variables(
    metadata: Mapping[str, object],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, object]] | None = None,
    documents: Sequence[Mapping[str, object]] | None = None,
    variables: Mapping[str, object] | None = None,
) -> ChatTemplateWithVariables:
    """Choose the chat template of a model, and the values of its additional variables.

    Args:
        metadata: The keys of the model file.
        template: A template that replaces the template of the model.
        tools: Descriptions of functions. If they are given, a model template named ``tool_use`` has precedence.
        documents: Texts that the answer may cite.
        variables: Additional variables, such as ``enable_thinking``.

    Raises:
        ModelError: There is no template, or a variable has a reserved name.
    """
    all_variables = dict(variables or {})
    if reserved := [name for name in all_variables if name in RESERVED_VARIABLES]:
        raise ModelError(f"chat template variable {reserved[0]!r} is set by hocket; leave it out")
    standard = {"tools": tools, "documents": documents}
    all_variables = {name: value for name, value in standard.items() if value is not None} | all_variables
    name = (
        "tool_use" if all_variables.get("tools") is not None and f"{CHAT_TEMPLATE_KEY}.tool_use" in metadata else None
    )
    return ChatTemplateWithVariables(
        select_chat_template(metadata, name) if template is None else template, MappingProxyType(all_variables)
    )


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, object]],
    *,
    bos: str,
    eos: str,
    add_generation_prompt: bool = True,
    **extra: object,
) -> str:
    """Render a list of messages with a chat template; the result is the prompt for `Tokenizer.encode_chat`.

    Source: ``apply_chat_template`` of HF ``transformers``.

    Args:
        template: The jinja2 text of the template.
        messages: The messages; each has ``role`` and ``content``.
        bos: Text of the BOS token.
        eos: Text of the EOS token.
        add_generation_prompt: Whether the prompt ends with the beginning of an answer.
        extra: Additional variables, such as ``enable_thinking``. ``tools`` and ``documents`` are None by default.

    Raises:
        ModelError: The template is empty, too long or broken, or it refuses the messages. The same error reports a
            template that exceeds the limits of the sandbox on steps and text.
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
    from .chat_sandbox import compile_chat_template

    try:
        return compile_chat_template(template).render_with_new_fuel(variables)
    except ModelError:
        raise
    except Exception as error:  # a template is a foreign program and may raise any exception
        line = getattr(error, "lineno", None)
        where = f" at line {line}" if isinstance(line, int) else ""
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"the chat template fails{where}: {type(error).__name__}: {reason}") from error
