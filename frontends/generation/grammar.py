"""Constrained generation: the tokens that a grammar or a JSON schema allows next, from llguidance (an extra)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...graph.errors import format_install_command
from ..errors import ModelError
from ..gguf.tokenization.special_tokens import CONTROL, UNKNOWN
from ..gguf.tokenization.tokenizer import Tokenizer
from .gbnf import convert_gbnf_to_lark

COMPACT_JSON = {"whitespace_flexible": False, "lenient": True}
"""Options of llguidance for JSON: no optional white space, and a list of the ignored keywords.

A small model may write line breaks without end instead of a value.
"""
SPACED_JSON = {"whitespace_flexible": True, "whitespace_pattern": " ?", "lenient": True}
"""Options of llguidance for JSON with optional single spaces, as models write it without a grammar."""
UNKNOWN_FORMAT_WARNING = "Unknown format: "
"""Start of the warning for an unknown `format`, which is an annotation (JSON Schema 2020-12, Validation, 7.2.3)."""
NORMAL_STOP_REASONS = ("NotStopped", "NoExtension", "NoExtensionBias", "EndOfSentence")
"""Stop reasons of a matcher without an error."""
DATA_KEYWORDS = ("const", "default", "enum", "examples")
"""Keywords of a JSON schema with data as values."""
SCHEMAS_BY_NAME = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
"""Keywords of a JSON schema with schemas by name as values."""
NAME_LIST_PATTERN = re.compile(r"\^(?:([\w -]+)|\((?:\?:)?([\w -]+(?:\|[\w -]+)*)\))\$")
"""Matches a regular expression that lists complete names, such as ``^(a|b)$``."""
F32 = npt.NDArray[np.float32]


class _LlguidanceTokenizer:
    """The tokenizer of a model in the form for llguidance: the bytes of every token, and a function to encode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id if tokenizer.eos_id is not None else tokenizer.n_tokens - 1
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_tokens)]
        self.special_token_ids = [i for i, kind in enumerate(tokenizer.types) if kind in (CONTROL, UNKNOWN)]
        self.encode_greedily: Any = None
        """Encodes by the longest match, for a text that the tokenizer would change."""

    def __call__(self, text: str) -> list[int]:
        tokens = self._tokenizer.encode_continuation(text)
        is_same = b"".join(self.tokens[token] for token in tokens) == text.encode()
        return tokens if is_same or self.encode_greedily is None else list(self.encode_greedily(text))


