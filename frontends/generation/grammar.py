"""Texts that follow a grammar or a JSON schema: which tokens may come next, told by llguidance (an extra)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ModelError
from ..gguf.tokenization.special_tokens import CONTROL, UNKNOWN
from ..gguf.tokenization.tokenizer import Tokenizer
from .gbnf import convert_to_lark

COMPACT_JSON = {"whitespace_flexible": False, "lenient": True}
"""How JSON is laid out: a small model would rather write line breaks for ever than a value. Lenient, so that llguidance
lists the keywords that it leaves out."""
UNKNOWN_FORMAT_WARNING = "Unknown format: "
"""The warning for a `format` that is no more than an annotation (JSON Schema 2020-12, Validation, 7.2.3)."""
NORMAL_STOP_REASONS = ("NotStopped", "NoExtension", "NoExtensionBias", "EndOfSentence")
"""Reasons of a matcher that is not done, or done."""
DATA_KEYWORDS = ("const", "default", "enum", "examples")
"""Keywords of a JSON schema with data as their values."""
SCHEMAS_BY_NAME = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
"""Keywords with schemas by name as their values."""
NAME_LIST_PATTERN = re.compile(r"\^(?:([\w -]+)|\((?:\?:)?([\w -]+(?:\|[\w -]+)*)\))\$")
"""A pattern that lists the names that it matches."""
F32 = npt.NDArray[np.float32]


class _LlguidanceTokenizer:
    """A tokenizer as llguidance wants it: the bytes of every token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id if tokenizer.eos_id is not None else tokenizer.n_tokens - 1
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_tokens)]
        self.special_token_ids = [i for i, kind in enumerate(tokenizer.types) if kind in (CONTROL, UNKNOWN)]
        self.encode_greedily: Any = None
        """The longest token each time, for a text that the tokenizer would change."""

    def __call__(self, text: str) -> list[int]:
        tokens = self._tokenizer.encode_inside(text)
        is_same = b"".join(self.tokens[token] for token in tokens) == text.encode()
        return tokens if is_same or self.encode_greedily is None else list(self.encode_greedily(text))


class Grammar:
    """A grammar (GBNF as llama.cpp reads it, or Lark) or a JSON schema that texts follow.

    A schema may have keywords that llguidance cannot follow. With `schema_lenient` they are left out.

    Raises:
        ModelError: It is wrong, has such keywords without `schema_lenient`, or llguidance is not installed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        grammar: str = "",
        json_schema: str | Mapping[str, object] = "",
        schema_lenient: bool = True,
    ) -> None:
        try:
            import llguidance
        except ImportError:
            raise ModelError("grammars need llguidance; run pip install hocket[grammar]") from None
        compiler: Any = llguidance.LLMatcher
        ends = sorted(tokenizer.eos_ids) or None
        words = _LlguidanceTokenizer(tokenizer)
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), tokenizer.n_tokens, ends)
        words.encode_greedily = self._tokenizer.greedy_tokenize
        self._matcher = compiler
        try:
            if grammar:
                where = {text: i for i, text in enumerate(tokenizer.tokens)}
                lark = convert_to_lark(grammar, where.get, tokenizer.n_tokens, tokenizer.eos_ids)
                self._rules = compiler.grammar_from_lark(lark)
            else:
                schema = json.loads(json_schema) if isinstance(json_schema, str) else json_schema
                text = json.dumps(_with_listed_names(schema))
                self._rules = compiler.grammar_from_json_schema(text, defaults=COMPACT_JSON)
            is_wrong, messages = compiler.validate_grammar_with_warnings(self._rules, self._tokenizer)
        except Exception as why:  # of whatever kind, it is of the grammar's text
            is_wrong, messages = True, [str(why)]
        if is_wrong:
            raise ModelError(
                f"the {'grammar' if grammar else 'JSON schema'} is wrong: {_join_messages(messages)}; correct it"
            )
        left_out = [] if grammar else [each for each in messages if not each.startswith(UNKNOWN_FORMAT_WARNING)]
        if left_out and not schema_lenient:
            raise ModelError(
                f"the JSON schema cannot be followed: {_join_messages(left_out)}; "
                "remove it, or leave it out with schema_lenient=True"
            )
        self.warning = (
            f"the JSON schema is followed without a part of it: {_join_messages(left_out)}" if left_out else ""
        )
        """A line about the keywords that texts need not follow, or nothing."""

    def make_state(self) -> GrammarState:
        """A text that begins."""
        return GrammarState(self._matcher(self._tokenizer, self._rules, log_level=0), self._tokenizer.vocab_size)


class GrammarState:
    """One text as it follows a grammar."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._mask_words = np.zeros((vocabulary + 31) // 32, np.uint32)
        self._token_count = vocabulary

    def mask_logits(self, logits: F32) -> F32:
        """Return a copy of logits f32[rows] with -inf for tokens that may not come next.

        Rows behind the last token of the vocabulary are -inf. Tokens without a row cannot come.

        Raises:
            ModelError: No token may come next, or llguidance has failed.
        """
        self._matcher.unsafe_compute_mask_ptr(self._mask_words.ctypes.data, self._mask_words.nbytes)
        self._require_valid_state()
        count = min(self._token_count, len(logits))
        may = np.unpackbits(self._mask_words.view(np.uint8), bitorder="little")[:count].astype(bool)
        if not may.any():
            raise ModelError("the grammar allows no token of this model here; choose another")
        kept = np.full_like(logits, -np.inf)
        kept[:count][may] = logits[:count][may]
        return kept

    def accept(self, token: int) -> bool:
        """Go on behind `token`; return whether more may come.

        Raises:
            ModelError: llguidance cannot go on, which is not the end of the text.
        """
        self._matcher.consume_token(token)
        self._require_valid_state()
        return not self._matcher.is_stopped()

    def _require_valid_state(self) -> None:
        if self._matcher.is_error() or self._matcher.stop_reason() not in NORMAL_STOP_REASONS:
            messages = self._matcher.get_error().partition("\n")[0] or self._matcher.stop_reason()
            raise ModelError(
                f"the grammar or JSON schema leads to a text that cannot be completed ({_join_messages([messages])}); "
                "simplify it, for example its patternProperties"
            )


def _join_messages(messages: list[str]) -> str:
    """Return messages of llguidance as one line."""
    return " ".join("; ".join(messages).split())[:200]


def _with_listed_names(schema: object) -> object:
    """Return a JSON schema where a pattern that lists its names is in `properties`.

    llguidance would offer a further property of the pattern after the last of its names.
    """
    if isinstance(schema, list):
        return [_with_listed_names(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = {
        key: value
        if key in DATA_KEYWORDS
        else {name: _with_listed_names(inner) for name, inner in value.items()}
        if key in SCHEMAS_BY_NAME and isinstance(value, Mapping)
        else _with_listed_names(value)
        for key, value in schema.items()
    }
    patterns, properties = changed.get("patternProperties"), changed.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return changed
    for pattern in list(patterns):
        if listed := NAME_LIST_PATTERN.fullmatch(pattern):
            inner = patterns.pop(pattern)
            for name in (listed[1] or listed[2]).split("|"):
                both = {"allOf": [properties[name], inner]} if name in properties else inner
                properties = {**properties, name: both}
    return {**changed, "patternProperties": patterns, "properties": properties}
