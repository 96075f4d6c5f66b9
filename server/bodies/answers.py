"""Parser of generated answers: it splits the text into thoughts, content and tool calls while it is generated.

Forms of tool calls:

- Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``
- Qwen3-Coder: ``<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>``
- Llama 3: the JSON object is the whole answer.

Arguments in JSON are passed on verbatim, piece by piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import field

from ...graph.lazy_dataclass import dataclass
from .generic_tools import CLOSE_CALL, OPEN_CALL
from .messages import CLOSE_THOUGHT, OPEN_THOUGHT

MARKERS = (OPEN_THOUGHT, CLOSE_THOUGHT, OPEN_CALL, CLOSE_CALL)
"""Texts of tokens that an answer shows even if the vocabulary calls them control tokens."""
CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')
"""Pattern of the beginning of a tool call up to its arguments."""
SPACE, LINE_BREAKS = " \t\r\n", "\r\n"
XML_CALL = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A new piece of a parsed answer, as the streaming APIs send it.

    `kind` is ``content``, ``reasoning``, ``call`` (`text` is the name of tool call number `index`) or ``arguments``
    (`text` is a piece of the arguments of that call).
    """

    kind: str
    text: str
    index: int = 0


class JsonValueScanner:
    """Finds the end of one JSON value in a text that arrives in pieces; each call of `feed` takes one piece."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth, self._in_text, self._escapes, self._is_scalar = 0, False, False, False

    def feed(self, text: str) -> int:
        """Scan the next piece of text, and return how many of its first characters belong to the JSON value."""
        for i, char in enumerate(text):
            if self._in_text:
                self._in_text = self._escapes or char != '"'
                self._escapes = char == "\\" and not self._escapes
            elif char in "{[":
                self._depth += 1
            elif char == '"':
                self._in_text = True
            elif char in "}]" or (self._is_scalar and char == ","):
                if not self._depth:  # the end of the object around a scalar
                    self.is_complete = True
                    return i
                self._depth -= char in "}]"
            elif not self._depth:
                self._is_scalar = True
                continue
            if not self._depth and not self._in_text and not self._is_scalar:
                self.is_complete = True
                return i + 1
        return len(text)


@dataclass(frozen=True, slots=True)
class AnswerParserOptions:
    """The parts that the text of an answer may have.

    - `has_thoughts`: whether the text may begin with ``<think>``.
    - `opens_thought`: whether the text begins inside a thought, because the prompt ends with ``<think>``.
    - `has_calls`: whether ``<tool_call>`` begins a tool call.
    - `has_bare_calls`: whether an answer that begins with ``{`` may be a tool call.
    - `is_call`: whether the whole text is one tool call, without markers; an incomplete one gives no content.
    - `max_calls`: the largest number of tool calls; the text of further ones is content.
    - `text_parameters`: the names of the string parameters of each function.
    """

    has_thoughts: bool = False
    opens_thought: bool = False
    has_calls: bool = False
    has_bare_calls: bool = False
    is_call: bool = False
    max_calls: int = 128
    text_parameters: Mapping[str, frozenset[str]] = field(default_factory=dict)


class AnswerParser:
    """An incremental parser that splits the text of one answer into content, thoughts and tool calls.

    It receives the text in pieces and returns them as deltas.
    """

    def __init__(self, options: AnswerParserOptions) -> None:
        self.call_count = 0
        """Complete tool calls."""
        self._options, self._begun_calls, self._pending, self._is_call = options, 0, "", options.is_call
        self._span: JsonValueScanner | None = None
        self._mode = "call" if options.is_call else "thought" if options.opens_thought else "begin"
        self._may_think = options.has_thoughts
        self._stripped = SPACE if options.opens_thought else ""
        """Characters that are removed before the next text."""

    def feed(self, text: str) -> list[AnswerDelta]:
        """Add a piece of text, and return the deltas that no later text can change."""
        self._pending += text
        return merge_deltas(self._parse())

    def finish(self) -> list[AnswerDelta]:
        """Return the deltas of the text that is still pending when the answer ends."""
        deltas = list(self._parse())
        rest, self._pending = self._pending, ""
        if self._mode == "call" and self._span is None:
            deltas += self._parse_complete_call(rest)
        elif self._mode in ("begin", "content", "thought") and rest:
            deltas.append(AnswerDelta("reasoning" if self._mode == "thought" else "content", rest))
        return merge_deltas(deltas)

    def _parse(self) -> Iterator[AnswerDelta]:
        while True:
            mode, length = self._mode, len(self._pending)
            yield from getattr(self, f"_parse_{mode}")()
            if self._mode == mode and (not self._pending or len(self._pending) == length):
                return

    def _parse_begin(self) -> Iterator[AnswerDelta]:
        """Parse the beginning of the answer: decide whether it is a thought, a bare tool call or content."""
        text = self._pending.lstrip()
        if self._may_think and text.startswith(OPEN_THOUGHT):
            self._pending, self._mode, self._stripped = text.removeprefix(OPEN_THOUGHT), "thought", SPACE
        elif self._options.has_bare_calls and text.startswith("{"):
            self._mode, self._is_call = "call", True
        elif not (self._may_think or self._options.has_bare_calls) or (text and not OPEN_THOUGHT.startswith(text)):
            self._mode = "content"
        yield from ()

    def _parse_thought(self) -> Iterator[AnswerDelta]:
        self._pending = self._pending.lstrip(self._stripped) if self._stripped else self._pending
        thought, marker = self._take_text_and_marker(CLOSE_THOUGHT)
        if marker:
            thought = thought.rstrip()
        else:  # white space at the end may be the end of the thought
            stripped = thought.rstrip()
            self._pending = thought[len(stripped) :] + self._pending
            thought = stripped
        if thought:
            self._stripped = ""
            yield AnswerDelta("reasoning", thought)
        if marker:
            self._mode, self._may_think = "begin" if self._options.has_bare_calls else "content", False
            self._stripped = LINE_BREAKS

    def _parse_content(self) -> Iterator[AnswerDelta]:
        self._pending = self._pending.lstrip(self._stripped) if self._stripped else self._pending
        if not self._options.has_calls or self._begun_calls >= self._options.max_calls:
            text, marker = self._pending, ""
            self._pending = ""
        else:  # white space before a call has no meaning
            whole, marker = self._take_text_and_marker(OPEN_CALL)
            text = whole.rstrip()
            self._pending = self._pending if marker else whole[len(text) :] + self._pending
        if text:
            self._stripped = ""
            yield AnswerDelta("content", text)
        if marker:
            self._mode, self._span = "call", None

    def _parse_call(self) -> Iterator[AnswerDelta]:
        """Parse a tool call: yield its name, then its arguments as they arrive."""
        if self._span is None:
            if head := CALL_HEAD.match(self._pending):
                self._pending = self._pending[head.end() :]
                if self._pending.startswith('"'):  # the arguments are JSON within a text
                    self._pending = head[0] + self._pending
                else:
                    self._span = JsonValueScanner()
                    yield AnswerDelta("call", json.loads(head[1], strict=False), self._begun_calls)
                    self._begun_calls += 1
            if self._span is None:
                if not self._is_call and CLOSE_CALL in self._pending:
                    whole, _, self._pending = self._pending.partition(CLOSE_CALL)
                    self._mode, self._stripped = "content", SPACE
                    yield from self._parse_complete_call(whole)
                return
        if not self._span.is_complete:
            count = self._span.feed(self._pending)
            new, self._pending = self._pending[:count], self._pending[count:]
            self.call_count += self._span.is_complete
            if new:
                yield AnswerDelta("arguments", new, self._begun_calls - 1)
        if self._span.is_complete:
            if self._is_call:
                self._pending = ""
            elif CLOSE_CALL in self._pending:
                self._pending = self._pending.partition(CLOSE_CALL)[2]
                self._mode, self._stripped, self._span = "content", SPACE, None

    def _parse_complete_call(self, text: str) -> list[AnswerDelta]:
        """Parse a tool call that has arrived completely, in JSON or XML form.

        Any other text gives content. An incomplete call gives nothing if the whole answer must be a call.
        """
        try:
            call = json.loads(text, strict=False)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            name, arguments = self._parse_qwen3_coder_call(text)
        if not isinstance(name, str):
            if self._options.is_call:  # the limit has cut the call before its arguments
                return []
            if self._is_call:
                return [AnswerDelta("content", text)] if text else []
            return [AnswerDelta("content", f"{OPEN_CALL}{text}{CLOSE_CALL if self._mode == 'content' else ''}")]
        index, self._begun_calls = self._begun_calls, self._begun_calls + 1
        self.call_count += 1
        whole = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return [AnswerDelta("call", name, index), AnswerDelta("arguments", whole, index)]

    def _parse_qwen3_coder_call(self, text: str) -> tuple[str | None, dict[str, object]]:
        """Return the name and the arguments of a tool call of Qwen3-Coder.

        The name is None if the text has another form. Values are parsed as JSON unless the parameter is a string.
        """
        if (call := XML_CALL.fullmatch(text)) is None:
            return None, {}
        arguments: dict[str, object] = {}
        for name, value in XML_PARAMETER.findall(call[2]):
            arguments[name] = value
            if name not in self._options.text_parameters.get(call[1], frozenset()):
                with suppress(ValueError, RecursionError):
                    arguments[name] = json.loads(value)
        return call[1], arguments

    def _take_text_and_marker(self, marker: str) -> tuple[str, str]:
        """Remove the pending text before `marker`, and return it with the marker.

        If the marker is not complete, it is returned as an empty text. A beginning of it at the end of the text stays
        pending.
        """
        before, found, after = self._pending.partition(marker)
        if found:
            self._pending = after
            return before, found
        length = len(before) - next((n for n in range(len(marker) - 1, 0, -1) if before.endswith(marker[:n])), 0)
        self._pending = before[length:]
        return before[:length], ""


def merge_deltas(deltas: Iterator[AnswerDelta] | list[AnswerDelta]) -> list[AnswerDelta]:
    """Merge adjacent deltas of the same kind and call number into one."""
    merged: list[AnswerDelta] = []
    for delta in deltas:
        if merged and delta.kind != "call" and (merged[-1].kind, merged[-1].index) == (delta.kind, delta.index):
            merged[-1] = AnswerDelta(delta.kind, merged[-1].text + delta.text, delta.index)
        else:
            merged.append(delta)
    return merged
