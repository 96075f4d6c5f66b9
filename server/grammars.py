"""Cache of compiled grammars by text. One compilation takes 0.2 s, because llguidance reads the whole vocabulary."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping

from ..frontends.errors import ModelError
from ..frontends.generation.grammar import Grammar
from ..frontends.generation.lazy_grammar import LazyJsonGrammar
from ..frontends.gguf.tokenization.tokenizer import Tokenizer
from .bodies.schemas import MAX_GRAMMAR_CHARACTERS
from .errors import make_bad_request_error

MAX_GRAMMARS = 64
"""Maximum compiled grammars in the cache; the least recently used one is dropped."""
ANY_OBJECT_SCHEMA: Mapping[str, object] = {"type": "object"}
"""JSON schema of ``response_format: json_object``."""


class GrammarCache:
    """A cache of compiled grammars for one tokenizer. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        self._grammars: OrderedDict[tuple[str, str], Grammar] = OrderedDict()

    def compile_grammar(self, text: str) -> Grammar:
        """Return the compiled grammar of a GBNF or Lark text.

        Raises:
            ApiError: The text is wrong or too long.
        """
        return self._get("grammar", text)

    def compile_schema(self, schema: Mapping[str, object] | bool | str, is_strict: bool = False) -> Grammar:
        """Return the compiled grammar of a JSON schema, given as text or as an object.

        Raises:
            ApiError: The schema is wrong or too long, or has unsupported keywords although `is_strict` is set.
        """
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        grammar = self._get("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
        if is_strict and grammar.ignored_keywords_warning:
            raise make_bad_request_error(grammar.ignored_keywords_warning, "json_schema")
        return grammar

    def compile_call_schema(self, schema: Mapping[str, object], is_strict: bool = False) -> Grammar:
        """Return the compiled grammar of a tool call with the given JSON schema.

        The grammar permits optional spaces, because models write them without a grammar.

        Raises:
            ApiError: As `compile_schema`.
        """
        grammar = self._get("tools", json.dumps(schema))
        if is_strict and grammar.ignored_keywords_warning:
            raise make_bad_request_error(grammar.ignored_keywords_warning, "tools")
        return grammar

    def _get(self, kind: str, text: str) -> Grammar:
        if len(text) > MAX_GRAMMAR_CHARACTERS:
            raise make_bad_request_error(
                f"the {kind} has {len(text)} characters; need {MAX_GRAMMAR_CHARACTERS} at most", kind
            )
        with self._lock:
            if (found := self._grammars.get((kind, text))) is not None:
                self._grammars.move_to_end((kind, text))
                return found
        try:
            if kind == "grammar":
                grammar = Grammar(self._tokenizer, grammar=text)
            else:
                grammar = Grammar(self._tokenizer, json_schema=text, allows_spaces=kind == "tools")
        except ModelError as error:
            raise make_bad_request_error(str(error), kind) from None
        with self._lock:
            self._grammars[kind, text] = grammar
            while len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar


def list_ignored_schema_keywords(grammar: Grammar | LazyJsonGrammar | None) -> tuple[str, ...]:
    """List the keywords of a JSON schema that its compiled grammar does not enforce.

    They are entries of the header that names ignored fields.
    """
    return (
        (f"json_schema ({grammar.ignored_keywords_warning})",)
        if grammar is not None and grammar.ignored_keywords_warning
        else ()
    )
