"""The options of a generation, as Python programs give them: what each may be, and what it means."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, TypedDict

from ...graph.validation import (
    BOOL,
    NONE,
    TEXT,
    ArgumentKind,
    did_you_mean,
    instance_of,
    integer_between,
    list_of,
    require,
)
from ..errors import ModelError
from ..gguf.tokenization.tokenizer import Tokenizer
from .generate import GenerationParams
from .grammar import Grammar
from .sampling import Sampling


class Options(TypedDict, total=False):
    """How a generation goes; the defaults are those of ``hocket run``."""

    max_tokens: int
    """New tokens at most; -1: until the context is full (128)."""
    temperature: float
    """0 takes the likeliest (0.8)."""
    top_k: int
    """Keep so many of the likeliest, 0: all (40)."""
    top_p: float
    """Keep the likeliest up to this sum of probabilities (0.95)."""
    min_p: float
    """Keep those above so much of the best (0.05)."""
    repeat_penalty: float
    """Divide logits of recent tokens by it (1)."""
    repeat_last_n: int
    """So many tokens are recent, -1: all (64)."""
    presence_penalty: float
    """Subtract it from logits of recent tokens (0)."""
    frequency_penalty: float
    """And this for each time that they occurred (0)."""
    bias: Sequence[tuple[int, float]]
    """Pairs of a token and what is added to its logit."""
    seed: int | None
    """Equal seeds draw equal texts; None: a random one."""
    stop: str | Sequence[str]
    """Strings that end the text before them."""
    ignore_eos: bool
    """Go on after an end token."""
    grammar: str
    """What the text may be: GBNF as llama.cpp reads it, or Lark; needs ``hocket[grammar]``."""
    json_schema: str | Mapping[str, object]
    """A JSON schema that the text must follow; needs ``hocket[grammar]``."""
    schema_lenient: bool
    """Leave out keywords of the schema that cannot be followed, with a warning; False: refuse them (True)."""
    context_shift: bool
    """Where the context is full, forget its older half and go on (False)."""


OPTION_KINDS: Mapping[str, ArgumentKind] = MappingProxyType(
    {
        "max_tokens": integer_between(-1),
        "seed": integer_between(0) | NONE,
        "stop": TEXT | list_of(TEXT, "a sequence of texts"),
        "ignore_eos": BOOL,
        "grammar": TEXT,
        "json_schema": instance_of(str, Mapping),
        "schema_lenient": BOOL,
        "context_shift": BOOL,
    }
)
SAMPLING_OPTIONS = tuple(f.name for f in fields(Sampling))


def resolve_options(
    options: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[GenerationParams, tuple[str, ...]]:
    """What to draw, and what strings end the text; a model without a vocabulary has no tokenizer, and takes no option
    about text.  Raises `ModelError`."""
    known = (*OPTION_KINDS, *SAMPLING_OPTIONS)
    for name, value in options.items():
        if name not in known:
            hint = did_you_mean(name, known) or f"; options: {', '.join(known)}"
            raise ModelError(f"generate: there is no option {name!r:.60}{hint}")
        if name in OPTION_KINDS:
            require(ModelError, "generate", name, value, OPTION_KINDS[name])
    given = {"temperature": 0.8, **{name: options[name] for name in SAMPLING_OPTIONS if name in options}}
    seed, stop = options.get("seed"), options.get("stop", ())
    rules = {name: options[name] for name in ("grammar", "json_schema") if options.get(name, "") != ""}
    if len(rules) > 1:
        raise ModelError("generate: got a grammar and a JSON schema; give one")
    if tokenizer is None and (texts := [*rules, *(["stop"] if stop else [])]):
        raise ModelError(f"generate: the model has no vocabulary, so {texts[0]} has no meaning; leave it out")
    lenient = options.get("schema_lenient", True)
    grammar = Grammar(tokenizer, **rules, schema_lenient=lenient) if tokenizer is not None and rules else None
    if grammar is not None and grammar.warning:
        warnings.warn(grammar.warning, stacklevel=4)
    drawing = GenerationParams(
        options.get("max_tokens", 128),
        Sampling(**given),
        secrets.randbits(31) if seed is None else seed,
        frozenset() if tokenizer is None or options.get("ignore_eos") else tokenizer.eos_ids,
        grammar,
        int(tokenizer is not None and tokenizer.add_bos) if options.get("context_shift") else None,
        None if tokenizer is None else tokenizer.n_tokens,
    )
    return drawing, (stop,) if isinstance(stop, str) else tuple(stop)
