"""Grammars that begin inside a text: a tool call is constrained from its first ``{`` on, the text around it is free.

llama-server calls this a lazy grammar. A call that begins in another form than JSON stays free.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...graph.lazy_dataclass import dataclass
from ..gguf.tokenization.tokenizer import Tokenizer
from .grammar import F32, Grammar, GrammarState, make_full_mask


@dataclass(frozen=True, slots=True, eq=False)
class LazyJsonGrammar:
    """A grammar of JSON objects that holds after each `trigger` in a text.

    - `tokenizer`: the tokenizer of the model; `grammar`: the grammar of an object.
    - `trigger`: the text before an object, such as ``<tool_call>``; white space may follow.
    - `open_thought`, `close_thought`: the marks of a thought at the beginning, in which triggers have no meaning.
    - `begins_in_thought`: whether the text begins inside a thought.
    """

    tokenizer: Tokenizer
    grammar: Grammar
    trigger: str
    open_thought: str = "<think>"
    close_thought: str = "</think>"
    begins_in_thought: bool = False

    @property
    def ignored_keywords_warning(self) -> str:
        """A warning about keywords of the JSON schema that are not enforced; an empty text if there are none."""
        return self.grammar.ignored_keywords_warning

    def make_state(self) -> LazyGrammarState:
        """Make the state of a new text, at its beginning."""
        return LazyGrammarState(self)


class LazyGrammarState:
    """The state of one text with a lazy grammar; it has the methods of `GrammarState`."""

    def __init__(self, lazy: LazyJsonGrammar) -> None:
        self._lazy = lazy
        self._trigger, self._close_thought = lazy.trigger.encode(), lazy.close_thought.encode()
        self._open_thought = lazy.open_thought.encode()
        self._tail = b""
        """The last bytes of the free text, which may begin a trigger or a mark; after a trigger, the white space."""
        self._mode = "thought" if lazy.begins_in_thought else "begin"
        """``begin``, ``thought``, ``free`` or ``triggered`` (between the trigger and the object)."""
        self._object: GrammarState | None = None
        """The state of the object that the text is writing."""

    @property
    def is_constrained(self) -> bool:
        """Whether the grammar constrains the next token, because the text is inside a JSON object."""
        return self._object is not None

    def mask_logits(self, logits: F32) -> F32:
        """Mask logits as `GrammarState.mask_logits` inside an object, and return them unchanged elsewhere.

        Raises:
            ModelError: As `GrammarState.mask_logits`.
        """
        return logits if self._object is None else self._object.mask_logits(logits)

    def compute_mask(self, token_count: int) -> npt.NDArray[np.uint32]:
        """Compute the mask as `GrammarState.compute_mask` inside an object; elsewhere it allows all tokens.

        Raises:
            ModelError: As `GrammarState.mask_logits`.
        """
        return make_full_mask(token_count) if self._object is None else self._object.compute_mask(token_count)

    def accept_token_and_can_continue(self, token: int) -> bool:
        """Accept `token` as the next token of the text, and return True, because free text may always follow.

        Raises:
            ModelError: As `GrammarState.accept_token_and_can_continue`.
        """
        if self._object is None:
            self._tail += self._lazy.tokenizer.token_bytes(token)
            self._scan_for_thought_end_trigger_and_object()
        elif not self._object.accept_token_and_can_continue(token):
            self._object, self._mode = None, "free"
        return True

    def _scan_for_thought_end_trigger_and_object(self) -> None:
        """Scan the bytes in `_tail` for the end of a thought, then a trigger, then the beginning of an object.

        Scanned bytes are removed. Bytes that may begin a mark stay until further bytes decide.
        """
        if self._mode == "begin":
            text = self._tail.lstrip()
            if self._open_thought.startswith(text) and text != self._open_thought:
                return
            self._mode = "thought" if text.startswith(self._open_thought) else "free"
        if self._mode == "thought" and self._consume_through_mark(self._close_thought):
            self._mode = "free"
        if self._mode == "free" and self._consume_through_mark(self._trigger):
            self._mode = "triggered"
        if self._mode == "triggered" and (text := self._tail.lstrip()):
            self._mode, self._tail = "free", b""
            if text.startswith(b"{"):
                self._start_grammar_at_object(text)

    def _consume_through_mark(self, mark: bytes) -> bool:
        """Remove the bytes up to the end of `mark` and return True, or keep the bytes that may begin it."""
        _, found, after = self._tail.partition(mark)
        self._tail = after if found else self._tail[-(len(mark) - 1) :]
        return bool(found)

    def _start_grammar_at_object(self, text: bytes) -> None:
        """Start to constrain the text by the grammar, at an object that begins with `text`.

        Nothing changes if the grammar forbids this beginning.
        """
        try:
            tokens = self._lazy.tokenizer.encode_continuation(text.decode())
        except UnicodeDecodeError:
            return
        state = self._lazy.grammar.make_state()
        if state.accept_first_tokens_and_can_continue(tokens):
            self._object = state
