"""The generation options of the Python API: their types and checks."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from ...graph.old_names import make_module_getattr
from ...graph.validation import (
    ANY,
    BOOL,
    NONE,
    TEXT,
    ArgumentKind,
    convert_integers,
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
from .sampling import DEFAULT_TEMPERATURE, Sampling

PROMPT_KIND = TEXT | list_of(ANY, "a sequence of tokens") | instance_of(np.ndarray)
OBJECTS_KIND = list_of(instance_of(Mapping), "a sequence of mappings") | NONE
MESSAGES_KIND = TEXT | list_of(instance_of(Mapping), "a sequence of mappings with role and content")


class Options(TypedDict, total=False):
    """Options of a generation. All defaults except `schema_lenient` are the defaults of ``hocket run``."""

    max_tokens: int
    """Largest number of new tokens; -1: until the context is full (128)."""
    temperature: float
    """Temperature; 0 takes the most probable token (0.8)."""
    top_k: int
    """Number of most probable tokens to keep; 0: all (40)."""
    top_p: float
    """Keep the most probable tokens up to this sum of probabilities (0.95)."""
    min_p: float
    """Keep tokens with at least this fraction of the largest probability (0.05)."""
    repeat_penalty: float
    """Divide the logits of recent tokens by this number (1)."""
    repeat_last_n: int
    """Number of recent tokens for the penalties; -1: all (64)."""
    presence_penalty: float
    """Subtract this number from the logits of recent tokens (0)."""
    frequency_penalty: float
    """Subtract this number once per occurrence of a recent token (0)."""
    bias: Sequence[tuple[int, float]]
    """Pairs of a token and the number that is added to its logit."""
    seed: int | None
    """Seed of the random numbers; equal seeds give equal texts; None: a random seed."""
    stop: str | Sequence[str]
    """Strings that end the text; the text stops before them."""
    ignore_eos: bool
    """Whether to continue after an end token."""
    grammar: str
    """Grammar of the text: GBNF of llama.cpp, or Lark; needs the package llguidance."""
    json_schema: str | Mapping[str, object]
    """JSON schema of the text; needs the package llguidance."""
    schema_lenient: bool
    """Ignore unsupported keywords of the schema with a warning; False: refuse them (True)."""
    context_shift: bool
    """Whether to drop the older half of a full context and continue (False)."""


OPTION_KINDS: Mapping[str, ArgumentKind] = MappingProxyType(
    {
        "max_tokens": integer_between(-1),
        "seed": integer_between(0, 2**64 - 1) | NONE,
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
    """Check options, and resolve them to the generation parameters and the stop strings.

    Args:
        options: Values by the names of `Options`.
        tokenizer: The tokenizer, or None for a model without a vocabulary, which accepts no text options.

    Raises:
        ModelError: An option is unknown, has a wrong value or contradicts another one.
    """
    known, options = (*OPTION_KINDS, *SAMPLING_OPTIONS), convert_integers(options)
    for name, value in options.items():
        if name not in known:
            hint = did_you_mean(name, known) or f"; options: {', '.join(known)}"
            raise ModelError(f"generate: there is no option {name!r:.60}{hint}")
        if name in OPTION_KINDS:
            require(ModelError, "generate", name, value, OPTION_KINDS[name])
    sampling_options = {
        "temperature": DEFAULT_TEMPERATURE,
        **{name: options[name] for name in SAMPLING_OPTIONS if name in options},
    }
    seed, stop = options.get("seed"), options.get("stop", ())
    rules = {name: options[name] for name in ("grammar", "json_schema") if options.get(name, "") != ""}
    if len(rules) > 1:
        raise ModelError("generate: got a grammar and a JSON schema; give one")
    if tokenizer is None and (texts := [*rules, *(["stop"] if stop else [])]):
        raise ModelError(f"generate: the model has no vocabulary, so {texts[0]} has no meaning; leave it out")
    lenient = options.get("schema_lenient", True)
    grammar = Grammar(tokenizer, **rules, schema_lenient=lenient) if tokenizer is not None and rules else None
    if grammar is not None and grammar.ignored_keywords_warning:
        warnings.warn(grammar.ignored_keywords_warning, stacklevel=4)
    params = GenerationParams(
        options.get("max_tokens", 128),
        Sampling(**sampling_options),
        secrets.randbits(31) if seed is None else seed,
        frozenset() if tokenizer is None or options.get("ignore_eos") else tokenizer.eos_ids,
        grammar,
        int(tokenizer is not None and tokenizer.add_bos) if options.get("context_shift") else None,
        None if tokenizer is None else tokenizer.n_tokens,
    )
    return params, (stop,) if isinstance(stop, str) else tuple(stop)


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), settled="resolve_options")
