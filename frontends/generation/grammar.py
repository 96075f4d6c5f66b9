"""Texts that follow a grammar or a JSON schema: which tokens may come next, told by llguidance (an extra)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ModelError
from ..gguf.special_tokens import CONTROL
from ..gguf.tokenizer import Tokenizer

COMPACT = {"whitespace_flexible": False}
"""How JSON is laid out: a small model would rather write line breaks for ever than a value."""
F32 = npt.NDArray[np.float32]


class _Words:
    """A tokenizer as llguidance wants it: the bytes of every token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id if tokenizer.eos_id is not None else tokenizer.n_tokens - 1
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_tokens)]
        self.special_token_ids = [i for i, kind in enumerate(tokenizer.types) if kind == CONTROL]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)


class Grammar:
    """What texts may be: one grammar (GBNF as llama.cpp reads it, or Lark) or one JSON schema.

    Raises `ModelError` if it is wrong, or if llguidance is not installed.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, grammar: str = "", json_schema: str | Mapping[str, object] = ""
    ) -> None:
        try:
            import llguidance
            from llguidance.gbnf_to_lark import any_to_lark
        except ImportError:
            raise ModelError("grammars need llguidance; run pip install hocket[grammar]") from None
        compiler: Any = llguidance.LLMatcher
        ends = sorted(tokenizer.eos_ids) or None
        words = llguidance.TokenizerWrapper(_Words(tokenizer))
        self._words = llguidance.LLTokenizer(words, tokenizer.n_tokens, ends)
        self._matcher = compiler
        try:
            if grammar:
                self._rules = compiler.grammar_from_lark(any_to_lark(grammar))
            else:
                schema = json.loads(json_schema) if isinstance(json_schema, str) else json_schema
                self._rules = compiler.grammar_from_json_schema(json.dumps(schema), defaults=COMPACT)
            wrong = compiler.validate_grammar(self._rules, self._words)
        except Exception as why:  # of whatever kind, it is of the grammar's text
            wrong = str(why)
        if wrong:
            what = "grammar" if grammar else "JSON schema"
            raise ModelError(f"the {what} is wrong: {' '.join(wrong.split())[:200]}; correct it")

    def begin(self) -> Follower:
        """A text that begins."""
        return Follower(self._matcher(self._words, self._rules), self._words.vocab_size)


class Follower:
    """One text as it follows a grammar."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros((vocabulary + 31) // 32, np.uint32)
        self._vocabulary = vocabulary

    def allowed(self, logits: F32) -> F32:
        """A copy of logits f32[vocabulary] in which tokens that may not come next have none.  Raises `ModelError` where
        none may."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        may = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocabulary].astype(bool)
        if not may.any():
            raise ModelError("the grammar allows no token of this model here; choose another")
        kept = np.full_like(logits, -np.inf)
        kept[: self._vocabulary][may] = logits[: self._vocabulary][may]
        return kept

    def take(self, token: int) -> bool:
        """Go on behind `token`; whether more may come."""
        self._matcher.consume_token(token)
        return not self._matcher.is_stopped()