class Grammar:
    """A compiled grammar or JSON schema that generated texts must follow.

    Args:
        tokenizer: The tokenizer of the model.
        grammar: GBNF of llama.cpp, or Lark; empty for a JSON schema.
        json_schema: The JSON schema as text or as a mapping.
        schema_lenient: Whether to ignore keywords that llguidance does not support.
        allows_spaces: Whether texts of a JSON schema may have single spaces between their parts.

    Raises:
        ModelError: The grammar or the schema is wrong, or llguidance is not installed. Unsupported keywords raise it
            too, unless `schema_lenient` is true.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        grammar: str = "",
        json_schema: str | Mapping[str, object] = "",
        schema_lenient: bool = True,
        allows_spaces: bool = False,
    ) -> None:
        try:
            import llguidance
        except ImportError:
            raise ModelError(f"grammars need llguidance; {format_install_command('grammar')}") from None
        compiler: Any = llguidance.LLMatcher
        ends = sorted(tokenizer.eos_ids) or None
        words = _LlguidanceTokenizer(tokenizer)
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), tokenizer.n_tokens, ends)
        words.encode_greedily = self._tokenizer.greedy_tokenize
        self._matcher = compiler
        try:
            if grammar:
                where = {text: i for i, text in enumerate(tokenizer.tokens)}
                lark = convert_gbnf_to_lark(grammar, where.get, tokenizer.n_tokens, tokenizer.eos_ids)
                self._rules = compiler.grammar_from_lark(lark)
            else:
                schema = json.loads(json_schema) if isinstance(json_schema, str) else json_schema
                text = json.dumps(_expand_name_patterns_to_properties(schema))
                self._rules = compiler.grammar_from_json_schema(
                    text, defaults=SPACED_JSON if allows_spaces else COMPACT_JSON
                )
            is_wrong, messages = compiler.validate_grammar_with_warnings(self._rules, self._tokenizer)
        except Exception as why:  # every exception is caused by the text of the grammar
            is_wrong, messages = True, [str(why)]
        if is_wrong:
            raise ModelError(
                f"the {'grammar' if grammar else 'JSON schema'} is wrong: "
                f"{_join_messages_to_line(messages)}; correct it"
            )
        left_out = [] if grammar else [each for each in messages if not each.startswith(UNKNOWN_FORMAT_WARNING)]
        if left_out and not schema_lenient:
            raise ModelError(
                f"the JSON schema cannot be followed: {_join_messages_to_line(left_out)}; "
                "remove it, or leave it out with schema_lenient=True"
            )
        self.ignored_keywords_warning = (
            f"the JSON schema is followed without a part of it: {_join_messages_to_line(left_out)}" if left_out else ""
        )
        """A message about the ignored keywords, or an empty text."""

    @classmethod
    def from_compiled_rules(cls, tokenizer: Tokenizer, rules: str) -> Grammar:
        """Restore a grammar from `rules`, the compiled rules of a grammar of the same tokenizer.

        Raises:
            ModelError: The rules are wrong, or llguidance is not installed.
        """
        grammar = cls(tokenizer, grammar='start: "a"')
        is_wrong, messages = grammar._matcher.validate_grammar_with_warnings(rules, grammar._tokenizer)
        if is_wrong:
            raise ModelError(f"the rules of a grammar are wrong: {_join_messages_to_line(messages)}; write them anew")
        grammar._rules = rules
        return grammar

    @property
    def compiled_rules(self) -> str:
        """The compiled rules as text of llguidance, from which `from_compiled_rules` restores the grammar."""
        return str(self._rules)

    def make_state(self) -> GrammarState:
        """Make the grammar state of a new text, at its beginning."""
        kind = "JSON schema" if self.compiled_rules.startswith("{") else "grammar"
        matcher = self._matcher(self._tokenizer, self._rules, log_level=0)
        return GrammarState(matcher, self._tokenizer.vocab_size, kind)


class GrammarState:
    """The position of one text in a grammar; it tells which tokens may come next."""

    def __init__(self, matcher: Any, vocabulary: int, kind: str = "grammar") -> None:
        self._matcher, self._kind = matcher, kind
        self._mask_words = np.zeros((vocabulary + 31) // 32, np.uint32)
        self._token_count = vocabulary

    def mask_logits(self, logits: F32) -> F32:
        """Return a copy of logits f32[n] in which tokens that the grammar does not allow next are -inf.

        Entries after the last token of the vocabulary, which are padding, also become -inf. Tokens without an entry are
        never allowed.

        Raises:
            ModelError: No token is allowed, or llguidance has failed.
        """
        words = self.compute_mask(len(logits))
        is_allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=len(logits)).astype(bool)
        return np.where(is_allowed, logits, logits.dtype.type(-np.inf))

    def compute_mask(self, token_count: int) -> npt.NDArray[np.uint32]:
        """Compute the mask of the allowed tokens: bit ``i % 32`` of word ``i // 32`` for token i of `token_count`.

        Raises:
            ModelError: As `mask_logits`.
        """
        self._matcher.unsafe_compute_mask_ptr(self._mask_words.ctypes.data, self._mask_words.nbytes)
        self._require_valid_state()
        words = np.zeros(-(-token_count // 32), np.uint32)
        allowed = make_full_mask(min(self._token_count, token_count))
        words[: allowed.size] = allowed & self._mask_words[: allowed.size]
        if not words.any():
            raise ModelError("the grammar allows no token of this model here; choose another")
        return words

    def accept_token_and_can_continue(self, token: int) -> bool:
        """Accept `token` as the next token of the text, and return whether the text may continue.

        Raises:
            ModelError: llguidance has failed.
        """
        self._matcher.consume_token(token)
        self._require_valid_state()
        return not self._matcher.is_stopped()

    def accept_first_tokens_and_can_continue(self, tokens: Sequence[int]) -> bool:
        """Accept the first tokens of a text, and return whether the grammar allows them and the text may continue.

        After False the state is of no use.
        """
        if self._matcher.validate_tokens(list(tokens)) < len(tokens):
            return False
        return all(self.accept_token_and_can_continue(token) for token in tokens)

    def _require_valid_state(self) -> None:
        if self._matcher.is_error() or self._matcher.stop_reason() not in NORMAL_STOP_REASONS:
            reason = self._matcher.get_error().partition("\n")[0] or self._matcher.stop_reason()
            why = "" if reason in NORMAL_STOP_REASONS else f" ({_join_messages_to_line([reason])})"
            part = "patternProperties" if self._kind == "JSON schema" else "recursive rules"
            raise ModelError(
                f"the {self._kind} leads to a text that cannot be completed{why}; simplify it, for example its {part}"
            )


def make_full_mask(token_count: int) -> npt.NDArray[np.uint32]:
    """Make the mask that allows the first `token_count` tokens; see `GrammarState.compute_mask`."""
    words = np.full(-(-token_count // 32), 0xFFFFFFFF, np.uint32)
    if token_count % 32:
        words[-1] = (1 << token_count % 32) - 1
    return words


def _join_messages_to_line(messages: list[str]) -> str:
    """Join messages of llguidance to one line of at most 200 characters."""
    return " ".join("; ".join(message.strip().removesuffix(".") for message in messages).split())[:200]


def _expand_name_patterns_to_properties(schema: object) -> object:
    """Replace patterns of a JSON schema that list names, such as ``^(a|b)$``, by one property for each name.

    The names move from `patternProperties` to `properties`. llguidance would otherwise offer one property too many
    after all names of such a pattern are used.
    """
    if isinstance(schema, list):
        return [_expand_name_patterns_to_properties(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    rewritten = {
        key: value
        if key in DATA_KEYWORDS
        else {name: _expand_name_patterns_to_properties(subschema) for name, subschema in value.items()}
        if key in SCHEMAS_BY_NAME and isinstance(value, Mapping)
        else _expand_name_patterns_to_properties(value)
        for key, value in schema.items()
        if not (key == "uniqueItems" and value is False)  # the default, which llguidance does not know
    }
    patterns, properties = rewritten.get("patternProperties"), rewritten.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return rewritten
    for pattern in list(patterns):
        if listed := NAME_LIST_PATTERN.fullmatch(pattern):
            subschema = patterns.pop(pattern)
            for name in (listed[1] or listed[2]).split("|"):
                both = {"allOf": [properties[name], subschema]} if name in properties else subschema
                properties = {**properties, name: both}
    return {**rewritten, "patternProperties": patterns, "properties": properties}
